"""Updates of bfloat16 weights as if the weights had a higher precision.

A bfloat16 weight represents a float32 number. The difference is the *residual* (``rests`` in this code), stored with
the optimizer's state: in 8 bits (``split``, after FlashOptim, arXiv:2602.23349) or in bfloat16 (``kahan``).
``stochastic`` stores no residual and rounds weights stochastically. A residual is at most half of the distance between
two neighbouring bfloat16 numbers. The weight's exponent gives that distance, so 8-bit residuals need no scales.

Updates have the dtype of the weights, so they need no more memory than gradients. An update is exact where a weight
changes by less than half of its value (Sterbenz). Otherwise it is rounded: `kahan` adds that error to the residual,
`split` drops it because 8 bits cannot hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import ConfigError, Tree
from ._packed import random_bits, round_at_random

SPLIT, KAHAN, STOCHASTIC = "split", "kahan", "stochastic"
WEIGHTS = (SPLIT, KAHAN, STOCHASTIC)
_MOST = 127
_to_bfloat16 = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
"""Round float32 numbers to bfloat16 and keep the dtype. XLA may drop a pair of conversions, but not this operation."""


def is_narrow(leaf: Any) -> bool:
    """Return whether a parameter is in bfloat16, so that this module applies to it."""
    return jnp.result_type(leaf) == jnp.bfloat16


def first_rests(kind: str, params: Tree, least_size: int) -> Tree:
    """Return the initial residuals of parameters: zeros, or None where no residual is kept.

    Args:
        kind: one of `WEIGHTS`.
        params: the parameters.
        least_size: leaves with fewer elements keep the whole residual, in float32.
    """
    dtypes = {SPLIT: jnp.int8, KAHAN: jnp.bfloat16, STOCHASTIC: None}

    def one(leaf: Any) -> Any:
        if not is_narrow(leaf):
            return None
        dtype = dtypes[kind] if leaf.size >= least_size else jnp.float32
        return None if dtype is None else jnp.zeros_like(leaf, dtype)

    return jax.tree.map(one, params)


def refuse_wide(kind: str, params: Tree) -> None:
    """Raise when no parameter is in bfloat16.

    Args:
        kind: one of `WEIGHTS`.
        params: the parameters.

    Raises:
        ConfigError: when no parameter is in bfloat16; the error lists the dtypes of the parameters.
    """
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(is_narrow, leaves)):
        raise ConfigError(
            f'weights="{kind}" is for parameters in bfloat16, and there are none',
            got=", ".join(sorted({jnp.result_type(leaf).name for leaf in leaves})),
            hint="cast the parameters to bfloat16, or leave weights out",
        )


def widened(params: Tree, rests: Tree) -> Tree:
    """Return the float32 numbers that bfloat16 parameters represent; other parameters are returned unchanged."""
    leaves, structure = jax.tree.flatten(params)

    def one(leaf: Any, rest: Any) -> Any:
        if not is_narrow(leaf):
            return leaf
        wide = leaf.astype(jnp.float32)
        if rest is None:
            return wide
        if rest.dtype == jnp.int8:
            return wide + rest.astype(jnp.float32) * (_half_distance(wide) / _MOST)
        return wide + rest.astype(jnp.float32)

    return structure.unflatten(map(one, leaves, structure.flatten_up_to(rests)))


def converted_rests(params: Tree, old: Tree, like: Tree) -> Tree:
    """Convert residuals to other dtypes; residuals that did not exist before are zeros.

    Args:
        params: the parameters.
        old: the residuals so far, or an empty tree.
        like: shapes and dtypes of the new residuals.
    """
    leaves, structure = jax.tree.flatten(params)
    known = structure.flatten_up_to(old) if jax.tree.leaves(old) else [None] * len(leaves)

    def one(leaf: Any, rest: Any, new: Any) -> Any:
        if not hasattr(new, "dtype"):
            return new  # None, or the placeholder of a parameter that another transformation updates
        if not hasattr(rest, "dtype"):
            return jnp.zeros(new.shape, new.dtype)
        lacks = widened(leaf, rest) - leaf.astype(jnp.float32)
        if new.dtype == jnp.int8:
            lacks = jnp.round(lacks / _half_distance(leaf.astype(jnp.float32)) * _MOST)
        return lacks.astype(new.dtype)

    return structure.unflatten(map(one, leaves, known, structure.flatten_up_to(like)))


def narrowed(
    params: Tree,
    wide: Tree,
    rests: Tree,
    updates: Tree,
    keys: Sequence[Array],
    to_bfloat16: Callable[[Array], Array] = _to_bfloat16,
) -> tuple[Tree, Tree]:
    """Return updates in the dtypes of the parameters, and the new residuals.

    Args:
        params: the parameters. Only those in bfloat16 are handled; updates of others pass unchanged.
        wide: `widened` parameters.
        rests: the residuals so far.
        updates: updates of `wide`.
        keys: a random uint32 for each leaf.
        to_bfloat16: rounds float32 numbers to bfloat16 precision.
    """
    leaves, structure = jax.tree.flatten(params)

    def one(leaf: Any, wide: Any, rest: Any, update: Any, key: Any) -> tuple[Any, Any]:
        if not is_narrow(leaf):
            return update, rest
        goal, old = wide + update.astype(jnp.float32), leaf.astype(jnp.float32)
        near = to_bfloat16(goal) if rest is not None else _rounded(goal, key)
        step = to_bfloat16(near - old)
        if rest is None:
            return step.astype(leaf.dtype), None
        if rest.dtype == jnp.int8:
            # The error of an inexact step exceeds what 8 bits can hold, so only the error of `near` is kept. It is
            # rounded stochastically: otherwise updates below half of the distance between two codes would never
            # change a weight.
            codes = jnp.floor((goal - near) / _half_distance(near) * _MOST + _uniform(goal, key))
            lacks = jnp.clip(codes, -_MOST, _MOST)
        else:
            lacks = goal - to_bfloat16(old + step)  # the sum that optax.apply_updates computes
        return step.astype(leaf.dtype), jnp.where(jnp.isfinite(lacks), lacks, 0).astype(rest.dtype)

    parts = [structure.flatten_up_to(tree) for tree in (wide, rests, updates)]
    made = list(map(one, leaves, *parts, keys))
    return structure.unflatten([update for update, _ in made]), structure.unflatten([rest for _, rest in made])


def _rounded(goal: Array, key: Array) -> Array:
    """Round stochastically, with a straight-through derivative."""
    passed = jnp.where(jnp.isfinite(goal), goal - jax.lax.stop_gradient(goal), 0)  # 0, whose derivative is 1
    return jax.lax.stop_gradient(round_at_random(goal, key)) + passed


def _half_distance(x: Array) -> Array:
    """Return half of the distance between bfloat16 numbers near `x` (float32), at least the smallest normal float32."""
    # A bfloat16 has 7 mantissa bits: neighbours differ by 2 ** (e - 7) and half of that is 2 ** (e - 8). So 8 is
    # subtracted from the exponent's field, and a field of at least 1 keeps the result normal.
    exponent = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 23) & 0xFF
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, 9) - 8) << 23, jnp.float32)


def _uniform(x: Array, key: Array) -> Array:
    """Return numbers in [0, 1) that depend on `x` and a key."""
    return (random_bits(x, key) >> 8).astype(jnp.float32) / 2**24
