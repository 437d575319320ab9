"""Attention with cuDNN's fused kernel for GPUs, through `jax.nn.dot_product_attention`.

Known limits: cuDNN needs a mask array for segments and for windows that differ between layers. The mask becomes a bias
[B, 1, T, T]. cuDNN's residuals have no `checkpoint_name`, so a policy of `jax.checkpoint` cannot select them by name.

Shapes: B batch, T queries, S keys, N query heads, K key/value heads, H size of a head.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..core import traced_device
from ..core._compat import has_cudnn
from ._options import AttentionKernel, AttentionMask, ScoreOptions, dot_product_options

_HALF_DTYPES = (jnp.bfloat16, jnp.float16)
# With a mask array [T, T], cuDNN computes all scores: at 32,768 tokens its step was slower than blocks.
_LEAST_MASK_IN_BLOCKS = 16384


def unsupported_reason(q: Array, k: Array, mask: AttentionMask, scores: ScoreOptions) -> str:
    """Return why the kernel does not support the arguments or the traced program's device; empty if it does."""
    device, dim = traced_device(), q.shape[-1]
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    if not scores.is_plain:
        return "a soft cap" if scores.soft_cap is not None else "sinks"
    if device.platform != "gpu" or capability is None or int(capability[1]) < 8:
        return f"a device of kind {getattr(device, 'device_kind', device.platform)}"
    if q.dtype not in _HALF_DTYPES:
        return f"{q.dtype}"
    if dim > 128 or dim % 8:
        return f"heads of {dim}"
    # A program for an absent GPU may be compiled without cuDNN. Blocks of XLA's operations then replace the kernel, and
    # a report counts their bytes.
    return "" if has_cudnn() else "no cuDNN in this process"


def is_preferred(q: Array, k: Array, mask: AttentionMask) -> bool:
    """Return whether the kernel is faster than blocks for arguments that it supports."""
    return mask.is_static or q.shape[1] < _LEAST_MASK_IN_BLOCKS


def attend_with_cudnn(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask: AttentionMask, scores: ScoreOptions, *, is_required: bool = False
) -> Array:
    """Compute attention [B, T, N, H] with cuDNN's kernel; `is_required` has no effect."""
    options = dot_product_options(mask, q_BTNH.shape[1], k_BSKH.shape[1])
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, scale=scores.scale, implementation="cudnn", **options)


KERNEL = AttentionKernel(
    "cuDNN's kernel",
    "half precision on an NVIDIA GPU, heads of 8, 16, ... 128, no soft cap and no sinks",
    unsupported_reason,
    is_preferred,
    attend_with_cudnn,
)
