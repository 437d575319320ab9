"""Read safetensors files into arrays on devices, and write the files of a model, in pieces of bounded size.

A leaf is one tensor, or a stack of tensors over its leading axes (layers, or layers and experts). `core.assemble`
builds the leaf on its devices from pieces of at most `PIECE_BYTES`. `_read_part` reads and casts each piece. Classes
that compute a tensor from the file, such as dequantised weights, also read one piece at a time (`Readable`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ..core import (
    PIECE_BYTES,
    ModelFileError,
    OutputError,
    Pieces,
    assemble,
    check_choice,
    format_bytes,
    on_host,
    shortened,
    shown,
)

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""NumPy names of the dtypes in safetensors headers."""
_OTHER_ITEMSIZES = {"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}
"""Bytes per element of other dtypes, which occur in checkpoints of quantised weights."""


class Readable(Protocol):
    """A tensor, or the result of a computation on tensors, that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes of host memory per element while a piece is read."""
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
        return jnp.dtype(DTYPES[self.dtype]).itemsize if self.dtype in DTYPES else _OTHER_ITEMSIZES.get(self.dtype, 8)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @functools.cached_property
    def _start(self) -> int:
        """Return the tensor's offset in the file, in bytes; safetensors has already checked the header."""
        with open(self.file, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length + json.loads(file.read(length))[self.name]["data_offsets"][0]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Copy only this part of the tensor into host memory; 8-bit floats (E4M3) are returned as uint8."""
        if self.dtype == "F8_E4M3":  # the library has no NumPy dtype for it
            return np.array(np.memmap(self.file, np.uint8, "r", self._start, self.shape)[index])
        return np.asarray(self.handle.get_slice(self.name)[index] if index else self.handle.get_tensor(self.name))


class ExpertSource(Source):
    """Rows of one expert in a tensor [E, rows, in] that holds all experts of a layer."""

    def __init__(self, source: Source, expert: int, start: int, stop: int) -> None:
        super().__init__(source.name, source.file, source.handle)
        self._position = (slice(expert, expert + 1), slice(start, stop))

    @functools.cached_property
    def _shape(self) -> tuple[int, ...]:
        rows = self._position[1]
        return (rows.stop - rows.start, *super()._shape[2:])

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index or (slice(None),)
        start, stop, _ = rows.indices(self._shape[0])
        offset = self._position[1].start
        return super().read((self._position[0], slice(offset + start, offset + stop), *others))[0]


@contextlib.contextmanager
def open_tensors(files: Sequence[Path]) -> Generator[dict[str, Source], None, None]:
    """Open safetensors files and yield their tensors by name; bad files and repeated tensors raise ModelFileError."""
    # Before anything is allocated, safetensors checks each header: offsets follow one another without a gap, fit the
    # dtypes and shapes, and end where the file ends.
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Source] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except PermissionError as error:
                raise ModelFileError(f"{file}: cannot be read: {error}", hint="check the file's permissions") from error
            except (SafetensorError, OSError) as error:
                got = f"{shortened(error)} ({format_bytes(file.stat().st_size)} on disk)"
                hint = "the file is truncated or damaged; download it again"
                raise ModelFileError(f"{file}: not a complete safetensors file", got=got, hint=hint) from error
            names = handle.keys()
            for name in tensors.keys() & set(names):
                problem = f"{file}: {shown(name)} is also in another shard, {tensors[name].file.name}"
                raise ModelFileError(problem, hint="shards of two models are in one folder; download it again")
            tensors |= {name: Source(name, file, handle) for name in names}
        yield tensors


def read_leaf(
    sources: Sequence[Readable], shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Read the parts of a leaf that this process's devices hold; a `sharding` of None is JAX's default device.

    `sources` are the leaf's tensors in row-major order of the stack axes. Host memory: a few times `PIECE_BYTES`; for a
    leaf in host memory also the bytes that one device holds of the leaf.
    """
    return assemble(functools.partial(_read_part, sources, shape, jnp.dtype(dtype)), shape, dtype, sharding)


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut a tensor along its first axis into parts of at most `PIECE_BYTES`, but at least one row."""
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
    """Yield ``(start, values)`` for each piece of a part of a leaf; `start` is an index inside the part."""
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


# The safetensors library writes a file only from tensors that are all in memory. So this module writes files in pieces:
# the length of the header in eight bytes, the header in JSON, and the tensors
# (https://github.com/huggingface/safetensors#format). The library reads back each header before the file gets its final
# name. All files are complete under temporary names, and on the disk, before anything of an older model changes. Shards
# get names that no older file has. So one rename, of the index or of the single file, switches from the old to the new
# model. If `config.json` or the tokenizer differ, they cannot change in the same moment. Then `config.json` is deleted
# before the switch, and the new `config.json` is renamed last. A reader in between finds no model.
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_SHARD = re.compile(r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors")
_TEMPORARY_PREFIX = ".saving-"
"""Prefix of incomplete files; no software recognises them as part of a model."""
_DTYPE_CODES = {name: code for code, name in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write: a leaf, or the slice of a stacked leaf at `index`."""

    name: str
    leaf: Any
    index: tuple[int, ...] = ()
    rounded: str | None = None
    """Dtype in the file if it differs from the dtype of the leaf."""

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.rounded or self.leaf.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape[len(self.index) :])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self) -> Iterator[np.ndarray]:
        """Yield pieces of the tensor, along its first axis, as NumPy arrays."""
        leaf, count = self.leaf, len(self.index)
        is_on_host = isinstance(leaf, np.ndarray) or _shares_memory(leaf)
        array = np.asarray(leaf)[self.index] if is_on_host else None
        for piece in pieces(self.shape, jnp.dtype(leaf.dtype).itemsize):
            if array is not None:
                yield np.ascontiguousarray(array[piece], self.dtype)
                continue
            # Starts are traced and sizes static: one compiled program cuts all pieces of one size.
            start = (*self.index, *(axis.start for axis in piece))
            sizes = (1,) * count + tuple(axis.stop - axis.start for axis in piece)
            yield np.ascontiguousarray(_slice_to_device(leaf, tuple(np.int32(i) for i in start), sizes), self.dtype)


def write_model(
    directory: Path, tensors: Sequence[Tensor], files: Mapping[str, bytes], *, max_shard_bytes: int
) -> None:
    """Write a model's weights and other files, including `config.json`, and replace an older model in the directory.

    If this fails before the final renames, the older model is intact. Host memory: a few pieces (`PIECE_BYTES`).
    """
    for tensor in tensors:
        hint = "cast the model before it is saved"
        check_choice(f"dtype of {tensor.name}", tensor.dtype.name, [*_DTYPE_CODES], hint=hint, error=ModelFileError)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_TEMPORARY_PREFIX}*"):  # from a save that was killed
            leftover.unlink()
        shards = _split_into_shards(tensors, max_shard_bytes)
        num_bytes = sum(map(len, files.values())) + sum(tensor.num_bytes for tensor in tensors)
        num_bytes += sum(len(_encode_header(shard)) for shard in shards)
        free = shutil.disk_usage(directory).free
        if num_bytes > free:
            problem = f"{directory}: the model needs {format_bytes(num_bytes)}, but only {format_bytes(free)} are free"
            hint = "choose another folder; an older model in this one stays until the new one is complete"
            raise OutputError(problem, hint=hint)
        names = _unused_names(directory, len(shards))
        try:
            for name, shard in zip(names, shards, strict=True):
                _write_shard(directory / f"{_TEMPORARY_PREFIX}{name}", shard)
            other_files = dict(files)
            if len(shards) > 1:
                weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
                metadata = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
                index = {"metadata": metadata, "weight_map": weight_map}
                other_files[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
            for name, content in other_files.items():
                with _create_synced(directory / f"{_TEMPORARY_PREFIX}{name}") as file:
                    file.write(content)
            _commit_files(directory, names, other_files)
        finally:
            for leftover in directory.glob(f"{_TEMPORARY_PREFIX}*"):
                leftover.unlink()
    except OSError as error:
        raise OutputError(f"{directory}: cannot write the model: {error}", hint="choose another folder") from error


def _split_into_shards(tensors: Sequence[Tensor], max_shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    # Wide dtypes come first, as in files by the library, so each tensor starts at a multiple of its element size.
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _unused_names(directory: Path, count: int) -> list[str]:
    """Return names for shards that no file in the directory has; a single shard has the name `SINGLE`."""
    if count == 1:
        return [SINGLE]
    prefixes = itertools.chain([""], (f"{generation}-" for generation in itertools.count(2)))
    shards = ([f"model-{prefix}{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] for prefix in prefixes)
    return next(names for names in shards if not any(os.path.lexists(directory / name) for name in names))


def _encode_header(shard: Sequence[Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        start, end = end, end + tensor.num_bytes
        dtype_code = _DTYPE_CODES[tensor.dtype.name]
        entries[tensor.name] = {"dtype": dtype_code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors in the mapped file
    return len(text).to_bytes(8, "little") + text


def _write_shard(path: Path, shard: Sequence[Tensor]) -> None:
    """Write one file, then check its header with the safetensors library."""
    with _create_synced(path) as file:
        file.write(_encode_header(shard))
        for tensor in shard:
            for part in tensor.parts():
                file.write(part.reshape(-1).view(np.uint8).data)
    with open_tensors([path]) as tensors:
        shapes = {tensor.name: tensor.shape for tensor in shard}
        assert {name: source.shape for name, source in tensors.items()} == shapes


def _commit_files(directory: Path, names: Sequence[str], other_files: Mapping[str, bytes]) -> None:
    """Give complete files their final names; comments name the model that a reader finds after each step."""

    def rename(name: str) -> None:
        os.replace(directory / f"{_TEMPORARY_PREFIX}{name}", directory / name)

    shards, commit_name = ([], SINGLE) if len(names) == 1 else (names, INDEX)
    # `config.json` comes last, since a folder without it holds no model.
    side_files = sorted((name for name in other_files if name != INDEX), key=lambda name: name == CONFIG)
    for name in shards:
        rename(name)  # the old model: no index lists these shards yet
    _sync_directory(directory)
    old_files = {name: (directory / name).read_bytes() for name in side_files if (directory / name).exists()}
    if any(old_files.get(name) != other_files[name] for name in side_files):
        (directory / CONFIG).unlink(missing_ok=True)  # no model
    rename(commit_name)
    # Delete an older model in the other layout (single file or index), which software might read instead.
    (directory / (INDEX if commit_name == SINGLE else SINGLE)).unlink(missing_ok=True)
    _sync_directory(directory)
    for name in side_files:
        rename(name)  # the new model, as soon as `config.json` is there, which is last
    _sync_directory(directory)
    for path in directory.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in shards:
            path.unlink()


@contextlib.contextmanager
def _create_synced(path: Path) -> Generator[BinaryIO]:
    """Create a file that is flushed to the disk when it is closed."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    """Flush the directory's file names, so that they survive a power cut, if the file system supports this."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _shares_memory(leaf: Any) -> bool:
    """Return whether NumPy can view a leaf without a copy."""
    devices = leaf.sharding.device_set
    return len(devices) == 1 and not on_host(leaf.sharding) and next(iter(devices)).platform == "cpu"


@functools.partial(jax.jit, static_argnums=2)
def _slice_to_device(leaf: Any, start: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    # JAX keeps the host copy of an array as long as the array lives, so only temporary slices are copied to the host.
    return jax.device_put(jax.lax.dynamic_slice(leaf, start, sizes), jax.memory.Space.Device)
