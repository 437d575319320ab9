"""Share of host-link copies that overlap with kernels, from a trace of `jax.profiler`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def overlap(trace_dir: str | Path) -> dict[str, Any]:
    """Return the seconds of kernels, of host-link copies, and of copies during kernels, from a `jax.profiler` trace.

    The result is empty for a trace without a GPU. If several kernels or copies run at once, their time counts once. The
    figures are sums over the GPUs of the trace.
    """
    from jax.profiler import ProfileData

    total: dict[str, float] = {}
    for path in sorted(Path(trace_dir).rglob("*.xplane.pb")):
        for plane in ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/device:GPU"):
                events = [
                    (event.name, event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9)
                    for line in plane.lines
                    if line.name.startswith("Stream")  # other lines repeat these events by operation and module
                    for event in line.events
                ]
                for name, value in hidden(events).items():
                    total[name] = total.get(name, 0.0) + value
    if copies := total.get("copy_seconds"):
        total["hidden_share"] = total["copy_hidden_seconds"] / copies
    return total


def hidden(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of kernels, of copies, and of copies during kernels, from (name, start, end)."""
    kinds: dict[str, list[Interval]] = {"kernel": [], "h2d": [], "d2h": []}
    for name, start, end in events:
        lower = name.lower()
        if "memcpyh2d" in lower or "htod" in lower:
            kinds["h2d"].append((start, end))
        elif "memcpyd2h" in lower or "dtoh" in lower:
            kinds["d2h"].append((start, end))
        elif not lower.startswith(("memcpy", "memset")):
            kinds["kernel"].append((start, end))
    kinds["copy"] = kinds["h2d"] + kinds["d2h"]
    merged = {kind: union(intervals) for kind, intervals in kinds.items()}
    found = {f"{kind}_seconds": length(intervals) for kind, intervals in merged.items()}
    for kind in ("h2d", "d2h", "copy"):
        found[f"{kind}_hidden_seconds"] = length(common(merged[kind], merged["kernel"]))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch, and return them in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the total seconds of a union."""
    return sum(end - start for start, end in intervals)
