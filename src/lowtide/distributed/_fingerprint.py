"""Fingerprint of the weights that a run is based on: a hash of samples of the frozen leaves.

Adapters are noise over another base than the one they were trained on, and shapes do not reveal the difference. Two
models differ in nearly all of their weights, so a grid of samples of every leaf distinguishes them. Sampling is cheap
even where leaves are sharded or in host memory.
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
    """Return a hash of the paths, shapes, dtypes and samples of all leaves.

    Args:
        tree: arrays on the device or in host memory.
        arrangement: for leaves below ``layers`` that are not in the model's order: the layer of every row, or -1 for
            padding. The hash is that of the model's order.

    Returns:
        16 hexadecimal digits.

    Memory:
        Samples of one leaf at a time. For a leaf in host memory also its shards, where NumPy cannot read them in place.
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
        digest.update(np.ascontiguousarray(_sample_leaf(leaf, rows)).tobytes())
    return digest.hexdigest()[:16]


def _sample_leaf(leaf: Any, rows: Sequence[int]) -> np.ndarray:
    leaf = key_numbers(leaf)
    if not isinstance(leaf, jax.Array) or (_is_host_readable(leaf.sharding) and leaf.is_fully_addressable):
        return _sample_grid(np.asarray(leaf), rows, np)
    if on_host(leaf.sharding):
        return np.zeros(0)  # this process cannot read the shards of others, so only shape and dtype are hashed
    sharding = leaf.sharding
    replicated = jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else None
    return np.asarray(jax.jit(lambda x: _sample_grid(x, rows, jnp), out_shardings=replicated)(leaf))


def _is_host_readable(sharding: jax.sharding.Sharding) -> bool:
    """Return whether NumPy reads the arrays in place, which saves a compilation for every shape."""
    devices = sharding.device_set
    return on_host(sharding) or (len(devices) == 1 and next(iter(devices)).platform == "cpu")


def _sample_grid(leaf: Any, rows: Sequence[int], module: Any) -> Any:
    for axis, size in enumerate(leaf.shape):
        indices: Any = np.asarray(range(size) if axis else rows, int)
        samples = np.unique(np.linspace(0, max(len(indices) - 1, 0), min(len(indices), _PER_AXIS), dtype=int))
        leaf = module.take(leaf, indices[samples], axis=axis)
    return leaf
