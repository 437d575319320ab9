"""Attention with splash attention, JAX's kernel for TPUs, in place of blocks of XLA's operations.

The kernel visits only the blocks that a mask allows. XLA cannot partition it. In a program for several devices it runs
inside of a `jax.shard_map` if a mesh is known that shards rows and heads. Otherwise blocks replace it when the program
is lowered, because the number of devices is unknown before (`core._compat.on_one_device`). The kernel and blocks have
the same residuals, so either may compute the backward pass.

The kernel writes each log-sum-exp 128 times, and reads arrays with heads before tokens. A loop makes these layouts,
each step for some heads of one row of the batch. Gradients overwrite the arrays that they belong to, as in `_blocks`.
No temporary array grows with the batch.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, H size of a head, W = N H, X = K H, P
steps, C key/value heads of a step, M query heads of a step (G C, or a part of one group of G).

Deviations and limits: the queries are multiplied by their scale beforehand, in their own dtype. In the kernel, a query
that sees no key would see all keys. Different segments of keys and queries can cause this, so blocks then replace the
kernel. Second derivatives are those of blocks.

Source: JAX's `jax.experimental.pallas.ops.tpu.splash_attention`, after Dao, "FlashAttention-2" (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import ConfigError
from ..core._compat import on_one_device, splash_backward, splash_forward
from . import _blocks
from ._blocks import Config, RuntimeMask
from ._dispatch import AttentionCase, AttentionKernel, case_of
from ._mesh import shard_over_mesh
from ._options import AttentionMask, ScoreOptions

LEAST_TOKENS = 1024
"""The fewest tokens of a row: for shorter rows the kernel is not worth the seconds of its compilation."""
_SIZES = (1024, 512, 256, 128)
# The most pairs of blocks whose tables fit into a chip's scalar memory.
_MOST_TABLE = 512 * 512
_HEADS = (64, 128, 256)
# The most bytes of the log-sum-exps of a step, and the bytes of one: the kernel writes it 128 times in float32.
_STEP_BYTES = 2**24
_SUM_BYTES = 4 * 128
# The most blocks of keys for which one kernel computes all gradients.
_MOST_FUSED = 4


class Kernel(NamedTuple):
    """Settings of the kernel that are known when the program is traced."""

    block: int
    """Rows and columns of a block of scores."""
    is_fused: bool
    """Whether one kernel computes all gradients, with a partial gradient of the queries for each block of keys."""
    is_required: bool = False
    """Whether the caller requested the kernel, so that nothing may replace it."""
    interpret: bool = False
    """Whether XLA's operations emulate the kernel."""


def unsupported_reason(case: AttentionCase) -> str:
    """Return why the kernel does not support a case; empty if it does."""
    length, num_keys = case.num_queries, case.num_keys
    reasons = {
        f"a device of kind {case.device}": case.platform != "tpu",
        case.dtype: case.dtype not in ("bfloat16", "float32"),
        f"heads of {case.head_dim}": case.head_dim not in _HEADS,
        f"{length} queries and {num_keys} keys, not both multiples of 128": length % 128 or num_keys % 128,
        f"{length} queries and {num_keys} keys, with too many blocks": not _size_of(length, num_keys, case.window),
        "a window that differs between layers": case.has_traced_window,
        "a window without causal=True": case.has_window and not case.causal,
        "queries that start after the first key": not case.starts_at_first_key,
        "different segments for keys and queries": case.segments == "separate",
        "values that differ along an axis of a jax.shard_map": case.is_varying,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def is_preferred(case: AttentionCase) -> bool:
    """Return whether the rows are long enough for the kernel."""
    return min(case.num_queries, case.num_keys) >= LEAST_TOKENS


def _size_of(length: int, num_keys: int, window: int | None) -> int:
    """Return a block size that divides queries and keys; 0 if no size does, or if it gives too many pairs of blocks."""
    # Large blocks have more masked than visible scores if they are few, or if the window is narrow.
    is_narrow = window is not None and window < _SIZES[0]
    sizes = _SIZES[1:] if is_narrow or min(length, num_keys) < 4 * _SIZES[0] else _SIZES
    size = next((size for size in sizes if not length % size and not num_keys % size), 0)
    return size if size and (length // size) * (num_keys // size) <= _MOST_TABLE else 0


def attend_with_splash(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions, *, is_required: bool = False
) -> Array:
    """Compute attention [B, T, N, H] with the kernel, for arguments without an `unsupported_reason`."""
    num_keys = k_BSKH.shape[1]
    size = _size_of(q_BTNH.shape[1], num_keys, case_of(q_BTNH, k_BSKH, mask, scores).window)
    kernel = Kernel(size, num_keys // size <= _MOST_FUSED, is_required)
    return attend_by(kernel, q_BTNH, k_BSKH, v_BSKH, mask, scores)


def attend_by(kernel: Kernel, q: Array, k: Array, v: Array, mask: AttentionMask, scores: ScoreOptions) -> Array:
    """Compute attention with splash attention; `kernel` has its settings."""
    runtime_mask = RuntimeMask(None, None, *(mask.segments or (None, None)))
    # A window of all keys hides none from a causal query.
    window: Any = None if isinstance(mask.window, int) and mask.window >= k.shape[1] else mask.window
    config = Config(mask.causal, window, 1.0, scores.soft_cap, _blocks.block_size(q.shape, k.shape[1]))
    q = (q.astype(jnp.float32) * scores.scale).astype(q.dtype)
    passes = _blocks.Passes(_forward_on_mesh, _gradients_on_mesh, (kernel, config))
    return _blocks.attend(passes, q, k, v, scores.sinks, runtime_mask)


def _forward_on_mesh(static: tuple[Kernel, Config], *args: Any) -> Any:
    return _shard_over_mesh(static, _forward, _blocks.forward, *args)


def _gradients_on_mesh(static: tuple[Kernel, Config], *args: Any) -> Any:
    return _shard_over_mesh(static, _gradients, _blocks.gradients, *args)


def _shard_over_mesh(
    static: tuple[Kernel, Config], kernel_pass: Callable[..., Any], blocks_pass: Callable[..., Any], *args: Any
) -> Any:
    """Run the kernel's pass if the kernel can run, else the pass of blocks; a known mesh shards rows and heads."""
    kernel, config = static
    kernel_fn, blocks_fn = functools.partial(kernel_pass, static), functools.partial(blocks_pass, config)
    if kernel.interpret:
        return kernel_fn(*args)
    return shard_over_mesh(functools.partial(_kernel_or_blocks, kernel, kernel_fn, blocks_fn), blocks_fn, *args)


def _kernel_or_blocks(kernel: Kernel, kernel_fn: Callable[..., Any], blocks_fn: Callable[..., Any], *args: Any) -> Any:
    needed = "attention: the kernel for TPUs cannot be sharded over the devices of this program"
    try:
        return on_one_device(kernel_fn, blocks_fn, *args, needed=needed if kernel.is_required else "")
    except Exception as error:  # the kernel of another version of JAX may take other arguments
        message = f"{type(error).__name__}: {error}"
        problem = f"attention: Lowtide does not support JAX {jax.__version__}'s kernel for TPUs ({message})"
        if kernel.is_required:
            hint = "leave implementation out to use blocks of XLA's operations, which compute the same"
            raise ConfigError(problem, hint=hint) from error
        _warn_of_another_kernel(problem)
        return blocks_fn(*args)


@functools.cache
def _warn_of_another_kernel(problem: str) -> None:
    warnings.warn(
        f"{problem}; blocks of XLA's operations replace it, which are slower\n"
        'hint: update lowtide, or pass implementation="blocks" to attention',
        stacklevel=2,
    )


class _Steps(NamedTuple):
    """How a pass iterates over rows of the batch and heads."""

    heads: int
    """Query heads of a step."""
    groups: int
    """Key/value heads of a step."""
    row_P: Array
    head_P: Array


def _choose_steps(q_BTNH: Array, k_BSKH: Array, *, whole_groups: bool) -> _Steps:
    """Choose the most query heads per step within `_STEP_BYTES`; without `whole_groups` a step may split a group."""
    batch, length, heads, _ = q_BTNH.shape
    shared = heads // k_BSKH.shape[2]
    limit = max(_STEP_BYTES // (_SUM_BYTES * length), shared if whole_groups else 1)
    fitting = [count for count in range(1, heads + 1) if not heads % count and count <= limit]
    count = max(count for count in fitting if not count % shared or (not shared % count and not whole_groups))
    row_P, head_P = jnp.meshgrid(jnp.arange(batch), jnp.arange(0, heads, count), indexing="ij")
    return _Steps(count, max(1, count // shared), row_P.ravel(), head_P.ravel())


def _take_heads(x_BTW: Array, row: Array, head: Array, count: int, dim: int) -> Array:
    """Cut some heads of one row of the batch, [count, T, H]."""
    x_TW = jax.lax.dynamic_slice(x_BTW, (row, 0, head * dim), (1, x_BTW.shape[1], count * dim))[0]
    return x_TW.reshape(-1, count, dim).swapaxes(0, 1)


def _put_heads(x_BTW: Array, part_MTH: Array, row: Array, head: Array) -> Array:
    """Write heads that `_take_heads` cut, or their gradients, back into an array."""
    part_TW = part_MTH.astype(x_BTW.dtype).swapaxes(0, 1).reshape(1, x_BTW.shape[1], -1)
    return jax.lax.dynamic_update_slice(x_BTW, part_TW, (row, 0, head * part_MTH.shape[2]))


def _options(static: tuple[Kernel, Config]) -> dict[str, Any]:
    kernel, config = static
    options = {"causal": config.causal, "window": config.window, "soft_cap": config.soft_cap}
    return {**options, "block": kernel.block, "interpret": kernel.interpret}


def _row_segments(runtime_mask: RuntimeMask, row: Array) -> tuple[Array, Array] | None:
    if runtime_mask.query_segments is None or runtime_mask.key_segments is None:
        return None
    return runtime_mask.query_segments[row], runtime_mask.key_segments[row]


def _forward(
    static: tuple[Kernel, Config],
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    sinks_N: Array | None,
    runtime_mask: RuntimeMask,
) -> tuple[Array, Array]:
    """Return the output [B, T, N, H], and the log-sum-exp of each query's scores, [B, N, T]."""
    batch, length, heads, dim = q_BTNH.shape
    steps, shared = _choose_steps(q_BTNH, k_BSKH, whole_groups=False), heads // k_BSKH.shape[2]
    q_BTW, k_BSX, v_BSX = (_blocks.merge_heads(array) for array in (q_BTNH, k_BSKH, v_BSKH))
    count = steps.heads

    def body(state: tuple[Array, Array], step: tuple[Array, Array]) -> Any:
        (out_BTW, lse_BNT), (row, head) = state, step
        group = head // shared
        q_MTH = _take_heads(q_BTW, row, head, count, dim)
        k_CSH, v_CSH = (_take_heads(array, row, group, steps.groups, dim) for array in (k_BSX, v_BSX))
        sinks_M = None if sinks_N is None else jax.lax.dynamic_slice_in_dim(sinks_N, head, count)
        out_MTH, lse_MT = splash_forward(
            q_MTH, k_CSH, v_CSH, _row_segments(runtime_mask, row), sinks_M, **_options(static)
        )
        lse_BNT = jax.lax.dynamic_update_slice(lse_BNT, lse_MT[None], (row, head, 0))
        return (_put_heads(out_BTW, out_MTH, row, head), lse_BNT), None

    empty = jnp.zeros(q_BTW.shape, q_BTW.dtype), jnp.zeros((batch, heads, length), jnp.float32)
    (out_BTW, lse_BNT), _ = jax.lax.scan(body, empty, (steps.row_P, steps.head_P))
    return out_BTW.reshape(q_BTNH.shape), lse_BNT


def _gradients(static: tuple[Kernel, Config], residuals: Any, dout_BTNH: Array) -> Any:
    """Return the gradients of queries, keys, values and sinks."""
    q_BTNH, k_BSKH, v_BSKH, sinks_N, runtime_mask, out_BTNH, lse_BNT = residuals
    heads, dim = q_BTNH.shape[2:]
    steps, shared = _choose_steps(q_BTNH, k_BSKH, whole_groups=True), heads // k_BSKH.shape[2]
    dout_BTW, delta_BNT = _blocks.merge_heads(dout_BTNH), _blocks.row_dots(dout_BTNH, out_BTNH, static[0].block)

    def body(state: Any, step: tuple[Array, Array]) -> Any:
        # A step reads queries, keys and values before it overwrites them with their gradients.
        (dq_BTW, dk_BSX, dv_BSX), (row, head) = state, step
        group = head // shared
        q_MTH, dout_MTH = (_take_heads(array, row, head, steps.heads, dim) for array in (dq_BTW, dout_BTW))
        k_CSH, v_CSH = (_take_heads(array, row, group, steps.groups, dim) for array in (dk_BSX, dv_BSX))
        lse_MT, delta_MT = (
            jax.lax.dynamic_slice(array, (row, head, 0), (1, steps.heads, array.shape[2]))[0]
            for array in (lse_BNT, delta_BNT)
        )
        arrays, ids = (q_MTH, dout_MTH, lse_MT, delta_MT), _row_segments(runtime_mask, row)
        dq, dk, dv = splash_backward(arrays, (k_CSH, v_CSH), ids, **_options(static), is_fused=static[0].is_fused)
        dk_BSX, dv_BSX = _put_heads(dk_BSX, dk, row, group), _put_heads(dv_BSX, dv, row, group)
        return (_put_heads(dq_BTW, dq, row, head), dk_BSX, dv_BSX), None

    init = tuple(_blocks.merge_heads(array) for array in (q_BTNH, k_BSKH, v_BSKH))
    (dq_BTW, dk_BSX, dv_BSX), _ = jax.lax.scan(body, init, (steps.row_P, steps.head_P))
    dq, dk, dv = dq_BTW.reshape(q_BTNH.shape), dk_BSX.reshape(k_BSKH.shape), dv_BSX.reshape(v_BSKH.shape)
    return dq, dk, dv, _blocks.sink_gradient(sinks_N, lse_BNT, delta_BNT)


KERNEL = AttentionKernel(
    "the kernel for TPUs",
    "bfloat16 or float32 on a TPU, heads of 64, 128 or 256, a multiple of 128 tokens, and one array of segments for "
    "queries and keys",
    "tpu",
    unsupported_reason,
    is_preferred,
    lambda _: "",
    attend_with_splash,
)
