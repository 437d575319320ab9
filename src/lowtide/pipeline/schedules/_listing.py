"""List scheduling: of an order of forward and input passes, where the weight passes go, so that ranks wait least.

A weight pass waits only for its input pass, and nobody waits for it: it goes where its rank would be idle, or where the
memory that it frees is needed. That is how zero-bubble schedules fill the bubble (Qi et al., "Zero Bubble Pipeline
Parallelism", 2024). Greedy, so no optimum is claimed: a rank looks no further than its next action.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from ...core import ScheduleError
from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Order, gives, needs

_TOLERANCE = 1e-9


class _Rank:
    """A rank in mid-run."""

    def __init__(self, order: Sequence[Action], limit: float) -> None:
        self.order = deque(order)
        self.waiting: deque[Action] = deque()
        """Weight passes that may run."""
        self.done: list[Action] = []
        self.time, self.memory, self.limit = 0.0, 0.0, limit


def place_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], costs: Costs, limits: Sequence[float] | None = None
) -> tuple[Order, ...]:
    """Put the weight passes into orders of F and I.

    Args:
        orders: of each rank, F and I alone.
        placement: rank of each stage.
        costs: time and memory of actions.
        limits: memory of each rank, or None for no limit. A forward pass that would exceed it waits, also behind
            input passes that come later in the order.

    Returns:
        The orders with a W for each I.

    Raises:
        ScheduleError: when a limit is too small for the order.
    """
    limits = limits or [math.inf] * len(orders)
    ranks = [_Rank(order, limit) for order, limit in zip(orders, limits, strict=True)]
    ends: dict[tuple[Kind, int, int], float] = {}
    while True:
        active = [number for number, rank in enumerate(ranks) if rank.order or rank.waiting]
        if not active:
            return tuple(tuple(rank.done) for rank in ranks)
        # Nothing that is decided later can end before the time of the earliest rank.
        for number in sorted(active, key=lambda number: ranks[number].time):
            if _advance(ranks[number], placement, costs, ends):
                break
        else:
            _refuse(ranks, active)


def _advance(rank: _Rank, placement: Sequence[int], costs: Costs, ends: dict[tuple[Kind, int, int], float]) -> bool:
    """Let a rank do its next action; whether it could."""
    action = _next(rank, costs)
    ready = math.inf if action is None else _ready(action, placement, costs, ends)
    # A weight pass is worth it when less of it than half would be waited for.
    if rank.waiting and (action is None or ready - rank.time > costs.of(rank.waiting[0]) / 2 + _TOLERANCE):
        action, ready = rank.waiting[0], rank.time
        rank.waiting.popleft()
    elif action is None or ready == math.inf:
        return False
    else:
        rank.order.remove(action)
    rank.time = max(rank.time, ready) + costs.of(action)
    rank.memory += costs.kept(action)
    rank.done.append(action)
    ends[gives(action)] = rank.time
    if action.kind is Kind.INPUT:
        rank.waiting.append(action._replace(kind=Kind.WEIGHT))
    return True


def _next(rank: _Rank, costs: Costs) -> Action | None:
    """Return the next action of the order that memory allows; None when a weight pass has to free some first."""
    if not rank.order:
        return None
    action = rank.order[0]
    if action.kind is not Kind.FORWARD or rank.memory + costs.kept(action) <= rank.limit + _TOLERANCE:
        return action
    if rank.waiting:
        return None
    return next((later for later in rank.order if later.kind is Kind.INPUT and _has_run(rank, later)), None)


def _has_run(rank: _Rank, action: Action) -> bool:
    return action._replace(kind=Kind.FORWARD) in rank.done


def _ready(action: Action, placement: Sequence[int], costs: Costs, ends: dict[tuple[Kind, int, int], float]) -> float:
    """When what an action needs is on its rank; infinite when that is not known yet."""
    times = [0.0]
    for kind, stage in needs(action, len(placement)):
        is_here = placement[stage] == placement[action.stage]
        end = ends.get((kind, stage, action.microbatch), math.inf)
        times.append(end + (0.0 if is_here else costs.communication))
    return max(times)


def _refuse(ranks: Sequence[_Rank], active: Sequence[int]) -> None:
    number = next((number for number in active if ranks[number].limit < math.inf), active[0])
    rank = ranks[number]
    raise ScheduleError(
        f"rank {number} cannot go on within its memory",
        expected=f"a limit that lets it run {rank.order[0] if rank.order else 'on'}",
        got=f"{rank.memory:g} of {rank.limit:g} in use",
        hint="raise the limit, or choose auto, or a schedule that keeps less, such as v-half or v-min",
    )
