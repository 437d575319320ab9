"""Read safetensors files into arrays that are placed, a bounded piece at a time.

A leaf is one tensor, or a stack of tensors over its leading axes (layers; layers and experts). What a device holds of
it is made there, as zeros, and written over in place by pieces of at most `PIECE_BYTES`: each is read from the mapped
file, cast, sent, and gone before the next. So the host holds a few pieces beside the placed arrays, also where the
device is the CPU. A leaf in the host memory of a device is read as a whole, since only its device could write into it.

What should happen to a tensor on the way (a cast; later a quantisation) happens in `_read_part`, of pieces.

Known inefficiency: reading waits for what was sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ..core import ModelFileError, format_bytes, shortened, shown

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of dtypes in the files, and here."""
PIECE_BYTES = 64 * 1024**2
"""The most bytes that are read or written at once, unless one row of a tensor has more."""
_Pieces = Iterator[tuple[tuple[int, ...], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of a file that is open."""

    name: str
    file: Path
    handle: Any

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """As the file's header has it."""
        return tuple(self.handle.get_slice(self.name).get_shape())

    @functools.cached_property
    def dtype(self) -> str:
        """As the file's header has it, such as ``"BF16"``."""
        return self.handle.get_slice(self.name).get_dtype()

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into memory; nothing else of the tensor is."""
        return np.asarray(self.handle.get_slice(self.name)[index] if index else self.handle.get_tensor(self.name))


@contextlib.contextmanager
def open_tensors(files: Sequence[Path]) -> Generator[dict[str, Source], None, None]:
    """All tensors of some safetensors files, by name.

    The library reads the headers and checks, before anything is allocated, that the tensors' offsets follow one
    another without a gap, fit their dtypes and shapes, and end where the file ends.

    Raises:
        ModelFileError: for a file that cannot be read or is not complete, and a tensor that is in two of them.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Source] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except PermissionError as error:
                raise ModelFileError(
                    f"{file}: cannot be read", got=error.strerror or error, hint="check the file's permissions"
                ) from error
            except (SafetensorError, OSError) as error:
                raise ModelFileError(
                    f"{file}: not a complete safetensors file",
                    got=f"{shortened(error)} ({format_bytes(file.stat().st_size)} on disk)",
                    hint="the file is truncated or damaged; download it again",
                ) from error
            names = handle.keys()
            for name in tensors.keys() & set(names):
                raise ModelFileError(
                    f"{file}: {shown(name)} is in another shard, too",
                    got=f"{tensors[name].file.name} and {file.name}",
                    hint="shards of two models are in one folder; download it again",
                )
            tensors |= {name: Source(name, file, handle) for name in names}
        yield tensors


def stored_dtype(sources: Sequence[Source]) -> Any:
    """Dtype that holds all tensors of a stack without losing digits."""
    return jnp.result_type(*sorted({DTYPES[source.dtype] for source in sources}))


def read_leaf(
    sources: Sequence[Source], shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Read one leaf to where it belongs.

    Args:
        sources: its tensors, all of one shape, in the order of the axes that they are stacked over.
        shape: of the leaf: the axes of the stack, then those of a tensor.
        dtype: of the leaf; tensors are cast on the way.
        sharding: where it belongs, or None for JAX's default device.

    Returns:
        The array, of which this process has read what its devices hold.

    Memory:
        On the host a few times `PIECE_BYTES`, and beside them what one device holds of a leaf in host memory.
    """
    part = functools.partial(_read_part, sources, shape, jnp.dtype(dtype))
    whole = tuple(slice(0, size) for size in shape)
    if sharding is None:
        return _filled(part, whole, dtype, [None])[0]
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # what several devices hold is read once
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        plain = _plain(index or (), shape)
        holders.setdefault(tuple((axis.start, axis.stop) for axis in plain), []).append(device)
    kind = sharding.memory_kind
    parts: list[jax.Array] = []
    for bounds, devices in holders.items():
        places = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        parts += _filled(part, tuple(slice(*bound) for bound in bounds), dtype, places)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return parts[0]  # assembled by JAX (0.10 at least), its type would say that it is in the device's memory
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def is_staged(sharding: jax.sharding.Sharding) -> bool:
    """Whether a leaf is assembled as a whole before it is placed: in host memory nothing is written in place."""
    return sharding.memory_kind == "pinned_host"


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Cut a tensor along its first axis into parts of at most `PIECE_BYTES`, or one row."""
    if not shape:
        yield ()
        return
    row = max(1, math.prod(shape[1:]) * itemsize)
    rows = max(1, PIECE_BYTES // row)
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))


def _read_part(
    sources: Sequence[Source], shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]
) -> _Pieces:
    """Read a part of a leaf, as pieces and where in the part they begin."""
    stack = len(shape) - len(sources[0].shape)
    sizes = tuple(axis.stop - axis.start for axis in index)
    for at in itertools.product(*(range(size) for size in sizes[:stack])):
        layer = [axis.start + i for axis, i in zip(index[:stack], at, strict=True)]
        source = sources[int(np.ravel_multi_index(layer, shape[:stack])) if stack else 0]
        for cut in pieces(sizes[stack:], max(dtype.itemsize, jnp.dtype(DTYPES[source.dtype]).itemsize)):
            inside = tuple(
                slice(axis.start + own.start, axis.start + own.stop)
                for axis, own in zip(index[stack:], cut, strict=True)
            )
            values = source.read(inside).astype(dtype, copy=False)
            yield (*at, *(own.start for own in cut)), values.reshape((1,) * stack + values.shape)


def _filled(
    part: Callable[[tuple[slice, ...]], _Pieces],
    index: tuple[slice, ...],
    dtype: Any,
    places: Sequence[jax.sharding.Sharding | None],
) -> list[jax.Array]:
    """Make a part of a leaf in each of some places."""
    shape = tuple(axis.stop - axis.start for axis in index)
    is_small = math.prod(shape) * jnp.dtype(dtype).itemsize <= PIECE_BYTES  # one transfer, and nothing to compile
    if is_small or any(place is not None and is_staged(place) for place in places):
        whole = _assembled(part, index, dtype)
        arrays = [jnp.asarray(whole) if place is None else jax.device_put(whole, place) for place in places]
        return jax.block_until_ready(arrays)
    arrays = [jnp.zeros(shape, dtype, device=place) for place in places]
    for start, values in part(index):
        arrays = [_written(array, values, tuple(np.int32(i) for i in start)) for array in arrays]
        jax.block_until_ready(arrays)  # else pieces queue up
    return arrays


def _assembled(part: Callable[[tuple[slice, ...]], _Pieces], index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Make a part of a leaf on the host."""
    whole = np.empty(tuple(axis.stop - axis.start for axis in index), dtype)
    for start, values in part(index):
        whole[tuple(slice(i, i + size) for i, size in zip(start, values.shape, strict=True))] = values
    return whole


@functools.partial(jax.jit, donate_argnums=0)
def _written(whole: Any, piece: Any, start: tuple[Any, ...]) -> Any:
    return jax.lax.dynamic_update_slice(whole, piece, start)


def _plain(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Give every axis of an index a start and an end."""
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(full, shape, strict=True))
