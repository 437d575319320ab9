"""A weight whose gradient continues a running total, so that accumulation over microbatches is in place.

``total + grad`` needs both arrays in memory. For the head of a language model that is twice the size of its largest
matrix. A matrix gradient is itself a sum over tokens, so the sum can start from the total instead of from zero. A
`RunningGradient` takes the place of the weight. The operations that support it (`linear`,
`lowtide.losses.chunked_cross_entropy`) return ``total + grad`` as the weight's cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._errors import StructureError


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "total", "active"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RunningGradient:
    """A `LinearWeight` whose cotangent is `total` plus the gradient.

    Use it at one place of a function only, outside of loops and `jax.vmap`, which would add the total at every step.

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
    """The gradient so far, of the weight's shape and dtype. It gets no cotangent itself."""
    active: Bool[Array, ""] | None = None
    """If False, nothing is added, whatever the cotangent: a mean over no tokens is 0/0. None means True."""

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`."""
        return _linear(x, self.weight, self.total, self.active)


@jax.custom_batching.custom_vmap
def add_running(total: Array, grad: Array) -> Array:
    """Add a gradient to the running total, in derivative rules of operations that support `RunningGradient`.

    Args:
        total: the gradient so far.
        grad: the gradient to add, of the same shape and dtype.

    Returns:
        The sum.

    Raises:
        StructureError: under `jax.vmap`, which would add the total once for each entry of its axis.

    Memory:
        In place if the total is not read again.

    Examples:
        >>> import jax.numpy as jnp
        >>> add_running(jnp.ones(2), jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    return total + grad


@add_running.def_vmap
def _refuse_vmap(axis_size: int, in_batched: Any, total: Array, grad: Array) -> Any:
    raise StructureError(
        "a running gradient cannot be computed under jax.vmap, which would add the total once for each entry",
        expected="one call on the whole batch",
        got=f"jax.vmap over an axis of {axis_size}",
        hint="call linear or chunked_cross_entropy without vmap, or take the leaf out of LayerStack.running",
    )


def if_active(active: Array | None, x: Array) -> Array:
    """Return an array, or zeros where a running gradient is not active.

    Args:
        active: a flag, or None for True.
        x: any array.

    Returns:
        An array like `x`.

    Memory:
        No memory if the compiler fuses it with the operation that reads it.

    Examples:
        >>> import jax.numpy as jnp
        >>> if_active(jnp.bool_(False), jnp.full(2, jnp.nan)).tolist()
        [0.0, 0.0]
    """
    return x if active is None else jnp.where(active, x, jnp.zeros((), x.dtype))


@jax.custom_vjp
def _linear(x: Array, weight: Array, total: Array, active: Array | None) -> Array:
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _forward(x: Array, weight: Array, total: Array, active: Array | None) -> tuple[Array, Any]:
    return _linear(x, weight, total, active), (x, weight, total, active)


def _backward(residuals: Any, dy: Array) -> tuple[Array, Array, None, None]:
    x, weight, total, active = residuals
    # Both operands: NaN in either one would reach the total, since 0 * NaN is NaN.
    x, dy = if_active(active, x), if_active(active, dy)
    dx = jax.lax.dot_general(dy, weight.astype(dy.dtype), (((dy.ndim - 1,), (0,)), ((), ())))
    batch = tuple(range(x.ndim - 1))
    grad = jax.lax.dot_general(dy, x, ((batch, batch), ((), ())), preferred_element_type=total.dtype)
    return dx.astype(x.dtype), add_running(total, grad), None, None


_linear.defvjp(_forward, _backward)
