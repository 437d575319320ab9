"""One product for many experts: rows in order of their expert, each multiplied by the weights of its own.

On a TPU `jax.lax.ragged_dot_general`, which XLA compiles to a kernel over groups. Elsewhere XLA multiplies every row by
every expert (JAX 0.10.2, CPU: eight times the arithmetic for eight experts), so rows are taken in blocks there, each of
one expert: a loop of dense products, whose gradients are two more such loops. The last rows of a block may be the next
expert's: they are computed in vain, and overwritten by the block that they belong to.

Shapes: M rows, E experts, I in, O out, C rows of a block.

Known limit: elsewhere than on a TPU first derivatives in reverse mode only (JAX refuses `jax.jvp` by name).

Source: Gale et al., "MegaBlocks" (arXiv:2211.15841), for rows sorted by expert without dropping any.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._attention import traced_device

_MOST_ROWS = 256
_LEAST_ROWS = 8
_BLOCKS_PER_EXPERT = 16


def grouped_linear(
    x_MI: Float[Array, "M I"], weight: Float[Array, "E O I"], sizes_E: Int[Array, "E"], *, transposed: bool = False
) -> Float[Array, "M O"]:
    """Multiply each group of rows by the weights of its expert.

    Args:
        x_MI: rows, those of the first expert first.
        weight: of each expert, [E, O, I], or [E, I, O].
        sizes_E: rows of each expert; what they add up to may be less than M.
        transposed: whether `weight` is [E, I, O].

    Returns:
        ``x_MI[m] @ weight[e].T`` for the expert e of each row, in the dtype of `x_MI`; zero for rows of no expert.

    Memory:
        The result, and a block's rows and weights.
    """
    weight = weight.astype(x_MI.dtype)
    if traced_device().platform == "tpu":
        contract = (((1,), (1 if transposed else 2,)), ((), ()))
        dims = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=contract, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        )
        return jax.lax.ragged_dot_general(x_MI, weight, sizes_E, dims)
    return _in_blocks(transposed, x_MI, weight, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(transposed: bool, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    num_rows, contract = x_MI.shape[0], 0 if transposed else 1
    padded = jnp.pad(x_MI, ((0, blocks.size), (0, 0)))

    def body(i: Any, out: Array) -> Array:
        expert, start, _ = blocks.at(i)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, blocks.size)
        part = jax.lax.dot_general(rows, weight[expert], (((1,), (contract,)), ((), ())))
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    width = weight.shape[2 if transposed else 1]
    out = jnp.zeros((num_rows + blocks.size, width), x_MI.dtype)
    out = jax.lax.fori_loop(0, blocks.number, body, out)[:num_rows]
    return jnp.where((jnp.arange(num_rows) < jnp.sum(sizes_E))[:, None], out, 0)


def _forward(transposed: bool, x: Any, weight: Any, sizes: Any) -> tuple[Array, Any]:
    out: Any = _in_blocks(transposed, x.value, weight.value, sizes.value)
    # What trains says what the backward pass needs: without gradients of weights no rows wait for it.
    return out, (x.value if weight.perturbed else None, weight.value, sizes.value, x.perturbed)


def _backward(transposed: bool, kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    x_MI, weight, sizes_E, wants_x = kept
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    dx = _in_blocks(not transposed, cotangent, weight, sizes_E) if wants_x else None
    if x_MI is None:
        return dx, None, None
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    padding = ((0, blocks.size), (0, 0))
    rows_MI, rows_MO = jnp.pad(x_MI, padding), jnp.pad(cotangent, padding)

    def body(i: Any, total: Array) -> Array:
        expert, start, number = blocks.at(i)
        ours = (jnp.arange(blocks.size) < number)[:, None]
        x_CI = jnp.where(ours, jax.lax.dynamic_slice_in_dim(rows_MI, start, blocks.size), 0)
        dy_CO = jax.lax.dynamic_slice_in_dim(rows_MO, start, blocks.size)
        one, other = (x_CI, dy_CO) if transposed else (dy_CO, x_CI)
        part = jax.lax.dot_general(one, other, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return total.at[expert].add(part)

    total = jax.lax.fori_loop(0, blocks.number, body, jnp.zeros(weight.shape, jnp.float32))
    return dx, total.astype(weight.dtype), None


_in_blocks.defvjp(_forward, _backward, symbolic_zeros=True)


class _Blocks:
    """Blocks of rows of one expert each.

    Args:
        num_rows: M.
        sizes_E: rows of each expert.
    """

    def __init__(self, num_rows: int, sizes_E: Array) -> None:
        wanted = num_rows // (_BLOCKS_PER_EXPERT * sizes_E.shape[0])
        self.size = min(_MOST_ROWS, max(_LEAST_ROWS, 1 << max(wanted, 1).bit_length() - 1))
        self._sizes_E = sizes_E
        self._rows_before_E = jnp.cumsum(sizes_E) - sizes_E
        per_expert_E = -(-sizes_E // self.size)
        self._blocks_to_E = jnp.cumsum(per_expert_E)
        self._blocks_before_E = self._blocks_to_E - per_expert_E
        self.number = self._blocks_to_E[-1]

    def at(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the expert of a block, its first row, and how many rows are the expert's."""
        expert = jnp.sum(self._blocks_to_E <= i)
        inside = (i - self._blocks_before_E[expert]) * self.size
        return expert, self._rows_before_E[expert] + inside, self._sizes_E[expert] - inside
