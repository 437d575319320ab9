"""What every rank does in every tick of a program in lockstep, and where things lie meanwhile, as tables of numbers.

A value that waits (an activation or a cotangent that another rank sent, what a pass leaves to a later one) lies in a
slot of a buffer from the tick in which it comes to the tick in which it is read last. Slots are given out as registers
are: by colouring intervals, which for intervals needs no more slots than are alive at once.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...core import ScheduleError
from ._actions import Action, Kind
from ._schedule import Schedule, read_by
from ._ticks import Cell, ticks

KINDS = ("F", "I", "W")
"""The passes of a row, in their order: the forward pass of a tick, then the backward passes of the next tick.

So each pass reads what passes before it in its row, or in earlier rows, have written, and none has to be done with what
a later one of its row overwrites. Of a whole backward pass I and W are of one microbatch.
"""
_OF_PASSES = ("runs", "chunk", "microbatch", "is_first", "is_last", "num_layers", "message")
"""Whether a pass runs, of what, and the slot of the message that it reads."""
_CAME = ("from_left", "from_right", "from_here")
"""Slots for what a pass of a neighbour, or of this rank, gave (-1: none)."""
_MOMENTS = {"F": 0, "I": 2, "W": 4}
"""Of passes, in a row of eight moments. Results come at moment 1, of the row's own forward pass to its own rank and of
input passes of the row before; or at 6, of the row's forward pass to other ranks."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Something that a pass leaves to another."""

    column: str
    """Of the table, for its slot."""
    part: str
    """``first`` is in one stage alone, ``blocks`` in all."""
    made: str
    """The pass that leaves it: F or I."""
    read: str
    """The one that reads it last: I or W."""
    buffer: str
    """Where it lies, with others of its shape."""


@dataclasses.dataclass(frozen=True)
class Tables:
    """A schedule as one program runs it."""

    columns: tuple[str, ...]
    """For each pass of a tick, after its letter and a slash: what and whether it is, what it reads, what comes of its
    kind, and the slots of what waits."""
    rows: np.ndarray
    """Numbers by row, rank and column, int32 of shape [T, R, C]."""
    num_messages: int
    """Slots of the buffer for what ranks send to each other."""
    num_slots: dict[str, int]
    """Slots of each buffer for what passes leave."""
    used: dict[str, tuple[int, ...]]
    """Of them, and of ``messages``, those that each rank uses."""

    def comes(self, kind: str, name: str) -> bool:
        """Whether messages of a kind ever come from somewhere."""
        return bool((self.rows[:, :, self.columns.index(f"{kind}/{name}")] >= 0).any())


def tables(
    schedule: Schedule,
    layers_per_stage: Sequence[int],
    waiting: Sequence[Waiting] = (),
    *,
    forward_only: bool = False,
) -> Tables:
    """Lay a schedule out for a program.

    Args:
        schedule: what to run.
        layers_per_stage: of every stage.
        waiting: what passes leave behind.
        forward_only: whether to leave the backward pass out, as an evaluation does.

    Returns:
        The tables.

    Raises:
        ScheduleError: when neighbouring stages are on ranks that are no neighbours.
    """
    _refuse_far(schedule)
    table = ticks(schedule, forward_only=forward_only)
    when = _when(table)
    chunks = {stage: i for rank in range(schedule.num_ranks) for i, stage in enumerate(schedule.stages_of(rank))}
    messages, of_messages = _slots(_messages(schedule, when))
    slots, counts = _waiting_slots(schedule, when, waiting)
    names = (*_OF_PASSES, *_CAME, *(one.column for one in waiting))
    columns = {f"{kind}/{name}": i for i, (kind, name) in enumerate(itertools.product(KINDS, names))}
    rows = np.zeros((1 + max(when.values()), schedule.num_ranks, len(columns)), np.int32)
    rows[:, :, [i for name, i in columns.items() if name.partition("/")[2] in _CAME]] = -1
    for (stage, kind, microbatch), row in when.items():
        rank = schedule.placement[stage]
        cell = {
            "runs": 1,
            "chunk": chunks[stage],
            "microbatch": microbatch,
            "is_first": stage == 0,
            "is_last": stage == schedule.num_stages - 1,
            "num_layers": layers_per_stage[stage],
            "message": messages.get((stage, kind, microbatch), 0),
            **{one.column: slots.get((stage, one.column, microbatch), 0) for one in waiting},
        }
        for name, value in cell.items():
            rows[row, rank, columns[f"{kind}/{name}"]] = value
        sent = _sent(schedule, Action(stage, Kind(kind), microbatch))
        if sent in messages:
            to = schedule.placement[sent[0]]
            # Of two ranks each is on both sides of the other.
            side = 2 if to == rank else 0 if to == (rank + 1) % schedule.num_ranks else 1
            rows[row + (kind == "I"), to, columns[f"{kind}/{_CAME[side]}"]] = messages[sent]
    counts["messages"] = of_messages
    used = {name: tuple(count[rank] for rank in range(schedule.num_ranks)) for name, count in counts.items()}
    num_slots = {name: max(each) for name, each in used.items()}
    num_messages = max(num_slots.pop("messages"), 1)  # a single stage is sent nothing
    return Tables(tuple(columns), rows, num_messages, num_slots, used)


_Key = tuple[int, str, int]
"""A stage, a pass or a column, and a microbatch."""


class _Life(NamedTuple):
    """From one moment until before another one something lies in a slot of a rank."""

    begin: int
    end: int
    rank: int
    key: _Key


def _when(table: Iterable[tuple[Cell, ...]]) -> dict[_Key, int]:
    """Return the row of every pass, where a whole backward pass is both of its parts."""
    return {
        (action.stage, kind, action.microbatch): tick - (kind != "F")
        for tick, row in enumerate(table)
        for cell in row
        for action in cell
        for kind in ("IW" if action.kind is Kind.BACKWARD else action.kind.value)
    }


def _slots(lives: Iterable[_Life]) -> tuple[dict[_Key, int], Counter[int]]:
    """Slots for lives, on each rank for itself, and how many it needs."""
    found: dict[_Key, int] = {}
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[int, int]]] = {}
    count: Counter[int] = Counter()
    for begin, end, rank, key in sorted(lives):
        ready, taken = free.setdefault(rank, []), busy.setdefault(rank, [])
        while taken and taken[0][0] <= begin:
            heapq.heappush(ready, heapq.heappop(taken)[1])
        if not ready:
            heapq.heappush(ready, count[rank])
            count[rank] += 1
        found[key] = heapq.heappop(ready)
        heapq.heappush(taken, (end, found[key]))
    return found, count


def _messages(schedule: Schedule, when: dict[_Key, int]) -> Iterable[_Life]:
    """Return what a stage is given by others, from the moment in which it has come."""
    for (stage, kind, microbatch), row in when.items():
        sent = _sent(schedule, Action(stage, Kind(kind), microbatch))
        if sent in when:
            rank = schedule.placement[sent[0]]
            stays = rank == schedule.placement[stage]
            begin = 8 * (row + 1) + 1 if kind == "I" else 8 * row + (1 if stays else 6)
            yield _Life(begin, 8 * when[sent] + _MOMENTS[sent[1]] + 1, rank, sent)


def _waiting_slots(
    schedule: Schedule, when: dict[_Key, int], waiting: Sequence[Waiting]
) -> tuple[dict[_Key, int], dict[str, Counter[int]]]:
    stages = {"first": (0,), "blocks": range(schedule.num_stages)}
    lives: dict[str, list[_Life]] = {}
    for one in waiting:
        for (stage, kind, microbatch), row in when.items():
            if kind == one.made and stage in stages[one.part]:
                begin = 8 * row + _MOMENTS[kind]
                end = 8 * when[stage, one.read, microbatch] + _MOMENTS[one.read] + 1
                life = _Life(begin, end, schedule.placement[stage], (stage, one.column, microbatch))
                lives.setdefault(one.buffer, []).append(life)
    found: dict[_Key, int] = {}
    counts: dict[str, Counter[int]] = {}
    for buffer, of_buffer in lives.items():
        slots, counts[buffer] = _slots(of_buffer)
        found.update(slots)
    return found, counts


def _sent(schedule: Schedule, action: Action) -> _Key:
    """For whom the result of an action is: a stage, its pass and the microbatch; no pass where it is for nobody."""
    kind, stage = read_by(action, schedule.num_stages) or ("", action.stage)
    return stage, kind, action.microbatch


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
