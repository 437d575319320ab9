"""Grouped matrix product for GPUs: a few large products, because each loop step costs microseconds there.

One batched product, the slab, computes the first rows of every expert, 9/8 of the mean number of rows. It reads the
weights in place. A loop computes the remaining rows of busier experts in tiles, several tiles at a time, each with a
copy of its weights. With an even router the loop has no steps. With fewer rows than experts, as for a generated token,
there is no slab: tiles read only the experts that some row chose.

Shapes: M rows, E experts, I in, O out, P rows of an expert in the slab, G tiles at once, C rows of a tile.

Known limits: the slab always computes all its rows. Very uneven routers cause up to twice the arithmetic, and few rows
cause more (at least 8 rows per expert). Tiles copy their weights, where a kernel could read them in place. JAX 0.10 to
0.12 have no such kernel for every GPU: XLA multiplies by all experts, and Pallas deprecates its Triton backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_ROW_MULTIPLE = 8
"""Rows of the slab and of tiles are a multiple of this, as tensor cores require."""
_TILES = (16, 256)
"""Rows of the shortest and of the longest tile that is used together with a slab."""
_MAX_TILES = 32
_MAX_UNROLLED_STEPS = 4
_COPIED_BYTES = 128 * 2**20
"""Most bytes of weights that the tiles of one step may copy; one expert is copied even if it is larger."""


def product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    """Multiply each group of rows by the weights of its expert, to [M, O]."""
    plan, num_rows = _Plan(x_MI.shape[0], num_experts, weight, sizes_E), x_MI.shape[0]
    dims = "gci,gio->gco" if transposed else "gci,goi->gco"
    out = jnp.zeros((num_rows, weight.shape[2 if transposed else 1]), x_MI.dtype)
    if plan.slab:
        part_EPO = jnp.einsum(dims, _gather_masked(x_MI, *plan.slab_rows()), weight)
        position_M, in_slab_M = plan.slab_positions()
        out = jnp.where(in_slab_M[:, None], part_EPO.reshape(-1, out.shape[1])[position_M], 0)

    def body(i: Any, out: Array) -> Array:
        expert_G, rows_GC, is_valid_GC = plan.tiles(i)
        part_GCO = jnp.einsum(dims, _gather_masked(x_MI, rows_GC, is_valid_GC), weight[expert_G])
        # Invalid rows get distinct indices past the end: `mode="drop"` discards them and indices stay unique.
        out_of_range_GC = num_rows + jnp.arange(rows_GC.size).reshape(rows_GC.shape)
        return out.at[jnp.where(is_valid_GC, rows_GC, out_of_range_GC)].set(part_GCO, mode="drop", unique_indices=True)

    return plan.loop_over_tiles(body, out)


def weight_gradient(transposed: bool, num_experts: int, x_MI: Array, dy_MO: Array, sizes_E: Array) -> Array:
    """Sum the weight gradient of each expert over its rows, to [E, O, I] or [E, I, O] in float32."""
    dims = "gci,gco->gio" if transposed else "gci,gco->goi"
    widths = (x_MI.shape[1], dy_MO.shape[1]) if transposed else (dy_MO.shape[1], x_MI.shape[1])
    shape = jax.ShapeDtypeStruct((sizes_E.shape[0], *widths), jnp.float32)
    plan = _Plan(x_MI.shape[0], num_experts, shape, sizes_E)

    def gradient(rows: Array, mask: Array) -> Array:
        operands = _gather_masked(x_MI, rows, mask), _gather_masked(dy_MO, rows, mask)
        return jnp.einsum(dims, *operands, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert_G, rows_GC, is_valid_GC = plan.tiles(i)
        return total.at[expert_G].add(gradient(rows_GC, is_valid_GC))

    return plan.loop_over_tiles(body, gradient(*plan.slab_rows()) if plan.slab else jnp.zeros(shape.shape, shape.dtype))


def _gather_masked(x_MI: Array, rows: Array, mask: Array) -> Array:
    """Gather rows, with zeros where `mask` is false."""
    return jnp.where(mask[..., None], x_MI.at[rows].get(mode="clip"), 0)


class _Plan:
    """Assignment of rows to the slab and to tiles; `num_experts` is larger than E when experts are sharded."""

    def __init__(self, num_rows: int, num_experts: int, weight: Array | jax.ShapeDtypeStruct, sizes_E: Array) -> None:
        num_local_experts, mean = sizes_E.shape[0], num_rows // num_experts
        # Slab: 9/8 of the mean, rounded up to the multiple. Tile: a power of two of at most a quarter of the mean.
        self.slab = 0 if num_rows < num_experts else -(-(mean + -(-mean // 8)) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        self._tile_rows = (
            min(_TILES[1], max(_TILES[0], 1 << (mean // 4).bit_length() - 1)) if mean >= 4 else _ROW_MULTIPLE
        )
        expert_bytes = weight.size // num_local_experts * weight.dtype.itemsize
        self._tiles_per_step = min(_MAX_TILES, max(1, _COPIED_BYTES // expert_bytes))
        if self.slab:  # an even router leaves few rows for tiles
            self._tiles_per_step = min(self._tiles_per_step, max(1, mean * num_local_experts // 8 // self._tile_rows))
        # An expert with n rows needs at most 1 + (n - 1) // tile tiles.
        max_active_experts = min(num_local_experts, num_rows)
        self._max_tiles = max_active_experts + (num_rows - max_active_experts) // self._tile_rows
        self._num_rows, self._sizes_E = num_rows, sizes_E
        self._rows_to_E = jnp.cumsum(sizes_E)
        self._remaining_E = jnp.maximum(sizes_E - self.slab, 0)
        self._tiles_to_E = jnp.cumsum(-(-self._remaining_E // self._tile_rows))

    def slab_rows(self) -> tuple[Array, Array]:
        """Return the row indices of the slab, [E, P], and which of them belong to their expert."""
        offset_P = jnp.arange(self.slab)
        rows_EP = (self._rows_to_E - self._sizes_E)[:, None] + offset_P[None]
        return rows_EP, offset_P[None] < self._sizes_E[:, None]

    def slab_positions(self) -> tuple[Array, Array]:
        """Return the position of each row in the slab, [M], and whether the row is in it."""
        rows_M = jnp.arange(self._num_rows)
        expert_M = jnp.sum(self._rows_to_E[None] <= rows_M[:, None], axis=1)
        offset_M = rows_M - (self._rows_to_E - self._sizes_E)[jnp.minimum(expert_M, len(self._sizes_E) - 1)]
        in_slab_M = (expert_M < len(self._sizes_E)) & (offset_M < self.slab)
        return jnp.where(in_slab_M, expert_M * self.slab + offset_M, 0), in_slab_M

    def tiles(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the experts of the tiles of step `i`, [G], their row indices, [G, C], and which rows are valid."""
        tile_G = i * self._tiles_per_step + jnp.arange(min(self._tiles_per_step, self._max_tiles))
        # A tile belongs to the first expert whose cumulative number of tiles exceeds the tile's index.
        is_past_GE = self._tiles_to_E[None] <= tile_G[:, None]
        expert_G = jnp.minimum(jnp.sum(is_past_GE, axis=1), len(self._sizes_E) - 1)
        tiles_before_G = jnp.max(jnp.where(is_past_GE, self._tiles_to_E[None], 0), axis=1)
        offset_GC = (tile_G - tiles_before_G)[:, None] * self._tile_rows + jnp.arange(self._tile_rows)[None]
        first_row_G = (self._rows_to_E - self._sizes_E)[expert_G] + self.slab
        is_valid_GC = (offset_GC < self._remaining_E[expert_G][:, None]) & (tile_G < self._tiles_to_E[-1])[:, None]
        return expert_G, first_row_G[:, None] + offset_GC, is_valid_GC

    def loop_over_tiles(self, body: Callable[[Any, Array], Array], initial: Array) -> Array:
        """Run `body` over all tiles; a few steps are unrolled, since the host must read a loop's condition."""
        steps = -(-self._max_tiles // self._tiles_per_step)
        if steps <= _MAX_UNROLLED_STEPS and not self.slab:
            return functools.reduce(lambda out, i: body(i, out), range(steps), initial)
        return jax.lax.fori_loop(0, -(-self._tiles_to_E[-1] // self._tiles_per_step), body, initial)
