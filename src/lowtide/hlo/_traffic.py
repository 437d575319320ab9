"""Count the bytes that a compiled program moves to and from device memory, with loops counted as often as they run.

XLA's own count takes the body of a loop once. Here, as in XLA's count, every operation reads its operands and writes
its result. If a fusion only slices an array, the slices count; if it updates an array in place, the update counts.
Arrays in a TPU's vector memory or on the host are not counted. A conditional counts its most expensive branch.

Limits: a kernel (custom call) counts its operands and results once, even if it reads them repeatedly. Caches of a CPU
and a GPU save some of the counted traffic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ..core import StructureError
from ._heap import DEVICE_COLOR
from ._proto import element_type

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"),
    *("replica-id", "optimization-barrier", "opt-barrier", "domain", "add-dependency", "async-update"),
}
_SAME = {"bitcast", "copy", "convert", "reshape"}
"""Operations that, inside of a fusion, give another form of the same numbers."""
_BARRIERS = ("opt-barrier", "optimization-barrier")
_FORWARDED = {"bitcast", "copy", "copy-done", "copy-start", "reshape", *_BARRIERS}
_SLICES = {"dynamic-slice", "slice", "gather"}


class Traffic:
    """The bytes of each computation of a module.

    Args:
        module: the ``module`` of a message that `read_hlo` returned.
    """

    def __init__(self, module: Any) -> None:
        self._computations = {computation.id: computation for computation in module.computations}
        self._instructions = {one.id: one for computation in module.computations for one in computation.instructions}
        self._entry: int = module.entry_computation_id
        self._users: dict[int, list[Any]] = {}
        self._known: dict[int, int] = {}
        self._callers: dict[int, Any] = {}
        """Fusion instruction by the id of its fused computation."""
        for one in self._instructions.values():
            for at in one.operand_ids:
                self._users.setdefault(at, []).append(one)
            if one.opcode == "fusion":
                self._callers[one.called_computation_ids[0]] = one
        self._owners = {one.id: each.id for each in module.computations for one in each.instructions}

    def total(self) -> int:
        """Return the bytes that the whole program moves.

        Raises:
            StructureError: for a loop whose number of iterations is not known at compile time.
        """
        return self._of(self._entry)

    def _of(self, computation: int) -> int:
        if computation not in self._known:
            instructions = self._computations[computation].instructions
            self._known[computation] = sum(map(self._moved, instructions))
        return self._known[computation]

    def _moved(self, one: Any) -> int:
        called = list(one.called_computation_ids)
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        if one.opcode == "while":
            # The first computation is the loop's body; its condition is not counted.
            return self._trips(one) * self._of(called[0])
        if one.opcode == "conditional":
            return max(self._of(each) for each in called)
        if one.opcode in ("call", "async-start"):
            return sum(self._of(each) for each in called)
        if one.opcode == "fusion":
            return self._fused(self._computations[called[0]])
        if one.opcode in _SLICES:
            return 2 * size(one.shape)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * size(self._instructions[one.operand_ids[-1 if one.opcode == "scatter" else 1]].shape)
        if one.opcode.endswith("-start"):  # a copy or a collective: its result tuple contains its operand, too
            return size(one.shape)
        return size(one.shape) + sum(size(self._instructions[at].shape) for at in one.operand_ids)

    def _fused(self, computation: Any) -> int:
        root = self._instructions[computation.root_id]
        roots = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
        read = sum(self._read(one, roots) for one in computation.instructions if one.opcode == "parameter")
        return read + sum(self._written(at) for at in roots)

    def _read(self, parameter: Any, roots: Sequence[int]) -> int:
        """Return the bytes of an operand that a fusion reads: if it only slices it, converted or not, the slices."""
        whole, parts, reached = size(parameter.shape), 0, [parameter.id]
        while reached:
            at = self._outermost(reached.pop(), parameter)
            if at in roots:
                return whole
            for user in self._users.get(at, []):
                if user.opcode == "fusion":
                    inner = self._computations[user.called_computation_ids[0]].instructions
                    named = [n for n, operand in enumerate(user.operand_ids) if operand == at]
                    # Continue at the inner fusion's parameters that are this value.
                    reached += [one.id for one in inner if one.opcode == "parameter" and one.parameter_number in named]
                elif user.opcode in _SAME:
                    reached.append(user.id)
                elif user.opcode in _SLICES and user.operand_ids[0] == at:
                    parts += math.prod(user.shape.dimensions) * whole // max(math.prod(parameter.shape.dimensions), 1)
                elif not (user.opcode == "dynamic-update-slice" and user.operand_ids[0] == at):
                    return whole
        return min(parts, whole)

    def _outermost(self, at: int, parameter: Any) -> int:
        """Return the outermost fusion, within the parameter's computation, whose result is this value."""
        while (own := self._owners[at]) != self._owners[parameter.id] and self._computations[own].root_id == at:
            at = self._callers[own].id
        return at

    def _written(self, at: int) -> int:
        inner = root = self._instructions[at]
        while inner.opcode in _SAME or inner.opcode == "fusion":
            is_fusion = inner.opcode == "fusion"
            below = self._computations[inner.called_computation_ids[0]].root_id if is_fusion else inner.operand_ids[0]
            inner = self._instructions[below]
        # A fusion that ends with an update in place writes the update only.
        if inner.opcode != "dynamic-update-slice":
            return size(root.shape)
        return size(self._instructions[inner.operand_ids[1]].shape)

    def _trips(self, loop: Any) -> int:
        """Return the number of iterations of a loop whose counter starts, steps and ends at constants."""
        if (told := re.search(rb'"known_trip_count":\{"n":"(\d+)"', loop.backend_config)) is not None:
            return int(told[1])
        body, condition = (self._computations[at] for at in loop.called_computation_ids)
        begin, after = self._instructions[loop.operand_ids[0]], self._instructions[body.root_id]
        compared = self._origin(condition.root_id)
        if compared.opcode == "compare" and compared.comparison_direction == "LT" and begin.opcode == "tuple":
            counter, bound = map(self._origin, compared.operand_ids)
            if counter.opcode == "get-tuple-element" and after.opcode == "tuple":
                index = counter.tuple_index
                if bound.opcode == "get-tuple-element" and self._is_kept(after, bound.tuple_index):
                    bound = self._origin(begin.operand_ids[bound.tuple_index])
                first, last = _number(self._origin(begin.operand_ids[index])), _number(bound)
                step = self._step(self._origin(after.operand_ids[index]), index)
                if first is not None and last is not None and step:
                    return max(0, -(-(last - first) // step))
        raise StructureError(
            f"how often does the loop {loop.name} run?",
            expected="a number that the program says, as of jax.lax.scan and fori_loop",
            got="a loop that ends when the data say so",
            hint="its bytes cannot be counted ahead of time",
        )

    def _is_kept(self, after: Any, index: int) -> bool:
        """Return whether a loop's body returns an entry of its state unchanged."""
        same = self._origin(after.operand_ids[index])
        return same.opcode == "get-tuple-element" and same.tuple_index == index

    def _step(self, added: Any, index: int) -> int | None:
        """Return the constant by which a counter grows, or None."""
        if added.opcode != "add":
            return None
        terms = list(map(self._origin, added.operand_ids))
        is_own = [one.opcode == "get-tuple-element" and one.tuple_index == index for one in terms]
        return _number(terms[is_own.index(False)]) if sorted(is_own) == [False, True] else None

    def _origin(self, at: int) -> Any:
        """Follow a scalar to the operation that computes it, into and out of fusions."""
        one = self._instructions[at]
        while True:
            below = self._instructions[one.operand_ids[0]] if one.operand_ids else None
            if one.opcode == "fusion":
                one = self._instructions[self._computations[one.called_computation_ids[0]].root_id]
            elif one.opcode == "parameter" and (caller := self._callers.get(self._owners[one.id])) is not None:
                one = self._instructions[caller.operand_ids[one.parameter_number]]
            elif one.opcode == "get-tuple-element" and below is not None and below.opcode in ("tuple", *_BARRIERS):
                inside = below if below.opcode == "tuple" else self._instructions[below.operand_ids[0]]
                if inside.opcode != "tuple":
                    return one
                one = self._instructions[inside.operand_ids[one.tuple_index]]
            elif one.opcode in _FORWARDED and below is not None:
                one = below
            else:
                return one


def _number(one: Any) -> int | None:
    """Return the integer of a constant, or None for other operations; XLA writes no value for a zero."""
    if one.opcode != "constant":
        return None
    return next(iter([*one.literal.s32s, *one.literal.s64s, *one.literal.u32s]), 0)


def size(shape: Any) -> int:
    """Return the bytes of a shape, or of a tuple of shapes, in a device's main memory."""
    if shape.tuple_shapes:
        return sum(size(each) for each in shape.tuple_shapes)
    bits = element_type(shape.element_type)[1]
    return math.prod(shape.dimensions) * bits // 8 if bits and shape.layout.memory_space == DEVICE_COLOR else 0
