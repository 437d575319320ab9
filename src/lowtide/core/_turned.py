"""A product with a narrow factor whose gradient is computed transposed, which is faster on a CPU.

JAX computes the gradient of a product's second operand as cotangent times first operand, [out, T] by [T, rank]. A CPU
copies the first operand of a product if the summed axis is not its last one. Here that is the wide operand: with LoRA
on small models the copy takes a fifth of a step. In the transposed product it is the narrow one.

Limits: policies of `jax.checkpoint` that select products by their primitive (`dots_saveable`) do not recognise this
one.
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
    if explicit_mesh((x, factor)) is not None or any(varying_axes(jax.typeof(array)) for array in (x, factor)):
        return _product(x, factor)
    return _transposed_product().bind(x, factor)


def _product(x: Array, factor: Array) -> Array:
    return jax.lax.dot_general(x, factor, (((x.ndim - 1,), (1,)), ((), ())))


@functools.cache
def _transposed_product() -> Any:
    def transpose_x(dy: Array, x: Any, factor: Array) -> Array:
        return jax.lax.dot_general(dy, factor, (((dy.ndim - 1,), (0,)), ((), ())))

    def transpose_factor(dy: Array, x: Array, factor: Any) -> Array:
        rows = tuple(range(dy.ndim - 1))
        return jnp.swapaxes(jax.lax.dot_general(x, dy, ((rows, rows), ((), ()))), 0, 1)

    return bilinear("turned_product", _product, transpose_x, transpose_factor)
