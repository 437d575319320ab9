"""A compiled program as a graph of values, with the order of execution and the bytes that values occupy.

A value is an instruction and an index into its result, because results of loops and calls are tuples. An edge joins a
value to a source that it is made of, also across the bounds of fused computations, loop bodies and calls. An edge is
`MOVE` for a copy (also of a slice, or in another dtype), `ALIAS` if both share memory, and `COMPUTE` in other cases.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ._proto import element_type

Value = tuple[int, tuple[int, ...]]
"""An instruction's id, and the index of an array in its result; ``()`` if the result is one array."""
Node = TypeVar("Node")


class Edge(enum.IntEnum):
    """How a value is made from another value."""

    ALIAS = 0
    MOVE = 1
    COMPUTE = 2


_FIRST_OPERAND_MOVES = (
    *("all-gather", "bitcast", "bitcast-convert", "broadcast", "collective-permute", "convert", "copy"),
    *("dynamic-slice", "reduce-precision", "reshape", "reverse", "slice", "transpose"),
)
# Operands that carry the data of a move; the other operands are indices.
_MOVED_OPERANDS = {
    **dict.fromkeys(_FIRST_OPERAND_MOVES, slice(0, 1)),
    **dict.fromkeys(("all-to-all", "concatenate", "pad"), slice(None)),
    "dynamic-update-slice": slice(0, 2),
}
# Asynchronous moves: index of the destination in the result tuple, which also holds the operand and contexts.
_ASYNC_STARTS = {"all-gather-start": 1, "collective-permute-start": 1, "copy-start": 0}
# Collectives that a compiler may combine into one instruction; result k then belongs to operand k.
_COMBINABLE = {"all-gather", "all-reduce", "all-reduce-start", "collective-permute", "reduce-scatter"}
_MOVING_CALLS = {"ConcatBitcast", "MoveToHost", "MoveToDevice", "Sharding", "SPMDFullToShardShape"}
_FREE = {"constant", "iota", "partition-id", "replica-id", "rng-get-and-update-state"}
# Operations whose result may share memory with their operands.
_ALIASING = {
    *("async-done", "async-start", "async-update", "bitcast", "call", "conditional", "copy-done", "copy-start"),
    *("dynamic-update-slice", "fusion", "get-tuple-element", "optimization-barrier", "scatter", "tuple", "while"),
}
# Files that are not the user's program: installed packages, and this package.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages)[/\\]")
_PACKAGE_FOLDER = str(pathlib.Path(__file__).parents[1]) + os.sep
_COMPILE_FILE = str(pathlib.Path(__file__).with_name("_compile.py"))
_CALLING = {"fusion", "call", "while", "conditional", "async-start"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of the program: XLA's message, and the id of the computation that contains it."""

    proto: Any
    computation: int

    @property
    def opcode(self) -> str:
        return self.proto.opcode

    @property
    def is_free(self) -> bool:
        """Whether the result is computed from no operand, so that it depends on no argument."""
        return self.opcode in _FREE or self.proto.custom_call_target == "AllocateBuffer"


class Graph:
    """Index of an HLO module; `module` is the ``module`` field of the message that `_proto.read_hlo` returns."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.computations: dict[int, Any] = {c.id: c for c in module.computations}
        self.instructions: dict[int, Instruction] = {
            i.id: Instruction(i, c.id) for c in module.computations for i in c.instructions
        }
        self.entry = self.computations[module.entry_computation_id]
        self._callers: dict[int, list[Instruction]] = {}
        for instruction in self.instructions.values():
            if instruction.opcode in _CALLING:
                for called in instruction.proto.called_computation_ids:
                    self._callers.setdefault(called, []).append(instruction)

    def shape(self, value: Value) -> Any:
        """Return the shape of a value, a ``Shape`` message."""
        shape = self.instructions[value[0]].proto.shape
        for index in value[1]:
            if index >= len(shape.tuple_shapes):
                return shape
            shape = shape.tuple_shapes[index]
        return shape

    def num_elements(self, value: Value) -> int:
        """Return the number of elements of an array; 0 for a tuple or token."""
        return math.prod(self.shape(value).dimensions) if self.item_type(value)[1] else 0

    def item_type(self, value: Value) -> tuple[str, int]:
        """Return XLA's name of an array's dtype, and the bits per element; empty and 0 for a tuple or token."""
        return element_type(self.shape(value).element_type)

    def is_floating(self, value: Value) -> bool:
        return self.item_type(value)[0].startswith(("f", "bf", "c"))

    def name(self, value: Value) -> str:
        """Return opcode and name of the operation that writes a value, such as ``fusion loop_multiply_fusion.2``."""
        proto = self.instructions[value[0]].proto
        return f"{proto.opcode} {proto.name}"

    def values(self) -> Iterator[Value]:
        """Yield the result arrays of all operations, in the order of the HLO text (operands first)."""
        return (value for instr_id in self.instructions for value in self.results(instr_id))

    def sources(self, value: Value) -> list[tuple[Value, Edge]]:
        """Return the values that a value is made of, as (value, edge) pairs; empty for arguments and constants."""
        return [(leaf, edge) for source, edge in self._sources(value) for leaf in self._existing(source, value)]

    def _existing(self, source: Value, value: Value) -> list[Value]:
        """Return a source if its index exists, else the results of its instruction with the shape and dtype of `value`.

        Some compilers nest the results of an asynchronous operation differently, so an index may be missing.
        """
        instr_id, index = source
        leaves = self._leaves(instr_id)
        if index in leaves:
            return [source]
        return [(instr_id, leaf) for leaf in leaves if self.is_like((instr_id, leaf), value)]

    def is_like(self, first: Value, second: Value) -> bool:
        """Return whether two arrays have the same shape and dtype."""
        a, b = self.shape(first), self.shape(second)
        return a.element_type == b.element_type and list(a.dimensions) == list(b.dimensions)

    @functools.cache  # noqa: B019 - lives as long as the program
    def _leaves(self, instr_id: int) -> frozenset[tuple[int, ...]]:
        return frozenset(_leaf_indices(self.instructions[instr_id].proto.shape))

    def _sources(self, value: Value) -> list[tuple[Value, Edge]]:
        instr_id, index = value
        instruction = self.instructions[instr_id]
        opcode, operands = instruction.opcode, list(instruction.proto.operand_ids)
        if opcode == "parameter":
            return self._from_callers(instruction, index)
        if opcode == "tuple":
            return [((operands[index[0]], index[1:]), Edge.ALIAS)] if index else []
        if opcode == "get-tuple-element":
            return [((operands[0], (instruction.proto.tuple_index, *index)), Edge.ALIAS)]
        if opcode == "while":
            body = self.computations[instruction.proto.called_computation_ids[0]]
            # A loop's result is its initial state if the body never runs, else the last result of the body.
            return [((operands[0], index), Edge.ALIAS), ((body.root_id, index), Edge.ALIAS)]
        if opcode in ("call", "fusion", "conditional"):
            called_ids = instruction.proto.called_computation_ids
            return [((self.computations[c].root_id, index), Edge.ALIAS) for c in called_ids]
        return self._leaf_sources(instruction, index, operands)

    def _leaf_sources(
        self, instruction: Instruction, index: tuple[int, ...], operands: list[int]
    ) -> list[tuple[Value, Edge]]:
        opcode = instruction.opcode
        if opcode in _COMBINABLE and len(operands) > 1 and index:
            operands, index = operands[index[0] : index[0] + 1], index[1:]
        if opcode == "async-start":
            # The result is a tuple (operands, result of the called computation, contexts ...).
            if index[:1] == (0,) and len(index) > 1:
                return [((operands[index[1]], index[2:]), Edge.ALIAS)]
            root = self.computations[instruction.proto.called_computation_ids[0]].root_id
            return [((root, index[1:]), Edge.ALIAS)] if index[:1] == (1,) else []
        if opcode in ("async-done", "async-update"):
            inner = (1, *index) if opcode == "async-done" else index
            return [((operands[0], inner), Edge.ALIAS)]
        if opcode in _ASYNC_STARTS:
            kind = Edge.MOVE if index[:1] == (_ASYNC_STARTS[opcode],) else Edge.ALIAS
            slot = index[1] if len(index) > 1 else 0  # if combined: a tuple of operands, and one of results
            return [((operands[slot], ()), kind)] if index[:1] in ((0,), (1,)) and slot < len(operands) else []
        if opcode.endswith("-done"):
            start = self.instructions[operands[0]]
            inner = (_ASYNC_STARTS[start.opcode],) if start.opcode in _ASYNC_STARTS else ()
            return [((operands[0], (*inner, *index)), Edge.ALIAS)]
        if opcode == "optimization-barrier":
            return [((operands[0], index), Edge.ALIAS)]
        is_moving_call = instruction.proto.custom_call_target in _MOVING_CALLS
        if (moved_operands := slice(None) if is_moving_call else _MOVED_OPERANDS.get(opcode)) is not None:
            return [(source, Edge.MOVE) for o in operands[moved_operands] for source in self.results(o)]
        if opcode == "scatter":  # updates its first operand in place
            return [
                ((operand, ()), Edge.MOVE if position == 0 else Edge.COMPUTE)
                for position, operand in enumerate(operands)
            ]
        return [(source, Edge.COMPUTE) for o in operands for source in self.results(o)]

    def results(self, instr_id: int) -> list[Value]:
        """List the arrays in an instruction's result."""
        return [(instr_id, index) for index in _leaf_indices(self.instructions[instr_id].proto.shape)]

    def loop_of(self, value: Value) -> int | None:
        """Return the id of the loop whose body or condition receives this value as its state; None for other values."""
        instruction = self.instructions[value[0]]
        if instruction.opcode != "parameter":
            return None
        callers = self._callers.get(instruction.computation, ())
        return next((caller.proto.id for caller in callers if caller.opcode == "while"), None)

    def caller(self, instr_id: int) -> int | None:
        """Return the id of the first operation that calls an operation's computation; None in the entry computation."""
        callers = self._callers.get(self.instructions[instr_id].computation, ())
        return callers[0].proto.id if callers else None

    def _from_callers(self, parameter: Instruction, index: tuple[int, ...]) -> list[tuple[Value, Edge]]:
        number = parameter.proto.parameter_number
        edges: list[tuple[Value, Edge]] = []
        for caller in self._callers.get(parameter.computation, ()):
            operands, called = caller.proto.operand_ids, list(caller.proto.called_computation_ids)
            # A conditional's first operand selects the branch; branch k takes operand k + 1.
            operand_index = 1 + called.index(parameter.computation) if caller.opcode == "conditional" else number
            if operand_index < len(operands):
                edges.append(((operands[operand_index], index), Edge.ALIAS))
            if caller.opcode == "while":
                edges.append(((self.computations[called[0]].root_id, index), Edge.ALIAS))
        return edges

    # --- the order of execution --------------------------------------------------------------------------------------

    @functools.cached_property
    def order(self) -> list[int]:
        """Ids of the instructions in execution order; a loop's body appears once, before the loop itself."""
        sequences = {entry.key: list(entry.value.instruction_ids) for entry in self.module.schedule.sequences}
        order: list[int] = []
        stack: list[tuple[int, bool]] = [(instr_id, False) for instr_id in reversed(sequences.get(self.entry.id, []))]
        while stack:
            instr_id, is_entered = stack.pop()
            instruction = self.instructions[instr_id]
            if is_entered or instruction.opcode not in ("while", "call", "conditional"):
                order.append(instr_id)
                continue
            stack.append((instr_id, True))
            called_ids = list(instruction.proto.called_computation_ids)
            # A loop lists its body before its condition, but runs the condition first. Computations of calls and
            # conditionals run in the order of the list.
            for called in called_ids if instruction.opcode == "while" else reversed(called_ids):
                stack.extend((inner, False) for inner in reversed(sequences.get(called, [])))
        return order

    @functools.cached_property
    def positions(self) -> dict[int, tuple[int, int]]:
        """First and last position in `order` of every instruction (a computation may be called twice)."""
        spans: dict[int, tuple[int, int]] = {}
        for position, instr_id in enumerate(self.order):
            spans[instr_id] = (spans.get(instr_id, (position, 0))[0], position)
        return spans

    @functools.cached_property
    def last_uses(self) -> dict[str, int]:
        """Last position at which the result of every instruction is read, by the instruction's name."""
        # An operand that may share memory with a result is in use as long as the result.
        last_uses: dict[int, int] = {}
        for position in range(len(self.order) - 1, -1, -1):
            instr_id = self.order[position]
            last_use = last_uses.get(instr_id, position)
            instruction = self.instructions[instr_id]
            operand_use = last_use if instruction.opcode in _ALIASING else position
            for operand in instruction.proto.operand_ids:
                last_uses[operand] = max(last_uses.get(operand, 0), operand_use)
        if self.order:
            # The program's result is read after its last instruction.
            last_uses[self.entry.root_id] = len(self.order) - 1
        return {
            i.proto.name: last_uses.get(instr_id, self.positions[instr_id][1])
            for instr_id, i in self.instructions.items()
            if instr_id in self.positions
        }

    # --- where JAX made an operation ---------------------------------------------------------------------------------

    def scope(self, instr_id: int) -> str:
        """Return JAX's scope of an operation, ``op_name``; a fusion without a scope gets a fused operation's scope."""
        return next((metadata.op_name for metadata in self._metadata(instr_id) if metadata.op_name), "")

    def source(self, instr_id: int) -> str:
        """Return the innermost line of user code, or else of a library: ``file.py:12 (function)``; empty if unknown."""
        frames = (metadata.stack_frame_id for metadata in self._metadata(instr_id))
        return self._frame_text(next(filter(None, frames), 0))

    def _metadata(self, instr_id: int) -> Iterator[Any]:
        """Yield the metadata of an operation and, for a fusion, of the fused operations, the root first."""
        instruction = self.instructions[instr_id]
        yield instruction.proto.metadata
        if instruction.opcode == "fusion":
            computation = self.computations[instruction.proto.called_computation_ids[0]]
            yield from (i.metadata for i in sorted(computation.instructions, key=lambda i: i.id != computation.root_id))

    @functools.cache  # noqa: B019 - lives as long as the program
    def _frame_text(self, frame: int) -> str:
        index = self.module.stack_frame_index
        lines: list[tuple[str, int, str]] = []
        while 0 < frame <= len(index.stack_frames):
            entry = index.stack_frames[frame - 1]
            location = index.file_locations[entry.file_location_id - 1]
            file = index.file_names[location.file_name_id - 1]
            lines.append((file, location.line, index.function_names[location.function_name_id - 1]))
            frame = entry.parent_frame_id
        # Frames outside of Lowtide's compile call do not belong to the program.
        lines = list(itertools.takewhile(lambda line: line[0] != _COMPILE_FILE, lines))
        user_lines = [line for line in lines if not (_INSTALLED.search(line[0]) or line[0].startswith(_PACKAGE_FOLDER))]
        if not lines:
            return ""
        file, line, function = (user_lines or lines)[0]
        return f"{file}:{line} ({function})"


def reachable(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield the start nodes and every node that is reachable from them, once, in breadth-first order.

    `step` returns the successors of a node; it is called after the node was yielded.
    """
    nodes = list(dict.fromkeys(start))
    visited = set(nodes)
    for node in nodes:  # the loop appends to `nodes`
        yield node
        new = [neighbor for neighbor in step(node) if neighbor not in visited]
        nodes += dict.fromkeys(new)
        visited.update(new)


def _leaf_indices(shape: Any) -> list[tuple[int, ...]]:
    if not shape.tuple_shapes:
        return [()]
    return [(index, *subindex) for index, inner in enumerate(shape.tuple_shapes) for subindex in _leaf_indices(inner)]


# --- bytes and times of values ---------------------------------------------------------------------------------------

# An allocation of temporaries is a heap: values are at offsets and share bytes at different times. XLA's trace says
# when a value is allocated (ALLOC), when it takes over the bytes of another value (SHARE_WITH) and when it is freed
# (FREE). Shared bytes stay alive until the last value that shares them is freed. Two kinds of values have no event:
# aliases of a value with events (loop states), and small values for which a TPU reserves bytes in the whole program.

_ALLOCATED, _FREED, _SHARED = 0, 1, 2
# The color of an allocation is its memory space. TPUs have more spaces than these two; CPUs have only 0.
DEVICE_COLOR, HOST_COLOR = 0, 5


@dataclasses.dataclass(frozen=True)
class Segment:
    """Bytes of an allocation that one value holds from position `start` to position `end`, both included."""

    value: Value
    offset: int
    size: int
    start: int
    end: int


def segments(graph: Graph, assignment: Any, allocation: Any) -> list[Segment]:
    """List the segments of an allocation of temporaries; no two overlap in both bytes and positions."""
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
    # Add values without an event, the largest first, but only at bytes that no other value occupies.
    for buffer in sorted(placed.keys() - traced, key=lambda b: -placed[b][1]):
        offset, size = placed[buffer]
        if size and not any(start < offset + size and offset < stop for start, stop in occupied):
            occupied.append((offset, offset + size))
            result.append(Segment(defined[buffer], offset, size, 0, last))
    return result


class _Region:
    """Values that hold the same bytes one after the other; in pauses between them other regions may use the bytes."""

    def __init__(self, buffer: int, position: int) -> None:
        self.takes: list[tuple[int, int, int]] = []  # (start, stop, buffer)
        self._open = (position, buffer)
        self._alive = {buffer}
        self._end = position

    def take(self, buffer: int, position: int) -> None:
        start, holder = self._open
        self.takes.append((start, position - 1 if self._alive else min(self._end, position - 1), holder))
        self._open = (position, buffer)
        self._alive.add(buffer)

    def free(self, buffer: int, position: int) -> None:
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
        if event.kind == _ALLOCATED:
            region_of[event.buffer_id] = _Region(event.buffer_id, position)
            regions.append(region_of[event.buffer_id])
        elif event.kind == _SHARED and event.share_with_canonical_id in region_of:
            region_of[event.buffer_id] = region_of[event.share_with_canonical_id]
            region_of[event.buffer_id].take(event.buffer_id, position)
        elif event.kind == _FREED and event.buffer_id in region_of:
            region_of[event.buffer_id].free(event.buffer_id, position)
    return regions


def _positions(graph: Graph, events: Sequence[Any]) -> list[int]:
    """Return the position of each event.

    An allocation happens at the next run of the instruction that it names. A FREE names the instruction that made the
    value, not its last reader. It gets the position of the value's last use, limited by the allocations around it.
    """
    positions_by_name: dict[str, list[int]] = {}
    for position, instr_id in enumerate(graph.order):
        positions_by_name.setdefault(graph.instructions[instr_id].proto.name, []).append(position)
    current, earliest = 0, list[int]()
    for event in events:
        if event.kind != _FREED:
            runs = positions_by_name.get(event.instruction_name, [])
            current = next((p for p in runs if p >= current), runs[0] if runs else current)
        earliest.append(current)
    # Go backwards, so that the next allocation after a FREE is known.
    next_allocation, positions = len(graph.order), list[int]()
    for event, first in zip(reversed(events), reversed(earliest), strict=True):
        if event.kind != _FREED:
            next_allocation = first
            positions.append(first)
        else:
            latest = max(next_allocation - 1, 0)
            last_use = graph.last_uses.get(event.instruction_name, len(graph.order))
            positions.append(max(min(last_use, latest), min(first, latest)))
    return positions[::-1]


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping byte ranges (start, stop)."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
