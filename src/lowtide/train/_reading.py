"""Chunked reader of a checkpoint's arrays, which places each chunk directly in its final memory.

Orbax writes a checkpoint through TensorStore: one Zarr array for each leaf, in one OCDBT database (see Orbax'
documentation of its checkpoint format). When Orbax (0.11) reads a leaf, the host holds it three times: the file
contents, the array, and the data sent to the device. This module writes one chunk after the other into the final array
(`core.assemble`), while the next few chunks are read and decompressed.

Known inefficiency: checkpoints of earlier versions have large chunks, and each is still read as a whole.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import Pieces, assemble
from ._stored import CHUNK_BYTES

_AHEAD_BYTES = 3 * CHUNK_BYTES // 2
"""Bytes of chunks that are read ahead while one is placed; a larger chunk is read alone."""

_JOINED_BYTES = CHUNK_BYTES // 4
"""Smaller chunks are joined into one read, up to this size."""


def read_leaves(folder: Path, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the leaves of a checkpoint by name; each process reads the shards on its devices alone.

    `like` has the stored shapes, dtypes and shardings (None: JAX's default device). The host holds `_AHEAD_BYTES` of
    chunks, decompressed and compressed, the chunk that is being placed, and one device's shard of a leaf in host
    memory. TensorStore raises `ValueError` for damaged files.
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
    """Yield the pieces of a part of an array, along the borders of its chunks; a few are read ahead."""
    itemsize = stored.dtype.numpy_dtype.itemsize
    # The chunk shape of a scalar is None.
    chunk = _join_chunks(stored.chunk_layout.read_chunk.shape or (), stored.shape, itemsize)
    size = math.prod(chunk) * itemsize
    pending_reads: collections.deque[tuple[tuple[int, ...], Any]] = collections.deque()
    cuts = _split_index(index, chunk)
    while True:
        for cut in itertools.islice(cuts, max(1, _AHEAD_BYTES // size) - len(pending_reads)):
            start = tuple(cut_axis.start - axis.start for cut_axis, axis in zip(cut, index, strict=True))
            pending_reads.append((start, stored[cut].read()))
        if not pending_reads:
            return
        start, values = pending_reads.popleft()
        yield start, np.asarray(values.result())


def _join_chunks(chunk: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Join small chunks, such as those of a table with a prime number of rows: each piece costs a program call."""
    sizes = list(chunk)
    for axis in reversed(range(len(sizes))):
        max_chunks = _JOINED_BYTES // (math.prod(sizes) * itemsize)
        sizes[axis] *= max(1, min(max_chunks, -(-shape[axis] // sizes[axis])))
    return tuple(sizes)


def _split_index(index: tuple[slice, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an index that the borders of a grid of chunks separate."""
    axes = [
        [
            slice(max(start, axis.start), min(start + size, axis.stop))
            for start in range(axis.start // size * size, axis.stop, size)
        ]
        for axis, size in zip(index, chunk, strict=True)
    ]
    return iter(itertools.product(*axes))
