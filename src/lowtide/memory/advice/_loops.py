"""Find arrays that a loop copies as a whole in each iteration to write a part of them.

A loop writes slices into its carry in place, unless an operation may read the old values after the write. Then XLA
first copies the whole array, in every iteration. The source code does not show this copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...hlo import Edge, Graph, Value
from ...report import Buffer, MemoryReport
from .._owners import Owners
from ._finding import Finding

_PARTIAL_WRITES = ("dynamic-update-slice", "scatter")


def copied_in_loops(owners: Owners, report: MemoryReport) -> Iterator[Finding]:
    """Yield a finding for every carried array of a loop that is copied as a whole and then partly written."""
    graph = owners.dataflow.graph
    buffers_by_name = {buffer.operation: buffer for buffer in report.buffers}
    for instruction in graph.instructions.values():
        if instruction.opcode != "while":
            continue
        root = graph.computations[instruction.proto.called_computation_ids[0]].root_id
        for value in graph.results(root):
            copies = [buffer for copy in _copies(graph, value) if (buffer := buffers_by_name.get(graph.name(copy)))]
            if copies:
                leaf = owners.dataflow.copy_of((instruction.proto.operand_ids[0], value[1]))
                yield _finding(copies, copies[0].label if leaf is None else owners.leaves[leaf].path)


def _copies(graph: Graph, value: Value) -> list[Value]:
    """Find the copies of a carried array within an iteration, if the iteration also writes a part of it.

    The search goes back from the returned value to the parameter of the loop's body, over aliases, copies and partial
    writes only. Any other source means that the array is computed anew.
    """
    copies: list[Value] = []
    is_partial = False
    body = graph.instructions[value[0]].computation
    visited, frontier = {value}, [value]
    while frontier:  # several paths may lead back to the parameter, one for each branch of a conditional
        value = frontier.pop()
        instruction = graph.instructions[value[0]]
        if instruction.opcode == "parameter" and instruction.computation == body:
            continue
        if instruction.opcode in (*_PARTIAL_WRITES, "copy"):
            is_partial = is_partial or instruction.opcode != "copy"
            copies += [value] if instruction.opcode == "copy" else []
            sources: list[Value] = [(instruction.proto.operand_ids[0], ())]
        else:
            sources = [source for source, edge in graph.sources(value) if edge == Edge.ALIAS]
        if instruction.opcode == "while":  # for an inner loop continue at its initial value; it is checked separately
            sources = sources[:1]
        if not sources:
            return []
        frontier += [source for source in sources if source not in visited]
        visited.update(sources)
    return _largest_branch(graph, copies) if is_partial else []


def _largest_branch(graph: Graph, copies: list[Value]) -> list[Value]:
    """Keep only the copies of the branch with the most copies, since only one branch of a conditional runs."""
    groups: dict[tuple[bool, int | None], dict[int, list[Value]]] = {}
    for copy in copies:
        computation, caller = graph.instructions[copy[0]].computation, graph.caller(copy[0])
        is_branch = caller is not None and graph.instructions[caller].opcode == "conditional"
        key = (is_branch, caller if is_branch else computation)
        groups.setdefault(key, {}).setdefault(computation, []).append(copy)
    return [copy for branches in groups.values() for copy in max(branches.values(), key=len)]


def _finding(copies: list[Buffer], path: str) -> Finding:
    first = copies[0]
    return Finding(
        rule="copied-in-loop",
        path=path,
        num_bytes=sum(copy.num_bytes for copy in copies),
        detail=f"{first.dtype}{list(first.shape)}, {first.source or 'no line known'}",
        remedy="let whatever reads the old values come before the write, by data: compute what is written from what "
        "was read, or write one array after the other; leave out of the carry what is only read",
    )
