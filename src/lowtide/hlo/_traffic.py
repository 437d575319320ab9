"""Count the bytes that a compiled program moves to and from a device's memory, loops as often as they run.

XLA's own count takes what is in a loop once. Here every operation reads its operands and writes its result, as XLA
counts them too: of an array that a fusion slices what it slices, of one that it updates in place the update. What lies
in a TPU's vector memory or on the host is not counted. Of a conditional the dearest branch counts.

Limits: a kernel (custom call) counts with its operands and results once, whatever it reads again; caches of a CPU and a
GPU save some of what is counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from ..core import StructureError
from ._heap import DEVICE_COLOR
from ._proto import element_type

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"),
    *("replica-id", "optimization-barrier", "opt-barrier", "domain", "add-dependency", "async-update"),
}
_SAME = {"bitcast", "copy", "convert", "reshape"}
"""What makes another form of the same numbers, inside of a fusion."""
_FORWARDED = {"bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "opt-barrier", "optimization-barrier"}
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
        # The result of a fusion inside of a fusion is that fusion.
        inside = {
            at for one in self._instructions.values() if one.opcode == "fusion" for at in one.called_computation_ids
        }
        self._nested = {
            self._computations[one.called_computation_ids[0]].root_id: one.id
            for at in inside
            for one in self._computations[at].instructions
            if one.opcode == "fusion"
        }
        for one in self._instructions.values():
            for at in one.operand_ids:
                self._users.setdefault(at, []).append(one)

    def total(self) -> int:
        """Return what the whole program moves.

        Raises:
            StructureError: for a loop that does not say how often it runs.
        """
        return self._of(self._entry)

    @functools.cache  # noqa: B019
    def _of(self, computation: int) -> int:
        return sum(self._moved(one) for one in self._computations[computation].instructions)

    def _moved(self, one: Any) -> int:
        called = list(one.called_computation_ids)
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        if one.opcode == "while":
            return self._trips(one, called[1]) * self._of(called[0])
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
        if one.opcode.endswith("-start"):  # of a copy or a collective, whose result names its operand, too
            return size(one.shape)
        return size(one.shape) + sum(size(self._instructions[at].shape) for at in one.operand_ids)

    def _fused(self, computation: Any) -> int:
        read = sum(self._read(one) for one in computation.instructions if one.opcode == "parameter")
        return read + sum(self._written(root) for root in self._roots(computation))

    def _read(self, parameter: Any) -> int:
        """Bytes of an operand that a fusion reads: of what it only slices, converted or not, the slices."""
        whole = size(parameter.shape)
        parts, reached = 0, [(parameter.id, user) for user in self._users.get(parameter.id, [])]
        while reached:
            at, user = reached.pop()
            if user.opcode == "fusion":
                inner = self._computations[user.called_computation_ids[0]]
                named = [n for n, operand in enumerate(user.operand_ids) if operand == at]
                own = [one for one in inner.instructions if one.opcode == "parameter" and one.parameter_number in named]
                reached += [pair for one in own for pair in self._users_of(one.id)]
            elif user.opcode in _SAME:
                reached += self._users_of(user.id)
            elif user.opcode in _SLICES and user.operand_ids[0] == at:
                parts += math.prod(user.shape.dimensions) * whole // max(math.prod(parameter.shape.dimensions), 1)
            elif not (user.opcode == "dynamic-update-slice" and user.operand_ids[0] == at):
                return whole
        return min(parts, whole)

    def _users_of(self, at: int) -> list[tuple[int, Any]]:
        """Return what uses a value; of the result of a fusion inside of another, what uses that fusion."""
        while (outer := self._nested.get(at)) is not None:
            at = outer
        return [(at, user) for user in self._users.get(at, [])]

    def _roots(self, computation: Any) -> Iterator[Any]:
        root = self._instructions[computation.root_id]
        yield from (self._instructions[at] for at in root.operand_ids) if root.opcode == "tuple" else [root]

    def _written(self, root: Any) -> int:
        inner = root
        while inner.opcode in _SAME or inner.opcode == "fusion":
            is_fusion = inner.opcode == "fusion"
            at = self._computations[inner.called_computation_ids[0]].root_id if is_fusion else inner.operand_ids[0]
            inner = self._instructions[at]
        if inner.opcode != "dynamic-update-slice":
            return size(root.shape)
        return size(self._instructions[inner.operand_ids[1]].shape)

    def _trips(self, loop: Any, condition: int) -> int:
        """Read the bound that a loop's counter, which begins at 0, is compared with."""
        reached, numbers = [condition], list[int]()
        while reached:
            for one in self._computations[reached.pop()].instructions:
                reached += one.called_computation_ids
                if one.opcode == "constant":
                    numbers += [*one.literal.s32s, *one.literal.s64s, *one.literal.u32s]
        numbers = numbers or self._carried(loop, condition)
        if not numbers:
            raise StructureError(
                f"how often does the loop {loop.name} run?",
                expected="a number in its condition, as of jax.lax.scan and fori_loop",
                got="a loop that ends when the data say so",
                hint="its bytes cannot be counted ahead of time",
            )
        return max(numbers)

    def _carried(self, loop: Any, condition: int) -> list[int]:
        """Read the bound that a loop carries along: the entries of what it begins with that its condition reads."""
        begin = self._instructions[loop.operand_ids[0]]
        numbers: list[int] = []
        for one in self._computations[condition].instructions:
            if one.opcode == "get-tuple-element" and begin.opcode == "tuple":
                found = self._instructions[begin.operand_ids[one.tuple_index]]
                while found.opcode in _FORWARDED:
                    below = self._instructions[found.operand_ids[0]]
                    is_entry = found.opcode == "get-tuple-element" and below.opcode == "tuple"
                    found = self._instructions[below.operand_ids[found.tuple_index]] if is_entry else below
                numbers += [*found.literal.s32s, *found.literal.s64s, *found.literal.u32s]
        return numbers


def size(shape: Any) -> int:
    """Return the bytes of a shape, or of a tuple of shapes, in a device's main memory."""
    if shape.tuple_shapes:
        return sum(size(each) for each in shape.tuple_shapes)
    bits = element_type(shape.element_type)[1]
    return math.prod(shape.dimensions) * bits // 8 if bits and shape.layout.memory_space == DEVICE_COLOR else 0
