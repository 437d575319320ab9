"""Orders of passes: forward and input passes of the named schedules, and the placement of their weight passes.

F, I, W and B are forward, input, weight and whole backward passes (`Kind`).

Legend: R ranks, V stages per rank (chunks), M microbatches. Stages are placed in a loop (stage s on rank s mod R). With
two chunks they can be placed in a V: down the ranks and up again, so the last stage is on the rank of the first stage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ...core import ScheduleError
from ._schedule import (
    Action,
    Costs,
    Ends,
    Kind,
    Order,
    Schedule,
    position_in_tick,
    prerequisites,
    ready_time,
    result_key,
)
from ._ticks import Cell, receiving_ranks, spans

# If the pattern of a schedule does not fit M, its order is made for more microbatches, and the surplus is removed.
# Removing microbatches cannot cause a deadlock: the remaining passes depend only on passes of the same microbatch.
#
# References:
#     GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved: Narayanan et al. 2021.
#     Looped BFS: Lamy-Poirier 2023. ZB-H1, ZB-H2, interleaved zero bubble, ZB-V: Qi et al. 2024 ("Zero Bubble Pipeline
#     Parallelism"). V-Half, V-Min: Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory"). DualPipeV:
#     DeepSeek 2025, after "Cut-in-half" of Sea AI Lab.

_F, _I, _B, _W = Kind.FORWARD, Kind.INPUT, Kind.BACKWARD, Kind.WEIGHT
_Orders = list[list[Action]]
_Candidates = Callable[[int, int, int], Iterator[_Orders]]
"""``candidates(R, V, M)`` yields candidates; each has an order for every rank."""
_Slots = dict[Action, int]
"""Slots (units of time) in which a rank runs its passes; no two passes share a slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rules for a named schedule: candidate orders, placement and memory limit."""

    orders: _Candidates
    is_open: bool
    """Whether the orders lack weight passes, which have to be inserted."""
    is_v: bool = False
    """Whether stages are placed in a V."""
    chunks: tuple[int, ...] = (1,)
    """Allowed values of V; empty if any V from 2 is allowed."""
    limit: Callable[[int, int], float] | None = None
    """``limit(R, V)``: number of microbatches whose residuals a rank may hold. None: no limit."""


def place_stages(num_ranks: int, chunks: int, *, is_v: bool) -> tuple[int, ...]:
    """Return the rank of every stage."""
    down = range(num_ranks)
    return tuple(rank for chunk in range(chunks) for rank in (reversed(down) if is_v and chunk % 2 else down))


def _alternate(forwards: Sequence[Action], inputs: Sequence[Action], num_ahead: int) -> list[Action]:
    """Return `num_ahead` forward passes, then forward passes and `inputs` (I or B) in turn, then the remaining ones."""
    alternating = itertools.chain.from_iterable(itertools.zip_longest(forwards[num_ahead:], inputs))
    return [*forwards[:num_ahead], *(action for action in alternating if action is not None)]


def _breadth_first(num_ranks: int, chunks: int, num_microbatches: int) -> Iterator[_Orders]:
    chunk_order = range(chunks)
    yield [
        [Action(c * num_ranks + rank, _F, m) for c in chunk_order for m in range(num_microbatches)]
        + [Action(c * num_ranks + rank, _B, m) for c in reversed(chunk_order) for m in range(num_microbatches)]
        for rank in range(num_ranks)
    ]


def _interleaved(num_ahead: Callable[[int, int, int], int], kind: Kind) -> _Candidates:
    """Make a recipe's `orders`: a group of R microbatches passes through all chunks of a rank before the next group.

    ``num_ahead(R, V, rank)`` is the number of forward passes before forward and backward passes alternate. `kind` is
    the kind of the backward passes. With one chunk and R - 1 - rank passes ahead, the result is the order of 1F1B.
    """

    def orders(num_ranks: int, chunks: int, num_microbatches: int) -> Iterator[_Orders]:
        groups = range(0, num_microbatches, num_ranks)
        rank_orders: _Orders = []
        for rank in range(num_ranks):

            def passes(kind: Kind, order: Sequence[int], rank: int = rank) -> Iterator[Action]:
                for group_start, chunk, offset in itertools.product(groups, order, range(num_ranks)):
                    yield Action(chunk * num_ranks + rank, kind, group_start + offset)

            forwards, backwards = list(passes(_F, range(chunks))), list(passes(kind, range(chunks)[::-1]))
            rank_orders.append(_alternate(forwards, backwards, num_ahead(num_ranks, chunks, rank)))
        yield rank_orders

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


def _zb_v(num_ranks: int, _: int, num_microbatches: int) -> Iterator[_Orders]:
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
    yield rank_orders


def _dualpipe_v(num_ranks: int, _: int, num_microbatches: int) -> Iterator[_Orders]:
    """Yield the orders of DualPipeV, with weight passes; backward passes in the middle are whole, to overlap with F."""
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
        whole, split = final_chunks[: rank + 1], final_chunks[rank + 1 :]
        builder.add(*((_B, chunk) for chunk in whole), *((_I, chunk) for chunk in split))
        deferred = split + [0] * num_later
        for chunk in deferred[:num_later]:
            builder.add((_W, chunk), (_I, 0))
        builder.add(*((_W, chunk) for chunk in deferred[num_later:]))
        rank_orders.append(builder.order)
    yield rank_orders


def _blocks(*hops: tuple[int, int, int, int]) -> _Candidates:
    """Make a recipe's `orders` for a V in which all microbatches have the same pattern, shifted by six units each.

    Each of `hops` holds the units between the passes of neighbouring ranks, for F0, F1, I1 and I0 (passes of chunks 0
    and 1). Their sum sets the lifetime of a microbatch's residuals, and so the memory of a rank. A sum of 12 needs the
    memory of 1F1B, a sum of 6 half of it, 4 a third. Periodic orders come first, then orders from `_squeeze`.
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
                rank_slots = _squeeze(rank_slots) if is_squeezed else rank_slots
                yield [sorted(slots, key=slots.__getitem__) for slots in rank_slots]

    return orders


def _periodic_slots(rank: int, num_ranks: int, starts: tuple[int, ...], num_microbatches: int) -> _Slots:
    """Return the slots of all passes of a rank; `starts` are the slots of F0, F1, I1 and I0 of microbatch 0."""
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

    `loss_waits` are the candidate waits between F1 and I1 at the loss. `f0`, `f1`, `i1` and `i0` are an entry of the
    `hops` of `_blocks`.
    """
    last_rank = num_ranks - 1
    # `turn_waits` holds the waits at the turns of the V: F0 to F1, F1 to I1 and I1 to I0. Longer waits lengthen the
    # pipeline and were not better for up to eight ranks.
    for turn_waits in itertools.product((1, 3, 4), loss_waits, range(1, _PERIOD)):
        start_f1 = f0 * last_rank + turn_waits[0]
        start_i1 = start_f1 + f1 * last_rank + turn_waits[1]
        start_i0 = start_i1 + i1 * last_rank + turn_waits[2]
        offsets = [
            (f0 * rank, start_f1 + f1 * (last_rank - rank), start_i1 + i1 * rank, start_i0 + i0 * (last_rank - rank))
            for rank in range(num_ranks)
        ]
        # Pass k of microbatch m starts at starts[k] + 6 m. Two passes collide for some microbatches if and only if
        # their starts are equal modulo 6. The two residues that stay free are for the weight passes.
        if all(len({start % _PERIOD for start in starts}) == len(starts) for starts in offsets):
            yield offsets


def _squeeze(ranks: Sequence[_Slots]) -> list[_Slots]:
    """Move passes outside the steady part of a periodic schedule to earlier slots.

    `ranks` holds the slots of forward and input passes for each rank. The first rank has the first stage.
    """
    # In a V where all microbatches follow one pattern, the steady part has few free slots, but slots stay free while
    # the pipeline fills and drains. A pass may move there as soon as its inputs exist, if the peak memory of its rank
    # does not rise. The idea is from Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. All passes take
    # one slot here. Real costs are considered later, when the weight passes are placed.
    first = ranks[0]
    # The steady part lasts from the first input pass of stage 0 to its last forward pass.
    steady = (
        first[Action(0, Kind.INPUT, 0)],
        max(slot for action, slot in first.items() if action.stage == 0 and action.kind is Kind.FORWARD),
    )
    full = [_add_weights(slots) for slots in ranks]
    _move_earlier(full, lambda slot: not steady[0] <= slot <= steady[1])
    # Weight passes are placed again later, in the remaining slots, so they need not block other passes here.
    orders = [{action: slot for action, slot in slots.items() if action.kind is not Kind.WEIGHT} for slots in full]
    _move_earlier(orders, lambda slot: slot > steady[1])
    return orders


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
"""Maps the kind of a pass to its change of the number of forward passes whose residuals a rank holds."""


def _residual_counts(slots: _Slots) -> list[int]:
    """Return the number of forward passes whose residuals a rank holds after every slot."""
    changes = {slot: _RESIDUAL_CHANGES.get(action.kind, 0) for action, slot in slots.items()}
    return list(itertools.accumulate(changes.get(slot, 0) for slot in range(max(changes) + 1)))


NAMED: dict[str, Recipe] = {
    "gpipe": Recipe(orders=_breadth_first, is_open=False),
    "1f1b": Recipe(orders=_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _B), is_open=False),
    "zb-h1": Recipe(
        orders=_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _I), is_open=True, limit=lambda ranks, _: ranks
    ),
    "zb-h2": Recipe(
        orders=_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank), _I),
        is_open=True,
        limit=lambda ranks, _: 2 * ranks - 1,
    ),
    "looped-bfs": Recipe(orders=_breadth_first, is_open=False, chunks=()),
    "interleaved": Recipe(
        orders=_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank) + (v - 1) * ranks, _B),
        is_open=False,
        chunks=(),
    ),
    "interleaved-zb": Recipe(
        orders=_interleaved(lambda ranks, v, rank: ranks - 1 - rank + (v - 1) * ranks, _I),
        is_open=True,
        chunks=(),
        limit=lambda ranks, _: ranks,
    ),
    "zb-v": Recipe(orders=_zb_v, is_open=True, is_v=True, chunks=(2,), limit=lambda ranks, _: ranks),
    "dualpipe-v": Recipe(orders=_dualpipe_v, is_open=False, is_v=True, chunks=(2,)),
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


# --- weight passes ----------------------------------------------------------------------------------------------------

# A weight pass needs only its input pass, and no other pass needs its result. So it can run where its rank would be
# idle, or where the memory that it frees is needed. Zero-bubble schedules fill the bubble in this way (Qi et al., "Zero
# Bubble Pipeline Parallelism", 2024). Passes are placed into an order for asynchronous ranks, or into the ticks of
# ranks in lockstep. Both algorithms are greedy, so the result is not always optimal.

_TOLERANCE = 1e-9


class ListScheduler:
    """Mutable state of list scheduling: a rank runs its chosen action, or a weight pass while that action would wait.

    The scheduler looks only at the next action of a rank. ``memory_change(action)`` is the memory that an action
    allocates; it is negative if the action frees memory.
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
        # The rank with the earliest time chooses first. Every action that is decided later ends after that time, so the
        # choice stays valid.
        while any(self._advance(rank, choose, on_chosen) for rank in sorted(ranks, key=self.times.__getitem__)):
            pass
        return tuple(map(tuple, self.orders))

    def ready_time(self, action: Action) -> float:
        """Return the time at which the inputs of an action are on its rank; infinity while that time is unknown."""
        return ready_time(action, self.placement, self.ends, self.costs.communication)

    def _advance(
        self, rank: int, choose: Callable[[int], Action | None], on_chosen: Callable[[int, Action], None]
    ) -> bool:
        """Run the next action of a rank; return whether an action could run."""
        action, now, weights = choose(rank), self.times[rank], self.weights[rank]
        begin = math.inf if action is None else self.ready_time(action)
        # Run a weight pass if the rank would wait for more than half the time of that pass. The chosen action is then
        # delayed by less than half a weight pass.
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

    `limits` is the largest memory of each rank. A forward pass waits while it would exceed the limit. Meanwhile weight
    passes and later input passes of the order may run. Raises `ScheduleError` when a limit is too small for the order.
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
        raise _memory_error(rank, remaining[rank][0], scheduler.memory[rank], limits[rank])
    return complete_orders


def _memory_error(rank: int, action: Action, memory: float, limit: float) -> ScheduleError:
    return ScheduleError(
        f"rank {rank} cannot continue within its memory: {memory:g} of {limit:g} is in use before {action}",
        hint="raise the limit, or choose auto, or a schedule that needs less memory, such as v-half or v-min",
    )


# Weight passes in ticks. A tick lasts as long as its slowest rank. So a weight pass costs no time where its rank would
# wait for another rank in the same tick. If every weight pass costs time, all ranks should run one in the same tick. A
# rank without free memory has to run one at once; other ranks then run one too, if it fits into the tick.
#
# With an input and a forward pass in each tick, all middle ticks are alike: microbatch i goes forward on rank r in tick
# i + r, and backward in tick i + 2R - 1 - r. Orders that start twice as many microbatches as ranks (those of ZB-H2)
# have this form, which is optimal if all passes cost the same. Orders that hold fewer microbatches have either pass in
# a tick, and weight passes even out the length.

WeightPolicy = Literal["free", "together", "at once"]
"""When weight passes may lengthen a tick: only if memory requires it ("free"); also if all ranks have one to run
("together"); always ("at once"). They may always lengthen ticks without F and I, and some ticks after the last F."""


class TickPacker:
    """Mutable state of packing a schedule with split backward passes into ticks.

    The orders of F and I are kept; weight passes run where they cost least. `limits` is the largest memory of each
    rank. With `in_pairs`, a rank runs an input and a forward pass in one tick if they follow each other in its order.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, limits: Sequence[float], *, in_pairs: bool, weight_policy: WeightPolicy
    ) -> None:
        self.schedule, self.placement, self.costs, self.limits = schedule, schedule.placement, costs, limits
        self.in_pairs, self.weight_policy = in_pairs, weight_policy
        self.remaining = [
            deque(action for action in order if action.kind is not Kind.WEIGHT) for order in schedule.orders
        ]
        self.pending_weights: list[deque[Action]] = [deque() for _ in schedule.orders]
        """Weight passes of each rank whose input pass has run."""
        self.memory = [0.0] * schedule.num_ranks
        self.ends: Ends = {}

    def run(self) -> Schedule:
        """Return the schedule with its ticks; raise `ScheduleError` when a limit is too small for the order."""
        table: list[list[Cell]] = []
        sent: set[int] = set()
        while any(self.remaining) or any(self.pending_weights):
            cells, forced = self._start_tick()
            shortest = [self._length(cell, rank in sent) for rank, cell in enumerate(cells)]
            with_weights = [
                self._length((*cell, *itertools.islice(pending, 1)), rank in sent)
                for rank, (cell, pending) in enumerate(zip(cells, self.pending_weights, strict=True))
            ]
            # First compute the length of the tick from its F and I passes and the weight passes that may lengthen it.
            # Then add a weight pass on every rank where it fits into that length.
            lengthening = forced | self._lengthening_ranks(is_empty=not any(cells))
            length = max([*shortest, *(with_weights[rank] for rank in lengthening)])
            for rank, pending in enumerate(self.pending_weights):
                if pending and with_weights[rank] <= length + _TOLERANCE:
                    cells[rank] = (*cells[rank], pending.popleft())
            row = [tuple(sorted(cell, key=position_in_tick)) for cell in cells]
            if not any(row):
                blocked = next(rank for rank, order in enumerate(self.remaining) if order)
                action = self.remaining[blocked][0]
                raise _memory_error(blocked, action, self.memory[blocked], self.limits[blocked])
            for rank, cell in enumerate(row):
                for action in cell:
                    self.memory[rank] += self.costs.kept(action)
                    self.ends[result_key(action)] = 0.0
            table.append(row)
            sent = receiving_ranks(row, self.placement)
        ranks = range(self.schedule.num_ranks)
        return dataclasses.replace(
            self.schedule,
            orders=tuple(tuple(action for row in table for action in row[rank]) for rank in ranks),
            ticks=tuple(tuple(tick for tick, row in enumerate(table) for _ in row[rank]) for rank in ranks),
        )

    def _start_tick(self) -> tuple[list[Cell], set[int]]:
        """Take the F and I passes of each rank for a tick; return them and the ranks that must run a weight pass."""
        cells: list[Cell] = []
        forced: set[int] = set()
        for rank, remaining in enumerate(self.remaining):
            cell: Cell = ()
            memory = [self.memory[rank]]
            if (backward := self._next(rank, Kind.INPUT)) is not None:
                cell = (backward,)
                remaining.popleft()
                memory.append(self.costs.kept(backward))
                self.pending_weights[rank].append(backward._replace(kind=Kind.WEIGHT))
            forward = self._next(rank, Kind.FORWARD) if self.in_pairs or not cell else None
            if forward is not None:
                memory.append(self.costs.kept(forward))
            limit, pending = self.limits[rank] + _TOLERANCE, self.pending_weights[rank]
            if sum(memory) > limit and pending:
                forced.add(rank)
                memory.append(self.costs.kept(pending[0]))
            if forward is not None and sum(memory) <= limit:
                cell = (*cell, forward)
                remaining.popleft()
            cells.append(cell)
        return cells, forced

    def _next(self, rank: int, kind: Kind) -> Action | None:
        """Return the next action of a rank's order if it is of this kind and its inputs exist."""
        remaining = self.remaining[rank]
        if not remaining or ready_time(remaining[0], self.placement, self.ends) == math.inf:
            return None
        return remaining[0] if remaining[0].kind is kind else None

    def _lengthening_ranks(self, *, is_empty: bool) -> set[int]:
        """Return the ranks whose weight passes may lengthen this tick although memory does not require it."""
        pending_ranks = {rank for rank, pending in enumerate(self.pending_weights) if pending}
        if is_empty or self.weight_policy == "at once":
            return pending_ranks
        forwards = [any(action.kind is Kind.FORWARD for action in actions) for actions in self.remaining]
        if self.weight_policy == "together" and all(forwards) and len(pending_ranks) == len(self.remaining):
            return pending_ranks
        if self.in_pairs and not any(forwards):
            # In the drain, the result of an input pass is sent while a weight pass runs. So the rank with the most
            # input passes left may lengthen the tick, unless the weight passes left on another rank take longer.
            num_left = list(zip(map(len, self.remaining), map(len, self.pending_weights), strict=True))
            last_rank = max(range(len(num_left)), key=num_left.__getitem__)
            num_inputs, num_weights = num_left[last_rank]
            if max(map(len, self.pending_weights)) <= 2 * num_inputs + num_weights:
                return {last_rank} & pending_ranks
        return set()

    def _length(self, cell: Cell, is_sent: bool) -> float:
        return spans(tuple(sorted(cell, key=position_in_tick)), self.placement, self.costs, is_sent=is_sent).end
