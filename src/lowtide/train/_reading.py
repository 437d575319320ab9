"""Read the arrays of a checkpoint where they belong, a chunk at a time.

Orbax writes a checkpoint through TensorStore: a Zarr array for each leaf, in one OCDBT database (Orbax' documentation
of its checkpoint format). Read by Orbax (0.11), a leaf exists three times on the host: what its files have, whole, as
an array, and as what is sent. Here its chunks go one after the other into the array where that belongs
(`core.assemble`), and the next few are read and decompressed meanwhile.

Known inefficiency: what was saved as one chunk, as checkpoints before this version, is read as one.
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
"""Bytes of chunks that are read while one is put in place, unless one has more."""

_JOINED_BYTES = CHUNK_BYTES // 4
"""Smaller chunks are read together, up to this size."""


def read_leaves(folder: Path, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read the leaves of a checkpoint.

    Args:
        folder: of the state, as Orbax has written it.
        like: shapes, dtypes and shardings by name, as they are stored; None for a sharding is JAX's default device.

    Returns:
        The leaves by name, of which this process has read what its devices hold.

    Raises:
        ValueError: for damaged files, from TensorStore.

    Memory:
        The leaves where they belong. On the host `_AHEAD_BYTES` of chunks, as they are and compressed, and one that is
        put in place; with them what one device holds of a leaf in host memory.
    """
    import tensorstore as ts  # takes a tenth of a second

    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": str(folder)}}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})  # each chunk is read once
    specs = {name: {"driver": "zarr", "kvstore": {**kvstore, "path": f"{name}/"}} for name in like}
    opened = {name: ts.open(spec, open=True, read=True, context=context) for name, spec in specs.items()}

    def one(name: str, leaf: Any) -> jax.Array:
        stored: Any = opened.pop(name).result()
        if tuple(stored.shape) != tuple(leaf.shape) or stored.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f"{name} is {stored.dtype.name}{list(stored.shape)}, not {leaf.dtype}{list(leaf.shape)}")
        return assemble(functools.partial(_chunks, stored), leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))

    return {name: one(name, leaf) for name, leaf in like.items()}


def _chunks(stored: Any, index: tuple[slice, ...]) -> Pieces:
    """Read a part of an array along the borders of its chunks, a few ahead."""
    itemsize = stored.dtype.numpy_dtype.itemsize
    chunk = _joined(stored.chunk_layout.read_chunk.shape or (), stored.shape, itemsize)  # None where there is no axis
    size = math.prod(chunk) * itemsize
    ahead: collections.deque[tuple[tuple[int, ...], Any]] = collections.deque()
    cuts = _cuts(index, chunk)
    while True:
        for cut in itertools.islice(cuts, max(1, _AHEAD_BYTES // size) - len(ahead)):
            start = tuple(own.start - axis.start for own, axis in zip(cut, index, strict=True))
            ahead.append((start, stored[cut].read()))
        if not ahead:
            return
        start, values = ahead.popleft()
        yield start, np.asarray(values.result())


def _joined(chunk: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Join chunks of a few kilobytes, as of a table of a prime number of rows: each piece is a program's call."""
    sizes = list(chunk)
    for axis in reversed(range(len(sizes))):
        room = _JOINED_BYTES // (math.prod(sizes) * itemsize)
        sizes[axis] *= max(1, min(room, -(-shape[axis] // sizes[axis])))
    return tuple(sizes)


def _cuts(index: tuple[slice, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cut a part of an array along the borders of a grid."""
    axes = [
        [
            slice(max(at, axis.start), min(at + size, axis.stop))
            for at in range(axis.start // size * size, axis.stop, size)
        ]
        for axis, size in zip(index, chunk, strict=True)
    ]
    return iter(itertools.product(*axes))
