"""Views of a simulated schedule: in a terminal, as PNG or SVG, and as a trace for Perfetto.

Each rank is a row, and time runs to the right. The colour shows the pass (F blue, I and B warm, W green). Its shade
shows the chunk: later stages of a rank are lighter. The number is the microbatch. A second plot shows the memory of
each rank over time.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

from ...core import ConfigError
from ._actions import Action, Kind
from ._timeline import Timeline

if TYPE_CHECKING:
    from rich.text import Text

_COLOURS = {
    Kind.FORWARD: ("#4c78c8", "#9db8e6"),
    Kind.INPUT: ("#e0802b", "#f2bd8c"),
    Kind.BACKWARD: ("#c2452d", "#e59c8d"),
    Kind.WEIGHT: ("#3f9a5a", "#9bd0ab"),
}
_NAMES = {Kind.FORWARD: "forward", Kind.INPUT: "input", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight"}
_INK, _QUIET, _IDLE = "#1a1d21", "#5b6470", "#eef0f3"
_MAX_LABELS = 4000
"""Largest number of actions whose microbatch numbers are drawn; more would be unreadable."""


def _colour(simulation: Timeline, action: Action) -> str:
    stages = simulation.schedule.stages_of(simulation.schedule.placement[action.stage])
    return _COLOURS[action.kind][min(stages.index(action.stage), 1)]


def terminal(simulation: Timeline, width: int, *, has_colours: bool) -> Text:
    """Draw a line for each rank, `width` columns wide, with the number of a microbatch where its pass starts.

    Colours show the kind of a pass. Without colours its letter does, and numbers are left out where they do not fit.
    """
    from rich.text import Text

    label = len(f"rank {simulation.schedule.num_ranks - 1} ")
    columns = max(width - label, 20)
    scale = columns / simulation.makespan
    text = Text()
    for rank, order in enumerate(simulation.schedule.orders):
        cells: list[tuple[str, str]] = [("·", _QUIET)] * columns
        for action, start, end in zip(order, simulation.starts[rank], simulation.ends[rank], strict=True):
            begin = min(round(start * scale), columns - 1)
            length = max(round(end * scale) - begin, 1)
            name = str(action.microbatch)[-length:]
            if not has_colours:
                name = f"{action.kind}{action.microbatch}"
                name = name if len(name) <= length else str(action.kind)
            style = f"black on {_colour(simulation, action)}"
            cells[begin : begin + length] = [(char, style) for char in name.ljust(length)]
        text.append(f"rank {rank}".ljust(label))
        for char, style in cells[:columns]:
            text.append(char, style=style)
        text.append("\n")
    for kind in Kind:
        if any(action.kind is kind for order in simulation.schedule.orders for action in order):
            text.append(f" {kind} ", style=f"black on {_COLOURS[kind][0]}")
            text.append(f" {_NAMES[kind]}  ", style="dim")
    return text


def picture(simulation: Timeline, form: str) -> bytes:
    """Draw the schedule over time and the memory of each rank, as ``"png"`` (1600 pixels wide) or ``"svg"``.

    Raises `ConfigError` when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib", hint='pip install "lowtide[report]"') from error

    num_ranks = simulation.schedule.num_ranks
    heights = [max(0.38 * num_ranks, 1.6), 1.6]
    figure = Figure(figsize=(16, sum(heights) + 1.6), dpi=100, facecolor="white", layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_actions(upper, simulation)
    _draw_memory(lower, simulation)
    content = io.BytesIO()
    figure.savefig(content, format=form)
    return content.getvalue()


def _draw_actions(axes: Any, simulation: Timeline) -> None:
    from matplotlib.patches import Patch

    schedule = simulation.schedule
    has_labels = sum(map(len, schedule.orders)) <= _MAX_LABELS
    shortest = simulation.makespan * 0.011
    for rank, order in enumerate(schedule.orders):
        axes.broken_barh([(0, simulation.makespan)], (rank - 0.42, 0.84), facecolors=_IDLE)
        spans = list(zip(simulation.starts[rank], simulation.ends[rank], strict=True))
        bars = [(start, end - start) for start, end in spans]
        colours = [_colour(simulation, action) for action in order]
        axes.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0.6)
        for action, (start, end) in zip(order, spans, strict=True):
            if has_labels and end - start >= shortest:
                axes.text((start + end) / 2, rank, action.microbatch, ha="center", va="center", fontsize=8, color=_INK)
    axes.set_ylim(schedule.num_ranks - 0.4, -0.6)  # rank 0 at the top
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    axes.tick_params(length=0, colors=_QUIET)
    how = "asynchronous" if simulation.num_ticks is None else f"in lockstep, {simulation.num_ticks} ticks"
    axes.set_title(
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, {how}: "
        f"time {simulation.makespan:g}, bubble {simulation.bubble:g}",
        loc="left",
        fontsize=12,
        color=_INK,
    )
    kinds = [kind for kind in Kind if any(action.kind is kind for order in schedule.orders for action in order)]
    patches = [Patch(color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in kinds]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), frameon=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_memory(axes: Any, simulation: Timeline) -> None:
    num_ranks = simulation.schedule.num_ranks
    for rank in range(num_ranks):
        times, values = simulation.memory(rank)
        shade = 0.25 + 0.6 * rank / max(num_ranks - 1, 1)
        axes.step(times, values, where="post", color=str(1 - shade), linewidth=1.4, label=f"rank {rank}")
    axes.set_ylabel("memory", color=_QUIET)
    axes.set_xlabel("time", color=_QUIET)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, simulation.makespan)
    axes.tick_params(colors=_QUIET)
    if num_ranks <= 16:
        axes.legend(loc="lower left", ncols=num_ranks, frameon=False, fontsize=8, bbox_to_anchor=(0, 1))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def trace(simulation: Timeline) -> str:
    """Write the schedule as a Chrome trace for https://ui.perfetto.dev, where one unit of time is one millisecond."""
    events: list[dict[str, Any]] = []
    for rank, order in enumerate(simulation.schedule.orders):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action, start, end in zip(order, simulation.starts[rank], simulation.ends[rank], strict=True):
            args = {"stage": action.stage, "microbatch": action.microbatch}
            # Chrome traces count microseconds.
            times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
            events.append(
                {
                    "name": str(action),
                    "cat": _NAMES[action.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    **times,
                    "args": args,
                }
            )
        times_of, values = simulation.memory(rank)
        events += [
            {"name": f"memory of rank {rank}", "ph": "C", "pid": 0, "ts": 1e3 * time, "args": {"kept": value}}
            for time, value in zip(times_of, values, strict=True)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
