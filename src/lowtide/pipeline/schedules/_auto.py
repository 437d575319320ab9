"""Search for the best schedule for given costs and memory: named, packed and greedy schedules are candidates.

Packed candidates are named schedules in ticks of several passes (`_packing`). Greedy candidates are tried for
asynchronous ranks. They are also tried under a memory limit, because named schedules need a fixed amount of memory.

A greedy rank runs the first action that it can: an input pass, which the previous rank waits for; then a forward pass,
if memory allows. It runs a weight pass where it would wait otherwise. This is the list scheduling of `_listing` without
a given order of forward and input passes. The number of microbatches that a rank may have started is varied. The result
is no worse than any named schedule with as many stages per rank. It is not always optimal: an optimum needs an integer
program (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...core import ScheduleError
from ._actions import Action, Kind
from ._costs import Costs
from ._listing import ListScheduler
from ._named import placed
from ._schedule import Order, Schedule
from ._simulate import simulate

Maker = Callable[[int], Schedule]
"""Makes a schedule for a given number of microbatches."""


def best(
    candidates: Iterable[Maker],
    num_microbatches: int,
    telling: int,
    costs: Costs,
    limits: Sequence[float],
    *,
    lockstep: bool,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Return the candidate that ends first within the limits; of equal ones, the candidate that holds least memory.

    Args:
        candidates: makers of schedules.
        num_microbatches: number of microbatches of the result.
        telling: number of microbatches that is enough to rank the candidates.
        costs: time and memory of actions.
        limits: memory of each rank.
        lockstep: whether ranks run in lockstep.
        placement: required rank of each stage; by default any placement.

    Raises:
        ScheduleError: when no candidate is within the limits.
    """

    def within(make: Maker, number: int) -> tuple[float, float, Schedule] | None:
        try:
            made = make(number)
        except ScheduleError:
            return None
        if placement is not None and made.placement != placement:
            return None
        run = simulate(made, costs, lockstep=lockstep)
        if any(peak > limit * (1 + 1e-9) for peak, limit in zip(run.peaks, limits, strict=True)):
            return None
        return round(run.makespan, 9), max(run.peaks), made  # sums in another order differ by rounding

    makers = list(candidates)
    rated = [(*one, i) for i, make in enumerate(makers) if (one := within(make, telling)) is not None]
    rated.sort(key=lambda one: (one[:2], one[3]))
    if telling == num_microbatches and rated:
        return rated[0][2]
    # With few microbatches, the start and the end weigh more than the middle. So the four best candidates that fit are
    # compared with all microbatches.
    found = (one for _, _, _, i in rated if (one := within(makers[i], num_microbatches)) is not None)
    nearest = list(itertools.islice(found, 4))
    if nearest:
        return min(nearest, key=lambda one: one[:2])[2]
    raise ScheduleError(
        "no schedule keeps within the memory_limit",
        expected="a limit of at least one microbatch's residuals on each rank",
        got=", ".join(f"{limit:g}" for limit in limits),
        hint="raise memory_limit, or have more stages",
    )


def greedy_orders(num_ranks: int, chunks: int, costs: Costs, limits: Sequence[float]) -> Iterator[Maker]:
    """Yield makers of greedy schedules."""
    for is_v in (False, True)[: 2 if chunks > 1 else 1]:
        placement = placed(num_ranks, chunks, is_v=is_v)
        each = costs.by_rank(placement)
        # `begun` is the number of microbatches that a rank may have started. None: a rank starts a microbatch only if
        # all its passes on this rank fit into memory, so a limit of one microbatch cannot block it.
        for begun in (num_ranks, num_ranks + 1, 3 * num_ranks // 2, 2 * num_ranks - 1, 2 * num_ranks, math.inf, None):
            most = begun or math.inf
            caps = [min(limit, most * one if one else math.inf) for limit, one in zip(limits, each, strict=True)]
            whole = each if begun is None else None

            def make(
                num_microbatches: int,
                placement: tuple[int, ...] = placement,
                caps: Sequence[float] = caps,
                whole: Sequence[float] | None = whole,
            ) -> Schedule:
                orders = _Greedy(placement, num_microbatches, costs, caps, whole).run()
                return Schedule(name="auto", num_microbatches=num_microbatches, placement=placement, orders=orders)

            yield make


class _Greedy:
    """Greedy choice of the next action on every rank.

    Args:
        placement: rank of each stage.
        num_microbatches: number of parts of a batch.
        costs: time and memory of actions.
        limits: memory of each rank.
        whole: memory of one microbatch on each rank, reserved before the microbatch starts there. None: each forward
            pass reserves its own memory.
    """

    def __init__(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        whole: Sequence[float] | None,
    ) -> None:
        self.placement, self.number, self.costs, self.limits = placement, num_microbatches, costs, limits
        self.whole = whole
        self.stages = [[s for s, where in enumerate(placement) if where == rank] for rank in range(len(limits))]
        self.next = {(kind, stage): 0 for kind in (Kind.FORWARD, Kind.INPUT) for stage in range(len(placement))}
        self.ranks = ListScheduler(len(limits), placement, costs, self._change)

    def run(self) -> tuple[Order, ...]:
        """Return the actions of all ranks, in the order in which they are decided."""
        orders = self.ranks.run(self._choose, self._count)
        if sum(map(len, orders)) < 3 * self.number * len(self.placement):
            raise ScheduleError("a greedy schedule stands still within its memory", hint="raise memory_limit")
        return orders

    def _choose(self, rank: int) -> Action | None:
        return min(self._candidates(rank), default=(0.0, 0, None))[-1]

    def _count(self, _: int, action: Action) -> None:
        self.next[action.kind, action.stage] += 1

    def _change(self, action: Action) -> float:
        """Return the memory that an action allocates; negative if the action frees memory."""
        if self.whole is None or action.kind is not Kind.FORWARD:
            return self.costs.kept(action)
        rank = self.placement[action.stage]
        return self.whole[rank] if action.stage == self.stages[rank][0] else 0.0

    def _candidates(self, rank: int) -> Iterator[tuple[float, int, Action]]:
        """Yield the possible next actions: start time, urgency (lower is more urgent), and the action."""
        for stage in self.stages[rank]:
            for kind in (Kind.INPUT, Kind.FORWARD):
                action = Action(stage, kind, self.next[kind, stage])
                if action.microbatch == self.number:
                    continue
                if kind is Kind.FORWARD and self.ranks.memory[rank] + self._change(action) > self.limits[rank] + 1e-9:
                    continue
                # Input passes come first, the earliest stage before later ones. Of forward passes, the latest stage
                # comes first.
                urgency = stage if kind is Kind.INPUT else 2 * len(self.placement) - stage
                yield max(self.ranks.ready(action), self.ranks.time[rank]), urgency, action
