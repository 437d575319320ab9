"""Count the bytes that a compiled program moves to and from device memory, with loops counted as often as they run.

XLA's own count includes a loop's body once. In both counts, every operation reads its operands and writes its result.
A fusion that only slices an array counts the slices. A fusion that updates an array in place counts the update. Arrays
in a TPU's vector memory or on the host do not count. A conditional counts its most expensive branch. Limits: a
kernel (custom call) counts its operands and results once. Caches of a CPU and a GPU save some of the counted traffic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ..core import StructureError
from ._graph import DEVICE_COLOR, Graph
from ._proto import element_type

_NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"),
    *("replica-id", "optimization-barrier", "opt-barrier", "domain", "add-dependency", "async-update"),
}
_IDENTITIES = {"bitcast", "copy", "convert", "reshape"}
"""Operations in a fusion that change only the layout, shape or dtype of their operand."""
_BARRIERS = ("opt-barrier", "optimization-barrier")
_FORWARDING = {"bitcast", "copy", "copy-done", "copy-start", "reshape", *_BARRIERS}
_SLICES = {"dynamic-slice", "slice", "gather"}


class Traffic:
    """Counter of the bytes of a program; `module` is the ``module`` field of the message from `_proto.read_hlo`."""

    def __init__(self, module: Any) -> None:
        graph = Graph(module)
        self._entry: int = graph.entry.id
        self._computations = graph.computations
        self._instructions = {instr_id: instr.proto for instr_id, instr in graph.instructions.items()}
        self._parent = {instr_id: instr.computation for instr_id, instr in graph.instructions.items()}
        self._users: dict[int, list[Any]] = {}
        self._bytes_of: dict[int, int] = {}
        self._fusion_of: dict[int, Any] = {}
        """Fusion instruction by the id of its fused computation."""
        self._calls_of: dict[int, list[Any]] = {}
        """Call instructions by the id of the called computation. XLA's CPU compiler of JAX 0.12 calls small loops."""
        for instr in self._instructions.values():
            for operand_id in instr.operand_ids:
                self._users.setdefault(operand_id, []).append(instr)
            if instr.opcode == "fusion":
                self._fusion_of[instr.called_computation_ids[0]] = instr
            elif instr.opcode == "call":
                self._calls_of.setdefault(instr.called_computation_ids[0], []).append(instr)

    def total(self) -> int:
        """Return the bytes of the program; `StructureError` for a loop with an unknown number of iterations."""
        return self._computation_bytes(self._entry)

    def _computation_bytes(self, computation_id: int) -> int:
        if computation_id not in self._bytes_of:
            instructions = self._computations[computation_id].instructions
            self._bytes_of[computation_id] = sum(map(self._instruction_bytes, instructions))
        return self._bytes_of[computation_id]

    def _instruction_bytes(self, instr: Any) -> int:
        called = list(instr.called_computation_ids)
        if instr.opcode in _NO_TRAFFIC or instr.opcode.endswith("-done"):
            return 0
        if instr.opcode == "while":
            # The first computation is the loop's body; its condition is not counted.
            return self._trip_count(instr) * self._computation_bytes(called[0])
        if instr.opcode == "conditional":
            return max(self._computation_bytes(computation_id) for computation_id in called)
        if instr.opcode in ("call", "async-start"):
            return sum(self._computation_bytes(computation_id) for computation_id in called)
        if instr.opcode == "fusion":
            return self._fusion_bytes(self._computations[called[0]])
        if instr.opcode in _SLICES:
            return 2 * size(instr.shape)
        if instr.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * size(self._instructions[instr.operand_ids[-1 if instr.opcode == "scatter" else 1]].shape)
        if instr.opcode.endswith("-start"):  # a copy or a collective: its result tuple contains its operand, too
            return size(instr.shape)
        return size(instr.shape) + sum(size(self._instructions[operand_id].shape) for operand_id in instr.operand_ids)

    def _fusion_bytes(self, computation: Any) -> int:
        root = self._instructions[computation.root_id]
        roots = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
        read = sum(self._read_bytes(instr, roots) for instr in computation.instructions if instr.opcode == "parameter")
        return read + sum(self._written_bytes(root_id) for root_id in roots)

    def _read_bytes(self, parameter: Any, roots: Sequence[int]) -> int:
        """Return the bytes of an operand that a fusion reads; if it only slices the operand, only slices count."""
        total, sliced, pending = size(parameter.shape), 0, [parameter.id]
        while pending:
            value_id = self._outermost_fusion(pending.pop(), parameter)
            if value_id in roots:
                return total
            for user in self._users.get(value_id, []):
                if user.opcode == "fusion":
                    inner = self._computations[user.called_computation_ids[0]].instructions
                    numbers = [n for n, operand in enumerate(user.operand_ids) if operand == value_id]
                    # Continue at the inner fusion's parameters that are this value.
                    pending += [
                        instr.id for instr in inner if instr.opcode == "parameter" and instr.parameter_number in numbers
                    ]
                elif user.opcode in _IDENTITIES:
                    pending.append(user.id)
                elif user.opcode in _SLICES and user.operand_ids[0] == value_id:
                    sliced += math.prod(user.shape.dimensions) * total // max(math.prod(parameter.shape.dimensions), 1)
                elif not (user.opcode == "dynamic-update-slice" and user.operand_ids[0] == value_id):
                    return total
        return min(sliced, total)

    def _outermost_fusion(self, value: int, parameter: Any) -> int:
        """Follow a value out of nested fusions, at most to the computation of `parameter`.

        While the value is the root of a fused computation, replace it by the fusion. All values are instruction ids.
        """
        while (body := self._parent[value]) != self._parent[parameter.id] and self._computations[body].root_id == value:
            value = self._fusion_of[body].id
        return value

    def _written_bytes(self, root_id: int) -> int:
        inner = root = self._instructions[root_id]
        while inner.opcode in _IDENTITIES or inner.opcode == "fusion":
            is_fusion = inner.opcode == "fusion"
            source = self._computations[inner.called_computation_ids[0]].root_id if is_fusion else inner.operand_ids[0]
            inner = self._instructions[source]
        # A fusion that ends with an update in place writes the update only.
        if inner.opcode != "dynamic-update-slice":
            return size(root.shape)
        return size(self._instructions[inner.operand_ids[1]].shape)

    def _trip_count(self, loop: Any) -> int:
        """Return a loop's number of iterations, from XLA or from a counter with constant start, step and end."""
        if (match := re.search(rb'"known_trip_count":\{"n":"(\d+)"', loop.backend_config)) is not None:
            return int(match[1])
        body, condition = (self._computations[computation_id] for computation_id in loop.called_computation_ids)
        initial, result = self._definition(loop.operand_ids[0]), self._instructions[body.root_id]
        comparison = self._definition(condition.root_id)
        if comparison.opcode == "compare" and comparison.comparison_direction == "LT" and initial.opcode == "tuple":
            counter, bound = map(self._definition, comparison.operand_ids)
            if counter.opcode == "get-tuple-element" and result.opcode == "tuple":
                index = counter.tuple_index
                if bound.opcode == "get-tuple-element" and self._is_unchanged(result, bound.tuple_index):
                    bound = self._definition(initial.operand_ids[bound.tuple_index])
                first, last = _constant_value(self._definition(initial.operand_ids[index])), _constant_value(bound)
                step = self._counter_step(self._definition(result.operand_ids[index]), index)
                if first is not None and last is not None and step:
                    return max(0, -(-(last - first) // step))
        problem = f"the number of iterations of the loop {loop.name} is unknown, so its bytes cannot be counted"
        raise StructureError(problem, hint="use jax.lax.scan, or jax.lax.fori_loop with constant bounds")

    def _is_unchanged(self, result: Any, index: int) -> bool:
        """Return whether a loop's body returns an entry of its state unchanged."""
        source = self._definition(result.operand_ids[index])
        return source.opcode == "get-tuple-element" and source.tuple_index == index

    def _counter_step(self, addition: Any, index: int) -> int | None:
        """Return the constant that `addition` adds to the counter at `index` of the loop's state, or None."""
        if addition.opcode != "add":
            return None
        terms = list(map(self._definition, addition.operand_ids))
        is_counter = [term.opcode == "get-tuple-element" and term.tuple_index == index for term in terms]
        return _constant_value(terms[is_counter.index(False)]) if sorted(is_counter) == [False, True] else None

    def _caller(self, computation_id: int) -> Any:
        """Return the fusion of a computation, or the only call of it; else None."""
        calls = self._calls_of.get(computation_id, [])
        return self._fusion_of.get(computation_id, calls[0] if len(calls) == 1 else None)

    def _definition(self, instr_id: int) -> Any:
        """Follow a value to the operation that computes it, into and out of fusions."""
        instr = self._instructions[instr_id]
        while True:
            operand = self._instructions[instr.operand_ids[0]] if instr.operand_ids else None
            if instr.opcode == "fusion":
                instr = self._instructions[self._computations[instr.called_computation_ids[0]].root_id]
            elif instr.opcode == "parameter" and (caller := self._caller(self._parent[instr.id])) is not None:
                instr = self._instructions[caller.operand_ids[instr.parameter_number]]
            elif (
                instr.opcode == "get-tuple-element" and operand is not None and operand.opcode in ("tuple", *_BARRIERS)
            ):
                source = operand if operand.opcode == "tuple" else self._instructions[operand.operand_ids[0]]
                if source.opcode != "tuple":
                    return instr
                instr = self._instructions[source.operand_ids[instr.tuple_index]]
            elif instr.opcode in _FORWARDING and operand is not None:
                instr = operand
            else:
                return instr


def _constant_value(instr: Any) -> int | None:
    """Return the integer of a constant, or None for other operations; XLA writes no value for a zero."""
    if instr.opcode != "constant":
        return None
    return next(iter([*instr.literal.s32s, *instr.literal.s64s, *instr.literal.u32s]), 0)


def size(shape: Any) -> int:
    """Return the bytes of a shape, or of all shapes of a tuple; arrays outside of a device's main memory count 0."""
    if shape.tuple_shapes:
        return sum(size(element) for element in shape.tuple_shapes)
    bits = element_type(shape.element_type)[1]
    return math.prod(shape.dimensions) * bits // 8 if bits and shape.layout.memory_space == DEVICE_COLOR else 0
