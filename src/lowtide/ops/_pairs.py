"""Pairs of a block of queries and a block of keys that it may see: those of the traced and of the running program.

Shapes: B batch, T queries, S keys, C rows and D columns of a block, P pairs of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

LEAST_ROWS = 128
"""The fewest rows of a block; with fewer a chip's matrix units are not busy."""


class Config(NamedTuple):
    """Settings of attention that are known when the program is traced."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    size: int
    """The most rows and columns of a block."""


class RuntimeMask(NamedTuple):
    """Parts of the mask that only the running program knows, each or None."""

    window: Array | None
    start: Array | None
    query_segments: Array | None
    key_segments: Array | None


class Pairs(NamedTuple):
    """Pairs of a block of queries and a block of keys that it may see, the last queries first."""

    rows: int
    columns: int
    row_P: np.ndarray
    """The first query of each pair."""
    own_row_P: np.ndarray
    """The first query of each pair that is not in the block before, too."""
    column_P: np.ndarray
    own_column_P: np.ndarray
    is_first_P: np.ndarray
    """Whether it is the first pair of its block of queries."""


class Pair(NamedTuple):
    """One pair, as the loop gets it."""

    row: Array
    own_row: Array
    column: Array
    own_column: Array
    is_first: Array
    is_needed: Array | None


def pairs_of(config: Config, runtime_mask: RuntimeMask, num_queries: int, num_keys: int) -> Pairs:
    """List the pairs that the traced program may need."""
    rows, columns = even_size(num_queries, config.size), even_size(num_keys, config.size)
    entries: list[tuple[int, int, int, int, bool]] = []
    for own_row in reversed(range(0, num_queries, rows)):
        # The last block is moved back so that it ends with the row.
        row, is_first = min(own_row, num_queries - rows), True
        for own_column in range(0, num_keys, columns):
            last_row, last_column = row + rows - 1, min(own_column + columns, num_keys) - 1
            is_later = config.causal and runtime_mask.start is None and own_column > last_row
            is_passed = (
                config.window is not None and runtime_mask.start is None and own_row - last_column >= config.window
            )
            if is_later or is_passed:
                continue
            entries.append((row, own_row, min(own_column, num_keys - columns), own_column, is_first))
            is_first = False
        if is_first:  # queries that see no key still need one pair, which writes their zeros
            entries.append((row, own_row, 0, 0, True))
    row, own_row, column, own_column, first = (np.asarray(values) for values in zip(*entries, strict=True))
    return Pairs(rows, columns, row, own_row, column, own_column, first)


def even_size(length: int, limit: int) -> int:
    """Return the size of the fewest blocks that cover a row, as even as multiples of `LEAST_ROWS` allow."""
    count = -(-length // limit)
    even = -(-length // count)
    return min(limit, -(-even // LEAST_ROWS) * LEAST_ROWS) if length > limit else length


def needed_pairs(config: Config, runtime_mask: RuntimeMask, pairs: Pairs) -> Array | None:
    """Return which pairs the running program needs, booleans [P]; None if it needs all of them."""
    if all(field is None for field in runtime_mask):
        return None
    start = 0 if runtime_mask.start is None else runtime_mask.start
    row_P, column_P = jnp.asarray(pairs.row_P) + start, jnp.asarray(pairs.column_P)
    needed_P = jnp.ones(row_P.shape, bool)
    if config.causal:
        needed_P &= column_P <= row_P + pairs.rows - 1
    window = config.window if runtime_mask.window is None else runtime_mask.window
    if window is not None:
        needed_P &= row_P - (column_P + pairs.columns - 1) < window
    if runtime_mask.query_segments is not None and runtime_mask.key_segments is not None:
        min_query_BP, max_query_BP = _segment_ranges(runtime_mask.query_segments, pairs.row_P, pairs.rows)
        min_key_BP, max_key_BP = _segment_ranges(runtime_mask.key_segments, pairs.column_P, pairs.columns)
        # Ranges of segment numbers that do not overlap hold no equal pair; those that overlap may.
        needed_P &= jnp.any((min_query_BP <= max_key_BP) & (min_key_BP <= max_query_BP), axis=0)
    return needed_P


def _segment_ranges(segments_BT: Array, starts_P: np.ndarray, size: int) -> tuple[Array, Array]:
    """Return the lowest and highest segment number of each pair's block, both [B, P]."""
    starts, inverse = np.unique(starts_P, return_inverse=True)
    blocks = [jax.lax.slice_in_dim(segments_BT, start, start + size, axis=1) for start in starts.tolist()]
    low, high = (jnp.stack([reduce(block, axis=1) for block in blocks], axis=1) for reduce in (jnp.min, jnp.max))
    return low[:, inverse], high[:, inverse]


def block_mask(config: Config, runtime_mask: RuntimeMask, pairs: Pairs, pair: Pair, num_keys: int) -> Array:
    """Return which keys of a block each query of a block sees, booleans [B or 1, 1, 1, C, D]."""
    rows_C, columns_D = pair.row + jnp.arange(pairs.rows), pair.column + jnp.arange(pairs.columns)
    is_seen = jnp.ones((pairs.rows, pairs.columns), bool)
    if num_keys % pairs.columns:
        # The last block of keys overlaps the one before it, and the keys that both have count once.
        is_seen &= (columns_D >= pair.own_column)[None]
    distance_CD = (rows_C if runtime_mask.start is None else rows_C + runtime_mask.start)[:, None] - columns_D[None]
    if config.causal:
        is_seen &= distance_CD >= 0
    window = config.window if runtime_mask.window is None else runtime_mask.window
    if window is not None:
        is_seen &= distance_CD < window
    is_seen = is_seen[None, None, None]
    if runtime_mask.query_segments is not None and runtime_mask.key_segments is not None:
        query_segments = jax.lax.dynamic_slice_in_dim(runtime_mask.query_segments, pair.row, pairs.rows, axis=1)
        key_segments = jax.lax.dynamic_slice_in_dim(runtime_mask.key_segments, pair.column, pairs.columns, axis=1)
        is_seen = is_seen & (query_segments[:, :, None] == key_segments[:, None])[:, None, None]
    return is_seen


def loop_inputs(config: Config, runtime_mask: RuntimeMask, pairs: Pairs, q: Array) -> tuple[Pair, Array]:
    """Return the pairs in the form of a loop's inputs, and the queries, which may have any shape."""
    arrays = (pairs.row_P, pairs.own_row_P, pairs.column_P, pairs.own_column_P)
    row, own_row, column, own_column = (jnp.asarray(array, jnp.int32) for array in arrays)
    first = jnp.asarray(pairs.is_first_P)
    blocks = Pair(row, own_row, column, own_column, first, needed_pairs(config, runtime_mask, pairs))
    # Without the barrier masks depend on constants only, and a loop over layers keeps those of all pairs for its
    # backward pass.
    return jax.lax.optimization_barrier((blocks, q))
