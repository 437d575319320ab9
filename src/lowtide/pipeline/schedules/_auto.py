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
from ._named import place_stages
from ._schedule import Order, Schedule
from ._simulate import simulate

ScheduleMaker = Callable[[int], Schedule]
"""Makes a schedule for a given number of microbatches."""


def best(
    candidates: Iterable[ScheduleMaker],
    num_microbatches: int,
    num_trial_microbatches: int,
    costs: Costs,
    limits: Sequence[float],
    *,
    lockstep: bool,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Return the candidate that ends first within the limits; of equal ones, the candidate that holds least memory.

    Candidates are ranked with `num_trial_microbatches`. `limits` is the memory of each rank. `placement` is the
    required rank of each stage; None allows any. Raises `ScheduleError` when no candidate is within the limits.
    """

    def within(maker: ScheduleMaker, count: int) -> tuple[float, float, Schedule] | None:
        try:
            candidate = maker(count)
        except ScheduleError:
            return None
        if placement is not None and candidate.placement != placement:
            return None
        run = simulate(candidate, costs, lockstep=lockstep)
        if any(peak > limit * (1 + 1e-9) for peak, limit in zip(run.peaks, limits, strict=True)):
            return None
        return round(run.makespan, 9), max(run.peaks), candidate  # sums in another order differ by rounding

    makers = list(candidates)
    rated = [
        (*rating, i) for i, maker in enumerate(makers) if (rating := within(maker, num_trial_microbatches)) is not None
    ]
    rated.sort(key=lambda entry: (entry[:2], entry[3]))
    if num_trial_microbatches == num_microbatches and rated:
        return rated[0][2]
    # With few microbatches, the start and the end weigh more than the middle. So the four best candidates that fit are
    # compared with all microbatches.
    fitting = (rating for _, _, _, i in rated if (rating := within(makers[i], num_microbatches)) is not None)
    finalists = list(itertools.islice(fitting, 4))
    if finalists:
        return min(finalists, key=lambda rating: rating[:2])[2]
    raise ScheduleError(
        "no schedule stays within the memory_limit",
        expected="a limit of at least one microbatch's residuals on each rank",
        got=", ".join(f"{limit:g}" for limit in limits),
        hint="raise memory_limit, or use more stages",
    )


def greedy_orders(num_ranks: int, chunks: int, costs: Costs, limits: Sequence[float]) -> Iterator[ScheduleMaker]:
    """Yield makers of greedy schedules."""
    for is_v in (False, True)[: 2 if chunks > 1 else 1]:
        placement = place_stages(num_ranks, chunks, is_v=is_v)
        microbatch_memory = costs.by_rank(placement)
        # `max_started` is the number of microbatches that a rank may have started. None: a rank starts a microbatch
        # only if all its passes on this rank fit into memory, so a limit of one microbatch cannot block it.
        for max_started in (
            num_ranks,
            num_ranks + 1,
            3 * num_ranks // 2,
            2 * num_ranks - 1,
            2 * num_ranks,
            math.inf,
            None,
        ):
            max_microbatches = max_started or math.inf
            caps = [
                min(limit, max_microbatches * memory if memory else math.inf)
                for limit, memory in zip(limits, microbatch_memory, strict=True)
            ]
            reserved = microbatch_memory if max_started is None else None

            def make(
                num_microbatches: int,
                placement: tuple[int, ...] = placement,
                caps: Sequence[float] = caps,
                reserved: Sequence[float] | None = reserved,
            ) -> Schedule:
                orders = _Greedy(placement, num_microbatches, costs, caps, reserved).run()
                return Schedule(name="auto", num_microbatches=num_microbatches, placement=placement, orders=orders)

            yield make


class _Greedy:
    """Greedy choice of the next action on every rank.

    `reserved` is the memory of one microbatch on each rank, reserved before the microbatch starts there. None: each
    forward pass reserves its own memory.
    """

    def __init__(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        reserved: Sequence[float] | None,
    ) -> None:
        self.placement, self.num_microbatches, self.costs, self.limits = placement, num_microbatches, costs, limits
        self.reserved = reserved
        self.stages = [[s for s, owner in enumerate(placement) if owner == rank] for rank in range(len(limits))]
        self.next_microbatch = {
            (kind, stage): 0 for kind in (Kind.FORWARD, Kind.INPUT) for stage in range(len(placement))
        }
        self.scheduler = ListScheduler(len(limits), placement, costs, self._change)

    def run(self) -> tuple[Order, ...]:
        """Return the actions of all ranks, in the order in which they are decided."""
        orders = self.scheduler.run(self._choose, self._count)
        if sum(map(len, orders)) < 3 * self.num_microbatches * len(self.placement):
            raise ScheduleError("a greedy schedule cannot continue within its memory", hint="raise memory_limit")
        return orders

    def _choose(self, rank: int) -> Action | None:
        return min(self._candidates(rank), default=(0.0, 0, None))[-1]

    def _count(self, _: int, action: Action) -> None:
        self.next_microbatch[action.kind, action.stage] += 1

    def _change(self, action: Action) -> float:
        """Return the memory that an action allocates; negative if the action frees memory."""
        if self.reserved is None or action.kind is not Kind.FORWARD:
            return self.costs.kept(action)
        rank = self.placement[action.stage]
        return self.reserved[rank] if action.stage == self.stages[rank][0] else 0.0

    def _candidates(self, rank: int) -> Iterator[tuple[float, int, Action]]:
        """Yield the possible next actions: start time, urgency (lower is more urgent), and the action."""
        for stage in self.stages[rank]:
            for kind in (Kind.INPUT, Kind.FORWARD):
                action = Action(stage, kind, self.next_microbatch[kind, stage])
                if action.microbatch == self.num_microbatches:
                    continue
                if (
                    kind is Kind.FORWARD
                    and self.scheduler.memory[rank] + self._change(action) > self.limits[rank] + 1e-9
                ):
                    continue
                # Input passes come first, the earliest stage before later ones. Of forward passes, the latest stage
                # comes first.
                urgency = stage if kind is Kind.INPUT else 2 * len(self.placement) - stage
                yield max(self.scheduler.ready_time(action), self.scheduler.times[rank]), urgency, action
