"""Device copies of host arguments on a GPU, for programs compiled without host memory.

A compile-only GPU has no host memory, so its program reads such arguments in place. A real GPU copies them to the
device:

- an array that is read as a whole, from the start of the program to its last read, or until the result that overwrites
  it is made (XLA starts its copies there, as on a TPU);
- an array that is read as a whole in a loop, for the length of the loop's body;
- a slice, for the operation or the loop body that reads it.

These times are an upper bound: a real schedule may start a copy later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from ..hlo import Edge, Graph, Value
from ..report import Buffer, SpaceBytes, live_bytes
from ._owners import Owners

_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")


def with_host_copies(
    owners: Owners, device: SpaceBytes, buffers: tuple[Buffer, ...], leaves: Collection[int]
) -> tuple[SpaceBytes, tuple[Buffer, ...], int]:
    """Add the copies of host arguments to a program's figures.

    Args:
        owners: the owners of the program.
        device: its device bytes, without arguments and outputs on the host.
        buffers: its buffers.
        leaves: indices of the argument leaves on the host.

    Returns:
        The device bytes, the buffers, and the position of the peak, all including the copies.
    """
    mine = [buffer for buffer in buffers if buffer.space == "device"]
    before = live_bytes(mine, len(owners.moments))
    copies = list(_Copies(owners).of(leaves))
    after = live_bytes([*mine, *copies], len(owners.moments))
    peak = max(range(len(after)), key=after.__getitem__)
    added = after[peak] - before[owners.peak_moment]
    # Fragmentation exists only at the peak in the timeline, so it moves to the new peak.
    moved = [
        dataclasses.replace(b, start=peak, end=peak) if b.role == "fragmentation" and b.space == "device" else b
        for b in buffers
    ]
    return dataclasses.replace(device, temp_bytes=device.temp_bytes + added), (*moved, *copies), peak


class _Copies:
    """The copies of arguments, found by following their memory through the program."""

    def __init__(self, owners: Owners) -> None:
        self.owners, self.graph = owners, owners.dataflow.graph

    def of(self, leaves: Collection[int]) -> Iterator[Buffer]:
        for at in leaves:
            if at not in self.owners.parameter_of:
                continue
            parameter = self.owners.parameter_of[at]
            wholes, slices = self._ranges(at, parameter)
            leaf = self.owners.leaves[at]
            for (start, end), num_bytes in {**slices, **dict.fromkeys(wholes, leaf.num_bytes)}.items():
                yield Buffer(
                    space="device",
                    role="copies",
                    path=leaf.path,
                    phase="argument",
                    operation="copy from host memory",
                    shape=tuple(self.graph.shape(parameter).dimensions) if (start, end) in wholes else (),
                    dtype=self.graph.item_type(parameter)[0] if (start, end) in wholes else "",
                    num_bytes=num_bytes,
                    start=start,
                    end=end,
                )

    def _ranges(self, leaf: int, parameter: Value) -> tuple[set[tuple[int, int]], dict[tuple[int, int], int]]:
        """Return the ranges in which the leaf is read as a whole, and those of its slices with the largest's bytes."""
        wholes = dict[int, tuple[int, int]]()
        slices = dict[tuple[int, int], int]()
        memory, border = {parameter}, [parameter]
        while border:
            value = border.pop()
            for reader, edge in self.owners.dataflow.users.get(value, ()):
                # Aliases, bitcasts and in-place writes are still the argument's memory, so follow them. Any other user
                # reads the memory, and needs a copy on the device.
                instruction = self.graph.instructions[reader[0]]
                written = instruction.opcode in _IN_PLACE and instruction.proto.operand_ids[0] == value[0]
                if edge == Edge.ALIAS or written or instruction.opcode == "bitcast":
                    if reader not in memory:
                        memory.add(reader)
                        border.append(reader)
                    if not written:
                        continue
                at = _scheduled(self.graph, reader[0])
                if at is None:
                    continue
                computation = self.graph.instructions[at].computation
                here = self._range(at)
                if written or instruction.opcode in _SLICES:
                    part = (_written(instruction.proto), ()) if written else reader
                    num_bytes = self.graph.num_elements(part) * self.graph.item_type(part)[1] // 8
                    slices[here] = max(slices.get(here, 0), num_bytes)
                else:
                    first, last = wholes.get(computation, here)
                    wholes[computation] = min(first, here[0]), max(last, here[1])
        if (entry := wholes.get(self.graph.entry.id)) is not None:
            wholes[self.graph.entry.id] = 0, max(entry[1], self._overwritten(leaf, memory))
        found = set(wholes.values())
        inside = {r: b for r, b in slices.items() if not any(a <= r[0] and r[1] <= z for a, z in found)}
        return found, inside

    def _overwritten(self, leaf: int, memory: set[Value]) -> int:
        """Return the position at which the result that replaces the leaf is made; 0 without one."""
        made = (value for value, at in self.owners.replaced.items() if at == leaf and value in self.owners.in_place)
        return max((_made_at(self.graph, value) for value in made if value not in memory), default=0)

    def _range(self, at: int) -> tuple[int, int]:
        """Return the range of an instruction: all of the loop body around it, or its own position outside loops."""
        positions = self.graph.positions
        computation = self.graph.computations[self.graph.instructions[at].computation]
        if computation.id == self.graph.entry.id:
            return positions[at]
        inside = [positions[i.id] for i in computation.instructions if i.id in positions]
        return min(first for first, _ in inside), max(last for _, last in inside)


def _written(proto: Any) -> int:
    """Return the operand that is written into the first one; a scatter's operands are n targets, indices, n updates."""
    return proto.operand_ids[(len(proto.operand_ids) + 1) // 2 if proto.opcode == "scatter" else 1]


def _made_at(graph: Graph, value: Value) -> int:
    """Return the position at which a value is made, following its aliases."""
    seen = {value}
    while True:
        at = _scheduled(graph, value[0])
        aliases = [s for s, edge in graph.sources(value) if edge == Edge.ALIAS and s not in seen]
        if at is not None and graph.instructions[at].opcode == "fusion":
            return graph.positions[at][0]
        if not aliases:
            return graph.positions[at][0] if at is not None else 0
        value = aliases[0]
        seen.add(value)


def _scheduled(graph: Graph, at: int) -> int | None:
    """Return the scheduled instruction that runs an instruction, such as the fusion around it; None without one."""
    while at not in graph.positions:
        caller = graph.caller(at)
        if caller is None:
            return None
        at = caller
    return at
