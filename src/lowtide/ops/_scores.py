"""Attention by XLA's own operations, which hold scores: of a block of queries, and on a CPU of the keys before them.

`jax.nn.dot_product_attention` holds [B, N, C, T] scores of one layer: of all queries up to 2048, else of 1024 at a
time, and of fewer where a device would hold more than 256 MiB of them. It has no soft cap and no sinks; those are
computed here, in the same blocks, and so are many queries on a CPU, where it multiplies heads of [B, T, N, H] arrays
slowly.

Shapes: B batch, T queries, S keys, C block of queries, N query heads, K key/value heads, G = N / K, H head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import BATCH_AXES, divided_mesh
from ._device import traced_device
from ._sight import Implementation, Scores, Sight

# XLA's attention holds the scores of all queries that it is given: longer sequences take them in blocks, and so do more
# rows or heads than leave a device this many bytes of float32 scores.
_MAX_QUERIES = 2048
_QUERY_BLOCK = 1024
_LEAST_BLOCK = 128
_SCORE_BYTES = 2**28
# On a CPU so many queries are multiplied here, a quarter of them at a time with the keys up to its last one.
_LEAST_ON_CPU = 512
_CAUSAL_PARTS = 4


def attend_with(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sight: Sight, scores: Scores, implementation: Implementation
) -> Array:
    """Attend; shapes [B, T, N, H], [B, S, K, H] twice, to [B, T, N, H]."""
    length = q_BTNH.shape[1]
    block = _queries_at_a_time(q_BTNH.shape, k_BSKH.shape[1]) if implementation == "xla" else length
    if length > block:
        return _attend_in_blocks(q_BTNH, k_BSKH, v_BSKH, sight, scores, block)
    from_start = isinstance(sight.start, int) and sight.start == 0 and k_BSKH.shape[1] == length
    if sight.causal and from_start and _is_long_on_cpu(length):
        return _attend_in_parts(q_BTNH, k_BSKH, v_BSKH, sight, scores)
    if scores.is_plain and sight.is_static and sight.start == 0:
        window: Any = sight.window
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            is_causal=sight.causal,
            scale=scores.scale,
            local_window_size=None if window is None or window >= length else (window - 1, 0),
            implementation=implementation,
        )
    mask = sight.mask(jnp.arange(length), 0, k_BSKH.shape[1])
    return _attend_masked(q_BTNH, k_BSKH, v_BSKH, mask, scores, implementation)


def _attend_masked(
    q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, mask: Array, scores: Scores, implementation: Implementation
) -> Array:
    if not scores.is_plain or _is_long_on_cpu(q_BCNH.shape[1]):
        return _attend_by_scores(q_BCNH, k_BSKH, v_BSKH, mask, scores)
    return jax.nn.dot_product_attention(
        q_BCNH, k_BSKH, v_BSKH, mask=mask, scale=scores.scale, implementation=implementation
    )


def _is_long_on_cpu(num_queries: int) -> bool:
    return num_queries >= _LEAST_ON_CPU and traced_device().platform == "cpu"


def _attend_in_parts(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, sight: Sight, scores: Scores) -> Array:
    """Attend without the products with keys that come after all queries of a part: 5/8 of them remain."""
    length = q_BTNH.shape[1]
    size = -(-length // _CAUSAL_PARTS)
    parts: list[Array] = []
    for first in range(0, length, size):
        end = min(first + size, length)
        if sight.segments is not None:
            of_queries, of_keys = sight.segments
            seen = dataclasses.replace(sight, segments=(of_queries, of_keys[:, :end]))
        else:
            seen = sight
        mask = seen.mask(jnp.arange(first, end), first, end)
        parts.append(_attend_by_scores(q_BTNH[:, first:end], k_BTKH[:, :end], v_BTKH[:, :end], mask, scores))
    return jnp.concatenate(parts, axis=1)


def _queries_at_a_time(shape: tuple[int, ...], num_keys: int) -> int:
    """Return how many queries' scores are held at once; those of a CPU, whose memory is larger, by length alone."""
    batch, length, heads, _ = shape
    block = _QUERY_BLOCK if length > _MAX_QUERIES else length
    if traced_device().platform == "cpu":
        return block
    mesh = divided_mesh()
    sizes = {} if mesh is None else mesh.shape
    for name in (*BATCH_AXES, "tensor"):
        size = 1 if name in getattr(mesh, "manual_axes", ()) else sizes.get(name, 1)
        batch, heads = (batch, _part(heads, size)) if name == "tensor" else (_part(batch, size), heads)
    of_a_query = 4 * batch * heads * num_keys
    if block * of_a_query <= _SCORE_BYTES:
        return block
    most = max(_SCORE_BYTES // of_a_query, _LEAST_BLOCK)
    return min(block, 1 << most.bit_length() - 1)


def _part(whole: int, size: int) -> int:
    """Return what a device has of an axis, which is divided evenly or not at all."""
    return whole if whole % size else whole // size


def _attend_in_blocks(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sight: Sight, scores: Scores, size: int) -> Array:
    """Attend with scores of one block of queries at a time, forward and backward."""
    batch, length, heads, dim = q_BTNH.shape
    num_blocks = -(-length // size)
    rest = num_blocks * size - length
    q_BTNH = jnp.pad(q_BTNH, ((0, 0), (0, rest), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(q_BTNH.reshape(batch, num_blocks, size, heads, dim), 1, 0)
    if sight.segments is not None:
        of_queries, of_keys = sight.segments
        sight = dataclasses.replace(sight, segments=(jnp.pad(of_queries, ((0, 0), (0, rest))), of_keys))

    def attend(block: tuple[Array, Array]) -> Array:
        start, q_BCNH = block
        mask = sight.mask(start + jnp.arange(size), start, k_BSKH.shape[1])
        return _attend_masked(q_BCNH, k_BSKH, v_BSKH, mask, scores, "xla")

    starts = size * jnp.arange(num_blocks)
    out = jax.lax.map(jax.checkpoint(attend, prevent_cse=False), (starts, blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, num_blocks * size, heads, dim)[:, :length]


def _attend_by_scores(q_BCNH: Array, k_BSKH: Array, v_BSKH: Array, mask: Array, scores: Scores) -> Array:
    batch, length, heads, dim = q_BCNH.shape
    # Queries that share keys are rows of one product, and heads come before rows: a CPU multiplies them as they lie.
    q_BKMH = q_BCNH.reshape(batch, length, k_BSKH.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
    groups = q_BKMH.shape[:4]
    q_BKMH = q_BKMH.reshape(*groups[:2], -1, dim)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    s_BKMS = jnp.einsum("bkmh,bksh->bkms", q_BKMH, k_BKSH, preferred_element_type=jnp.float32) * scores.scale
    s_BKGCS = s_BKMS.reshape(*groups, -1)
    if scores.soft_cap is not None:
        s_BKGCS = scores.soft_cap * jnp.tanh(s_BKGCS / scores.soft_cap)
    # Finite: what fills up the last block may see nothing.
    s_BKGCS = jnp.where(mask[:, :, None], s_BKGCS, jnp.finfo(jnp.float32).min)
    p_BKGCS = _shares(s_BKGCS, scores.sinks).astype(v_BSKH.dtype)
    out_BKMH = jnp.einsum("bkms,bksh->bkmh", p_BKGCS.reshape(s_BKMS.shape), v_BKSH)
    return out_BKMH.reshape(*groups, dim).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _shares(s_BKGCS: Array, sinks: Array | None) -> Array:
    """Softmax of scores; a sink is a key more without a value."""
    if sinks is None:
        return jax.nn.softmax(s_BKGCS, axis=-1)  # keeps its result alone for the backward pass
    sinks = sinks.astype(jnp.float32).reshape(1, *s_BKGCS.shape[1:3], 1, 1)
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(s_BKGCS, axis=-1, keepdims=True), sinks))
    p_BKGCS = jnp.exp(s_BKGCS - highest)
    return p_BKGCS / (jnp.sum(p_BKGCS, axis=-1, keepdims=True) + jnp.exp(sinks - highest))
