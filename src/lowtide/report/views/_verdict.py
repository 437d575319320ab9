"""The sentences that every view begins with."""

from __future__ import annotations

from ...core import format_bytes
from .._buffers import Space
from .._facts import ReportFacts
from ._series import peak_moment


def fit_text(report: ReportFacts) -> str:
    """Return one sentence about the fit: ``fits: 10.88 GiB of 95.73 GiB, 84.85 GiB free``."""
    margin, host = report.host_margin_bytes, ""
    if report.host_bytes and margin is not None and margin < 0:
        machine = f" of a {report.target.machine}" if report.target.machine else ""
        assert report.target.host_bytes is not None, "a margin has a capacity"
        share = f"{format_bytes(report.host_bytes)} of {format_bytes(report.target.host_bytes)}"
        host = f"; the host's share{machine} is too small: {share}, {format_bytes(-margin)} too much"
    return _device_text(report) + host


def _device_text(report: ReportFacts) -> str:
    target, total, margin = report.target, format_bytes(report.device_bytes), report.margin_bytes
    if target.device_bytes is None or margin is None:
        return f"{total}; the capacity is unknown" if report.fits is None else f"does not fit: {total} on the device"
    reserve = f", {format_bytes(target.reserve_bytes)} in reserve" if target.reserve_bytes else ""
    usage = f"{total} of {format_bytes(target.device_bytes)}"
    if report.fits:
        return f"fits: {usage}{reserve}, {format_bytes(margin)} free"
    excess = f", {format_bytes(-margin)} too much" if margin < 0 else " on the device"
    return f"does not fit: {usage}{reserve}{excess}"


def peak_text(report: ReportFacts, space: Space) -> str:
    """Return the position of the peak: ``moment 3,120 of 6,000, fusion.7``."""
    moment = peak_moment(report, space)
    name = report.moments[moment]
    return f"moment {moment + 1:,} of {len(report.moments):,}" + (f", {name}" if name else "")


def summary(report: ReportFacts) -> str:
    """Summarise a report in one or two lines."""
    capacity_bytes = report.target.device_bytes
    capacity = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)}"
    verdict = {True: ", fits", False: ", does not fit", None: ""}[report.fits]
    host = f", {format_bytes(report.host_bytes)} on the host" if report.host_bytes else ""
    lines = [f"MemoryReport: {format_bytes(report.device_bytes)}{capacity} on {report.target.name}{verdict}{host}"]
    if report.buffers:
        roles = list(report.peak_by_role.items())
        largest = ", ".join(f"{role} {format_bytes(size)}" for role, size in roles[:4])
        suffix = f", {len(roles) - 4} more" if len(roles) > 4 else ""
        lines.append(f"  {len(report.buffers):,} buffers; at the peak {largest}{suffix}")
    return "\n".join(lines)
