"""Read safetensors files into placed arrays, in pieces of bounded size.

A leaf is one tensor, or a stack of tensors over its leading axes (layers, or layers and experts). `core.assemble`
builds it on its devices from pieces of at most `PIECE_BYTES`. `_read_part` reads each piece from the mapped file and
casts it. Anything else that changes tensors while they are read, such as quantisation, also works on these pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ..core import PIECE_BYTES, ModelFileError, Pieces, assemble, format_bytes, shortened, shown

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""NumPy names of the dtypes in safetensors headers."""
_OTHER_ITEMSIZES = {"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
"""Bytes per element of other dtypes; quantised weights are stored in those of 8 bits, among others."""


class Readable(Protocol):
    """A tensor, or the result of a computation on tensors, that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes per element while it is read."""
        ...

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part into host memory."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor in an open safetensors file."""

    name: str
    file: Path
    handle: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file's header."""
        return self._shape

    @functools.cached_property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self.handle.get_slice(self.name).get_shape())

    @functools.cached_property
    def dtype(self) -> str:
        """Dtype in the file's header, such as ``"BF16"``."""
        return self.handle.get_slice(self.name).get_dtype()

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return jnp.dtype(DTYPES[self.dtype]).itemsize if self.dtype in DTYPES else _OTHER_ITEMSIZES.get(self.dtype, 8)

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.shape) * self.itemsize

    @functools.cached_property
    def _start(self) -> int:
        """Return the tensor's offset in the file; safetensors has already checked the header."""
        with open(self.file, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length + json.loads(file.read(length))[self.name]["data_offsets"][0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy a part of the tensor into host memory, and nothing else; 8-bit floats are returned as their bits."""
        if self.dtype == "F8_E4M3":  # the library has no NumPy dtype for it
            return np.array(np.memmap(self.file, np.uint8, "r", self._start, self.shape)[index])
        return np.asarray(self.handle.get_slice(self.name)[index] if index else self.handle.get_tensor(self.name))


@contextlib.contextmanager
def open_tensors(files: Sequence[Path]) -> Generator[dict[str, Source], None, None]:
    """Open safetensors files and yield their tensors by name; a bad file or a duplicate tensor raises ModelFileError.

    Before anything is allocated, safetensors checks each header: offsets follow one another without a gap, fit the
    dtypes and shapes, and end where the file ends.
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
                    f"{file}: {shown(name)} is also in another shard",
                    got=f"{tensors[name].file.name} and {file.name}",
                    hint="shards of two models are in one folder; download it again",
                )
            tensors |= {name: Source(name, file, handle) for name in names}
        yield tensors


def stored_dtype(names: Iterable[str]) -> Any:
    """Return the dtype that holds values of all the given dtypes without losing digits."""
    return jnp.result_type(*sorted(set(names)))


def read_leaf(
    sources: Sequence[Readable], shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Read one leaf, with stack axes before tensor axes, from tensors in the order of the stack axes.

    This process reads only the parts that its devices hold. Host memory: a few times `PIECE_BYTES`; for a leaf in host
    memory also the bytes that one device holds of it.
    """
    return assemble(functools.partial(_read_part, sources, shape, jnp.dtype(dtype)), shape, dtype, sharding)


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut a tensor along its first axis into parts of at most `PIECE_BYTES`, or of one row."""
    if not shape:
        yield ()
        return
    row = max(1, math.prod(shape[1:]) * itemsize)
    rows = max(1, PIECE_BYTES // row)
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))


def _read_part(
    sources: Sequence[Readable], shape: tuple[int, ...], dtype: np.dtype[Any], index: tuple[slice, ...]
) -> Pieces:
    """Yield the pieces of a part of a leaf, each with its start inside that part."""
    num_stacked = len(shape) - len(sources[0].shape)
    sizes = tuple(axis.stop - axis.start for axis in index)
    for stack_index in itertools.product(*(range(size) for size in sizes[:num_stacked])):
        layer = [axis.start + i for axis, i in zip(index[:num_stacked], stack_index, strict=True)]
        source = sources[int(np.ravel_multi_index(layer, shape[:num_stacked])) if num_stacked else 0]
        for piece in pieces(sizes[num_stacked:], max(dtype.itemsize, source.itemsize)):
            source_index = tuple(
                slice(axis.start + piece_axis.start, axis.start + piece_axis.stop)
                for axis, piece_axis in zip(index[num_stacked:], piece, strict=True)
            )
            values = source.read(source_index).astype(dtype, copy=False)
            yield (*stack_index, *(axis.start for axis in piece)), values.reshape((1,) * num_stacked + values.shape)
