"""Search for a schedule by its name, for any number of stages and microbatches, costs and memory limits.

A named schedule has a `Recipe`, which lists candidate orders; the search returns the fastest. ``auto`` compares named
schedules, named schedules packed into ticks (`TickPacker`), and greedy schedules, all within its memory limit. If there
are many microbatches, it ranks candidates for a smaller number, and then compares the best four for the full number.
The result is not always optimal: an optimum needs an integer program (Qi et al., "Zero Bubble Pipeline Parallelism",
2024). In this file, `chunks` is the number of stages per rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from types import NoneType
from typing import Any

from ...core import ConfigError, ScheduleError, check_choice, check_integer, check_type, is_count
from ._orders import NAMED, ListScheduler, Recipe, TickPacker, WeightPolicy, place_stages, place_weights
from ._schedule import Action, Costs, Kind, Order, Schedule
from ._simulation import simulate


def schedule(
    name: str = "auto",
    *,
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    lockstep: bool = True,
) -> Schedule:
    """Make a pipeline schedule.

    Args:
        name: one of `SCHEDULES`. ``"auto"`` searches for the fastest schedule for `costs` and `memory_limit`. Its
            candidates are the named schedules with this `stages_per_rank`, and others that it builds. Without `costs`,
            a pipeline repeats the search with the costs of its stages (`Schedule.fitted`).
        num_stages: number of parts of the model.
        num_microbatches: number of parts of a batch; it need not be a multiple of the number of ranks.
        stages_per_rank: number of stages on each rank; by default 1, or 2 where the schedule needs more than one.
        costs: time and memory of actions, used to place weight passes and compare candidates; by default `Costs()`.
        memory_limit: most memory of a rank in the unit of `costs`, or one such number for each rank. In `Costs()` the
            unit is the residuals of one microbatch in one stage. If None, the limit of ``"auto"`` is the residuals of
            ``2 * num_ranks - 1`` microbatches on the fullest rank, where ``num_ranks = num_stages / stages_per_rank``.
            Named schedules then use their own limits, if any. The search raises these limits if unequal stages cannot
            stay within them.
        lockstep: whether to optimise for ranks in lockstep, as `value_and_grad` runs them, or for asynchronous ranks.
            It matters for ``"auto"`` and for V-schedules.

    Returns:
        The validated schedule.

    Raises:
        ConfigError: for an unknown name, numbers that do not fit each other, costs that do not match the number of
            stages, a wrong `memory_limit`, or more than 131,072 forward passes (stages times microbatches, counting at
            least two microbatches per rank).
        ScheduleError: when no schedule of this name stays within `memory_limit`.

    Examples:
        >>> print(schedule("1f1b", num_stages=2, num_microbatches=2).to_text())
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    check_choice("name", name, SCHEDULES)
    if costs is not None:
        check_type("costs", costs, Costs, "a lowtide.pipeline.Costs", hint="pass costs=Costs(forward=1, input=1.2)")
    limit: Any = memory_limit
    if isinstance(limit, (str, bytes)):
        hint = "pass bytes to lowtide.pipeline.value_and_grad(memory_limit=...), which measures the stages"
        raise ConfigError(f"memory_limit is the text {limit!r}, but a schedule does not count bytes", hint=hint)
    recipe = NAMED.get(name, _AUTO)
    chunks = _chunks(name, recipe, num_stages, num_microbatches, stages_per_rank)
    num_ranks = num_stages // chunks
    if name == "auto":
        limit = limit.tolist() if hasattr(limit, "tolist") else limit
        limit = tuple(limit) if isinstance(limit, Sequence) else limit
        auto_search = _AutoSearch(num_stages, num_microbatches, chunks, limit, lockstep)
        result = auto_search.best(costs or Costs(), limit)
        if costs is not None:
            return result
        # Without costs, the schedule keeps the search, so that `Schedule.fitted` can repeat it with real costs.
        return dataclasses.replace(result, remake=dataclasses.replace(auto_search, placement=result.placement))
    costs = costs or Costs()
    costs.refuse_other(num_stages)
    placement = place_stages(num_ranks, chunks, is_v=recipe.is_v)
    limits = _limits(recipe, placement, chunks, costs, memory_limit)
    search = _NamedSearch(name, recipe, num_ranks, chunks, num_microbatches, placement, costs, lockstep)
    if memory_limit is None:
        # Use the schedule's own limits. If unequal stages do not fit, raise all limits by a common factor.
        for factor in (1.125**power for power in range(40)):
            with contextlib.suppress(ScheduleError):
                return search.best([factor * limit for limit in limits])
        return search.best([math.inf] * len(limits))
    result = search.best(limits)
    for rank, (peak, limit) in enumerate(zip(simulate(result, costs).peaks, limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            problem = f"{result.name}: rank {rank} needs more than its memory_limit, {peak:g} instead of {limit:g}"
            raise ScheduleError(problem, hint="choose v-half or v-min, which need less, or raise memory_limit")
    return result


_PACKINGS: tuple[tuple[bool, WeightPolicy], ...] = (
    (True, "free"),
    (True, "together"),
    (True, "at once"),  # with the order of ZB-H2 the makespan is that of `scan_makespan`
    (False, "free"),
    (False, "together"),
)


@dataclasses.dataclass(frozen=True)
class _AutoSearch:
    """Search for the best schedule of ``auto``. A call repeats the search for other costs (`Schedule.remake`)."""

    num_stages: int
    num_microbatches: int
    chunks: int
    memory_limit: float | tuple[float, ...] | None
    """The limit that the user gave, or None."""
    lockstep: bool
    placement: tuple[int, ...] | None = None
    """Required rank of each stage, for layers that are placed before their costs are known; None allows any."""

    def __call__(self, costs: Costs, memory_limit: float | Sequence[float] | None) -> Schedule:
        limits: Any = memory_limit
        limit: Any = limits if isinstance(limits, (Real, NoneType)) else tuple(limits)
        return _cached_best(self, costs, limit if self.memory_limit is None else self.memory_limit)

    def best(self, costs: Costs, memory_limit: float | tuple[float, ...] | None) -> Schedule:
        """Return the best schedule for costs and a memory limit; None stands for the default limit of ``auto``."""
        costs.refuse_other(self.num_stages)
        chunks, num_ranks = self.chunks, self.num_stages // self.chunks
        limits = _limits(_AUTO, place_stages(num_ranks, chunks, is_v=False), chunks, costs, memory_limit)
        limits = limits if memory_limit is not None else [max(limits)] * num_ranks

        named = partial(
            schedule, num_stages=self.num_stages, stages_per_rank=chunks, costs=costs, lockstep=self.lockstep
        )

        @functools.cache
        def make(num_microbatches: int, name: str) -> Schedule:
            return named(name, num_microbatches=num_microbatches, memory_limit=memory_limit)

        def pack(num_microbatches: int, name: str, in_pairs: bool, weight_policy: WeightPolicy) -> Schedule:
            unpacked = make(num_microbatches, name)
            return TickPacker(unpacked, costs, limits, in_pairs=in_pairs, weight_policy=weight_policy).run()

        recipes = {
            name: recipe
            for name, recipe in NAMED.items()
            if chunks in recipe.chunks or (not recipe.chunks and chunks > 1)
        }
        candidates: list[_ScheduleMaker] = [partial(make, name=name) for name in recipes]
        candidates += [
            partial(pack, name=name, in_pairs=in_pairs, weight_policy=weight_policy)
            for name, recipe in recipes.items()
            for in_pairs, weight_policy in _PACKINGS
            if recipe.is_open
        ]
        if not self.lockstep or memory_limit is not None:  # a limit may rule out all named schedules
            candidates += _greedy_makers(num_ranks, chunks, costs, limits)
        return dataclasses.replace(self._find_best(candidates, costs, limits), name="auto")

    def _find_best(self, makers: list[_ScheduleMaker], costs: Costs, limits: Sequence[float]) -> Schedule:
        """Return the candidate with the smallest makespan within the limits; a tie goes to the lowest peak memory.

        Raises `ScheduleError` when no candidate is within the limits.
        """

        def rate(maker: _ScheduleMaker, count: int) -> tuple[float, float, Schedule] | None:
            try:
                candidate = maker(count)
            except ScheduleError:
                return None
            if self.placement is not None and candidate.placement != self.placement:
                return None
            run = simulate(candidate, costs, lockstep=self.lockstep)
            if any(peak > limit * (1 + 1e-9) for peak, limit in zip(run.peaks, limits, strict=True)):
                return None
            return round(run.makespan, 9), max(run.peaks), candidate  # sums in another order differ by rounding

        num_trials = _num_trial_microbatches(self.num_microbatches, len(limits))
        rated = [(*rating, i) for i, maker in enumerate(makers) if (rating := rate(maker, num_trials)) is not None]
        rated.sort(key=lambda entry: (entry[:2], entry[3]))
        if num_trials == self.num_microbatches and rated:
            return rated[0][2]
        # With few microbatches, the start and the end weigh more than the middle. So the best four candidates within
        # the limits are compared with all microbatches.
        fitting = (rating for _, _, _, i in rated if (rating := rate(makers[i], self.num_microbatches)) is not None)
        finalists = list(itertools.islice(fitting, 4))
        if finalists:
            return min(finalists, key=lambda rating: rating[:2])[2]
        texts = ", ".join(f"{limit:g}" for limit in limits)
        hint = "raise memory_limit to at least one microbatch's residuals on each rank, or use more stages"
        raise ScheduleError(f"no schedule stays within the memory_limit of {texts}", hint=hint)


@functools.lru_cache(maxsize=128)
def _cached_best(search: _AutoSearch, costs: Costs, memory_limit: float | tuple[float, ...] | None) -> Schedule:
    return search.best(costs, memory_limit)


def _num_trial_microbatches(num_microbatches: int, num_ranks: int) -> int:
    """Return a number of microbatches that is enough to rank candidates: the middle of a schedule repeats itself."""
    return min(num_microbatches, max(4 * num_ranks, 16))


@dataclasses.dataclass(frozen=True)
class _NamedSearch:
    """Search for the best order of a named schedule, for given sizes, placement and costs."""

    name: str
    recipe: Recipe
    num_ranks: int
    chunks: int
    num_microbatches: int
    placement: tuple[int, ...]
    costs: Costs
    lockstep: bool

    def best(self, limits: list[float]) -> Schedule:
        """Return the fastest candidate; raise `ScheduleError` if inserted weight passes cannot stay within `limits`."""
        costs = [self.costs]
        if self.recipe.is_open and self.recipe.is_v and not _has_equal_costs(self.costs):
            # In lockstep, filling a gap can cost more than keeping the pattern of equal passes. So weight passes are
            # also placed as if all passes had equal costs. The real costs decide between both results.
            costs.append(dataclasses.replace(self.costs, forward=1.0, input=1.0, weight=1.0, communication=0.0))
        num_trials = _num_trial_microbatches(self.num_microbatches, self.num_ranks)
        results: list[tuple[float, int, int]] = []
        errors: list[ScheduleError] = []
        for order_index, order in enumerate(self._orders(num_trials)):
            for cost_index, placing_costs in enumerate(costs):
                try:
                    result = self._build(order, num_trials, placing_costs, limits)
                except ScheduleError as error:
                    errors.append(error)
                    continue
                makespan = simulate(result, self.costs, lockstep=self.lockstep).makespan
                results.append((round(makespan, 9), order_index, cost_index))
        for _, order_index, cost_index in sorted(results):
            order = next(itertools.islice(self._orders(self.num_microbatches), order_index, None))
            try:
                return self._build(order, self.num_microbatches, costs[cost_index], limits)
            except ScheduleError as error:
                errors.append(error)
        raise errors[0]

    def _orders(self, num_microbatches: int) -> Iterator[Any]:
        for orders in self.recipe.orders(self.num_ranks, self.chunks, num_microbatches):
            yield [[action for action in order if action.microbatch < num_microbatches] for order in orders]

    def _build(self, orders: Any, num_microbatches: int, placing_costs: Costs, limits: list[float]) -> Schedule:
        if self.recipe.is_open:
            orders = place_weights(orders, self.placement, placing_costs, limits)
        orders = tuple(map(tuple, orders))
        return Schedule(name=self.name, num_microbatches=num_microbatches, placement=self.placement, orders=orders)


_MAX_PASSES = 2**17
"""Largest product of microbatches and stages. Every pass needs Python objects, and entries of the program's tables."""


def _has_equal_costs(costs: Costs) -> bool:
    """Return whether all passes of all stages take the same time, and transfers take no time."""
    times = (costs.forward, costs.input, costs.weight)
    values = {value for time in times for value in (time if isinstance(time, Sequence) else [time])}
    return len(values) == 1 and not costs.communication


def _chunks(name: str, recipe: Recipe, num_stages: int, num_microbatches: int, stages_per_rank: int | None) -> int:
    """Return the number of stages per rank."""
    check_integer("num_stages", num_stages)
    check_integer("num_microbatches", num_microbatches)
    chunks = stages_per_rank
    if chunks is None:
        chunks = 1 if recipe is _AUTO else (recipe.chunks or (2,))[0]
    if not is_count(chunks, 1) or (recipe.chunks and chunks not in recipe.chunks):
        allowed = " or ".join(map(str, recipe.chunks)) or "an integer of at least 1"
        hint = "choose interleaved, interleaved-zb, looped-bfs or auto, which take any number of stages per rank"
        raise ConfigError(f"{name}: stages_per_rank must be {allowed}, not {stages_per_rank!r}", hint=hint)
    # ZB-V and DualPipeV make orders for at least two microbatches per rank, and then drop the surplus.
    num_passes = num_stages * max(num_microbatches, 2 * num_stages // chunks)
    if num_passes > _MAX_PASSES:
        raise ConfigError(
            f"{name}: {num_stages} stages and {num_microbatches} microbatches are more than one schedule can hold",
            expected=f"at most {_MAX_PASSES:,} passes of microbatches through stages",
            got=f"{num_passes:,}",
            hint="use fewer, larger microbatches, and add up the gradients of several batches (optax.MultiSteps): "
            "from about eight microbatches per rank the bubble is small",
        )
    if num_stages % chunks:
        problem = f"num_stages must be a multiple of {chunks}, the stages per rank of {name}, not {num_stages}"
        raise ConfigError(problem, hint="count all parts of the model in num_stages, not ranks")
    return chunks


def _limits(
    recipe: Recipe, placement: Sequence[int], chunks: int, costs: Costs, memory_limit: float | Sequence[float] | None
) -> list[float]:
    num_ranks = len(placement) // chunks
    if memory_limit is not None:
        limit: Any = memory_limit
        limit = limit.tolist() if hasattr(limit, "tolist") else limit  # measured limits are NumPy arrays
        limits: list[Any] = [*limit] if isinstance(limit, Sequence) else [limit] * num_ranks
        # This check refuses NaN, too.
        if len(limits) != num_ranks or not all(isinstance(value, Real) and float(value) > 0 for value in limits):
            expected = f"a number above 0, or a list of {num_ranks} such numbers, one per rank"
            hint = "give limits in the unit of Costs.weight_residuals"
            raise ConfigError(f"memory_limit must be {expected}, not {memory_limit!r}", hint=hint)
        return limits
    if recipe.limit is None:
        return [math.inf] * num_ranks
    return costs.by_rank(placement, recipe.limit(num_ranks, chunks))


_AUTO = Recipe(orders=lambda *_: iter(()), is_open=True, chunks=(), limit=lambda num_ranks, _: 2 * num_ranks - 1)
SCHEDULES = (*NAMED, "auto")
"""The names that `schedule` takes."""


_ScheduleMaker = Callable[[int], Schedule]
"""Function that makes a schedule for a given number of microbatches."""


def _greedy_makers(num_ranks: int, chunks: int, costs: Costs, limits: Sequence[float]) -> Iterator[_ScheduleMaker]:
    """Yield makers of greedy schedules, for each placement and several limits on the microbatches that a rank holds."""
    for is_v in (False, True)[: 2 if chunks > 1 else 1]:
        placement = place_stages(num_ranks, chunks, is_v=is_v)
        microbatch_memory = costs.by_rank(placement)
        # Numbers of microbatches that a rank may hold at one time. None: a rank starts a microbatch only if it has
        # memory for all passes of the microbatch. So a limit of one microbatch cannot block the rank.
        start_limits = (num_ranks, num_ranks + 1, 3 * num_ranks // 2, 2 * num_ranks - 1, 2 * num_ranks, math.inf, None)
        for max_started in start_limits:
            caps = [
                min(limit, (max_started or math.inf) * memory if memory else math.inf)
                for limit, memory in zip(limits, microbatch_memory, strict=True)
            ]
            reserved = microbatch_memory if max_started is None else None
            yield partial(_make_greedy, placement, costs, caps, reserved)


def _make_greedy(
    placement: tuple[int, ...],
    costs: Costs,
    limits: Sequence[float],
    reserved: Sequence[float] | None,
    num_microbatches: int,
) -> Schedule:
    orders = _Greedy(placement, num_microbatches, costs, limits, reserved).run()
    return Schedule(name="auto", num_microbatches=num_microbatches, placement=placement, orders=orders)


class _Greedy:
    """Mutable state of a greedy search, which chooses the next action of every rank without a given order of passes.

    A rank runs the action that can start first. An input pass, which another rank waits for, comes before a forward
    pass that could start at the same time. A forward pass must fit into memory. A weight pass fills waiting time.

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
        self.scheduler = ListScheduler(len(limits), placement, costs, self._memory_change)

    def run(self) -> tuple[Order, ...]:
        """Return the order of each rank; raise `ScheduleError` if a rank cannot continue within its memory."""
        orders = self.scheduler.run(self._choose, self._count)
        if sum(map(len, orders)) < 3 * self.num_microbatches * len(self.placement):
            raise ScheduleError("a greedy schedule cannot continue within its memory", hint="raise memory_limit")
        return orders

    def _choose(self, rank: int) -> Action | None:
        return min(self._candidates(rank), default=(0.0, 0, None))[-1]

    def _count(self, _: int, action: Action) -> None:
        self.next_microbatch[action.kind, action.stage] += 1

    def _memory_change(self, action: Action) -> float:
        """Return the memory change; with `reserved`, F of a rank's first stage takes the memory of all its stages."""
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
                    and self.scheduler.memory[rank] + self._memory_change(action) > self.limits[rank] + 1e-9
                ):
                    continue
                # Among actions that can start at the same time, input passes come first, those of earlier stages before
                # later ones. Among forward passes, the latest stage comes first.
                urgency = stage if kind is Kind.INPUT else 2 * len(self.placement) - stage
                yield max(self.scheduler.ready_time(action), self.scheduler.times[rank]), urgency, action
