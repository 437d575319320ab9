"""Attention over blocks of queries and keys with XLA's operations: exact, on every target, with few scores in memory.

One block of scores exists at a time, in the forward and the backward pass. Blocks that no query sees, above the
diagonal or outside of a window, are not in the program. Segments, and a traced window or start, are known only when the
program runs: the loop then skips blocks that no query sees. If the block size does not divide a row, the last block
begins earlier and overlaps the block before it. Blocks are visited from the last to the first, so the earlier block
overwrites the rows of the overlap.

Shapes: B batch, T queries, S keys, C rows and D columns of a block, P pairs of a block of queries and a block of keys,
N query heads, K key/value heads, G = N / K, M = G C, H size of a head, W = N H, X = K H.

Known limit: a loop over blocks is slower than a kernel that keeps scores on the chip.

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

from ..core import (
    BATCH_AXES,
    initial_carry,
    num_shards_along,
    shardings_of,
    traced_device,
    uniformly_varying,
    without_explicit_axes,
)
from ._options import AttentionMask, ScoreOptions

# Largest size of a float32 block of scores on one device. It keeps the matrix units of a GPU or TPU busy, and nearly
# fits into the cache of a CPU.
_SCORE_BYTES = {"cpu": 2**23}
_MOST_SCORE_BYTES = 2**26
_MOST_ROWS = 1024

_LEAST_ROWS = 128
"""The fewest rows of a block; with fewer rows a chip's matrix units are not busy."""


class Config(NamedTuple):
    """Settings of attention that are known when the program is traced."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    size: int
    """The most rows and columns of a block."""


class RuntimeMask(NamedTuple):
    """Parts of the mask that are arrays, known only when the program runs; None if absent or in `Config`."""

    window: Array | None
    start: Array | None
    query_segments: Array | None
    key_segments: Array | None


class Passes(NamedTuple):
    """Forward and backward pass of an implementation of attention, with the signatures of `forward` and `gradients`."""

    forward: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., Any]
    settings: Any
    """First argument of both functions, hashable."""


class _Carry(NamedTuple):
    """Maximum, sum of exponentials and output of a block of queries, over the blocks of keys visited so far."""

    highest_BKM: Array
    total_BKM: Array
    out_BKMH: Array


def attend_in_blocks(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions) -> Array:
    """Compute attention [B, T, N, H] with one block of scores at a time."""
    window, start = mask.window, mask.first_query
    query_segments, key_segments = mask.segments or (None, None)
    runtime_mask = RuntimeMask(
        window if isinstance(window, jax.Array) else None,
        jnp.asarray(start) if isinstance(start, jax.Array) or start else None,
        query_segments,
        key_segments,
    )
    static_window = None if isinstance(window, jax.Array) else window
    size = block_size(q_BTNH.shape, k_BSKH.shape[1])
    config = Config(mask.causal, static_window, scores.scale, scores.soft_cap, size)
    arrays = uniformly_varying((q_BTNH, k_BSKH, v_BSKH, scores.sinks, runtime_mask))
    return attend(Passes(forward, gradients, config), *arrays)


def block_size(shape: Sequence[int], num_keys: int) -> int:
    """Return the largest number of rows and columns of a block; `shape` is the shape of the queries on all devices."""
    batch, length, heads, _ = shape
    batch, heads = local_sizes(batch, heads)
    max_elements = _SCORE_BYTES.get(traced_device().platform, _MOST_SCORE_BYTES) // (4 * batch * heads)
    size = _LEAST_ROWS
    while size < _MOST_ROWS and 4 * size * size <= max_elements:
        size *= 2
    return min(size, max(length, num_keys))


def local_sizes(batch: int, heads: int) -> tuple[int, int]:
    """Return the numbers of rows and heads on one device; without a known mesh, return the given numbers."""
    for name in BATCH_AXES:
        batch = _local_size(batch, num_shards_along(name))
    return batch, _local_size(heads, num_shards_along("tensor"))


def _local_size(total: int, num_parts: int) -> int:
    """Return the size of one device's part of an axis; an axis that does not divide evenly is not sharded."""
    return total if total % num_parts else total // num_parts


def wide_dtype(dtype: Any) -> Any:
    """Return float64 for float64, and float32 for any other dtype."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def merge_heads(x_BTNH: Array) -> Array:
    """Reshape to [B, T, W], the layout that products read and write; XLA would copy arrays in other layouts."""
    return x_BTNH.reshape(*x_BTNH.shape[:2], -1)


def _slice_queries(x_BTW: Array, start: Array, size: int, num_groups: int, dim: int) -> Array:
    """Cut a block of queries, [B, K, M, H]; heads precede rows, so one product covers all queries of a key head."""
    x_BCW = jax.lax.dynamic_slice_in_dim(x_BTW, start, size, axis=1)
    x_BKGCH = x_BCW.reshape(x_BCW.shape[0], size, num_groups, -1, dim).transpose(0, 2, 3, 1, 4)
    return x_BKGCH.reshape(x_BCW.shape[0], num_groups, -1, dim)


def _merge_queries(x_BKMH: Array, size: int) -> Array:
    """Reshape a block from `_slice_queries` to [B, C, W]."""
    batch, groups, _, dim = x_BKMH.shape
    return x_BKMH.reshape(batch, groups, -1, size, dim).transpose(0, 3, 1, 2, 4).reshape(batch, size, -1)


def _slice_keys(x_BSX: Array, start: Array, size: int, num_groups: int) -> Array:
    """Cut a block of keys or values, [B, K, D, H]."""
    x_BDX = jax.lax.dynamic_slice_in_dim(x_BSX, start, size, axis=1)
    return x_BDX.reshape(x_BDX.shape[0], size, num_groups, -1).swapaxes(1, 2)


def _slice_row_values(x_BNT: Array, start: Array, size: int, num_groups: int) -> Array:
    """Cut a block of an array with one number per row, [B, K, M]."""
    x_BNC = jax.lax.dynamic_slice_in_dim(x_BNT, start, size, axis=2)
    return x_BNC.reshape(x_BNC.shape[0], num_groups, -1)


def _compute_scores(config: Config, q_BKMH: Array, k_BKDH: Array) -> Array:
    """Return the scaled and capped scores before masking, [B, K, M, D]."""
    wide = wide_dtype(q_BKMH.dtype)
    s_BKMD = jnp.einsum("bkmh,bkdh->bkmd", q_BKMH, k_BKDH, preferred_element_type=wide) * config.scale
    return s_BKMD if config.soft_cap is None else config.soft_cap * jnp.tanh(s_BKMD / config.soft_cap)


def _apply_mask(mask: Array, s_BKMD: Array, fill: float) -> Array:
    """Replace the scores of keys that a query does not see by `fill`."""
    batch, groups, _, columns = s_BKMD.shape
    s_BKGCD = s_BKMD.reshape(batch, groups, -1, mask.shape[-2], columns)
    return jnp.where(mask, s_BKGCD, jnp.asarray(fill, s_BKMD.dtype)).reshape(s_BKMD.shape)


def _compute_if(is_needed: Array | None, compute: Callable[[Any], Any], carry: Any) -> Any:
    """Return ``compute(carry)`` if `is_needed` is true or None, else the carry."""
    return compute(carry) if is_needed is None else jax.lax.cond(is_needed, compute, lambda carry: carry, carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(passes: Passes, q: Array, k: Array, v: Array, sinks: Array | None, runtime_mask: RuntimeMask) -> Array:
    """Compute attention; the output and the log-sum-exp of each query's scores are among the residuals."""
    return _results(passes, q, k, v, sinks, runtime_mask)[0]


def _attend_forward(
    passes: Passes, q: Array, k: Array, v: Array, sinks: Array | None, runtime_mask: RuntimeMask
) -> tuple[Array, Any]:
    out, lse = _results(passes, q, k, v, sinks, runtime_mask)
    # Policies of `jax.checkpoint` can select these names.
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (q, k, v, sinks, runtime_mask, out, lse)


def _attend_backward(passes: Passes, residuals: Any, dout: Array) -> Any:
    gradients_fn = functools.partial(passes.gradients, passes.settings)
    return *without_explicit_axes(gradients_fn, lambda _: shardings_of(residuals[:4]), residuals, dout), None


attend.defvjp(_attend_forward, _attend_backward)


def _results(passes: Passes, q_BTNH: Array, *args: Any) -> tuple[Array, Array]:
    def shardings(_: Any) -> tuple[Any, Any]:
        sharding = shardings_of(q_BTNH)
        batch, length, heads, _ = sharding.spec
        return sharding, jax.NamedSharding(sharding.mesh, P(batch, heads, length))

    return without_explicit_axes(functools.partial(passes.forward, passes.settings), shardings, q_BTNH, *args)


def forward(
    config: Config, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sinks_N: Array | None, runtime_mask: RuntimeMask
) -> tuple[Array, Array]:
    """Return the output [B, T, N, H], and the log-sum-exp of each query's scores, [B, N, T]."""
    batch, length, heads, dim = q_BTNH.shape
    num_keys, groups = k_BSKH.shape[1:3]
    pairs = _pairs_of(config, runtime_mask, length, num_keys)
    wide = wide_dtype(q_BTNH.dtype)
    low = float(jnp.finfo(wide).min)
    zeros = functools.partial(initial_carry, [q_BTNH, k_BSKH, v_BSKH, *jax.tree.leaves((sinks_N, runtime_mask))])
    num_rows = heads // groups * pairs.rows
    empty = _Carry(
        zeros((batch, groups, num_rows), wide, low),
        zeros((batch, groups, num_rows), wide),
        zeros((batch, groups, num_rows, dim), wide),
    )
    k_BSX, v_BSX = merge_heads(k_BSKH), merge_heads(v_BSKH)
    blocks, q_BTW = _loop_inputs(config, runtime_mask, pairs, merge_heads(q_BTNH))
    sinks_BKM = None
    if sinks_N is not None:
        sinks_BKM = jnp.repeat(sinks_N.astype(wide).reshape(1, groups, -1), pairs.rows, axis=2)

    def body(state: Any, pair: _Pair) -> Any:
        carry, out_BTW, lse_BNT = state
        # The first pair of a block of queries starts from an empty state.
        carry = jax.tree.map(lambda new, old: jnp.where(pair.is_first, new, old), empty, carry)

        def add(carry: _Carry) -> _Carry:
            q_BKMH = _slice_queries(q_BTW, pair.row, pairs.rows, groups, dim)
            k_BKDH, v_BKDH = (_slice_keys(x, pair.column, pairs.columns, groups) for x in (k_BSX, v_BSX))
            mask = _block_mask(config, runtime_mask, pairs, pair, num_keys)
            s_BKMD = _apply_mask(mask, _compute_scores(config, q_BKMH, k_BKDH), low)
            highest_BKM = jnp.maximum(carry.highest_BKM, jnp.max(s_BKMD, axis=-1))
            p_BKMD = _apply_mask(mask, jnp.exp(s_BKMD - highest_BKM[..., None]), 0)
            # Sums so far are relative to the old maximum: scale them to the new one.
            scale_BKM = jnp.exp(carry.highest_BKM - highest_BKM)
            new_BKMH = jnp.einsum("bkmd,bkdh->bkmh", p_BKMD.astype(v_BKDH.dtype), v_BKDH, preferred_element_type=wide)
            total_BKM = carry.total_BKM * scale_BKM + jnp.sum(p_BKMD, axis=-1)
            return _Carry(highest_BKM, total_BKM, carry.out_BKMH * scale_BKM[..., None] + new_BKMH)

        carry = _compute_if(pair.is_needed, add, carry)
        highest_BKM, total_BKM, out_BKMH = carry
        if sinks_BKM is not None:
            highest_BKM = jnp.maximum(highest_BKM, sinks_BKM)
            scale_BKM = jnp.exp(carry.highest_BKM - highest_BKM)
            total_BKM = total_BKM * scale_BKM + jnp.exp(sinks_BKM - highest_BKM)
            out_BKMH = out_BKMH * scale_BKM[..., None]
        total_BKM = jnp.where(total_BKM == 0, 1, total_BKM)  # the output of a query that sees no key is zero
        # The output is written after every pair; the last pair of a block of queries completes it.
        out_BCW = _merge_queries(out_BKMH / total_BKM[..., None], pairs.rows).astype(q_BTW.dtype)
        out_BTW = jax.lax.dynamic_update_slice_in_dim(out_BTW, out_BCW, pair.row, axis=1)
        lse_BNC = (highest_BKM + jnp.log(total_BKM)).reshape(batch, heads, pairs.rows)
        lse_BNT = jax.lax.dynamic_update_slice_in_dim(lse_BNT, lse_BNC, pair.row, axis=2)
        return (carry, out_BTW, lse_BNT), None

    results = zeros(q_BTW.shape, q_BTW.dtype), zeros((batch, heads, length), wide)
    (_, out_BTW, lse_BNT), _ = jax.lax.scan(body, (empty, *results), blocks)
    return out_BTW.reshape(q_BTNH.shape), lse_BNT


def gradients(config: Config, residuals: Any, dout_BTNH: Array) -> Any:
    """Return the gradients of queries, keys, values and sinks."""
    q_BTNH, k_BSKH, v_BSKH, sinks_N, runtime_mask, out_BTNH, lse_BNT = residuals
    batch, length, heads, dim = q_BTNH.shape
    num_keys, groups = k_BSKH.shape[1:3]
    pairs, wide = _pairs_of(config, runtime_mask, length, num_keys), lse_BNT.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    zeros = functools.partial(
        initial_carry, [q_BTNH, k_BSKH, v_BSKH, dout_BTNH, *jax.tree.leaves((sinks_N, runtime_mask))]
    )
    k_BSX, v_BSX, dout_BTW = merge_heads(k_BSKH), merge_heads(v_BSKH), merge_heads(dout_BTNH)
    delta_BNT = row_dots(dout_BTNH, out_BTNH, pairs.rows)
    blocks, q_BTW = _loop_inputs(config, runtime_mask, pairs, merge_heads(q_BTNH))
    low = float(jnp.finfo(wide).min)
    zero_BKDH = zeros((batch, groups, pairs.columns, dim), wide)

    def body(state: Any, pair: _Pair) -> Any:
        (q_BKMH, dq_BKMH), dq_BTW, dk_BSX, dv_BSX = state
        # `dq_BTW` starts as the queries. A block of queries is read at its first pair, before gradients overwrite it.
        loaded_BKMH = _slice_queries(dq_BTW, pair.row, pairs.rows, groups, dim)
        q_BKMH = jnp.where(pair.is_first, loaded_BKMH, q_BKMH)
        dq_BKMH = jnp.where(pair.is_first, 0, dq_BKMH)
        is_own_C = pair.row + jnp.arange(pairs.rows) >= pair.own_row

        def add(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_BKMH, _, _ = carry
            dout_BKMH = _slice_queries(dout_BTW, pair.row, pairs.rows, groups, dim)
            lse_BKM, delta_BKM = (_slice_row_values(x, pair.row, pairs.rows, groups) for x in (lse_BNT, delta_BNT))
            k_BKDH, v_BKDH = (_slice_keys(x, pair.column, pairs.columns, groups) for x in (k_BSX, v_BSX))
            mask = _block_mask(config, runtime_mask, pairs, pair, num_keys)
            if length % pairs.rows:  # rows that two blocks share count once
                mask = mask & is_own_C[None, None, None, :, None]
            s_BKMD = _compute_scores(config, q_BKMH, k_BKDH)
            p_BKMD = jnp.exp(_apply_mask(mask, s_BKMD - lse_BKM[..., None], low))
            dv_BKDH = product("bkmd,bkmh->bkdh", p_BKMD.astype(v_BKDH.dtype), dout_BKMH)
            # ds = p (dp - delta). delta is the row's sum of p dp, which equals its sum of output times cotangent.
            ds_BKMD = p_BKMD * (product("bkmh,bkdh->bkmd", dout_BKMH, v_BKDH) - delta_BKM[..., None])
            if config.soft_cap is not None:
                # s / cap is the tanh, whose derivative is 1 - tanh^2.
                ds_BKMD = ds_BKMD * (1 - jnp.square(s_BKMD / config.soft_cap))
            ds_BKMD = ds_BKMD * config.scale
            if q_BKMH.dtype != jnp.float16:  # the range of float16 is too small for these gradients
                ds_BKMD = ds_BKMD.astype(q_BKMH.dtype)
            dk_BKDH = product("bkmd,bkmh->bkdh", ds_BKMD, q_BKMH)
            return dq_BKMH + product("bkmd,bkdh->bkmh", ds_BKMD, k_BKDH), dk_BKDH, dv_BKDH

        dq_BKMH, dk_BKDH, dv_BKDH = _compute_if(pair.is_needed, add, (dq_BKMH, zero_BKDH, zero_BKDH))
        dk_BSX, dv_BSX = _add_block(dk_BSX, dk_BKDH, pair.column), _add_block(dv_BSX, dv_BKDH, pair.column)
        dq_BCW = _merge_queries(dq_BKMH, pairs.rows).astype(q_BTW.dtype)
        if length % pairs.rows:
            old_BCW = jax.lax.dynamic_slice_in_dim(dq_BTW, pair.row, pairs.rows, axis=1)
            dq_BCW = jnp.where(is_own_C[None, :, None], dq_BCW, old_BCW)
        dq_BTW = jax.lax.dynamic_update_slice_in_dim(dq_BTW, dq_BCW, pair.row, axis=1)
        return ((q_BKMH, dq_BKMH), dq_BTW, dk_BSX, dv_BSX), None

    rows = (batch, groups, heads // groups * pairs.rows, dim)
    totals = (zeros(k_BSX.shape, wide) for _ in range(2))
    state = ((zeros(rows, q_BTW.dtype), zeros(rows, wide)), q_BTW, *totals)
    (_, dq_BTW, *totals), _ = jax.lax.scan(body, state, blocks)
    dk_BSKH, dv_BSKH = (total.astype(k_BSKH.dtype).reshape(k_BSKH.shape) for total in totals)
    dq_BTNH = dq_BTW.reshape(q_BTNH.shape)
    return dq_BTNH, dk_BSKH, dv_BSKH, sink_gradient(sinks_N, lse_BNT, delta_BNT)


def row_dots(x_BTNH: Array, y_BTNH: Array, rows: int) -> Array:
    """Return the dot products of x and y, [B, N, T]; a loop over blocks avoids a wide copy of all rows."""
    batch, length, heads, dim = x_BTNH.shape
    arrays, wide = (merge_heads(x_BTNH), merge_heads(y_BTNH)), wide_dtype(x_BTNH.dtype)
    starts = np.append(np.arange(0, length - rows, rows), length - rows)

    def body(sums_BNT: Array, start: Array) -> tuple[Array, None]:
        x_BCW, y_BCW = (jax.lax.dynamic_slice_in_dim(array, start, rows, axis=1).astype(wide) for array in arrays)
        sums_BNC = jnp.sum((x_BCW * y_BCW).reshape(batch, rows, heads, dim), axis=-1).swapaxes(1, 2)
        return jax.lax.dynamic_update_slice_in_dim(sums_BNT, sums_BNC, start, axis=2), None

    zeros = initial_carry(arrays, (batch, heads, length), wide)
    return jax.lax.scan(body, zeros, jnp.asarray(starts, jnp.int32))[0]


def _add_block(total_BSX: Array, block_BKDH: Array, start: Array) -> Array:
    block_BDX = merge_heads(block_BKDH.swapaxes(1, 2))
    old_BDX = jax.lax.dynamic_slice_in_dim(total_BSX, start, block_BDX.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total_BSX, old_BDX + block_BDX, start, axis=1)


def sink_gradient(sinks_N: Array | None, lse_BNT: Array, delta_BNT: Array) -> Array | None:
    if sinks_N is None:
        return None
    # A sink is a key whose value is 0, so its score has the gradient p (0 - delta), where p is its softmax share.
    shares_BNT = jnp.exp(sinks_N.astype(lse_BNT.dtype)[None, :, None] - lse_BNT)
    return -jnp.sum(shares_BNT * delta_BNT, axis=(0, 2)).astype(sinks_N.dtype)


# --- pairs of a block of queries and a block of keys -----------------------------------------------------------------


class _Pair(NamedTuple):
    """A pair of a block of queries and a block of keys, or arrays [P] of all pairs."""

    row: Any
    """Index of the first query; `column` is the index of the first key."""
    own_row: Any
    """Index of the first query that the previous block of queries lacks; `own_column` is the same for keys."""
    column: Any
    own_column: Any
    is_first: Any
    """Whether this is the first pair of its block of queries."""
    is_needed: Any = None
    """Whether the running program needs the pair; None if it needs all pairs."""


class _Pairs(NamedTuple):
    """Pairs of a block of queries and a block of keys that some of the queries may see, the last queries first."""

    rows: int
    columns: int
    all_P: _Pair


def _pairs_of(config: Config, runtime_mask: RuntimeMask, num_queries: int, num_keys: int) -> _Pairs:
    """List the pairs that the traced program may need."""
    rows, columns = _even_size(num_queries, config.size), _even_size(num_keys, config.size)
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
    return _Pairs(rows, columns, _Pair(*(np.asarray(values) for values in zip(*entries, strict=True))))


def _even_size(length: int, limit: int) -> int:
    """Return a block size: `length` if at most `limit`, else a multiple of `_LEAST_ROWS` with the fewest blocks."""
    count = -(-length // limit)
    even = -(-length // count)
    return min(limit, -(-even // _LEAST_ROWS) * _LEAST_ROWS) if length > limit else length


def _needed_pairs(config: Config, runtime_mask: RuntimeMask, pairs: _Pairs) -> Array | None:
    """Return which pairs the running program needs, booleans [P]; None if it needs all of them."""
    if all(field is None for field in runtime_mask):
        return None
    start = 0 if runtime_mask.start is None else runtime_mask.start
    row_P, column_P = jnp.asarray(pairs.all_P.row) + start, jnp.asarray(pairs.all_P.column)
    needed_P = jnp.ones(row_P.shape, bool)
    if config.causal:
        needed_P &= column_P <= row_P + pairs.rows - 1
    window = config.window if runtime_mask.window is None else runtime_mask.window
    if window is not None:
        needed_P &= row_P - (column_P + pairs.columns - 1) < window
    if runtime_mask.query_segments is not None and runtime_mask.key_segments is not None:
        min_query_BP, max_query_BP = _segment_ranges(runtime_mask.query_segments, pairs.all_P.row, pairs.rows)
        min_key_BP, max_key_BP = _segment_ranges(runtime_mask.key_segments, pairs.all_P.column, pairs.columns)
        # If the ranges of segment numbers do not overlap, no query and key have the same number.
        needed_P &= jnp.any((min_query_BP <= max_key_BP) & (min_key_BP <= max_query_BP), axis=0)
    return needed_P


def _segment_ranges(segments_BT: Array, starts_P: np.ndarray, size: int) -> tuple[Array, Array]:
    """Return the lowest and the highest segment number in the block of each pair, both [B, P]."""
    starts, inverse = np.unique(starts_P, return_inverse=True)
    blocks = [jax.lax.slice_in_dim(segments_BT, start, start + size, axis=1) for start in starts.tolist()]
    low, high = (jnp.stack([reduce(block, axis=1) for block in blocks], axis=1) for reduce in (jnp.min, jnp.max))
    return low[:, inverse], high[:, inverse]


def _block_mask(config: Config, runtime_mask: RuntimeMask, pairs: _Pairs, pair: _Pair, num_keys: int) -> Array:
    """Return which keys of a block each query of a block sees, booleans [B or 1, 1, 1, C, D]."""
    rows_C, columns_D = pair.row + jnp.arange(pairs.rows), pair.column + jnp.arange(pairs.columns)
    is_seen = jnp.ones((pairs.rows, pairs.columns), bool)
    if num_keys % pairs.columns:
        # The last block of keys overlaps the block before it, and the keys of both count once.
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


def _loop_inputs(config: Config, runtime_mask: RuntimeMask, pairs: _Pairs, q: Array) -> tuple[_Pair, Array]:
    """Return the pairs as inputs of `jax.lax.scan`, and the queries, behind an optimization barrier."""
    *indices, is_first, _ = pairs.all_P
    arrays = (jnp.asarray(array, jnp.int32) for array in indices)
    blocks = _Pair._make([*arrays, jnp.asarray(is_first), _needed_pairs(config, runtime_mask, pairs)])
    # Without the barrier, masks depend only on constants. A loop over layers then keeps the masks of all pairs for its
    # backward pass.
    return jax.lax.optimization_barrier((blocks, q))
