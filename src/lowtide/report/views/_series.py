"""The data that views draw: buffers, their bytes per role over the program, and the moments to draw as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .._buffers import Buffer, Space
from .._facts import SPACES, ReportFacts
from ._roles import stacking_order


def peak_moment(report: ReportFacts, space: Space) -> int:
    """Return the position at which most bytes of a space are alive."""
    return report.peak_moment if space == "device" else report.host_peak_moment


def drawn_buffers(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space; for a report without buffers, one per role that is alive throughout."""
    space_buffers = tuple(b for b in report.buffers if b.space == space)
    if space_buffers:
        return space_buffers
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
    used_roles = [b.role for report in reports for space in SPACES for b in drawn_buffers(report, space)]
    return [role for role in stacking_order([*names, *used_roles]) if role in set(used_roles)]


def at_peak(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space at its peak, largest first; the bytes add up to the space's total."""
    peak = peak_moment(report, space)
    alive = [b for b in drawn_buffers(report, space) if b.alive_at(peak)]
    return tuple(sorted(alive, key=lambda b: -b.num_bytes))


def role_series(buffers: Sequence[Buffer], num_moments: int) -> dict[str, np.ndarray]:
    """Return the int64 bytes per role at every position of a program, with fragmentation as a separate role.

    `buffers` are those of one space.
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
    """Return the positions to draw in `num_columns`, ascending: of each range the position with most bytes."""
    count = min(len(totals), max(1, num_columns))
    edges = np.linspace(0, len(totals), count + 1).astype(int)
    return np.array([low + int(np.argmax(totals[low:high])) for low, high in zip(edges[:-1], edges[1:], strict=True)])
