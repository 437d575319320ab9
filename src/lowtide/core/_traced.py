"""The device that a program is traced for, and an order for parts of it that share no data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._paths import Tree, is_key
from ._spaces import memory_space
from ._tiles import most_tile_rows


def traced_device() -> Any:
    """Return a device of the kind that the program is traced for."""
    # `jax.default_device` names it where it is not the default backend, as in a memory report for a TPU on a machine
    # with a GPU. Its value is a device, the name of a platform, or None.
    config: Any = jax.config
    chosen = config.jax_default_device
    return chosen if hasattr(chosen, "platform") else jax.devices(chosen)[0]


def zero_after(tree: Tree) -> Any:
    """Make an int32 zero that is known only when every leaf of a tree has been computed.

    Added to an index, it orders two parts of a program that share no data. XLA's own means did not hold at the uses of
    this function. Copies of host arrays began before an optimization barrier, tiles were computed concurrently in spite
    of one, and an unchanged loop variable is dropped.
    """
    zero = jnp.int32(0)
    for leaf in jax.tree.leaves(tree):
        # Slice whole tiles: XLA copies nothing smaller from the host.
        max_sizes = (*[1] * (leaf.ndim - 2), max(32, most_tile_rows(leaf.dtype)), leaf.size)[-leaf.ndim :]
        limits = tuple(min(size, limit) for size, limit in zip(leaf.shape, max_sizes, strict=False))
        corner = jax.lax.slice(leaf, (0,) * leaf.ndim, limits)
        if memory_space(leaf) == jax.memory.Space.Host:
            corner = jax.device_put(corner, jax.memory.Space.Device)
        corner = jax.random.key_data(corner) if is_key(corner) else corner
        bits = jnp.sum(jnp.real(jnp.ravel(corner)[:1]).astype(jnp.float32))
        # A population count of 32 bits is at most 32, so `count >> 6` is 0. XLA does not know that, and keeps the
        # dependency.
        count = jax.lax.population_count(jax.lax.bitcast_convert_type(bits, jnp.uint32))
        zero = zero + (count >> 6).astype(jnp.int32)
    return zero
