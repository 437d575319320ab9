"""Make a schedule from its name, for any number of stages and microbatches, costs and memory limits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from numbers import Real
from typing import Any

from ...core import ConfigError, ScheduleError, is_count
from ._auto import ScheduleMaker, best, greedy_orders
from ._costs import Costs
from ._listing import place_weights
from ._named import NAMED, Recipe, place_stages
from ._packing import WeightPolicy, pack_ticks
from ._schedule import Schedule
from ._simulate import simulate


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
        name: one of `SCHEDULES`. ``"auto"`` gives a schedule that is at least as good as every named one with the same
            stages_per_rank, for these costs and this memory. Without costs, a pipeline makes it again for the costs of
            its stages (`Schedule.fitted`).
        num_stages: number of parts of the model.
        num_microbatches: number of parts of a batch. Any number is allowed, also one that the pattern does not divide.
        stages_per_rank: number of stages on each rank; by default 1, or 2 where the schedule needs more than one.
        costs: time and memory of actions, used to place the weight passes; by default one unit each.
        memory_limit: the most that a rank may hold, or one such number for each rank. The unit is that of `costs`; by
            default it is the residuals of one microbatch in one stage. By default a named schedule has its own limit,
            if any; it is raised where stages differ so much that it cannot be kept. ``"auto"`` has a default of
            ``2 * num_ranks - 1`` microbatches.
        lockstep: whether to optimise for ranks in lockstep, as `value_and_grad` runs them, rather than for asynchronous
            ranks. It matters for ``"auto"`` and for V-schedules with unequal costs.

    Returns:
        The validated schedule.

    Raises:
        ConfigError: for an unknown name, numbers that do not fit each other, or costs of another number of stages.
        ScheduleError: when the schedule needs more than `memory_limit`.

    Examples:
        >>> print(schedule("1f1b", num_stages=2, num_microbatches=2).to_text())
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    if name not in SCHEDULES:
        close_matches = get_close_matches(str(name).lower(), SCHEDULES)
        raise ConfigError(
            f"unknown schedule {name!r}",
            expected=f"one of {', '.join(SCHEDULES)}",
            got=repr(name),
            hint=f"near misses: {', '.join(close_matches)}"
            if close_matches
            else "choose a name from lowtide.pipeline.SCHEDULES",
        )
    costs_value: Any = costs
    if not (costs_value is None or isinstance(costs_value, Costs)):
        raise ConfigError(
            "costs is not a Costs",
            expected="a lowtide.pipeline.Costs",
            got=repr(costs_value),
            hint="pass costs=Costs(forward=1, input=1.2)",
        )
    limit: Any = memory_limit
    if isinstance(limit, (str, bytes)):
        raise ConfigError(
            "memory_limit is text, but a schedule does not count bytes",
            expected="a number in the unit of Costs.weight_residuals, or a list with one number per rank",
            got=repr(limit),
            hint="pass bytes to lowtide.pipeline.value_and_grad(memory_limit=...), which measures the stages",
        )
    recipe = NAMED.get(name, _AUTO)
    chunks = _chunks(name, recipe, num_stages, num_microbatches, stages_per_rank)
    num_ranks = num_stages // chunks
    if name == "auto":
        limit = limit.tolist() if hasattr(limit, "tolist") else limit
        limit = tuple(limit) if isinstance(limit, Sequence) else limit
        auto_search = _AutoSearch(num_stages, num_microbatches, chunks, limit, lockstep)
        # Without costs, the schedule keeps the recipe, so that `Schedule.fitted` can make it again for real costs.
        result = auto_search.best(costs or Costs(), limit, None)
        return (
            result if costs is not None else dataclasses.replace(result, remake=_Remake(auto_search, result.placement))
        )
    costs = costs or Costs()
    costs.refuse_other(num_stages)
    placement = place_stages(num_ranks, chunks, is_v=recipe.is_v)
    limits = _limits(recipe, placement, chunks, costs, memory_limit)
    search = _NamedSearch(name, recipe, num_ranks, chunks, num_microbatches, placement, costs, lockstep)
    if memory_limit is None:
        return _best_relaxing_limits(search, limits)
    result = search.best(limits)
    _refuse_excess_memory(result, costs, limits)
    return result


_PACKINGS: tuple[tuple[bool, WeightPolicy], ...] = (
    (True, "free"),
    (True, "together"),
    (True, "at once"),  # with the order of ZB-H2: (M + R - 1) * (F + I + W), the time of a scan
    (False, "free"),
    (False, "together"),
)


@dataclasses.dataclass(frozen=True)
class _AutoSearch:
    """Sizes and limits within which ``auto`` searches for the best schedule."""

    num_stages: int
    num_microbatches: int
    chunks: int
    memory_limit: float | tuple[float, ...] | None
    lockstep: bool

    def best(
        self, costs: Costs, memory_limit: float | tuple[float, ...] | None, placement: tuple[int, ...] | None
    ) -> Schedule:
        """Return the best schedule for costs and a limit, with a given placement or with any."""
        costs.refuse_other(self.num_stages)
        num_ranks = self.num_stages // self.chunks
        limits = _limits(_AUTO, place_stages(num_ranks, self.chunks, is_v=False), self.chunks, costs, memory_limit)
        limits = limits if memory_limit is not None else [max(limits)] * num_ranks

        @functools.cache
        def make(num_microbatches: int, name: str) -> Schedule:
            sizes: Any = {
                "num_stages": self.num_stages,
                "stages_per_rank": self.chunks,
                "num_microbatches": num_microbatches,
            }
            return schedule(name, **sizes, costs=costs, memory_limit=memory_limit, lockstep=self.lockstep)

        def pack(num_microbatches: int, name: str, in_pairs: bool, weight_policy: WeightPolicy) -> Schedule:
            return pack_ticks(
                make(num_microbatches, name), costs, limits, in_pairs=in_pairs, weight_policy=weight_policy
            )

        chunks = self.chunks
        recipes = {
            name: recipe
            for name, recipe in NAMED.items()
            if chunks in recipe.chunks or (not recipe.chunks and chunks > 1)
        }
        candidates: list[ScheduleMaker] = [partial(make, name=name) for name in recipes]
        candidates += [
            partial(pack, name=name, in_pairs=in_pairs, weight_policy=weight_policy)
            for name, recipe in recipes.items()
            for in_pairs, weight_policy in _PACKINGS
            if recipe.is_open
        ]
        if not self.lockstep or memory_limit is not None:  # a limit may rule out all named ones
            candidates += greedy_orders(num_ranks, self.chunks, costs, limits)
        num_microbatches = self.num_microbatches
        num_trials = _num_trial_microbatches(num_microbatches, num_ranks)
        result = best(
            candidates, num_microbatches, num_trials, costs, limits, lockstep=self.lockstep, placement=placement
        )
        return dataclasses.replace(result, name="auto")


@dataclasses.dataclass(frozen=True)
class _Remake:
    """Makes a schedule for other costs with the same placement: layers are placed before their costs are known."""

    search: _AutoSearch
    placement: tuple[int, ...]

    @property
    def memory_limit(self) -> float | tuple[float, ...] | None:
        """The memory limit that the user gave."""
        return self.search.memory_limit

    def __call__(self, costs: Costs, memory_limit: float | Sequence[float] | None) -> Schedule:
        limit: Any = tuple(memory_limit) if isinstance(memory_limit, Sequence) else memory_limit
        return _make_again(self, costs, limit if self.memory_limit is None else self.memory_limit)


@functools.lru_cache(maxsize=128)
def _make_again(remake: _Remake, costs: Costs, memory_limit: float | tuple[float, ...] | None) -> Schedule:
    return remake.search.best(costs, memory_limit, remake.placement)


def _best_relaxing_limits(search: _NamedSearch, limits: list[float]) -> Schedule:
    """Make the schedule within its own limits, or within the smallest larger ones that unequal stages need."""
    for factor in (1.125**power for power in range(40)):
        with contextlib.suppress(ScheduleError):
            return search.best([factor * limit for limit in limits])
    return search.best([math.inf] * len(limits))


def _num_trial_microbatches(num_microbatches: int, num_ranks: int) -> int:
    """Return how many microbatches are enough to rank candidates: the middle of a schedule repeats itself."""
    return min(num_microbatches, max(4 * num_ranks, 16))


@dataclasses.dataclass(frozen=True)
class _NamedSearch:
    """Sizes, placement and costs of a named schedule."""

    name: str
    recipe: Recipe
    num_ranks: int
    chunks: int
    num_microbatches: int
    placement: tuple[int, ...]
    costs: Costs
    lockstep: bool

    def best(self, limits: list[float]) -> Schedule:
        """Return the schedule of this name that ends first within the limits; `ScheduleError` if none fits."""
        costs = [self.costs]
        if self.recipe.is_open and self.recipe.is_v and not _has_equal_costs(self.costs):
            # In lockstep, filling a gap can cost more than keeping the pattern of equal passes. So weight passes are
            # also placed by equal costs, and both results are compared by the real costs.
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
"""Largest number of microbatches times stages. Each such pass is a row of Python objects and a column of the program's
tables."""


def _has_equal_costs(costs: Costs) -> bool:
    """Return whether all passes of all stages take the same time and transfers take none."""
    times = (costs.forward, costs.input, costs.weight)
    values = {value for time in times for value in (time if isinstance(time, Sequence) else [time])}
    return len(values) == 1 and not costs.communication


def _chunks(name: str, recipe: Recipe, num_stages: int, num_microbatches: int, stages_per_rank: int | None) -> int:
    """Return the number of stages per rank."""
    for field, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if not is_count(value, 1):
            raise ConfigError(
                f"{field} has to be an integer of at least 1", expected="an int", got=repr(value), hint=f"set {field}=4"
            )
    chunks = stages_per_rank
    if chunks is None:
        chunks = 1 if recipe is _AUTO else (recipe.chunks or (2,))[0]
    is_allowed = is_count(chunks, 1) and (not recipe.chunks or chunks in recipe.chunks)
    if not is_allowed:
        raise ConfigError(
            f"{name} cannot have {chunks} stages per rank",
            expected=" or ".join(map(str, recipe.chunks)) if recipe.chunks else "1 or more",
            got=repr(stages_per_rank),
            hint="choose interleaved, interleaved-zb, looped-bfs or auto, which take any number of stages per rank",
        )
    # V-schedules and interleaved ones are cut from schedules with at least two microbatches per rank.
    if num_stages * max(num_microbatches, 2 * num_stages // chunks) > _MAX_PASSES:
        raise ConfigError(
            f"{name}: {num_stages} stages and {num_microbatches} microbatches are more than one schedule can hold",
            expected=f"at most {_MAX_PASSES:,} passes of microbatches through stages",
            got=f"{num_stages * num_microbatches:,}",
            hint="use fewer, larger microbatches, and add up the gradients of several batches (optax.MultiSteps): "
            "from about eight microbatches per rank the bubble is small",
        )
    if num_stages % chunks:
        raise ConfigError(
            f"num_stages is not a multiple of the {chunks} stages per rank of {name}",
            expected=f"a multiple of {chunks}",
            got=num_stages,
            hint="count all parts of the model in num_stages, not ranks",
        )
    return chunks


def _limits(
    recipe: Recipe,
    placement: Sequence[int],
    chunks: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None,
) -> list[float]:
    """Return the memory limit of each rank."""
    num_ranks = len(placement) // chunks
    if memory_limit is not None:
        limit: Any = memory_limit
        limit = limit.tolist() if hasattr(limit, "tolist") else limit  # measured limits are NumPy arrays
        limits: list[Any] = [*limit] if isinstance(limit, Sequence) else [limit] * num_ranks
        # This check refuses NaN, too.
        if len(limits) != num_ranks or not all(isinstance(value, Real) and float(value) > 0 for value in limits):
            raise ConfigError(
                "memory_limit does not set a limit for each rank",
                expected=f"a number above 0, or a list of {num_ranks} numbers, one per rank",
                got=repr(memory_limit),
                hint="give limits in the unit of Costs.weight_residuals",
            )
        return limits
    if recipe.limit is None:
        return [math.inf] * num_ranks
    return costs.by_rank(placement, recipe.limit(num_ranks, chunks))


def _refuse_excess_memory(result: Schedule, costs: Costs, limits: Sequence[float]) -> None:
    for rank, (peak, limit) in enumerate(zip(simulate(result, costs).peaks, limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            raise ScheduleError(
                f"{result.name}: rank {rank} needs more than its memory_limit",
                expected=f"at most {limit:g}",
                got=f"{peak:g}",
                hint="choose v-half or v-min, which need less, or raise memory_limit",
            )


_AUTO = Recipe(orders=lambda *_: iter(()), is_open=True, chunks=(), limit=lambda num_ranks, _: 2 * num_ranks - 1)
SCHEDULES = (*NAMED, "auto")
"""The names that `schedule` takes."""
