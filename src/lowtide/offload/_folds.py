"""Reductions over rows that are computed block by block: initial values, and how to combine blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

FOLDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}
"""JAX's reduction primitives, with the operation that combines the results of two blocks."""


def initial_value(primitive: Any, aval: Any) -> Any:
    """Return the initial value of a fold in `FOLDS`; sums of narrow floats are in float32, as XLA computes them."""
    name, dtype = primitive.name, aval.dtype
    if name == "reduce_sum":
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return jnp.zeros(aval.shape, jnp.promote_types(dtype, jnp.float32) if is_float else dtype)
    if dtype == jnp.bool_:
        return jnp.full(aval.shape, name in ("reduce_and", "reduce_min"))
    if name in ("reduce_and", "reduce_or"):
        return jnp.full(aval.shape, -1 if name == "reduce_and" else 0).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(aval.shape, -jnp.inf if name == "reduce_max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.full(aval.shape, limits.min if name == "reduce_max" else limits.max, dtype)


def fold_block(primitive: Any, params: Mapping[str, Any], block: Any, total: Any) -> Any:
    """Reduce one block and combine it with the total."""
    return FOLDS[primitive.name](total, primitive.bind(block, **params).astype(total.dtype))
