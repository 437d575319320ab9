"""Time model of a plan: operations, memory traffic, and host copies that no computation hides.

    seconds = FLOPs / F + bytes / B + exposed copies      (no overlap)
    seconds = max(FLOPs / F, bytes / B) + exposed copies  (full overlap)

F and B are measured where the target is this machine, and figures of the target's catalogue otherwise. A copy to the
host runs during the forward pass, a copy from the host during the pass that reads it. The part of a copy that takes
longer than the pass is exposed. On GPUs all of it counts as exposed: with JAX 0.11.2 on an H100, a profile showed no
copy under a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..targets import Target

_DEFAULT_FLOPS, _DEFAULT_BANDWIDTH = 1e11, 2e10
"""Operations and bytes per second for a target without figures, such as a CPU: about those of a few cores."""
_PRODUCT_SIZE, _COPIED_BYTES, _NUM_REPEATS = 1024, 2**26, 3


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speeds of one device."""

    flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second between the device and its memory."""
    link: float
    """Bytes per second between device and host, each way; 0 if unknown."""
    hides_copies: bool
    """Whether computation hides copies to and from the host."""

    def seconds(self, flops: float, traffic: float, exposed: float) -> tuple[float, float]:
        """Return the time with full overlap of operations and memory traffic, and the time without overlap."""
        compute, transfer = flops / self.flops, traffic / self.bandwidth
        return max(compute, transfer) + exposed, compute + transfer + exposed

    def hidden_bytes(self, flops: float) -> float:
        """Return the bytes that the link can copy, each way, during a pass of `flops` operations; 0 without overlap."""
        return self.link * flops / self.flops if self.hides_copies else 0.0

    def exposed_seconds(self, copied_bytes: float, flops: float) -> float:
        """Return the seconds of a copy that a pass of `flops` operations does not hide."""
        return max(copied_bytes - self.hidden_bytes(flops), 0.0) / self.link if self.link else 0.0


def rates(target: Target) -> Rates:
    """Return the speeds of a target: measured for this machine, else those of its catalogue."""
    # Compile-only GPUs have no host memory.
    has_host = not (target.platform == "gpu" and target.is_ahead_of_time)
    link = float(target.host_link_bandwidth or 0) if has_host else 0.0
    if target.name == "here":
        return Rates(*_measured(), link, target.platform != "gpu")
    flops, bandwidth = target.flops or _DEFAULT_FLOPS, target.hbm_bandwidth or _DEFAULT_BANDWIDTH
    return Rates(flops, bandwidth, link, target.platform != "gpu")


@functools.cache
def _measured() -> tuple[float, float]:
    """Time a product of matrices and a copy on the default device; return operations and bytes per second.

    The best of three repeats counts. Rounding to two digits keeps plans equal between runs.
    """
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    size = _PRODUCT_SIZE if jax.default_backend() == "cpu" else 8 * _PRODUCT_SIZE
    matrix = jnp.ones((size, size), dtype)
    vector = jnp.ones(_COPIED_BYTES // 4, jnp.float32)
    product = _best_seconds(jax.jit(lambda x: x @ x), matrix)
    copy = _best_seconds(jax.jit(lambda x: x + 1), vector)
    return float(f"{2 * size**3 / product:.1e}"), float(f"{2 * _COPIED_BYTES / copy:.1e}")


def _best_seconds(fn: Callable[[Any], Any], argument: Any) -> float:
    jax.block_until_ready(fn(argument))
    times: list[float] = []
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(fn(argument))
        times.append(time.perf_counter() - start)
    return min(times)
