"""Which value occupies which bytes at which time, from XLA's buffer assignment and heap traces.

An allocation of temporaries is a heap: values are at offsets and share bytes at different times. The trace says when a
value is allocated (ALLOC), when it takes over the bytes of another value (SHARE_WITH) and when it is freed (FREE). A
region stays alive until the last value that shares it is freed. Values without an event are of two kinds: other names
of a value that has events (loop states), and small values for which a TPU reserves bytes throughout.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ._graph import Graph, Value

_ALLOC, _FREE, _SHARE_WITH = 0, 1, 2
# Colors of allocations: a TPU's memory spaces. CPUs and GPUs have 0 only (a GPU uses 5 for the host, too).
DEVICE_COLOR, HOST_COLOR = 0, 5


@dataclasses.dataclass(frozen=True)
class Segment:
    """An interval of time in which one value owns a region of an allocation."""

    value: Value
    offset: int
    size: int
    start: int
    end: int


def segments(graph: Graph, assignment: Any, allocation: Any) -> list[Segment]:
    """List the values in an allocation of temporaries, with the positions between which each is alive.

    Args:
        graph: the program.
        assignment: its buffer assignment.
        allocation: one of the assignment's allocations.

    Returns:
        Segments that never overlap in both bytes and time.
    """
    placed = {a.logical_buffer_id: (a.offset, a.size) for a in allocation.assigned}
    defined = {
        b.id: (b.defined_at.instruction_id, tuple(b.defined_at.shape_index))
        for b in assignment.logical_buffers
        if b.id in placed
    }
    last = max(len(graph.order) - 1, 0)
    result = [
        segment
        for trace in assignment.heap_traces
        for region in _regions(graph, [e for e in trace.events if e.buffer_id in placed])
        for segment in region.segments(placed, defined, last)
    ]
    traced = {e.buffer_id for trace in assignment.heap_traces for e in trace.events}
    occupied = _merge_ranges((s.offset, s.offset + s.size) for s in result)
    # Values without an event: the largest first, and only where no other value is known to be.
    for buffer in sorted(placed.keys() - traced, key=lambda b: -placed[b][1]):
        offset, size = placed[buffer]
        if size and not any(start < offset + size and offset < stop for start, stop in occupied):
            occupied.append((offset, offset + size))
            result.append(Segment(defined[buffer], offset, size, 0, last))
    return result


class _Region:
    """Values that share bytes, one after the other; in pauses between them other regions may use the bytes."""

    def __init__(self, buffer: int, position: int) -> None:
        self.takes: list[tuple[int, int, int]] = []  # (start, stop, buffer)
        self._open = (position, buffer)
        self._alive = {buffer}
        self._end = position

    def take(self, buffer: int, position: int) -> None:
        """Let another value take the bytes over."""
        start, holder = self._open
        self.takes.append((start, position - 1 if self._alive else min(self._end, position - 1), holder))
        self._open = (position, buffer)
        self._alive.add(buffer)

    def free(self, buffer: int, position: int) -> None:
        """Mark a value as freed."""
        self._alive.discard(buffer)
        self._end = max(position, self._open[0])

    def segments(self, placed: dict[int, tuple[int, int]], defined: dict[int, Value], last: int) -> Iterable[Segment]:
        takes = [*self.takes, (self._open[0], last if self._alive else self._end, self._open[1])]
        size = max(placed[buffer][1] for _, _, buffer in takes)
        offset = placed[takes[0][2]][0]
        for start, stop, buffer in takes:
            if stop >= start:
                yield Segment(defined[buffer], offset, size, start, stop)


def _regions(graph: Graph, events: Sequence[Any]) -> list[_Region]:
    regions: list[_Region] = []
    region_of: dict[int, _Region] = {}
    for event, position in zip(events, _positions(graph, events), strict=True):
        if event.kind == _ALLOC:
            region_of[event.buffer_id] = _Region(event.buffer_id, position)
            regions.append(region_of[event.buffer_id])
        elif event.kind == _SHARE_WITH and event.share_with_canonical_id in region_of:
            region_of[event.buffer_id] = region_of[event.share_with_canonical_id]
            region_of[event.buffer_id].take(event.buffer_id, position)
        elif event.kind == _FREE and event.buffer_id in region_of:
            region_of[event.buffer_id].free(event.buffer_id, position)
    return regions


def _positions(graph: Graph, events: Sequence[Any]) -> list[int]:
    """Return the position of each event.

    A FREE names the instruction that made the value, not its last reader. It happens after the preceding allocation and
    before the next one, and in between at the last use of the value. If an instruction runs more than once, an event
    means its next run.
    """
    positions_by_name: dict[str, list[int]] = {}
    for position, instr_id in enumerate(graph.order):
        positions_by_name.setdefault(graph.instructions[instr_id].proto.name, []).append(position)
    current, exact = 0, list[int | None]()
    earliest = list[int]()
    for event in events:
        if event.kind == _FREE:
            exact.append(None)
        else:
            runs = positions_by_name.get(event.instruction_name, [])
            # The next run of an instruction that runs more than once.
            current = next((p for p in runs if p >= current), runs[0] if runs else current)
            exact.append(current)
        earliest.append(current)
    # Backwards, so that the next allocation after a FREE is known.
    next_allocation, positions = len(graph.order), list[int]()
    for event, position, first in zip(reversed(events), reversed(exact), reversed(earliest), strict=True):
        if position is not None:
            next_allocation = position
            positions.append(position)
        else:
            latest = max(next_allocation - 1, 0)
            positions.append(max(min(graph.last_use(event.instruction_name), latest), min(first, latest)))
    return positions[::-1]


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return byte ranges in which overlapping ranges are merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def peak_position(segments_by_heap: Iterable[Sequence[Segment]], num_positions: int) -> int:
    """Return the position at which the most bytes are alive over several heaps; the first of equal ones."""
    steps = [0] * (num_positions + 1)
    for segment in itertools.chain.from_iterable(segments_by_heap):
        steps[segment.start] += segment.size
        steps[segment.end + 1] -= segment.size
    sums = list(itertools.accumulate(steps[:-1])) or [0]
    return sums.index(max(sums))
