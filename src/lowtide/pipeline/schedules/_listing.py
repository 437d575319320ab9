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
from ._schedule import Ends, Order, gives, ready

_TOLERANCE = 1e-9


class ListScheduler:
    """State of all ranks during list scheduling: each runs its chosen action, or a weight pass if it would wait.

    Args:
        num_ranks: number of ranks.
        placement: rank of each stage.
        costs: time of actions.
        change: ``change(action)``: the memory that an action allocates; negative if the action frees memory.
    """

    def __init__(
        self, num_ranks: int, placement: Sequence[int], costs: Costs, change: Callable[[Action], float]
    ) -> None:
        self.placement, self.costs, self.change = placement, costs, change
        self.time, self.memory = [0.0] * num_ranks, [0.0] * num_ranks
        self.weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        """Weight passes of each rank whose input pass has run."""
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        """Actions that each rank has run."""
        self.ends: Ends = {}

    def run(self, choose: Callable[[int], Action | None], done: Callable[[int, Action], None]) -> tuple[Order, ...]:
        """Run until no rank can run another action.

        Args:
            choose: ``choose(rank)``: the next action of a rank other than a weight pass, or None.
            done: ``done(rank, action)`` is called after a chosen action has run.

        Returns:
            The order of actions on every rank, including weight passes.
        """
        ranks = range(len(self.orders))
        # The earliest rank goes first. Every action that is decided later ends after its current time, so its choice
        # stays valid.
        while any(self._advance(rank, choose, done) for rank in sorted(ranks, key=self.time.__getitem__)):
            pass
        return tuple(map(tuple, self.orders))

    def ready(self, action: Action) -> float:
        """Return the time at which the inputs of an action are on its rank; infinity while that time is unknown."""
        return ready(action, self.placement, self.ends, self.costs.communication)

    def _advance(self, rank: int, choose: Callable[[int], Action | None], done: Callable[[int, Action], None]) -> bool:
        """Run the next action of a rank; return whether there was one."""
        action, now, weights = choose(rank), self.time[rank], self.weights[rank]
        begin = math.inf if action is None else self.ready(action)
        # Run a weight pass if it fills at least half of its time with waiting. It then delays the chosen action by less
        # than half a weight pass.
        if weights and (action is None or begin - now > self.costs.of(weights[0]) / 2 + _TOLERANCE):
            action, begin = weights.popleft(), now
        elif action is None or begin == math.inf:
            return False
        else:
            done(rank, action)
        self.time[rank] = max(now, begin) + self.costs.of(action)
        self.memory[rank] += self.change(action)
        self.orders[rank].append(action)
        self.ends[gives(action)] = self.time[rank]
        if action.kind is Kind.INPUT:
            weights.append(action._replace(kind=Kind.WEIGHT))
        return True


def place_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], costs: Costs, limits: Sequence[float]
) -> tuple[Order, ...]:
    """Insert the weight passes into orders of F and I.

    Args:
        orders: F and I actions of each rank.
        placement: rank of each stage.
        costs: time and memory of actions.
        limits: memory of each rank. A forward pass that would exceed the limit waits. Input passes that come later in
            the order may run before it.

    Returns:
        The orders with one W for each I.

    Raises:
        ScheduleError: when a limit is too small for the order.
    """
    left = [deque(order) for order in orders]
    ranks = ListScheduler(len(orders), placement, costs, costs.kept)

    def choose(rank: int) -> Action | None:
        """Return the next action of the order that fits into memory; None if a weight pass has to free memory first."""
        if not left[rank]:
            return None
        action = left[rank][0]
        if action.kind is not Kind.FORWARD or ranks.memory[rank] + costs.kept(action) <= limits[rank] + _TOLERANCE:
            return action
        if ranks.weights[rank]:
            return None
        inputs = (later for later in left[rank] if later.kind is Kind.INPUT)
        return next((later for later in inputs if later._replace(kind=Kind.FORWARD) in ranks.orders[rank]), None)

    found = ranks.run(choose, lambda rank, action: left[rank].remove(action))
    stuck = [rank for rank, order in enumerate(left) if order]
    if stuck:
        rank = next((rank for rank in stuck if limits[rank] < math.inf), stuck[0])
        raise ScheduleError(
            f"rank {rank} cannot go on within its memory",
            expected=f"a limit that lets it run {left[rank][0]}",
            got=f"{ranks.memory[rank]:g} of {limits[rank]:g} in use",
            hint="raise the limit, or choose auto, or a schedule that keeps less, such as v-half or v-min",
        )
    return found
