"""What every rank does in every tick of a program in lockstep, and where things lie meanwhile, as tables of numbers.

A value that waits (an activation or a cotangent that another rank sent, what a pass leaves to a later one) lies in a
slot of a buffer from the tick in which it comes to the tick in which it is read last. Slots are given out as registers
are: by colouring intervals, which for intervals needs no more slots than are alive at once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from ..core import ScheduleError
from ._actions import Action, Kind
from ._schedule import Schedule
from ._simulate import ticks

PARTS = ("first", "blocks", "last")
"""Of the model: what is before the stack, in the first stage alone; the stack; what is after it, in the last stage."""
LIVES = {"for_input": ("F", "I"), "for_weight": ("F", "W"), "waiting": ("I", "W")}
"""From which pass to which something is kept."""
COLUMNS = (
    "forward",
    "input",
    "weight",
    "chunk",
    "microbatch",
    "is_first",
    "is_last",
    "num_layers",
    "message",
    "from_left",
    "from_right",
    "from_here",
    *(f"{part}_{life}" for part in PARTS for life in LIVES),
)
"""Of the table: which passes run, of what; the slot of the message that is read; the slots of those that come (-1:
none); the slots of what the passes leave."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as one program runs it."""

    rows: np.ndarray
    """Numbers by tick, rank and column, int32 of shape [T, R, C]."""
    num_messages: int
    """Slots of the buffer for what ranks send to each other."""
    num_slots: dict[str, int]
    """Slots of the buffers for what passes leave, by column."""


def tables(schedule: Schedule, layers_per_stage: Sequence[int], *, forward_only: bool = False) -> Tables:
    """Lay a schedule out for a program.

    Args:
        schedule: what to run.
        layers_per_stage: of every stage.
        forward_only: whether to leave the backward pass out, as an evaluation does.

    Returns:
        The tables.

    Raises:
        ScheduleError: when neighbouring stages are on ranks that are no neighbours.
    """
    _refuse_far(schedule)
    table = ticks(schedule, forward_only=forward_only)
    rows = np.zeros((len(table), schedule.num_ranks, len(COLUMNS)), np.int32)
    for name in ("from_left", "from_right", "from_here"):
        rows[:, :, COLUMNS.index(name)] = -1
    when = _when(table)
    chunks = {stage: i for rank in range(schedule.num_ranks) for i, stage in enumerate(schedule.stages_of(rank))}
    messages = _Slots(_messages(schedule, when))
    # Only of the first and the last stage something is kept besides what the blocks leave.
    ends = {"first": [0], "blocks": range(schedule.num_stages), "last": [schedule.num_stages - 1]}
    lives = {
        f"{part}_{name}": _Slots(_lives(schedule, when, name, stages))
        for part, stages in ends.items()
        for name in LIVES
        if not forward_only
    }
    for tick, row in enumerate(table):
        for rank, action in enumerate(row):
            if action is None:
                continue
            stage, kind, microbatch = action
            cell = dict(
                forward=kind is Kind.FORWARD,
                input=kind in (Kind.INPUT, Kind.BACKWARD),
                weight=kind in (Kind.WEIGHT, Kind.BACKWARD),
                chunk=chunks[stage],
                microbatch=microbatch,
                is_first=stage == 0,
                is_last=stage == schedule.num_stages - 1,
                num_layers=layers_per_stage[stage],
                **{name: slots.of.get((stage, microbatch), 0) for name, slots in lives.items()},
            )
            came = (stage, "F" if kind is Kind.FORWARD else "I", microbatch)
            cell["message"] = messages.of.get(came, 0)
            for name, value in cell.items():
                rows[tick, rank, COLUMNS.index(name)] = value
            sent = _sent(schedule, action)
            if sent is not None:
                to = schedule.placement[sent[0]]
                column = (
                    "from_here"
                    if to == rank
                    else "from_left"
                    if to == (rank + 1) % schedule.num_ranks
                    else "from_right"
                )
                rows[tick, to, COLUMNS.index(column)] = messages.of[sent]
    return Tables(rows, messages.number, {name: slots.number for name, slots in lives.items()})


_Time = dict[tuple[int, str, int], int]


def _when(table: Iterable[tuple[Action | None, ...]]) -> _Time:
    """The tick of every pass, where a whole backward pass is both of its parts."""
    return {
        (action.stage, kind, action.microbatch): tick
        for tick, row in enumerate(table)
        for action in row
        if action is not None
        for kind in ("IW" if action.kind is Kind.BACKWARD else action.kind.value)
    }


@dataclasses.dataclass(frozen=True)
class _Life:
    key: tuple[int, str, int] | tuple[int, int]
    rank: int
    begin: int
    end: int


class _Slots:
    """Slots for lives, on each rank for itself."""

    def __init__(self, lives: Iterable[_Life]) -> None:
        self.of: dict[object, int] = {}
        free: dict[int, list[int]] = {}
        used: dict[int, list[tuple[int, int]]] = {}
        count: dict[int, int] = {}
        for life in sorted(lives, key=lambda life: life.begin):
            busy = used.setdefault(life.rank, [])
            while busy and busy[0][0] <= life.begin:
                heapq.heappush(free.setdefault(life.rank, []), heapq.heappop(busy)[1])
            ready = free.setdefault(life.rank, [])
            if not ready:
                heapq.heappush(ready, count.get(life.rank, 0))
                count[life.rank] = count.get(life.rank, 0) + 1
            self.of[life.key] = heapq.heappop(ready)
            heapq.heappush(busy, (life.end, self.of[life.key]))
        self.number = max(count.values(), default=0)


def _messages(schedule: Schedule, when: _Time) -> list[_Life]:
    """What a stage gets from its neighbours, at the end of the tick in which it is made."""
    found: list[_Life] = []
    for (stage, kind, microbatch), end in when.items():
        source = {"F": stage - 1, "I": stage + 1}.get(kind)
        if source is not None and 0 <= source < schedule.num_stages:
            begin = when[source, kind, microbatch]
            found.append(_Life((stage, kind, microbatch), schedule.placement[stage], begin, end))
    return found


def _lives(schedule: Schedule, when: _Time, name: str, stages: Sequence[int]) -> list[_Life]:
    made, read = LIVES[name]
    return [
        _Life((stage, microbatch), schedule.placement[stage], tick, when[stage, read, microbatch] + 1)
        for (stage, kind, microbatch), tick in when.items()
        if kind == made and stage in stages
    ]


def _sent(schedule: Schedule, action: Action) -> tuple[int, str, int] | None:
    """For whom the result of an action is: a stage, its pass and the microbatch."""
    if action.kind is Kind.WEIGHT:
        return None
    is_forward = action.kind is Kind.FORWARD
    to = action.stage + (1 if is_forward else -1)
    return (to, "F" if is_forward else "I", action.microbatch) if 0 <= to < schedule.num_stages else None


def _refuse_far(schedule: Schedule) -> None:
    num_ranks = schedule.num_ranks
    for stage, (one, other) in enumerate(zip(schedule.placement, schedule.placement[1:], strict=False)):
        if (one - other) % num_ranks not in (0, 1, num_ranks - 1):
            raise ScheduleError(
                f"{schedule.name}: stages {stage} and {stage + 1} are on ranks that are no neighbours",
                expected=f"stage {stage + 1} on rank {one}, {(one + 1) % num_ranks} or {(one - 1) % num_ranks}",
                got=f"rank {other}",
                hint="one program sends activations to the next and the previous rank alone; renumber the ranks",
            )
