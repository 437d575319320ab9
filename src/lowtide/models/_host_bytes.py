"""Bounds of the host memory that loading and saving a model need.

A piece exists up to four times: as the safetensors library copied it, as an array, after the cast, and as it is sent.
One more piece covers what JAX allocates when it first runs. Quantised weights are read in pieces, too; their 4-bit
codes take a byte each there. `tests/models/test_load_memory.py` measures these bounds.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..core import PIECE_BYTES, Tree, is_staged

_COPIES = 5
"""Four copies of a piece, and one piece for what JAX allocates when it first runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Most bytes of host memory that a process needs in addition to the model itself, where that is on the host."""

    loading: int
    """Bytes while `lowtide.models.load` reads the model."""
    saving: int
    """Bytes while `lowtide.models.save` writes the model."""


def host_bytes(model: Tree) -> HostBytes:
    """Predict the host memory of this process for loading and saving a model, in addition to the model.

    File pages that the operating system caches are not counted, because it reclaims them on demand.

    Args:
        model: the model or its shapes: leaves with a shape, a dtype and, where it matters, a sharding (arrays or
            `jax.ShapeDtypeStruct`s).

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
