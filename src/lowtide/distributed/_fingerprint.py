"""Which weights a run is based on: a hash of samples of what is frozen.

Adapters over another base than the one they were trained on are noise, and nothing in their shapes would say so. Two
models differ in nearly all of their weights, so a grid of samples of every leaf tells them apart, and costs nothing
where leaves are sharded or on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import Tree, is_stacked, key_numbers, leaves_with_paths, on_host

_PER_AXIS = 8


def fingerprint(tree: Tree, arrangement: Sequence[int] | None = None) -> str:
    """Hash paths, shapes, dtypes and samples of all leaves.

    Args:
        tree: arrays, on the device or on the host.
        arrangement: the layer of every row of the leaves below ``layers``, where they are in another order than that of
            the model, -1 for padding: the hash is that of the model's order.

    Returns:
        16 hexadecimal digits.

    Memory:
        Samples of one leaf at a time; of a leaf on the host its shards, too, where they are not shared with NumPy.
    """
    digest = hashlib.sha256()
    for path, leaf in leaves_with_paths(tree):
        if not hasattr(leaf, "dtype"):
            digest.update(f"{path}={leaf!r};".encode())
            continue
        rows = range(leaf.shape[0]) if leaf.shape else ()
        if arrangement is not None and is_stacked(path, leaf, len(arrangement)):
            rows = [arrangement.index(layer) for layer in range(1 + max(arrangement))]
        digest.update(f"{path}:{leaf.dtype}{[len(rows), *leaf.shape[1:]] if leaf.shape else []};".encode())
        digest.update(np.ascontiguousarray(_samples(leaf, rows)).tobytes())
    return digest.hexdigest()[:16]


def _samples(leaf: Any, rows: Sequence[int]) -> np.ndarray:
    leaf = key_numbers(leaf)
    if not isinstance(leaf, jax.Array) or (_is_near(leaf.sharding) and leaf.is_fully_addressable):
        return _grid(np.asarray(leaf), rows, np)
    if on_host(leaf.sharding):
        return np.zeros(0)  # shards of other processes are out of reach: shape and dtype have to do
    sharding = leaf.sharding
    everywhere = jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else None
    return np.asarray(jax.jit(lambda x: _grid(x, rows, jnp), out_shardings=everywhere)(leaf))


def _is_near(sharding: jax.sharding.Sharding) -> bool:
    """Whether NumPy reads arrays where they are: what it need not compile for every shape starts a run sooner."""
    devices = sharding.device_set
    return on_host(sharding) or (len(devices) == 1 and next(iter(devices)).platform == "cpu")


def _grid(leaf: Any, rows: Sequence[int], module: Any) -> Any:
    for axis, size in enumerate(leaf.shape):
        places: Any = np.asarray(range(size) if axis else rows, int)
        chosen = np.unique(np.linspace(0, max(len(places) - 1, 0), min(len(places), _PER_AXIS), dtype=int))
        leaf = module.take(leaf, places[chosen], axis=axis)
    return leaf
