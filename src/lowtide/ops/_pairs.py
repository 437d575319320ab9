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


class Kind(NamedTuple):
    """Settings of attention that are known when the program is traced."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    size: int
    """The most rows and columns of a block."""


class Seen(NamedTuple):
    """Parts of the mask that only the running program knows, each or None."""

    window: Array | None
    start: Array | None
    of_queries: Array | None
    of_keys: Array | None


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


class Block(NamedTuple):
    """One pair, as the loop gets it."""

    row: Array
    own_row: Array
    column: Array
    own_column: Array
    is_first: Array
    needed: Array | None


def pairs_of(kind: Kind, seen: Seen, num_queries: int, num_keys: int) -> Pairs:
    """List the pairs that the traced program may need."""
    rows, columns = even_size(num_queries, kind.size), even_size(num_keys, kind.size)
    found: list[tuple[int, int, int, int, bool]] = []
    for own_row in reversed(range(0, num_queries, rows)):
        # The last block is moved back so that it ends with the row.
        row, is_first = min(own_row, num_queries - rows), True
        for own_column in range(0, num_keys, columns):
            last_row, last_column = row + rows - 1, min(own_column + columns, num_keys) - 1
            is_later = kind.causal and seen.start is None and own_column > last_row
            is_passed = kind.window is not None and seen.start is None and own_row - last_column >= kind.window
            if is_later or is_passed:
                continue
            found.append((row, own_row, min(own_column, num_keys - columns), own_column, is_first))
            is_first = False
        if is_first:  # queries that see no key still need one pair, which writes their zeros
            found.append((row, own_row, 0, 0, True))
    row, own_row, column, own_column, first = (np.asarray(each) for each in zip(*found, strict=True))
    return Pairs(rows, columns, row, own_row, column, own_column, first)


def even_size(length: int, most: int) -> int:
    """Return the size of the fewest blocks that cover a row, as even as multiples of `LEAST_ROWS` allow."""
    count = -(-length // most)
    even = -(-length // count)
    return min(most, -(-even // LEAST_ROWS) * LEAST_ROWS) if length > most else length


def needed_pairs(kind: Kind, seen: Seen, pairs: Pairs) -> Array | None:
    """Return which pairs the running program needs, booleans [P]; None if it needs all of them."""
    if all(each is None for each in seen):
        return None
    start = 0 if seen.start is None else seen.start
    row_P, column_P = jnp.asarray(pairs.row_P) + start, jnp.asarray(pairs.column_P)
    needed_P = jnp.ones(row_P.shape, bool)
    if kind.causal:
        needed_P &= column_P <= row_P + pairs.rows - 1
    window = kind.window if seen.window is None else seen.window
    if window is not None:
        needed_P &= row_P - (column_P + pairs.columns - 1) < window
    if seen.of_queries is not None and seen.of_keys is not None:
        least_BP, most_BP = _ends(seen.of_queries, pairs.row_P, pairs.rows)
        low_BP, high_BP = _ends(seen.of_keys, pairs.column_P, pairs.columns)
        # Ranges of segment numbers that do not overlap hold no equal pair; those that overlap may.
        needed_P &= jnp.any((least_BP <= high_BP) & (low_BP <= most_BP), axis=0)
    return needed_P


def _ends(segments_BT: Array, starts_P: np.ndarray, size: int) -> tuple[Array, Array]:
    """Return the lowest and highest segment number of each pair's block, both [B, P]."""
    starts, of_pair = np.unique(starts_P, return_inverse=True)
    blocks = [jax.lax.slice_in_dim(segments_BT, start, start + size, axis=1) for start in starts.tolist()]
    low, high = (jnp.stack([reduce(each, axis=1) for each in blocks], axis=1) for reduce in (jnp.min, jnp.max))
    return low[:, of_pair], high[:, of_pair]


def mask_of(kind: Kind, seen: Seen, pairs: Pairs, at: Block, num_keys: int) -> Array:
    """Return which keys of a block each query of a block sees, booleans [B or 1, 1, 1, C, D]."""
    rows_C, columns_D = at.row + jnp.arange(pairs.rows), at.column + jnp.arange(pairs.columns)
    is_seen = jnp.ones((pairs.rows, pairs.columns), bool)
    if num_keys % pairs.columns:
        # The last block of keys overlaps the one before it, and the keys that both have count once.
        is_seen &= (columns_D >= at.own_column)[None]
    distance_CD = (rows_C if seen.start is None else rows_C + seen.start)[:, None] - columns_D[None]
    if kind.causal:
        is_seen &= distance_CD >= 0
    window = kind.window if seen.window is None else seen.window
    if window is not None:
        is_seen &= distance_CD < window
    is_seen = is_seen[None, None, None]
    if seen.of_queries is not None and seen.of_keys is not None:
        of_queries = jax.lax.dynamic_slice_in_dim(seen.of_queries, at.row, pairs.rows, axis=1)
        of_keys = jax.lax.dynamic_slice_in_dim(seen.of_keys, at.column, pairs.columns, axis=1)
        is_seen = is_seen & (of_queries[:, :, None] == of_keys[:, None])[:, None, None]
    return is_seen


def blocks_of(kind: Kind, seen: Seen, pairs: Pairs, q: Array) -> tuple[Block, Array]:
    """Return the pairs in the form of a loop's inputs, and the queries.

    Args:
        kind: settings that are known when the program is traced.
        seen: parts of the mask that only the running program knows.
        pairs: all pairs.
        q: the queries, in any shape.
    """
    arrays = (pairs.row_P, pairs.own_row_P, pairs.column_P, pairs.own_column_P)
    row, own_row, column, own_column = (jnp.asarray(each, jnp.int32) for each in arrays)
    first = jnp.asarray(pairs.is_first_P)
    blocks = Block(row, own_row, column, own_column, first, needed_pairs(kind, seen, pairs))
    # Without the barrier masks depend on constants only, and a loop over layers keeps those of all pairs for its
    # backward pass.
    return jax.lax.optimization_barrier((blocks, q))
