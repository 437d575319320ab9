"""Axes of a `jax.shard_map` that checks along which of them values differ (``check_vma``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def varying_axes(aval: Any) -> frozenset[str]:
    """Axes of a `jax.shard_map` with ``check_vma`` along which values of a type differ (jax 0.10.2 to 0.12.0)."""
    return getattr(getattr(aval, "mat", None), "varying", frozenset())


def like_type(arrays: Iterable[Any], shape: tuple[int, ...], dtype: Any, fill: float = 0) -> Any:
    """Make an array that a loop may carry where it then holds something of others: of their varying axes.

    Args:
        arrays: what it will be computed from.
        shape: its own.
        dtype: its own.
        fill: its numbers.
    """
    full = jnp.full(shape, fill, dtype)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(each)) for each in arrays))
    return jax.lax.pcast(full, tuple(sorted(axes)), to="varying") if axes else full


def varied_alike(tree: Any) -> Any:
    """Make arrays vary along the axes of a `jax.shard_map` that any of them varies along.

    Else a custom derivative would have to add up the gradients of those that do not; of the cast JAX does so.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in leaves))
    missing = [tuple(sorted(axes - varying_axes(jax.typeof(leaf)))) for leaf in leaves]
    pairs = zip(leaves, missing, strict=True)
    return structure.unflatten([jax.lax.pcast(leaf, m, to="varying") if m else leaf for leaf, m in pairs])
