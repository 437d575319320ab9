"""The named schedules: orders of forward and input passes. `_weight_passes` inserts the weight passes.

Legend: R ranks, V stages per rank (chunks), M microbatches. Stages are placed in a loop (stage s on rank s mod R). With
two chunks they can be placed in a V: down the ranks and up again, so the last stage is on the rank of the first stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ._actions import Action, Kind
from ._schedule import prerequisites, result_key

# If the pattern of a schedule does not fit M, the order for a larger number is made and the surplus microbatches are
# removed. Removing microbatches cannot cause a deadlock: the remaining passes depend only on passes of the same
# microbatch.
#
# References:
#     GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved: Narayanan et al. 2021.
#     Looped BFS: Lamy-Poirier 2023. ZB-H1, ZB-H2, interleaved zero bubble, ZB-V: Qi et al. 2024 ("Zero Bubble Pipeline
#     Parallelism"). V-Half, V-Min: Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory"). DualPipeV:
#     DeepSeek 2025, after "Cut-in-half" of Sea AI Lab.

_F, _I, _B, _W = Kind.FORWARD, Kind.INPUT, Kind.BACKWARD, Kind.WEIGHT
_Orders = list[list[Action]]
_Slots = dict[Action, int]
"""Slots in which a rank runs its passes; no two passes share a slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of a named schedule."""

    orders: Callable[[int, int, int], Iterator[_Orders]]
    """``orders(R, V, M)``: the candidate orders."""
    is_open: bool
    """Whether weight passes still have to be inserted."""
    is_v: bool = False
    """Whether stages are placed in a V."""
    chunks: tuple[int, ...] = (1,)
    """Allowed values of V; empty if any V from 2 is allowed."""
    limit: Callable[[int, int], float] | None = None
    """``limit(R, V)``: number of microbatches whose residuals a rank may hold."""


def place_stages(num_ranks: int, chunks: int, *, is_v: bool) -> tuple[int, ...]:
    """Return the rank of every stage."""
    down = range(num_ranks)
    return tuple(rank for chunk in range(chunks) for rank in (reversed(down) if is_v and chunk % 2 else down))


def _alternate(forwards: Sequence[Action], inputs: Sequence[Action], num_ahead: int) -> list[Action]:
    """Order `num_ahead` forward passes, then alternate forward and input passes, then the remaining input passes."""
    order = list(forwards[:num_ahead])
    for forward, backward in itertools.zip_longest(forwards[num_ahead:], inputs):
        order += [action for action in (forward, backward) if action is not None]
    return order


def _breadth_first(num_ranks: int, chunks: int, num_microbatches: int) -> _Orders:
    chunk_order = range(chunks)
    return [
        [Action(c * num_ranks + rank, _F, m) for c in chunk_order for m in range(num_microbatches)]
        + [Action(c * num_ranks + rank, _B, m) for c in reversed(chunk_order) for m in range(num_microbatches)]
        for rank in range(num_ranks)
    ]


def _interleaved(num_ahead: Callable[[int, int, int], int], kind: Kind) -> Callable[[int, int, int], _Orders]:
    """Make orders in groups of R microbatches: a group passes all chunks of a rank before the next group does.

    ``num_ahead(R, V, rank)`` is the number of forward passes before forward and backward passes alternate. `kind` is
    the kind of the backward passes. With one chunk the result is the order of 1F1B.
    """

    def orders(num_ranks: int, chunks: int, num_microbatches: int) -> _Orders:
        groups = range(0, num_microbatches, num_ranks)
        rank_orders: _Orders = []
        for rank in range(num_ranks):

            def passes(kind: Kind, order: Sequence[int], rank: int = rank) -> Iterator[Action]:
                for group_start, chunk, offset in itertools.product(groups, order, range(num_ranks)):
                    yield Action(chunk * num_ranks + rank, kind, group_start + offset)

            forwards, backwards = list(passes(_F, range(chunks))), list(passes(kind, range(chunks)[::-1]))
            rank_orders.append(_alternate(forwards, backwards, num_ahead(num_ranks, chunks, rank)))
        return rank_orders

    return orders


class _VRank:
    """Builder for the order of one rank of a V, which counts the microbatches of each pass and chunk."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = rank, 2 * num_ranks - 1 - rank
        self.counts: Counter[tuple[Kind, int]] = Counter()
        self.order: list[Action] = []

    def add(self, *passes: tuple[Kind, int], times: int = 1) -> None:
        for _ in range(times):
            for kind, chunk in passes:
                self.order.append(Action(self.stages[chunk], kind, self.counts[_I if kind is _B else kind, chunk]))
                self.counts.update([(counted, chunk) for counted in ((_I, _W) if kind is _B else (kind,))])


def _zb_v(num_ranks: int, _: int, num_microbatches: int) -> _Orders:
    num_microbatches, rank_orders = max(num_microbatches, 2 * num_ranks), []
    # Warm-up, steady state (the line with four passes) and drain of ZB-V. The repeat counts need M >= 2 R.
    for rank in range(num_ranks):
        builder = _VRank(rank, num_ranks)
        builder.add((_F, 0), times=2 * (num_ranks - rank) - 1)
        builder.add((_F, 1), (_F, 0), times=rank)
        builder.add((_F, 1), (_I, 1), times=num_ranks - rank)
        builder.add((_F, 0), (_I, 0), (_F, 1), (_I, 1), times=num_microbatches - 2 * num_ranks + rank + 1)
        builder.add((_I, 0), (_F, 1), (_I, 1), times=num_ranks - rank - 1)
        builder.add((_I, 0), (_I, 1), times=rank)
        builder.add((_I, 0), times=num_ranks - rank)
        rank_orders.append(builder.order)
    return rank_orders


def _dualpipe_v(num_ranks: int, _: int, num_microbatches: int) -> _Orders:
    """Make the orders of DualPipeV with weight passes; backward passes in the middle are whole, to overlap with F."""
    num_microbatches, rank_orders = max(num_microbatches, 2 * num_ranks), []
    for rank in range(num_ranks):
        builder, num_later = _VRank(rank, num_ranks), num_ranks - rank - 1
        # The calls follow steps 1 to 8 of DeepSeek's ``dualpipev.py``. Step 6 is the call with `final_chunks`: its
        # second half runs I only, and the weight passes that it defers fill steps 7 and 8.
        builder.add((_F, 0), times=2 * num_later)
        builder.add((_F, 0), (_F, 1), times=rank + 1)
        builder.add((_I, 1), (_W, 1), (_F, 1), times=num_later)
        builder.add((_F, 0), (_B, 1), (_F, 1), (_B, 0), times=num_microbatches - 2 * num_ranks + rank + 1)
        builder.add((_B, 1), (_F, 1), (_B, 0), times=num_later)
        final_chunks = [1, 0] * (rank + 1)
        builder.add(
            *((_B, chunk) for chunk in final_chunks[: rank + 1]), *((_I, chunk) for chunk in final_chunks[rank + 1 :])
        )
        deferred = final_chunks[rank + 1 :] + [0] * num_later
        for chunk in deferred[:num_later]:
            builder.add((_W, chunk), (_I, 0))
        builder.add(*((_W, chunk) for chunk in deferred[num_later:]))
        rank_orders.append(builder.order)
    return rank_orders


def _blocks(*hops: tuple[int, int, int, int]) -> Callable[[int, int, int], Iterator[_Orders]]:
    """Make a V in which each microbatch follows the previous one after six units, in one pattern: plain and squeezed.

    Each of `hops` holds the units between the passes of neighbouring ranks, for F0, F1, I1 and I0. Their sum sets the
    lifetime of a microbatch's residuals, and so the memory of a rank: 12 keeps as much as 1F1B, 6 half of it, 4 a
    third.
    """

    def orders(num_ranks: int, _: int, num_microbatches: int) -> Iterator[_Orders]:
        # The residuals of a rank's two chunks live about sum(hops) * (R - 1) units in total. Each chunk holds half of a
        # microbatch's residuals, and a microbatch starts every 6 units. So a rank holds about sum(hops) * R / 12
        # microbatches.
        for loss_waits, is_squeezed in ((1,), False), ((1, 3, 4), True):
            for offsets in itertools.chain.from_iterable(_offsets(num_ranks, loss_waits, *hop) for hop in hops):
                rank_slots = [
                    _periodic_slots(rank, num_ranks, offsets[rank], num_microbatches) for rank in range(num_ranks)
                ]
                yield (
                    _squeeze(rank_slots)
                    if is_squeezed
                    else [sorted(slots, key=slots.__getitem__) for slots in rank_slots]
                )

    return orders


def _periodic_slots(rank: int, num_ranks: int, starts: tuple[int, ...], num_microbatches: int) -> _Slots:
    """Return the slots in which a rank runs its passes of all microbatches."""
    stages = rank, 2 * num_ranks - 1 - rank
    passes = zip(((0, _F), (1, _F), (1, _I), (0, _I)), starts, strict=True)
    return {
        Action(stages[chunk], kind, m): start + _PERIOD * m
        for (chunk, kind), start in passes
        for m in range(num_microbatches)
    }


_PERIOD = 6
"""Units that a rank computes for one microbatch: three passes of two chunks."""


def _offsets(
    num_ranks: int, loss_waits: tuple[int, ...], f0: int, f1: int, i1: int, i0: int
) -> Iterator[list[tuple[int, ...]]]:
    """Yield start units of F0, F1, I1 and I0 of microbatch 0 on each rank, such that no two passes of a rank coincide.

    `loss_waits` are the candidate waits between F1 and I1 at the loss. `f0`, `f1`, `i1` and `i0` are the hops of
    `_blocks`.
    """
    last_rank = num_ranks - 1
    # `turn_waits` holds the waits at the three turns of the V. Longer waits lengthen the pipeline and were not better
    # for up to eight ranks.
    for turn_waits in itertools.product((1, 3, 4), loss_waits, range(1, _PERIOD)):
        start_f1 = f0 * last_rank + turn_waits[0]
        start_i1 = start_f1 + f1 * last_rank + turn_waits[1]
        start_i0 = start_i1 + i1 * last_rank + turn_waits[2]
        offsets = [
            (f0 * rank, start_f1 + f1 * (last_rank - rank), start_i1 + i1 * rank, start_i0 + i0 * (last_rank - rank))
            for rank in range(num_ranks)
        ]
        # Pass k of microbatch m starts at begins[k] + 6 m. Two passes collide for some microbatches if and only if
        # their starts are equal modulo 6. The two residues that stay free are for the weight passes.
        if all(len({start % _PERIOD for start in starts}) == len(starts) for starts in offsets):
            yield offsets


def _single_candidate(orders: Callable[[int, int, int], _Orders]) -> Callable[[int, int, int], Iterator[_Orders]]:
    return lambda *sizes: iter([orders(*sizes)])


def _squeeze(ranks: Sequence[_Slots]) -> list[list[Action]]:
    """Move passes outside the steady part of a periodic schedule to earlier slots; return the order on every rank.

    `ranks` holds the slots of forward and input passes for each rank. The first rank has the first stage. The result
    has no weight passes.
    """
    # In a V where all microbatches follow one pattern, the middle is tight but slots stay free while the pipeline fills
    # and drains. A pass may move there as soon as its inputs exist, if the peak memory of its rank does not rise. The
    # idea is from Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. All passes take one slot here. Real
    # costs are considered later, when the weight passes are placed.
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


def _add_weights(slots: _Slots) -> _Slots:
    """Add each weight pass in the next free slot after its input pass."""
    result, taken, free = dict(slots), set(slots.values()), 0
    for slot, action in sorted((slot, action) for action, slot in slots.items() if action.kind is Kind.INPUT):
        free = max(free, slot) + 1
        while free in taken:
            free += 1
        result[action._replace(kind=Kind.WEIGHT)] = free
    return result


def _move_earlier(rank_slots: Sequence[_Slots], may_move: Callable[[int], bool]) -> None:
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


def _residual_counts(slots: _Slots) -> list[int]:
    """Return the number of passes whose residuals a rank holds, after every slot."""
    changes = {slot: _RESIDUAL_CHANGES.get(action.kind, 0) for action, slot in slots.items()}
    return list(itertools.accumulate(changes.get(slot, 0) for slot in range(max(changes) + 1)))


NAMED: dict[str, Recipe] = {
    "gpipe": Recipe(orders=_single_candidate(_breadth_first), is_open=False),
    "1f1b": Recipe(orders=_single_candidate(_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _B)), is_open=False),
    "zb-h1": Recipe(
        orders=_single_candidate(_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _I)),
        is_open=True,
        limit=lambda ranks, _: ranks,
    ),
    "zb-h2": Recipe(
        orders=_single_candidate(_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank), _I)),
        is_open=True,
        limit=lambda ranks, _: 2 * ranks - 1,
    ),
    "looped-bfs": Recipe(orders=_single_candidate(_breadth_first), is_open=False, chunks=()),
    "interleaved": Recipe(
        orders=_single_candidate(_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank) + (v - 1) * ranks, _B)),
        is_open=False,
        chunks=(),
    ),
    "interleaved-zb": Recipe(
        orders=_single_candidate(_interleaved(lambda ranks, v, rank: ranks - 1 - rank + (v - 1) * ranks, _I)),
        is_open=True,
        chunks=(),
        limit=lambda ranks, _: ranks,
    ),
    "zb-v": Recipe(orders=_single_candidate(_zb_v), is_open=True, is_v=True, chunks=(2,), limit=lambda ranks, _: ranks),
    "dualpipe-v": Recipe(orders=_single_candidate(_dualpipe_v), is_open=False, is_v=True, chunks=(2,)),
    "v-half": Recipe(
        orders=_blocks((1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1)),
        is_open=True,
        is_v=True,
        chunks=(2,),
        limit=lambda ranks, _: (ranks + 2) // 2,
    ),
    "v-min": Recipe(
        orders=_blocks((1, 1, 1, 1)), is_open=True, is_v=True, chunks=(2,), limit=lambda ranks, _: (ranks + 4) // 3
    ),
}
"""All named schedules, by name."""
