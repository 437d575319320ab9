"""Grouped matrix product for CPUs: a loop over blocks of rows of one expert each.

The last rows of a block may belong to the next expert. Their results are wrong, and the block of that expert overwrites
them. A CPU reads an expert's weights again for each block, so blocks are long. `jax.lax.switch` selects the shortest of
a few block lengths that holds the remaining rows. CPU time for 4,096 rows and 16 experts, 512 to 384, float32: 31 ms,
versus 66 ms with blocks of 16 rows and 25 ms for one dense product of as many rows.

Shapes: M rows, E experts, I in, O out, C rows of a block.

Known limit: `jax.vmap` over tokens computes a block of every length, because JAX then turns the switch into a select.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_BLOCK_LENGTHS = (8, 16, 32, 64, 128, 192, 256)


def product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    """Multiply each group of rows by the weights of its expert, to [M, O]."""
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    num_rows, contract = x_MI.shape[0], 0 if transposed else 1
    # Without padding `dynamic_slice` would clamp the start of a last block that is not full.
    padded = jnp.pad(x_MI, ((0, blocks.max_length), (0, 0)))

    def multiply(length: int, rows_CI: Array, weight: Array) -> Array:
        part = jax.lax.dot_general(rows_CI[:length], weight, (((1,), (contract,)), ((), ())))
        return jnp.pad(part, ((0, blocks.max_length - length), (0, 0)))

    def body(i: Any, out: Array) -> Array:
        expert, start, num_remaining = blocks.block(i)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, blocks.max_length)
        # Blocks run in the order of rows, so the next block overwrites what this one writes past its own rows.
        part = blocks.apply_shortest(num_remaining, multiply, rows, weight[expert])
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    width = weight.shape[2 if transposed else 1]
    out = jnp.zeros((num_rows + blocks.max_length, width), x_MI.dtype)
    out = jax.lax.fori_loop(0, blocks.num_blocks, body, out)[:num_rows]
    # Rows of no expert: the last block may have computed some of them.
    return jnp.where((jnp.arange(num_rows) < jnp.sum(sizes_E))[:, None], out, 0)


def weight_gradient(transposed: bool, num_experts: int, x_MI: Array, dy_MO: Array, sizes_E: Array) -> Array:
    """Sum the weight gradient of each expert over its rows, to [E, O, I] or [E, I, O] in float32."""
    blocks = _Blocks(x_MI.shape[0], sizes_E)
    padding = ((0, blocks.max_length), (0, 0))
    rows_MI, rows_MO = jnp.pad(x_MI, padding), jnp.pad(dy_MO, padding)

    def multiply(length: int, x_CI: Array, dy_CO: Array) -> Array:
        lhs, rhs = (x_CI, dy_CO) if transposed else (dy_CO, x_CI)
        contract = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(lhs[:length], rhs[:length], contract, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert, start, num_remaining = blocks.block(i)
        is_valid = (jnp.arange(blocks.max_length) < num_remaining)[:, None]
        x_CI = jnp.where(is_valid, jax.lax.dynamic_slice_in_dim(rows_MI, start, blocks.max_length), 0)
        dy_CO = jnp.where(is_valid, jax.lax.dynamic_slice_in_dim(rows_MO, start, blocks.max_length), 0)
        return total.at[expert].add(blocks.apply_shortest(num_remaining, multiply, x_CI, dy_CO))

    widths = (x_MI.shape[1], dy_MO.shape[1]) if transposed else (dy_MO.shape[1], x_MI.shape[1])
    return jax.lax.fori_loop(0, blocks.num_blocks, body, jnp.zeros((sizes_E.shape[0], *widths), jnp.float32))


class _Blocks:
    """Blocks of rows of one expert each; `sizes_E` has the number of rows of each expert."""

    def __init__(self, num_rows: int, sizes_E: Array) -> None:
        self._lengths = tuple(length for length in _BLOCK_LENGTHS if length < 2 * num_rows) or _BLOCK_LENGTHS[:1]
        self.max_length = self._lengths[-1]
        self._sizes_E = sizes_E
        self._rows_before_E = jnp.cumsum(sizes_E) - sizes_E
        per_expert_E = -(-sizes_E // self.max_length)
        self._blocks_to_E = jnp.cumsum(per_expert_E)
        self._blocks_before_E = self._blocks_to_E - per_expert_E
        self.num_blocks = self._blocks_to_E[-1]

    def block(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the expert of block `i`, its first row, and how many rows of the expert begin there."""
        # The first expert whose cumulative number of blocks exceeds `i`.
        expert = jnp.sum(self._blocks_to_E <= i)
        offset = (i - self._blocks_before_E[expert]) * self.max_length
        return expert, self._rows_before_E[expert] + offset, self._sizes_E[expert] - offset

    def apply_shortest(self, num_remaining: Array, multiply: Callable[..., Array], *rows: Array) -> Array:
        """Return ``multiply(length, *rows)`` for the shortest length of at least `num_remaining`, or the longest."""
        length_index = jnp.sum(jnp.asarray(self._lengths[:-1]) < num_remaining)
        return jax.lax.switch(length_index, [functools.partial(multiply, length) for length in self._lengths], *rows)
