"""Pictures of a report and of a difference, 1600×900 pixels, for slides and issues.

They use matplotlib's figure objects instead of pyplot: no global state, no window, no change to the caller's settings.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core import ConfigError, format_bytes
from .._facts import DiffFacts, ReportFacts, signed
from ._content import (
    at_peak,
    drawn_buffers,
    fit_text,
    group_buffers,
    group_rows,
    peak_text,
    role_order,
    row_text,
    shorten,
    timeline,
    with_source,
)
from ._styles import Style, styles

_INK, _MUTED, _GRID = "#1a1d21", "#5b6470", "#e3e6ea"
_HATCH = {"": None, "/": "//", "\\": "\\\\", "x": "xx"}
_MAX_BARS = 14
_MAX_COLUMNS = 1200
_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
}
_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
"""Background of text that may be on a coloured area."""


def report_png(report: ReportFacts) -> bytes:
    """Draw a report as a PNG of 1600×900: timeline by role, and the largest owners at the peak."""
    mpl = _matplotlib()
    with mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS}):
        host = f" · {format_bytes(report.host_bytes)} on the host" if report.host_bytes else ""
        peak = f"peak at {peak_text(report, 'device')} · " if len(report.moments) > 1 else ""
        subtitle = f"{peak}compiled figures, one device{host}"
        figure, grid = _figure(f"{report.target.name} · {fit_text(report)}", subtitle, num_rows=1)
        role_styles = styles(b.role for b in report.buffers or drawn_buffers(report, "device"))
        roles = _draw_timeline(figure.add_subplot(grid[0]), report, role_styles, report.device_bytes)
        _draw_owners(figure.add_subplot(grid[1]), report, role_styles)
        _legend(figure, roles, role_styles)
        return _save(figure)


def diff_png(difference: DiffFacts) -> bytes:
    """Draw a difference as a PNG of 1600×900: both timelines on one scale, and the owners that changed most."""
    mpl = _matplotlib()
    before, after = difference.before, difference.after
    with mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS}):
        sizes = f"{format_bytes(before.device_bytes)} before, {format_bytes(after.device_bytes)} after"
        host = difference.delta_bytes(space="host")
        notes = [f"{signed(host)} on the host"] * bool(host) + list(difference.notes[:1])
        title = f"{after.target.name} · {signed(difference.delta_bytes())} on the device: {sizes}"
        figure, grid = _figure(title, " · ".join(notes), num_rows=2)
        drawn_roles = [b.role for report in (before, after) for b in drawn_buffers(report, "device")]
        role_styles, highest = styles(drawn_roles), max(before.device_bytes, after.device_bytes)
        roles: list[str] = []
        for row, (name, report) in enumerate((("before", before), ("after", after))):
            axes = figure.add_subplot(grid[row, 0])
            roles += _draw_timeline(axes, report, role_styles, highest)
            axes.set_title(f"{name}: {format_bytes(report.device_bytes)}", loc="left", fontsize=11, color=_MUTED)
        _draw_changes(figure.add_subplot(grid[:, 1]), difference)
        _legend(figure, [role for role in role_order(before, after) if role in roles], role_styles)
        return _save(figure)


def frontier_png(
    title: str, attempts: Sequence[Any], frontier: Sequence[Any], budget: int, chosen: tuple[int, float]
) -> bytes:
    """Draw the choices of a plan as a PNG of 1600×900: estimated time against bytes, and a numbered list.

    `attempts` are those of a `lowtide.planning.Plan`, and `chosen` are the bytes and the seconds of its choice, which
    gets a ring. Estimated bytes have hollow points.
    """
    mpl = _matplotlib()
    with mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS}):
        figure, grid = _figure(title, "bytes on one device (hollow: estimated), estimated time of a step", num_rows=1)
        axes: Any = figure.add_subplot(grid[0])
        attempts = sorted(attempts, key=lambda item: (item.device_bytes, item.seconds))
        unit, name = (2**30, "GiB") if chosen[0] >= 2**30 else (2**20, "MiB")
        steps = [(item.device_bytes / unit, 1e3 * item.seconds) for item in frontier]
        axes.step(*zip(*steps, strict=True), where="post", color=_MUTED, linewidth=1)
        axes.plot([chosen[0] / unit], [1e3 * chosen[1]], "o", color="none", markeredgecolor="#1b1b1b", markersize=19)
        listing: Any = figure.add_subplot(grid[1])
        listing.axis("off")
        height = min(0.055, 1 / len(attempts))
        for number, item in enumerate(attempts, start=1):
            point = item.device_bytes / unit, 1e3 * item.seconds
            color = "#12805c" if item.device_bytes <= budget else "#c2410c"
            axes.plot(*point, "o", color=color, markerfacecolor=color if item.is_compiled else "white", markersize=9)
            # Neighbours have their numbers on different sides.
            offset = {"xytext": (0, 11 if number % 2 else -20), "textcoords": "offset points", "ha": "center"}
            axes.annotate(str(number), point, fontweight="bold", **offset)
            parts = f"{point[0]:.2f} {name}", f"{point[1]:.4g} ms", f"microbatches: {item.num_microbatches}"
            text = f"{number}  {', '.join(parts)}, {shorten(item.label, 58)}"
            weight = "bold" if (item.device_bytes, item.seconds) == chosen else "normal"
            listing.text(-0.45, 1 - number * height, text, fontsize=10, color=color, fontweight=weight)
        axes.axvline(budget / unit, color="#b3261e", linewidth=1.3, linestyle=(0, (5, 3)))
        axes.margins(0.1)
        axes.set_xlabel(f"{name} on the device; the dashed line is the budget of {format_bytes(budget)}", color=_MUTED)
        axes.set_ylabel("estimated milliseconds of a step", color=_MUTED)
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        return _save(figure)


def _matplotlib() -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed",
            hint='pip install "lowtide[report]", or use to_html or print, which do not need it',
        )
    import matplotlib

    return matplotlib


def _figure(title: str, subtitle: str, *, num_rows: int) -> tuple[Any, Any]:
    """Make a figure with a heading, and its grid of two columns."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(16, 9), dpi=100, facecolor="white")
    figure.text(0.022, 0.945, shorten(title, 110), fontsize=18, fontweight="bold", va="center")
    figure.text(0.022, 0.905, shorten(subtitle, 170), fontsize=11.5, color=_MUTED, va="center")
    margins = {"left": 0.062, "right": 0.978, "top": 0.79, "bottom": 0.07}
    return figure, figure.add_gridspec(num_rows, 2, **margins, width_ratios=(1.1, 1), wspace=0.62, hspace=0.28)


def _save(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def _legend(figure: Any, roles: Iterable[str], role_styles: Mapping[str, Style]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=shorten(role, 24), **_fill(role_styles[role])) for role in dict.fromkeys(roles)]
    if handles:
        figure.legend(
            handles=handles[:16],
            loc="upper left",
            bbox_to_anchor=(0.015, 0.885),
            ncols=min(8, len(handles)),
            frameon=False,
            fontsize=10.5,
            handlelength=1.1,
            handleheight=1.0,
            columnspacing=1.6,
        )


def _fill(style: Style) -> dict[str, Any]:
    return {"facecolor": style.color, "hatch": _HATCH[style.texture], "edgecolor": (1, 1, 1, 0.45), "linewidth": 0}


def _draw_timeline(axes: Any, report: ReportFacts, role_styles: Mapping[str, Style], highest: int) -> list[str]:
    from matplotlib.ticker import MaxNLocator

    num_moments = len(report.moments)
    series, totals, moments = timeline(report, "device", _MAX_COLUMNS)
    # A step plot needs one more edge than columns. The first position may be above 0, because it is the one with most
    # bytes in its range.
    edges = np.append(moments, num_moments).astype(float)
    edges[0] = 0
    roles = [role for role in role_order(report) if role in series and series[role].any()]
    base = np.zeros(len(moments), np.int64)
    for role in roles:
        layer = base + series[role][moments]
        axes.fill_between(
            edges, np.append(base, base[-1]), np.append(layer, layer[-1]), step="post", **_fill(role_styles[role])
        )
        base = layer
    axes.step(edges, np.append(base, base[-1]), where="post", color=_INK, linewidth=0.7)
    top = max(highest, int(totals.max()), 1)
    budget = report.target.budget_bytes
    if budget is not None and budget <= 1.5 * top:
        top = max(top, budget)
        axes.axhline(budget, color="#b3261e", linewidth=1.3, linestyle=(0, (5, 3)))
        axes.text(
            num_moments, budget, f"limit {format_bytes(budget)}", ha="right", va="bottom", color="#b3261e", bbox=_BOX
        )
    axes.set_xlim(0, num_moments)
    axes.set_ylim(0, top * 1.12)
    ticks = byte_ticks(top)
    axes.set_yticks(ticks, [format_bytes(tick).replace(".00 ", " ") if tick else "0" for tick in ticks])
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_xlabel("moment of the program", color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    peak_x, size = report.peak_moment + 0.5, int(totals[report.peak_moment])
    if size:
        axes.plot([peak_x], [size], "o", color=_INK, markersize=5, clip_on=False)
        is_right = peak_x > num_moments * 0.7
        axes.annotate(
            f"peak {format_bytes(size)}", (peak_x, size), xytext=(-8 if is_right else 8, 7), textcoords="offset points",
            ha="right" if is_right else "left", fontweight="bold",
        )  # fmt: skip
    return roles


def _draw_owners(axes: Any, report: ReportFacts, role_styles: Mapping[str, Style]) -> None:
    groups = group_buffers(at_peak(report, "device"))
    shown, remaining = groups[:_MAX_BARS], groups[_MAX_BARS:]
    sizes = [group.num_bytes for group in shown] + [sum(g.num_bytes for g in remaining)] * bool(remaining)
    names = [shorten(with_source(g.text, g, 44), 44) for g in shown] + [f"{len(remaining):,} smaller"] * bool(remaining)
    bar_styles = [role_styles[g.buffers[0].role] for g in shown] + [Style(color="#b4bac2")] * bool(remaining)
    _bars(axes, names, sizes, bar_styles, [format_bytes(size) for size in sizes])
    axes.set_title("Largest owners at the peak", loc="left", fontsize=11, color=_MUTED)


def _draw_changes(axes: Any, difference: DiffFacts) -> None:
    groups = [g for g in group_rows(r for r in difference.rows if r.space == "device") if g.delta_bytes]
    shown, remaining = groups[:_MAX_BARS], groups[_MAX_BARS:]
    deltas = [g.delta_bytes for g in shown] + [sum(g.delta_bytes for g in remaining)] * bool(remaining)
    names = [f"{shorten(row_text(g), 32)}  {shorten(g.role, 12)}" for g in shown]
    names += [f"{len(remaining):,} smaller changes"] * bool(remaining)
    growth, decline = Style(color="#c2410c", texture="/"), Style(color="#12805c")
    bar_styles = [growth if delta > 0 else decline for delta in deltas]
    _bars(axes, names, deltas, bar_styles, [signed(delta) for delta in deltas])
    axes.axvline(0, color=_MUTED, linewidth=0.8)
    axes.set_title("Owners that changed most" if deltas else "No owner changed", loc="left", fontsize=11, color=_MUTED)


def _bars(axes: Any, names: list[str], sizes: list[int], bar_styles: list[Style], texts: list[str]) -> None:
    from matplotlib.patches import Rectangle

    low, high = min([0, *sizes]), max([0, *sizes])
    span = max(1, high - low)
    for row, (size, style) in enumerate(zip(sizes, bar_styles, strict=True)):
        axes.add_patch(Rectangle((min(0, size), row - 0.34), abs(size), 0.68, **_fill(style)))
        is_negative = size < 0
        axes.annotate(
            texts[row], (size, row), xytext=(-5 if is_negative else 5, 0), textcoords="offset points", va="center",
            ha="right" if is_negative else "left", fontsize=10,
        )  # fmt: skip
    axes.set_xlim(low - (0.3 * span if low < 0 else 0), high + (0.3 * span if high > 0 else 0.02 * span))
    axes.set_ylim(max(len(sizes), 6) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names, fontsize=9.5, color=_INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def byte_ticks(top: int, count: int = 5) -> list[int]:
    """Return about `count` sizes up to `top`: multiples of 1, 2 or 5 times a power of ten, in a binary unit."""
    unit = 1
    while top >= unit * 1024 and unit < 2**40:
        unit *= 1024
    rough = max(top / unit / count, 1 / unit)
    scale = 10.0 ** np.floor(np.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough * 0.999)
    return [round(index * step * unit) for index in range(int(top / unit / step + 1e-9) + 1)]
