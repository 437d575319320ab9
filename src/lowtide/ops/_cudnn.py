"""Attention with cuDNN's fused kernel for GPUs.

The kernel applies a mask in one of three ways (`METHODS`):

- Options: causality and a window. A traced window whose values are known runs one of several kernels.
- Documents: starts and lengths of the documents of packed rows. They are computed from the segments in the program.
- A mask array [B or 1, 1, T, S], from which the kernel reads all scores' masks.

Some masks are known only when the program runs. If a row has more documents than the kernel was compiled for, or if a
document is not contiguous, or if a window is not among the known values, the program computes blocks instead.

The forward pass gives the log-sum-exp of each query's scores. Sinks are exact with it: a sink only adds its exponential
to each sum, so the output is scaled by the share of the other keys. The backward pass of the kernel takes the scaled
output and the log-sum-exp that includes the sink. It then computes p = exp(s - lse) and ds = p (dp - delta), with delta
the dot product of output and cotangent, as with an additional key whose value is 0.

Paths that JAX's public function does not have are compared with blocks once per process, on the GPU, before their first
use. If values or gradients differ, blocks replace the kernel, with a warning.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, H size of a head, M documents of a row.

Sources: Dao, "FlashAttention-2" (arXiv:2307.08691), for the backward pass; jax pull request 39521, for the versions
whose documents are right with grouped heads.
"""

from __future__ import annotations

import concurrent.futures
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..core import ConfigError, local_gpu, uniformly_varying
from ..core._compat import CudnnOptions, cudnn_attention, cudnn_gradients, on_one_device
from . import _blocks
from ._blocks import Config, Passes, RuntimeMask
from ._dispatch import AttentionCase, AttentionKernel, case_of
from ._mesh import fold_rows, shard_over_mesh
from ._options import AttentionMask, ScoreOptions, dot_product_options

Method = Literal["options", "documents", "mask array"]
"""How the kernel applies a mask."""

# With a mask array [T, T], cuDNN computes all scores: at 32,768 tokens its step was slower than blocks.
_LEAST_MASK_IN_BLOCKS = 16384
_LEAST_QUERIES = 64
_MOST_DOCUMENTS = 128
_MOST_OFFSET = 2**31
"""JAX computes offsets of documents, in elements of queries or keys, as int32."""


class Kernel(NamedTuple):
    """Settings of the kernel that are known when the program is traced."""

    method: Method
    options: tuple[CudnnOptions, ...]
    """One entry, or one for each value of `windows`."""
    windows: tuple[int, ...] | None
    """Values of the traced window; None if the window is not traced."""
    num_documents: int
    """The most documents of a row, M; 0 without documents."""
    blocks: Config
    """Settings of the blocks that may replace the kernel."""
    is_required: bool = False
    """Whether the caller requested the kernel, so that nothing may replace it in a program for several devices."""

    @property
    def is_plain(self) -> bool:
        """Whether JAX's public function computes the same, except for sinks."""
        return self.method == "options" and self.windows is None and self.blocks.soft_cap is None


class _Documents(NamedTuple):
    """Documents of packed rows. An absent document starts at T and has the length 0."""

    starts_BM: Array
    lengths_BM: Array
    number_BT: Array
    """Document of each token."""
    is_supported: Array
    """Whether every row has at most M documents, and all tokens of a document are adjacent."""


# --- which cases the kernel supports ----------------------------------------------------------------------------------


def method_of(case: AttentionCase) -> tuple[Method | None, str]:
    """Return how the kernel applies the mask of a case, or None and the reason why it does not support the case."""
    capability = case.capability or (0, 0)
    is_hopper = capability >= (9, 0)
    is_old = case.capability is not None and capability < (8, 0)
    reasons = {
        f"compute capability {'.'.join(map(str, capability))}, below 8.0": is_old,
        f"a device of kind {case.device}": case.platform != "gpu" or case.capability is None,
        case.dtype: case.dtype not in ("bfloat16", "float16"),
        f"heads of {case.head_dim}": case.head_dim % 8 != 0 or case.head_dim > (256 if is_hopper else 128),
        # A program for an absent GPU may be compiled without cuDNN. Blocks of XLA's operations then replace the kernel,
        # and a report counts their bytes.
        "no cuDNN in this process": not case.cudnn_version,
        "compute capability 10.3 with cuDNN before 9.11": capability == (10, 3) and case.cudnn_version < 91100,
        "a soft cap before JAX 0.12": case.has_soft_cap and case.jax_version < (0, 12),
        "a soft cap before cuDNN 9.13": case.has_soft_cap and case.cudnn_version < 91300,
        "a soft cap before compute capability 9.0": case.has_soft_cap and not is_hopper,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return None, reason
    has_options = case.starts_at_first_key and (case.causal or not case.has_window)
    has_options = has_options and (not case.has_traced_window or case.windows is not None)
    if has_options and case.segments == "none":
        return "options", ""
    # Up to JAX 0.11.0, documents are wrong with grouped heads: offsets of keys have the stride of queries.
    has_documents = (
        is_hopper
        and not case.is_varying
        and (case.jax_version >= (0, 11, 1) or not case.is_grouped)
        and not case.has_soft_cap
    )
    if has_options and has_documents and case.segments == "shared" and case.num_queries == case.num_keys:
        return "documents", ""
    if case.has_soft_cap:
        return None, "a soft cap with a mask array"
    is_odd = case.num_queries % 2 or case.num_keys % 2
    if is_odd and (case.has_sinks or case.starts_at_first_key):
        return None, "a mask array of an odd size"  # cuDNN has no gradients for it
    return "mask array", ""


def unsupported_reason(case: AttentionCase) -> str:
    """Return why the kernel does not support a case; empty if it does."""
    return method_of(case)[1]


def is_preferred(case: AttentionCase) -> bool:
    """Return whether the kernel is faster than other implementations for a case that it supports."""
    if case.num_queries < _LEAST_QUERIES:  # the scores are small; cuDNN was measured without the new features
        return not (case.has_sinks or case.has_soft_cap or case.head_dim > 128)
    return method_of(case)[0] != "mask array" or case.num_queries < _LEAST_MASK_IN_BLOCKS


def describe(case: AttentionCase) -> str:
    """Return how the kernel applies the mask of a case that it supports."""
    method = method_of(case)[0]
    if method == "documents":
        return f"with the offsets of up to {_num_documents(case.num_queries)} documents a row"
    return "with a mask array" if method == "mask array" else ""


def _num_documents(length: int) -> int:
    """Return M: the kernel's log-sum-exps [B M, N, T] should not be much larger than the queries."""
    return min(max(length // 256, 8), _MOST_DOCUMENTS)


# --- forward and backward pass ----------------------------------------------------------------------------------------


def attend_with_cudnn(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions, *, is_required: bool = False
) -> Array:
    """Compute attention [B, T, N, H] with the kernel, for arguments without an `unsupported_reason`."""
    case = case_of(q_BTNH, k_BSKH, mask, scores)
    if method_of(case)[0] == "mask array" and not (case.starts_at_first_key or case.has_sinks):
        # A decoder with a cache: without gradients, cuDNN also takes mask arrays of odd sizes.
        options = dot_product_options(mask, case.num_queries, case.num_keys)
        arrays = q_BTNH, k_BSKH, v_BSKH
        return jax.nn.dot_product_attention(*arrays, scale=scores.scale, implementation="cudnn", **options)
    kernel, runtime_mask = kernel_of(case, mask, scores, _blocks.block_size(q_BTNH.shape, k_BSKH.shape[1]))
    kernel = kernel._replace(is_required=is_required)
    device = None if kernel.is_plain and not case.has_sinks and case.head_dim <= 128 else local_gpu()
    if device is not None:
        facts = kernel._replace(is_required=False), case.head_dim, case.dtype, case.is_grouped, case.has_sinks
        problem = _compare_with_blocks(device, *facts)
        if problem and is_required:
            hint = "leave implementation out to use blocks of XLA's operations"
            raise ConfigError(f"attention: cuDNN's kernel is wrong on this GPU: {problem}", hint=hint)
        if problem:
            return _blocks.attend_in_blocks(q_BTNH, k_BSKH, v_BSKH, mask, scores)
    arrays = uniformly_varying((q_BTNH, k_BSKH, v_BSKH, scores.sinks, runtime_mask))
    return _blocks.attend(Passes(forward, gradients, kernel), *arrays)


def kernel_of(
    case: AttentionCase, mask: AttentionMask, scores: ScoreOptions, block_size: int
) -> tuple[Kernel, RuntimeMask]:
    """Return the settings of the kernel for a case, and the arrays of its mask."""
    method, start = method_of(case)[0], mask.first_query
    assert method is not None
    known_windows = case.windows if method != "mask array" else None
    windows: Any = (case.window,) if known_windows is None else known_windows
    options = tuple(
        # A window of all keys hides none from a causal query.
        CudnnOptions(
            scores.scale, case.causal, None if window is None or window >= case.num_keys else window, scores.soft_cap
        )
        for window in windows
    )
    runtime_mask = RuntimeMask(
        mask.window if isinstance(mask.window, jax.Array) else None,
        jnp.asarray(start) if isinstance(start, jax.Array) or start else None,
        *(mask.segments or (None, None)),
    )
    num_documents = _num_documents(case.num_queries) if method == "documents" else 0
    blocks = Config(case.causal, case.window, scores.scale, scores.soft_cap, block_size)
    return Kernel(method, options, known_windows, num_documents, blocks), runtime_mask


def forward(kernel: Kernel, *args: Any) -> tuple[Array, Array]:
    """Return the output [B, T, N, H], and the log-sum-exp of each query's scores, [B, N, T]."""
    return _run(kernel, _forward, _blocks.forward, args)


def gradients(kernel: Kernel, residuals: Any, dout_BTNH: Array) -> Any:
    """Return the gradients of queries, keys, values and sinks."""
    _, _, _, sinks_N, _, out_BTNH, lse_BNT = residuals
    grads = _run(kernel, _gradients, lambda *args: tuple(_blocks.gradients(*args)[:3]), (residuals, dout_BTNH))
    if sinks_N is None:
        return *grads, None
    delta_BNT = jnp.einsum("btnh,btnh->bnt", dout_BTNH, out_BTNH, preferred_element_type=jnp.float32)
    return *grads, _blocks.sink_gradient(sinks_N, lse_BNT, delta_BNT)


def _run(kernel: Kernel, kernel_pass: Callable[..., Any], blocks_pass: Callable[..., Any], args: Any) -> Any:
    kernel_fn, blocks_fn = functools.partial(kernel_pass, kernel), functools.partial(blocks_pass, kernel.blocks)
    if not kernel.is_plain:
        kernel_fn = fold_rows(kernel_fn)
    # JAX's rules shard the kernel with options or a mask array, but not the documents.
    if kernel.method == "documents":
        needed = "attention: cuDNN's kernel with documents cannot be sharded over the devices of this program"
        options = {"platform": "cuda", "needed": needed if kernel.is_required else ""}
        kernel_fn = functools.partial(on_one_device, kernel_fn, blocks_fn, **options)
    return shard_over_mesh(kernel_fn, blocks_fn, *args)


def _forward(
    kernel: Kernel, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sinks_N: Array | None, runtime_mask: RuntimeMask
) -> tuple[Array, Array]:
    documents = _documents_of(kernel, runtime_mask)

    def attend(options: CudnnOptions, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, sinks_N: Array | None) -> Any:
        if documents is None:
            mask = _mask_array(kernel, runtime_mask, q_BTNH, k_BSKH)
            out_BTNH, lse_BNT = cudnn_attention(options, q_BTNH, k_BSKH, v_BSKH, mask)
        else:
            spans = documents.starts_BM, documents.lengths_BM
            out_BTNH, stats = cudnn_attention(options, q_BTNH, k_BSKH, v_BSKH, documents=spans)
            lse_BNT = _from_documents(stats, documents)
        return add_sinks(out_BTNH, lse_BNT, sinks_N)

    def attend_in_blocks(q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
        return _blocks.forward(kernel.blocks, q, k, v, sinks, runtime_mask)

    branches = [functools.partial(attend, options) for options in kernel.options]
    return _select(kernel, runtime_mask, documents, branches, attend_in_blocks, q_BTNH, k_BSKH, v_BSKH, sinks_N)


def _gradients(kernel: Kernel, residuals: Any, dout_BTNH: Array) -> Any:
    """Return the gradients of queries, keys and values."""
    *_, runtime_mask, _, _ = residuals
    documents = _documents_of(kernel, runtime_mask)

    def differentiate(options: CudnnOptions, residuals: Any, dout_BTNH: Array) -> Any:
        q_BTNH, k_BSKH, v_BSKH, _, _, out_BTNH, lse_BNT = residuals
        arrays = q_BTNH, k_BSKH, v_BSKH
        if documents is None:
            mask = _mask_array(kernel, runtime_mask, q_BTNH, k_BSKH)
            return cudnn_gradients(options, arrays, (out_BTNH, lse_BNT), dout_BTNH, mask)
        spans, stats = (documents.starts_BM, documents.lengths_BM), _to_documents(lse_BNT, documents)
        return cudnn_gradients(options, arrays, (out_BTNH, stats), dout_BTNH, documents=spans)

    def differentiate_blocks(residuals: Any, dout_BTNH: Array) -> Any:
        return tuple(_blocks.gradients(kernel.blocks, residuals, dout_BTNH)[:3])

    branches = [functools.partial(differentiate, options) for options in kernel.options]
    return _select(kernel, runtime_mask, documents, branches, differentiate_blocks, residuals, dout_BTNH)


def _select(
    kernel: Kernel,
    runtime_mask: RuntimeMask,
    documents: _Documents | None,
    branches: list[Callable[..., Any]],
    blocks: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run the kernel with the option that the running program needs, or blocks if the kernel was compiled for none."""
    if kernel.windows is None and documents is None:
        return branches[0](*args)
    if documents is not None and max(leaf.size for leaf in jax.tree.leaves(args)) >= _MOST_OFFSET:
        return blocks(*args)
    index, is_supported = jnp.int32(0), jnp.bool_(True)
    if kernel.windows is not None:
        is_window = jnp.asarray(kernel.windows, jnp.int32) == runtime_mask.window
        index, is_supported = jnp.argmax(is_window).astype(jnp.int32), jnp.any(is_window)
    if documents is not None:
        is_supported &= documents.is_supported
    return jax.lax.switch(jnp.where(is_supported, index, len(branches)), [*branches, blocks], *args)


def add_sinks(out_BTNH: Array, lse_BNT: Array, sinks_N: Array | None) -> tuple[Array, Array]:
    """Return output and log-sum-exps with sinks, given those without."""
    if sinks_N is None:
        return out_BTNH, lse_BNT
    total_BNT = jnp.logaddexp(lse_BNT, sinks_N.astype(lse_BNT.dtype)[None, :, None])
    shares_BTN = jnp.exp(lse_BNT - total_BNT).swapaxes(1, 2)
    return (out_BTNH * shares_BTN[..., None]).astype(out_BTNH.dtype), total_BNT


def _mask_array(kernel: Kernel, runtime_mask: RuntimeMask, q_BTNH: Array, k_BSKH: Array) -> Array | None:
    """Return which keys each query sees, booleans [B or 1, 1, T, S]; None if options or documents suffice."""
    if kernel.method != "mask array":
        return None
    segments: Any = runtime_mask.query_segments, runtime_mask.key_segments
    mask = AttentionMask(
        causal=kernel.blocks.causal,
        segment_ids=None if segments[0] is None else segments,
        window=kernel.blocks.window if runtime_mask.window is None else runtime_mask.window,
        start=runtime_mask.start,
    )
    return mask.to_array(q_BTNH.shape[1], k_BSKH.shape[1])


# --- documents of packed rows -----------------------------------------------------------------------------------------


def _documents_of(kernel: Kernel, runtime_mask: RuntimeMask) -> _Documents | None:
    segments_BT = runtime_mask.query_segments
    return (
        find_documents(segments_BT, kernel.num_documents) if kernel.num_documents and segments_BT is not None else None
    )


def find_documents(segments_BT: Array, num_documents: int) -> _Documents:
    """Return starts, lengths and numbers of the documents, which are runs of equal segment numbers."""
    length = segments_BT.shape[1]
    is_first_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    number_BT = jnp.cumsum(is_first_BT, axis=1, dtype=jnp.int32)
    # A document starts after all tokens of earlier documents.
    document_M = jnp.arange(num_documents + 1, dtype=jnp.int32)
    bounds_BM = jnp.sum(number_BT[:, None] < document_M[None, :, None], axis=2, dtype=jnp.int32)
    starts_BM, lengths_BM = bounds_BM[:, :-1], jnp.diff(bounds_BM, axis=1)
    ids_BM = jnp.take_along_axis(segments_BT, jnp.minimum(starts_BM, length - 1), axis=1)
    exists_BM = lengths_BM > 0
    is_same = (ids_BM[:, :, None] == ids_BM[:, None]) & exists_BM[:, :, None] & exists_BM[:, None]
    is_repeated = jnp.any(is_same & ~jnp.eye(num_documents, dtype=bool)[None])
    return _Documents(starts_BM, lengths_BM, number_BT, (jnp.max(number_BT) < num_documents) & ~is_repeated)


def _from_documents(stats: Array, documents: _Documents) -> Array:
    """Return log-sum-exps [B, N, T], given those of documents, [B M, N, T]."""
    batch, length = documents.number_BT.shape
    stats_BMNT = stats.reshape(batch, -1, *stats.shape[1:])
    position_BT = jnp.arange(length)[None] - jnp.take_along_axis(documents.starts_BM, documents.number_BT, axis=1)
    lse_BTN = stats_BMNT[jnp.arange(batch)[:, None], documents.number_BT, :, position_BT]
    return lse_BTN.swapaxes(1, 2)


def _to_documents(lse_BNT: Array, documents: _Documents) -> Array:
    """Return log-sum-exps of documents, [B M, N, T], given those of rows; what follows a document is not read."""
    length = lse_BNT.shape[2]
    positions_BMT = jnp.minimum(documents.starts_BM[..., None] + jnp.arange(length)[None, None], length - 1)
    stats_BMNT = jnp.take_along_axis(lse_BNT[:, None], positions_BMT[:, :, None], axis=3)
    return stats_BMNT.reshape(-1, *lse_BNT.shape[1:])


# --- comparison with blocks -------------------------------------------------------------------------------------------


_TOLERANCE = 0.03
"""The largest difference, relative to the largest number. Half precision gives 0.01; a wrong offset gives about 1."""


@functools.cache
def _compare_with_blocks(
    device: Any, kernel: Kernel, head_dim: int, dtype: str, is_grouped: bool, has_sinks: bool
) -> str:
    """Compute a small case with the kernel and with blocks, and return how they differ; warn if they do."""
    # A thread has no surrounding trace, mesh or default device.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        problem = pool.submit(small_case_problem, device, kernel, head_dim, dtype, is_grouped, has_sinks).result()
    if problem:
        warnings.warn(
            f"attention: blocks of XLA's operations replace cuDNN's kernel ({kernel.method}), because it is wrong on "
            f"{device.device_kind}: {problem}\nhint: report the versions of JAX and cuDNN to Lowtide",
            stacklevel=2,
        )
    return problem


def small_case_problem(
    device: Any, kernel: Kernel, head_dim: int, dtype: str, is_grouped: bool, has_sinks: bool
) -> str:
    """Return how values and gradients of kernel and blocks differ for two rows of 192 tokens; empty if they agree."""
    scale, segments = head_dim**-0.5, np.repeat([[1, 2, 3], [5, 7, 0]], [50, 70, 72], axis=1).astype(np.int32)
    options = tuple(item._replace(scale=scale, window=item.window and min(item.window, 40)) for item in kernel.options)
    blocks = kernel.blocks._replace(window=kernel.blocks.window and options[0].window, scale=scale, size=64)
    small = kernel._replace(options=options, num_documents=min(kernel.num_documents, 8), blocks=blocks)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 192, heads, head_dim)) for heads in (2 * (1 + is_grouped), 2, 2)]
    q, k, v = (jnp.asarray(array, dtype, device=device) for array in arrays)
    weights = jnp.asarray(rng.standard_normal(q.shape), jnp.float32, device=device)
    sinks = jnp.asarray(rng.standard_normal(q.shape[2]), jnp.float32, device=device) if has_sinks else None
    ids = None if kernel.method == "options" else jnp.asarray(segments, device=device)
    for item, window in zip(options, kernel.windows or (None,), strict=True):
        traced = None if window is None else jnp.asarray(window, jnp.int32, device=device)
        try:
            results = _small_case(
                Passes(forward, gradients, small), q, k, v, sinks, RuntimeMask(traced, None, ids, ids), weights
            )
        except Exception as error:  # XLA raises errors of several types if cuDNN has no kernel for a case
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        config = blocks if window is None else blocks._replace(window=item.window)
        passes, runtime_mask = Passes(_blocks.forward, _blocks.gradients, config), RuntimeMask(None, None, ids, ids)
        expected = _small_case(passes, q, k, v, sinks, runtime_mask, weights)
        for pair in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            actual, reference = (np.asarray(leaf, np.float32) for leaf in pair)
            difference = float(np.max(np.abs(actual - reference)) / np.max(np.abs(reference)))
            if not difference <= _TOLERANCE:
                return f"values or gradients differ by {difference:.1%} from those of blocks"
    return ""


@functools.partial(jax.jit, static_argnums=0)
def _small_case(passes: Passes, q: Any, k: Any, v: Any, sinks: Any, runtime_mask: Any, weights: Any) -> Any:
    def loss(q: Any, k: Any, v: Any, sinks: Any) -> tuple[Array, Any]:
        out: Any = _blocks.attend(passes, q, k, v, sinks, runtime_mask)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    return jax.value_and_grad(loss, (0, 1, 2) if sinks is None else (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)


KERNEL = AttentionKernel(
    "cuDNN's kernel",
    "half precision on an NVIDIA GPU; heads of a multiple of 8, up to 256 from compute capability 9.0, else up to 128; "
    "a soft cap only with JAX 0.12",
    "gpu",
    unsupported_reason,
    is_preferred,
    describe,
    attend_with_cudnn,
)
