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
from ._schedule import prerequisites, result_key

Slots = dict[Action, int]
"""Slots in which a rank runs its passes; no two passes share a slot."""


def squeeze(ranks: Sequence[Slots]) -> list[list[Action]]:
    """Return the order of forward and input passes on every rank, without weight passes.

    `ranks` holds the slots of these passes for each rank. The first rank has the first stage.
    """
    first = ranks[0]
    # The steady part lasts from the first input pass of stage 0 to its last forward pass.
    steady = (
        first[Action(0, Kind.INPUT, 0)],
        max(slot for action, slot in first.items() if action.stage == 0 and action.kind is Kind.FORWARD),
    )
    full = [_add_weights(slots) for slots in ranks]
    _move_earlier(full, lambda slot: not steady[0] <= slot <= steady[1])
    # The weight passes fill the remaining slots, so they need not block other passes.
    orders = [{action: slot for action, slot in slots.items() if action.kind is not Kind.WEIGHT} for slots in full]
    _move_earlier(orders, lambda slot: slot > steady[1])
    return [sorted(slots, key=slots.__getitem__) for slots in orders]


def _add_weights(slots: Slots) -> Slots:
    """Add each weight pass in the next free slot after its input pass."""
    result, taken, free = dict(slots), set(slots.values()), 0
    for slot, action in sorted((slot, action) for action, slot in slots.items() if action.kind is Kind.INPUT):
        free = max(free, slot) + 1
        while free in taken:
            free += 1
        result[action._replace(kind=Kind.WEIGHT)] = free
    return result


def _move_earlier(rank_slots: Sequence[Slots], may_move: Callable[[int], bool]) -> None:
    """Move passes to the earliest free slots after their inputs, if there is memory for their residuals.

    Changes `rank_slots` in place. ``may_move(slot)`` returns whether the pass in a slot may move.
    """
    num_stages = 1 + max(action.stage for slots in rank_slots for action in slots)
    counts = [_residual_counts(slots) for slots in rank_slots]
    peaks = [max(rank_counts) for rank_counts in counts]
    taken = [set(slots.values()) for slots in rank_slots]
    slots_by_result = {result_key(action): current for slots in rank_slots for action, current in slots.items()}
    for current, rank, action in sorted(
        (current, rank, action) for rank, slots in enumerate(rank_slots) for action, current in slots.items()
    ):
        if not may_move(current):
            continue
        stage, kind, microbatch = action
        input_slots = [
            slots_by_result[needed_kind, needed_stage, microbatch]
            for needed_kind, needed_stage in prerequisites(action, num_stages)
        ]
        input_slots.append(slots_by_result.get((kind, stage, microbatch - 1), -1))  # microbatches keep their order
        change = _RESIDUAL_CHANGES.get(kind, 0)
        for slot in range(max(input_slots) + 1, current):
            if slot not in taken[rank] and (change <= 0 or max(counts[rank][slot:current]) + change <= peaks[rank]):
                taken[rank].remove(current)
                taken[rank].add(slot)
                counts[rank][slot:current] = [count + change for count in counts[rank][slot:current]]
                rank_slots[rank][action] = slots_by_result[result_key(action)] = slot
                break


_RESIDUAL_CHANGES = {Kind.FORWARD: 1, Kind.WEIGHT: -1}
"""Change of the number of residuals that a rank holds after a pass."""


def _residual_counts(slots: Slots) -> list[int]:
    """Return the number of passes whose residuals a rank holds, after every slot."""
    changes = {slot: _RESIDUAL_CHANGES.get(action.kind, 0) for action, slot in slots.items()}
    return list(itertools.accumulate(changes.get(slot, 0) for slot in range(max(changes) + 1)))
