"""A report and a difference as text, for terminals of 60 columns and more.

Wider terminals show more columns. Long names lose their middle, which is less informative than their ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...core import format_bytes
from .._facts import SPACES, DiffFacts, DiffRow, ReportFacts, Space, signed, sum_by_role
from ._content import (
    SOURCE_WIDTH,
    Group,
    at_peak,
    drawn_buffers,
    fit_text,
    group_buffers,
    group_rows,
    peak_moment,
    peak_text,
    percent,
    row_text,
    short_source,
    shorten,
    timeline,
    with_source,
)
from ._styles import styles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_MAX_WIDTH = 200


@dataclasses.dataclass(frozen=True)
class _Column:
    name: str
    text: Callable[[Group], str]
    width: int
    """Width of the cell; 0 takes the remaining width."""
    min_width: int = 0
    """Smallest width of the terminal that shows the column."""


def print_report(report: ReportFacts, console: Console | None, *, top: int) -> None:
    """Print a report with `top` owners per memory space; None as `console` means standard output."""
    out, width = _console(console)
    style = {True: "bold green", False: "bold red", None: "bold"}[report.fits]
    head = _text(f"Compiled bytes on one device of {_target(report)}\n", "bold").append(fit_text(report), style=style)
    with out:  # collect all output, because notebooks show each print separately
        out.print(head, soft_wrap=False)
        for space in SPACES:
            buffers = at_peak(report, space)
            if space == "host" and not buffers:
                continue
            out.line()
            out.print(_section(space, report, width), no_wrap=True, overflow="ellipsis")
            roles = sum_by_role(buffers)
            if roles:
                out.print(_bar(roles, width))
                out.print(_legend(roles, width), no_wrap=True)
            if len({b.start for b in drawn_buffers(report, space)} | {b.end for b in buffers}) > 2:
                out.line()
                _print_sparkline(out, report, space, width)
            if report.buffers and buffers:
                out.line()
                out.print(_owners(group_buffers(buffers), sum(roles.values()), width, top))
        _print_notes(out, report.notes)


def print_diff(difference: DiffFacts, console: Console | None, *, top: int) -> None:
    """Print a difference with `top` owners; None as `console` means standard output."""
    out, width = _console(console)
    before, after = difference.before, difference.after
    head = _text("Compiled bytes on one device of ", "bold").append(_target(after))
    with out:
        out.print(head.append(f", compared with {before.target.name}" if before.target != after.target else ""))
        for space in SPACES:
            roles = difference.by_role(space=space)
            if not roles and space == "host":
                continue
            out.line()
            out.print(_diff_roles(difference, space))
        changed = [row for row in difference.rows if row.delta_bytes]
        if changed:
            out.line()
            out.print(_diff_owners(changed, width, top))
        unchanged = len(difference.rows) - len(changed)
        if unchanged:
            out.print(_text(f"{unchanged:,} owners did not change", "dim"))
        _print_notes(out, difference.notes)


def _console(console: Console | None) -> tuple[Console, int]:
    from rich.console import Console

    out = console or Console(highlight=False)
    return out, max(40, min(out.width, _MAX_WIDTH))


def _target(report: ReportFacts) -> str:
    return "this machine" if report.target.name == "here" else report.target.name


def _section(space: Space, report: ReportFacts, width: int) -> Text:
    total = format_bytes(sum(b.num_bytes for b in at_peak(report, space)))
    text = _text("On the host" if space == "host" else "At the peak", "bold")
    suffix = f": {total}" if len(report.moments) == 1 else f": {total}, {peak_text(report, space)}"
    if len(text) + len(suffix) > width:  # shorten only the operation's name, not the size or the moment
        suffix, separator, name = suffix.rpartition(", ")
        suffix += f"{separator}{shorten(name, max(6, width - len(text) - len(suffix) - 2))}"
    return text.append(suffix, style="")


def _bar(roles: dict[str, int], width: int) -> Text:
    """Draw one line of cells that is divided by role; every role gets at least one cell."""
    total, role_styles = max(1, sum(roles.values())), styles(roles)
    bar, num_cells, cumulative = _text(no_wrap=True), 0, 0
    for num_remaining, (role, size) in zip(range(len(roles) - 1, -1, -1), roles.items(), strict=True):
        cumulative += size
        # Rounding the running sum keeps rounding errors from adding up. Each remaining role needs at least one cell.
        cells = max(1, min(round(cumulative / total * width) - num_cells, width - num_cells - num_remaining))
        num_cells += cells
        bar.append(("▓" if role_styles[role].texture else "█") * cells, style=role_styles[role].color)
    return bar


def _legend(roles: dict[str, int], width: int) -> Text:
    """List roles with their bytes, in as many columns as fit."""
    total, role_styles = max(1, sum(roles.values())), styles(roles)
    name_width = min(24, max(len(role) for role in roles))
    cell = 2 + name_width + 13 + 9
    # A cell is the swatch (2), the name, the bytes (13) and the share (9); three spaces separate cells.
    per_line = max(1, (width + 3) // (cell + 3))
    text = _text(no_wrap=True)
    for index, (role, size) in enumerate(roles.items()):
        text.append("" if index == 0 else "\n" if index % per_line == 0 else "   ")
        text.append("▓ " if role_styles[role].texture else "█ ", style=role_styles[role].color)
        text.append(f"{shorten(role, name_width):<{name_width}}{format_bytes(size):>13}{percent(size, total):>9}")
    return text


def _print_sparkline(out: Console, report: ReportFacts, space: Space, width: int) -> None:
    _, totals, moments = timeline(report, space, width)
    highest = max(1, int(totals.max()))
    cell_width = max(1, min(8, width // len(moments)))
    # Three rows of blocks with eight heights each give 24 levels.
    levels = [round(int(totals[moment]) / highest * 8 * 3) for moment in moments for _ in range(cell_width)]
    peak = peak_moment(report, space)
    column = cell_width * next((i for i, low in enumerate(moments) if low >= peak), len(moments) - 1)
    out.print(_text("Live bytes over the program", "bold"))
    for row in (2, 1, 0):
        out.print(_text("".join(_BLOCKS[max(0, min(8, level - 8 * row))] for level in levels), no_wrap=True))
    label = ", ".join(filter(None, [f"peak {format_bytes(int(totals[peak]))}", report.moments[peak]]))
    label = shorten(label, width - 2)
    has_room = column + 2 + len(label) <= width
    out.print(_text(" " * column + f"▲ {label}" if has_room else f"{label} ▲".rjust(column + 1), "bold", no_wrap=True))


_SOURCE_MIN_WIDTH = 130
"""Smallest terminal width with a source column; in narrower terminals, sources follow owners without a path."""
_BYTES_WIDTH = 11
"""Width of the longest size below 1024 TiB: ``1023.99 MiB``."""
_COLUMNS = (
    _Column("role", lambda g: g.buffers[0].role, 14),
    _Column("phase", lambda g: g.buffers[0].phase, 9, min_width=100),
    _Column("owner", lambda g: g.text, 0),
    _Column("array", lambda g: g.array, 24, min_width=96),
    _Column("source", lambda g: g.source, SOURCE_WIDTH, min_width=_SOURCE_MIN_WIDTH),
)


def _owners(groups: Sequence[Group], total: int, width: int, top: int) -> Table:
    shown = [column for column in _COLUMNS if width >= column.min_width]
    texts = {c.name: [c.text(g) for g in groups[:top]] for c in shown}
    if "source" in texts:
        texts["source"] = [short_source(text, SOURCE_WIDTH) for text in texts["source"]]
    # An empty column is left out, and a column is no wider than its longest text.
    widths = {c.name: min(c.width, max([len(c.name), *map(len, texts[c.name])])) for c in shown if c.width}
    widths = {name: size for name, size in widths.items() if any(texts[name])}
    table = _plain_table(f"Largest owners {'at the peak' if len(groups) > 1 else ''}".strip())
    table.add_column("bytes", justify="right", width=_BYTES_WIDTH, no_wrap=True)
    table.add_column("share", justify="right", width=7, no_wrap=True)
    owner_width = max(12, width - _BYTES_WIDTH - 7 - 3 * 2 - sum(size + 2 for size in widths.values()))
    if "source" not in texts:
        texts["owner"] = [with_source(text, g, owner_width) for text, g in zip(texts["owner"], groups, strict=False)]
    shown = [column for column in shown if not column.width or column.name in widths]
    for column in shown:
        table.add_column(column.name, width=widths.get(column.name, owner_width), no_wrap=True, overflow="crop")
    role_styles = styles(g.buffers[0].role for g in groups)
    for index, group in enumerate(groups[:top]):
        cells = [shorten(texts[c.name][index], widths.get(c.name, owner_width)) for c in shown]
        colored = [_text(cells[0], role_styles[group.buffers[0].role].color), *map(_text, cells[1:])]
        table.add_row(format_bytes(group.num_bytes), percent(group.num_bytes, total), *colored)
    remaining = groups[top:]
    if remaining:
        size = sum(group.num_bytes for group in remaining)
        empty_cells = [""] * [column.name for column in shown].index("owner")
        table.add_row(format_bytes(size), percent(size, total), *empty_cells, f"{len(remaining):,} more", style="dim")
    return table


def _diff_roles(difference: DiffFacts, space: Space) -> Table:
    table = _plain_table("")
    table.add_column("host" if space == "host" else "device", no_wrap=True, min_width=14)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", min_width=11, no_wrap=True)
    roles = difference.by_role(space=space)
    for role, (before, after) in roles.items():
        table.add_row(_text(role), format_bytes(before), format_bytes(after), _change(after - before))
    before, after = (sum(pair[side] for pair in roles.values()) for side in (0, 1))
    table.add_row("total", format_bytes(before), format_bytes(after), _change(after - before), style="bold")
    return table


def _diff_owners(rows: Sequence[DiffRow], width: int, top: int) -> Table:
    is_wide, has_host = width >= 100, any(row.space == "host" for row in rows)
    table = _plain_table("Owners that changed most")
    for name in ("change", *(("before", "after") if is_wide else ())):
        table.add_column(name, justify="right", width=_BYTES_WIDTH + (name == "change"), no_wrap=True)
    table.add_column("role", width=14, no_wrap=True)
    if has_host:
        table.add_column("space", width=6, no_wrap=True)
    owner_width = max(
        12, width - (_BYTES_WIDTH + 3) - (2 * (_BYTES_WIDTH + 2) if is_wide else 0) - 16 - (8 if has_host else 0) - 7
    )
    table.add_column("owner", width=owner_width, no_wrap=True)
    table.add_column("type", width=5, no_wrap=True)
    groups = group_rows(rows)
    for row in groups[:top]:
        sizes = [format_bytes(row.before_bytes), format_bytes(row.after_bytes)] if is_wide else []
        space = [row.space] if has_host else []
        names = [_text(shorten(row.role, 14)), *space, _text(shorten(row_text(row), owner_width)), row.dtype]
        table.add_row(_change(row.delta_bytes), *sizes, *names)
    remaining = groups[top:]
    if remaining:
        size = sum(row.delta_bytes for row in remaining)
        num_empty = (2 if is_wide else 0) + 1 + (1 if has_host else 0)
        table.add_row(signed(size), *[""] * num_empty, f"{len(remaining):,} more", style="dim")
    return table


def _change(delta: int) -> Text:
    return _text(signed(delta), "red" if delta > 0 else "green" if delta < 0 else "dim")


def _plain_table(title: str) -> Table:
    from rich.table import Table

    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )


def _text(text: str = "", style: str = "", *, no_wrap: bool | None = None) -> Text:
    """Make a `rich` text without markup, because names may contain brackets."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=no_wrap)


def _print_notes(out: Console, notes: Sequence[str]) -> None:
    if notes:
        out.line()
    for note in notes:
        out.print(_text(f"note: {note}", "dim"))
