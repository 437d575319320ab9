"""Bytes that a compiled program moves to and from a device's memory, loops counted as often as they run.

XLA's own count takes what is in a loop once. Here every operation of the scheduled program reads its operands and
writes its result, as XLA counts them too: of an array that a fusion slices what it slices, of one that it updates in
place the update. What lies in a TPU's vector memory (``S(1)``) is not counted. Of a conditional the dearer branch
counts. A kernel (custom call) counts with its operands and results once; what it reads again is for whoever knows it.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(r"\b(body|condition|to_apply|calls)=%?([\w.\-]+)")
_BITS = {"pred": 8, "bf16": 16}
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"),
    *("copy-done", "async-done", "async-update", "slice-done", "dynamic-slice-done", "dynamic-update-slice-done"),
    *("optimization-barrier", "opt-barrier"),
}


class Operation(NamedTuple):
    """A line of the text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool


class Program:
    """The text of a compiled program, as ``compiled.as_text()`` gives it."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = ""
        held: dict[str, Operation] = {}
        for line in text.splitlines():
            if line.endswith("{") and "->" in line:
                name = line.removeprefix("ENTRY ").split(" ")[0].split("(")[0].lstrip("%")
                held = self.computations.setdefault(name, {})
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif (found := _LINE.match(line)) is not None:
                operation = _parsed(found[1], found[2], "ROOT " in line.split("=")[0])
                held[operation.name] = operation

    def bytes_accessed(self) -> int:
        """Return what the whole program moves."""
        return self._of(self.entry)

    @functools.cache  # noqa: B019
    def _of(self, computation: str) -> int:
        return sum(self._moved(computation, operation) for operation in self.computations[computation].values())

    def _moved(self, computation: str, operation: Operation) -> int:
        called = dict(_CALLED.findall(operation.rest))
        if operation.opcode in _FREE or operation.opcode.endswith("-done"):
            return 0
        if operation.opcode == "while":
            return self._trips(operation, called["condition"]) * self._of(called["body"])
        if operation.opcode == "conditional":
            names = re.findall(r"%?([\w.\-]+)", re.search(r"branch_computations=\{([^}]*)\}", operation.rest)[1])  # pyright: ignore[reportOptionalSubscript]
            return max(self._of(name) for name in names)
        if operation.opcode in ("call", "async-start"):
            return self._of(called.get("to_apply") or called["calls"])
        if operation.opcode == "fusion":
            return self._fused(computation, operation, called["calls"])
        own = self.computations[computation]
        result = size(operation.shape)
        if operation.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * result
        if operation.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * size(own[operation.operands[-1 if operation.opcode == "scatter" else 1]].shape)
        if operation.opcode.endswith("-start"):  # whose result repeats its operand
            return 2 * size(own[operation.operands[0]].shape)
        if operation.opcode == "custom-call" and (told := _told(operation.rest)) is not None:
            return told
        return result + sum(size(own[name].shape) for name in operation.operands if name in own)

    def _fused(self, computation: str, operation: Operation, calls: str) -> int:
        inner = self.computations[calls]
        users: dict[str, list[Operation]] = {name: [] for name in inner}
        for each in inner.values():
            for name in each.operands:
                users[name].append(each)
        total = 0
        for each in inner.values():
            if each.opcode == "parameter":
                total += self._read(each, users)
        roots = [each for each in inner.values() if each.is_root]
        if roots[0].opcode == "tuple":
            roots = [inner[name] for name in roots[0].operands]
        for root in roots:
            while root.opcode in ("bitcast", "copy") and inner[root.operands[0]].opcode == "dynamic-update-slice":
                root = inner[root.operands[0]]
            updates = root.opcode == "dynamic-update-slice"
            total += size(inner[root.operands[1]].shape) if updates else size(root.shape)
        return total

    def _read(self, parameter: Operation, users: dict[str, list[Operation]]) -> int:
        """Bytes of an operand that a fusion reads."""
        parts, reached = 0, list(users[parameter.name])
        of = {id(each): parameter.name for each in reached}
        while reached:
            user = reached.pop()
            if user.opcode == "bitcast":
                for each in users[user.name]:
                    of[id(each)] = user.name
                    reached.append(each)
            elif user.opcode in ("dynamic-slice", "slice", "gather"):
                parts += size(user.shape)
            elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == of[id(user)]):
                return size(parameter.shape)
        return min(parts, size(parameter.shape))

    def _trips(self, operation: Operation, condition: str) -> int:
        if (told := re.search(r'known_trip_count\\?":?=?\{\\?"n\\?":\\?"?(\d+)', operation.rest)) is not None:
            return int(told[1])
        numbers = [
            int(found[1])
            for each in self.computations[condition].values()
            if each.opcode == "constant" and (found := re.match(r"\((\d+)\)", each.rest)) is not None
        ]
        if not numbers:
            raise ValueError(f"how often does the loop {operation.name} run?")
        return max(numbers)


def _parsed(name: str, text: str, is_root: bool) -> Operation:
    end = _end(text, " ")  # the shape may be a tuple
    shape, (opcode, _, rest) = text[:end], text[end + 1 :].partition("(")
    end = _end(rest, ")")
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    return Operation(name, shape, opcode, operands, f"({rest}", is_root)


def _end(text: str, letter: str) -> int:
    """Where a letter is first that stands in no brackets."""
    depth = 0
    for at, each in enumerate(text):
        if each == letter and not depth:
            return at
        depth += (each in "([{") - (each in ")]}")
    return len(text)


def size(shape: str) -> int:
    """Bytes of a shape, or of a tuple of shapes, but for what lies in vector memory."""
    total = 0
    for kind, dimensions, layout in _ARRAY.findall(shape):
        if "S(1)" in layout or kind in ("token", "opaque"):
            continue
        bits = _BITS.get(kind) or int(re.sub(r"^\D+(\d+).*$", r"\1", kind))
        total += math.prod(int(each) for each in dimensions.split(",") if each) * bits // 8
    return total


def _told(rest: str) -> int | None:
    """What a kernel says about itself."""
    found = re.search(r'bytes_accessed\\?":\\?"?(\d+)', rest)
    return None if found is None else int(found[1])


def bytes_accessed(compiled: Any) -> int:
    """Return what a compiled function moves."""
    return Program(compiled.as_text()).bytes_accessed()
