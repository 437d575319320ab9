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
_PARTIAL_WRITES = ("dynamic-update-slice", "scatter")


def with_host_copies(
    owners: Owners, device: SpaceBytes, buffers: tuple[Buffer, ...], leaves: Collection[int]
) -> tuple[SpaceBytes, tuple[Buffer, ...], int]:
    """Add the copies of host arguments to a program's figures.

    `device` and `buffers` are without arguments and outputs on the host; `leaves` are indices of the argument leaves on
    the host. Returns the device bytes, the buffers, and the position of the peak, all including the copies.
    """
    device_buffers = [buffer for buffer in buffers if buffer.space == "device"]
    bytes_before = live_bytes(device_buffers, len(owners.moments))
    copies = list(_Copies(owners).buffers(leaves))
    bytes_after = live_bytes([*device_buffers, *copies], len(owners.moments))
    peak = max(range(len(bytes_after)), key=bytes_after.__getitem__)
    added_bytes = bytes_after[peak] - bytes_before[owners.peak_moment]
    # Fragmentation exists only at the peak in the timeline, so it moves to the new peak.
    moved_buffers = [
        dataclasses.replace(b, start=peak, end=peak) if b.role == "fragmentation" and b.space == "device" else b
        for b in buffers
    ]
    return dataclasses.replace(device, temp_bytes=device.temp_bytes + added_bytes), (*moved_buffers, *copies), peak


class _Copies:
    """The copies of arguments, found by following their memory through the program."""

    def __init__(self, owners: Owners) -> None:
        self.owners, self.graph = owners, owners.dataflow.graph

    def buffers(self, leaves: Collection[int]) -> Iterator[Buffer]:
        for index in leaves:
            if index not in self.owners.parameter_of:
                continue
            parameter = self.owners.parameter_of[index]
            full_reads, slice_reads = self._read_ranges(index, parameter)
            leaf = self.owners.leaves[index]
            for (start, end), num_bytes in {**slice_reads, **dict.fromkeys(full_reads, leaf.num_bytes)}.items():
                yield Buffer(
                    space="device",
                    role="copies",
                    path=leaf.path,
                    phase="argument",
                    operation="copy from host memory",
                    shape=tuple(self.graph.shape(parameter).dimensions) if (start, end) in full_reads else (),
                    dtype=self.graph.item_type(parameter)[0] if (start, end) in full_reads else "",
                    num_bytes=num_bytes,
                    start=start,
                    end=end,
                )

    def _read_ranges(self, leaf: int, parameter: Value) -> tuple[set[tuple[int, int]], dict[tuple[int, int], int]]:
        """Return the ranges in which the leaf is read as a whole, and those of its slices with the largest's bytes."""
        full_reads = dict[int, tuple[int, int]]()
        slice_reads = dict[tuple[int, int], int]()
        aliases, frontier = {parameter}, [parameter]
        while frontier:
            value = frontier.pop()
            for reader, edge in self.owners.dataflow.users.get(value, ()):
                # Aliases, bitcasts and in-place writes are still the argument's memory, so follow them. Any other user
                # reads the memory, and needs a copy on the device.
                instruction = self.graph.instructions[reader[0]]
                is_write = instruction.opcode in _PARTIAL_WRITES and instruction.proto.operand_ids[0] == value[0]
                if edge == Edge.ALIAS or is_write or instruction.opcode == "bitcast":
                    if reader not in aliases:
                        aliases.add(reader)
                        frontier.append(reader)
                    if not is_write:
                        continue
                scheduled_id = _scheduled_instruction(self.graph, reader[0])
                if scheduled_id is None:
                    continue
                computation = self.graph.instructions[scheduled_id].computation
                read_range = self._live_range(scheduled_id)
                if is_write or instruction.opcode in _SLICES:
                    part = (_update_operand(instruction.proto), ()) if is_write else reader
                    num_bytes = self.graph.num_elements(part) * self.graph.item_type(part)[1] // 8
                    slice_reads[read_range] = max(slice_reads.get(read_range, 0), num_bytes)
                else:
                    first, last = full_reads.get(computation, read_range)
                    full_reads[computation] = min(first, read_range[0]), max(last, read_range[1])
        if (entry := full_reads.get(self.graph.entry.id)) is not None:
            full_reads[self.graph.entry.id] = 0, max(entry[1], self._overwrite_position(leaf, aliases))
        full_ranges = set(full_reads.values())
        slice_ranges = {
            span: num_bytes
            for span, num_bytes in slice_reads.items()
            if not any(start <= span[0] and span[1] <= end for start, end in full_ranges)
        }
        return full_ranges, slice_ranges

    def _overwrite_position(self, leaf: int, aliases: set[Value]) -> int:
        """Return the position at which the result that replaces the leaf is made; 0 without one."""
        results = (
            value
            for value, argument_leaf in self.owners.replaced.items()
            if argument_leaf == leaf and value in self.owners.in_place
        )
        return max((_definition_position(self.graph, value) for value in results if value not in aliases), default=0)

    def _live_range(self, instr_id: int) -> tuple[int, int]:
        """Return the range of an instruction: all of the loop body around it, or its own position outside loops."""
        positions = self.graph.positions
        computation = self.graph.computations[self.graph.instructions[instr_id].computation]
        if computation.id == self.graph.entry.id:
            return positions[instr_id]
        body_positions = [positions[i.id] for i in computation.instructions if i.id in positions]
        return min(first for first, _ in body_positions), max(last for _, last in body_positions)


def _update_operand(proto: Any) -> int:
    """Return the operand that is written into the first one; a scatter's operands are n targets, indices, n updates."""
    return proto.operand_ids[(len(proto.operand_ids) + 1) // 2 if proto.opcode == "scatter" else 1]


def _definition_position(graph: Graph, value: Value) -> int:
    """Return the position at which a value is made, following its aliases."""
    visited = {value}
    while True:
        instr_id = _scheduled_instruction(graph, value[0])
        aliases = [source for source, edge in graph.sources(value) if edge == Edge.ALIAS and source not in visited]
        if instr_id is not None and graph.instructions[instr_id].opcode == "fusion":
            return graph.positions[instr_id][0]
        if not aliases:
            return graph.positions[instr_id][0] if instr_id is not None else 0
        value = aliases[0]
        visited.add(value)


def _scheduled_instruction(graph: Graph, instr_id: int) -> int | None:
    """Return the scheduled instruction that runs an instruction, such as the fusion around it; None without one."""
    while instr_id not in graph.positions:
        caller = graph.caller(instr_id)
        if caller is None:
            return None
        instr_id = caller
    return instr_id
