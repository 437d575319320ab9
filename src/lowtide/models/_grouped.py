"""Grouped matrix product: rows sorted by expert, each multiplied by the weights of its expert.

A TPU uses `jax.lax.ragged_dot_general`, which XLA compiles to a grouped kernel. On other platforms XLA multiplies every
row by every expert (JAX 0.10.2: eight times the arithmetic for eight experts). So a CPU takes blocks of rows of one
expert (`_grouped_blocks`), and a GPU one batched product plus tiles for the remaining rows (`_grouped_slab`).

Shapes: M rows, E experts, I in, O out.

Known limit on platforms other than TPU: only first derivatives in reverse mode (JAX raises an error for `jax.jvp`).

Source: Gale et al., "MegaBlocks" (arXiv:2211.15841), for rows sorted by expert without dropping any.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ..core import traced_device
from . import _grouped_blocks, _grouped_slab


def grouped_linear(
    x_MI: Float[Array, "M I"],
    weight: Float[Array, "E O I"],
    sizes_E: Int[Array, "E"],
    *,
    transposed: bool = False,
    num_experts: int | None = None,
) -> Float[Array, "M O"]:
    """Return ``x_MI[m] @ weight[e].T`` for the expert e of each row, in the dtype of `x_MI`; zero without an expert.

    Rows are sorted by expert, and `sizes_E` may sum to less than M. `weight` is [E, I, O] if `transposed`, or a node
    with a method ``grouped``, such as an adapter. `num_experts` counts the experts on all devices that share the rows.
    Memory: the result; on a CPU one block's rows and weights, on a GPU the slab and copied weights (`_grouped_slab`).
    """
    grouped_method: Any = getattr(weight, "grouped", None)
    if grouped_method is not None:  # an adapter multiplies by the base weight and by its factors separately
        multiply = functools.partial(grouped_linear, sizes_E=sizes_E, num_experts=num_experts)
        return grouped_method(x_MI, multiply, transposed=transposed)
    weight = weight.astype(x_MI.dtype)
    if traced_device().platform == "tpu":
        contract = (((1,), (1 if transposed else 2,)), ((), ()))
        dims = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=contract, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        )
        return jax.lax.ragged_dot_general(x_MI, weight, sizes_E, dims)
    return _product(transposed, num_experts or sizes_E.shape[0], x_MI, weight, sizes_E)


def _implementation() -> Any:
    """Return the implementation for the device that the program is traced for."""
    return _grouped_slab if traced_device().platform == "gpu" else _grouped_blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    return _implementation().product(transposed, num_experts, x_MI, weight, sizes_E)


def _forward(transposed: bool, num_experts: int, x: Any, weight: Any, sizes: Any) -> tuple[Array, Any]:
    out: Any = _product(transposed, num_experts, x.value, weight.value, sizes.value)
    # `perturbed` tells which inputs are differentiated. Rows are a residual only if the weights need a gradient.
    return out, (x.value if weight.perturbed else None, weight.value, sizes.value, x.perturbed)


def _backward(transposed: bool, num_experts: int, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    x_MI, weight, sizes_E, is_x_perturbed = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    # The gradient of rows is the same product with the weights in the other orientation.
    dx = _product(not transposed, num_experts, cotangent, weight, sizes_E) if is_x_perturbed else None
    if x_MI is None:
        return dx, None, None
    dw = _implementation().weight_gradient(transposed, num_experts, x_MI, cotangent, sizes_E)
    return dx, dw.astype(weight.dtype), None


_product.defvjp(_forward, _backward, symbolic_zeros=True)
