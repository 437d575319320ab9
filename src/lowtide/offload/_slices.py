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


def read(tree: Tree, *index: Any) -> Tree:
    """One entry of every leaf's leading axes, on the device.

    Args:
        tree: arrays or tracers, each with at least ``len(index)`` leading axes.
        *index: positions on the leading axes.

    Returns:
        The entries, without those axes.

    Memory:
        One entry on the device.
    """

    def one(leaf: Any) -> Any:
        sizes = (*(1 for _ in index), *leaf.shape[len(index) :])
        entry = jax.lax.dynamic_slice(leaf, _starts(leaf, index), sizes)
        return jnp.reshape(_to(entry, DEVICE), leaf.shape[len(index) :])

    return jax.tree.map(one, tree)


def write(tree: Tree, values: Tree, *index: Any) -> Tree:
    """Replace one entry of every leaf's leading axes.

    Args:
        tree: arrays or tracers on the host or on the device.
        values: the new entries, on the device, of the dtypes of `tree`.
        *index: positions on the leading axes.

    Returns:
        The tree with the entries replaced, every leaf in the memory where it was.
    """

    def one(leaf: Any, value: Any) -> Any:
        entry = jnp.reshape(value, (*(1 for _ in index), *value.shape))
        return jax.lax.dynamic_update_slice(leaf, _to(entry, memory_space(leaf)), _starts(leaf, index))

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


def _starts(leaf: Any, index: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*(jnp.asarray(i, jnp.int32) for i in index), *(jnp.int32(0) for _ in range(leaf.ndim - len(index))))
