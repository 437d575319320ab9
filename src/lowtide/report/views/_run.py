"""A training run as one HTML file that needs no network and no script, and the data of that page.

The data is independent of the trainer. Curves are SVG that is stretched to the available width. Strokes keep their
width, and labels are HTML of a fixed size. Text from data is escaped.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ...core import format_bytes
from .._facts import SPACES, ReportFacts, Space
from ._content import drawn_buffers, peak_moment, role_order, timeline
from ._html import asset, definition_list, fill_template, roles_table
from ._styles import styles

Points = Sequence[tuple[float, float | None]]
"""A curve: pairs (step, value); a value None is a gap."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """The quantity, with its unit."""
    curves: Mapping[str, Points]
    """The curves by name, at most three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The contents of a training run's page."""

    name: str
    """Name of the run."""
    verdict: str
    """The result in one sentence."""
    facts: Sequence[tuple[str, str]]
    """The most important figures, as pairs (name, value)."""
    charts: Sequence[Chart]
    """Charts over the steps; a chart without values shows a note."""
    samples: Mapping[str, tuple[str, str]]
    """Maps the title of a sample to its prompt and continuation."""
    tables: Mapping[str, Sequence[tuple[str, str]]]
    """Maps the title of a table to its rows, which are pairs (name, value)."""
    notes: Sequence[str] = ()
    """Lines at the end of the page."""


_MAX_POINTS = 400
"""Most columns of a curve. With more points, a column shows the mean of its points, and a band their range."""
_TITLES = {"device": "Memory of a step, on the device", "host": "Memory of a step, on the host"}


def run_page(run: RunFacts, memory: ReportFacts | None = None) -> bytes:
    """Make the page of a run.

    Args:
        run: the contents.
        memory: the memory report of the training step; None for a page without it.

    Returns:
        A whole HTML file in UTF-8.
    """
    parts = [
        f'<dl class="facts">{definition_list(run.facts)}</dl>',
        f'<div class="charts">{"".join(_chart(chart) for chart in run.charts)}</div>',
        _samples(run.samples),
        *_memory(memory),
        *(_card(title, f'<dl class="rows">{definition_list(rows)}</dl>') for title, rows in run.tables.items() if rows),
    ]
    values = {
        "title": html.escape(f"{run.name} · training run"),
        "name": html.escape(run.name),
        "verdict": html.escape(run.verdict),
        "style": asset("page.css") + asset("run.css"),
        "body": "\n".join(part for part in parts if part),
        "footer": "".join(f"<p>{html.escape(note)}</p>" for note in run.notes),
    }
    return fill_template(asset("run.html"), values).encode("utf-8", "xmlcharrefreplace")


def _card(title: str, inner: str, legend: str = "") -> str:
    head = f'<div class="card-head"><h2>{html.escape(title)}</h2>{legend}</div>'
    return f'<section class="card">{head}{inner}</section>'


def _samples(samples: Mapping[str, tuple[str, str]]) -> str:
    if not samples:
        return ""
    texts = "".join(
        f"<div><h3>{html.escape(title)}</h3>"
        f'<p class="sample"><span class="prompt">{html.escape(prompt)}</span>{html.escape(text)}</p></div>'
        for title, (prompt, text) in samples.items()
    )
    return _card("Samples", f'<div class="samples">{texts}</div>')


def _chart(chart: Chart) -> str:
    curves = {name: _finite(points) for name, points in chart.curves.items()}
    curves = {name: points for name, points in curves.items() if np.isfinite(points[1]).any()}
    if not curves:
        return _card(chart.title, '<p class="empty">no values</p>')
    steps = np.concatenate([points[0] for points in curves.values()])
    values = np.concatenate([points[1] for points in curves.values()])
    x = _ticks(float(steps.min()), float(steps.max()), 4, is_integer=True)
    y = _ticks(float(np.nanmin(values)), float(np.nanmax(values)), 5)
    start, end = float(steps.min()), max(float(steps.max()), float(steps.min()) + 1)
    low, high = min(y[0], float(np.nanmin(values))), max(y[-1], float(np.nanmax(values)))

    def to_percent(step: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.stack([(step - start) / (end - start) * 100, 100 - (value - low) / (high - low) * 100], axis=-1)

    paths = "".join(_curve(points, number, to_percent) for number, points in enumerate(curves.values()))
    rows = [((high - tick) / (high - low) * 100, f"{tick:,.10g}") for tick in y if low <= tick <= high]
    marks = [((tick - start) / (end - start) * 100, f"{tick:,.0f}") for tick in x if start <= tick <= end]
    keys = "".join(f'<span><i class="key c{n}"></i>{html.escape(name)}</span>' for n, name in enumerate(curves))
    legend = f'<div class="legend inline">{keys}</div>' if len(chart.curves) > 1 else ""
    return _card(chart.title, _plot(chart.title, paths, rows, marks), legend)


def _finite(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values in order; a value that is not finite becomes NaN, which breaks the curve."""
    ordered = sorted(points, key=lambda point: point[0])
    values = [math.nan if value is None or not math.isfinite(value) else value for _, value in ordered]
    return np.array([step for step, _ in ordered], float), np.array(values, float)


def _curve(points: tuple[np.ndarray, np.ndarray], number: int, to_percent: Callable[..., np.ndarray]) -> str:
    steps, means, minima, maxima = _columns(*points)
    # With fewer columns than points, a band shows the range that each mean hides.
    band = ""
    if len(points[0]) > len(steps):
        for run in _runs(means):
            if len(run) > 1:
                outline = [*to_percent(steps[run], maxima[run]), *to_percent(steps[run], minima[run])[::-1]]
                band += f'<path class="band c{number}" d="M{_path(outline)}Z"/>'
    lines = [to_percent(steps[run], means[run]) for run in _runs(means)]
    # "h0" draws a line of length zero, whose round caps show a single point as a dot.
    joined = "".join(f"M{_path(line)}" + ("" if len(line) > 1 else "h0") for line in lines)
    dots = ""
    if len(steps) <= 40:
        dot_path = "".join(f"M{_path([dot])}h0" for line in lines for dot in line)
        dots = f'<path class="dot c{number}" d="{dot_path}"/>'
    return f'{band}<path class="curve c{number}" d="{joined}"/>{dots}'


def _columns(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, means, smallest values and largest values of at most `_MAX_POINTS` columns."""
    if len(steps) <= _MAX_POINTS:
        return steps, values, values, values
    # Columns are equal ranges of steps, not of records, so a range without a record is a gap.
    bounds = np.linspace(steps[0], steps[-1], _MAX_POINTS + 1)
    edges = [0, *np.searchsorted(steps, bounds[1:-1]), len(steps)]
    rows: list[tuple[float, ...]] = []
    for low, high in pairwise(edges):
        chunk = values[low:high][np.isfinite(values[low:high])]
        rows.append((chunk.mean(), chunk.min(), chunk.max()) if len(chunk) else (math.nan,) * 3)
    centers = (bounds[:-1] + bounds[1:]) / 2
    centers[0], centers[-1] = steps[0], steps[-1]  # the curve spans the whole range
    return centers, *np.array(rows).T


def _runs(values: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each range of values without a gap."""
    good = np.flatnonzero(np.isfinite(values))
    return [run for run in np.split(good, np.flatnonzero(np.diff(good) > 1) + 1) if len(run)]


def _path(points: Iterable[Sequence[float]]) -> str:
    return "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def _ticks(low: float, high: float, count: int, *, is_integer: bool = False) -> list[float]:
    """Return distinct round numbers from below the smallest to above the largest value."""
    if high <= low:
        margin = max(abs(low) * 0.1, 1e-12)
        low, high = (low, low + 1) if is_integer else (low - margin, high + margin)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= raw * 0.999)
    step = max(1.0, round(step)) if is_integer else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 15) for number in range(first, last + 1)]


def _plot(title: str, markup: str, rows: Sequence[tuple[float, str]], marks: Sequence[tuple[float, str]]) -> str:
    """Add axes to SVG `markup` of 100 by 100; `rows` and `marks` are positions in percent and their labels."""
    lines = "".join(f'<path class="grid" d="M0 {position:.2f}H100"/>' for position, _ in rows)
    row_labels = "".join(f'<span style="top:{position:.2f}%">{html.escape(text)}</span>' for position, text in rows)
    widest = max((text for _, text in rows), key=len, default="")
    mark_labels = "".join(
        f'<span style="left:{position:.2f}%;transform:translateX(-{position:.0f}%)">{html.escape(text)}</span>'
        for position, text in marks
    )
    return (
        f'<div class="plot"><div class="beside"><i>{html.escape(widest)}</i>{row_labels}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">'
        f'{lines}{markup}</svg><div class="below">{mark_labels}</div></div>'
    )


def _memory(report: ReportFacts | None) -> list[str]:
    if report is None:
        return []
    spaces: list[Space] = [space for space in SPACES if drawn_buffers(report, space)]
    # With a single position every role has a constant size, which the table shows in less space.
    timelines = [_timeline(report, space) for space in spaces if len(report.moments) > 1]
    return [*timelines, _card("Bytes of a step by role", f'<div class="scroll">{roles_table(report)}</div>')]


def _timeline(report: ReportFacts, space: Space) -> str:
    """Draw the live bytes of a space over the program, stacked by role."""
    series, totals, moments = timeline(report, space, _MAX_POINTS)
    roles = [role for role in role_order(report) if role in series]
    highest, units = max(float(totals.max()), 1.0), ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(highest) // 10), len(units) - 1)
    y = _ticks(0.0, highest / 1024.0**power, 4)
    top = y[-1] * 1024.0**power
    x = np.linspace(0, 100, len(moments)) if len(moments) > 1 else np.array([0.0, 100.0])
    moments = moments if len(moments) > 1 else np.repeat(moments, 2)
    base, shapes, role_styles = np.zeros(len(moments)), "", styles(role_order(report))
    for role in roles:
        upper = base + series[role][moments]
        edge = [*zip(x, 100 - upper / top * 100, strict=True)]
        floor = [*zip(x, 100 - base / top * 100, strict=True)][::-1]
        shapes += f'<path class="area" style="fill:{role_styles[role].color}" d="M{_path([*edge, *floor])}Z"/>'
        base = upper
    peak = peak_moment(report, space)
    keys = "".join(
        f'<span><i class="swatch" style="background:{role_styles[role].color}"></i>{html.escape(role)} '
        f"{format_bytes(int(series[role][peak]))}</span>"
        for role in reversed(roles)
    )
    rows = [(100 - tick / y[-1] * 100, f"{tick:.10g} {units[power]}") for tick in y]
    plot = _plot(_TITLES[space], shapes, rows, [(0.0, "start"), (100.0, "end of the program")])
    return _card(_TITLES[space], f'{plot}<div class="legend inline keys">{keys}</div>')
