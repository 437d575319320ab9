"""Simulate the host copies of a program that XLA has scheduled for a GPU.

XLA prints a compiled program in the order in which it is launched. Copies begin at a ``-start`` and have to be complete
at the ``-done`` of the same name. Here kernels run one after the other. A kernel takes the longer of its operations at
the target's rate and its bytes at the target's memory bandwidth. Copies of one direction run one after the other at the
rate of the host link. A copy is hidden if it is complete before the program reaches its ``-done``; otherwise the
program waits. Real kernels take longer than this, so real copies have more time, but XLA's runtime may start a copy
later than its schedule says: only a profile on a GPU shows what overlaps.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
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
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.text)
                for _ in range(int(trips[1]) if trips else 1):
                    self._run(body)
            elif operation.opcode in ("conditional", "call"):
                for called in operation.called[:1]:
                    self._run(called)
            elif operation.opcode.endswith("-start"):
                self._start(operation, operations)
            elif operation.opcode.endswith("-done"):
                self._wait(operation.operands[0])
            elif operation.opcode not in _FREE:
                seconds = self._kernel(operation, operations)
                self.seconds += seconds
                self.kernel_seconds += seconds

    def _start(self, operation: Operation, operations: Mapping[str, Operation]) -> None:
        copy = _host_copy(operation, operations)
        if copy is None:  # an asynchronous kernel
            seconds = self._kernel(operation, operations)
            self.seconds += seconds
            self.kernel_seconds += seconds
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
        results = operation.results
        if operation.opcode.endswith("-start"):  # (operands), results, context
            inputs = sum(len(operations[name].results) for name in operation.operands if name in operations)
            results = results[inputs:]
        inputs = [shape for name in operation.operands if name in operations for shape in operations[name].results]
        traffic = sum(shape.num_bytes for shape in (*results, *inputs) if not shape.is_on_host)
        called = [self._computations[name] for name in operation.called if name in self._computations]
        opcodes = {inner.opcode for body in called for inner in body.values()}
        if {"dynamic-slice", "dynamic-update-slice"} & opcodes or "dynamic-" in operation.opcode:
            # Only the slice is read or written, and its size is not larger than that of the second largest array.
            sizes = sorted(shape.num_bytes for shape in (*results, *inputs))
            traffic = 2.0 * sum(sizes[:-2] if "dynamic-update-slice" in opcodes else sizes[:-1])
        flops = sum(_dot_flops(inner, body) for body in called for inner in body.values())
        if "gemm" in operation.text.split("custom_call_target", 1)[-1][:40] and operation.opcode == "custom-call":
            left, right = (math.prod(shape.dims) for shape in inputs[:2])
            out = math.prod(results[0].dims)
            flops += 2 * out * math.sqrt(left * right / out)
        return max(flops / self._flops, traffic / self._bandwidth)


def _host_copy(operation: Operation, operations: Mapping[str, Operation]) -> tuple[str, int] | None:
    """Return direction and bytes of a copy between host and device; None for any other operation."""
    inputs = [shape for name in operation.operands if name in operations for shape in operations[name].results]
    arrays = [shape for shape in inputs if shape.dims]
    outputs = [shape for shape in operation.results[len(inputs) :] if shape.dims]
    if operation.opcode == "copy-start":
        outputs, arrays = [operation.results[0]], [operation.results[1]]
    is_to_host = any(shape.is_on_host for shape in outputs)
    is_from_host = any(shape.is_on_host for shape in arrays) and not is_to_host
    if is_to_host:
        return "to host", sum(shape.num_bytes for shape in arrays if not shape.is_on_host)
    return ("from host", sum(shape.num_bytes for shape in outputs)) if is_from_host else None


def _dot_flops(operation: Operation, operations: Mapping[str, Operation]) -> float:
    if operation.opcode != "dot" or operation.operands[0] not in operations:
        return 0.0
    left = operations[operation.operands[0]].results[0].dims
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.text)
    contracted = math.prod(left[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
    return 2.0 * math.prod(operation.results[0].dims) * contracted


def summary(text: str, target: Any) -> dict[str, Any]:
    """Return the simulated seconds of a program, and for each direction the bytes, the hidden share and the waits."""
    run = Simulation(text, target.flops, target.hbm_bandwidth, target.host_link_bandwidth)
    rows: dict[str, Any] = {"seconds": run.seconds, "kernel_seconds": run.kernel_seconds}
    for name, state in run.directions.items():
        rows[name] = {
            "bytes": state.copied_bytes,
            "copy_seconds": state.copy_seconds,
            "hidden_share": state.hidden_bytes / state.copied_bytes if state.copied_bytes else None,
            "waiting_seconds": state.waiting_seconds,
        }
    return rows
