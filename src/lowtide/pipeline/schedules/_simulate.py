"""Simulate a schedule without a device: when its actions run, how long ranks wait, and how much memory they hold.

Two modes. Asynchronous ranks run separate programs, as in PyTorch or JaxPP, and each starts its next action as soon as
it can. Ranks in lockstep share one program, where a tick lasts as long as its slowest rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core import ConfigError, write_files
from . import _views as views
from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Ends, Schedule, ready_time, result_key, sweep
from ._ticks import receiving_ranks, spans, ticks
from ._timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation(Timeline):
    """A simulated schedule: its times and memory follow from the costs that `simulate` received."""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Draw the schedule in a terminal, at the width of the terminal."""
        has_colours = console.color_system is not None and not console.no_color
        yield views.terminal(self, options.max_width, has_colours=has_colours)

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
        return _write(path, views.picture(self, "png"))

    def to_svg(self, path: str | Path | None = None) -> bytes:
        """Draw the picture of `to_png` as SVG. Arguments, result and errors are those of `to_png`."""
        return _write(path, views.picture(self, "svg"))

    def to_trace(self, path: str | Path | None = None) -> bytes:
        """Write a Chrome trace for https://ui.perfetto.dev, where one unit of time is one millisecond.

        Args:
            path: the file to write, if any.

        Returns:
            Content of the JSON file.

        Raises:
            OutputError: when the file cannot be written.
        """
        return _write(path, views.trace(self).encode())


def simulate(schedule: Schedule, costs: Costs | None = None, *, lockstep: bool = False) -> Simulation:
    """Compute start times, end times and memory of a schedule without a device.

    Args:
        schedule: the schedule to simulate.
        costs: time and memory of actions; by default one unit each.
        lockstep: whether all ranks run the same ticks, as in one program. A tick lasts as long as its slowest rank.
            Transfers overlap with other passes of the same tick or of the next one.

    Returns:
        Times and memory.

    Raises:
        ConfigError: for costs of another number of stages, or an argument that is not a schedule.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> simulate(schedule("1f1b", num_stages=4, num_microbatches=8)).bubble
        9.0
    """
    value: Any = schedule
    if not isinstance(value, Schedule):
        raise ConfigError(
            "only schedules can be simulated",
            expected="a lowtide.pipeline.Schedule",
            got=repr(value),
            hint='call simulate(schedule("1f1b", num_stages=4, num_microbatches=8))',
        )
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
    """Compute the time of one loop over ticks that JAX differentiates, the form of most JAX pipelines.

    In each tick a rank runs the forward passes of all its stages on one microbatch. In the reverse loop it runs their
    backward passes. Each rank holds the residuals of all microbatches.

    Args:
        schedule: gives the stages, the ranks and the number of microbatches; its order is not used.
        costs: time of its stages.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> scan_makespan(schedule("1f1b", num_stages=4, num_microbatches=8), Costs())
        33.0
    """
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
