"""List scheduling: insert weight passes into a given order of forward and input passes, so that ranks wait least.

A weight pass needs only its input pass, and no other pass needs its result. So it can run where its rank would be idle,
or where the memory that it frees is needed. Zero-bubble schedules fill the bubble in this way (Qi et al., "Zero Bubble
Pipeline Parallelism", 2024). The algorithm is greedy and looks only at the next action of a rank, so the result is not
always optimal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from ...core import ScheduleError
from ._actions import Action, Kind
from ._costs import Costs
from ._schedule import Ends, Order, ready_time, result_key

_TOLERANCE = 1e-9


class ListScheduler:
    """Mutable state of list scheduling: each rank runs its chosen action, or a weight pass if it would wait.

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
