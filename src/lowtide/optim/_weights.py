"""Update bfloat16 weights as if they had a higher precision.

A bfloat16 weight and its *residual* represent a float32 number: their sum. The optimizer's state stores the residuals
(``state.residuals``), with ``weights="split"`` in 8 bits, after FlashOptim (arXiv:2602.23349), and with ``"kahan"`` in
bfloat16. ``"stochastic"`` stores no residual and rounds weights stochastically. A residual is at most half of the
distance between two neighbouring bfloat16 numbers. The weight's exponent gives that distance, so 8-bit residuals need
no scales.

Updates have the dtype of the weights, so they need no more memory than gradients. An update is exact where a weight
changes by less than half of its value (Sterbenz's lemma). Otherwise the update is rounded: `kahan` adds the rounding
error to the residual, and `split` drops it because 8 bits cannot hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import ConfigError, Tree
from ._packed import random_bits, stochastic_round

SPLIT, KAHAN, STOCHASTIC = "split", "kahan", "stochastic"
WEIGHTS = (SPLIT, KAHAN, STOCHASTIC)
_MAX_CODE = 127
_to_bfloat16 = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
"""Round float32 numbers to bfloat16 and keep the dtype. XLA may drop a pair of conversions, but not this operation."""


def is_narrow(leaf: Any) -> bool:
    """Return whether a parameter is in bfloat16, so that this module applies to it."""
    return jnp.result_type(leaf) == jnp.bfloat16


def init_residuals(kind: str, params: Tree, least_size: int) -> Tree:
    """Return the initial residuals of parameters: zeros, or None where no residual is kept.

    `kind` is one of `WEIGHTS`. Bfloat16 leaves of fewer than `least_size` elements always have a float32 residual.
    """
    dtypes = {SPLIT: jnp.int8, KAHAN: jnp.bfloat16, STOCHASTIC: None}

    def init_leaf(leaf: Any) -> Any:
        if not is_narrow(leaf):
            return None
        dtype = dtypes[kind] if leaf.size >= least_size else jnp.float32
        return None if dtype is None else jnp.zeros_like(leaf, dtype)

    return jax.tree.map(init_leaf, params)


def require_bfloat16(kind: str, params: Tree) -> None:
    """Raise `ConfigError` with the dtypes of the parameters when none of them is in bfloat16."""
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(is_narrow, leaves)):
        dtypes = ", ".join(sorted({jnp.result_type(leaf).name for leaf in leaves}))
        hint = "cast the parameters to bfloat16, or leave out weights"
        raise ConfigError(f'weights="{kind}" needs parameters in bfloat16, not in {dtypes}', hint=hint)


def widen(params: Tree, residuals: Tree) -> Tree:
    """Return bfloat16 parameters plus their residuals, in float32; other parameters are returned unchanged."""
    leaves, structure = jax.tree.flatten(params)

    def widen_leaf(leaf: Any, residual: Any) -> Any:
        if not is_narrow(leaf):
            return leaf
        wide = leaf.astype(jnp.float32)
        if residual is None:
            return wide
        if residual.dtype == jnp.int8:
            return wide + residual.astype(jnp.float32) * (_half_ulp(wide) / _MAX_CODE)
        return wide + residual.astype(jnp.float32)

    return structure.unflatten(map(widen_leaf, leaves, structure.flatten_up_to(residuals)))


def convert_residuals(params: Tree, old_residuals: Tree, templates: Tree) -> Tree:
    """Convert residuals to the dtypes of `templates`; residuals that did not exist before are zeros."""
    leaves, structure = jax.tree.flatten(params)
    old_leaves = structure.flatten_up_to(old_residuals) if jax.tree.leaves(old_residuals) else [None] * len(leaves)

    def convert_leaf(leaf: Any, residual: Any, template: Any) -> Any:
        if not hasattr(template, "dtype"):
            return template  # None, or the placeholder of a parameter that another transformation updates
        if not hasattr(residual, "dtype"):
            return jnp.zeros(template.shape, template.dtype)
        value = widen(leaf, residual) - leaf.astype(jnp.float32)
        if template.dtype == jnp.int8:
            value = jnp.round(value / _half_ulp(leaf.astype(jnp.float32)) * _MAX_CODE)
        return value.astype(template.dtype)

    return structure.unflatten(map(convert_leaf, leaves, old_leaves, structure.flatten_up_to(templates)))


def narrow_updates(
    params: Tree,
    wide_params: Tree,
    residuals: Tree,
    updates: Tree,
    keys: Sequence[Array],
    to_bfloat16: Callable[[Array], Array] = _to_bfloat16,
) -> tuple[Tree, Tree]:
    """Return updates in the dtypes of the parameters, and the new residuals.

    Updates of parameters in other dtypes are returned unchanged. `updates` belong to `wide_params`, the result of
    `widen`. `keys` has a random uint32 for each leaf. `to_bfloat16` rounds float32 numbers and keeps their dtype.
    """
    leaves, structure = jax.tree.flatten(params)

    def narrow_leaf(leaf: Any, wide: Any, residual: Any, update: Any, key: Any) -> tuple[Any, Any]:
        if not is_narrow(leaf):
            return update, residual
        exact, old = wide + update.astype(jnp.float32), leaf.astype(jnp.float32)
        rounded = to_bfloat16(exact) if residual is not None else _straight_through_round(exact, key)
        step = to_bfloat16(rounded - old)
        if residual is None:
            return step.astype(leaf.dtype), None
        if residual.dtype == jnp.int8:
            # The error of an inexact step exceeds what 8 bits can hold, so only the error of `rounded` is kept. It is
            # rounded stochastically: otherwise updates below half of the distance between two codes would never
            # change a weight.
            error = (exact - rounded) / _half_ulp(rounded) * _MAX_CODE
            codes = jnp.floor(error + (random_bits(exact, key) >> 8).astype(jnp.float32) / 2**24)  # plus [0, 1)
            new_residual = jnp.clip(codes, -_MAX_CODE, _MAX_CODE)
        else:
            new_residual = exact - to_bfloat16(old + step)  # the sum that optax.apply_updates computes
        return step.astype(leaf.dtype), jnp.where(jnp.isfinite(new_residual), new_residual, 0).astype(residual.dtype)

    flat_trees = [structure.flatten_up_to(tree) for tree in (wide_params, residuals, updates)]
    pairs = list(map(narrow_leaf, leaves, *flat_trees, keys))
    return structure.unflatten(update for update, _ in pairs), structure.unflatten(residual for _, residual in pairs)


def _straight_through_round(x: Array, key: Array) -> Array:
    """Round stochastically, with a straight-through derivative."""
    straight_through = jnp.where(jnp.isfinite(x), x - jax.lax.stop_gradient(x), 0)  # 0, whose derivative is 1
    return jax.lax.stop_gradient(stochastic_round(x, key)) + straight_through


def _half_ulp(x: Array) -> Array:
    """Return half of the distance between bfloat16 numbers near `x` (float32), at least the smallest normal float32."""
    # A bfloat16 has 7 mantissa bits: neighbours differ by 2 ** (e - 7) and half of that is 2 ** (e - 8). So 8 is
    # subtracted from the exponent's field, and a field of at least 1 keeps the result normal.
    exponent = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 23) & 0xFF
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, 9) - 8) << 23, jnp.float32)
