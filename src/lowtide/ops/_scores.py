"""Attention that holds all scores, with XLA's own operations: for few queries, and for derivatives of every kind.

`jax.nn.dot_product_attention` has no soft cap and no sinks, so this module computes them.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, M = G T, H head.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._options import AttentionMask, ScoreOptions
from ._sizes import wide_dtype


def attend_with_scores(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    mask: AttentionMask,
    scores: ScoreOptions,
    implementation: Literal["cudnn", "xla"],
) -> Array:
    """Compute attention; shapes [B, T, N, H], [B, S, K, H] twice, to [B, T, N, H]."""
    length, num_keys = q_BTNH.shape[1], k_BSKH.shape[1]
    # JAX's own XLA implementation computes float64 in float32, and has no float16 on a CPU.
    is_supported = scores.is_plain and (implementation == "cudnn" or q_BTNH.dtype in (jnp.bfloat16, jnp.float32))
    if is_supported and mask.is_static and mask.first_query == 0 and (mask.causal or not mask.window):
        window: Any = mask.window
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            is_causal=mask.causal,
            scale=scores.scale,
            local_window_size=None if window is None or window >= length else (window - 1, 0),
            implementation=implementation,
        )
    is_seen = mask.to_array(length, num_keys)
    if not is_supported:
        return _attend_by_scores(q_BTNH, k_BSKH, v_BSKH, is_seen, scores)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=is_seen, scale=scores.scale, implementation=implementation
    )


def _attend_by_scores(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, is_seen: Array, scores: ScoreOptions) -> Array:
    batch, length, heads, dim = q_BTNH.shape
    # Queries that share keys are rows of one product, and heads come before rows: a CPU multiplies these without a
    # copy.
    q_BKMH = q_BTNH.reshape(batch, length, k_BSKH.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
    groups = q_BKMH.shape[:4]
    q_BKMH = q_BKMH.reshape(*groups[:2], -1, dim)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    wide = wide_dtype(q_BTNH.dtype)
    s_BKMS = jnp.einsum("bkmh,bksh->bkms", q_BKMH, k_BKSH, preferred_element_type=wide) * scores.scale
    s_BKGTS = s_BKMS.reshape(*groups, -1)
    if scores.soft_cap is not None:
        s_BKGTS = scores.soft_cap * jnp.tanh(s_BKGTS / scores.soft_cap)
    # The lowest finite number, not -inf: the softmax of a row that sees nothing would be NaN.
    s_BKGTS = jnp.where(is_seen[:, :, None], s_BKGTS, jnp.finfo(wide).min)
    p_BKGTS = _softmax(s_BKGTS, scores.sinks).astype(v_BSKH.dtype)
    out_BKMH = jnp.einsum("bkms,bksh->bkmh", p_BKGTS.reshape(s_BKMS.shape), v_BKSH)
    return out_BKMH.reshape(*groups, dim).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _softmax(s_BKGTS: Array, sinks: Array | None) -> Array:
    """Return the softmax of scores; a sink is one more key, without a value."""
    if sinks is None:
        return jax.nn.softmax(s_BKGTS, axis=-1)  # keeps only its result for the backward pass
    sinks = sinks.astype(s_BKGTS.dtype).reshape(1, *s_BKGTS.shape[1:3], 1, 1)
    # The maximum only avoids overflow and cancels, so it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(s_BKGTS, axis=-1, keepdims=True), sinks))
    p_BKGTS = jnp.exp(s_BKGTS - highest)
    return p_BKGTS / (jnp.sum(p_BKGTS, axis=-1, keepdims=True) + jnp.exp(sinks - highest))
