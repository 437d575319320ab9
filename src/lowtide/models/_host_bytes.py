"""What reading and writing a model costs the host, known before.

The figures are bounds: a piece exists up to four times (as the file's library copied it, as an array, cast, and as what
was sent), and one more is for what JAX allocates when it first runs. Weights in few bits are read by pieces, too, in
which codes of 4 bits take a byte. `tests/models/test_load_memory.py` measures them.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..core import PIECE_BYTES, Tree, is_staged

_COPIES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBytes:
    """The most bytes of host memory that a process needs beside the model itself, where that is on the host."""

    loading: int
    """While `lowtide.models.load` reads it."""
    saving: int
    """While `lowtide.models.save` writes it."""


def host_bytes(model: Tree) -> HostBytes:
    """Predict what loading and saving a model take of this process's host memory, beside the model.

    Pages of files that the system caches are not counted: it takes them back when it needs them.

    Args:
        model: the model, or its shapes: leaves with a shape, a dtype and, where it matters, a sharding (of arrays, or
            of `jax.ShapeDtypeStruct`s).

    Returns:
        Bounds in bytes.

    Memory:
        None.

    Examples:
        >>> host_bytes({"w": jax.ShapeDtypeStruct((80, 4096, 4096), jnp.bfloat16)}).loading // 2**20
        320
    """
    largest = staged = 0
    for leaf in jax.tree.leaves(model):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
        largest = max(largest, size)
        if sharding is not None and is_staged(sharding):
            staged = max(staged, size)
    pieces = _COPIES * min(PIECE_BYTES, largest)
    return HostBytes(loading=staged + pieces, saving=pieces)
