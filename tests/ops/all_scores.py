"""Attention that holds all scores at once, and losses of it: what kernels and blocks are compared with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowtide.ops import AttentionMask
from lowtide.ops._options import ScoreOptions

SINKS = np.linspace(-1, 1, 4, dtype=np.float32)


def drawn(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def settings(mask: dict[str, Any], scores: dict[str, Any], traced: Any = None) -> tuple[AttentionMask, ScoreOptions]:
    """Return the settings of attention; numbers that the program computes add `traced`, which is zero."""
    window, segments = mask.get("window"), mask.get("segments")
    if isinstance(window, str):
        number = int(window.split()[1])
        window = jnp.int32(number) if traced is None else number + traced
    if segments is not None:
        segments = tuple(map(jnp.asarray, segments)) if isinstance(segments, tuple) else jnp.asarray(segments)
    options = {name: jnp.asarray(value) if name == "sinks" else value for name, value in scores.items()}
    attention_mask = AttentionMask(causal=mask.get("causal", True), segment_ids=segments, window=window)
    return attention_mask, ScoreOptions(0.3, **options)


def of_all_scores(q: Any, k: Any, v: Any, mask: AttentionMask, scores: ScoreOptions) -> Any:
    """The same of all scores at once, in the widest dtype of these arrays; zeros for what sees nothing."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = (each.astype(wide) for each in (q, k, v))
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    products = jnp.einsum("btnh,bsnh->bnts", q, k) * scores.scale
    if scores.soft_cap is not None:
        products = scores.soft_cap * jnp.tanh(products / scores.soft_cap)
    seen = mask.to_array(q.shape[1], k.shape[1])
    weights = jnp.where(seen, jnp.exp(products), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if scores.sinks is not None:
        total = total + jnp.exp(scores.sinks)[None, :, None, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / jnp.where(total == 0, 1, total), v)


def loss_of(attend: Any, mask: dict[str, Any], scores: dict[str, Any]) -> Any:
    """A loss of queries, keys, values and sinks that reads every number of the result."""

    @jax.jit
    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        given = {**scores, "sinks": sinks} if "sinks" in scores else scores
        out = attend(q, k, v, *settings(mask, given, traced=jnp.int32(q[0, 0, 0, 0] * 0)))
        return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
