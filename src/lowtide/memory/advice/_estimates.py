"""Estimate the saving of a change to a step from its report.

The estimate removes buffers from the timeline and computes the new peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from ...report import Buffer, MemoryReport, live_bytes


def saving(report: MemoryReport, share: Callable[[Buffer], float]) -> int:
    """Return the decrease of the device's peak in bytes when each buffer loses a share (0 to 1) of its bytes."""
    device_buffers = [b for b in report.buffers if b.space == "device"]
    reduced_buffers = [dataclasses.replace(b, num_bytes=round(b.num_bytes * (1 - share(b)))) for b in device_buffers]
    moments = len(report.moments)
    return max(live_bytes(device_buffers, moments)) - max(live_bytes(reduced_buffers, moments))


def recomputations(report: MemoryReport) -> Iterable[tuple[str, tuple[int, int]]]:
    """Yield an action for each function whose values could be recomputed, and the range of device bytes that it saves.

    The upper end is everything that the function keeps for the backward pass. The lower end is less by the memory that
    recomputation needs.
    """
    groups: dict[str, list[Buffer]] = {}
    for buffer in report.peak:
        if _is_residual(buffer, report):
            groups.setdefault(_source_function(buffer), []).append(buffer)
    recomputed_functions = {_source_function(buffer) for buffer in report.buffers if buffer.phase == "recompute"}
    for function, buffers in sorted(groups.items(), key=lambda item: -sum(b.num_bytes for b in item[1]))[:5]:
        shapes = join_names(f"{b.dtype}{list(b.shape)}" for b in buffers)
        advice = "jax.checkpoint around it, or checkpoint_name and offload it"
        if report.target.platform == "cpu" and not any(map(_is_in_loop, buffers)):
            if not _are_layers(buffers):
                continue
            advice = (
                "put the layers into jax.lax.scan, with jax.checkpoint around its body (outside of a loop, the CPU's "
                "compiler, before JAX 0.12, merges recomputation with the forward pass, or does all of it at once)"
            )
        # Count all buffers of the function, not only those at the peak: before it, the same arrays are other buffers.
        saved_bytes = saving(
            report, lambda b, function=function: float(_is_residual(b, report) and _source_function(b) == function)
        )
        recompute_bytes = _recomputation_bytes(buffers, function in recomputed_functions)
        yield (
            f"recompute what {function} keeps for the backward pass ({shapes}): {advice}",
            (max(saved_bytes - recompute_bytes, 0), saved_bytes),
        )


def _is_residual(buffer: Buffer, report: MemoryReport) -> bool:
    """Return whether a buffer is kept for the backward pass; on a CPU also recomputed values outside loops.

    The CPU compiler may run such recomputation all at once, so that its values are live at the same time.
    """
    is_at_once = report.target.platform == "cpu" and not _is_in_loop(buffer)
    return buffer.role == "activations" or (buffer.role == "recomputed" and is_at_once)


def _recomputation_bytes(buffers: Sequence[Buffer], is_recomputed: bool) -> int:
    """Return the bytes that recomputation itself needs: the function's inputs, and the largest array of one layer.

    The inputs are assumed to be the smallest array that is kept in each layer, such as the input of a block. If the
    function is already recomputed and keeps one array, the inputs are that array.
    """
    groups = _group_buffers(buffers)
    if len(groups) < 2 and not is_recomputed:
        return 0
    layer_counts = [(group[0].shape[:1] or (1,))[0] if key is group[0] else len(group) for key, group in groups.items()]
    sizes = [sum(buffer.num_bytes for buffer in group) for group in groups.values()]
    floating_sizes = [
        size for size, group in zip(sizes, groups.values(), strict=True) if group[0].dtype[:1] in ("f", "b", "c")
    ]
    return min(floating_sizes, default=0) + max(
        size // max(count, 1) for size, count in zip(sizes, layer_counts, strict=True)
    )


def _group_buffers(buffers: Sequence[Buffer]) -> dict[object, list[Buffer]]:
    """Group the buffers that a function keeps: a loop's stack is a group, and unrolled layers of one kind are one."""
    groups: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        is_stack = buffer.operation.startswith(("while", "parameter"))
        groups.setdefault(buffer if is_stack else (buffer.scope, buffer.source, buffer.shape), []).append(buffer)
    return groups


def _are_layers(buffers: Sequence[Buffer]) -> bool:
    """Return whether most kept bytes are of arrays that occur three times or more with one line and shape."""
    repeated_bytes = [b.num_bytes for group in _group_buffers(buffers).values() if len(group) > 2 for b in group]
    return 2 * sum(repeated_bytes) >= sum(b.num_bytes for b in buffers)


def _is_in_loop(buffer: Buffer) -> bool:
    is_random = buffer.dtype.startswith("u")  # random bits, which XLA makes in separate loops
    return not is_random and ("while/body" in buffer.scope or buffer.operation.startswith(("while", "parameter")))


def _source_function(buffer: Buffer) -> str:
    """Return the file and function of a buffer's source line, ``train.py (block)``; without a line, its scope."""
    return re.sub(r":\d+ \(", " (", buffer.source) or buffer.scope


def join_names(names: Iterable[str], limit: int = 3) -> str:
    """Join the first distinct names in sorted order, with the number of the others."""
    unique_names = list(dict.fromkeys(sorted(names)))
    suffix = f" and {len(unique_names) - limit} more" if len(unique_names) > limit else ""
    return ", ".join(unique_names[:limit]) + suffix
