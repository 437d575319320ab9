"""The content that views share: sentences, groups of buffers, and bytes per role over the program.

Buffers whose names differ only in numbers form one group: ``32 × layers/*/mlp/up``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from ...core import format_bytes
from .._facts import SPACES, Buffer, DiffRow, ReportFacts, Space
from ._styles import stacking_order

SOURCE_WIDTH = 32
"""Largest width of a source line next to its owner, in characters."""
_NUMBER = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"[._-]?\d+$")


def fit_text(report: ReportFacts) -> str:
    """Return text that says whether the program fits: ``fits: 10.88 GiB of 95.73 GiB, 84.85 GiB free``."""
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
    """Return the position of a space's peak as text: ``moment 3,120 of 6,000, fusion.7``."""
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


def peak_moment(report: ReportFacts, space: Space) -> int:
    """Return the position at which most bytes of a space are alive."""
    return report.peak_moment if space == "device" else report.host_peak_moment


def drawn_buffers(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space; if it has none, make one for each role, alive at all positions."""
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
    """Return the roles that have buffers, bottom of a stacked chart first; arguments keep the caller's order."""
    names = [role for report in reports for roles in (report.by_role, report.host_by_role) for role in roles]
    used_roles = [b.role for report in reports for space in SPACES for b in drawn_buffers(report, space)]
    return [role for role in stacking_order([*names, *used_roles]) if role in set(used_roles)]


def at_peak(report: ReportFacts, space: Space) -> tuple[Buffer, ...]:
    """List the buffers of a space at its peak, largest first; the bytes add up to the space's total."""
    peak = peak_moment(report, space)
    alive = [b for b in drawn_buffers(report, space) if b.alive_at(peak)]
    return tuple(sorted(alive, key=lambda b: -b.num_bytes))


def timeline(
    report: ReportFacts, space: Space, num_columns: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return live bytes per role and in total at every position of a program, and the positions to draw.

    The program is divided into at most `num_columns` equal ranges. In each range, the position with the most bytes is
    drawn. Unlike in `live_bytes`, fragmentation counts.
    """
    num_moments = len(report.moments)
    steps: dict[str, np.ndarray] = {}
    for buffer in drawn_buffers(report, space):
        step = steps.setdefault(buffer.role, np.zeros(num_moments + 1, np.int64))
        step[buffer.start] += buffer.num_bytes
        step[buffer.end + 1] -= buffer.num_bytes
    series = {role: np.cumsum(step)[:-1] for role, step in steps.items()}
    totals: np.ndarray = sum(series.values(), np.zeros(num_moments, np.int64))
    edges = np.linspace(0, num_moments, min(num_moments, max(1, num_columns)) + 1).astype(int)
    moments = [low + int(np.argmax(totals[low:high])) for low, high in itertools.pairwise(edges)]
    return series, totals, np.array(moments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Buffers of one role, phase, shape and size, whose labels differ only in numbers."""

    buffers: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(b.num_bytes for b in self.buffers)

    @property
    def label(self) -> str:
        """Common name of the buffers, from `common_label`."""
        return common_label(sorted({b.label for b in self.buffers}))

    @property
    def text(self) -> str:
        """`label`, with the number of buffers if there are several."""
        return _counted(len(self.buffers), self.label)

    @property
    def array(self) -> str:
        """Type and shape of one buffer, as XLA writes them: ``bf16[4096,4096]``; empty if it is not an array."""
        buffer = self.buffers[0]
        return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]" if buffer.dtype else ""

    @property
    def source(self) -> str:
        """Source line that all buffers share; empty if their lines differ."""
        sources = {b.source for b in self.buffers}
        return next(iter(sources)) if len(sources) == 1 else ""


def common_label(labels: Sequence[str]) -> str:
    """Return the common form of labels that differ only in numbers: ``layers/*/w``, or ``2, 3`` for numbers alone."""
    texts = _NUMBER.split(labels[0])
    numbers = list(zip(*(_NUMBER.findall(label) for label in labels), strict=False))
    middle = [column[0] if len(set(column)) == 1 else "*" for column in numbers]
    label = "".join(text + number for text, number in zip(texts, [*middle, ""], strict=False))
    return label if any(map(str.isalnum, label)) else ", ".join(labels)


def _counted(count: int, label: str) -> str:
    """Prefix a label with its number of buffers if there are several; a list of argument numbers stays unchanged."""
    is_list = ", " in label and not any(map(str.isalpha, label))
    return label if count == 1 or is_list else f"{count} × {label}"


def group_buffers(buffers: Iterable[Buffer]) -> list[Group]:
    """Group buffers that differ only in the numbers of their labels, as equal layers do; largest group first."""
    groups: dict[tuple[object, ...], list[Buffer]] = {}
    for b in buffers:
        # Numbers become "#" in the key, so that layers/0/w and layers/1/w are one group.
        key = (b.space, b.role, b.phase, b.shape, b.dtype, b.num_bytes, _NUMBER.sub("#", b.label))
        groups.setdefault(key, []).append(b)
    return sorted((Group(buffers=tuple(group)) for group in groups.values()), key=lambda g: (-g.num_bytes, g.label))


def owner_name(buffer: Buffer) -> str:
    """Return a name that two compilations share: path, else scope, else operation without its number, else role."""
    return buffer.path or buffer.scope or _LAST_NUMBER.sub("", buffer.operation) or buffer.role


def group_rows(rows: Iterable[DiffRow]) -> list[DiffRow]:
    """Merge rows of equal bytes whose owners differ only in numbers, which become ``*``; largest change first."""
    rows_by_key: dict[tuple[object, ...], list[DiffRow]] = {}
    for row in rows:
        key = (row.space, row.role, row.dtype, row.before_bytes, row.after_bytes, _NUMBER.sub("#", row.owner))
        rows_by_key.setdefault(key, []).append(row)
    names = ("before_bytes", "after_bytes", "before_count", "after_count")
    groups: list[DiffRow] = []
    for group in rows_by_key.values():
        sums = {name: sum(getattr(row, name) for row in group) for name in names}
        owner = common_label(sorted({row.owner for row in group}))
        groups.append(dataclasses.replace(group[0], owner=owner, **sums))
    return sorted(groups, key=lambda row: (-abs(row.delta_bytes), row.owner))


def row_text(row: DiffRow) -> str:
    """Return a row's owner with its number of buffers: the larger of the numbers before and after."""
    return _counted(max(row.before_count, row.after_count), row.owner)


def with_source(text: str, group: Group, width: int) -> str:
    """Return an owner's text; an owner without a path also gets its source line, which says more than the scope."""
    if group.buffers[0].path or not group.source:
        return text
    location_width = len(group.source.partition(" (")[0].rpartition("/")[2])
    source = short_source(group.source, min(width, max(location_width, min(SOURCE_WIDTH, width - 11))))
    text_width = width - len(source) - 3
    return f"{shorten(text, text_width)} · {source}" if text_width >= 8 else source


def short_source(source: str, width: int) -> str:
    """Shorten ``pkg/train.py:41 (loss_fn)`` to a width: drop the folders first, then the function."""
    location, separator, function = source.partition(" (")
    name = location.rpartition("/")[2]
    last = function.removesuffix(")").rpartition(".")[2]
    candidates = (source, f"{name}{separator}{function}", f"{name} ({last})" if last else name, name)
    return next((form for form in candidates if len(form) <= width), name[-width:])


def shorten(text: str, width: int) -> str:
    """Shorten a text to a width by leaving out its middle."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    if width < 6:
        return text[:width]
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def percent(part: int, total: int) -> str:
    """Format a share with one decimal: ``12.5 %``; a positive share below 0.05 % becomes ``<0.1 %``."""
    share = 100 * part / total if total else 0.0
    return "<0.1 %" if part > 0 and share < 0.05 else f"{share:.1f} %"
