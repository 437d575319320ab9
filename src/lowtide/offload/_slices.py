"""Slices of stacked arrays, wherever they live: read onto the device, written back in place.

A slice is cut in the memory that holds the array and only the slice is moved; the other order would move the array.
Inside a loop that carries the array, XLA writes the slice in place, in host memory as on the device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from lowtide.core import Tree, memory_space

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def read(tree: Tree, index: Any) -> Tree:
    """One entry of every leaf's leading axis, on the device.

    Args:
        tree: arrays or tracers.
        index: its position.

    Returns:
        The entries, without that axis.

    Memory:
        One entry on the device.
    """
    return jax.tree.map(
        lambda leaf: jnp.reshape(_to(jax.lax.dynamic_slice_in_dim(leaf, index, 1), DEVICE), leaf.shape[1:]), tree
    )


def write(tree: Tree, values: Tree, index: Any) -> Tree:
    """Replace one entry of every leaf's leading axis.

    Args:
        tree: arrays or tracers on the host or on the device.
        values: the new entries, on the device, of the dtypes of `tree`.
        index: their position.

    Returns:
        The tree with the entries replaced, every leaf in the memory where it was.
    """

    def one(leaf: Any, value: Any) -> Any:
        entry = _to(jnp.expand_dims(value, 0), memory_space(leaf))
        return jax.lax.dynamic_update_slice_in_dim(leaf, entry, index, 0)

    return jax.tree.map(one, tree, values)


def buffer(like: Tree, leading: tuple[int, ...], space: Any) -> Tree:
    """Zeros to write entries into: for every leaf of `like` an array with more leading axes, in a memory space.

    Only a scalar crosses to the host: zeros made on the device and moved would need the device's memory first.
    """

    def one(leaf: Any) -> Any:
        shape = (*leading, *leaf.shape)
        if math.prod(shape) == 0 or space == DEVICE:
            return jnp.zeros(shape, leaf.dtype)
        return jnp.broadcast_to(jax.device_put(jnp.zeros((), leaf.dtype), space), shape)

    return jax.tree.map(one, like)


def put(tree: Tree, space: Any) -> Tree:
    """All leaves in one memory space; those that are there already stay as they are."""
    return jax.tree.map(lambda leaf: _to(leaf, space), tree)


def zero_after(tree: Tree) -> Any:
    """An int32 zero that is known only when every leaf of a tree has been computed.

    Added to an index it orders two parts of a program whose data do not. XLA's own means do not hold here: it drops
    optimization barriers before it schedules, and unchanged loop variables always.
    """
    zero = jnp.int32(0)
    for leaf in jax.tree.leaves(tree):
        # A row from the host: its copies move whole lanes.
        row = _to(jax.lax.slice(leaf, (0,) * leaf.ndim, (*(1,) * (leaf.ndim - 1), *leaf.shape[-1:])), DEVICE)
        first = jnp.ravel(row)[:1].astype(jnp.float32)
        bits = jnp.sum(first)
        # At most 32 bits are set, which XLA does not know.
        count = jax.lax.population_count(jax.lax.bitcast_convert_type(bits, jnp.uint32))
        zero = zero + (count >> 6).astype(jnp.int32)
    return zero


def _to(leaf: Any, space: Any) -> Any:
    return leaf if memory_space(leaf) == space else jax.device_put(leaf, space)
