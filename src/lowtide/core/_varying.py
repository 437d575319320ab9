"""Varying axes of values inside a `jax.shard_map` with ``check_vma``: the mesh axes along which they differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(aval: Any) -> frozenset[str]:
    """Return the axes of a `jax.shard_map` along which values of a type differ (jax 0.10.2 to 0.12.0)."""
    return getattr(getattr(aval, "mat", None), "varying", frozenset())


def like_type(arrays: Iterable[Any], shape: tuple[int, ...], dtype: Any, fill: float = 0) -> Any:
    """Make a constant array that a loop can carry, with the varying axes of the arrays that later replace it.

    Args:
        arrays: the arrays that later values are computed from.
        shape: shape of the result.
        dtype: dtype of the result.
        fill: its value.
    """
    # With `check_vma` a loop's carry needs the same varying axes before and after each step; a constant has none.
    full = jnp.full(shape, fill, dtype)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(array)) for array in arrays))
    return jax.lax.pcast(full, tuple(sorted(axes)), to="varying") if axes else full


def varied_alike(tree: Any) -> Any:
    """Cast all arrays of a tree to vary along every `jax.shard_map` axis that any of them varies along.

    Without it a custom derivative would have to sum the gradients of the others over these axes. JAX does so in the
    derivative of the cast.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in leaves))
    missing = [tuple(sorted(axes - varying_axes(jax.typeof(leaf)))) for leaf in leaves]
    pairs = zip(leaves, missing, strict=True)
    return structure.unflatten(
        [jax.lax.pcast(leaf, missing_axes, to="varying") if missing_axes else leaf for leaf, missing_axes in pairs]
    )
