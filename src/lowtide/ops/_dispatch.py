"""Cases of attention, by which an implementation is selected, and the protocol of a kernel.

Each kernel has a function that returns the reason why it does not support an `AttentionCase`. A case has no arrays, so
tests and reports may build cases for any device, cuDNN and JAX version.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array

from ..core import traced_device, varying_axes
from ..core._compat import cudnn_version
from ._implementations import IMPLEMENTATIONS, Implementation
from ._options import AttentionMask, ScoreOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Device, versions, shapes, mask and options of one call of `attention`."""

    platform: str = "gpu"
    device_kind: str = ""
    capability: tuple[int, int] | None = None
    """Compute capability of an NVIDIA GPU; None for any other device."""
    cudnn_version: int = 0
    """Such as 91300 for cuDNN 9.13; 0 without cuDNN."""
    jax_version: tuple[int, ...] = jax.__version_info__
    dtype: str = "bfloat16"
    head_dim: int = 128
    num_queries: int = 4096
    num_keys: int = 4096
    is_grouped: bool = False
    """Whether several query heads share a key/value head."""
    causal: bool = True
    window: int | None = None
    """Window that is known when the program is traced; None without a window, or if it is traced."""
    has_traced_window: bool = False
    windows: tuple[int, ...] | None = None
    """Values that a traced window can have, if they are known."""
    starts_at_first_key: bool = True
    segments: Literal["none", "shared", "separate"] = "none"
    """Whether there are segments, and whether queries and keys share one array of them."""
    has_soft_cap: bool = False
    has_sinks: bool = False
    is_varying: bool = False
    """Whether an array varies along an axis of a `jax.shard_map`."""

    @property
    def device(self) -> str:
        """Name of the device for messages."""
        return self.device_kind or self.platform

    @property
    def has_window(self) -> bool:
        """Whether there is a window, known or traced."""
        return self.window is not None or self.has_traced_window


def case_of(q: Array, k: Array, mask: AttentionMask, scores: ScoreOptions) -> AttentionCase:
    """Return the case of a call for the device that the program is traced for."""
    device = traced_device()
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    query_segments, key_segments = mask.segments or (None, None)
    window: Any = mask.window
    is_traced = isinstance(window, jax.Array)
    arrays = [leaf for leaf in jax.tree.leaves((q, k, mask.segments, scores.sinks)) if isinstance(leaf, jax.Array)]
    shared: Any = "shared" if query_segments is key_segments else "separate"
    return AttentionCase(
        platform=device.platform,
        device_kind=getattr(device, "device_kind", device.platform),
        capability=None if capability is None else (int(capability[1]), int(capability[2])),
        cudnn_version=cudnn_version(),
        dtype=str(q.dtype),
        head_dim=q.shape[-1],
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        is_grouped=q.shape[2] != k.shape[2],
        causal=bool(mask.causal),
        window=None if is_traced else window,
        has_traced_window=is_traced,
        windows=mask.windows if is_traced else None,
        starts_at_first_key=mask.first_query_is_first_key,
        segments="none" if query_segments is None else shared,
        has_soft_cap=scores.soft_cap is not None,
        has_sinks=scores.sinks is not None,
        is_varying=any(varying_axes(jax.typeof(array)) for array in arrays),
    )


class AttentionKernel(NamedTuple):
    """A kernel for one kind of device; `description` and `requirements` are texts for error messages."""

    description: str
    requirements: str
    platform: str
    unsupported_reason: Callable[[AttentionCase], str]
    """Returns why the kernel does not support a case; empty if it does."""
    is_preferred: Callable[[AttentionCase], bool]
    """Returns whether automatic selection takes the kernel, if it supports the case."""
    describe: Callable[[AttentionCase], str]
    """Returns how the kernel applies the mask of a case that it supports; empty if there is one way only."""
    attend: Callable[..., Array]
    """Computes attention from queries, keys, values, mask, options and `is_required` (the user chose the kernel)."""


class AttentionChoice(NamedTuple):
    """The implementation that `attention` selects, and why."""

    implementation: Implementation
    reason: str
    """How the kernel applies the mask, or why no kernel is used.

    Empty if the kernel has options for the mask, and for a platform without kernels.
    """

    def __str__(self) -> str:
        """Describe the implementation, with the reason in brackets."""
        return IMPLEMENTATIONS[self.implementation] + (f" ({self.reason})" if self.reason else "")
