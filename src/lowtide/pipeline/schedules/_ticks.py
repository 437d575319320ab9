"""Ticks: the passes that ranks of one lockstep program run together, and the tables that such a program reads.

A tick is one step of all ranks, and lasts as long as its slowest rank. In a tick a rank runs at most one pass of each
kind: first an input pass, then a weight pass, then a forward pass. This order frees memory before it takes memory. The
result of a forward pass is sent while the backward passes of the next tick run. The result of an input pass is sent
while the later passes of its tick run.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...core import ScheduleError
from ._schedule import Action, Costs, Ends, Kind, Schedule, reader_of, ready_time, result_key, sends_result

Cell = tuple[Action, ...]
"""Actions of a rank in a tick, in the order in which they run."""


def ticks(schedule: Schedule, *, forward_only: bool = False) -> list[tuple[Cell, ...]]:
    """Make the table of a lockstep program: the actions of each rank in each tick.

    If the schedule has no explicit ticks (`Schedule.ticks`), or with `forward_only`, a rank runs at most one action in
    a tick. Its next action runs in the first tick after the ticks that compute the inputs of the action.

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
    ends: list[float]
    end: float
    """Time at which the rank's actions have ended, the activation from the previous tick has arrived, and the input
    gradient that the rank sends has arrived. The rank sends its own activation in the next tick."""


def spans(cell: Cell, placement: Sequence[int], costs: Costs, *, is_sent: bool) -> Spans:
    """Compute the times of a rank's actions in a tick.

    `is_sent` is True if this rank receives an activation that another rank computed in the previous tick.
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


# A slot is an entry of a buffer. Two kinds of values occupy slots: messages (activations or cotangents from another
# stage), and values that a pass saves for a later pass. A value occupies its slot from its arrival, or the start of the
# pass that saves it, until its last reader starts.

KINDS = ("F", "I", "W")
"""The passes of a row, in order. A row is one iteration of the program's loop: the forward pass of a tick, then the
backward passes of the next tick.

So each pass reads values that earlier passes of its row or earlier rows wrote, and no later pass of its row overwrites
them. A whole backward pass is I and W of one microbatch in one row."""
_PASS_COLUMNS = ("runs", "chunk", "microbatch", "is_first", "is_last", "num_layers", "message")
"""Columns of each pass: whether it runs; its chunk (the index of its stage on the rank) and microbatch; whether its
stage is the first or last one; the number of layers of the stage; the slot of the message that the pass reads."""
_ARRIVAL_COLUMNS = ("from_left", "from_right", "from_here")
"""Columns of slots for results that arrive from the left or right neighbour or from this rank (-1: none)."""
_PASS_STARTS = {"F": 0, "I": 2, "W": 4}
"""Moment (0 to 7) of a row at which each pass starts. The result of the row's forward pass arrives at moment 1 if it
stays on its rank, and at moment 6 otherwise. Results of the input passes of the previous row arrive at moment 1."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A value that one pass saves for a later pass of the same stage and microbatch."""

    column: str
    """Table column that holds its slot."""
    part: str
    """Part of the model that saves it: ``first`` (only in stage 0) or ``blocks`` (in every stage)."""
    producer: str
    """The pass that computes it: F or I."""
    reader: str
    """The last pass that reads it: I or W."""
    buffer: str
    """Buffer that holds it, together with other values of its shape."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as a table that one program reads, with a slot for each message and saved value."""

    columns: tuple[str, ...]
    """Names of the C columns, such as ``F/chunk``: a pass of `KINDS` and a field. Fields are `_PASS_COLUMNS`,
    `_ARRIVAL_COLUMNS` (for results of the pass), and the columns of saved values."""
    rows: np.ndarray
    """Table entries by row, rank and column, int32 of shape [T, R, C]."""
    used: dict[str, tuple[int, ...]]
    """Number of slots that each rank uses, for each buffer of saved values and for ``messages``."""

    @property
    def num_messages(self) -> int:
        """Number of slots of every rank's buffer for messages; at least 1, even if no stage receives messages."""
        return max(1, *self.used["messages"])

    def comes(self, kind: str, name: str) -> bool:
        """Return whether any result of an F or I pass (`kind`) arrives from a source such as ``from_left``."""
        return bool((self.rows[:, :, self.columns.index(f"{kind}/{name}")] >= 0).any())


def tables(
    schedule: Schedule, layers_per_stage: Sequence[int], waiting: Sequence[Waiting] = (), *, forward_only: bool = False
) -> Tables:
    """Make the tables of a schedule, with slots for messages and for saved values (`waiting`).

    `layers_per_stage` is the number of layers of each stage. `forward_only` omits the backward passes. Raises
    `ScheduleError` when consecutive stages are on ranks that are not neighbours.
    """
    _refuse_distant_ranks(schedule)
    table = ticks(schedule, forward_only=forward_only)
    pass_rows = _pass_rows(table)
    chunks = {stage: i for rank in range(schedule.num_ranks) for i, stage in enumerate(schedule.stages_of(rank))}
    slots, counts = _saved_value_slots(schedule, pass_rows, waiting)
    messages, counts["messages"] = _assign_slots(_message_lifetimes(schedule, pass_rows))
    names = (*_PASS_COLUMNS, *_ARRIVAL_COLUMNS, *(saved_value.column for saved_value in waiting))
    columns = {f"{kind}/{name}": i for i, (kind, name) in enumerate(itertools.product(KINDS, names))}
    rows = np.zeros((1 + max(pass_rows.values()), schedule.num_ranks, len(columns)), np.int32)
    rows[:, :, [i for name, i in columns.items() if name.partition("/")[2] in _ARRIVAL_COLUMNS]] = -1
    for (stage, kind, microbatch), row in pass_rows.items():
        rank = schedule.placement[stage]
        cell = {
            "runs": 1,
            "chunk": chunks[stage],
            "microbatch": microbatch,
            "is_first": stage == 0,
            "is_last": stage == schedule.num_stages - 1,
            "num_layers": layers_per_stage[stage],
            "message": messages.get((stage, kind, microbatch), 0),
            **{saved_value.column: slots.get((stage, saved_value.column, microbatch), 0) for saved_value in waiting},
        }
        for name, value in cell.items():
            rows[row, rank, columns[f"{kind}/{name}"]] = value
        reader = _reader_key(schedule, Action(stage, Kind(kind), microbatch))
        if reader in messages:
            destination = schedule.placement[reader[0]]
            # With two ranks, each is both the left and the right neighbour of the other; the message counts as from the
            # left.
            side = 2 if destination == rank else 0 if destination == (rank + 1) % schedule.num_ranks else 1
            rows[row + (kind == "I"), destination, columns[f"{kind}/{_ARRIVAL_COLUMNS[side]}"]] = messages[reader]
    used = {name: tuple(count[rank] for rank in range(schedule.num_ranks)) for name, count in counts.items()}
    return Tables(tuple(columns), rows, used)


_Key = tuple[int, str, int]
"""Stage, name of a pass or of a column, and microbatch."""


class _Lifetime(NamedTuple):
    """Half-open interval of moments in which a value occupies a slot on a rank."""

    begin: int
    end: int
    rank: int
    key: _Key


def _pass_rows(table: Iterable[tuple[Cell, ...]]) -> dict[_Key, int]:
    """Return the row of every pass; a whole backward pass counts as an input and a weight pass."""
    return {
        (action.stage, kind, action.microbatch): tick - (kind != "F")
        for tick, row in enumerate(table)
        for cell in row
        for action in cell
        for kind in ("IW" if action.kind is Kind.BACKWARD else action.kind.value)
    }


def _assign_slots(lifetimes: Iterable[_Lifetime]) -> tuple[dict[_Key, int], Counter[int]]:
    """Assign a slot to each interval, separately on each rank, and count the slots of each rank.

    Slots are assigned like registers, by colouring intervals. So a rank needs only as many slots as it has live values
    at its fullest moment.
    """
    slots: dict[_Key, int] = {}
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[int, int]]] = {}
    counts: Counter[int] = Counter()
    # In order of start, an interval takes the lowest slot that is free. A slot is free again when its interval ends.
    for begin, end, rank, key in sorted(lifetimes):
        available, taken = free.setdefault(rank, []), busy.setdefault(rank, [])
        while taken and taken[0][0] <= begin:
            heapq.heappush(available, heapq.heappop(taken)[1])
        if not available:
            heapq.heappush(available, counts[rank])
            counts[rank] += 1
        slots[key] = heapq.heappop(available)
        heapq.heappush(taken, (end, slots[key]))
    return slots, counts


def _message_lifetimes(schedule: Schedule, pass_rows: dict[_Key, int]) -> Iterable[_Lifetime]:
    """Yield the interval of each message, from its arrival until the pass that reads it starts."""
    for (stage, kind, microbatch), row in pass_rows.items():
        reader = _reader_key(schedule, Action(stage, Kind(kind), microbatch))
        if reader in pass_rows:
            rank = schedule.placement[reader[0]]
            is_local = rank == schedule.placement[stage]
            begin = 8 * (row + 1) + 1 if kind == "I" else 8 * row + (1 if is_local else 6)
            yield _Lifetime(begin, 8 * pass_rows[reader] + _PASS_STARTS[reader[1]] + 1, rank, reader)


def _saved_value_slots(
    schedule: Schedule, pass_rows: dict[_Key, int], waiting: Sequence[Waiting]
) -> tuple[dict[_Key, int], dict[str, Counter[int]]]:
    stages = {"first": (0,), "blocks": range(schedule.num_stages)}
    lifetimes: dict[str, list[_Lifetime]] = {}
    for saved_value in waiting:
        for (stage, kind, microbatch), row in pass_rows.items():
            if kind == saved_value.producer and stage in stages[saved_value.part]:
                begin = 8 * row + _PASS_STARTS[kind]
                end = 8 * pass_rows[stage, saved_value.reader, microbatch] + _PASS_STARTS[saved_value.reader] + 1
                lifetime = _Lifetime(begin, end, schedule.placement[stage], (stage, saved_value.column, microbatch))
                lifetimes.setdefault(saved_value.buffer, []).append(lifetime)
    all_slots: dict[_Key, int] = {}
    counts: dict[str, Counter[int]] = {}
    for buffer, buffer_lifetimes in lifetimes.items():
        slots, counts[buffer] = _assign_slots(buffer_lifetimes)
        all_slots.update(slots)
    return all_slots, counts


def _reader_key(schedule: Schedule, action: Action) -> _Key:
    """Return the pass that receives an action's result: stage, kind (empty without such a pass) and microbatch."""
    kind, stage = reader_of(action, schedule.num_stages) or ("", action.stage)
    return stage, kind, action.microbatch


def _refuse_distant_ranks(schedule: Schedule) -> None:
    num_ranks = schedule.num_ranks
    for stage, (rank, next_rank) in enumerate(zip(schedule.placement, schedule.placement[1:], strict=False)):
        if (rank - next_rank) % num_ranks not in (0, 1, num_ranks - 1):
            problem = f"{schedule.name}: stages {stage} and {stage + 1} are on ranks {rank} and {next_rank}"
            hint = "renumber the ranks: the program sends activations only to the next and the previous rank"
            raise ScheduleError(f"{problem}, which are not neighbours", hint=hint)
