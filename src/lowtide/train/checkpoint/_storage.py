"""Stored form of a checkpoint: leaves by name in chunks, the reader of the chunks, and checksums of the files.

A state is stored as a flat dictionary from tree path to array. Orbax refuses leaves without elements, so they are not
stored, and a restore makes them from the expected structure. Orbax writes through TensorStore: one Zarr array for each
leaf, in one OCDBT database (see Orbax' documentation of its checkpoint format).
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...core import (
    Pieces,
    StructureError,
    Tree,
    assemble,
    is_stacked,
    leaves_with_paths,
    map_with_paths,
    model_part,
    on_host,
    write_files,
)

CHUNK_BYTES = 64 * 1024**2
"""Most bytes of a leaf that are compressed, written and read as one chunk; an axis of prime length may need more.
(Chunks of less than 32 MiB would cost memory: glibc keeps such blocks after they are freed.)"""
_COPY_BYTES = 512 * 1024**2
"""Host memory that a copy of the state may use, so that training continues during a save."""
_ROW_BYTES = 4 * 1024**2
"""If rows along the first axis have at least this size, no chunk spans two rows: then chunks are contiguous, and are
compressed without a copy."""
_LEAST_BYTES = 4 * 1024
"""Smaller chunks are avoided, because TensorStore needs 0.2 ms for each."""
_AHEAD_BYTES = 3 * CHUNK_BYTES // 2
"""Bytes of chunks that are read ahead while another chunk is placed; a larger chunk is read alone."""
_JOINED_BYTES = CHUNK_BYTES // 4
"""Smaller chunks are joined into one read, up to this size."""
CHECKSUMS = "checksums.json"
_UNVERIFIED = "_CHECKPOINT_METADATA"
"""File with Orbax's timestamps, without a checksum: it is written at the final rename, and no restore reads it."""
_BUFFER_BYTES, _NUM_THREADS = 1 << 22, 8


def flatten_state(state: Tree) -> dict[str, Any]:
    """Map names in the checkpoint to the leaves to store (those with elements); raise if two leaves share a name."""
    named_leaves: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(state):
        name = _name(path)
        if name in named_leaves:
            hint = "rename one of the two keys"
            raise StructureError(f"{path}: another leaf of the state is also stored as {name!r}", hint=hint)
        named_leaves[name] = leaf
    return {name: leaf for name, leaf in named_leaves.items() if leaf.size}


def largest_leaf(state: Tree) -> int:
    """Return the bytes of the largest leaf, all its shards together."""
    return max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), default=0)


def chunking(leaf: Any) -> dict[str, Any]:
    """Return the arguments of `SaveArgs` that decide how Orbax splits a leaf into chunks."""
    has_row_chunks = leaf.ndim > 0 and leaf.size * leaf.dtype.itemsize >= _ROW_BYTES * leaf.shape[0]
    limit, total = CHUNK_BYTES, _part_bytes(leaf)
    while total and _chunk_bytes(leaf, limit, has_row_chunks) < min(_LEAST_BYTES, CHUNK_BYTES, total) and limit < total:
        limit *= 2  # an axis of prime length is split into single elements or not at all
    return {"chunk_byte_size": limit, "shard_axes": (0,) if has_row_chunks else ()}


def _chunk_bytes(leaf: Any, limit: int, has_row_chunks: bool) -> int:
    """Return the bytes of a chunk as Orbax (0.11) splits a leaf: it divides axes evenly, the longest first."""
    dims = _part_shape(leaf)
    factors = [_divisors(size) for size in dims]  # the last divisor of each axis is the chunk's length
    is_cut = [size != full for size, full in zip(dims, leaf.shape, strict=True)]  # sharded axes are split before others
    if has_row_chunks:
        factors[0], is_cut[0] = [1], True
    while (num_bytes := math.prod(divisors[-1] for divisors in factors) * leaf.dtype.itemsize) > limit:
        divisible_axes = [axis for axis, divisors in enumerate(factors) if len(divisors) > 1]
        if not divisible_axes:
            break
        is_cut = is_cut if any(is_cut[axis] for axis in divisible_axes) else [True] * len(dims)
        axis = max((axis for axis in divisible_axes if is_cut[axis]), key=lambda axis: factors[axis][-1])
        factors[axis].pop()
        is_cut[axis] = True
    return num_bytes


def _divisors(number: int) -> list[int]:
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointBytes:
    """Upper bounds of a process's host memory for checkpoints, in addition to a state that is on the host itself."""

    saving: int
    """Bytes while a checkpoint is saved."""
    restoring: int
    """Bytes while a checkpoint is restored."""
    is_copied: bool
    """Whether the state is copied, so that training continues during a save. The copy has at most 512 MiB, or at most
    the bytes of the largest leaf. Otherwise training waits, and leaves are copied one after the other."""


def checkpoint_bytes(state: Tree) -> CheckpointBytes:
    """Predict the host memory that a process needs to save and restore a checkpoint, in addition to the state.

    Pages of files that the system caches are not counted.

    Args:
        state: a trainer's `state`, of arrays or of `jax.ShapeDtypeStruct`s, with shardings where they matter.

    Returns:
        Bounds in bytes. A save writes the largest leaf (all shards together) and a few chunks of 64 MiB at once. Except
        on a CPU, these bytes are first copied from the device. A restore reads a few chunks at once. For a leaf in host
        memory, it also holds one device's shard.

    Examples:
        >>> checkpoint_bytes({"w": jax.ShapeDtypeStruct((2**20,), "float32")}).restoring // 2**20
        8
    """
    leaves = jax.tree.leaves(state)
    total_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    copied_bytes = sum(_copied_bytes(leaf) for leaf in leaves)
    extra_bytes = max((chunking(leaf)["chunk_byte_size"] for leaf in leaves), default=CHUNK_BYTES) - CHUNK_BYTES
    largest_bytes = largest_leaf(state)
    written_bytes = min(2 * total_bytes, largest_bytes + 7 * CHUNK_BYTES + 2 * extra_bytes)
    is_copied = copied_bytes <= max(_COPY_BYTES, largest_bytes)
    staged_bytes = max((_part_bytes(leaf) for leaf in leaves if on_host(getattr(leaf, "sharding", None))), default=0)
    return CheckpointBytes(
        saving=written_bytes + (copied_bytes if is_copied else min(copied_bytes, largest_bytes + CHUNK_BYTES)),
        restoring=staged_bytes + min(2 * total_bytes, 8 * CHUNK_BYTES + 3 * extra_bytes),
        is_copied=is_copied,
    )


def _part_bytes(leaf: Any) -> int:
    """Return the bytes of one device's shard of a leaf."""
    return math.prod(_part_shape(leaf)) * leaf.dtype.itemsize


def _part_shape(leaf: Any) -> tuple[int, ...]:
    sharding = getattr(leaf, "sharding", None)
    return tuple(leaf.shape) if sharding is None else sharding.shard_shape(leaf.shape)


def _copied_bytes(leaf: Any) -> int:
    """Return the bytes of a host copy of a leaf's distinct shards on this process's devices; 0 on CPUs (no copy)."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return 0 if jax.default_backend() == "cpu" else leaf.size * leaf.dtype.itemsize
    if next(iter(sharding.device_set)).platform == "cpu":
        return 0
    parts = {str(index) for index in sharding.addressable_devices_indices_map(leaf.shape).values()}
    return len(parts) * _part_bytes(leaf)


def unflatten_state(values: dict[str, Any], like: Tree) -> Tree:
    """Return a tree like `like` from the leaves in `values`, which has the names of `flatten_state` and is emptied."""

    def restore_leaf(path: str, leaf: Any) -> Any:
        if _name(path) in values:
            array = values.pop(_name(path))
            # Orbax assembles arrays from shards. JAX then keeps host memory in the sharding, but not in the type (jax
            # 0.10.2), and a program would treat the arrays as device arrays.
            return jax.device_put(array, jax.memory.Space.Host) if on_host(array.sharding) else array
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)  # no elements, hence not stored

    return map_with_paths(restore_leaf, like)


def check_leaves(stored: Mapping[str, Any], like: Tree, step: int, directory: Path) -> None:
    """Raise `StructureError` unless the leaves in a checkpoint have the names, shapes and dtypes of `like`."""
    actual = {name: f"{meta.dtype}{list(meta.shape)}" for name, meta in stored.items()}
    expected = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in flatten_state(like).items()}
    if actual != expected:
        names = sorted({name for name, _ in set(actual.items()) ^ set(expected.items())})
        name, others = names[0], f" (and {len(names) - 1} other leaves)" if len(names) > 1 else ""
        stored_type, own_type = (types.get(name, "no such leaf") for types in (actual, expected))
        problem = f"{name}{others}: the checkpoint of step {step} has {stored_type}, but this trainer has {own_type}"
        hint = f"resume with the model, tx and wrt that wrote {directory}; lt.optim.converted converts other formats"
        raise StructureError(problem, hint=hint)


class Rearrangement:
    """Conversion of stacked layers from the order in a checkpoint to the current order of the state.

    `saved` and `current` list the layer in each row of the stack, -1 for padding; None is the order of the model.
    """

    def __init__(self, saved: Sequence[int] | None, current: Sequence[int] | None, like: Tree) -> None:
        stacked = (
            leaf.shape[0] for path, leaf in leaves_with_paths(like) if model_part(path) == "layers" and leaf.ndim
        )
        # If no layer is trainable, the state has no rows, and `saved` or `current` gives their number.
        num_rows = next(stacked, 1 + max(saved or current or ()))
        self._current = list(range(num_rows) if current is None else current)
        num_layers = 1 + max(self._current if saved is None else saved)
        source_layers = list(range(num_layers) if saved is None else saved)
        self._num_rows, self._like = len(source_layers), like
        layers = [layer for layer in self._current if layer >= 0]
        if {layer for layer in source_layers if layer >= 0} != {*layers}:
            raise StructureError(f"the checkpoint has {num_layers} layers, but the model has {len(layers)}")
        for path, leaf in leaves_with_paths(like):
            is_unstacked = leaf.size > 1 and not self._is_stacked(path, leaf)
            # Optimizer state that mirrors weights has `outer` or `layers` in its path. Other optimizer state may mix
            # layers. Weights and random keys with neither in their path have no rows.
            if is_unstacked and (
                model_part(path) == "layers" or (model_part(path) is None and path.startswith("opt_state"))
            ):
                problem = f"{path}: the optimizer mixes layers, so they cannot be brought into another order"
                hint = "restore it with the schedule that wrote it, or train its weights in a new Trainer"
                raise StructureError(problem, hint=hint)
        # A padding row is a copy of any layer.
        self._rows = np.array([source_layers.index(layer if layer >= 0 else layers[0]) for layer in self._current])

    def source_structs(self) -> Tree:
        """Return the shapes of the checkpoint's state, with the shardings to read it with."""

        def source_struct(path: str, leaf: Any) -> Any:
            if not self._is_stacked(path, leaf):
                return leaf
            sharding, shape = leaf.sharding, (self._num_rows, *leaf.shape[1:])
            if isinstance(sharding, NamedSharding) and sharding.spec:
                try:
                    sharding.shard_shape(shape)
                except ValueError:  # the number of ranks does not divide the rows
                    spec = PartitionSpec(None, *sharding.spec[1:])
                    sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return map_with_paths(source_struct, self._like)

    def apply(self, state: Tree) -> Tree:
        """Bring the layers of a restored state into the current order, one leaf at a time."""
        targets = dict(leaves_with_paths(self._like))

        def reorder_leaf(path: str, leaf: Any) -> Any:
            like = targets[path]
            if not self._is_stacked(path, like):
                return leaf
            on_device = jax.device_put(leaf, jax.memory.Space.Device)
            rows = jax.jit(lambda x: x[self._rows], out_shardings=like.sharding.with_memory_kind("device"))(on_device)
            return jax.device_put(rows, like.sharding)

        return map_with_paths(reorder_leaf, state)

    def _is_stacked(self, path: str, leaf: Any) -> bool:
        return is_stacked(path, leaf, len(self._current))


def check_origin(step: int, notes: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise if a checkpoint was trained over other frozen weights, or with another implementation of random keys."""
    if notes.get("base") not in (None, current["base"]):
        problem = f"the checkpoint of step {step} was trained over other frozen weights"
        got = f"fingerprint {current['base']}, not {notes['base']}"
        raise StructureError(problem, got=got, hint="resume with the model that the run started with")
    random = notes.get("random")
    if random is not None and random["keys"] != (keys := current["random"]["keys"]):
        saved, wanted = (", ".join(map(str, names)) for names in (random["keys"], keys))
        problem = f"the checkpoint of step {step} has random keys of {saved}, not of {wanted}"
        hint = "make keys like those that the run started with, such as jax.random.key(0, impl=...)"
        raise StructureError(problem, hint=hint)


def warn_of_random(step: int, saved: Mapping[str, Any] | None, current: Mapping[str, Any]) -> None:
    """Warn if JAX's random settings differ from those of the run that wrote the checkpoint."""
    saved_settings: Mapping[str, Any] = {} if saved is None else saved["settings"]
    changed = [f"{name}={value!r}" for name, value in saved_settings.items() if current["settings"].get(name) != value]
    if changed:
        warnings.warn(
            f"the run drew its random numbers with {', '.join(changed)} until step {step}, and draws others from here "
            "on\nhint: restore these settings of jax.config, unless nothing in the model is random",
            UserWarning,
            stacklevel=5,
        )


def _name(path: str) -> str:
    return path.replace("/", ".")


# --- a reader that places each chunk directly in its final memory ----------------------------------------------------
# When Orbax (0.11) reads a leaf, the host holds it three times: the file contents, the array, and the data sent to the
# device. This reader writes one chunk after the other into the final array (`core.assemble`), while the next few chunks
# are read and decompressed.


def read_leaves(folder: Path, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the leaves of a checkpoint by name; each process reads only the shards on its devices.

    `like` has the stored shapes, dtypes and shardings (None: JAX's default device). The host holds `_AHEAD_BYTES` of
    chunks, decompressed and compressed, the chunk that is being placed, and a shard of a leaf in host memory.
    """
    import tensorstore as ts  # takes a tenth of a second

    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": str(folder)}}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})  # no cache, because each chunk is read once
    specs = {name: {"driver": "zarr", "kvstore": {**kvstore, "path": f"{name}/"}} for name in like}
    stores = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}

    def read_leaf(name: str, leaf: Any) -> jax.Array:
        stored: Any = stores.pop(name).result()
        if tuple(stored.shape) != tuple(leaf.shape) or stored.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f"{name} is {stored.dtype.name}{list(stored.shape)}, not {leaf.dtype}{list(leaf.shape)}")
        return assemble(functools.partial(_chunks, stored), leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))

    return {name: read_leaf(name, leaf) for name, leaf in like.items()}


def _chunks(stored: Any, index: tuple[slice, ...]) -> Pieces:
    """Yield the part `index` of a stored array in pieces, cut at the borders of chunks; a few are read ahead."""
    itemsize = stored.dtype.numpy_dtype.itemsize
    # The chunk shape of a scalar is None.
    chunk = _join_chunks(stored.chunk_layout.read_chunk.shape or (), stored.shape, itemsize)
    chunk_bytes = math.prod(chunk) * itemsize
    pending_reads: collections.deque[tuple[tuple[int, ...], Any]] = collections.deque()
    parts = [  # slices of each axis, cut at the borders of the chunks
        [
            slice(max(start, axis.start), min(start + size, axis.stop))
            for start in range(axis.start // size * size, axis.stop, size)
        ]
        for axis, size in zip(index, chunk, strict=True)
    ]
    cuts = itertools.product(*parts)
    while True:
        for cut in itertools.islice(cuts, max(1, _AHEAD_BYTES // chunk_bytes) - len(pending_reads)):
            start = tuple(cut_axis.start - axis.start for cut_axis, axis in zip(cut, index, strict=True))
            pending_reads.append((start, stored[cut].read()))
        if not pending_reads:
            return
        start, values = pending_reads.popleft()
        yield start, np.asarray(values.result())


def _join_chunks(chunk: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a piece: small chunks are joined, because each piece costs a program call."""
    sizes = list(chunk)
    for axis in reversed(range(len(sizes))):
        max_chunks = _JOINED_BYTES // (math.prod(sizes) * itemsize)
        sizes[axis] *= max(1, min(max_chunks, -(-shape[axis] // sizes[axis])))
    return tuple(sizes)


# --- checksums of files, which detect damage before any contents are used --------------------------------------------
# Orbax and TensorStore verify the index of the arrays, but not their contents: a bit that a disk or a copy has flipped
# is read as another weight. So every file gets a checksum after all files are written and before the checkpoint is
# renamed. A checkpoint with its final name therefore has checksums of the saved bytes, however long the save took.
#
# The checksums cover files, not arrays, because files get damaged. So notes and metadata are covered, and no array is
# copied. The number of devices may change, and the trainer keeps its state if the checkpoint turns out to be damaged.
# CRC-32 detects all damage within 32 bits, and misses one in 4e9 of other damages.
#
# Known inefficiencies: written files are read again, in a thread next to the training; with several processes, the
# first one reads all of them. A restore first reads them again to verify them, a part in each process.


def checksummed_folder(ocp: Any, directory: Path) -> type[Any]:
    """Return a subclass of Orbax's temporary folder of a checkpoint that writes checksums before the final rename."""

    class ChecksummedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            if Path(self.get_final()).parent == directory:  # Orbax also uses this class for folders in a checkpoint
                write_checksums(Path(self.get()))
            await super().finalize()

    return ChecksummedFolder


def write_checksums(folder: Path) -> None:
    """Flush all files of a folder to disk, and write their checksums."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name not in (CHECKSUMS, _UNVERIFIED)]
    checksums = _compute_checksums((folder / name for name in names), is_new=True)
    text = json.dumps({"crc32": dict(zip(names, checksums, strict=True))}, indent=1)
    write_files(folder, {CHECKSUMS: (text + "\n").encode()})


def find_damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Return a text that names the first damaged file and the difference found; None if there is no damage.

    The sizes of all files are compared, and the checksums of every `num_parts`-th file, from number `part` on.
    """
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing"
    try:
        expected = json.loads((folder / CHECKSUMS).read_bytes())["crc32"]
        entries = [(str(name), int(size), str(crc)) for name, (size, crc) in sorted(expected.items())]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        entries = []
    if not entries:
        return f"{CHECKSUMS} is not a list of checksums"
    try:
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else -1 for name, _, _ in entries]
    except (OSError, ValueError):  # invalid file names
        return f"{CHECKSUMS} is not a list of files"
    for (name, size, _), actual in zip(entries, sizes, strict=True):
        if actual != size:
            return f"{name} is missing" if actual < 0 else f"{name} has {actual} bytes instead of {size}"
    own_entries = entries[part::num_parts]
    try:
        checksums = _compute_checksums(folder / name for name, _, _ in own_entries)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return "a file can no longer be read from its disk"
    for (name, _, crc), (_, actual) in zip(own_entries, checksums, strict=True):
        if actual != crc:
            return f"{name} does not match its checksum"
    return None


def _compute_checksums(paths: Iterable[Path], *, is_new: bool = False) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda path: _compute_checksum(path, is_new), paths))


def _compute_checksum(path: Path, is_new: bool) -> tuple[int, str]:
    crc, size, buffer = 0, 0, memoryview(bytearray(_BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        if is_new:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return size, f"{crc:08x}"
