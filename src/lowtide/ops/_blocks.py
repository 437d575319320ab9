"""Attention over blocks of queries and keys by XLA's operations: exact, on every target, in memory that is flat.

No more than one block of scores exists at a time, forward and backward, and blocks that no query sees are not in the
program: above the diagonal, outside of a window. What only the running program knows (documents of packed rows, windows
that differ between layers, a first query) is looked at before the loop, and a block that nobody sees is passed by.

For the backward pass remain queries, keys, values, the result and of each row the logarithm of its sum of exponentials;
the last two are named ``attn_out`` and ``attn_lse`` for policies of `jax.checkpoint`. Where blocks do not divide a row,
the last one begins earlier, and rows that it shares with the one before are written again by that, which comes later.

Shapes: B batch, T queries, S keys, C rows and D columns of a block, N query heads, K key/value heads, G = N / K,
M = G C, H head, P pairs of blocks.

Deviations and limits: a loop for each block is slower than a kernel that keeps scores on the chip. Forward-mode
derivatives do not pass (`jax.custom_vjp`); derivatives of gradients do.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (arXiv:2112.05682); Dao, "FlashAttention-2"
(arXiv:2307.08691), for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ..core import kept, traced_device, without_explicit_axes
from ..core._compat import like_type
from ._divided import divided_sizes
from ._sight import Scores, Sight

# One block of scores in float32 on one device: what a GPU's or a TPU's products need to be busy, and what a CPU's cache
# nearly holds.
_SCORE_BYTES = {"cpu": 2**23}
_MOST_SCORE_BYTES = 2**26
_LEAST_ROWS, _MOST_ROWS = 128, 1024


class _Kind(NamedTuple):
    """What the program knows of attention when it is traced."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    size: int
    """Rows and columns of a block, at most."""


class _Seen(NamedTuple):
    """What only the running program knows, each or None."""

    window: Array | None
    start: Array | None
    of_queries: Array | None
    of_keys: Array | None


class _Carry(NamedTuple):
    """Of a block of queries, over the blocks of keys so far."""

    highest_BKM: Array
    total_BKM: Array
    out_BKMH: Array


def attend_in_blocks(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sight: Sight, scores: Scores) -> Array:
    """Attend; shapes [B, T, N, H], [B, S, K, H] twice, to [B, T, N, H]."""
    window, start = sight.window, sight.start
    of_queries, of_keys = sight.segments or (None, None)
    seen = _Seen(
        window if isinstance(window, jax.Array) else None,
        jnp.asarray(start) if isinstance(start, jax.Array) or start else None,
        of_queries,
        of_keys,
    )
    known = None if isinstance(window, jax.Array) else window
    size = block_size(q_BTNH.shape, k_BSKH.shape[1])
    kind = _Kind(sight.causal, known, scores.scale, scores.soft_cap, size)
    return _attend(kind, q_BTNH, k_BSKH, v_BSKH, scores.sinks, seen)


def block_size(shape: Sequence[int], num_keys: int) -> int:
    """Return how many rows and columns a block of scores has at most.

    Args:
        shape: of the queries, [B, T, N, H], over all devices.
        num_keys: S.
    """
    batch, length, heads, _ = shape
    batch, heads = divided_sizes(batch, heads)
    most = _SCORE_BYTES.get(traced_device().platform, _MOST_SCORE_BYTES) // (4 * batch * heads)
    size = _LEAST_ROWS
    while size < _MOST_ROWS and 4 * size * size <= most:
        size *= 2
    return min(size, max(length, num_keys))


class _Pairs(NamedTuple):
    """Blocks of queries, the last ones first, each with the blocks of keys that it may see."""

    rows: int
    columns: int
    row_P: np.ndarray
    """Where a pair's queries begin."""
    own_row_P: np.ndarray
    """The first of them that no other block has."""
    column_P: np.ndarray
    own_column_P: np.ndarray
    is_first_P: np.ndarray
    """Whether it is the first of its queries."""


def _pairs(kind: _Kind, seen: _Seen, num_queries: int, num_keys: int) -> _Pairs:
    rows, columns = _even(num_queries, kind.size), _even(num_keys, kind.size)
    found: list[tuple[int, int, int, int, bool]] = []
    for own_row in reversed(range(0, num_queries, rows)):
        row, is_first = min(own_row, num_queries - rows), True
        for own_column in range(0, num_keys, columns):
            last_row, last_column = row + rows - 1, min(own_column + columns, num_keys) - 1
            is_later = kind.causal and seen.start is None and own_column > last_row
            is_passed = kind.window is not None and seen.start is None and own_row - last_column >= kind.window
            if is_later or is_passed:
                continue
            found.append((row, own_row, min(own_column, num_keys - columns), own_column, is_first))
            is_first = False
    row, own_row, column, own_column, first = (np.asarray(each) for each in zip(*found, strict=True))
    return _Pairs(rows, columns, row, own_row, column, own_column, first)


def _even(length: int, most: int) -> int:
    """Return the size of blocks that cover a row with the least overlap."""
    count = -(-length // most)
    even = -(-length // count)
    return min(most, -(-even // _LEAST_ROWS) * _LEAST_ROWS) if length > most else length


def _needed(kind: _Kind, seen: _Seen, pairs: _Pairs) -> Array | None:
    """Which pairs anybody sees, booleans [P]; None where the program knows that all are."""
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
        needed_P &= jnp.any((least_BP <= high_BP) & (low_BP <= most_BP), axis=0)
    return needed_P


def _ends(segments_BT: Array, starts_P: np.ndarray, size: int) -> tuple[Array, Array]:
    """Lowest and highest number of each pair's block, [B, P] both."""
    starts, of_pair = np.unique(starts_P, return_inverse=True)
    blocks = [jax.lax.slice_in_dim(segments_BT, start, start + size, axis=1) for start in starts.tolist()]
    low, high = (jnp.stack([reduce(each, axis=1) for each in blocks], axis=1) for reduce in (jnp.min, jnp.max))
    return low[:, of_pair], high[:, of_pair]


class _Block(NamedTuple):
    """One pair in the loop."""

    row: Array
    own_row: Array
    column: Array
    own_column: Array
    is_first: Array
    needed: Array | None


def _blocks(kind: _Kind, seen: _Seen, pairs: _Pairs, q_BTNH: Array) -> tuple[_Block, Array]:
    arrays = (pairs.row_P, pairs.own_row_P, pairs.column_P, pairs.own_column_P)
    row, own_row, column, own_column = (jnp.asarray(each, jnp.int32) for each in arrays)
    blocks = _Block(row, own_row, column, own_column, jnp.asarray(pairs.is_first_P), _needed(kind, seen, pairs))
    # Else masks follow from constants, and a loop over layers keeps those of all pairs for its backward pass.
    return jax.lax.optimization_barrier((blocks, q_BTNH))


def _rows(x_BTNH: Array, start: Array, size: int, num_groups: int) -> Array:
    """Cut a block of queries, [B, K, M, H]: those that share keys are rows of one product, heads come before rows."""
    x_BCNH = jax.lax.dynamic_slice_in_dim(x_BTNH, start, size, axis=1)
    batch, _, heads, dim = x_BCNH.shape
    x_BKGCH = x_BCNH.reshape(batch, size, num_groups, heads // num_groups, dim).transpose(0, 2, 3, 1, 4)
    return x_BKGCH.reshape(batch, num_groups, -1, dim)


def _as_rows(x_BKMH: Array, size: int) -> Array:
    """Invert `_rows`: [B, C, N, H]."""
    batch, groups, _, dim = x_BKMH.shape
    return x_BKMH.reshape(batch, groups, -1, size, dim).transpose(0, 3, 1, 2, 4).reshape(batch, size, -1, dim)


def _columns(x_BSKH: Array, start: Array, size: int) -> Array:
    """Cut a block of keys or values, [B, K, D, H]."""
    return jnp.swapaxes(jax.lax.dynamic_slice_in_dim(x_BSKH, start, size, axis=1), 1, 2)


def _of_rows(x_BNT: Array, start: Array, size: int, num_groups: int) -> Array:
    """Cut a block of a number for each row, [B, K, M]."""
    x_BNC = jax.lax.dynamic_slice_in_dim(x_BNT, start, size, axis=2)
    return x_BNC.reshape(x_BNC.shape[0], num_groups, -1)


def _mask(kind: _Kind, seen: _Seen, pairs: _Pairs, at: _Block, num_keys: int) -> Array:
    """Which keys of a block a query of a block sees, booleans [B or 1, 1, 1, C, D]."""
    rows_C, columns_D = at.row + jnp.arange(pairs.rows), at.column + jnp.arange(pairs.columns)
    is_seen = jnp.ones((pairs.rows, pairs.columns), bool)
    if num_keys % pairs.columns:
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


def _scores(kind: _Kind, q_BKMH: Array, k_BKDH: Array) -> Array:
    """Scores as they enter the softmax, [B, K, M, D]."""
    wide = jnp.promote_types(q_BKMH.dtype, jnp.float32)
    s_BKMD = jnp.einsum("bkmh,bkdh->bkmd", q_BKMH, k_BKDH, preferred_element_type=wide) * kind.scale
    return s_BKMD if kind.soft_cap is None else kind.soft_cap * jnp.tanh(s_BKMD / kind.soft_cap)


def _over(mask: Array, s_BKMD: Array, fill: float) -> Array:
    """Put a number where nothing is seen."""
    batch, groups, _, columns = s_BKMD.shape
    s_BKGCD = s_BKMD.reshape(batch, groups, -1, mask.shape[-2], columns)
    return jnp.where(mask, s_BKGCD, jnp.asarray(fill, s_BKMD.dtype)).reshape(s_BKMD.shape)


def _when(needed: Array | None, compute: Callable[[Any], Any], carry: Any) -> Any:
    """Compute, or leave what is carried as it is."""
    return compute(carry) if needed is None else jax.lax.cond(needed, compute, lambda carry: carry, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kind: _Kind, q: Array, k: Array, v: Array, sinks: Array | None, seen: _Seen) -> Array:
    return _results(kind, q, k, v, sinks, seen)[0]


def _results(kind: _Kind, q: Array, k: Array, v: Array, sinks: Array | None, seen: _Seen) -> tuple[Array, Array]:
    def places(mesh: Any) -> tuple[Any, Any]:
        batch, length, heads, _ = kept(q).spec
        return kept(q), jax.NamedSharding(mesh, P(batch, heads, length))

    return without_explicit_axes(functools.partial(_forward, kind), places, q, k, v, sinks, seen)


def _forward(
    kind: _Kind, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sinks_N: Array | None, seen: _Seen
) -> tuple[Array, Array]:
    """Return the result, and the logarithm of each row's sum of exponentials, [B, N, T]."""
    batch, length, heads, dim = q_BTNH.shape
    num_keys, groups = k_BSKH.shape[1:3]
    pairs = _pairs(kind, seen, length, num_keys)
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    low = float(jnp.finfo(wide).min)
    arrays = [q_BTNH, k_BSKH, v_BSKH, *jax.tree.leaves((sinks_N, seen))]
    zeros = functools.partial(like_type, arrays)
    num_rows = heads // groups * pairs.rows
    empty = _Carry(
        zeros((batch, groups, num_rows), wide, low),
        zeros((batch, groups, num_rows), wide),
        zeros((batch, groups, num_rows, dim), wide),
    )
    blocks, q_BTNH = _blocks(kind, seen, pairs, q_BTNH)
    sinks_BKM = None
    if sinks_N is not None:
        sinks_BKM = jnp.repeat(sinks_N.astype(wide).reshape(1, groups, -1), pairs.rows, axis=2)

    def body(state: Any, at: _Block) -> Any:
        carry, out_BTNH, lse_BNT = state
        carry = jax.tree.map(lambda new, old: jnp.where(at.is_first, new, old), empty, carry)

        def add(carry: _Carry) -> _Carry:
            q_BKMH = _rows(q_BTNH, at.row, pairs.rows, groups)
            k_BKDH, v_BKDH = (_columns(x, at.column, pairs.columns) for x in (k_BSKH, v_BSKH))
            mask = _mask(kind, seen, pairs, at, num_keys)
            s_BKMD = _over(mask, _scores(kind, q_BKMH, k_BKDH), low)
            highest_BKM = jnp.maximum(carry.highest_BKM, jnp.max(s_BKMD, axis=-1))
            p_BKMD = _over(mask, jnp.exp(s_BKMD - highest_BKM[..., None]), 0)
            kept_BKM = jnp.exp(carry.highest_BKM - highest_BKM)
            more_BKMH = jnp.einsum("bkmd,bkdh->bkmh", p_BKMD.astype(v_BKDH.dtype), v_BKDH, preferred_element_type=wide)
            total_BKM = carry.total_BKM * kept_BKM + jnp.sum(p_BKMD, axis=-1)
            return _Carry(highest_BKM, total_BKM, carry.out_BKMH * kept_BKM[..., None] + more_BKMH)

        carry = _when(at.needed, add, carry)
        highest_BKM, total_BKM, out_BKMH = carry
        if sinks_BKM is not None:
            highest_BKM = jnp.maximum(highest_BKM, sinks_BKM)
            kept_BKM = jnp.exp(carry.highest_BKM - highest_BKM)
            total_BKM = total_BKM * kept_BKM + jnp.exp(sinks_BKM - highest_BKM)
            out_BKMH = out_BKMH * kept_BKM[..., None]
        total_BKM = jnp.where(total_BKM == 0, 1, total_BKM)  # of a row that sees nothing, whose result is zero
        out_BCNH = _as_rows(out_BKMH / total_BKM[..., None], pairs.rows).astype(out_BTNH.dtype)
        out_BTNH = jax.lax.dynamic_update_slice_in_dim(out_BTNH, out_BCNH, at.row, axis=1)
        lse_BNC = (highest_BKM + jnp.log(total_BKM)).reshape(batch, heads, pairs.rows)
        lse_BNT = jax.lax.dynamic_update_slice_in_dim(lse_BNT, lse_BNC, at.row, axis=2)
        return (carry, out_BTNH, lse_BNT), None

    results = zeros(q_BTNH.shape, q_BTNH.dtype), zeros((batch, heads, length), wide)
    (_, out_BTNH, lse_BNT), _ = jax.lax.scan(body, (empty, *results), blocks)
    return out_BTNH, lse_BNT


def _attend_forward(kind: _Kind, q: Array, k: Array, v: Array, sinks: Array | None, seen: _Seen) -> tuple[Array, Any]:
    out, lse = _results(kind, q, k, v, sinks, seen)
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, sinks, seen, out, lse)


def _attend_backward(kind: _Kind, residuals: Any, dout: Array) -> Any:
    q, k, v, sinks = residuals[:4]
    gradients = functools.partial(_gradients, kind)
    return *without_explicit_axes(gradients, lambda _: kept((q, k, v, sinks)), residuals, dout), None


def _gradients(kind: _Kind, residuals: Any, dout_BTNH: Array) -> Any:
    """Return those of queries, keys, values and sinks."""
    q_BTNH, k_BSKH, v_BSKH, sinks_N, seen, out_BTNH, lse_BNT = residuals
    length, heads = q_BTNH.shape[1:3]
    num_keys, groups = k_BSKH.shape[1:3]
    pairs = _pairs(kind, seen, length, num_keys)
    wide = lse_BNT.dtype
    delta_BNT = _products_of_rows(dout_BTNH, out_BTNH, pairs, wide)
    zeros = functools.partial(like_type, [q_BTNH, k_BSKH, v_BSKH, dout_BTNH, *jax.tree.leaves((sinks_N, seen))])
    batch, _, _, dim = q_BTNH.shape
    empty_BKMH = zeros((batch, groups, heads // groups * pairs.rows, dim), wide)
    nothing_BKDH = zeros((batch, groups, pairs.columns, dim), wide)

    def body(state: Any, at: _Block) -> Any:
        dq_BKMH, dq_BTNH, dk_BKSH, dv_BKSH = state
        dq_BKMH = jnp.where(at.is_first, empty_BKMH, dq_BKMH)

        def add(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_BKMH, _, _ = carry
            q_BKMH, dout_BKMH = (_rows(x, at.row, pairs.rows, groups) for x in (q_BTNH, dout_BTNH))
            lse_BKM, delta_BKM = (_of_rows(x, at.row, pairs.rows, groups) for x in (lse_BNT, delta_BNT))
            k_BKDH, v_BKDH = (_columns(x, at.column, pairs.columns) for x in (k_BSKH, v_BSKH))
            mask = _mask(kind, seen, pairs, at, num_keys)
            if length % pairs.rows:  # rows of two blocks count once
                mask = mask & (at.row + jnp.arange(pairs.rows) >= at.own_row)[None, None, None, :, None]
            s_BKMD = _scores(kind, q_BKMH, k_BKDH)
            p_BKMD = _over(mask, jnp.exp(s_BKMD - lse_BKM[..., None]), 0)
            product = functools.partial(jnp.einsum, preferred_element_type=wide)
            dv_BKDH = product("bkmd,bkmh->bkdh", p_BKMD.astype(v_BKDH.dtype), dout_BKMH)
            ds_BKMD = p_BKMD * (product("bkmh,bkdh->bkmd", dout_BKMH, v_BKDH) - delta_BKM[..., None])
            if kind.soft_cap is not None:
                ds_BKMD = ds_BKMD * (1 - jnp.square(s_BKMD / kind.soft_cap))
            ds_BKMD = (ds_BKMD * kind.scale).astype(q_BKMH.dtype)
            dk_BKDH = product("bkmd,bkmh->bkdh", ds_BKMD, q_BKMH)
            return dq_BKMH + product("bkmd,bkdh->bkmh", ds_BKMD, k_BKDH), dk_BKDH, dv_BKDH

        dq_BKMH, dk_BKDH, dv_BKDH = _when(at.needed, add, (dq_BKMH, nothing_BKDH, nothing_BKDH))
        dk_BKSH, dv_BKSH = _added(dk_BKSH, dk_BKDH, at.column), _added(dv_BKSH, dv_BKDH, at.column)
        dq_BCNH = _bits(_as_rows(dq_BKMH, pairs.rows).astype(q_BTNH.dtype))
        return (dq_BKMH, jax.lax.dynamic_update_slice_in_dim(dq_BTNH, dq_BCNH, at.row, axis=1), dk_BKSH, dv_BKSH), None

    blocks, q_BTNH = _blocks(kind, seen, pairs, q_BTNH)
    totals = (zeros((batch, groups, num_keys, dim), wide) for _ in range(2))
    # As bits, for XLA would write wide numbers and cast them after the loop.
    state = (empty_BKMH, _bits(zeros(q_BTNH.shape, q_BTNH.dtype)), *totals)
    (_, dq_BTNH, *totals), _ = jax.lax.scan(body, state, blocks)
    dq_BTNH = jax.lax.bitcast_convert_type(dq_BTNH, q_BTNH.dtype)
    dk_BSKH, dv_BSKH = (jnp.swapaxes(total, 1, 2).astype(k_BSKH.dtype) for total in totals)
    return dq_BTNH, dk_BSKH, dv_BSKH, _of_sinks(sinks_N, lse_BNT, delta_BNT)


def _products_of_rows(x_BTNH: Array, y_BTNH: Array, pairs: _Pairs, wide: Any) -> Array:
    """Multiply numbers of each row and add them up, [B, N, T]: of all rows at once XLA would hold a wide copy."""
    batch, length, heads, _ = x_BTNH.shape

    def body(found_BNT: Array, start: Array) -> tuple[Array, None]:
        rows = (jax.lax.dynamic_slice_in_dim(each, start, pairs.rows, axis=1).astype(wide) for each in (x_BTNH, y_BTNH))
        found_BNC = jnp.einsum("bcnh,bcnh->bnc", *rows)
        return jax.lax.dynamic_update_slice_in_dim(found_BNT, found_BNC, start, axis=2), None

    zeros = like_type([x_BTNH, y_BTNH], (batch, heads, length), wide)
    return jax.lax.scan(body, zeros, jnp.asarray(np.unique(pairs.row_P), jnp.int32))[0]


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _added(total_BKSH: Array, more_BKDH: Array, start: Array) -> Array:
    old_BKDH = jax.lax.dynamic_slice_in_dim(total_BKSH, start, more_BKDH.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total_BKSH, old_BKDH + more_BKDH, start, axis=2)


def _of_sinks(sinks_N: Array | None, lse_BNT: Array, delta_BNT: Array) -> Array | None:
    """Return the gradient of sinks: each takes its share from all values of a row."""
    if sinks_N is None:
        return None
    shares_BNT = jnp.exp(sinks_N.astype(lse_BNT.dtype)[None, :, None] - lse_BNT)
    return -jnp.sum(shares_BNT * delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
