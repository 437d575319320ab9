"""The sentences that every view begins with."""

from __future__ import annotations

from ...core import format_bytes
from .._buffers import Space
from .._facts import ReportFacts
from ._series import peak_moment


def fit_text(report: ReportFacts) -> str:
    """Return one sentence about the fit: ``fits: 10.88 GiB of 95.73 GiB, 84.85 GiB free``."""
    room, host = report.host_margin_bytes, ""
    if report.host_bytes and room is not None and room < 0:
        machine = f" of a {report.target.machine}" if report.target.machine else ""
        assert report.target.host_bytes is not None, "a margin has a capacity"
        share = f"{format_bytes(report.host_bytes)} of {format_bytes(report.target.host_bytes)}"
        host = f"; the host's share{machine} is too small: {share}, {format_bytes(-room)} too much"
    return _device_text(report) + host


def _device_text(report: ReportFacts) -> str:
    target, total, free = report.target, format_bytes(report.device_bytes), report.margin_bytes
    if target.device_bytes is None or free is None:
        return f"{total}; the capacity is unknown" if report.fits is None else f"does not fit: {total} on the device"
    reserve = f", {format_bytes(target.reserve_bytes)} in reserve" if target.reserve_bytes else ""
    of = f"{total} of {format_bytes(target.device_bytes)}"
    if report.fits:
        return f"fits: {of}{reserve}, {format_bytes(free)} free"
    short = f", {format_bytes(-free)} too much" if free < 0 else " on the device"
    return f"does not fit: {of}{reserve}{short}"


def peak_text(report: ReportFacts, space: Space) -> str:
    """Return the position of the peak: ``moment 3,120 of 6,000, fusion.7``."""
    moment = peak_moment(report, space)
    name = report.moments[moment]
    return f"moment {moment + 1:,} of {len(report.moments):,}" + (f", {name}" if name else "")


def summary(report: ReportFacts) -> str:
    """Summarise a report in one or two lines."""
    usable = report.target.device_bytes
    of = "" if usable is None else f" of {format_bytes(usable)}"
    verdict = {True: ", fits", False: ", does not fit", None: ""}[report.fits]
    host = f", {format_bytes(report.host_bytes)} on the host" if report.host_bytes else ""
    lines = [f"MemoryReport: {format_bytes(report.device_bytes)}{of} on {report.target.name}{verdict}{host}"]
    if report.buffers:
        roles = list(report.peak_by_role.items())
        largest = ", ".join(f"{role} {format_bytes(size)}" for role, size in roles[:4])
        more = f", {len(roles) - 4} more" if len(roles) > 4 else ""
        lines.append(f"  {len(report.buffers):,} buffers; at the peak {largest}{more}")
    return "\n".join(lines)
