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
from ._schedule import Ends, Schedule, gives, place, ready
from ._ticks import Cell, sent_to, spans

_TOLERANCE = 1e-9


Weights = Literal["free", "together", "at once"]
"""When weight passes may lengthen a tick: only if memory requires it ("free"); if all ranks have one ("together");
always ("at once")."""


def packed(schedule: Schedule, costs: Costs, limits: Sequence[float], *, in_pairs: bool, weights: Weights) -> Schedule:
    """Pack a schedule into ticks, with its weight passes where they cost least.

    Args:
        schedule: a schedule with split backward passes; its orders of F and I are kept.
        costs: time and memory of actions.
        limits: memory of each rank.
        in_pairs: whether a rank runs an input and a forward pass in one tick if they follow each other in its order.
        weights: when weight passes may lengthen a tick.

    Raises:
        ScheduleError: when a limit is too small for the order.
    """
    table = _Packer(schedule, costs, limits, in_pairs=in_pairs, weights=weights).run()
    ranks = range(schedule.num_ranks)
    return dataclasses.replace(
        schedule,
        orders=tuple(tuple(action for row in table for action in row[rank]) for rank in ranks),
        ticks=tuple(tuple(tick for tick, row in enumerate(table) for _ in row[rank]) for rank in ranks),
    )


class _Packer:
    def __init__(
        self, schedule: Schedule, costs: Costs, limits: Sequence[float], *, in_pairs: bool, weights: Weights
    ) -> None:
        self.placement, self.costs, self.limits = schedule.placement, costs, limits
        self.in_pairs, self.when = in_pairs, weights
        self.left = [deque(action for action in order if action.kind is not Kind.WEIGHT) for order in schedule.orders]
        self.weights: list[deque[Action]] = [deque() for _ in schedule.orders]
        """Weight passes of each rank whose input pass has run."""
        self.memory = [0.0] * schedule.num_ranks
        self.done: Ends = {}
        self.table: list[list[Cell]] = []

    def run(self) -> list[list[Cell]]:
        """Return the actions of each rank, by tick."""
        sent: set[int] = set()
        while any(self.left) or any(self.weights):
            cells, must = self._begin()
            shortest = [self._length(cell, rank in sent) for rank, cell in enumerate(cells)]
            with_weights = [
                self._length((*cell, *itertools.islice(pending, 1)), rank in sent)
                for rank, (cell, pending) in enumerate(zip(cells, self.weights, strict=True))
            ]
            # First, the length of the tick: its passes of F and I, plus the weight passes that may lengthen it. Then
            # every other rank adds a weight pass if it fits into that length.
            for_weights = must | self._longer(is_empty=not any(cells))
            length = max([*shortest, *(with_weights[rank] for rank in for_weights)])
            for rank, pending in enumerate(self.weights):
                if pending and with_weights[rank] <= length + _TOLERANCE:
                    cells[rank] = (*cells[rank], pending.popleft())
            row = [tuple(sorted(cell, key=place)) for cell in cells]
            self._end(row)
            sent = sent_to(row, self.placement)
        return self.table

    def _begin(self) -> tuple[list[Cell], set[int]]:
        """Return the F and I passes of each rank in this tick, and the ranks that must run a weight pass in it."""
        cells: list[Cell] = []
        must: set[int] = set()
        for rank, left in enumerate(self.left):
            cell: Cell = ()
            kept = [self.memory[rank]]
            if (back := self._next(rank, Kind.INPUT)) is not None:
                cell = (back,)
                left.popleft()
                kept.append(self.costs.kept(back))
                self.weights[rank].append(back._replace(kind=Kind.WEIGHT))
            forward = self._next(rank, Kind.FORWARD) if self.in_pairs or not cell else None
            if forward is not None:
                kept.append(self.costs.kept(forward))
            limit, pending = self.limits[rank] + _TOLERANCE, self.weights[rank]
            if sum(kept) > limit and pending:
                must.add(rank)
                kept.append(self.costs.kept(pending[0]))
            if forward is not None and sum(kept) <= limit:
                cell = (*cell, forward)
                left.popleft()
            cells.append(cell)
        return cells, must

    def _next(self, rank: int, kind: Kind) -> Action | None:
        """Return the next action of a rank's order if it is of this kind and can run."""
        left = self.left[rank]
        if not left or ready(left[0], self.placement, self.done) == math.inf:
            return None
        return left[0] if left[0].kind is kind else None

    def _longer(self, *, is_empty: bool) -> set[int]:
        """Return the ranks whose weight passes may lengthen this tick although memory does not require it."""
        having = {rank for rank, pending in enumerate(self.weights) if pending}
        if is_empty or self.when == "at once":
            return having
        forwards = [any(action.kind is Kind.FORWARD for action in left) for left in self.left]
        if self.when == "together" and all(forwards) and len(having) == len(self.left):
            return having
        if self.in_pairs and not any(forwards):
            # In the drain, the result of an input pass is sent while a weight pass runs. So the rank with the most
            # input passes left may lengthen the tick, unless the weight passes left on another rank take longer.
            last = max(range(len(self.left)), key=lambda rank: (len(self.left[rank]), len(self.weights[rank])))
            if max(map(len, self.weights)) <= 2 * len(self.left[last]) + len(self.weights[last]):
                return {last} & having
        return set()

    def _length(self, cell: Cell, is_sent: bool) -> float:
        return spans(tuple(sorted(cell, key=place)), self.placement, self.costs, is_sent=is_sent).end

    def _end(self, row: list[Cell]) -> None:
        """Append a tick to the table and update memory."""
        if not any(row):
            stuck = next(rank for rank, order in enumerate(self.left) if order)
            raise ScheduleError(
                f"rank {stuck} cannot go on within its memory",
                expected=f"a limit that lets it run {self.left[stuck][0]}",
                got=f"{self.memory[stuck]:g} of {self.limits[stuck]:g} in use",
                hint="raise the limit, or choose a schedule that keeps less, such as v-half or v-min",
            )
        for rank, cell in enumerate(row):
            for action in cell:
                self.memory[rank] += self.costs.kept(action)
                self.done[gives(action)] = 0.0
        self.table.append(row)
