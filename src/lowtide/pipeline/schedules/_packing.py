"""Pack orders of F and I into ticks of several passes, and place weight passes where they cost least.

A tick lasts as long as its slowest rank. So a weight pass is free where its rank would wait for another rank in the
same tick. If no weight pass is free, all ranks should run one in the same tick. A rank without free memory has to run
one at once; other ranks then run one too, if it fits into the tick.

With an input and a forward pass in each tick, all middle ticks are alike: microbatch i goes forward on rank r in tick i
+ r, and backward in tick i + 2R - 1 - r. Orders that start twice as many microbatches as ranks (those of ZB-H2) have
this form. Orders that hold fewer microbatches have one of the two passes in a tick, and weight passes even out the
length. The algorithm is greedy, so the result is not always optimal; the first form is optimal if all passes cost the
same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

from ...core import ScheduleError
from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Ends, Schedule, position_in_tick, ready_time, result_key
from ._ticks import Cell, receiving_ranks, spans

_TOLERANCE = 1e-9


WeightPolicy = Literal["free", "together", "at once"]
"""When weight passes may lengthen a tick: only if memory requires it ("free"); if all ranks have one ("together");
always ("at once")."""


def pack_ticks(
    schedule: Schedule, costs: Costs, limits: Sequence[float], *, in_pairs: bool, weight_policy: WeightPolicy
) -> Schedule:
    """Pack a schedule with split backward passes into ticks, with its weight passes where they cost least.

    The orders of F and I are kept. `limits` is the memory of each rank; `ScheduleError` when one is too small for the
    order. With `in_pairs`, a rank runs an input and a forward pass in one tick if they follow each other in its order.
    """
    table = _Packer(schedule, costs, limits, in_pairs=in_pairs, weight_policy=weight_policy).run()
    ranks = range(schedule.num_ranks)
    return dataclasses.replace(
        schedule,
        orders=tuple(tuple(action for row in table for action in row[rank]) for rank in ranks),
        ticks=tuple(tuple(tick for tick, row in enumerate(table) for _ in row[rank]) for rank in ranks),
    )


class _Packer:
    def __init__(
        self, schedule: Schedule, costs: Costs, limits: Sequence[float], *, in_pairs: bool, weight_policy: WeightPolicy
    ) -> None:
        self.placement, self.costs, self.limits = schedule.placement, costs, limits
        self.in_pairs, self.weight_policy = in_pairs, weight_policy
        self.remaining = [
            deque(action for action in order if action.kind is not Kind.WEIGHT) for order in schedule.orders
        ]
        self.pending_weights: list[deque[Action]] = [deque() for _ in schedule.orders]
        """Weight passes of each rank whose input pass has run."""
        self.memory = [0.0] * schedule.num_ranks
        self.ends: Ends = {}
        self.table: list[list[Cell]] = []

    def run(self) -> list[list[Cell]]:
        """Return the actions of each rank, by tick."""
        sent: set[int] = set()
        while any(self.remaining) or any(self.pending_weights):
            cells, forced = self._start_tick()
            shortest = [self._length(cell, rank in sent) for rank, cell in enumerate(cells)]
            with_weights = [
                self._length((*cell, *itertools.islice(pending, 1)), rank in sent)
                for rank, (cell, pending) in enumerate(zip(cells, self.pending_weights, strict=True))
            ]
            # First, the length of the tick: its passes of F and I, plus the weight passes that may lengthen it. Then
            # every other rank adds a weight pass if it fits into that length.
            lengthening = forced | self._lengthening_ranks(is_empty=not any(cells))
            length = max([*shortest, *(with_weights[rank] for rank in lengthening)])
            for rank, pending in enumerate(self.pending_weights):
                if pending and with_weights[rank] <= length + _TOLERANCE:
                    cells[rank] = (*cells[rank], pending.popleft())
            row = [tuple(sorted(cell, key=position_in_tick)) for cell in cells]
            self._finish_tick(row)
            sent = receiving_ranks(row, self.placement)
        return self.table

    def _start_tick(self) -> tuple[list[Cell], set[int]]:
        """Return the F and I passes of each rank in this tick, and the ranks that must run a weight pass in it."""
        cells: list[Cell] = []
        forced: set[int] = set()
        for rank, remaining in enumerate(self.remaining):
            cell: Cell = ()
            memory = [self.memory[rank]]
            if (backward := self._next(rank, Kind.INPUT)) is not None:
                cell = (backward,)
                remaining.popleft()
                memory.append(self.costs.kept(backward))
                self.pending_weights[rank].append(backward._replace(kind=Kind.WEIGHT))
            forward = self._next(rank, Kind.FORWARD) if self.in_pairs or not cell else None
            if forward is not None:
                memory.append(self.costs.kept(forward))
            limit, pending = self.limits[rank] + _TOLERANCE, self.pending_weights[rank]
            if sum(memory) > limit and pending:
                forced.add(rank)
                memory.append(self.costs.kept(pending[0]))
            if forward is not None and sum(memory) <= limit:
                cell = (*cell, forward)
                remaining.popleft()
            cells.append(cell)
        return cells, forced

    def _next(self, rank: int, kind: Kind) -> Action | None:
        """Return the next action of a rank's order if it is of this kind and can run."""
        remaining = self.remaining[rank]
        if not remaining or ready_time(remaining[0], self.placement, self.ends) == math.inf:
            return None
        return remaining[0] if remaining[0].kind is kind else None

    def _lengthening_ranks(self, *, is_empty: bool) -> set[int]:
        """Return the ranks whose weight passes may lengthen this tick although memory does not require it."""
        pending_ranks = {rank for rank, pending in enumerate(self.pending_weights) if pending}
        if is_empty or self.weight_policy == "at once":
            return pending_ranks
        forwards = [any(action.kind is Kind.FORWARD for action in actions) for actions in self.remaining]
        if self.weight_policy == "together" and all(forwards) and len(pending_ranks) == len(self.remaining):
            return pending_ranks
        if self.in_pairs and not any(forwards):
            # In the drain, the result of an input pass is sent while a weight pass runs. So the rank with the most
            # input passes left may lengthen the tick, unless the weight passes left on another rank take longer.
            last_rank = max(
                range(len(self.remaining)),
                key=lambda rank: (len(self.remaining[rank]), len(self.pending_weights[rank])),
            )
            if max(map(len, self.pending_weights)) <= 2 * len(self.remaining[last_rank]) + len(
                self.pending_weights[last_rank]
            ):
                return {last_rank} & pending_ranks
        return set()

    def _length(self, cell: Cell, is_sent: bool) -> float:
        return spans(tuple(sorted(cell, key=position_in_tick)), self.placement, self.costs, is_sent=is_sent).end

    def _finish_tick(self, row: list[Cell]) -> None:
        """Append a tick to the table and update memory."""
        if not any(row):
            blocked = next(rank for rank, order in enumerate(self.remaining) if order)
            raise ScheduleError(
                f"rank {blocked} cannot continue within its memory",
                expected=f"a limit that lets it run {self.remaining[blocked][0]}",
                got=f"{self.memory[blocked]:g} of {self.limits[blocked]:g} in use",
                hint="raise the limit, or choose a schedule that needs less memory, such as v-half or v-min",
            )
        for rank, cell in enumerate(row):
            for action in cell:
                self.memory[rank] += self.costs.kept(action)
                self.ends[result_key(action)] = 0.0
        self.table.append(row)
