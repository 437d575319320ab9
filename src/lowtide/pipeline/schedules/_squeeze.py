"""Squeeze the start and the end of a periodic schedule: passes outside its steady part move to earlier slots.

In a V where all microbatches follow one pattern, the middle is tight but slots stay free while the pipeline fills and
drains. A pass may move there as soon as its inputs exist, if the peak memory of its rank does not rise. The idea is
from Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. All passes take one slot here. Real costs are
considered later, when the weight passes are placed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ._actions import Action, Kind
from ._schedule import gives, needs

Slots = dict[Action, int]
"""Slots in which a rank runs its passes; no two passes share a slot."""


def squeezed(ranks: Sequence[Slots]) -> list[list[Action]]:
    """Return the order of forward and input passes on every rank.

    Args:
        ranks: slots of the forward and input passes of each rank. The first rank has the first stage.

    Returns:
        Orders without weight passes.
    """
    first = ranks[0]
    # The steady part lasts from the first input pass of stage 0 to its last forward pass.
    steady = (
        first[Action(0, Kind.INPUT, 0)],
        max(at for action, at in first.items() if action.stage == 0 and action.kind is Kind.FORWARD),
    )
    full = [_with_weights(slots) for slots in ranks]
    _squeeze(full, lambda at: not steady[0] <= at <= steady[1])
    # The weight passes fill the remaining slots, so they need not block other passes.
    orders = [{action: at for action, at in slots.items() if action.kind is not Kind.WEIGHT} for slots in full]
    _squeeze(orders, lambda at: at > steady[1])
    return [sorted(slots, key=slots.__getitem__) for slots in orders]


def _with_weights(slots: Slots) -> Slots:
    """Add each weight pass in the next free slot after its input pass."""
    found, taken, free = dict(slots), set(slots.values()), 0
    for at, action in sorted((at, action) for action, at in slots.items() if action.kind is Kind.INPUT):
        free = max(free, at) + 1
        while free in taken:
            free += 1
        found[action._replace(kind=Kind.WEIGHT)] = free
    return found


def _squeeze(ranks: Sequence[Slots], may_move: Callable[[int], bool]) -> None:
    """Move passes to the earliest free slots after their inputs, if there is memory for their residuals.

    Args:
        ranks: slots of each rank, changed in place.
        may_move: ``may_move(slot)``: whether the pass in a slot may move.
    """
    num_stages = 1 + max(action.stage for slots in ranks for action in slots)
    held = [_residual_counts(slots) for slots in ranks]
    most = [max(one) for one in held]
    taken = [set(slots.values()) for slots in ranks]
    done = {gives(action): at for slots in ranks for action, at in slots.items()}
    for at, rank, action in sorted(
        (at, rank, action) for rank, slots in enumerate(ranks) for action, at in slots.items()
    ):
        if not may_move(at):
            continue
        stage, kind, microbatch = action
        before = [done[one, of, microbatch] for one, of in needs(action, num_stages)]
        before.append(done.get((kind, stage, microbatch - 1), -1))  # microbatches keep their order
        change = _LEFT.get(kind, 0)
        for slot in range(max(before) + 1, at):
            if slot not in taken[rank] and (change <= 0 or max(held[rank][slot:at]) + change <= most[rank]):
                taken[rank].remove(at)
                taken[rank].add(slot)
                held[rank][slot:at] = [number + change for number in held[rank][slot:at]]
                ranks[rank][action] = done[gives(action)] = slot
                break


_LEFT = {Kind.FORWARD: 1, Kind.WEIGHT: -1}
"""Change of the number of residuals that a rank holds after a pass."""


def _residual_counts(slots: Slots) -> list[int]:
    """Return the number of passes whose residuals a rank holds, after every slot."""
    left = {at: _LEFT.get(action.kind, 0) for action, at in slots.items()}
    return list(itertools.accumulate(left.get(at, 0) for at in range(max(left) + 1)))
