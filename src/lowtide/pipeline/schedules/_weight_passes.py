"""Placement of weight passes: into an order for asynchronous ranks, or into the ticks of ranks in lockstep.

A weight pass needs only its input pass, and no other pass needs its result. So it can run where its rank would be idle,
or where the memory that it frees is needed. Zero-bubble schedules fill the bubble in this way (Qi et al., "Zero Bubble
Pipeline Parallelism", 2024). Both algorithms are greedy, so the result is not always optimal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from ...core import ScheduleError
from ._actions import Action, Costs, Kind
from ._schedule import Ends, Order, Schedule, position_in_tick, ready_time, result_key
from ._ticks import Cell, receiving_ranks, spans

_TOLERANCE = 1e-9


class ListScheduler:
    """Mutable state of list scheduling: each rank runs its chosen action, or a weight pass if it would wait.

    It looks only at the next action of a rank.
    ``memory_change(action)`` is the memory that an action allocates; it is negative if the action frees memory.
    """

    def __init__(
        self, num_ranks: int, placement: Sequence[int], costs: Costs, memory_change: Callable[[Action], float]
    ) -> None:
        self.placement, self.costs, self.memory_change = placement, costs, memory_change
        self.times, self.memory = [0.0] * num_ranks, [0.0] * num_ranks
        self.weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        """Weight passes of each rank whose input pass has run."""
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        """Actions that each rank has run."""
        self.ends: Ends = {}

    def run(
        self, choose: Callable[[int], Action | None], on_chosen: Callable[[int, Action], None]
    ) -> tuple[Order, ...]:
        """Run until no rank can run another action; return the actions of every rank, including weight passes.

        ``choose(rank)`` returns the next action of a rank other than a weight pass, or None.
        ``on_chosen(rank, action)`` is called when a chosen action runs.
        """
        ranks = range(len(self.orders))
        # The earliest rank goes first. Every action that is decided later ends after its current time, so its choice
        # stays valid.
        while any(self._advance(rank, choose, on_chosen) for rank in sorted(ranks, key=self.times.__getitem__)):
            pass
        return tuple(map(tuple, self.orders))

    def ready_time(self, action: Action) -> float:
        """Return the time at which the inputs of an action are on its rank; infinity while that time is unknown."""
        return ready_time(action, self.placement, self.ends, self.costs.communication)

    def _advance(
        self, rank: int, choose: Callable[[int], Action | None], on_chosen: Callable[[int, Action], None]
    ) -> bool:
        """Run the next action of a rank; return whether there was one."""
        action, now, weights = choose(rank), self.times[rank], self.weights[rank]
        begin = math.inf if action is None else self.ready_time(action)
        # Run a weight pass if it fills at least half of its time with waiting. It then delays the chosen action by less
        # than half a weight pass.
        if weights and (action is None or begin - now > self.costs.of(weights[0]) / 2 + _TOLERANCE):
            action, begin = weights.popleft(), now
        elif action is None or begin == math.inf:
            return False
        else:
            on_chosen(rank, action)
        self.times[rank] = max(now, begin) + self.costs.of(action)
        self.memory[rank] += self.memory_change(action)
        self.orders[rank].append(action)
        self.ends[result_key(action)] = self.times[rank]
        if action.kind is Kind.INPUT:
            weights.append(action._replace(kind=Kind.WEIGHT))
        return True


def place_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], costs: Costs, limits: Sequence[float]
) -> tuple[Order, ...]:
    """Insert one W for each I into orders of F and I.

    `limits` is the memory of each rank. A forward pass that would exceed it waits, and input passes that come later in
    the order may run before it. Raises `ScheduleError` when a limit is too small for the order.
    """
    remaining = [deque(order) for order in orders]
    scheduler = ListScheduler(len(orders), placement, costs, costs.kept)

    def choose(rank: int) -> Action | None:
        """Return the next action of the order that fits into memory; None if a weight pass has to free memory first."""
        if not remaining[rank]:
            return None
        action = remaining[rank][0]
        if action.kind is not Kind.FORWARD or scheduler.memory[rank] + costs.kept(action) <= limits[rank] + _TOLERANCE:
            return action
        if scheduler.weights[rank]:
            return None
        inputs = (candidate for candidate in remaining[rank] if candidate.kind is Kind.INPUT)
        return next(
            (candidate for candidate in inputs if candidate._replace(kind=Kind.FORWARD) in scheduler.orders[rank]), None
        )

    complete_orders = scheduler.run(choose, lambda rank, action: remaining[rank].remove(action))
    blocked = [rank for rank, order in enumerate(remaining) if order]
    if blocked:
        rank = next((rank for rank in blocked if limits[rank] < math.inf), blocked[0])
        raise ScheduleError(
            f"rank {rank} cannot continue within its memory",
            expected=f"a limit that lets it run {remaining[rank][0]}",
            got=f"{scheduler.memory[rank]:g} of {limits[rank]:g} in use",
            hint="raise the limit, or choose auto, or a schedule that needs less memory, such as v-half or v-min",
        )
    return complete_orders


# Weight passes in ticks. A tick lasts as long as its slowest rank. So a weight pass is free where its rank would wait
# for another rank in the same tick. If no weight pass is free, all ranks should run one in the same tick. A rank
# without free memory has to run one at once; other ranks then run one too, if it fits into the tick.
#
# With an input and a forward pass in each tick, all middle ticks are alike: microbatch i goes forward on rank r in tick
# i + r, and backward in tick i + 2R - 1 - r. Orders that start twice as many microbatches as ranks (those of ZB-H2)
# have this form, which is optimal if all passes cost the same. Orders that hold fewer microbatches have one of the two
# passes in a tick, and weight passes even out the length.

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
