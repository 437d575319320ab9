"""Attention with an implementation selected for the device that the program is traced for.

- `_cudnn`: cuDNN's fused kernel, on GPUs in half precision.
- `_splash`: JAX's splash attention kernel, on TPUs, for 1,024 tokens and more.
- `attend_with_scores`: XLA operations on all scores at once, for fewer than 64 queries. Supports all derivatives.
- `_blocks`: XLA operations on one block of scores at a time, in all other cases.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, M = G T, H size of a head.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float

from ..core import (
    BATCH_AXES,
    CONTEXT,
    ConfigError,
    check_choice,
    num_shards_along,
    shardings_of,
    traced_mesh,
    without_explicit_axes,
)
from . import _cudnn, _splash
from ._blocks import attend_in_blocks, wide_dtype
from ._dispatch import AttentionCase, AttentionChoice, AttentionKernel, case_of
from ._implementations import IMPLEMENTATIONS, Implementation
from ._options import (
    CAUSAL,
    AttentionMask,
    ScoreOptions,
    check_arrays,
    check_mask,
    check_mask_type,
    check_scores,
    dot_product_options,
)

# With fewer queries the scores are small, so all are computed at once.
_LEAST_IN_BLOCKS = 64


KERNELS: Mapping[Implementation, AttentionKernel] = {"cudnn": _cudnn.KERNEL, "splash": _splash.KERNEL}
"""Kernels by name of the implementation, in the order in which automatic selection tries them."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    mask: AttentionMask = CAUSAL,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Compute attention with the implementation selected for the target device.

    N / K query heads share one head of keys and values. Key/value heads are repeated only if tokens are sharded and the
    devices cannot divide the K heads evenly. Causality, windows and segments define the mask. Mask and bias arrays
    [T, S] (as for ALiBi) are not supported, because kernels would read them from memory. Use
    `jax.nn.dot_product_attention` for such arrays.

    If the mesh of a trainer or of `jax.set_mesh` has an axis ``context``, tokens are sharded along it. All-to-all
    exchanges give each device all tokens of a part of the heads, and restore the sharding by tokens afterwards. Inside
    of a `jax.shard_map` over that axis there is no communication, and each device attends only to its own tokens.

    Args:
        q: queries [B, T, N, H]; in a decoder with a cache, only the queries of the new tokens.
        k: keys [B, S, K, H]; in a decoder with a cache, the keys of the earlier and the new tokens.
        v: values [B, S, K, H].
        mask: which keys a query sees. By default it is causal: a query sees its own and earlier keys, and T has to
            equal S.
        scale: factor of the scores; None means ``H ** -0.5``. It may be traced, and learned.
        soft_cap: soft cap: scores become ``soft_cap * tanh(scores / soft_cap)`` before masking; None means no cap.
        sinks: attention sinks [N]. Each query head has one: the score of an additional key that has no value. None
            means no sinks.
        implementation: ``"cudnn"``; ``"splash"``, JAX's kernel for TPUs; ``"blocks"``, XLA operations on one block of
            scores at a time; or ``"xla"``, XLA operations on all scores at once. Only ``"xla"`` has forward-mode
            derivatives (`jax.jvp`, `jax.linearize`, `jax.hessian`). None selects the first entry of this list that
            supports the arguments:

            - On a GPU ``"cudnn"``. Exception: rows of at least 16,384 tokens for which cuDNN would need a mask array.
              It needs one for segments before compute capability 9.0 or, with grouped heads, before JAX 0.11.1, and
              for a start that is traced or not 0, a traced window without `AttentionMask.windows`, a window without
              causality, and separate segments of queries and keys.
            - On a TPU ``"splash"``, for at least 1,024 queries and keys.
            - ``"xla"`` for fewer than 64 queries, else ``"blocks"``.

            In a program for several TPUs, splash needs a known mesh that shards rows and heads: from a trainer,
            `jax.set_mesh` or `jax.shard_map` (``check_vma=False``). Without such a mesh, blocks replace splash, or
            `ConfigError` is raised if splash was requested. The same holds for several GPUs and segments with cuDNN.

    Returns:
        Attention output [B, T, N, H], same dtype as `q`. A query that sees no key, such as padding, gets finite numbers
        and finite gradients.

    Raises:
        ConfigError: for shapes or dtypes that do not match; for an invalid mask, such as a window below 1; for an
            invalid scale, soft cap or array of sinks; for a causal mask without `start` if T and S differ; for an
            implementation that is unknown, or does not support the arguments or the device; for an axis ``context``
            whose size does not divide tokens or query heads. Traced values are not checked: with a traced window of 0,
            a query sees no key.

    Memory:
        cuDNN: the residuals and names of blocks. With segments, one float32 array [B M, N, T] in each pass, where M
            documents a row are T / 256, at least 8 and at most 128. Rows with more documents, and documents that are
            not contiguous, are computed in blocks. The program holds the memory of the blocks in any case, also for
            windows that are not among `AttentionMask.windows`. With a mask array, [B or 1, 1, T, S] in half precision.
        Blocks: the float32 scores of one block. They take at most 64 MiB on a device (8 MiB on a CPU), unless the
            smallest block, 128 x 128, needs more. Residuals are `q`, `k`, `v`, the output and the log-sum-exps
            [B, N, T]. The checkpoint names of output and log-sum-exps are ``attn_out`` and ``attn_lse``. The backward
            pass has float32 gradients of keys and values.
        Splash: the same residuals, no scores, and copies of the arrays for some heads of one row. With bfloat16 and
            H = 128, the copy of the queries has at most 8 MiB, unless the queries of one key/value head need more.
        XLA: all scores [B, N, T, S], in float32 at least.

    Examples:
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> mask = AttentionMask(window=2, segment_ids=jnp.array([[0, 0, 1, 1]]))
        >>> attention(q, q[:, :, :1], q[:, :, :1], mask=mask, soft_cap=30.0).shape
        (1, 4, 2, 8)
        >>> new, cached = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 16, 4, 8))
        >>> attention(new, cached, cached, mask=AttentionMask(start=jnp.int32(5))).shape
        (1, 2, 4, 8)

    References:
        Dao, "FlashAttention-2" (arXiv:2307.08691), for what the kernels compute; Xiao et al., "Efficient Streaming
        Language Models with Attention Sinks" (arXiv:2309.17453).
    """
    check_arrays(q, k, v)
    check_mask(q, k, mask)
    length = equal_document_length(mask, q.shape[1], k.shape[1])
    factor: Any = q.shape[-1] ** -0.5 if scale is None else scale
    check_scores(q.shape[2], factor, soft_cap, sinks)
    if isinstance(factor, jax.Array):  # it may be traced or learned, so it goes into the queries
        q, factor = (q.astype(wide_dtype(q.dtype)) * factor).astype(q.dtype), 1.0
    scores = ScoreOptions(float(factor), None if soft_cap is None else float(soft_cap), sinks)
    mask = dataclasses.replace(
        mask,
        window=_to_python_int(mask.window),
        start=_to_python_int(mask.first_query),
        segment_ids=_broadcast_segments(q.shape[0], mask.segments),
    )
    if not q.shape[0]:
        _check_implementation(implementation, case_of(q, k, mask, scores))
        return q
    shape = q.shape
    if length is not None and traced_mesh() is None and not jax.typeof(q).sharding.mesh.explicit_axes:
        # Documents of one length are rows of a larger batch, without segments.
        q_rows, k_rows, v_rows = (x.reshape(-1, length, *x.shape[2:]) for x in (q, k, v))
        row_mask = dataclasses.replace(mask, segment_ids=None)
        if _is_better(implementation, case_of(q_rows, k_rows, row_mask, scores), case_of(q, k, mask, scores)):
            q, k, v, mask = q_rows, k_rows, v_rows, row_mask
    _check_implementation(implementation, case_of(q, k, mask, scores))
    return _attend_over_context(implementation, q, k, v, mask, scores).reshape(shape)


def _is_better(implementation: Implementation | None, new: AttentionCase, old: AttentionCase) -> bool:
    """Return whether a case has a kernel, or the other case has none; `implementation` is that of `attention`."""

    def has_kernel(case: AttentionCase) -> bool:
        if implementation is None:
            return choose_attention(case).implementation in KERNELS
        kernel = KERNELS.get(implementation)
        return kernel is not None and not kernel.unsupported_reason(case)

    return has_kernel(new) or not has_kernel(old)


def _check_implementation(implementation: Implementation | None, case: AttentionCase) -> None:
    if implementation is None:
        return
    hint = "leave it out to use the best one for the target"
    check_choice("attention: implementation", implementation, typing.get_args(Implementation), hint=hint)
    kernel = KERNELS.get(implementation)
    if kernel is not None and (reason := kernel.unsupported_reason(case)):
        problem = f"attention: {kernel.description} cannot compute this"
        hint = 'leave implementation out, or pass "blocks"'
        raise ConfigError(problem, expected=kernel.requirements, got=reason, hint=hint)


def _to_python_int(value: Any) -> Any:
    return int(value) if isinstance(value, np.ndarray | np.integer) else value


def _broadcast_segments(rows: int, segments: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
    """Broadcast segments that all rows share, [1, T] and [1, S], to [B, T] and [B, S]."""
    if segments is None or rows == 1 or all(ids.shape[0] == rows for ids in segments):
        return segments
    queries, keys = (jnp.broadcast_to(ids, (rows, ids.shape[1])) for ids in segments)
    return (queries, queries) if segments[0] is segments[1] else (queries, keys)


def equal_document_length(mask: AttentionMask, num_queries: int, num_keys: int) -> int | None:
    """Return the length of the documents if all have one length, and the segments are known; None otherwise.

    Segments are known when the program is traced if they are a constant, such as an array of NumPy.
    """
    segments = mask.segments
    is_known = segments is not None and segments[0] is segments[1] and not isinstance(segments[0], Tracer)
    if segments is None or not is_known or num_queries != num_keys or not mask.first_query_is_first_key:
        return None
    ids_BT = np.asarray(segments[0])
    if not ids_BT.size:
        return None
    length = int(np.argmax(np.append(ids_BT[0] != ids_BT[0, 0], True)))  # of the first document
    if num_queries % length or length == num_queries:
        return None
    ids_BML = ids_BT.reshape(ids_BT.shape[0], -1, length)
    is_equal = bool(np.all(ids_BML == ids_BML[:, :, :1]))
    return length if is_equal and all(len(set(row)) == len(row) for row in ids_BML[:, :, 0].tolist()) else None


def _dispatch(
    implementation: Implementation | None, q: Array, k: Array, v: Array, mask: AttentionMask, scores: ScoreOptions
) -> Array:
    name = implementation or choose_attention(case_of(q, k, mask, scores)).implementation
    if name in KERNELS:
        return KERNELS[name].attend(q, k, v, mask, scores, is_required=implementation is not None)
    attend = attend_in_blocks if name == "blocks" else attend_with_scores
    return attend(q, k, v, mask, scores)


def attention_implementation(
    dtype: Any,
    head_dim: int,
    *,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    num_tokens: int | None = None,
    mask: AttentionMask = CAUSAL,
    is_grouped: bool = False,
) -> AttentionChoice:
    """Return the implementation that `attention` selects on the device that a program is traced for, and the reason.

    Args:
        dtype: dtype of the queries.
        head_dim: size of a head, H.
        soft_cap: as in `attention`.
        has_sinks: whether there are sinks.
        num_tokens: number of queries and of keys; None means 1,024, the minimum of the kernel for TPUs.
        mask: as in `attention`.
        is_grouped: whether several query heads share a key/value head.

    Returns:
        Name of the implementation, and how its kernel applies the mask or why no kernel is used. In a program for
        several TPUs, blocks replace ``"splash"`` if no mesh is known.

    Raises:
        ConfigError: for a mask that is not an `AttentionMask`.

    Examples:
        >>> attention_implementation(jnp.float32, 64).implementation
        'blocks'
    """
    check_mask_type(mask)
    mask = dataclasses.replace(mask, window=_to_python_int(mask.window), start=_to_python_int(mask.start))
    scores = ScoreOptions(1.0, soft_cap, jnp.zeros(1) if has_sinks else None)
    shape = 1, num_tokens or _splash.LEAST_TOKENS, 1 + is_grouped, head_dim
    q, k = (jax.ShapeDtypeStruct((*shape[:2], heads, head_dim), dtype) for heads in (shape[2], 1))
    return choose_attention(case_of(q, k, mask, scores))  # pyright: ignore[reportArgumentType]


def choose_attention(case: AttentionCase) -> AttentionChoice:
    """Return the implementation that `attention` selects for a case, and the reason.

    It is the first preferred kernel that supports the case, else ``"xla"`` for few queries or ``"blocks"``.

    Examples:
        >>> hopper = AttentionCase(capability=(9, 0), cudnn_version=91400, jax_version=(0, 12, 0), segments="shared")
        >>> str(choose_attention(hopper))
        "cuDNN's kernel (with the offsets of up to 16 documents a row)"
    """
    reason = ""
    for name, kernel in KERNELS.items():
        if kernel.platform != case.platform:
            continue
        problem = kernel.unsupported_reason(case)
        if not problem and kernel.is_preferred(case):
            return AttentionChoice(name, kernel.describe(case))
        reason = f"not {IMPLEMENTATIONS[name]}: {problem or f'a mask array for {case.num_queries} queries is slower'}"
    return AttentionChoice("xla" if case.num_queries < _LEAST_IN_BLOCKS else "blocks", reason)


# --- all scores at once ----------------------------------------------------------------------------------------------


def attend_with_scores(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions) -> Array:
    """Compute attention [B, T, N, H] from all scores, by `jax.nn.dot_product_attention` if it supports the options."""
    length, num_keys = q_BTNH.shape[1], k_BSKH.shape[1]
    # JAX's own XLA implementation computes float64 in float32, and has no float16 on a CPU.
    if not scores.is_plain or q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        out = _attend_by_scores(q_BTNH, k_BSKH, v_BSKH, mask.to_array(length, num_keys), scores)
    else:
        options = dot_product_options(mask, length, num_keys)
        out = jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, scale=scores.scale, implementation="xla", **options)
    return checkpoint_name(out, "attn_out")


def _attend_by_scores(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, is_seen: Array, scores: ScoreOptions) -> Array:
    batch, length, heads, dim = q_BTNH.shape
    # Queries that share keys are rows of one product, and heads come before rows: a CPU multiplies this layout without
    # a copy.
    q_BKMH = q_BTNH.reshape(batch, length, k_BSKH.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
    groups = q_BKMH.shape[:4]
    q_BKMH = q_BKMH.reshape(*groups[:2], -1, dim)
    k_BKSH, v_BKSH = jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)
    wide = wide_dtype(q_BTNH.dtype)
    s_BKMS = jnp.einsum("bkmh,bksh->bkms", q_BKMH, k_BKSH, preferred_element_type=wide) * scores.scale
    s_BKGTS = s_BKMS.reshape(*groups, -1)
    if scores.soft_cap is not None:
        s_BKGTS = scores.soft_cap * jnp.tanh(s_BKGTS / scores.soft_cap)
    # Use the lowest finite number: with -inf, the softmax of a query that sees no key would be NaN.
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


# --- sharded tokens ---------------------------------------------------------------------------------------------------

# The axis ``context`` of a mesh shards the tokens of every row. For attention, one all-to-all each of queries, keys and
# values gives each device all tokens of a part of the heads. Another all-to-all returns the output (Jacobs et al.,
# "DeepSpeed Ulysses", arXiv:2309.14509). So causal masks, windows and segments cost every device the same, and every
# implementation of attention sees whole rows. If there are fewer key heads than devices, key heads are repeated before
# they are sent, so that each device gets the key heads of its queries once. If ``tensor`` shards heads, ``context``
# shards each part further.
#
# Sharding constraints do not suffice: the compiler cannot partition kernel calls, and only `shard_map` determines which
# collectives run.


def _attend_over_context(
    implementation: Implementation | None, q: Array, k: Array, v: Array, mask: AttentionMask, scores: ScoreOptions
) -> Array:
    """Compute attention. If ``context`` shards the tokens, each device computes some heads for all tokens."""
    if num_shards_along(CONTEXT) == 1:
        return _dispatch(implementation, q, k, v, mask, scores)
    segments = mask.segments
    if segments is not None and segments[0] is segments[1]:
        segments = segments[:1]  # one array shows a kernel that queries and keys have the same segments
    arrays = {
        "window": mask.window if isinstance(mask.window, jax.Array) else None,
        "start": mask.first_query if isinstance(mask.first_query, jax.Array) else None,
        "segment_ids": segments,
        "sinks": scores.sinks,
    }

    def run(q: Array, k: Array, v: Array, arrays: Any) -> Array:
        return _attend_exchanged(implementation, q, k, v, arrays, mask, scores)

    return without_explicit_axes(run, lambda _: shardings_of(q), q, k, v, arrays)


def _attend_exchanged(
    implementation: Implementation | None,
    q: Array,
    k: Array,
    v: Array,
    arrays: Any,
    mask: AttentionMask,
    scores: ScoreOptions,
) -> Array:
    mesh, parts, tensor = traced_mesh(), num_shards_along(CONTEXT), num_shards_along("tensor")
    _check_divisible(q.shape, k.shape, parts, tensor)
    k, v = (_repeat_heads(array, tensor) for array in (k, v))
    # Map over all axes, also those of size 1: the compiler cannot partition a kernel along any axis.
    free_axes = set(mesh.axis_names).difference(getattr(mesh, "manual_axes", ()))
    batch = tuple(name for name in BATCH_AXES if name in free_axes)
    if q.shape[0] % math.prod(mesh.shape[name] for name in batch):
        batch = ()  # replicate a batch that does not divide evenly, such as the last of an evaluation
    heads = ("tensor",) if "tensor" in free_axes else ()
    tokens = P(batch, CONTEXT, heads)
    # Sinks are sharded like the heads after the exchange.
    specs = {"window": P(), "start": P(), "segment_ids": P(batch), "sinks": P((*heads, CONTEXT))}

    def attend_local(q: Array, k: Array, v: Array, arrays: Any) -> Array:
        q, k, v = (
            jax.lax.all_to_all(array, CONTEXT, split_axis=2, concat_axis=1, tiled=True)
            for array in (q, _repeat_heads(k, parts), _repeat_heads(v, parts))
        )
        replacements = {name: arrays[name] for name in ("window", "start") if arrays[name] is not None}
        if arrays["segment_ids"] is not None:
            replacements["segment_ids"] = arrays["segment_ids"][0], arrays["segment_ids"][-1]
        local_mask = dataclasses.replace(mask, **replacements)
        out = _dispatch(implementation, q, k, v, local_mask, dataclasses.replace(scores, sinks=arrays["sinks"]))
        return jax.lax.all_to_all(out, CONTEXT, split_axis=1, concat_axis=2, tiled=True)

    mapped = jax.shard_map(
        attend_local,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, specs),
        out_specs=tokens,
        axis_names=free_axes.intersection((*BATCH_AXES, "tensor", CONTEXT)),
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    return mapped(q, k, v, arrays)


def _repeat_heads(x_BSKH: Array, parts: int) -> Array:
    """Repeat heads until `parts` divides their number."""
    count = x_BSKH.shape[2]
    times = math.lcm(count, parts) // count
    return x_BSKH if times == 1 else jnp.repeat(x_BSKH, times, axis=2)


def _check_divisible(queries: tuple[int, ...], keys: tuple[int, ...], parts: int, tensor: int) -> None:
    lengths = {queries[1], keys[1]}
    if any(length % parts for length in lengths):
        tokens = " or ".join(map(str, sorted(lengths)))
        problem = f"attention: {tokens} tokens cannot be sharded along the axis {CONTEXT!r} of {parts} devices"
        raise ConfigError(problem, hint=f"pad rows to a multiple of {parts}; generate text outside of such a mesh")
    heads, num_shards = queries[2], parts * tensor
    if heads % num_shards:
        factor = f" × tensor {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"attention: {heads} query heads cannot be sharded over {num_shards} devices ({CONTEXT} {parts}{factor})",
            hint=f"call make_mesh with a context that divides {heads // math.gcd(heads, tensor)}, and fsdp or data for "
            "the other devices",
        )
