"""A product whose second operand's gradient is a product the other way round: of a factor of few columns, on a CPU.

JAX multiplies the cotangent of a product by its first operand to get the gradient of the second, [out, T] by [T, rank].
A CPU stores the first operand of a product anew where what is summed over does not come last, and here that is the wide
one: with LoRA on small models a fifth of a step. The other way round it is the narrow one.

Limits: policies of `jax.checkpoint` that ask for products by their operation (`dots_saveable`) do not know this one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._compat import bilinear
from ._explicit import explicit_mesh
from ._traced import traced_device
from ._varying import varying_axes


def turned_product(x: Array, factor: Array) -> Array:
    """Compute x Fᵀ of one dtype; [..., T, rank] and [out, rank] to [..., T, out]."""
    config: Any = jax.config
    if traced_device().platform != "cpu" or config.jax_default_matmul_precision is not None:
        return _product(x, factor)
    if explicit_mesh((x, factor)) is not None or any(varying_axes(jax.typeof(each)) for each in (x, factor)):
        return _product(x, factor)
    return _turned().bind(x, factor)


def _product(x: Array, factor: Array) -> Array:
    return jax.lax.dot_general(x, factor, (((x.ndim - 1,), (1,)), ((), ())))


@functools.cache
def _turned() -> Any:
    def of_x(dy: Array, x: Any, factor: Array) -> Array:
        return jax.lax.dot_general(dy, factor, (((dy.ndim - 1,), (0,)), ((), ())))

    def of_factor(dy: Array, x: Array, factor: Any) -> Array:
        rows = tuple(range(dy.ndim - 1))
        return jnp.swapaxes(jax.lax.dot_general(x, dy, ((rows, rows), ((), ()))), 0, 1)

    return bilinear("turned_product", _product, of_x, of_factor)
