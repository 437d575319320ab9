"""A weight whose gradient continues a running total, so that accumulation over microbatches is in place.

``total + grad`` needs both; for the head of a language model that is twice the size of its largest matrix. A matrix
gradient is itself a sum, over tokens, so it can start from the total instead of from zero. `RunningGradient` stands
where the weight stood, and the operations that know it (`linear`, `lowtide.losses.chunked_cross_entropy`) return
``total + grad`` as the weight's cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Array, Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "total"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RunningGradient:
    """A `LinearWeight` whose cotangent is `total` plus the gradient.

    Use it at one place of a function only, outside of loops and `jax.vmap`, which would add the total at every turn.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.core import linear
        >>> x, total = jnp.ones((2, 3)), jnp.full((4, 3), 10.0)
        >>> loss = lambda w: jnp.sum(linear(x, RunningGradient(w, total)))
        >>> jax.grad(loss)(jnp.ones((4, 3)))[0].tolist()
        [12.0, 12.0, 12.0]
    """

    weight: Any
    """The weight, shape [out, in]."""
    total: Any
    """The gradient so far, of the weight's shape and dtype; it gets no cotangent of its own."""

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """The product x Wᵀ, in the dtype of `x`."""
        return _linear(x, self.weight, self.total)


@jax.custom_vjp
def _linear(x: Array, weight: Array, total: Array) -> Array:
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _forward(x: Array, weight: Array, total: Array) -> tuple[Array, Any]:
    return _linear(x, weight, total), (x, weight, total)


def _backward(kept: Any, dy: Array) -> tuple[Array, Array, None]:
    x, weight, total = kept
    dx = jax.lax.dot_general(dy, weight.astype(dy.dtype), (((dy.ndim - 1,), (0,)), ((), ())))
    batch = tuple(range(x.ndim - 1))
    grad = jax.lax.dot_general(dy, x, ((batch, batch), ((), ())), preferred_element_type=total.dtype)
    return dx.astype(x.dtype), total + grad, None


_linear.defvjp(_forward, _backward)
