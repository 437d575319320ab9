"""Assign every operation of a stage to a pass, so that the fewest bytes are kept between the passes.

There are four passes: `Pass.HOISTED` (depends on weights alone, runs once a step), `FORWARD`, `INPUT` and `WEIGHT`. The
results of the stage must be computed in the forward pass, and the gradient of its input in the input pass at the
latest. Between these bounds an operation may run in any pass, but only in one. A minimum cut chooses the pass; its
capacities are the bytes that are kept from one pass to the next. Of equal cuts, the one with the latest passes is
chosen. Two examples: the gradient of a bias is a sum over tokens, so it is computed in the input pass and the larger
cotangents are not kept. The derivative of an activation function is computed in the input pass, so only the function's
input is kept.

Matrix products and other heavy operations do not move to save bytes. If only weight gradients need a heavy operation,
it runs in the weight pass. Recomputation, which the forward pass does not need, runs in the backward pass. Cheap
operations run in each pass that reads them, if they read only the batch or only change the view of a weight. Their
results are free values, which are never kept. A copy out of host memory also runs in each pass that reads it: a kept
copy would hold the offloaded array on the device.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from ._graph import TO_DEVICE, TO_HOST, Atom, Carry, Graph, Loop, Op, Value


class Pass(enum.IntEnum):
    """A part of a stage's work; later passes read values that earlier passes saved."""

    HOISTED = 0
    FORWARD = 1
    INPUT = 2
    WEIGHT = 3


class Source(enum.Enum):
    """Role of a graph input."""

    WEIGHT = enum.auto()
    BATCH = enum.auto()
    ACTIVATION = enum.auto()
    COTANGENT = enum.auto()


@dataclasses.dataclass(eq=False)
class Sink:
    """Results that must exist at the end of a pass."""

    reads: list[Atom]
    deadline: Pass
    is_added: bool = False
    """Whether the result is added to a total as soon as it exists, so it is never kept."""


Node: TypeAlias = "Op | Carry | Sink | Source"

_VIEWS = {"broadcast_in_dim", "copy", "expand_dims", "reshape", "rev", "slice", "squeeze", "transpose"}


def assign(graph: Graph, sources: list[Source], sinks: list[Sink]) -> tuple[dict[Op | Carry, Pass], dict[Value, Op]]:
    """Assign every operation of a stage's forward and backward pass to a pass.

    `sources` are the roles of the graph inputs, `sinks` the results of the stage. The first result maps operations
    and carries to their passes. The second maps free values to the operations that compute them again in each pass that
    reads them. Operations in neither result are dead.
    """
    reach = Reach(graph, sources, sinks)
    live = reach.ancestors([*sinks, *(op for op in reach.nodes if isinstance(op, Op) and op.has_effects)])
    nodes: list[Node] = [node for node in (*reach.nodes, *Source, *sinks) if node in live or isinstance(node, Source)]
    passes = _Cut(reach, nodes, sinks).solve()
    # If a later pass reads the result of an operation on weights alone, the operation and its ancestors are hoisted.
    crossing = [
        reach.producer[value]
        for node in nodes
        for value in reach.reads(node)
        if value in reach.weight_only and passes[reach.producer[value]] < passes[node]
    ]
    passes.update(dict.fromkeys(reach.ancestors(crossing), Pass.HOISTED))
    return {node: pass_ for node, pass_ in passes.items() if isinstance(node, Op | Carry)}, reach.free


class Reach:
    """Producer of each value, free values, and the values that depend on weights alone or on the batch alone."""

    def __init__(self, graph: Graph, sources: list[Source], sinks: list[Sink]) -> None:
        self.inputs = dict(zip(graph.inputs, sources, strict=True))
        self.producer: dict[Value, Node] = dict(self.inputs)
        self.free: dict[Value, Op] = {}
        self.weight_only: set[Value] = {value for value, source in self.inputs.items() if source is Source.WEIGHT}
        self.batch_only: set[Value] = {value for value, source in self.inputs.items() if source is Source.BATCH}
        self.nodes: list[Op | Carry] = []
        self._add_items(graph.items)

    def _add_items(self, items: Iterable[Op | Loop]) -> None:
        for item in items:
            if isinstance(item, Op):
                self._add_operation(item)
                continue
            for outer, slice_ in item.slices:
                self._add_alias(slice_, outer)
            # A carry depends on weights alone if its initial value and its step (the computation of its next value) do.
            # Operations of the body read carries, so this is decided before the body is added.
            weight_only_carries = self._weight_only_carries(item)
            for carry in item.carries:
                self.nodes.append(carry)
                self.producer.update(dict.fromkeys(carry.results, carry))
                self.weight_only.update(carry.results if carry in weight_only_carries else [])
            self._add_items(item.body)
            for value, stack in _stacked(item):
                self._add_alias(stack, value)

    def _add_alias(self, value: Value, source: Atom) -> None:
        """Record that `value`, a slice or the stack of `source`, has the same producer and dependences as `source`."""
        if not isinstance(source, Value):
            return
        if source in self.producer:  # otherwise `source` is a free value or a slice of one
            self.producer[value] = self.producer[source]
        for group in (self.weight_only, self.batch_only):
            if source in group:
                group.add(value)

    def _add_operation(self, op: Op) -> None:
        reads = [atom for atom in op.reads if isinstance(atom, Value)]
        may_repeat = not op.has_effects and not any(value.stack for value in op.results)
        is_light = may_repeat and not op.is_heavy
        is_view = op.name in _VIEWS and all(value in self.weight_only for value in reads)
        if may_repeat and op.name == TO_DEVICE:  # a kept copy would occupy device memory
            self.free.update(dict.fromkeys(op.results, op))
            return
        if is_light and (is_view or all(value in self.batch_only or self._is_constant(value) for value in reads)):
            for value in op.results:
                self.free[value] = op
                if is_view and reads:
                    self.weight_only.add(value)
                elif any(value in self.batch_only for value in reads):
                    self.batch_only.add(value)
            return
        self.nodes.append(op)
        self.producer.update(dict.fromkeys(op.results, op))
        if all(map(self._is_weight_only, reads)):
            self.weight_only.update(op.results)

    def _is_constant(self, value: Value) -> bool:
        """Return whether the value is computed from literals alone."""
        if value not in self.producer and value.stack is not None:
            return self._is_constant(value.stack)
        op = self.free.get(value)
        return op is not None and all(
            not isinstance(operand, Value) or self._is_constant(operand) for operand in op.reads
        )

    def _weight_only_carries(self, loop: Loop) -> set[Carry]:
        """Return the carries whose initial value and step read only weights and literals."""
        # Greatest fixed point: start with all candidates, and remove those whose step reads something else.
        carries = {carry for carry in loop.carries if self._is_weight_only(carry.init)}
        while True:
            carry_inputs = {carry.carry_in for carry in carries}
            for carry in list(carries):
                if not self._is_step_weight_only(loop, carry.carry_out, carry_inputs):
                    carries.discard(carry)
            if len(carries) == len(carry_inputs):
                return carries

    def _is_weight_only(self, atom: Atom) -> bool:
        return not isinstance(atom, Value) or atom in self.weight_only or self._is_constant(atom)

    def _is_step_weight_only(self, loop: Loop, atom: Atom, carry_inputs: set[Value]) -> bool:
        producers = {value: item for item in loop.body if isinstance(item, Op) for value in item.results}
        worklist, visited = [atom], set[Value]()
        while worklist:
            current = worklist.pop()
            if (
                not isinstance(current, Value)
                or current in visited
                or current in carry_inputs
                or self._is_weight_only(current)
            ):
                continue
            visited.add(current)
            if current not in producers:
                return False
            worklist += producers[current].reads
        return True

    def reads(self, node: Node) -> Iterator[Value]:
        """Yield the values that a node reads; a free value is replaced by the values from which it is computed."""
        worklist: list[Atom] = [] if isinstance(node, Source) else [*node.reads]
        visited = set[Value]()
        while worklist:
            atom = worklist.pop()
            if not isinstance(atom, Value) or atom in visited:
                continue
            visited.add(atom)
            if atom in self.free:
                worklist += self.free[atom].reads
            elif atom in self.producer:
                yield atom
            else:
                worklist.append(atom.stack)  # pyright: ignore[reportArgumentType]

    def ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes and all nodes that they depend on."""
        worklist, visited = list(nodes), set[Node]()
        while worklist:
            node = worklist.pop()
            if node not in visited:
                visited.add(node)
                worklist += [self.producer[value] for value in self.reads(node)]
        return visited


def _stacked(loop: Loop) -> list[tuple[Value, Value]]:
    """Return the values of a loop's body that are stacked outside of it, with their stacks."""
    values = [carry.carry_in for carry in loop.carries]
    for item in loop.body:
        if isinstance(item, Op):
            values += item.results
        else:
            values += [*(carry.final for carry in item.carries), *(stack for _, stack in _stacked(item))]
    return [(value, value.stack) for value in values if value.stack is not None]


_BOUNDS = (Pass.FORWARD, Pass.INPUT)
"""Passes after which values may have to be kept."""
_INFINITE_CAPACITY = 2**30


class _Cut:
    """Flow network. The vertex of a node and a bound is on the source side if the node runs at the bound or earlier."""

    def __init__(self, reach: Reach, nodes: list[Node], sinks: list[Sink]) -> None:
        self.reach, self.nodes, self.sinks = reach, nodes, sinks
        self.indices = {node: i for i, node in enumerate(nodes)}
        self.size = 2 + len(nodes) * len(_BOUNDS)
        self.edges: list[tuple[int, int, int]] = []

    def vertex(self, node: Node, bound: Pass) -> int:
        return 2 + self.indices[node] * len(_BOUNDS) + _BOUNDS.index(bound)

    def solve(self) -> dict[Node, Pass]:
        from scipy.sparse import coo_array  # the import takes 0.4 s
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        self._add_bounds()
        self._add_residuals()
        # Equal edges are merged, because SciPy would add their capacities, which are 32-bit integers and could
        # overflow.
        starts, ends, capacities = np.array(list(dict.fromkeys(self.edges)), np.int64).T
        coordinates = (starts.astype(np.int32), ends.astype(np.int32))  # SciPy 1.14 accepts only 32-bit indices
        network = coo_array((self._scale(capacities), coordinates), shape=(self.size, self.size)).tocsr()
        flow = maximum_flow(network, 0, 1)
        assert flow.flow_value < _INFINITE_CAPACITY, "an operation fits into no pass"
        residual_network = network - flow.flow
        residual_network.eliminate_zeros()
        # Vertices reachable from the source form the smallest source side of all minimum cuts. So each node gets its
        # latest pass.
        reachable = set(breadth_first_order(residual_network, 0, return_predecessors=False).tolist())
        return {
            node: next((bound for bound in _BOUNDS if self.vertex(node, bound) in reachable), Pass.WEIGHT)
            for node in self.nodes
        }

    def _scale(self, capacities: Any) -> Any:
        # Scale finite capacities to a sum of at most about 2**28, below `_INFINITE_CAPACITY`. Keep each of them at 1 or
        # more, so that no residual becomes free.
        finite = capacities < _INFINITE_CAPACITY * 2**20
        unit = max(1, math.ceil(int(capacities[finite].sum()) / 2**28))
        scaled = np.maximum(capacities // unit, np.minimum(capacities, 1))
        return np.where(finite, scaled, _INFINITE_CAPACITY).astype(np.int32)

    def _require(self, start: int, end: int) -> None:
        """Add an edge that puts `end` on the source side if `start` is there."""
        self.edges.append((start, end, _INFINITE_CAPACITY * 2**20))

    def _add_bounds(self) -> None:
        effect_deadlines = self._effect_deadlines()
        forward_effects = [node for node, last in effect_deadlines.items() if last is Pass.FORWARD]
        forward_sinks = [sink for sink in self.sinks if sink.deadline is Pass.FORWARD]
        forward = self.reach.ancestors([*forward_effects, *forward_sinks])
        backward = self.reach.ancestors([*effect_deadlines, *(sink for sink in self.sinks if not sink.is_added)])
        has_input_gradient = any(sink.deadline is Pass.INPUT and not sink.is_added for sink in self.sinks)
        heavy_chain = set[Node]() if has_input_gradient else self._heavy_chain()
        to_host = [node for node in self.nodes if isinstance(node, Op) and node.name == TO_HOST]
        cotangent_copies = {node for node in to_host if Source.COTANGENT in self.reach.ancestors([node])}
        for node in self.nodes:
            first, last = Pass.HOISTED, Pass.WEIGHT
            if isinstance(node, Source):
                first = last = Pass.INPUT if node is Source.COTANGENT else Pass.FORWARD
            elif isinstance(node, Sink):
                first, last = first if node.is_added else node.deadline, node.deadline
            elif isinstance(node, Op) and node.name == TO_HOST and node not in cotangent_copies:
                last = Pass.FORWARD  # an offloaded value leaves the device at once
            elif node in effect_deadlines:
                last = effect_deadlines[node]
            elif isinstance(node, Op) and node.is_heavy and node not in forward:
                first = Pass.INPUT if node in backward or node in heavy_chain else Pass.WEIGHT
                last = Pass.INPUT if node in heavy_chain else last
            for bound in _BOUNDS:
                if last <= bound:
                    self._require(0, self.vertex(node, bound))
                if first > bound:
                    self._require(self.vertex(node, bound), 1)
            self._require(self.vertex(node, Pass.FORWARD), self.vertex(node, Pass.INPUT))
            # A node cannot run before the producers of the values that it reads.
            for value in self.reach.reads(node):
                for bound in _BOUNDS:
                    self._require(self.vertex(node, bound), self.vertex(self.reach.producer[value], bound))

    def _effect_deadlines(self) -> dict[Node, Pass]:
        """Map each operation with effects to the last pass in which it may run.

        A weight pass drops operations whose results nobody reads, so effects run before it. Effects of the forward pass
        stay there. Effects after the first read of a cotangent, such as recomputed ones, run in the input pass.
        """
        deadlines: dict[Node, Pass] = {}
        deadline = Pass.FORWARD
        if any(isinstance(node, Op) and node.has_effects for node in self.nodes):
            for node in self.nodes:
                if deadline is Pass.FORWARD and isinstance(node, Op | Carry):
                    deadline = Pass.INPUT if Source.COTANGENT in self.reach.ancestors([node]) else deadline
                if isinstance(node, Op) and node.has_effects:
                    deadlines[node] = deadline
        return deadlines

    def _heavy_chain(self) -> set[Node]:
        """Return the heavy operations that pass a cotangent to other heavy operations.

        If the input of a stage needs no gradient, these operations form the input pass of the stage.
        """
        heavy = [node for node in self.nodes if isinstance(node, Op) and node.is_heavy]
        backward = [node for node in heavy if Source.COTANGENT in self.reach.ancestors([node])]
        operands = [self.reach.producer[value] for node in backward for value in self.reach.reads(node)]
        return self.reach.ancestors(operands) & set(backward)

    def _add_residuals(self) -> None:
        """Add an edge per value and bound; its capacity counts if the value exists at the bound and is read later."""
        readers: dict[Value, set[Node]] = {}
        for node in self.nodes:
            if isinstance(node, Sink) and node.is_added:
                continue
            for value in self.reach.reads(node):
                if value not in self.reach.weight_only and self.reach.producer[value] is not Source.BATCH:
                    readers.setdefault(value.storage, set()).add(node)
        for value, nodes in readers.items():
            for bound in _BOUNDS:
                # `saved_vertex` is one vertex for all readers, so a value with several later readers costs its bytes
                # once.
                saved_vertex, self.size = self.size, self.size + 1
                producer_vertex = self.vertex(self.reach.producer[value], bound)
                self.edges.append((producer_vertex, saved_vertex, max(value.size_bytes, 1)))
                for node in nodes:
                    self._require(saved_vertex, self.vertex(node, bound))
