"""Products of groups of rows as few large products: what a GPU is fast at, where a step of a loop costs microseconds.

One batched product, the slab, takes the first rows of every expert, an eighth more than the mean: it uses the weights
where they are. What busier experts have beyond is taken in tiles, several at once with a copy of their weights, in a
loop that ends with them: none where a router is even. Fewer rows than experts, as of a token that is generated, are
tiles alone, so that no expert is read that no row chose.

Shapes: M rows, E experts, I in, O out, P rows of an expert in the slab, G tiles at once, C rows of a tile.

Known limits: the slab computes its rows whether or not they are there, so that of very uneven routers up to twice the
arithmetic is done, and of few rows more (8 an expert at least); and tiles read and write their weights once more than a
kernel would, that took each from where it is. JAX 0.10 to 0.12 have none for every GPU: XLA multiplies by all experts,
and Pallas leaves Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_MULTIPLE = 8
"""Of rows in the slab and in tiles, which tensor cores ask for."""
_TILES = (16, 256)
"""Rows of the shortest and the longest tile beside a slab."""
_MOST_TILES = 32
_FEW_STEPS = 4
_COPIED_BYTES = 128 * 2**20
"""Of weights that tiles at once may copy."""


def product(transposed: bool, num_experts: int, x_MI: Array, weight: Array, sizes_E: Array) -> Array:
    """Multiply each group of rows by the weights of its expert, to [M, O]."""
    plan, num_rows = _Plan(x_MI.shape[0], num_experts, weight, sizes_E), x_MI.shape[0]
    dims = "gci,gio->gco" if transposed else "gci,goi->gco"
    out = jnp.zeros((num_rows, weight.shape[2 if transposed else 1]), x_MI.dtype)
    if plan.slab:
        part_EPO = jnp.einsum(dims, _taken(x_MI, *plan.in_slab()), weight)
        at_M, ours_M = plan.of_rows()
        out = jnp.where(ours_M[:, None], part_EPO.reshape(-1, out.shape[1])[at_M], 0)

    def body(i: Any, out: Array) -> Array:
        expert_G, rows_GC, ours_GC = plan.tiles(i)
        part_GCO = jnp.einsum(dims, _taken(x_MI, rows_GC, ours_GC), weight[expert_G])
        nowhere_GC = num_rows + jnp.arange(rows_GC.size).reshape(rows_GC.shape)
        return out.at[jnp.where(ours_GC, rows_GC, nowhere_GC)].set(part_GCO, mode="drop", unique_indices=True)

    return plan.over_tiles(body, out)


def weight_gradient(transposed: bool, num_experts: int, x_MI: Array, dy_MO: Array, sizes_E: Array) -> Array:
    """Add up what each expert's rows say of its weights, to [E, O, I] or [E, I, O] in float32."""
    dims = "gci,gco->gio" if transposed else "gci,gco->goi"
    widths = (x_MI.shape[1], dy_MO.shape[1]) if transposed else (dy_MO.shape[1], x_MI.shape[1])
    shape = jax.ShapeDtypeStruct((sizes_E.shape[0], *widths), jnp.float32)
    plan = _Plan(x_MI.shape[0], num_experts, shape, sizes_E)

    def of(rows: Array, ours: Array) -> Array:
        both = _taken(x_MI, rows, ours), _taken(dy_MO, rows, ours)
        return jnp.einsum(dims, *both, preferred_element_type=jnp.float32)

    def body(i: Any, total: Array) -> Array:
        expert_G, rows_GC, ours_GC = plan.tiles(i)
        return total.at[expert_G].add(of(rows_GC, ours_GC))

    return plan.over_tiles(body, of(*plan.in_slab()) if plan.slab else jnp.zeros(shape.shape, shape.dtype))


def _taken(x_MI: Array, rows: Array, ours: Array) -> Array:
    """Take rows; zero for those that are not ours."""
    return jnp.where(ours[..., None], x_MI.at[rows].get(mode="clip"), 0)


class _Plan:
    """Which rows are in the slab, and which in tiles.

    Args:
        num_rows: M.
        num_experts: among how many they are divided, E or, of several devices, more.
        weight: of E experts, or its shape.
        sizes_E: rows of each expert.
    """

    def __init__(self, num_rows: int, num_experts: int, weight: Array | jax.ShapeDtypeStruct, sizes_E: Array) -> None:
        own, mean = sizes_E.shape[0], num_rows // num_experts
        self.slab = 0 if num_rows < num_experts else -(-(mean + -(-mean // 8)) // _MULTIPLE) * _MULTIPLE
        self._tile = min(_TILES[1], max(_TILES[0], 1 << (mean // 4).bit_length() - 1)) if mean >= 4 else _MULTIPLE
        copied = weight.size // own * weight.dtype.itemsize
        self._at_once = min(_MOST_TILES, max(1, _COPIED_BYTES // copied))
        if self.slab:  # what even routers leave for tiles is little
            self._at_once = min(self._at_once, max(1, mean * own // 8 // self._tile))
        chosen = min(own, num_rows)  # an expert of n rows has at most 1 + (n - 1) / tile tiles
        self._most = chosen + (num_rows - chosen) // self._tile
        self._num_rows, self._sizes_E = num_rows, sizes_E
        self._rows_to_E = jnp.cumsum(sizes_E)
        self._rest_E = jnp.maximum(sizes_E - self.slab, 0)
        self._tiles_to_E = jnp.cumsum(-(-self._rest_E // self._tile))

    def in_slab(self) -> tuple[Array, Array]:
        """Return the slab's rows, [E, P], and which of them are their expert's."""
        inside_P = jnp.arange(self.slab)
        rows_EP = (self._rows_to_E - self._sizes_E)[:, None] + inside_P[None]
        return rows_EP, inside_P[None] < self._sizes_E[:, None]

    def of_rows(self) -> tuple[Array, Array]:
        """Return where in the slab each row is, [M], and whether it is there."""
        rows_M = jnp.arange(self._num_rows)
        expert_M = jnp.sum(self._rows_to_E[None] <= rows_M[:, None], axis=1)
        inside_M = rows_M - (self._rows_to_E - self._sizes_E)[jnp.minimum(expert_M, len(self._sizes_E) - 1)]
        ours_M = (expert_M < len(self._sizes_E)) & (inside_M < self.slab)
        return jnp.where(ours_M, expert_M * self.slab + inside_M, 0), ours_M

    def tiles(self, i: Any) -> tuple[Array, Array, Array]:
        """Return the experts of the tiles of a step, [G], their rows, [G, C], and which are there."""
        tile_G = i * self._at_once + jnp.arange(min(self._at_once, self._most))
        is_past_GE = self._tiles_to_E[None] <= tile_G[:, None]
        expert_G = jnp.minimum(jnp.sum(is_past_GE, axis=1), len(self._sizes_E) - 1)
        before_G = jnp.max(jnp.where(is_past_GE, self._tiles_to_E[None], 0), axis=1)
        inside_GC = (tile_G - before_G)[:, None] * self._tile + jnp.arange(self._tile)[None]
        first_G = (self._rows_to_E - self._sizes_E)[expert_G] + self.slab
        ours_GC = (inside_GC < self._rest_E[expert_G][:, None]) & (tile_G < self._tiles_to_E[-1])[:, None]
        return expert_G, first_G[:, None] + inside_GC, ours_GC

    def over_tiles(self, body: Callable[[Any, Array], Array], begin: Array) -> Array:
        """Go over all tiles; of few, without a loop, whose end the host would have to be asked for."""
        steps = -(-self._most // self._at_once)
        if steps <= _FEW_STEPS and not self.slab:
            return functools.reduce(lambda out, i: body(i, out), range(steps), begin)
        return jax.lax.fori_loop(0, -(-self._tiles_to_E[-1] // self._at_once), body, begin)
