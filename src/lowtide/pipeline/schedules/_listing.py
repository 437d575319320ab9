"""List scheduling: of an order of forward and input passes, where the weight passes go, so that ranks wait least.

A weight pass waits only for its input pass, and nobody waits for it: it goes where its rank would be idle, or where the
memory that it frees is needed. That is how zero-bubble schedules fill the bubble (Qi et al., "Zero Bubble Pipeline
Parallelism", 2024). Greedy, so no optimum is claimed: a rank looks no further than its next action.
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
    """Ranks in mid-run: each does the action that is chosen for it, or a weight pass where it would wait for that.

    Args:
        num_ranks: how many there are.
        placement: rank of each stage.
        costs: time of actions.
        change: of an action, how much memory it takes, or frees where it is negative.
    """

    def __init__(
        self, num_ranks: int, placement: Sequence[int], costs: Costs, change: Callable[[Action], float]
    ) -> None:
        self.placement, self.costs, self.change = placement, costs, change
        self.time, self.memory = [0.0] * num_ranks, [0.0] * num_ranks
        self.weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
        """Weight passes that may run."""
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        """What every rank has done."""
        self.ends: Ends = {}

    def run(self, choose: Callable[[int], Action | None], done: Callable[[int, Action], None]) -> tuple[Order, ...]:
        """Run until no rank can do anything.

        Args:
            choose: the next action of a rank other than a weight pass, if there is one.
            done: called with a rank and what was chosen, when it has run.

        Returns:
            The order of actions on every rank, weight passes among them.
        """
        ranks = range(len(self.orders))
        # Nothing that is decided later can end before the time of the earliest rank.
        while any(self._advance(rank, choose, done) for rank in sorted(ranks, key=self.time.__getitem__)):
            pass
        return tuple(map(tuple, self.orders))

    def ready(self, action: Action) -> float:
        """When what an action needs is on its rank; infinite when that is not known yet."""
        return ready(action, self.placement, self.ends, self.costs.communication)

    def _advance(self, rank: int, choose: Callable[[int], Action | None], done: Callable[[int, Action], None]) -> bool:
        """Let a rank do its next action; whether it could."""
        action, now, weights = choose(rank), self.time[rank], self.weights[rank]
        begin = math.inf if action is None else self.ready(action)
        # A weight pass is worth it when less of it than half would be waited for.
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
    """Put the weight passes into orders of F and I.

    Args:
        orders: of each rank, F and I alone.
        placement: rank of each stage.
        costs: time and memory of actions.
        limits: memory of each rank. A forward pass that would exceed it waits, also behind input passes that come
            later in the order.

    Returns:
        The orders with a W for each I.

    Raises:
        ScheduleError: when a limit is too small for the order.
    """
    left = [deque(order) for order in orders]
    ranks = ListScheduler(len(orders), placement, costs, costs.kept)

    def choose(rank: int) -> Action | None:
        """Return the next action of the order that memory allows; None when a weight pass has to free some first."""
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
