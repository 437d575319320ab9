"""Assign the bytes of a dumped program to owners, as a list of buffers.

An owner is an argument, an output or an operation. Arguments and outputs hold their allocations for the whole program.
Values in a heap of temporaries get the role that `_roles` finds. Bytes without a known owner have the role
``unattributed``: values without a scope, tables of pointers, and bytes that XLA counts in addition to its allocations.
So the buffers at the peak always add up to XLA's total.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..hlo import (
    DEVICE_COLOR,
    HOST_COLOR,
    ArgumentLeaf,
    Edge,
    Graph,
    Segment,
    Value,
    parameter_arrays,
    reachable,
    segments,
)
from ..report import Buffer, Space, SpaceBytes, live_bytes
from ._dataflow import Dataflow, first_scope
from ._roles import computed_role


class Owners:
    """All buffers of a program from `read_hlo`, with lifetimes as positions in its schedule.

    Args:
        hlo: the program.
        leaves: its argument leaves.
        roles: the role of each leaf.
        outputs: the tree path of each leaf of the function's result, empty if the result is one array; None makes each
            leaf's number its path.
        totals: XLA's totals, to which the buffers at the peak add up; None after a failed compilation.
    """

    def __init__(
        self,
        hlo: Any,
        leaves: Sequence[ArgumentLeaf],
        roles: Sequence[str],
        outputs: Sequence[str] | None,
        totals: Mapping[Space, SpaceBytes] | None,
    ) -> None:
        self.leaves, self.roles = leaves, roles
        self.graph = Graph(hlo.module)
        self.last_position = max(len(self.graph.order) - 1, 0)
        self.entry = {i.parameter_number: i for i in self.graph.entry.instructions if i.opcode == "parameter"}
        places = [place for place, _ in parameter_arrays(hlo)]
        kept = [index for index, leaf in enumerate(leaves) if leaf.kept]
        offset = max(len(places) - len(kept), 0)  # tokens, and constants that JAX hoisted, come first
        self.places = {
            (number, index): ((self.entry[number].id, index), leaf)
            for (number, index), leaf in zip(places[offset:], kept, strict=False)
        }
        self.parameters: dict[Value, int] = dict(self.places.values())
        """Maps each array of the entry computation's parameters to the index of its argument leaf."""
        self.parameter_of = {leaf: value for value, leaf in self.parameters.items()}
        """Inverse of `parameters`; leaves that the program dropped are missing."""
        root = self.graph.instructions[self.graph.entry.root_id].proto
        values: list[Value] = [(root.id, (index,)) for index in range(len(root.shape.tuple_shapes))] or [(root.id, ())]
        numbers = [str(index) for index in range(len(root.shape.tuple_shapes))] or [""]
        self.outputs = numbers if outputs is None else outputs
        offset = max(len(values) - len(self.outputs), 0)  # tokens come first
        self.results = {value: leaf for leaf, value in enumerate(values[offset:])}
        """Maps each array of the program's result to the index of its output leaf."""
        entries = hlo.module.input_output_alias.entries
        aliases = {tuple(e.output_shape_index): (e.parameter_number, tuple(e.parameter_shape_index)) for e in entries}
        self.in_place = {v: self.places[place][1] for v in self.results if (place := aliases.get(v[1])) in self.places}
        """Maps results that are written into an argument's buffer to the argument leaf."""
        self.dataflow = Dataflow(self.graph, self.parameters)
        paths = {value: self.path_of(value) for value in self.results}
        self.replaced = _match_results(self.dataflow, leaves, self.parameters, paths, self.in_place)
        """Maps each result to the argument leaf that it replaces, or whose gradient it is."""
        self.dataflow.follow_gradients(self.replaced)
        self.output_paths = self._output_paths(paths)
        self.logical_buffers = {
            b.id: (b.defined_at.instruction_id, tuple(b.defined_at.shape_index)) for b in hlo.assignment.logical_buffers
        }
        self.moments = tuple(map(self._moment, self.graph.order)) or ("",)
        self.uncounted = list[Buffer]()
        """Constants that the compiler counts as code, or in no figure; they are not in `buffers`."""
        device_buffers, self.peak_moment = self._find_buffers("device", DEVICE_COLOR, hlo.assignment, totals)
        host_buffers, self.host_peak_moment = self._find_buffers("host", HOST_COLOR, hlo.assignment, totals)
        self.buffers = tuple(buffer for buffer in (*device_buffers, *host_buffers) if buffer.num_bytes)

    def path_of(self, result: Value) -> str:
        """Return the tree path of the output leaf of a result."""
        return self.outputs[self.results[result]]

    def _find_buffers(
        self, space: Space, color: int, assignment: Any, totals: Mapping[Space, SpaceBytes] | None
    ) -> tuple[list[Buffer], int]:
        """Return the buffers of a memory space, and the position at which most of its bytes are alive."""
        allocations = [a for a in assignment.allocations if a.color == color and not a.is_thread_local and a.size > 0]
        arguments = [self._argument(space, a) for a in allocations if a.is_entry_parameter]
        constants = [self._constant(space, a) for a in allocations if a.is_constant]
        computed = [a for a in allocations if not (a.is_entry_parameter or a.is_constant)]
        results = self._outputs(space, [a for a in computed if a.maybe_live_out])
        heaps = [(a, segments(self.graph, assignment, a)) for a in computed if not a.maybe_live_out]
        temporaries = [self._temporary(space, s) for _, heap_segments in heaps for s in heap_segments]
        live = live_bytes(temporaries, self.last_position + 1)
        peak = live.index(max(live))
        for allocation, heap_segments in heaps:
            # A heap is reserved as a whole. Its unused bytes at the peak are fragmentation.
            unused = max(allocation.size - sum(s.size for s in heap_segments if s.start <= peak <= s.end), 0)
            temporaries += [Buffer(space=space, role="fragmentation", phase="", num_bytes=unused, start=peak, end=peak)]
        heap_bytes = sum(a.size for a, _ in heaps)
        code = self._remaining_buffers(space, arguments, results, constants, heap_bytes, totals)
        if (excess := -code[-1].num_bytes if code else 0) > 0:
            temporaries, code = _trim(temporaries, excess, peak), code[:-1]
        return [*arguments, *results, *temporaries, *constants, *code], peak

    # --- arguments and outputs ---------------------------------------------------------------------------------------

    def _argument(self, space: Space, allocation: Any) -> Buffer:
        number, index = allocation.parameter_number, tuple(allocation.parameter_shape_index)
        if (number, index) in self.places:
            value, leaf = self.places[number, index]
            return self._whole_buffer(space, allocation, self.roles[leaf], self.leaves[leaf].path, "argument", value)
        # An allocation without a leaf is a table of pointers, or a constant that JAX passes as an argument.
        entry = self.entry.get(number)
        value = (entry.id, index) if entry is not None else None
        is_array = value is not None and not self.graph.shape(value).tuple_shapes
        role = "constants" if is_array else "unattributed"
        return self._whole_buffer(space, allocation, role, "", "argument", value if is_array else None)

    def _outputs(self, space: Space, allocations: Sequence[Any]) -> list[Buffer]:
        holders = {
            value: index for index, allocation in enumerate(allocations) for value in self._values_in(allocation)
        }
        aliases: dict[int, tuple[Value, int]] = {}
        sources = self.dataflow.sources
        for output, leaf in self.results.items():
            names = reachable([output], lambda node: [s for s, edge in sources(node) if edge == Edge.ALIAS])
            if (alias := next((value for value in names if value in holders), None)) is not None:
                aliases.setdefault(holders[alias], (alias, leaf))
        return [self._output(space, allocation, aliases.get(index)) for index, allocation in enumerate(allocations)]

    def _output(self, space: Space, allocation: Any, alias: tuple[Value, int] | None) -> Buffer:
        if alias is None:
            return self._whole_buffer(space, allocation, "outputs", "", "output", None, operation="table of outputs")
        value, leaf = alias
        return self._whole_buffer(space, allocation, "outputs", self.outputs[leaf], self.dataflow.phase(value), value)

    def _output_paths(self, result_paths: Mapping[Value, str]) -> dict[Value, str]:
        """Map results, and values that are only moved into a result (such as loop buffers), to their output paths."""
        output_paths = dict(result_paths)
        frontier = list(output_paths)
        while frontier:
            value = frontier.pop()
            size = self.graph.num_elements(value)
            for source, edge in self.dataflow.sources(value):
                if edge != Edge.COMPUTE and source not in output_paths and self.graph.num_elements(source) == size > 1:
                    output_paths[source] = output_paths[value]
                    frontier.append(source)
        return output_paths

    def _values_in(self, allocation: Any) -> list[Value]:
        """List the values in an allocation, without tuples."""
        ids = sorted({assigned.logical_buffer_id for assigned in allocation.assigned})
        values = [self.logical_buffers[buffer_id] for buffer_id in ids if buffer_id in self.logical_buffers]
        return [value for value in values if value[1] or not self.graph.shape(value).tuple_shapes]

    def _constant(self, space: Space, allocation: Any) -> Buffer:
        value = next(iter(self._values_in(allocation)), None)
        return self._whole_buffer(space, allocation, "constants", "", "forward", value)

    # --- temporaries -------------------------------------------------------------------------------------------------

    def _temporary(self, space: Space, segment: Segment) -> Buffer:
        value = self.dataflow.representative(segment.value)
        role, path = computed_role(self.dataflow, self.leaves, self.output_paths, value)
        return Buffer(
            space=space,
            role=role,
            path=path,
            phase=self.dataflow.phase(value),
            operation=self.graph.name(segment.value),
            **self._location(value),
            **self._array_fields(segment.value, segment.size),
            start=segment.start,
            end=segment.end,
        )

    def _whole_buffer(
        self, space: Space, allocation: Any, role: str, path: str, phase: Any, value: Value | None, operation: str = ""
    ) -> Buffer:
        """Build a buffer for a whole allocation, live for the whole program."""
        fields: dict[str, Any] = {"num_bytes": allocation.size, "start": 0, "end": self.last_position}
        if value is not None:
            fields |= self._array_fields(value, allocation.size)
        if value is not None and phase != "argument":
            fields |= self._location(value)
            operation = operation or self.graph.name(value)
        return Buffer(space=space, role=role, path=path, phase=phase, operation=operation, **fields)

    def _location(self, value: Value) -> dict[str, Any]:
        scope, source = self.dataflow.scope_and_source(value)
        return {"scope": _readable(scope), "source": _short_source(source)}

    def _array_fields(self, value: Value, num_bytes: int) -> dict[str, Any]:
        name, bits = self.graph.item_type(value)
        logical = (self.graph.num_elements(value) * bits + 7) // 8
        return {
            "shape": tuple(self.graph.shape(value).dimensions) if name else (),
            "dtype": name,
            "num_bytes": num_bytes,
            "padding_bytes": max(num_bytes - logical, 0) if name else 0,
        }

    # --- totals ------------------------------------------------------------------------------------------------------

    def _remaining_buffers(
        self,
        space: Space,
        arguments: Sequence[Buffer],
        results: Sequence[Buffer],
        constants: list[Buffer],
        heap_bytes: int,
        totals: Mapping[Space, SpaceBytes] | None,
    ) -> list[Buffer]:
        """Return one buffer for code, and one for bytes that XLA counts in addition to its allocations."""
        # Constants that XLA does not count move from `constants` to `uncounted`. The unattributed bytes are negative if
        # the allocations exceed XLA's total.
        if totals is None:
            return []
        total = totals[space]
        remainder = total.total_bytes - total.code_bytes - _total(arguments) - _total(results) - heap_bytes
        if remainder < _total(constants):
            # The compiler counts these constants as code, or in none of its figures.
            self.uncounted += constants
            constants.clear()
        remainder -= _total(constants)
        kwargs: dict[str, Any] = {"space": space, "phase": "", "start": 0, "end": self.last_position}
        return [
            Buffer(role="code", num_bytes=total.code_bytes, **kwargs),
            Buffer(role="unattributed", operation="reserved by the compiler", num_bytes=remainder, **kwargs),
        ]

    def _moment(self, instr_id: int) -> str:
        scope, _ = self.dataflow.scope_and_source((instr_id, ()))
        return _readable(scope) or self.graph.instructions[instr_id].proto.name


def _trim(temporaries: list[Buffer], excess: int, peak: int) -> list[Buffer]:
    """Remove `excess` bytes from temporaries at the peak: a TPU's total excludes a few scalars in other memories."""
    trimmed: list[Buffer] = []
    for buffer in sorted(temporaries, key=lambda b: (b.role != "fragmentation", b.num_bytes)):
        cut = min(excess, buffer.num_bytes) if buffer.alive_at(peak) else 0
        excess -= cut
        trimmed.append(dataclasses.replace(buffer, num_bytes=buffer.num_bytes - cut))
    return trimmed


def _total(buffers: Sequence[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)


# --- results ---------------------------------------------------------------------------------------------------------


# Reused buffers alone do not tell which leaf a result replaces: JAX gives a donated buffer to the first output of its
# shape, so new parameters may be written into the buffer of a momentum. Paths alone do not tell it either, since a
# result often has another tree structure. So the dataflow decides first: a new momentum is computed from the old
# momentum, and new parameters from the old parameters and the momenta.
def _match_results(
    flow: Dataflow,
    leaves: Sequence[ArgumentLeaf],
    parameters: Mapping[Value, int],
    paths: Mapping[Value, str],
    in_place: Mapping[Value, int],
) -> dict[Value, int]:
    """Map each result to the leaf that it replaces or whose gradient it is; results without a leaf are missing."""
    # The candidates of an output are the leaves of its shape and type from which it is computed element by element. The
    # output with the fewest candidates chooses first. Among several candidates the path decides (without the argument's
    # number or name), then the reused buffer (`in_place`), then the order. An output without candidates that depends on
    # the backward pass is a gradient. For it the path decides, then the order.
    matcher = _Matcher(flow, leaves, parameters)
    gradients: list[Value] = []
    pairs: list[tuple[tuple[int, ...], Value, int]] = []
    for order, (value, path) in enumerate(paths.items()):
        origins = matcher.origins(value)
        if not origins and flow.phase(value) in ("backward", "update"):
            gradients.append(value)
        for leaf in origins:
            rank = (len(origins), -matcher.common_suffix_length(path, leaf), leaf != in_place.get(value), order, leaf)
            pairs.append((rank, value, leaf))
    # Greedy matching: the best pairs first, each leaf once; then outputs without a free leaf share one; then gradients.
    pairs.sort(key=lambda pair: pair[0])
    matches, used_leaves = dict[Value, int](), set[int]()
    for _, value, leaf in pairs:
        if value not in matches and leaf not in used_leaves:
            matches[value] = leaf
            used_leaves.add(leaf)
    for _, value, leaf in pairs:
        matches.setdefault(value, leaf)
    used_leaves.clear()
    for value in gradients:
        leaf = matcher.closest(value, paths[value], used_leaves)
        if leaf is not None:
            matches[value] = leaf
            used_leaves.add(leaf)
    return {**in_place, **matches}


class _Matcher:
    def __init__(self, flow: Dataflow, leaves: Sequence[ArgumentLeaf], parameters: Mapping[Value, int]) -> None:
        self.flow = flow
        self.types = {leaf: self._type(value) for value, leaf in parameters.items()}
        self.names = {leaf: _path_names(leaves[leaf]) for leaf in parameters.values()}
        self.by_type: dict[tuple[int, ...], list[int]] = {}
        self.by_suffix: dict[tuple[Any, ...], list[int]] = {}
        # Differentiated leaves come first: a gradient belongs to the parameters, not to a momentum of equal shape.
        for leaf in sorted(self.types, key=lambda leaf: (not flow.is_differentiated(leaf), leaf)):
            self.by_type.setdefault(self.types[leaf], []).append(leaf)
            for length in range(1, len(self.names[leaf]) + 1):
                self.by_suffix.setdefault((self.types[leaf], self.names[leaf][-length:]), []).append(leaf)

    def origins(self, output: Value) -> set[int]:
        """Return the leaves of equal shape and type from which an output is computed element by element."""
        output_type = self._type(output)
        copied_leaves = {self.flow.copy_of(value) for value in self.flow.same_size_sources(output)}
        return {leaf for leaf in copied_leaves if leaf is not None and self.types.get(leaf) == output_type}

    def common_suffix_length(self, path: str, leaf: int) -> int:
        """Return the number of names that a path and a leaf's path share at their ends."""
        pairs = zip(reversed(path.split("/")), reversed(self.names[leaf]), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def closest(self, output: Value, path: str, used_leaves: set[int]) -> int | None:
        """Return the leaf of the output's type whose path shares the longest end with `path`; prefer an unused leaf."""
        output_type, names = self._type(output), tuple(path.split("/"))
        for length in range(len(names), 0, -1):
            if candidates := self.by_suffix.get((output_type, names[-length:])):
                return next((leaf for leaf in candidates if leaf not in used_leaves), candidates[0])
        candidates = self.by_type.get(output_type, [])
        while candidates and candidates[0] in used_leaves and len(candidates) > 1:
            candidates.pop(0)
        return candidates[0] if candidates else None

    def _type(self, value: Value) -> tuple[int, ...]:
        shape = self.flow.graph.shape(value)
        return (shape.element_type, *shape.dimensions)


def _path_names(leaf: ArgumentLeaf) -> tuple[str, ...]:
    """Split a leaf's path into names, without the number or name of a positional argument, which results lack."""
    names = tuple(leaf.path.split("/"))
    return names[1:] if isinstance(leaf.argument, int) else names


# --- names -----------------------------------------------------------------------------------------------------------


def _readable(scope: str) -> str:
    """Return the first of several joined scopes, without the prefix ``jit(step)/`` that all scopes share."""
    return re.sub(r"^jit\([^/()]*\)/", "", first_scope(scope))


def _short_source(source: str) -> str:
    """Shorten the file of a source line: drop the working or site-packages folder; name a notebook cell ``cell``."""
    file, separator, line = source.partition(":") if os.sep != "\\" else ("", "", source)
    file = re.sub(r"^.*[/\\](site|dist)-packages[/\\]", "", file)
    file = re.sub(r"^.*[/\\]ipykernel_\d+[/\\]\d+\.py$", "cell", file)  # a notebook cell
    cwd = os.getcwd() + os.sep
    return (file[len(cwd) :] if file.startswith(cwd) else file) + separator + line
