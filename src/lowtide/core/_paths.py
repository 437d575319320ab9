"""Tree paths as text: ``layers/attn/q_proj/weight``.

Dictionaries, dataclasses, sequences, Equinox modules and NNX state have paths of the same form. So patterns, messages,
checkpoints and reports all name a leaf the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any  # any JAX pytree; JAX itself has no type for one


def path_str(key_path: tuple[Any, ...]) -> str:
    """Write a JAX key path as text, segments joined by ``/``; the root is the empty string."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def leaves_with_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """List the leaves of a tree with their paths, in JAX's flattening order; `is_leaf` as in `jax.tree.flatten`.

    Examples:
        >>> leaves_with_paths({"layers": [1.0, 2.0]})
        [('layers/0', 1.0), ('layers/1', 2.0)]
    """
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def map_with_paths(fn: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Map a function of path and leaf over a tree.

    Examples:
        >>> map_with_paths(lambda path, leaf: f"{path}={leaf}", {"layers": [1.0, 2.0]})
        {'layers': ['layers/0=1.0', 'layers/1=2.0']}
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fn(path_str(path), leaf), tree)


def is_array_like(leaf: Any) -> bool:
    """Return whether a leaf holds numbers (array, shape struct, tracer, Python scalar); functions and text do not."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, (bool, int, float, complex))


def is_key(leaf: Any) -> bool:
    """Return whether a leaf holds typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_numbers(leaf: Any) -> Any:
    """Return the key data of typed random keys, and any other leaf unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def leaf_bytes(leaf: Any) -> int:
    """Return the bytes of a leaf without padding, packed as on a device (`item_bits`); 0 for a leaf without numbers."""
    if not is_array_like(leaf):
        return 0
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    aval = leaf if hasattr(leaf, "shape") else jax.eval_shape(jnp.asarray, leaf)
    return (int(np.prod(aval.shape, dtype=np.int64)) * item_bits(aval.dtype) + 7) // 8


def item_bits(dtype: Any) -> int:
    """Return the bits of one element on a device.

    XLA packs int4 and float4, whereas NumPy's item size is at least one byte.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else dtype.itemsize * 8


def tree_bytes(tree: Tree) -> int:
    """Return the bytes of all arrays, shape structs and Python numbers of a tree; other leaves count 0.

    Elements of less than a byte are packed, as on a device. The padding of a device's layout is left out
    (`lowtide.memory.analyze` includes it).

    Examples:
        >>> tree_bytes({"w": np.zeros((4, 2), np.float32)})
        32
    """
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
