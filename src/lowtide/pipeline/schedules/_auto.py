"""The schedule for given costs and memory: the best of the named ones, packed ones and greedy ones.

Packed are the named ones in ticks of several passes (`_packing`); greedy ones are tried for ranks that run by
themselves, and where memory is limited, since named ones need what they need.

A greedy rank does the first thing that it can: an input pass, which the rank before waits for; then a forward pass, if
memory allows; and a weight pass where it would wait otherwise. It is the list scheduling of `_listing`, whose order of
forward and input passes is given, without that order. How many microbatches a rank may have begun is varied. No optimum
is claimed, which takes an integer program (Qi et al., "Zero Bubble Pipeline Parallelism", 2024): only that no named
schedule with as many stages a rank is better.
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
"""Of a number of microbatches."""


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
    """Of the candidates that keep within the limits, the one that ends soonest; of equals that which keeps least.

    Args:
        candidates: makers of schedules.
        num_microbatches: of the one that is wanted.
        telling: as many of them as tell candidates apart.
        costs: of actions.
        limits: memory of each rank.
        lockstep: how ranks run.
        placement: where stages have to be; by default anywhere.

    Raises:
        ScheduleError: when there is none.
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
    # What is short at the ends may be long in the middle: all microbatches tell the nearest apart.
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
    """Makers of greedy schedules."""
    for is_v in (False, True)[: 2 if chunks > 1 else 1]:
        placement = placed(num_ranks, chunks, is_v=is_v)
        each = costs.by_rank(placement)
        # The last begins a microbatch where all its passes have room, so that it gets on with the room for one.
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
    """Ranks that choose what to do next.

    Args:
        placement: rank of each stage.
        num_microbatches: parts of a batch.
        costs: of actions.
        limits: memory of each rank.
        whole: what a microbatch keeps on each rank, to have room for all of it before it begins there; else each
            forward pass takes its own.
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
        """All actions of all ranks, in the order in which they are decided."""
        orders = self.ranks.run(self._choose, self._count)
        if sum(map(len, orders)) < 3 * self.number * len(self.placement):
            raise ScheduleError("a greedy schedule stands still within its memory", hint="raise memory_limit")
        return orders

    def _choose(self, rank: int) -> Action | None:
        return min(self._candidates(rank), default=(0.0, 0, None))[-1]

    def _count(self, _: int, action: Action) -> None:
        self.next[action.kind, action.stage] += 1

    def _change(self, action: Action) -> float:
        """How much memory an action takes, or frees where it is negative."""
        if self.whole is None or action.kind is not Kind.FORWARD:
            return self.costs.kept(action)
        rank = self.placement[action.stage]
        return self.whole[rank] if action.stage == self.stages[rank][0] else 0.0

    def _candidates(self, rank: int) -> Iterator[tuple[float, int, Action]]:
        """List what could be next: when it could begin, how urgent it is (less is more), and what."""
        for stage in self.stages[rank]:
            for kind in (Kind.INPUT, Kind.FORWARD):
                action = Action(stage, kind, self.next[kind, stage])
                if action.microbatch == self.number:
                    continue
                if kind is Kind.FORWARD and self.ranks.memory[rank] + self._change(action) > self.limits[rank] + 1e-9:
                    continue
                # Input passes come first, of the earliest stage; forward passes of the latest.
                urgency = stage if kind is Kind.INPUT else 2 * len(self.placement) - stage
                yield max(self.ranks.ready(action), self.ranks.time[rank]), urgency, action
