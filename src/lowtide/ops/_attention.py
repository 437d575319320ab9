"""Attention: who computes it is chosen by the device that the program is traced for.

cuDNN's fused kernel on a GPU in half precision, by `jax.nn.dot_product_attention`, without a soft cap or sinks; JAX's
splash attention on a TPU (`_splash`); elsewhere blocks of XLA's operations (`_blocks`).

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, H head.

Known limits: segments, and windows that differ between layers, are a mask to cuDNN, which takes it as a bias
[B, 1, T, T]. cuDNN's residuals have no names. Windows that differ between layers are left to blocks on a TPU.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import ConfigError, is_count, traced_device
from ..core._compat import has_cudnn
from ._blocks import attend_in_blocks
from ._context import over_context
from ._divided import wide_of
from ._scores import attend_with_scores
from ._sight import Implementation, Scores, Sight
from ._splash import LEAST_TOKENS, attend_with_splash, refusal

_HALF = (jnp.bfloat16, jnp.float16)
# Fewer queries have few scores.
_LEAST_IN_BLOCKS = 64
# cuDNN takes documents as a mask of [T, T], and computes all of it: at 32,768 tokens its step was slower than blocks.
_LEAST_MASK_IN_BLOCKS = 16384


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attend with the kernel that the target has.

    Query heads in groups of N / K share a head of keys and values, which is not repeated.

    On a mesh with an axis ``context``, of a trainer or `jax.set_mesh`, tokens are divided along it: each device gets
    all tokens of a part of the heads, and gives its results back. Inside of a `jax.shard_map` over that axis nothing is
    sent.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: whether a query sees no key after it; then T is S.
        segment_ids: documents of a packed row: a query sees keys of its own number alone. Of queries and keys, or one
            array for both where T is S.
        window: how many keys a causal query sees, itself included; None: all before it.
        soft_cap: squashes scores into this range with tanh, before anything is masked.
        sinks: for each query head a score of a key without a value.
        scale: what scores are multiplied by; None: ``H ** -0.5``.
        implementation: who computes it: ``"cudnn"``'s kernel or ``"splash"``, JAX's for TPUs; ``"blocks"`` of XLA's
            operations; ``"xla"`` with all scores at once, which has derivatives of every kind (`jax.jvp`). None: on a
            GPU cuDNN's where it can, of rows of 16,384 tokens and more not with segments, which it takes as a mask; on
            a TPU splash where it can, of rows of 1,024 tokens and more; else blocks, and of fewer than 64 queries all
            scores. Of several TPUs each has the kernel where a mesh is known that divides rows and heads, of the
            trainer, `jax.set_mesh` or `jax.shard_map` (``check_vma=False``); else they divide blocks.

    Returns:
        The values by their shares, in the dtype of `q`. A query that sees nothing gets finite numbers, and gradients
        that are finite: its row is padding, whose result nobody reads.

    Raises:
        ConfigError: for shapes or dtypes that do not fit, a window below 1, a kernel that cannot compute this here, or
            an axis ``context`` that does not divide tokens or query heads.

    Memory:
        cuDNN: [B, N, T] of the forward pass; with segments a mask [B, 1, T, T]. Blocks: scores of one block of queries
        and keys in float32, 64 MiB of them on a device (8 on a CPU) unless blocks of 128 have more; for the backward
        pass `q`, `k`, `v`, the result and [B, N, T], of which the last two have the names ``attn_out`` and
        ``attn_lse``; in it gradients of keys and values in float32. Splash: as blocks without any scores; copies of
        some heads of one row, 8 MiB of queries and more where T is long.

    Examples:
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> attention(q, q[:, :, :1], q[:, :, :1], window=2, segment_ids=jnp.array([[0, 0, 1, 1]])).shape
        (1, 4, 2, 8)

    References:
        Dao, "FlashAttention-2" (arXiv:2307.08691), for what the kernels compute; Xiao et al., "Efficient Streaming
        Language Models with Attention Sinks" (arXiv:2309.17453).
    """
    _check(q, k, v, causal, window, soft_cap, sinks)
    _check_scale(scale)
    segments = _segments(q, k, segment_ids)
    sight = Sight(causal=causal, window=window, segments=segments)
    if isinstance(scale, jax.Array):  # it may be traced, or learned
        q, scale = (q.astype(wide_of(q.dtype)) * scale).astype(q.dtype), 1.0
    scores = Scores(
        q.shape[-1] ** -0.5 if scale is None else float(scale), None if soft_cap is None else float(soft_cap), sinks
    )
    return attend(q, k, v, sight, scores, implementation)


def attend(
    q: Array, k: Array, v: Array, sight: Sight, scores: Scores, implementation: Implementation | None = None
) -> Array:
    """Attend as `attention` does, with windows, and a first query, that are known when the program runs."""
    if implementation not in (None, *typing.get_args(Implementation)):
        raise ConfigError(
            f"attention: no implementation is called {implementation!r}",
            expected=f"{', '.join(map(repr, typing.get_args(Implementation)))} or None",
            hint="leave it out for what the target has",
        )
    if implementation == "cudnn" and (why := _not_by_cudnn(q.dtype, q.shape[-1], scores)):
        raise ConfigError(
            "attention: cuDNN's kernel cannot compute this",
            expected="half precision on an NVIDIA GPU, heads of 8, 16, ... 128, no soft cap and no sinks",
            got=why,
            hint='leave implementation out, or take "blocks"',
        )
    if implementation == "splash" and (why := _not_by_splash(q, k, sight, scores)):
        raise ConfigError(
            "attention: the kernel for TPUs cannot compute this",
            expected="bfloat16 or float32 on a TPU, heads of 64, 128 or 256, tokens in whole blocks of 128, "
            "and keys in the segments of queries",
            got=why,
            hint='leave implementation out, or take "blocks"',
        )
    return over_context(functools.partial(_attend_by, implementation), q, k, v, sight, scores)


def _attend_by(
    implementation: Implementation | None, q: Array, k: Array, v: Array, sight: Sight, scores: Scores
) -> Array:
    named = implementation is not None
    if implementation is None:
        implementation = _best(q, k, sight, scores)
    if implementation == "splash":
        return attend_with_splash(q, k, v, sight, scores, named=named)
    if implementation == "blocks":
        return attend_in_blocks(q, k, v, sight, scores)
    return attend_with_scores(q, k, v, sight, scores, implementation)


def attention_implementation(
    dtype: Any,
    head_dim: int,
    *,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    num_tokens: int | None = None,
    sight: Sight | None = None,
) -> Implementation:
    """Return what computes attention on the device that a program is traced for.

    Args:
        dtype: of queries.
        head_dim: H.
        soft_cap: as in `attention`.
        has_sinks: whether there are any.
        num_tokens: T; None: as many as a kernel wants.
        sight: which keys a query sees; None: those before it and itself.

    Returns:
        Its name. Among several devices blocks take the place of the kernel for TPUs where no mesh is known.

    Examples:
        >>> attention_implementation(jnp.float32, 64)
        'blocks'
    """
    scores = Scores(1.0, soft_cap, jnp.zeros(1) if has_sinks else None)
    x: Any = jax.ShapeDtypeStruct((1, num_tokens or LEAST_TOKENS, 1, head_dim), dtype)
    return _best(x, x, sight or Sight(), scores)


def _best(q: Array, k: Array, sight: Sight, scores: Scores) -> Implementation:
    """Return the kernel that the target has, where it can compute this."""
    is_masked = not sight.is_static and q.shape[1] >= _LEAST_MASK_IN_BLOCKS
    if not is_masked and not _not_by_cudnn(q.dtype, q.shape[-1], scores):
        return "cudnn"
    is_long = min(q.shape[1], k.shape[1]) >= LEAST_TOKENS
    if is_long and not _not_by_splash(q, k, sight, scores):
        return "splash"
    return "xla" if q.shape[1] < _LEAST_IN_BLOCKS else "blocks"


def _not_by_splash(q: Array, k: Array, sight: Sight, scores: Scores) -> str:
    """Return why not the kernel for TPUs."""
    device = traced_device()
    if device.platform != "tpu":
        return f"a device of kind {getattr(device, 'device_kind', device.platform)}"
    return refusal(q, k, sight, scores)


def _not_by_cudnn(dtype: Any, head_dim: int, scores: Scores) -> str:
    """Return why not cuDNN's kernel."""
    device = traced_device()
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    if not scores.is_plain:
        return "a soft cap" if scores.soft_cap is not None else "sinks"
    if device.platform != "gpu" or capability is None or int(capability[1]) < 8:
        return f"a device of kind {getattr(device, 'device_kind', device.platform)}"
    if dtype not in _HALF:
        return f"{dtype}"
    if head_dim > 128 or head_dim % 8:
        return f"heads of {head_dim}"
    # A GPU that is not here, compiled for without the library: blocks of XLA's operations stand in, and a report counts
    # their bytes.
    return "" if has_cudnn() else "no cuDNN in this process"


def _segments(q: Array, k: Array, segment_ids: Any) -> tuple[Array, Array] | None:
    if segment_ids is None:
        return None
    both = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    found: list[Any] = [(getattr(each, "shape", None), getattr(each, "dtype", type(each).__name__)) for each in both]
    wanted = [q.shape[:2], k.shape[:2]]
    if [shape for shape, _ in found] != wanted or not all(jnp.issubdtype(dtype, jnp.integer) for _, dtype in found):
        raise ConfigError(
            "attention: segment_ids do not fit",
            expected=f"integers of shape {wanted[0]} for queries and {wanted[1]} for keys",
            got=", ".join(f"{dtype}{list(shape or ())}" for shape, dtype in found),
            hint="one number for each token: its document in the row",
        )
    return both


def _check_scale(scale: Any) -> None:
    is_array = isinstance(scale, jax.Array | np.ndarray)
    if scale is not None and not (scale.shape == () if is_array else isinstance(scale, numbers.Real)):
        raise ConfigError(
            "attention: scale is one number",
            expected="a number, or an array without axes",
            got=f"{scale.dtype}{list(scale.shape)}" if is_array else repr(scale),
            hint="multiply the queries by what differs between heads, and pass scale=1.0",
        )
    if scale is not None and not (jnp.issubdtype(scale.dtype, jnp.floating) if is_array else math.isfinite(scale)):
        raise ConfigError(
            "attention: scale is a finite number",
            got=repr(scale),
            hint="leave it out for the usual one, head ** -0.5",
        )


def _check(
    q: Array, k: Array, v: Array, causal: bool, window: int | None, soft_cap: float | None, sinks: Array | None
) -> None:
    shapes = [tuple(each.shape) for each in (q, k, v)]
    got = ", ".join(f"{each.dtype}{list(each.shape)}" for each in (q, k, v))
    if any(len(shape) != 4 for shape in shapes) or 0 in {size for shape in shapes for size in shape}:
        raise ConfigError(
            "attention: queries, keys and values have four axes, none of them empty",
            expected="[batch, tokens, heads, head], heads after tokens",
            got=got,
            hint="reshape the projections; jnp.swapaxes(x, 1, 2) of what has heads first",
        )
    (batch, length, heads, dim), (_, num_keys, groups, _) = shapes[:2]
    if shapes[1] != (batch, num_keys, groups, dim) or shapes[2] != shapes[1] or heads % groups:
        raise ConfigError(
            "attention: queries, keys and values do not fit",
            expected="q [B, T, N, H], k and v [B, S, K, H], and K divides N",
            got=got,
            hint="key/value heads that queries share are not repeated",
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (*_HALF, jnp.float32, jnp.float64):
        raise ConfigError(
            "attention: queries, keys and values are of one floating-point dtype",
            expected="bfloat16, float16, float32 or float64 three times",
            got=got,
            hint="cast them: x.astype(q.dtype)",
        )
    if causal and length != num_keys:
        raise ConfigError(
            "attention: causal attention has as many queries as keys",
            expected=f"{num_keys} queries",
            got=length,
            hint="causal=False and segment_ids for keys that all queries see",
        )
    if window is not None and not (causal and is_count(window, 1)):
        raise ConfigError(
            "attention: a window is of causal attention, and holds the query itself at least",
            expected="causal=True and window an integer of at least 1",
            got=f"causal={causal}, window={window}",
            hint="leave window out for all keys",
        )
    if soft_cap is not None and not (isinstance(soft_cap, numbers.Real) and 0 < soft_cap < math.inf):
        raise ConfigError("attention: soft_cap is a positive number", got=repr(soft_cap), hint="leave it out for none")
    shape, dtype = getattr(sinks, "shape", None), getattr(sinks, "dtype", None)
    if sinks is not None and (shape != (heads,) or dtype is None or not jnp.issubdtype(dtype, jnp.floating)):
        raise ConfigError(
            "attention: sinks are one score for each query head",
            expected=f"an array [{heads}] of floating-point numbers",
            got=type(sinks).__name__ if dtype is None else f"{dtype}{list(sinks.shape)}",
            hint="leave them out for none",
        )
