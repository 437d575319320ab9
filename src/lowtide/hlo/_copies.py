"""Compile options for GPU programs that copy between host and device.

XLA's schedule for an H100 has kernels between the start and the end of a copy (`benchmarks/host_copies.py`). In a
profile of an H100, however, no copy ran during a kernel. Command buffers, which launch the kernels of a loop as one
unit, are the likely cause. No GPU has confirmed that yet. By default, XLA also counts host buffers as device memory
when it decides what to recompute.

No option changes what is computed. XLA could also pipeline copies over iterations, but a model diverged with that
option (openxla/xla issue 37979). `lowtide.core.hidden_in_groups` and `lowtide.offload.scan` reload one iteration ahead
instead.
"""

from __future__ import annotations

import os
from typing import Any

from ..targets import Target, resolve_target

_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "",  # for no kind of operation
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_host_memory_offloading": True,
}


def copy_options(target: Target | str | None = None) -> dict[str, Any]:
    """Return compile options for a program that copies between host and device; empty unless the target is a GPU.

    `lowtide.Trainer`, plans and memory reports use them for programs that use host memory. For a step that you compile
    yourself, pass them to `jax.jit`.

    Args:
        target: as in `lowtide.memory.analyze`; None means this machine.

    Returns:
        Options for ``compiler_options`` of `jax.jit`, without those that the environment variable ``XLA_FLAGS`` sets.

    Raises:
        TargetError: for an unknown target.

    Memory:
        None.

    Examples:
        >>> import jax
        >>> step = jax.jit(lambda x: x * 2, compiler_options=copy_options("cpu"))
        >>> sorted(copy_options("h100"))[0]
        'xla_gpu_enable_command_buffer'
    """
    flags = os.environ.get("XLA_FLAGS", "")
    is_gpu = resolve_target(target).platform == "gpu"
    return {name: value for name, value in _OPTIONS.items() if is_gpu and name not in flags}


def options_of(lowered: Any, has_host_arguments: bool, target: Target) -> dict[str, Any]:
    """Return `copy_options` for a lowered program that uses host memory; empty for any other program."""
    if target.platform != "gpu":
        return {}
    text = lowered.compiler_ir("stablehlo").operation.get_asm(large_elements_limit=4)
    return copy_options(target) if has_host_arguments or "pinned_host" in text else {}
