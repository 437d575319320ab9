"""One product for many experts: rows in order of their expert, each multiplied by the weights of its own.

On a TPU `jax.lax.ragged_dot_general`, which XLA compiles to a kernel over groups. Elsewhere XLA multiplies every row by
every expert (JAX 0.10.2: eight times the arithmetic for eight experts), so there rows are taken in blocks of one
expert (`_grouped_blocks`), or on a GPU in one batch and what it does not hold (`_grouped_slab`).

Shapes: M rows, E experts, I in, O out.

Known limit, elsewhere than on a TPU: first derivatives in reverse mode only (JAX refuses `jax.jvp` by name).

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
    """Multiply each group of rows by the weights of its expert.

    Args:
        x_MI: rows, those of the first expert first.
        weight: of each expert, [E, O, I], or [E, I, O]; or a node with a method ``grouped``, as adapters have.
        sizes_E: rows of each expert; what they add up to may be less than M.
        transposed: whether `weight` is [E, I, O].
        num_experts: among how many experts the rows are divided, those of other devices included; None: E.

    Returns:
        ``x_MI[m] @ weight[e].T`` for the expert e of each row, in the dtype of `x_MI`; zero for rows of no expert.

    Memory:
        The result, and on a CPU a block's rows and weights; on a GPU 9/8 of the rows and of the result once more, of 8
        rows an expert at least (none of fewer rows than experts), and at most 128 MiB of weights, or one expert's.
    """
    own: Any = getattr(weight, "grouped", None)
    if own is not None:  # an adapter, which multiplies by the weight and its factors apart
        run = functools.partial(grouped_linear, sizes_E=sizes_E, num_experts=num_experts)
        return own(x_MI, run, transposed=transposed)
    weight = weight.astype(x_MI.dtype)
    if traced_device().platform == "tpu":
        contract = (((1,), (1 if transposed else 2,)), ((), ()))
        dims = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=contract, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        )
        return jax.lax.ragged_dot_general(x_MI, weight, sizes_E, dims)
    return _product(transposed, num_experts or sizes_E.shape[0], x_MI, weight, sizes_E)


def _way() -> Any:
    """Return what multiplies where the program is traced for."""
    return _grouped_slab if traced_device().platform == "gpu" else _grouped_blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    return _way().product(transposed, num_experts, x_MI, weight, sizes_E)


def _forward(transposed: bool, num_experts: int, x: Any, weight: Any, sizes: Any) -> tuple[Array, Any]:
    out: Any = _product(transposed, num_experts, x.value, weight.value, sizes.value)
    # What trains says what the backward pass needs: without gradients of weights no rows wait for it.
    return out, (x.value if weight.perturbed else None, weight.value, sizes.value, x.perturbed)


def _backward(transposed: bool, num_experts: int, kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    x_MI, weight, sizes_E, wants_x = kept
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    dx = _product(not transposed, num_experts, cotangent, weight, sizes_E) if wants_x else None
    if x_MI is None:
        return dx, None, None
    dw = _way().weight_gradient(transposed, num_experts, x_MI, cotangent, sizes_E)
    return dx, dw.astype(weight.dtype), None


_product.defvjp(_forward, _backward, symbolic_zeros=True)
