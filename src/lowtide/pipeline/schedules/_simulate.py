"""When a schedule's actions run, how long ranks wait, and what they keep, without a device.

Two machines: ranks that run by themselves (many programs, as PyTorch or JaxPP run a pipeline), where each does its next
action as soon as it can; and ranks in lockstep (one program), where a tick lasts as long as its slowest rank.
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
from ._schedule import Ends, Schedule, gives, ready, sweep
from ._ticks import sent_to, spans, ticks
from ._timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation(Timeline):
    """A schedule in time. Simulated, with the costs it was given."""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Draw the schedule in a terminal, as wide as it."""
        has_colours = console.color_system is not None and not console.no_color
        yield views.terminal(self, options.max_width, has_colours=has_colours)

    def to_png(self, path: str | Path | None = None) -> bytes:
        """Draw the schedule over time and what each rank keeps.

        Args:
            path: the file to write, if any.

        Returns:
            Its content, 1600 pixels wide.

        Raises:
            ConfigError: when matplotlib is not installed (``pip install "lowtide[report]"``).
            OutputError: when the file cannot be written.
        """
        return _written(path, views.picture(self, "png"))

    def to_svg(self, path: str | Path | None = None) -> bytes:
        """Draw the picture of `to_png` as SVG; arguments, result and errors as there."""
        return _written(path, views.picture(self, "svg"))

    def to_trace(self, path: str | Path | None = None) -> bytes:
        """Write a Chrome trace, for https://ui.perfetto.dev: a unit of time is a millisecond there.

        Args:
            path: the file to write, if any.

        Returns:
            Its content, JSON.

        Raises:
            OutputError: when the file cannot be written.
        """
        return _written(path, views.trace(self).encode())


def simulate(schedule: Schedule, costs: Costs | None = None, *, lockstep: bool = False) -> Simulation:
    """Run a schedule on paper.

    Args:
        schedule: what to run.
        costs: time and memory of actions; by default one unit each.
        lockstep: whether ranks go through the same ticks, as in one program, where a tick lasts as long as its slowest
            rank, and what is sent is on its way while other passes of the tick, or of the next one, run.

    Returns:
        Times and memory.

    Raises:
        ConfigError: for costs of another number of stages, or what is no schedule.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> simulate(schedule("1f1b", num_stages=4, num_microbatches=8)).bubble
        9.0
    """
    given: Any = schedule
    if not isinstance(given, Schedule):
        raise ConfigError(
            "only schedules can be simulated",
            expected="a lowtide.pipeline.Schedule",
            got=repr(given),
            hint='simulate(schedule("1f1b", num_stages=4, num_microbatches=8))',
        )
    costs = costs or Costs()
    costs.refuse_other(schedule.num_stages)
    starts, ends, num_ticks = (_lockstep if lockstep else _asynchronous)(schedule, costs)
    hops = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    return Simulation(
        schedule=schedule,
        costs=costs,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        busy=tuple(sum(map(costs.of, order)) for order in schedule.orders),
        peaks=tuple(_peak(order, costs) for order in schedule.orders),
        num_transfers=2 * hops * schedule.num_microbatches,
        num_ticks=num_ticks,
    )


def scan_makespan(schedule: Schedule, costs: Costs) -> float:
    """Time that the same ranks take for one loop over ticks that is differentiated, as most JAX trainers pipeline.

    In a tick every rank takes all its stages' forward passes, on the way back their backward passes, of one microbatch;
    each keeps what all microbatches leave.

    Args:
        schedule: its stages and microbatches; not its order.
        costs: of its stages.

    Examples:
        >>> from lowtide.pipeline import schedule
        >>> scan_makespan(schedule("1f1b", num_stages=4, num_microbatches=8), Costs())
        33.0
    """
    num_ticks = schedule.num_microbatches + schedule.num_ranks - 1
    sent = costs.communication if schedule.num_ranks > 1 else 0.0
    total = 0.0
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        of_ranks = [0.0] * schedule.num_ranks
        for stage, rank in enumerate(schedule.placement):
            of_ranks[rank] += costs.of(Action(stage, kind, 0))
        total += num_ticks * (max(of_ranks) + sent)
    return total


def _written(path: str | Path | None, content: bytes) -> bytes:
    if path is not None:
        write_files(Path(path).parent, {Path(path).name: content})
    return content


_Times = list[list[float]]


def _asynchronous(schedule: Schedule, costs: Costs) -> tuple[_Times, _Times, None]:
    starts: _Times = [[] for _ in schedule.orders]
    ends: _Times = [[] for _ in schedule.orders]
    done: Ends = {}

    def run(rank: int, action: Action) -> bool:
        begin = ready(action, schedule.placement, done, costs.communication)
        if begin == math.inf:
            return False
        starts[rank].append(max([begin, *ends[rank][-1:]]))
        ends[rank].append(starts[rank][-1] + costs.of(action))
        done[gives(action)] = ends[rank][-1]
        return True

    sweep(schedule.orders, run)
    return starts, ends, None


def _lockstep(schedule: Schedule, costs: Costs) -> tuple[_Times, _Times, int]:
    starts: _Times = [[] for _ in schedule.orders]
    ends: _Times = [[] for _ in schedule.orders]
    now, table, sent = 0.0, ticks(schedule), set[int]()
    for row in table:
        found = [spans(cell, schedule.placement, costs, is_sent=rank in sent) for rank, cell in enumerate(row)]
        length = max(one.end for one in found)
        for rank, one in enumerate(found):
            starts[rank] += [now + begin for begin in one.begins]
            ends[rank] += [now + end for end in (*one.ends[:-1], length)[: len(one.ends)]]
        now, sent = now + length, sent_to(row, schedule.placement)
    return starts, ends, len(table)


def _peak(order: tuple[Action, ...], costs: Costs) -> float:
    held = most = 0.0
    for action, following in itertools.zip_longest(order, order[1:]):
        held += costs.kept(action)
        if not (action.kind is Kind.INPUT and following is not None and following.kind is Kind.WEIGHT):
            most = max(most, held)
    return most
