"""Weights in bfloat16 that are updated as if they were wider.

What a weight in bfloat16 lacks of the number that it stands for, its *rest*, is kept beside the optimizer's state: in 8
bits (``split``, after FlashOptim, arXiv:2602.23349), in bfloat16 (``kahan``), or not at all, with weights that are
rounded up as often as they are nearer to what is above them (``stochastic``). A rest is at most half of the distance
between two numbers of bfloat16 there, which is known from the weight: so 8 bits need no scales.

Updates have the weights' dtype, so that they need no more room than gradients: where a weight changes by less than its
half they are exact, and what one lacks is part of the rest.
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
"""In float32: XLA may take a pair of conversions for nothing, but not this."""


def is_narrow(leaf: Any) -> bool:
    """Whether a parameter is one that this is for."""
    return jnp.result_type(leaf) == jnp.bfloat16


def first_rests(kind: str, params: Tree, least_size: int) -> Tree:
    """Return what is kept beside parameters at first: zeros, and None where nothing is.

    Args:
        kind: one of `WEIGHTS`.
        params: the parameters.
        least_size: leaves of fewer numbers keep the whole rest, in float32.
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
        ConfigError: with the dtypes that there are.
    """
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(is_narrow, leaves)):
        raise ConfigError(
            f'weights="{kind}" is for parameters in bfloat16, and there are none',
            got=", ".join(sorted({jnp.result_type(leaf).name for leaf in leaves})),
            hint="cast the parameters to bfloat16, or leave weights out",
        )


def widened(params: Tree, rests: Tree) -> Tree:
    """Return the numbers in float32 that parameters in bfloat16 stand for; others as they are."""
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
    """Return rests like other ones of the same parameters: of what the old ones hold, the same numbers, or zeros.

    Args:
        params: the parameters.
        old: their rests so far; empty for none.
        like: shapes and dtypes of the new ones.
    """
    leaves, structure = jax.tree.flatten(params)
    known = structure.flatten_up_to(old) if jax.tree.leaves(old) else [None] * len(leaves)

    def one(leaf: Any, rest: Any, new: Any) -> Any:
        if not hasattr(new, "dtype"):
            return new  # None, or what stands where another transformation has the parameter
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
    """Return updates in the parameters' dtypes, and the rests after them.

    Args:
        params: parameters, of which those in bfloat16 are meant; of others updates pass as they are.
        wide: `widened` of them.
        rests: what was kept beside them.
        updates: those of `wide`.
        keys: a random uint32 for each leaf.
        to_bfloat16: rounds numbers in float32 to such as bfloat16 has.
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
            # What a step lacks that is not exact is more than 8 bits hold. And at random, too: else weights would never
            # change by updates below half of the distance of two codes.
            codes = jnp.floor((goal - near) / _half_distance(near) * _MOST + _uniform(goal, key))
            lacks = jnp.clip(codes, -_MOST, _MOST)
        else:
            lacks = goal - to_bfloat16(old + step)  # as optax.apply_updates adds
        return step.astype(leaf.dtype), jnp.where(jnp.isfinite(lacks), lacks, 0).astype(rest.dtype)

    parts = [structure.flatten_up_to(tree) for tree in (wide, rests, updates)]
    made = list(map(one, leaves, *parts, keys))
    return structure.unflatten([update for update, _ in made]), structure.unflatten([rest for _, rest in made])


def _rounded(goal: Array, key: Array) -> Array:
    """Round at random; a derivative passes as if nothing were rounded."""
    passed = jnp.where(jnp.isfinite(goal), goal - jax.lax.stop_gradient(goal), 0)  # 0, whose derivative is 1
    return jax.lax.stop_gradient(round_at_random(goal, key)) + passed


def _half_distance(x: Array) -> Array:
    """Half of the distance between two numbers of bfloat16 near one in float32; of the least, what still is normal."""
    exponent = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 23) & 0xFF
    return jax.lax.bitcast_convert_type((jnp.maximum(exponent, 9) - 8) << 23, jnp.float32)


def _uniform(x: Array, key: Array) -> Array:
    """Numbers in [0, 1) of numbers and a key."""
    return (random_bits(x, key) >> 8).astype(jnp.float32) / 2**24
