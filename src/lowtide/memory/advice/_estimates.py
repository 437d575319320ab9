"""Estimate the saving of a change to a step from its report.

The estimate removes buffers from the timeline and computes the new peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from ...report import Buffer, MemoryReport, live_bytes


def saving(report: MemoryReport, share: Callable[[Buffer], float]) -> int:
    """Return the decrease of the device's peak in bytes when a share of every buffer is removed.

    Args:
        report: the report.
        share: the removed fraction of a buffer, between 0 and 1.
    """
    mine = [b for b in report.buffers if b.space == "device"]
    smaller = [dataclasses.replace(b, num_bytes=round(b.num_bytes * (1 - share(b)))) for b in mine]
    moments = len(report.moments)
    return max(live_bytes(mine, moments)) - max(live_bytes(smaller, moments))


def recomputations(report: MemoryReport) -> Iterable[tuple[str, tuple[int, int]]]:
    """Find functions whose values could be recomputed.

    Args:
        report: the report.

    Yields:
        The action, and a range of device bytes that it saves. The upper end is everything that the function keeps for
        the backward pass. The lower end is reduced by the memory that recomputation needs.
    """
    groups: dict[str, list[Buffer]] = {}
    for buffer in report.peak:
        if _is_kept(buffer, report):
            groups.setdefault(_maker(buffer), []).append(buffer)
    recomputed = {_maker(buffer) for buffer in report.buffers if buffer.phase == "recompute"}
    for where, buffers in sorted(groups.items(), key=lambda item: -sum(b.num_bytes for b in item[1]))[:5]:
        shapes = some(f"{b.dtype}{list(b.shape)}" for b in buffers)
        how = "jax.checkpoint around it, or checkpoint_name and offload it"
        if report.target.platform == "cpu" and not any(map(_is_in_loop, buffers)):
            if not _are_layers(buffers):
                continue
            how = (
                "put the layers into jax.lax.scan, with jax.checkpoint around its body (outside of a loop, the CPU's "
                "compiler, before JAX 0.12, merges recomputation with the forward pass, or does all of it at once)"
            )
        # Count all buffers of the function, not only those at the peak: before it, the same arrays are other buffers.
        kept = saving(report, lambda b, w=where: float(_is_kept(b, report) and _maker(b) == w))
        still = _still_kept(buffers, where in recomputed)
        yield f"recompute what {where} keeps for the backward pass ({shapes}): {how}", (max(kept - still, 0), kept)


def _is_kept(buffer: Buffer, report: MemoryReport) -> bool:
    """Return whether a buffer is kept for the backward pass; on a CPU also recomputed values outside loops.

    The CPU compiler may run such recomputation all at once, so that its values are live at the same time.
    """
    at_once = report.target.platform == "cpu" and not _is_in_loop(buffer)
    return buffer.role == "activations" or (buffer.role == "recomputed" and at_once)


def _still_kept(buffers: Sequence[Buffer], is_recomputed: bool) -> int:
    """Return the bytes that recomputation itself needs: the function's inputs, and the largest array of one layer.

    The inputs are assumed to be the smallest array that is kept in each layer, such as the input of a block. If the
    function is already recomputed and keeps one array, the inputs are that array.
    """
    kinds = _kinds(buffers)
    if len(kinds) < 2 and not is_recomputed:
        return 0
    layers = [(kind[0].shape[:1] or (1,))[0] if key is kind[0] else len(kind) for key, kind in kinds.items()]
    sizes = [sum(buffer.num_bytes for buffer in kind) for kind in kinds.values()]
    floating = [size for size, kind in zip(sizes, kinds.values(), strict=True) if kind[0].dtype[:1] in ("f", "b", "c")]
    return min(floating, default=0) + max(size // max(count, 1) for size, count in zip(sizes, layers, strict=True))


def _kinds(buffers: Sequence[Buffer]) -> dict[object, list[Buffer]]:
    """Group the buffers that a function keeps: a loop's stack is a group, and unrolled layers of one kind are one."""
    kinds: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        is_stack = buffer.operation.startswith(("while", "parameter"))
        kinds.setdefault(buffer if is_stack else (buffer.scope, buffer.source, buffer.shape), []).append(buffer)
    return kinds


def _are_layers(buffers: Sequence[Buffer]) -> bool:
    """Return whether most kept bytes are of arrays that occur three times or more with one line and shape."""
    repeated = [b.num_bytes for kind in _kinds(buffers).values() if len(kind) > 2 for b in kind]
    return 2 * sum(repeated) >= sum(b.num_bytes for b in buffers)


def _is_in_loop(buffer: Buffer) -> bool:
    is_random = buffer.dtype.startswith("u")  # random bits, which XLA makes in separate loops
    return not is_random and ("while/body" in buffer.scope or buffer.operation.startswith(("while", "parameter")))


def _maker(buffer: Buffer) -> str:
    """Return the file and function of a buffer's source line, ``train.py (block)``; without a line, its scope."""
    return re.sub(r":\d+ \(", " (", buffer.source) or buffer.scope


def some(names: Iterable[str], limit: int = 3) -> str:
    """Return the first names in sorted order, and the number of the others.

    Args:
        names: names in any order.
        limit: number of names to list.
    """
    listed = list(dict.fromkeys(sorted(names)))
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
