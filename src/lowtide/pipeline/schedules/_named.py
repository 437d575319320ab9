"""The schedules that have names: orders of forward and input passes, into which `_listing` puts the weight passes.

Legend: R ranks, V stages a rank (chunks), M microbatches. Stages are placed in a loop (stage s on rank s mod R) or,
with two chunks, in a V (down the ranks and up again: the last stage is on the rank of the first).

A schedule for a number of microbatches that its pattern does not fit is that of more microbatches without those that
are not there: what is left of an order that never waits for ever does not either.

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
    """How a schedule is made."""

    orders: Callable[[int, int, int], Iterator[Orders]]
    """Of R, V and M: the orders to choose from."""
    is_open: bool
    """Whether its weight passes are still to be put in."""
    is_v: bool = False
    """Whether stages are placed in a V."""
    chunks: tuple[int, ...] = (1,)
    """The V it can have; empty for any from 2."""
    limit: Callable[[int, int], float] | None = None
    """Of R and V, the residuals of how many microbatches a rank may keep."""


def placed(num_ranks: int, chunks: int, *, is_v: bool) -> tuple[int, ...]:
    """Return the rank of every stage."""
    down = range(num_ranks)
    return tuple(rank for chunk in range(chunks) for rank in (reversed(down) if is_v and chunk % 2 else down))


def _one_by_one(forwards: Sequence[Action], inputs: Sequence[Action], ahead: int) -> list[Action]:
    """Forward passes, `ahead` of which come first; then one of each in turn; then the input passes that are left."""
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
    """Make groups of R microbatches, which pass all chunks of a rank before the next group does.

    Args:
        ahead: of R, V and a rank, how many forward passes come before its first backward pass. With one chunk it is
            the order of 1F1B.
        kind: of the backward passes.
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
    """A rank of a V, which does passes of chunk 0 or 1 on one microbatch after the other."""

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
    """With its own weight passes: whole backward passes in the middle, where they overlap with forward passes."""
    num, found = max(num, 2 * num_ranks), []
    for rank in range(num_ranks):
        one, after = _VRank(rank, num_ranks), num_ranks - rank - 1
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
    """Make a V in which every microbatch follows the one before after six units, in one pattern: plain, and squeezed.

    Args:
        hops: units between the passes of neighbouring ranks, of F0, F1, I1 and I0. Their sum is what a microbatch's
            residuals live, and so what a rank keeps: 6 of 12 keep half, 4 a third.
    """

    def orders(num_ranks: int, _: int, num: int) -> Iterator[Orders]:
        for turns, are_squeezed in ((1,), False), ((1, 3, 4), True):
            for offsets in itertools.chain.from_iterable(_offsets(num_ranks, turns, *one) for one in hops):
                found = [_repeated(rank, num_ranks, offsets[rank], num) for rank in range(num_ranks)]
                yield squeezed(found) if are_squeezed else [sorted(slots, key=slots.__getitem__) for slots in found]

    return orders


def _repeated(rank: int, num_ranks: int, begins: tuple[int, ...], num: int) -> Slots:
    """When a rank does its passes of all microbatches."""
    stages = rank, 2 * num_ranks - 1 - rank
    passes = zip(((0, _F), (1, _F), (1, _I), (0, _I)), begins, strict=True)
    return {Action(stages[chunk], kind, m): begin + _PERIOD * m for (chunk, kind), begin in passes for m in range(num)}


_PERIOD = 6
"""Units that a rank computes for a microbatch: three passes of two chunks."""


def _offsets(
    num_ranks: int, losses: tuple[int, ...], f0: int, f1: int, i1: int, i0: int
) -> Iterator[list[tuple[int, ...]]]:
    """When each rank does F0, F1, I1 and I0 of microbatch 0, so that no two passes of any microbatches coincide.

    Args:
        num_ranks: R.
        losses: how long to wait at the loss.
        f0: of the hops, as the others.
        f1: likewise.
        i1: likewise.
        i0: likewise.
    """
    last = num_ranks - 1
    # How long to wait at the ends of the V; more makes longer pipelines, and was not better for up to eight ranks.
    for turns in itertools.product((1, 3, 4), losses, range(1, _PERIOD)):
        begin_f1 = f0 * last + turns[0]
        begin_i1 = begin_f1 + f1 * last + turns[1]
        begin_i0 = begin_i1 + i1 * last + turns[2]
        found = [
            (f0 * rank, begin_f1 + f1 * (last - rank), begin_i1 + i1 * rank, begin_i0 + i0 * (last - rank))
            for rank in range(num_ranks)
        ]
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
"""All schedules by name."""
