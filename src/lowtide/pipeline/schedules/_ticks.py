"""Ticks: which passes all ranks of one lockstep program run together.

In a tick a rank runs at most one pass of each kind: first an input pass, then a weight pass, then a forward pass. This
order frees memory before it takes memory. A tick lasts as long as its slowest rank. The result of a forward pass is
sent while the backward passes of the next tick run. The result of an input pass is sent while the later passes of its
tick run.

A schedule without explicit ticks has one action in each tick: a rank runs its next action in the first tick after the
ticks of its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Ends, Schedule, ready_time, result_key, sends_result

Cell = tuple[Action, ...]
"""Actions of a rank in a tick, in the order in which it runs them."""


def ticks(schedule: Schedule, *, forward_only: bool = False) -> list[tuple[Cell, ...]]:
    """Make the table of a lockstep program: the actions of each rank in each tick.

    Args:
        schedule: the schedule to run.
        forward_only: whether to leave out the backward passes, as an evaluation does.

    Returns:
        For each tick, the actions of each rank in the order in which they run.
    """
    if schedule.ticks is not None and not forward_only:
        rows: list[list[list[Action]]] = [
            [[] for _ in schedule.orders]
            for _ in range(1 + max(rank_ticks[-1] for rank_ticks in schedule.ticks if rank_ticks))
        ]
        for rank, (order, numbers) in enumerate(zip(schedule.orders, schedule.ticks, strict=True)):
            for action, tick in zip(order, numbers, strict=True):
                rows[tick][rank].append(action)
        return [tuple(map(tuple, row)) for row in rows]
    table: list[tuple[Cell, ...]] = []
    finished: Ends = {}
    remaining = [
        [action for action in reversed(order) if not forward_only or action.kind is Kind.FORWARD]
        for order in schedule.orders
    ]
    while any(remaining):
        row = [
            (order[-1],) if order and ready_time(order[-1], schedule.placement, finished) < math.inf else ()
            for order in remaining
        ]
        for order, cell in zip(remaining, row, strict=True):
            if cell:
                order.pop()
                finished[result_key(cell[0])] = 0.0
        assert any(row), "a validated schedule never stands still"
        table.append(tuple(row))
    return table


class Spans(NamedTuple):
    """Start and end times of the actions of a rank in a tick, relative to the start of the tick."""

    begins: list[float]
    """Start time of each action."""
    ends: list[float]
    """End time of each action."""
    end: float
    """When the rank has received all that others send to it, and its own results have arrived at other ranks."""


def spans(cell: Cell, placement: Sequence[int], costs: Costs, *, is_sent: bool) -> Spans:
    """Compute the times of a rank's actions in a tick.

    With `is_sent`, another rank sends the result of a forward pass of the previous tick to this rank.
    """
    begins: list[float] = []
    ends: list[float] = []
    time = result_arrival = 0.0
    arrival = costs.communication if is_sent else 0.0
    for action in cell:
        if action.kind is Kind.FORWARD:
            time = max(time, arrival)
        begins.append(time)
        time += costs.of(action)
        ends.append(time)
        if action.kind in (Kind.INPUT, Kind.BACKWARD) and sends_result(action, placement):
            result_arrival = time + costs.communication
    return Spans(begins, ends, max(time, arrival, result_arrival))


def receiving_ranks(row: Sequence[Cell], placement: Sequence[int]) -> set[int]:
    """Return the ranks that receive the result of a forward pass of this tick."""
    return {
        placement[action.stage + 1]
        for cell in row
        for action in cell
        if action.kind is Kind.FORWARD and sends_result(action, placement)
    }
