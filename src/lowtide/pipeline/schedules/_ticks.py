"""Ticks: what ranks in lockstep do at a time, as one program runs them.

In a tick a rank does at most one pass of each kind, an input pass before a weight pass before a forward pass, so that
memory is freed before it is taken. What a forward pass gives is sent while the next tick's backward passes run, what an
input pass gives while the passes after it in its tick do. A tick lasts as long as its slowest rank.

A schedule that does not say its ticks has one action in each: a rank does its next one in the first tick after those
that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Ends, Schedule, gives, ready, sends_on

Cell = tuple[Action, ...]
"""What a rank does in a tick, in that order."""


def ticks(schedule: Schedule, *, forward_only: bool = False) -> list[tuple[Cell, ...]]:
    """Make the table of a program in lockstep: what each rank does in each tick.

    Args:
        schedule: what to run.
        forward_only: whether to leave the backward pass out, as an evaluation does.

    Returns:
        By tick and rank the actions, in the order in which they run.
    """
    if schedule.ticks is not None and not forward_only:
        rows: list[list[list[Action]]] = [
            [[] for _ in schedule.orders] for _ in range(1 + max(each[-1] for each in schedule.ticks if each))
        ]
        for rank, (order, numbers) in enumerate(zip(schedule.orders, schedule.ticks, strict=True)):
            for action, tick in zip(order, numbers, strict=True):
                rows[tick][rank].append(action)
        return [tuple(map(tuple, row)) for row in rows]
    table: list[tuple[Cell, ...]] = []
    done: Ends = {}
    left = [
        [action for action in reversed(order) if not forward_only or action.kind is Kind.FORWARD]
        for order in schedule.orders
    ]
    while any(left):
        row = [
            (order[-1],) if order and ready(order[-1], schedule.placement, done) < math.inf else () for order in left
        ]
        for order, cell in zip(left, row, strict=True):
            if cell:
                order.pop()
                done[gives(cell[0])] = 0.0
        assert any(row), "a validated schedule never stands still"
        table.append(tuple(row))
    return table


class Spans(NamedTuple):
    """When what a rank does in a tick begins and ends, from the begin of the tick."""

    begins: list[float]
    """Of each action."""
    ends: list[float]
    """Likewise."""
    end: float
    """When it has all that is sent to it and others what it sends."""


def spans(cell: Cell, placement: Sequence[int], costs: Costs, *, is_sent: bool) -> Spans:
    """Time what a rank does in a tick.

    Args:
        cell: its actions.
        placement: rank of each stage.
        costs: of actions.
        is_sent: whether another rank sends it what a forward pass of the tick before gave.
    """
    begins: list[float] = []
    ends: list[float] = []
    now = sent = 0.0
    came = costs.communication if is_sent else 0.0
    for action in cell:
        if action.kind is Kind.FORWARD:
            now = max(now, came)
        begins.append(now)
        now += costs.of(action)
        ends.append(now)
        if action.kind in (Kind.INPUT, Kind.BACKWARD) and sends_on(action, placement):
            sent = now + costs.communication
    return Spans(begins, ends, max(now, came, sent))


def sent_to(row: Sequence[Cell], placement: Sequence[int]) -> set[int]:
    """Return the ranks to which forward passes of a tick send what they give."""
    return {
        placement[action.stage + 1]
        for cell in row
        for action in cell
        if action.kind is Kind.FORWARD and sends_on(action, placement)
    }
