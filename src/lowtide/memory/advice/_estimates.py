"""What a change to a step would save, read off its report: buffers leave the timeline, which gives the new peak."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from ...report import Buffer, MemoryReport, live_bytes


def saving(report: MemoryReport, share: Callable[[Buffer], float]) -> int:
    """Device bytes less at the peak when a share of every buffer goes away.

    Args:
        report: the report.
        share: the part of a buffer that goes, between 0 and 1.
    """
    mine = [b for b in report.buffers if b.space == "device"]
    smaller = [dataclasses.replace(b, num_bytes=round(b.num_bytes * (1 - share(b)))) for b in mine]
    moments = len(report.moments)
    return max(live_bytes(mine, moments)) - max(live_bytes(smaller, moments))


def recomputations(report: MemoryReport) -> Iterable[tuple[str, tuple[int, int]]]:
    """Find what could be recomputed, by the function that makes it.

    Args:
        report: the report.

    Yields:
        What to do, and the least and most device bytes that it saves. The most is all that the function keeps for the
        backward pass. The least leaves out what recomputation itself needs.
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
        # All that the function keeps, at any time: before the peak the same arrays have other names.
        kept = saving(report, lambda b, w=where: float(_is_kept(b, report) and _maker(b) == w))
        still = _still_kept(buffers, where in recomputed)
        yield f"recompute what {where} keeps for the backward pass ({shapes}): {how}", (max(kept - still, 0), kept)


def _is_kept(buffer: Buffer, report: MemoryReport) -> bool:
    """Whether a buffer waits for the backward pass; on a CPU, recomputation outside of loops comes before that, too."""
    at_once = report.target.platform == "cpu" and not _is_in_loop(buffer)
    return buffer.role == "activations" or (buffer.role == "recomputed" and at_once)


def _still_kept(buffers: Sequence[Buffer], is_recomputed: bool) -> int:
    """Bytes that recomputation needs itself: what the function begins with, and one layer's largest array.

    What it begins with is taken to be the smallest of what it keeps in each layer, as a block's input is; of a function
    that is recomputed already and keeps one array, that is the array.
    """
    kinds = _kinds(buffers)
    if len(kinds) < 2 and not is_recomputed:
        return 0
    layers = [(kind[0].shape[:1] or (1,))[0] if key is kind[0] else len(kind) for key, kind in kinds.items()]
    sizes = [sum(buffer.num_bytes for buffer in kind) for kind in kinds.values()]
    floating = [size for size, kind in zip(sizes, kinds.values(), strict=True) if kind[0].dtype[:1] in ("f", "b", "c")]
    return min(floating, default=0) + max(size // max(count, 1) for size, count in zip(sizes, layers, strict=True))


def _kinds(buffers: Sequence[Buffer]) -> dict[object, list[Buffer]]:
    """Return the arrays that a function keeps: a loop's stack holds all layers, else each layer has a buffer."""
    kinds: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        is_stack = buffer.operation.startswith(("while", "parameter"))
        kinds.setdefault(buffer if is_stack else (buffer.scope, buffer.source, buffer.shape), []).append(buffer)
    return kinds


def _are_layers(buffers: Sequence[Buffer]) -> bool:
    """Whether most of what a function keeps is made three times and more on one line in one shape, as by layers."""
    repeated = [b.num_bytes for kind in _kinds(buffers).values() if len(kind) > 2 for b in kind]
    return 2 * sum(repeated) >= sum(b.num_bytes for b in buffers)


def _is_in_loop(buffer: Buffer) -> bool:
    is_random = buffer.dtype.startswith("u")  # bits, which are made in loops of their own
    return not is_random and ("while/body" in buffer.scope or buffer.operation.startswith(("while", "parameter")))


def _maker(buffer: Buffer) -> str:
    """Return the file and function of a buffer's source line, ``train.py (block)``; its scope when there is none."""
    return re.sub(r":\d+ \(", " (", buffer.source) or buffer.scope


def some(names: Iterable[str], limit: int = 3) -> str:
    """Name the first of several, and say how many more there are.

    Args:
        names: in any order.
        limit: how many to spell out.
    """
    listed = list(dict.fromkeys(sorted(names)))
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
