"""Simulate the host copies of a program that XLA has scheduled for a GPU.

XLA prints a compiled program in the order in which it is launched. Copies begin at a ``-start`` and have to be complete
at the ``-done`` of the same name. Here kernels run one after the other. A kernel takes the longer of its operations at
the target's peak rate and its bytes at the target's memory bandwidth. Copies of one direction run one after the other
at the rate of the host link. A copy is hidden if it is complete before the program reaches its ``-done``; otherwise the
program waits. With an infinite bandwidth, kernels take only the time of their matrix products at the peak rate, which
no GPU undercuts. XLA's runtime may start a copy later than its schedule says: only a profile shows what overlaps.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*?(S\(5\))?\})?")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done", "after-all", "iota"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    is_on_host: bool

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype.split("e")[0]) or 0)
        return math.prod(self.dims) * bits // 8


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a computation."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that the operation calls."""
        return re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.text)

    @property
    def branches(self) -> list[str]:
        """Names of the computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        names = listed[1].split(",") if listed else re.findall(r"(?:true|false)_computation=(%?[\w.\-]+)", self.text)
        return [name.strip().lstrip("%") for name in names]


@dataclasses.dataclass
class Direction:
    """Copies of one direction."""

    copied_bytes: float = 0.0
    hidden_bytes: float = 0.0
    """Bytes of copies that are complete when the program needs them."""
    copy_seconds: float = 0.0
    waiting_seconds: float = 0.0
    free_at: float = 0.0
    """When the link has finished all copies so far."""


def parse(text: str) -> tuple[dict[str, dict[str, Operation]], str]:
    """Return the operations of each computation in order, and the name of the entry computation."""
    computations: dict[str, dict[str, Operation]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")) and (match := _COMPUTATION.match(line)):
            current = match[2]
            computations[current] = {}
            entry = current if match[1] else entry
        elif current and (match := _OPERATION.match(line.strip())):
            name, results, opcode, rest = match.groups()
            shapes = tuple(
                Shape(dtype, tuple(int(size) for size in dims.split(",") if size), bool(host))
                for dtype, dims, host in _SHAPE.findall(results)
            )
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("),", 1)[0]))
            computations[current][name] = Operation(name, opcode, shapes, operands, rest)
    return computations, entry


class Simulation:
    """Runs the entry computation of a program once; `directions` has the copies to the host and from it."""

    def __init__(self, text: str, flops: float, bandwidth: float, link: float) -> None:
        self._computations, entry = parse(text)
        self._flops, self._bandwidth, self._link = flops, bandwidth, link
        self.seconds = self.kernel_seconds = 0.0
        self.directions = {"to host": Direction(), "from host": Direction()}
        self._finish: dict[str, tuple[str, float, float]] = {}
        self._run(entry)

    def _run(self, name: str) -> None:
        operations = self._computations[name]
        for operation in operations.values():
            if operation.opcode == "while":
                body = next(called for called in operation.called if called in self._computations)
                for _ in range(_trips(operation)):
                    self._run(body)
            elif operation.opcode == "call":
                self._run(operation.called[0])
            elif operation.opcode == "conditional":  # the longest branch
                self._advance(max(map(self._duration, operation.branches)))
            elif operation.opcode.endswith("-start"):
                self._start(operation, operations)
            elif operation.opcode.endswith("-done"):
                self._wait(operation.operands[0])
            elif operation.opcode not in _FREE:
                if _host_copy(operation, operations) is not None:
                    raise ValueError(f"{operation.name} copies between host and device without a start and an end")
                self._advance(self._kernel(operation, operations))

    def _duration(self, name: str) -> float:
        """Return the seconds of the kernels of a computation without host copies."""
        operations, seconds = self._computations[name], 0.0
        for operation in operations.values():
            if operation.opcode == "while":
                body = next(called for called in operation.called if called in self._computations)
                seconds += _trips(operation) * self._duration(body)
            elif operation.opcode == "conditional":
                seconds += max(map(self._duration, operation.branches))
            elif operation.opcode not in _FREE and not operation.opcode.endswith("-done"):
                seconds += self._kernel(operation, operations)
        return seconds

    def _advance(self, seconds: float) -> None:
        self.seconds += seconds
        self.kernel_seconds += seconds

    def _start(self, operation: Operation, operations: Mapping[str, Operation]) -> None:
        copy = _host_copy(operation, operations)
        if copy is None:  # an asynchronous kernel
            self._advance(self._kernel(operation, operations))
            return
        direction, num_bytes = copy
        state, seconds = self.directions[direction], num_bytes / self._link
        state.free_at = max(state.free_at, self.seconds) + seconds
        state.copied_bytes += num_bytes
        state.copy_seconds += seconds
        self._finish[operation.name] = direction, num_bytes, state.free_at

    def _wait(self, name: str) -> None:
        if name not in self._finish:
            return
        direction, num_bytes, finish = self._finish.pop(name)
        state, waiting = self.directions[direction], max(finish - self.seconds, 0.0)
        if waiting <= 1e-9:
            state.hidden_bytes += num_bytes
        state.waiting_seconds += waiting
        self.seconds += waiting

    def _kernel(self, operation: Operation, operations: Mapping[str, Operation]) -> float:
        bodies = [self._computations[name] for name in operation.called if name in self._computations]
        inputs = [operations[name] for name in operation.operands if name in operations]
        results = operation.results
        if operation.opcode.endswith("-start"):  # (operands), results, context
            results = results[sum(len(item.results) for item in inputs) :]
        flops = sum(_dot_flops(inner, body) for body in bodies for inner in body.values())
        if "gemm" in operation.text.split("custom_call_target", 1)[-1][:40] and operation.opcode == "custom-call":
            left, right = (math.prod(item.results[0].dims) for item in inputs[:2])
            out = math.prod(results[0].dims)
            flops += 2 * out * math.sqrt(left * right / out)
        if bodies and "calls=" in operation.text:
            traffic = _fusion_traffic(bodies[0], results)
        else:
            traffic = sum(shape.num_bytes for item in inputs for shape in item.results) + _size(results)
        return max(flops / self._flops, traffic / self._bandwidth)


def _size(shapes: Sequence[Shape]) -> float:
    return float(sum(shape.num_bytes for shape in shapes if not shape.is_on_host))


def _trips(operation: Operation) -> int:
    count = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.text)
    return int(count[1]) if count else 1


def _fusion_traffic(body: Mapping[str, Operation], results: Sequence[Shape]) -> float:
    """Return the bytes that a fusion reads and writes; of an array that is only sliced or updated, only the slice."""
    traffic, updated = 0.0, 0.0
    for parameter in body.values():
        if parameter.opcode != "parameter":
            continue
        users = [item for item in body.values() if parameter.name in item.operands]
        slices = [item for item in users if item.opcode == "dynamic-slice" and item.operands[0] == parameter.name]
        updates = [item for item in users if item.opcode == "dynamic-update-slice"]
        updates = [item for item in updates if item.operands[0] == parameter.name]
        if users and len(slices) + len(updates) == len(users):
            traffic += sum(_size(item.results) for item in slices)
            updated += sum(_size(item.results) for item in updates)
            traffic += sum(_size(body[item.operands[1]].results) for item in updates if item.operands[1] in body)
        else:
            traffic += _size(parameter.results)
    return traffic + max(_size(results) - updated, 0.0)


def _host_copy(operation: Operation, operations: Mapping[str, Operation]) -> tuple[str, int] | None:
    """Return direction and bytes of a copy between host and device; None for any other operation."""
    inputs = [shape for name in operation.operands if name in operations for shape in operations[name].results]
    arrays, outputs = [shape for shape in inputs if shape.dims], [shape for shape in operation.results if shape.dims]
    if operation.opcode == "copy-start":
        outputs, arrays = [operation.results[0]], [operation.results[1]]
    elif operation.opcode.endswith("-start"):  # (operands), results, context
        outputs = [shape for shape in operation.results[len(inputs) :] if shape.dims]
    is_to_host = any(shape.is_on_host for shape in outputs)
    is_from_host = any(shape.is_on_host for shape in arrays) and not is_to_host
    if is_to_host and (arrays := [shape for shape in arrays if not shape.is_on_host]):
        return "to host", sum(shape.num_bytes for shape in arrays)
    return ("from host", sum(shape.num_bytes for shape in outputs)) if is_from_host else None


def _dot_flops(operation: Operation, operations: Mapping[str, Operation]) -> float:
    if operation.opcode != "dot" or operation.operands[0] not in operations:
        return 0.0
    left = operations[operation.operands[0]].results[0].dims
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.text)
    contracted = math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
    return 2.0 * math.prod(operation.results[0].dims) * contracted


def summary(text: str, target: Any) -> dict[str, Any]:
    """Return the simulated seconds of a program, and for each direction the bytes, the hidden share and the waits.

    ``hidden_by_products`` is the share that is hidden if kernels take only the time of their products at the peak rate.
    """
    link = target.host_link_bandwidth
    run = Simulation(text, target.flops, target.hbm_bandwidth, link)
    products = Simulation(text, target.flops, math.inf, link)
    rows: dict[str, Any] = {"seconds": run.seconds, "kernel_seconds": run.kernel_seconds}
    rows["product_seconds"] = products.kernel_seconds
    for name, state in run.directions.items():
        total = state.copied_bytes
        rows[name] = {
            "bytes": total,
            "copy_seconds": state.copy_seconds,
            "hidden_share": state.hidden_bytes / total if total else None,
            "hidden_by_products": products.directions[name].hidden_bytes / total if total else None,
            "waiting_seconds": state.waiting_seconds,
        }
    return rows
