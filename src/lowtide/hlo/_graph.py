"""A compiled program as a graph of values: what each is made of, where JAX made it, in which order it runs.

A value is an instruction and an index into its result (results of loops and calls are tuples). The graph enters fused
computations, loop bodies and calls, so an edge always leads from a value to the arrays that it is made of. The edge
says how: by moving data (`MOVE`), as another name of the same memory (`ALIAS`) or by computing (`COMPUTE`).
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ._proto import element_type

Value = tuple[int, tuple[int, ...]]
"""An instruction's id, and an index into its result."""
Node = TypeVar("Node")


class Edge(enum.IntEnum):
    """How a value comes from another one."""

    ALIAS = 0
    MOVE = 1
    COMPUTE = 2


_MOVES_FIRST = (
    *("all-gather", "bitcast", "bitcast-convert", "broadcast", "collective-permute", "convert", "copy"),
    *("dynamic-slice", "reduce-precision", "reshape", "reverse", "slice", "transpose"),
)
# Which operands carry the data of a move; others are indices.
_MOVED_OPERANDS = {
    **dict.fromkeys(_MOVES_FIRST, slice(0, 1)),
    **dict.fromkeys(("all-to-all", "concatenate", "pad"), slice(None)),
    "dynamic-update-slice": slice(0, 2),
}
# Starts of asynchronous moves: their result is a tuple of the operand (an alias), the destination and contexts.
_STARTS = {"all-gather-start": 1, "collective-permute-start": 1, "copy-start": 0}
# Collectives that a compiler combines: they have as many results as operands, one for each.
_COMBINED = {"all-gather", "all-reduce", "all-reduce-start", "collective-permute", "reduce-scatter"}
_MOVING_CALLS = {"ConcatBitcast", "MoveToHost", "MoveToDevice", "Sharding", "SPMDFullToShardShape"}
_FREE = {"constant", "iota", "partition-id", "replica-id", "rng-get-and-update-state"}
# Operations whose result holds their operands' own memory.
_HOLDERS = {
    *("async-done", "async-start", "async-update", "bitcast", "call", "conditional", "copy-done", "copy-start"),
    *("dynamic-update-slice", "fusion", "get-tuple-element", "optimization-barrier", "scatter", "tuple", "while"),
}
# Files outside of the user's program: installed packages, and this package, wherever it is installed.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages)[/\\]")
_HERE = str(pathlib.Path(__file__).parents[1]) + os.sep
_COMPILE = str(pathlib.Path(__file__).with_name("_compile.py"))
_OPENED = {"fusion", "call", "while", "conditional", "async-start"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation of the program."""

    proto: Any
    computation: int

    @property
    def opcode(self) -> str:
        """XLA's name of the operation."""
        return self.proto.opcode

    @property
    def is_free(self) -> bool:
        """Whether its result holds no data of any argument."""
        return self.opcode in _FREE or self.proto.custom_call_target == "AllocateBuffer"


class Graph:
    """An HLO module, indexed.

    Args:
        module: the ``module`` of a message that `read_hlo` returned.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.computations: dict[int, Any] = {c.id: c for c in module.computations}
        self.instructions: dict[int, Instruction] = {
            i.id: Instruction(i, c.id) for c in module.computations for i in c.instructions
        }
        self.entry = self.computations[module.entry_computation_id]
        self._callers: dict[int, list[Instruction]] = {}
        for instruction in self.instructions.values():
            if instruction.opcode in _OPENED:
                for called in instruction.proto.called_computation_ids:
                    self._callers.setdefault(called, []).append(instruction)

    def shape(self, value: Value) -> Any:
        """Return the shape (a message) of a value."""
        shape = self.instructions[value[0]].proto.shape
        for index in value[1]:
            if index >= len(shape.tuple_shapes):
                return shape
            shape = shape.tuple_shapes[index]
        return shape

    def num_elements(self, value: Value) -> int:
        """Return the elements of an array; 0 for a tuple or token."""
        return math.prod(self.shape(value).dimensions) if self.item_type(value)[1] else 0

    def item_type(self, value: Value) -> tuple[str, int]:
        """Return the name and the bits of an item of an array; empty and 0 for a tuple or token."""
        return element_type(self.shape(value).element_type)

    def is_floating(self, value: Value) -> bool:
        """Return whether the items of an array are floating-point numbers."""
        return self.item_type(value)[0].startswith(("f", "bf", "c"))

    def name(self, value: Value) -> str:
        """Return XLA's name of the operation that writes a value: ``fusion loop_multiply_fusion.2``."""
        proto = self.instructions[value[0]].proto
        return f"{proto.opcode} {proto.name}"

    def values(self) -> Iterator[Value]:
        """Yield every array that an operation makes, in the order of the text (operands first)."""
        return (value for at in self.instructions for value in self.results(at))

    def sources(self, value: Value) -> list[tuple[Value, Edge]]:
        """Return the values that a value is made of, as (value, edge) pairs; empty for arguments and constants."""
        return [(found, edge) for source, edge in self._sources(value) for found in self._existing(source, value)]

    def _existing(self, source: Value, value: Value) -> list[Value]:
        """Return a source if such a value exists.

        Some compilers pack the results of an asynchronous operation differently. Then return those of the same shape.
        """
        at, index = source
        leaves = self._leaves(at)
        return [source] if index in leaves else [(at, leaf) for leaf in leaves if self.is_like((at, leaf), value)]

    def is_like(self, one: Value, other: Value) -> bool:
        """Return whether two arrays have the same shape and type."""
        a, b = self.shape(one), self.shape(other)
        return a.element_type == b.element_type and list(a.dimensions) == list(b.dimensions)

    @functools.cache  # noqa: B019 - lives as long as the program
    def _leaves(self, at: int) -> frozenset[tuple[int, ...]]:
        return frozenset(_leaf_indices(self.instructions[at].proto.shape))

    def _sources(self, value: Value) -> list[tuple[Value, Edge]]:
        at, index = value
        instruction = self.instructions[at]
        opcode, operands = instruction.opcode, list(instruction.proto.operand_ids)
        if opcode == "parameter":
            return self._from_callers(instruction, index)
        if opcode == "tuple":
            return [((operands[index[0]], index[1:]), Edge.ALIAS)] if index else []
        if opcode == "get-tuple-element":
            return [((operands[0], (instruction.proto.tuple_index, *index)), Edge.ALIAS)]
        if opcode == "while":
            body = self.computations[instruction.proto.called_computation_ids[0]]
            # A loop's result is its initial state if the body never runs, else what the body returned last.
            return [((operands[0], index), Edge.ALIAS), ((body.root_id, index), Edge.ALIAS)]
        if opcode in ("call", "fusion", "conditional"):
            called_ids = instruction.proto.called_computation_ids
            return [((self.computations[c].root_id, index), Edge.ALIAS) for c in called_ids]
        return self._leaf_sources(instruction, index, operands)

    def _leaf_sources(
        self, instruction: Instruction, index: tuple[int, ...], operands: list[int]
    ) -> list[tuple[Value, Edge]]:
        opcode = instruction.opcode
        if opcode in _COMBINED and len(operands) > 1 and index:
            operands, index = operands[index[0] : index[0] + 1], index[1:]
        if opcode == "async-start":
            # (operands, result, contexts ...)
            if index[:1] == (0,) and len(index) > 1:
                return [((operands[index[1]], index[2:]), Edge.ALIAS)]
            root = self.computations[instruction.proto.called_computation_ids[0]].root_id
            return [((root, index[1:]), Edge.ALIAS)] if index[:1] == (1,) else []
        if opcode in ("async-done", "async-update"):
            inner = (1, *index) if opcode == "async-done" else index
            return [((operands[0], inner), Edge.ALIAS)]
        if opcode in _STARTS:
            kind = Edge.MOVE if index[:1] == (_STARTS[opcode],) else Edge.ALIAS
            own = index[1] if len(index) > 1 else 0  # a combined start has a table of operands and one of results
            return [((operands[own], ()), kind)] if index[:1] in ((0,), (1,)) and own < len(operands) else []
        if opcode.endswith("-done"):
            start = self.instructions[operands[0]]
            inner = (_STARTS[start.opcode],) if start.opcode in _STARTS else ()
            return [((operands[0], (*inner, *index)), Edge.ALIAS)]
        if opcode == "optimization-barrier":
            return [((operands[0], index), Edge.ALIAS)]
        is_moving_call = instruction.proto.custom_call_target in _MOVING_CALLS
        if (moved := slice(None) if is_moving_call else _MOVED_OPERANDS.get(opcode)) is not None:
            return [(source, Edge.MOVE) for o in operands[moved] for source in self.results(o)]
        if opcode == "scatter":  # in place
            return [((o, ()), Edge.MOVE if at == 0 else Edge.COMPUTE) for at, o in enumerate(operands)]
        return [(source, Edge.COMPUTE) for o in operands for source in self.results(o)]

    def results(self, at: int) -> list[Value]:
        """List the arrays that an instruction makes."""
        return [(at, index) for index in _leaf_indices(self.instructions[at].proto.shape)]

    def loop_of(self, value: Value) -> int | None:
        """Return the loop whose state a value is inside of that loop; None for any other value."""
        instruction = self.instructions[value[0]]
        if instruction.opcode != "parameter":
            return None
        callers = self._callers.get(instruction.computation, ())
        return next((caller.proto.id for caller in callers if caller.opcode == "while"), None)

    def caller(self, at: int) -> int | None:
        """Return the operation that calls the computation of an operation; None in the entry computation."""
        callers = self._callers.get(self.instructions[at].computation, ())
        return callers[0].proto.id if callers else None

    def is_loop_state(self, value: Value) -> bool:
        """Return whether a value is carried by a loop: made of its initial value and of the body's result."""
        return self.instructions[value[0]].opcode == "while" or self.loop_of(value) is not None

    def _from_callers(self, parameter: Instruction, index: tuple[int, ...]) -> list[tuple[Value, Edge]]:
        number = parameter.proto.parameter_number
        edges: list[tuple[Value, Edge]] = []
        for caller in self._callers.get(parameter.computation, ()):
            operands, called = caller.proto.operand_ids, list(caller.proto.called_computation_ids)
            # A conditional's first operand chooses the branch; branch k takes operand k + 1.
            at = 1 + called.index(parameter.computation) if caller.opcode == "conditional" else number
            if at < len(operands):
                edges.append(((operands[at], index), Edge.ALIAS))
            if caller.opcode == "while":
                edges.append(((self.computations[called[0]].root_id, index), Edge.ALIAS))
        return edges

    # --- the order of execution --------------------------------------------------------------------------------------

    @functools.cached_property
    def order(self) -> list[int]:
        """Ids of the instructions in execution order; a loop's body appears once, before the loop itself."""
        sequences = {entry.key: list(entry.value.instruction_ids) for entry in self.module.schedule.sequences}
        order: list[int] = []
        stack: list[tuple[int, bool]] = [(at, False) for at in reversed(sequences.get(self.entry.id, []))]
        while stack:
            at, opened = stack.pop()
            instruction = self.instructions[at]
            if opened or instruction.opcode not in ("while", "call", "conditional"):
                order.append(at)
                continue
            stack.append((at, True))
            called_ids = list(instruction.proto.called_computation_ids)
            # A loop lists its body before its condition, but runs the condition first. Calls and branches keep their
            # order.
            for called in called_ids if instruction.opcode == "while" else reversed(called_ids):
                stack.extend((inner, False) for inner in reversed(sequences.get(called, [])))
        return order

    @functools.cached_property
    def positions(self) -> dict[int, tuple[int, int]]:
        """First and last position in `order` of every instruction (a computation may be called twice)."""
        found: dict[int, tuple[int, int]] = {}
        for position, at in enumerate(self.order):
            found[at] = (found.get(at, (position, 0))[0], position)
        return found

    def last_use(self, name: str) -> int:
        """Return the last position at which the result of an instruction is read, under any name."""
        return self._last_uses.get(name, len(self.order))

    @functools.cached_property
    def _last_uses(self) -> dict[str, int]:
        """Last use of every instruction, by name. A value inside of a tuple or loop is used as long as that one is."""
        found: dict[int, int] = {}
        for position in range(len(self.order) - 1, -1, -1):
            at = self.order[position]
            mine = found.get(at, position)
            instruction = self.instructions[at]
            until = mine if instruction.opcode in _HOLDERS else position
            for operand in instruction.proto.operand_ids:
                found[operand] = max(found.get(operand, 0), until)
        if self.order:
            # The program's result is read after its last instruction.
            found[self.entry.root_id] = len(self.order) - 1
        return {
            i.proto.name: found.get(at, self.positions[at][1])
            for at, i in self.instructions.items()
            if at in self.positions
        }

    # --- where JAX made an operation ---------------------------------------------------------------------------------

    def scope(self, at: int) -> str:
        """Return the scopes in which JAX made an operation; for a fusion without any, those of a fused operation."""
        instruction = self.instructions[at]
        if instruction.proto.metadata.op_name or instruction.opcode != "fusion":
            return instruction.proto.metadata.op_name
        return next((i.metadata.op_name for i in self._fused(instruction) if i.metadata.op_name), "")

    def source(self, at: int) -> str:
        """Return the innermost source line of the user's program, ``file.py:12 (function)``; empty when unknown."""
        instruction = self.instructions[at]
        frame = instruction.proto.metadata.stack_frame_id
        if not frame and instruction.opcode == "fusion":
            frame = next((i.metadata.stack_frame_id for i in self._fused(instruction) if i.metadata.stack_frame_id), 0)
        return self._frame_text(frame)

    def _fused(self, fusion: Instruction) -> list[Any]:
        """Return the instructions of a fused computation, its root first."""
        computation = self.computations[fusion.proto.called_computation_ids[0]]
        return sorted(computation.instructions, key=lambda i: i.id != computation.root_id)

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
        # Frames outside of Lowtide's compile call are not the program. A library's line serves if the user has none.
        lines = list(itertools.takewhile(lambda line: line[0] != _COMPILE, lines))
        own = [line for line in lines if not (_INSTALLED.search(line[0]) or line[0].startswith(_HERE))]
        if not lines:
            return ""
        file, line, function = (own or lines)[0]
        return f"{file}:{line} ({function})"


def reachable(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield the start nodes and all nodes that steps lead to, the nearest first, each once.

    Args:
        start: the first nodes.
        step: a function from a node to its next nodes; called after the node was yielded.
    """
    found = list(dict.fromkeys(start))
    seen = set(found)
    for node in found:  # `found` grows meanwhile
        yield node
        new = [one for one in step(node) if one not in seen]
        found += dict.fromkeys(new)
        seen.update(new)


def _leaf_indices(shape: Any) -> list[tuple[int, ...]]:
    if not shape.tuple_shapes:
        return [()]
    return [(at, *rest) for at, inner in enumerate(shape.tuple_shapes) for rest in _leaf_indices(inner)]
