"""The named schedules: orders of forward and input passes. `_listing` inserts the weight passes.

Legend: R ranks, V stages per rank (chunks), M microbatches. Stages are placed in a loop (stage s on rank s mod R). With
two chunks they can be placed in a V: down the ranks and up again, so the last stage is on the rank of the first stage.

If the pattern of a schedule does not fit M, the order for a larger number is made and the surplus microbatches are
removed. Removing microbatches cannot cause a deadlock: the remaining passes depend only on passes of the same
microbatch.

References:
    GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-flush). Interleaved: Narayanan et al. 2021.
    Looped BFS: Lamy-Poirier 2023. ZB-H1, ZB-H2, interleaved zero bubble, ZB-V: Qi et al. 2024 ("Zero Bubble Pipeline
    Parallelism"). V-Half, V-Min: Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory"). DualPipeV: DeepSeek
    2025, after "Cut-in-half" of Sea AI Lab.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ._actions import Action, Kind
from ._squeeze import Slots, squeezed

_F, _I, _B, _W = Kind.FORWARD, Kind.INPUT, Kind.BACKWARD, Kind.WEIGHT
Orders = list[list[Action]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """Recipe of a named schedule."""

    orders: Callable[[int, int, int], Iterator[Orders]]
    """``orders(R, V, M)``: the candidate orders."""
    is_open: bool
    """Whether weight passes still have to be inserted."""
    is_v: bool = False
    """Whether stages are placed in a V."""
    chunks: tuple[int, ...] = (1,)
    """Allowed values of V; empty if any V from 2 is allowed."""
    limit: Callable[[int, int], float] | None = None
    """``limit(R, V)``: number of microbatches whose residuals a rank may hold."""


def placed(num_ranks: int, chunks: int, *, is_v: bool) -> tuple[int, ...]:
    """Return the rank of every stage."""
    down = range(num_ranks)
    return tuple(rank for chunk in range(chunks) for rank in (reversed(down) if is_v and chunk % 2 else down))


def _one_by_one(forwards: Sequence[Action], inputs: Sequence[Action], ahead: int) -> list[Action]:
    """Order `ahead` forward passes first, then alternate forward and input passes, then the remaining input passes."""
    order = list(forwards[:ahead])
    for forward, back in itertools.zip_longest(forwards[ahead:], inputs):
        order += [action for action in (forward, back) if action is not None]
    return order


def _breadth_first(num_ranks: int, chunks: int, num: int) -> Orders:
    up = range(chunks)
    return [
        [Action(c * num_ranks + rank, _F, m) for c in up for m in range(num)]
        + [Action(c * num_ranks + rank, _B, m) for c in reversed(up) for m in range(num)]
        for rank in range(num_ranks)
    ]


def _interleaved(ahead: Callable[[int, int, int], int], kind: Kind) -> Callable[[int, int, int], Orders]:
    """Make orders in groups of R microbatches: a group passes all chunks of a rank before the next group does.

    Args:
        ahead: ``ahead(R, V, rank)``: number of forward passes before forward and backward passes alternate. With one
            chunk the result is the order of 1F1B.
        kind: kind of the backward passes.
    """

    def orders(num_ranks: int, chunks: int, num: int) -> Orders:
        groups = range(0, num, num_ranks)
        found: Orders = []
        for rank in range(num_ranks):

            def passes(kind: Kind, order: Sequence[int], rank: int = rank) -> Iterator[Action]:
                for begin, chunk, one in itertools.product(groups, order, range(num_ranks)):
                    yield Action(chunk * num_ranks + rank, kind, begin + one)

            forwards, backwards = list(passes(_F, range(chunks))), list(passes(kind, range(chunks)[::-1]))
            found.append(_one_by_one(forwards, backwards, ahead(num_ranks, chunks, rank)))
        return found

    return orders


class _VRank:
    """Builder for the order of one rank of a V, which counts the microbatches of each pass and chunk."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = rank, 2 * num_ranks - 1 - rank
        self.counts: Counter[tuple[Kind, int]] = Counter()
        self.order: list[Action] = []

    def do(self, *passes: tuple[Kind, int], times: int = 1) -> None:
        for _ in range(times):
            for kind, chunk in passes:
                self.order.append(Action(self.stages[chunk], kind, self.counts[_I if kind is _B else kind, chunk]))
                self.counts.update([(counted, chunk) for counted in ((_I, _W) if kind is _B else (kind,))])


def _zb_v(num_ranks: int, _: int, num: int) -> Orders:
    num, found = max(num, 2 * num_ranks), []
    # Warm-up, steady state (the line with four passes) and drain of ZB-V. The repeat counts need M >= 2 R.
    for rank in range(num_ranks):
        one = _VRank(rank, num_ranks)
        one.do((_F, 0), times=2 * (num_ranks - rank) - 1)
        one.do((_F, 1), (_F, 0), times=rank)
        one.do((_F, 1), (_I, 1), times=num_ranks - rank)
        one.do((_F, 0), (_I, 0), (_F, 1), (_I, 1), times=num - 2 * num_ranks + rank + 1)
        one.do((_I, 0), (_F, 1), (_I, 1), times=num_ranks - rank - 1)
        one.do((_I, 0), (_I, 1), times=rank)
        one.do((_I, 0), times=num_ranks - rank)
        found.append(one.order)
    return found


def _dualpipe_v(num_ranks: int, _: int, num: int) -> Orders:
    """Make the orders of DualPipeV with weight passes; backward passes in the middle are whole, to overlap with F."""
    num, found = max(num, 2 * num_ranks), []
    for rank in range(num_ranks):
        one, after = _VRank(rank, num_ranks), num_ranks - rank - 1
        # The calls follow steps 1 to 8 of DeepSeek's ``dualpipev.py``. Step 6 is the call with `last`: its second half
        # runs I only, and the weight passes that it puts off fill steps 7 and 8.
        one.do((_F, 0), times=2 * after)
        one.do((_F, 0), (_F, 1), times=rank + 1)
        one.do((_I, 1), (_W, 1), (_F, 1), times=after)
        one.do((_F, 0), (_B, 1), (_F, 1), (_B, 0), times=num - 2 * num_ranks + rank + 1)
        one.do((_B, 1), (_F, 1), (_B, 0), times=after)
        last = [1, 0] * (rank + 1)
        one.do(*((_B, chunk) for chunk in last[: rank + 1]), *((_I, chunk) for chunk in last[rank + 1 :]))
        put_off = last[rank + 1 :] + [0] * after
        for chunk in put_off[:after]:
            one.do((_W, chunk), (_I, 0))
        one.do(*((_W, chunk) for chunk in put_off[after:]))
        found.append(one.order)
    return found


def _blocks(*hops: tuple[int, int, int, int]) -> Callable[[int, int, int], Iterator[Orders]]:
    """Make a V in which each microbatch follows the previous one after six units, in one pattern: plain and squeezed.

    Args:
        hops: units between the passes of neighbouring ranks, for F0, F1, I1 and I0. Their sum sets the lifetime of a
            microbatch's residuals, and so the memory of a rank: a sum of 12 keeps as much as 1F1B, 6 half of it, 4 a
            third.
    """

    def orders(num_ranks: int, _: int, num: int) -> Iterator[Orders]:
        # The residuals of a rank's two chunks live about sum(hops) * (R - 1) units in total. Each chunk holds half of a
        # microbatch's residuals, and a microbatch starts every 6 units. So a rank holds about sum(hops) * R / 12
        # microbatches.
        for turns, are_squeezed in ((1,), False), ((1, 3, 4), True):
            for offsets in itertools.chain.from_iterable(_offsets(num_ranks, turns, *one) for one in hops):
                found = [_repeated(rank, num_ranks, offsets[rank], num) for rank in range(num_ranks)]
                yield squeezed(found) if are_squeezed else [sorted(slots, key=slots.__getitem__) for slots in found]

    return orders


def _repeated(rank: int, num_ranks: int, begins: tuple[int, ...], num: int) -> Slots:
    """Return the slots in which a rank runs its passes of all microbatches."""
    stages = rank, 2 * num_ranks - 1 - rank
    passes = zip(((0, _F), (1, _F), (1, _I), (0, _I)), begins, strict=True)
    return {Action(stages[chunk], kind, m): begin + _PERIOD * m for (chunk, kind), begin in passes for m in range(num)}


_PERIOD = 6
"""Units that a rank computes for one microbatch: three passes of two chunks."""


def _offsets(
    num_ranks: int, losses: tuple[int, ...], f0: int, f1: int, i1: int, i0: int
) -> Iterator[list[tuple[int, ...]]]:
    """Yield start units of F0, F1, I1 and I0 of microbatch 0 on each rank, such that no two passes of a rank coincide.

    Args:
        num_ranks: R.
        losses: candidate waits between F1 and I1 at the loss.
        f0: hop of F0, as in `_blocks`.
        f1: hop of F1.
        i1: hop of I1.
        i0: hop of I0.
    """
    last = num_ranks - 1
    # `turns` holds the waits at the three turns of the V. Longer waits lengthen the pipeline and were not better for up
    # to eight ranks.
    for turns in itertools.product((1, 3, 4), losses, range(1, _PERIOD)):
        begin_f1 = f0 * last + turns[0]
        begin_i1 = begin_f1 + f1 * last + turns[1]
        begin_i0 = begin_i1 + i1 * last + turns[2]
        found = [
            (f0 * rank, begin_f1 + f1 * (last - rank), begin_i1 + i1 * rank, begin_i0 + i0 * (last - rank))
            for rank in range(num_ranks)
        ]
        # Pass k of microbatch m starts at begins[k] + 6 m. Two passes collide for some microbatches if and only if
        # their starts are equal modulo 6. The two residues that stay free are for the weight passes.
        if all(len({begin % _PERIOD for begin in begins}) == len(begins) for begins in found):
            yield found


def _only(orders: Callable[[int, int, int], Orders]) -> Callable[[int, int, int], Iterator[Orders]]:
    return lambda *sizes: iter([orders(*sizes)])


NAMED: dict[str, Named] = {
    "gpipe": Named(orders=_only(_breadth_first), is_open=False),
    "1f1b": Named(orders=_only(_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _B)), is_open=False),
    "zb-h1": Named(
        orders=_only(_interleaved(lambda ranks, v, rank: ranks - 1 - rank, _I)),
        is_open=True,
        limit=lambda ranks, _: ranks,
    ),
    "zb-h2": Named(
        orders=_only(_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank), _I)),
        is_open=True,
        limit=lambda ranks, _: 2 * ranks - 1,
    ),
    "looped-bfs": Named(orders=_only(_breadth_first), is_open=False, chunks=()),
    "interleaved": Named(
        orders=_only(_interleaved(lambda ranks, v, rank: 2 * (ranks - 1 - rank) + (v - 1) * ranks, _B)),
        is_open=False,
        chunks=(),
    ),
    "interleaved-zb": Named(
        orders=_only(_interleaved(lambda ranks, v, rank: ranks - 1 - rank + (v - 1) * ranks, _I)),
        is_open=True,
        chunks=(),
        limit=lambda ranks, _: ranks,
    ),
    "zb-v": Named(orders=_only(_zb_v), is_open=True, is_v=True, chunks=(2,), limit=lambda ranks, _: ranks),
    "dualpipe-v": Named(orders=_only(_dualpipe_v), is_open=False, is_v=True, chunks=(2,)),
    "v-half": Named(
        orders=_blocks((1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1)),
        is_open=True,
        is_v=True,
        chunks=(2,),
        limit=lambda ranks, _: (ranks + 2) // 2,
    ),
    "v-min": Named(
        orders=_blocks((1, 1, 1, 1)), is_open=True, is_v=True, chunks=(2,), limit=lambda ranks, _: (ranks + 4) // 3
    ),
}
"""All named schedules, by name."""
