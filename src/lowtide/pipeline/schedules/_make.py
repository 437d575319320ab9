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
from ._auto import Maker, best, greedy_orders
from ._costs import Costs
from ._listing import place_weights
from ._named import NAMED, Named, placed
from ._packing import Weights, packed
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
        near = get_close_matches(str(name).lower(), SCHEDULES)
        raise ConfigError(
            f"unknown schedule {name!r}",
            expected=f"one of {', '.join(SCHEDULES)}",
            got=repr(name),
            hint=f"near misses: {', '.join(near)}" if near else "lowtide.pipeline.SCHEDULES has the names",
        )
    given: Any = costs
    if not (given is None or isinstance(given, Costs)):
        raise ConfigError(
            "costs are no costs", expected="lowtide.pipeline.Costs", got=repr(given), hint="Costs(forward=1, input=1.2)"
        )
    limit: Any = memory_limit
    if isinstance(limit, (str, bytes)):
        raise ConfigError(
            "memory_limit is text, and a schedule knows no bytes",
            expected="a number in the unit of Costs.weight_residuals, or a list of numbers, one a rank",
            got=repr(limit),
            hint="bytes belong in lowtide.pipeline.value_and_grad(memory_limit=...), which measures the stages",
        )
    named = NAMED.get(name, _AUTO)
    chunks = _chunks(name, named, num_stages, num_microbatches, stages_per_rank)
    num_ranks = num_stages // chunks
    if name == "auto":
        limit = limit.tolist() if hasattr(limit, "tolist") else limit
        limit = tuple(limit) if isinstance(limit, Sequence) else limit
        how = _Auto(num_stages, num_microbatches, chunks, limit, lockstep)
        # Without costs, the schedule keeps the recipe, so that `Schedule.fitted` can make it again for real costs.
        made = how.best(costs or Costs(), limit, None)
        return made if costs is not None else dataclasses.replace(made, remake=_Remake(how, made.placement))
    costs = costs or Costs()
    costs.refuse_other(num_stages)
    placement = placed(num_ranks, chunks, is_v=named.is_v)
    limits = _limits(named, placement, chunks, costs, memory_limit)
    job = _Job(name, named, num_ranks, chunks, num_microbatches, placement, costs, lockstep)
    if memory_limit is None:
        return _roomy(job, limits)
    made = job.best(limits)
    _refuse_too_much(made, costs, limits)
    return made


_PACKINGS: tuple[tuple[bool, Weights], ...] = (
    (True, "free"),
    (True, "together"),
    (True, "at once"),  # with the order of ZB-H2: (M + R - 1) * (F + I + W), the time of a scan
    (False, "free"),
    (False, "together"),
)


@dataclasses.dataclass(frozen=True)
class _Auto:
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
        limits = _limits(_AUTO, placed(num_ranks, self.chunks, is_v=False), self.chunks, costs, memory_limit)
        limits = limits if memory_limit is not None else [max(limits)] * num_ranks

        @functools.cache
        def make(number: int, other: str) -> Schedule:
            sizes: Any = {"num_stages": self.num_stages, "stages_per_rank": self.chunks, "num_microbatches": number}
            return schedule(other, **sizes, costs=costs, memory_limit=memory_limit, lockstep=self.lockstep)

        def pack(number: int, other: str, in_pairs: bool, weights: Weights) -> Schedule:
            return packed(make(number, other), costs, limits, in_pairs=in_pairs, weights=weights)

        chunks = self.chunks
        fitting = {n: one for n, one in NAMED.items() if chunks in one.chunks or (not one.chunks and chunks > 1)}
        candidates: list[Maker] = [partial(make, other=other) for other in fitting]
        candidates += [
            partial(pack, other=other, in_pairs=in_pairs, weights=weights)
            for other, one in fitting.items()
            for in_pairs, weights in _PACKINGS
            if one.is_open
        ]
        if not self.lockstep or memory_limit is not None:  # a limit may rule out all named ones
            candidates += greedy_orders(num_ranks, self.chunks, costs, limits)
        number = self.num_microbatches
        telling = _telling(number, num_ranks)
        made = best(candidates, number, telling, costs, limits, lockstep=self.lockstep, placement=placement)
        return dataclasses.replace(made, name="auto")


@dataclasses.dataclass(frozen=True)
class _Remake:
    """Makes a schedule for other costs with the same placement: layers are placed before their costs are known."""

    how: _Auto
    placement: tuple[int, ...]

    @property
    def memory_limit(self) -> float | tuple[float, ...] | None:
        """The memory limit that the user gave."""
        return self.how.memory_limit

    def __call__(self, costs: Costs, memory_limit: float | Sequence[float] | None) -> Schedule:
        limit: Any = tuple(memory_limit) if isinstance(memory_limit, Sequence) else memory_limit
        return _remade(self, costs, limit if self.memory_limit is None else self.memory_limit)


@functools.lru_cache(maxsize=128)
def _remade(one: _Remake, costs: Costs, memory_limit: float | tuple[float, ...] | None) -> Schedule:
    return one.how.best(costs, memory_limit, one.placement)


def _roomy(job: _Job, limits: list[float]) -> Schedule:
    """Make the schedule within its own limits, or within the smallest larger ones that unequal stages need."""
    for factor in (1.125**power for power in range(40)):
        with contextlib.suppress(ScheduleError):
            return job.best([factor * limit for limit in limits])
    return job.best([math.inf] * len(limits))


def _telling(num_microbatches: int, num_ranks: int) -> int:
    """Return how many microbatches are enough to rank candidates: the middle of a schedule repeats itself."""
    return min(num_microbatches, max(4 * num_ranks, 16))


@dataclasses.dataclass(frozen=True)
class _Job:
    """Sizes, placement and costs of a named schedule."""

    name: str
    named: Named
    num_ranks: int
    chunks: int
    num_microbatches: int
    placement: tuple[int, ...]
    costs: Costs
    lockstep: bool

    def best(self, limits: list[float]) -> Schedule:
        """Return the schedule that ends first within the limits, among the orders that the name stands for.

        Raises:
            ScheduleError: when no order is within the limits.
        """
        costs = [self.costs]
        if self.named.is_open and self.named.is_v and not _are_equal(self.costs):
            # In lockstep, filling a gap can cost more than keeping the pattern of equal passes. So weight passes are
            # also placed by equal costs, and both results are compared by the real costs.
            costs.append(dataclasses.replace(self.costs, forward=1.0, input=1.0, weight=1.0, communication=0.0))
        telling = _telling(self.num_microbatches, self.num_ranks)
        found: list[tuple[float, int, int]] = []
        errors: list[ScheduleError] = []
        for number, order in enumerate(self._orders(telling)):
            for which, by in enumerate(costs):
                try:
                    made = self._made(order, telling, by, limits)
                except ScheduleError as error:
                    errors.append(error)
                    continue
                end = simulate(made, self.costs, lockstep=self.lockstep).makespan
                found.append((round(end, 9), number, which))
        for _, number, which in sorted(found):
            order = next(itertools.islice(self._orders(self.num_microbatches), number, None))
            try:
                return self._made(order, self.num_microbatches, costs[which], limits)
            except ScheduleError as error:
                errors.append(error)
        raise errors[0]

    def _orders(self, num: int) -> Iterator[Any]:
        for whole in self.named.orders(self.num_ranks, self.chunks, num):
            yield [[action for action in order if action.microbatch < num] for order in whole]

    def _made(self, orders: Any, num: int, by: Costs, limits: list[float]) -> Schedule:
        if self.named.is_open:
            orders = place_weights(orders, self.placement, by, limits)
        orders = tuple(map(tuple, orders))
        return Schedule(name=self.name, num_microbatches=num, placement=self.placement, orders=orders)


_MOST = 2**17
"""Largest number of microbatches times stages. Each such pass is a row of Python objects and a column of the program's
tables."""


def _are_equal(costs: Costs) -> bool:
    """Return whether all passes of all stages take the same time and transfers take none."""
    times = (costs.forward, costs.input, costs.weight)
    each = {one for time in times for one in (time if isinstance(time, Sequence) else [time])}
    return len(each) == 1 and not costs.communication


def _chunks(name: str, named: Named, num_stages: int, num_microbatches: int, stages_per_rank: int | None) -> int:
    """Return the number of stages per rank."""
    for what, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if not is_count(number, 1):
            raise ConfigError(
                f"{what} has to be an integer of at least 1", expected="an int", got=repr(number), hint=f"{what}=4"
            )
    chunks = stages_per_rank
    if chunks is None:
        chunks = 1 if named is _AUTO else (named.chunks or (2,))[0]
    fits = is_count(chunks, 1) and (not named.chunks or chunks in named.chunks)
    if not fits:
        raise ConfigError(
            f"{name} cannot have {chunks} stages a rank",
            expected=" or ".join(map(str, named.chunks)) if named.chunks else "1 or more",
            got=repr(stages_per_rank),
            hint="interleaved, interleaved-zb, looped-bfs and auto take any number of stages a rank",
        )
    # V-schedules and interleaved ones are cut from schedules with at least two microbatches per rank.
    if num_stages * max(num_microbatches, 2 * num_stages // chunks) > _MOST:
        raise ConfigError(
            f"{name}: {num_stages} stages and {num_microbatches} microbatches are more than one schedule can hold",
            expected=f"at most {_MOST:,} passes of microbatches through stages",
            got=f"{num_stages * num_microbatches:,}",
            hint="have fewer, larger microbatches, and add up the gradients of several batches (optax.MultiSteps): "
            "from about eight microbatches a rank the bubble is small",
        )
    if num_stages % chunks:
        raise ConfigError(
            f"{name} has {chunks} stages a rank, which do not divide the number of stages",
            expected=f"a multiple of {chunks}",
            got=num_stages,
            hint="num_stages counts all parts of the model, not ranks",
        )
    return chunks


def _limits(
    named: Named,
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
        given: list[Any] = [*limit] if isinstance(limit, Sequence) else [limit] * num_ranks
        # This check refuses NaN, too.
        if len(given) != num_ranks or not all(isinstance(one, Real) and float(one) > 0 for one in given):
            raise ConfigError(
                "memory_limit is no limit for each rank",
                expected=f"a number above 0, or a list of {num_ranks} numbers, one a rank",
                got=repr(memory_limit),
                hint="in the unit of Costs.weight_residuals",
            )
        return given
    if named.limit is None:
        return [math.inf] * num_ranks
    return costs.by_rank(placement, named.limit(num_ranks, chunks))


def _refuse_too_much(made: Schedule, costs: Costs, limits: Sequence[float]) -> None:
    for rank, (peak, limit) in enumerate(zip(simulate(made, costs).peaks, limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            raise ScheduleError(
                f"{made.name}: rank {rank} keeps more than its memory_limit",
                expected=f"at most {limit:g}",
                got=f"{peak:g}",
                hint="v-half and v-min keep less; or raise memory_limit",
            )


_AUTO = Named(orders=lambda *_: iter(()), is_open=True, chunks=(), limit=lambda num_ranks, _: 2 * num_ranks - 1)
SCHEDULES = (*NAMED, "auto")
"""The names that `schedule` takes."""
