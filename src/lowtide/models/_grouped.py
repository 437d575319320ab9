"""One product for many experts: rows in order of their expert, each multiplied by the weights of its own.

On a TPU `jax.lax.ragged_dot_general`, which XLA compiles to a kernel over groups. Elsewhere XLA multiplies every row by
every expert (JAX 0.10.2, CPU: eight times the arithmetic for eight experts), so rows are taken in blocks there, each of
one expert: a loop of dense products, whose gradients are two more such loops. The last rows of a block may be the next
expert's: they are computed in vain, and overwritten by the block that they belong to.

A CPU reads an expert's weights again for each block, so its blocks are long, and a branch for each of a few lengths
takes the shortest that holds what is left (4,096 rows, 16 experts, 512 to 384, float32: 31 ms of CPU, 66 with blocks of
16 rows, 25 for one dense product of as many). A GPU would wait for the host to choose: its blocks have one length.

Shapes: M rows, E experts, I in, O out, C rows of a block.

Known limits, elsewhere than on a TPU: first derivatives in reverse mode only (JAX refuses `jax.jvp` by name); and on a
CPU `jax.vmap` over tokens computes a block of every length, since JAX then selects among branches.

Source: Gale et al., "MegaBlocks" (arXiv:2211.15841), for rows sorted by expert without dropping any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._attention import traced_device

_LENGTHS = (8, 16, 32, 64, 128, 192, 256)
_BLOCKS_PER_EXPERT = 16


def grouped_linear(
    x_MI: Float[Array, "M I"], weight: Float[Array, "E O I"], sizes_E: Int[Array, "E"], *, transposed: bool = False
) -> Float[Array, "M O"]:
    """Multiply each group of rows by the weights of its expert.

    Args:
        x_MI: rows, those of the first expert first.
        weight: of each expert, [E, O, I], or [E, I, O]; or a node with a method ``grouped``, as adapters have.
        sizes_E: rows of each expert; what they add up to may be less than M.
        transposed: whether `weight` is [E, I, O].

    Returns:
        ``x_MI[m] @ weight[e].T`` for the expert e of each row, in the dtype of `x_MI`; zero for rows of no expert.

    Memory:
        The result, and a block's rows and weights.
    """
    own: Any = getattr(weight, "grouped", None)
    if own is not None:  # an adapter, which multiplies by the weight and its factors apart
        return own(x_MI, functools.partial(grouped_linear, sizes_E=sizes_E), transposed=transposed)
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
    padded = jnp.pad(x_MI, ((0, blocks.most), (0, 0)))

    def product(length: int, rows_CI: Array, weight: Array) -> Array:
        part = jax.lax.dot_general(rows_CI[:length], weight, (((1,), (contract,)), ((), ())))
        return jnp.pad(part, ((0, blocks.most - length), (0, 0)))

    def body(i: Any, out: Array) -> Array:
        expert, start, number = blocks.at(i)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, blocks.most)
        part = blocks.shortest(number, product, rows, weight[expert])
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    width = weight.shape[2 if transposed else 1]
    out = jnp.zeros((num_rows + blocks.most, width), x_MI.dtype)
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
    padding = ((0, blocks.most), (0, 0))
    rows_MI, rows_MO = jnp.pad(x_MI, padding), jnp.pad(cotangent, padding)

    def product(length: int, x_CI: Array, dy_CO: Array) -> Array:
        one, other = (x_CI, dy_CO) if transposed else (dy_CO, x_CI)
        contract = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(one[:length], other[:length], contract, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert, start, number = blocks.at(i)
        ours = (jnp.arange(blocks.most) < number)[:, None]
        x_CI = jnp.where(ours, jax.lax.dynamic_slice_in_dim(rows_MI, start, blocks.most), 0)
        dy_CO = jax.lax.dynamic_slice_in_dim(rows_MO, start, blocks.most)
        return total.at[expert].add(blocks.shortest(number, product, x_CI, dy_CO))

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
        if traced_device().platform == "cpu":
            self._lengths = tuple(length for length in _LENGTHS if length < 2 * num_rows) or _LENGTHS[:1]
        else:
            wanted = num_rows // (_BLOCKS_PER_EXPERT * sizes_E.shape[0])
            self._lengths = (min(_LENGTHS[-1], max(_LENGTHS[0], 1 << max(wanted, 1).bit_length() - 1)),)
        self.most = self._lengths[-1]
        self._sizes_E = sizes_E
        self._rows_before_E = jnp.cumsum(sizes_E) - sizes_E
        per_expert_E = -(-sizes_E // self.most)
        self._blocks_to_E = jnp.cumsum(per_expert_E)
        self._blocks_before_E = self._blocks_to_E - per_expert_E
        self.number = self._blocks_to_E[-1]

    def at(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the expert of a block, its first row, and how many rows from there on are the expert's."""
        expert = jnp.sum(self._blocks_to_E <= i)
        inside = (i - self._blocks_before_E[expert]) * self.most
        return expert, self._rows_before_E[expert] + inside, self._sizes_E[expert] - inside

    def shortest(self, number: Array, product: Callable[..., Array], *rows: Array) -> Array:
        """Return ``product(length, *rows)`` with the least length that holds `number` rows, or the greatest."""
        which = jnp.sum(jnp.asarray(self._lengths[:-1]) < number)
        return jax.lax.switch(which, [functools.partial(product, length) for length in self._lengths], *rows)
