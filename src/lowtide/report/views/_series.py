"""The data that views draw: buffers, their bytes per role over the program, and the moments to draw as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .._buffers import Buffer, Space
from .._facts import SPACES, ReportFacts
from ._roles import stacked


def peak_moment(report: ReportFacts, space: Space) -> int:
    """Return the position at which most bytes of a space are alive."""
    return report.peak_moment if space == "device" else report.host_peak_moment


def drawn_buffers(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space; for a report without buffers, one per role that is alive throughout.

    Args:
        report: the report.
        space: the memory space.
    """
    mine = tuple(b for b in report.buffers if b.space == space)
    if mine:
        return mine
    roles = report.by_role if space == "device" else report.host_by_role
    last = len(report.moments) - 1
    return tuple(
        Buffer(space=space, role=role, phase="", num_bytes=size, start=0, end=last)
        for role, size in roles.items()
        if size
    )


def role_order(*reports: ReportFacts) -> list[str]:
    """Return every role that is drawn, from the bottom of a stack to its top; arguments in the caller's order."""
    names = [role for report in reports for roles in (report.by_role, report.host_by_role) for role in roles]
    used = [b.role for report in reports for space in SPACES for b in drawn_buffers(report, space)]
    return [role for role in stacked([*names, *used]) if role in set(used)]


def at_peak(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space at its peak, largest first; the bytes add up to the space's total."""
    peak = peak_moment(report, space)
    alive = [b for b in drawn_buffers(report, space) if b.alive_at(peak)]
    return tuple(sorted(alive, key=lambda b: -b.num_bytes))


def role_series(buffers: Sequence[Buffer], num_moments: int) -> dict[str, np.ndarray]:
    """Return the bytes per role at every position of a program, with fragmentation as a separate role.

    Args:
        buffers: buffers of one space.
        num_moments: number of positions of the program.

    Returns:
        Arrays of int64, shape (num_moments,).
    """
    steps: dict[str, np.ndarray] = {}
    for buffer in buffers:
        step = steps.setdefault(buffer.role, np.zeros(num_moments + 1, np.int64))
        step[buffer.start] += buffer.num_bytes
        step[buffer.end + 1] -= buffer.num_bytes
    return {role: np.cumsum(step)[:-1] for role, step in steps.items()}


def total_series(series: Mapping[str, np.ndarray], num_moments: int) -> np.ndarray:
    """Add up the series that `role_series` returns."""
    return sum(series.values(), np.zeros(num_moments, np.int64))


def columns(totals: np.ndarray, num_columns: int) -> np.ndarray:
    """Return the positions to draw when there are more than columns: in each range the one with most bytes.

    Args:
        totals: bytes at every position; shape (num_moments,).
        num_columns: number of columns available.

    Returns:
        Positions in ascending order; the largest total is among them.
    """
    count = min(len(totals), max(1, num_columns))
    edges = np.linspace(0, len(totals), count + 1).astype(int)
    return np.array([low + int(np.argmax(totals[low:high])) for low, high in zip(edges[:-1], edges[1:], strict=True)])
