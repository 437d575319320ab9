"""Simulation of a schedule without a device: when its actions run, how long ranks wait, and how much memory they hold.

Two modes. Asynchronous ranks run separate programs, as in PyTorch or JaxPP, and each starts its next action as soon as
it can. Ranks in lockstep share one program, whose steps are ticks. A tick lasts as long as its slowest rank.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core import ConfigError, check_type, write_files
from ._schedule import Action, Costs, Ends, Kind, Schedule, ready_time, result_key, sweep
from ._ticks import receiving_ranks, spans, ticks

if TYPE_CHECKING:
    from rich.text import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated schedule: when each action runs, and how much memory each rank holds, for the costs of `simulate`."""

    schedule: Schedule
    costs: Costs
    """Time and memory of each action."""
    starts: tuple[tuple[float, ...], ...]
    """Start time of each action of each rank."""
    ends: tuple[tuple[float, ...], ...]
    """End time of each action. In lockstep, the last action of a rank in a tick ends with the tick."""
    busy: tuple[float, ...]
    """Time that each rank computes."""
    peaks: tuple[float, ...]
    """Largest memory that each rank holds at one time, in the unit of `Costs`. Actions free memory at their end."""
    num_transfers: int
    """Number of activations and gradients that ranks send to each other, in total."""
    num_ticks: int | None = None
    """Number of ticks in lockstep; None for asynchronous ranks."""

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last one."""
        return max(ends[-1] for ends in self.ends if ends)

    @property
    def spans(self) -> tuple[float, ...]:
        """For each rank, time from the start of its first action to the end of its last one.

        When batches follow each other, this is the time that a rank spends on one batch.
        """
        return tuple(e[-1] - s[0] if s else 0.0 for s, e in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Time of one batch in which the busiest rank does not compute."""
        return self.makespan - max(self.busy)

    @property
    def steady_bubble(self) -> float:
        """Largest time that a rank waits when batches follow each other: its `spans` entry minus its `busy` entry.

        Papers call this the bubble of the "longest stage".
        """
        return max(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @property
    def utilization(self) -> float:
        """Fraction of the total time of all ranks in which they compute."""
        return sum(self.busy) / (len(self.busy) * self.makespan)

    def memory(self, rank: int) -> tuple[list[float], list[float]]:
        """Return the memory of a rank over time: the times of its changes, and the new values.

        A forward pass takes its memory at its start. Backward passes change the memory at their end.
        """
        times, values, memory = [0.0], [0.0], 0.0
        for action, start, end in zip(self.schedule.orders[rank], self.starts[rank], self.ends[rank], strict=True):
            memory += self.costs.kept(action)
            time = start if action.kind is Kind.FORWARD else end
            if time == times[-1]:  # memory is freed and taken at the same time
                values[-1] = memory
            else:
                times.append(time)
                values.append(memory)
        return times, values

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Draw the schedule in a terminal, at the width of the terminal."""
        has_colours = console.color_system is not None and not console.no_color
        yield _draw_terminal(self, options.max_width, has_colours=has_colours)

    def to_png(self, path: str | Path | None = None) -> bytes:
        """Draw the schedule over time and the memory of each rank.

        Args:
            path: the file to write, if any.

        Returns:
            Content of the PNG file, 1600 pixels wide.

        Raises:
            ConfigError: when matplotlib is not installed (``pip install "lowtide[report]"``).
            OutputError: when the file cannot be written.
        """
        return _write(path, _draw_picture(self, "png"))

    def to_svg(self, path: str | Path | None = None) -> bytes:
        """Draw the picture of `to_png` as SVG. Arguments, result and errors are those of `to_png`."""
        return _write(path, _draw_picture(self, "svg"))

    def to_trace(self, path: str | Path | None = None) -> bytes:
        """Write a Chrome trace for https://ui.perfetto.dev, where one unit of time is one millisecond.

        Args:
            path: the file to write, if any.

        Returns:
            Content of the JSON file.

        Raises:
            OutputError: when the file cannot be written.
        """
        return _write(path, _make_trace(self).encode())


def simulate(schedule: Schedule, costs: Costs | None = None, *, lockstep: bool = False) -> Simulation:
    """Compute start times, end times and memory of a schedule without a device.

    Args:
        schedule: the schedule to simulate.
        costs: time and memory of actions; by default `Costs()`, where F, I and W take one unit of time each.
        lockstep: whether all ranks run the same ticks, as in one program. A tick lasts as long as its slowest rank.
            Transfers overlap with other passes of the same tick or of the next one.

    Returns:
        Times and memory.

    Raises:
        ConfigError: for costs that do not match the number of stages, or an argument that is not a schedule.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> simulate(schedule("1f1b", num_stages=4, num_microbatches=8)).bubble
        9.0
    """
    hint = 'call simulate(schedule("1f1b", num_stages=4, num_microbatches=8))'
    check_type("schedule", schedule, Schedule, "a lowtide.pipeline.Schedule", hint=hint)
    costs = costs or Costs()
    costs.refuse_other(schedule.num_stages)
    starts, ends, num_ticks = (_lockstep if lockstep else _asynchronous)(schedule, costs)
    num_hops = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    return Simulation(
        schedule=schedule,
        costs=costs,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        busy=tuple(sum(map(costs.of, order)) for order in schedule.orders),
        peaks=tuple(_peak(order, costs) for order in schedule.orders),
        num_transfers=2 * num_hops * schedule.num_microbatches,
        num_ticks=num_ticks,
    )


def scan_makespan(schedule: Schedule, costs: Costs) -> float:
    """Compute the makespan of a loop over ticks that JAX differentiates, as in most JAX pipelines.

    In each tick a rank runs the forward passes of all its stages on one microbatch. The reverse loop runs the backward
    passes in the same way. Each rank holds the residuals of all microbatches.

    Args:
        schedule: gives the stages, the ranks and the number of microbatches; its order is not used.
        costs: time of passes and of transfers. The result has the same unit.

    Raises:
        ConfigError: for costs that do not match the number of stages.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> scan_makespan(schedule("1f1b", num_stages=4, num_microbatches=8), Costs())
        33.0
    """
    costs.refuse_other(schedule.num_stages)
    num_ticks = schedule.num_microbatches + schedule.num_ranks - 1
    transfer = costs.communication if schedule.num_ranks > 1 else 0.0
    total = 0.0
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        rank_times = [0.0] * schedule.num_ranks
        for stage, rank in enumerate(schedule.placement):
            rank_times[rank] += costs.of(Action(stage, kind, 0))
        total += num_ticks * (max(rank_times) + transfer)
    return total


def _write(path: str | Path | None, content: bytes) -> bytes:
    if path is not None:
        write_files(Path(path).parent, {Path(path).name: content})
    return content


_Times = list[list[float]]


def _asynchronous(schedule: Schedule, costs: Costs) -> tuple[_Times, _Times, None]:
    starts: _Times = [[] for _ in schedule.orders]
    ends: _Times = [[] for _ in schedule.orders]
    finished: Ends = {}

    def run(rank: int, action: Action) -> bool:
        start = ready_time(action, schedule.placement, finished, costs.communication)
        if start == math.inf:
            return False
        starts[rank].append(max([start, *ends[rank][-1:]]))
        ends[rank].append(starts[rank][-1] + costs.of(action))
        finished[result_key(action)] = ends[rank][-1]
        return True

    sweep(schedule.orders, run)
    return starts, ends, None


def _lockstep(schedule: Schedule, costs: Costs) -> tuple[_Times, _Times, int]:
    starts: _Times = [[] for _ in schedule.orders]
    ends: _Times = [[] for _ in schedule.orders]
    time, table, receivers = 0.0, ticks(schedule), set[int]()
    for row in table:
        rank_spans = [
            spans(cell, schedule.placement, costs, is_sent=rank in receivers) for rank, cell in enumerate(row)
        ]
        length = max(span.end for span in rank_spans)
        for rank, span in enumerate(rank_spans):
            # The last action of a rank in a tick ends with the tick, because the rank waits for the slowest one.
            starts[rank] += [time + start for start in span.begins]
            ends[rank] += [time + end for end in (*span.ends[:-1], length)[: len(span.ends)]]
        time, receivers = time + length, receiving_ranks(row, schedule.placement)
    return starts, ends, len(table)


def _peak(order: tuple[Action, ...], costs: Costs) -> float:
    memory = peak = 0.0
    for action, following in itertools.zip_longest(order, order[1:]):
        memory += costs.kept(action)
        # The cotangents between I and a W that follows at once are not counted, as `Costs.cotangents` documents.
        if not (action.kind is Kind.INPUT and following is not None and following.kind is Kind.WEIGHT):
            peak = max(peak, memory)
    return peak


# Each rank is a row, and time runs to the right. The colour shows the pass (F blue, I and B warm, W green). Its shade
# shows the stage: later stages of a rank are lighter. The number is the microbatch. A second plot shows the memory of
# each rank over time.
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


def _colour(simulation: Simulation, action: Action) -> str:
    stages = simulation.schedule.stages_of(simulation.schedule.placement[action.stage])
    return _COLOURS[action.kind][min(stages.index(action.stage), 1)]


def _draw_terminal(simulation: Simulation, width: int, *, has_colours: bool) -> Text:
    """Draw a line for each rank, `width` columns wide, with the number of a microbatch where its pass starts.

    Colours show the kind of a pass. Without colours, letters show it, and numbers that do not fit are left out.
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


def _draw_picture(simulation: Simulation, form: str) -> bytes:
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


def _draw_actions(axes: Any, simulation: Simulation) -> None:
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


def _draw_memory(axes: Any, simulation: Simulation) -> None:
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


def _make_trace(simulation: Simulation) -> str:
    events: list[dict[str, Any]] = []
    for rank, order in enumerate(simulation.schedule.orders):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for action, start, end in zip(order, simulation.starts[rank], simulation.ends[rank], strict=True):
            event = {"name": str(action), "cat": _NAMES[action.kind], "ph": "X", "pid": 0, "tid": rank}
            times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}  # Chrome traces count microseconds
            events.append({**event, **times, "args": {"stage": action.stage, "microbatch": action.microbatch}})
        times_of, values = simulation.memory(rank)
        events += [
            {"name": f"memory of rank {rank}", "ph": "C", "pid": 0, "ts": 1e3 * time, "args": {"kept": value}}
            for time, value in zip(times_of, values, strict=True)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
