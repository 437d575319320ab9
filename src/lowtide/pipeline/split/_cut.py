"""Assign every operation of a stage to a pass, so that the fewest bytes are kept between the passes.

There are four passes: `Pass.HOISTED` (depends on weights alone, runs once a step), `FORWARD`, `INPUT` and `WEIGHT`. The
results of the stage must be computed in the forward pass, and the gradient of its input in the input pass at the
latest. Between these bounds an operation may run in any pass, but only in one. A minimum cut chooses the pass; its
capacities are the bytes that are kept from one pass to the next. Of equal cuts it takes the latest. Two examples: the
gradient of a bias is a sum over tokens, so it is computed in the input pass and the larger cotangents are not kept. The
derivative of an activation function is computed in the input pass, so only the function's input is kept.

Matrix products and other heavy operations do not move to save bytes. Those that only weight gradients need run in the
weight pass. Those that the forward pass does not need (recomputation) run in the backward pass. Cheap operations run in
each pass that reads them, if they read only the batch or only change the view of a weight. A copy out of host memory
also runs in each pass: a kept copy would hold the offloaded array on the device.
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
    """A part of a stage's work; later passes read values that earlier passes left."""

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
    at: Pass
    is_added: bool = False
    """Whether the result is added to a total as soon as it exists, so it is never kept."""


Node: TypeAlias = "Op | Carry | Sink | Source"

_VIEWS = {
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
}


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The pass of each operation."""

    passes: dict[Op | Carry, Pass]
    """Pass of every operation that runs in one pass. Other operations are dead, or run in each pass that reads them."""
    free: dict[Value, Op]
    """Values that are computed in each pass that reads them, with the operation that computes them."""


def assign(graph: Graph, sources: list[Source], sinks: list[Sink]) -> Assignment:
    """Assign every operation to a pass.

    Args:
        graph: the forward and the backward pass of a stage.
        sources: role of each graph input.
        sinks: results of the stage.

    Returns:
        The assignment.
    """
    reach = Reach(graph, sources, sinks)
    live = reach.ancestors([*sinks, *(op for op in reach.nodes if isinstance(op, Op) and op.has_effects)])
    nodes: list[Node] = [node for node in (*reach.nodes, *Source, *sinks) if node in live or isinstance(node, Source)]
    passes = _Cut(reach, nodes, sinks).solve()
    found = {node: at for node, at in passes.items() if isinstance(node, Op | Carry)}
    _hoist(reach, found, nodes, passes)
    return Assignment(found, reach.free)


class Reach:
    """Producers of all values, and the values that depend on weights alone or on the batch alone."""

    def __init__(self, graph: Graph, sources: list[Source], sinks: list[Sink]) -> None:
        self.inputs = dict(zip(graph.inputs, sources, strict=True))
        self.producer: dict[Value, Node] = dict(self.inputs)
        self.free: dict[Value, Op] = {}
        self.of_weights: set[Value] = {value for value, source in self.inputs.items() if source is Source.WEIGHT}
        self.of_batch: set[Value] = {value for value, source in self.inputs.items() if source is Source.BATCH}
        self.nodes: list[Op | Carry] = []
        self._walk(graph.items)

    def _walk(self, items: Iterable[Op | Loop]) -> None:
        for item in items:
            if isinstance(item, Op):
                self._operation(item)
                continue
            for outer, inside in item.slices:
                self._alias(inside, outer)
            # A carry depends on weights alone if its initial value and its step do. The step is known only after the
            # body is read, so this is decided first.
            of_weights = self._carries_of_weights(item)
            for carry in item.carries:
                self.nodes.append(carry)
                self.producer.update(dict.fromkeys(carry.results, carry))
                self.of_weights.update(carry.results if carry in of_weights else [])
            self._walk(item.body)
            for value, stack in _stacked(item):
                self._alias(stack, value)

    def _alias(self, value: Value, of: Atom) -> None:
        """Give a value the producer and groups of another value, of which it is a view."""
        if not isinstance(of, Value):
            return
        if of in self.producer:  # otherwise the other value is a view of a free value
            self.producer[value] = self.producer[of]
        for group in (self.of_weights, self.of_batch):
            if of in group:
                group.add(value)

    def _operation(self, op: Op) -> None:
        reads = [atom for atom in op.reads if isinstance(atom, Value)]
        is_own = not op.has_effects and not any(value.stack for value in op.results)
        is_light = is_own and not op.is_heavy
        is_view = op.name in _VIEWS and all(value in self.of_weights for value in reads)
        if is_own and op.name == TO_DEVICE:  # if it were kept, it would occupy device memory
            self.free.update(dict.fromkeys(op.results, op))
            return
        if is_light and (is_view or all(value in self.of_batch or self._is_constant(value) for value in reads)):
            for value in op.results:
                self.free[value] = op
                if is_view and reads:
                    self.of_weights.add(value)
                elif any(value in self.of_batch for value in reads):
                    self.of_batch.add(value)
            return
        self.nodes.append(op)
        self.producer.update(dict.fromkeys(op.results, op))
        if all(map(self._is_of_weights, reads)):
            self.of_weights.update(op.results)

    def _is_constant(self, value: Value) -> bool:
        """Return whether the value is computed from literals alone."""
        if value not in self.producer and value.stack is not None:
            return self._is_constant(value.stack)
        op = self.free.get(value)
        return op is not None and all(not isinstance(read, Value) or self._is_constant(read) for read in op.reads)

    def _carries_of_weights(self, loop: Loop) -> set[Carry]:
        """Return the carries whose initial value and step read only weights and literals."""
        # Greatest fixed point: start with all candidates, and remove those whose step reads something else.
        carries = {carry for carry in loop.carries if self._is_of_weights(carry.init)}
        while True:
            inside = {carry.inside for carry in carries}
            for carry in list(carries):
                if not self._step_is_of_weights(loop, carry.after, inside):
                    carries.discard(carry)
            if len(carries) == len(inside):
                return carries

    def _is_of_weights(self, atom: Atom) -> bool:
        return not isinstance(atom, Value) or atom in self.of_weights or self._is_constant(atom)

    def _step_is_of_weights(self, loop: Loop, atom: Atom, inside: set[Value]) -> bool:
        made = {value: item for item in loop.body if isinstance(item, Op) for value in item.results}
        waiting, seen = [atom], set[Value]()
        while waiting:
            one = waiting.pop()
            if not isinstance(one, Value) or one in seen or one in inside or self._is_of_weights(one):
                continue
            seen.add(one)
            if one not in made:
                return False
            waiting += made[one].reads
        return True

    def reads(self, node: Node) -> Iterator[Value]:
        """Yield the values that a node reads; a free value is replaced by the values that it is computed from."""
        waiting: list[Atom] = [] if isinstance(node, Source) else [*node.reads]
        seen = set[Value]()
        while waiting:
            atom = waiting.pop()
            if not isinstance(atom, Value) or atom in seen:
                continue
            seen.add(atom)
            if atom in self.free:
                waiting += self.free[atom].reads
            elif atom in self.producer:
                yield atom
            else:
                waiting.append(atom.stack)  # pyright: ignore[reportArgumentType]

    def ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes and all nodes that they depend on."""
        waiting, seen = list(nodes), set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += [self.producer[value] for value in self.reads(node)]
        return seen


def _stacked(loop: Loop) -> list[tuple[Value, Value]]:
    """Return the values of a loop's body that are stacked outside of it, with their stacks."""
    values = [carry.inside for carry in loop.carries]
    for item in loop.body:
        if isinstance(item, Op):
            values += item.results
        else:
            values += [*(carry.final for carry in item.carries), *(stack for _, stack in _stacked(item))]
    return [(value, value.stack) for value in values if value.stack is not None]


_BOUNDS = (Pass.FORWARD, Pass.INPUT)
"""Passes at whose end values may have to be kept."""
_ENDLESS = 2**30


class _Cut:
    """Flow network with a vertex per node and bound; on the source side, the node runs in that pass or earlier."""

    def __init__(self, reach: Reach, nodes: list[Node], sinks: list[Sink]) -> None:
        self.reach, self.nodes, self.sinks = reach, nodes, sinks
        self.number = {node: i for i, node in enumerate(nodes)}
        self.size = 2 + len(nodes) * len(_BOUNDS)
        self.edges: list[tuple[int, int, int]] = []

    def at(self, node: Node, bound: Pass) -> int:
        return 2 + self.number[node] * len(_BOUNDS) + _BOUNDS.index(bound)

    def solve(self) -> dict[Node, Pass]:
        from scipy.sparse import coo_array  # the import takes 0.4 s
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        self._add_bounds()
        self._add_residuals()
        # SciPy's capacities are 32-bit integers, and it would add up the capacities of equal edges, which could
        # overflow.
        begins, ends, capacities = np.array(list(dict.fromkeys(self.edges)), np.int64).T
        between = (begins.astype(np.int32), ends.astype(np.int32))  # SciPy 1.14 accepts only 32-bit indices
        network = coo_array((self._scaled(capacities), between), shape=(self.size, self.size)).tocsr()
        found = maximum_flow(network, 0, 1)
        assert found.flow_value < _ENDLESS, "an operation without any pass that it could be in"
        left = network - found.flow
        left.eliminate_zeros()
        # Vertices reachable from the source are the smallest source side of all minimum cuts. So each node gets its
        # latest pass.
        near = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return {
            node: next((bound for bound in _BOUNDS if self.at(node, bound) in near), Pass.WEIGHT) for node in self.nodes
        }

    def _scaled(self, capacities: Any) -> Any:
        # Scaled to a sum of at most about 2**28, finite capacities stay below `_ENDLESS`. Each keeps at least 1, so no
        # residual becomes free.
        finite = capacities < _ENDLESS * 2**20
        unit = max(1, math.ceil(int(capacities[finite].sum()) / 2**28))
        return np.where(finite, np.maximum(capacities // unit, np.minimum(capacities, 1)), _ENDLESS).astype(np.int32)

    def _always(self, begin: int, end: int) -> None:
        """Require: if `begin` is on the source side, `end` is too."""
        self.edges.append((begin, end, _ENDLESS * 2**20))

    def _add_bounds(self) -> None:
        effects = self._effects()
        in_forward = [node for node, last in effects.items() if last is Pass.FORWARD]
        forward = self.reach.ancestors([*in_forward, *(sink for sink in self.sinks if sink.at is Pass.FORWARD)])
        back = self.reach.ancestors([*effects, *(sink for sink in self.sinks if not sink.is_added)])
        chain = (
            set[Node]() if any(sink.at is Pass.INPUT and not sink.is_added for sink in self.sinks) else self._chain()
        )
        to_host = [node for node in self.nodes if isinstance(node, Op) and node.name == TO_HOST]
        cotangent = {node for node in to_host if Source.COTANGENT in self.reach.ancestors([node])}
        for node in self.nodes:
            first, last = Pass.HOISTED, Pass.WEIGHT
            if isinstance(node, Source):
                first = last = Pass.INPUT if node is Source.COTANGENT else Pass.FORWARD
            elif isinstance(node, Sink):
                first, last = first if node.is_added else node.at, node.at
            elif isinstance(node, Op) and node.name == TO_HOST and node not in cotangent:
                last = Pass.FORWARD  # an offloaded value leaves the device at once
            elif node in effects:
                last = effects[node]
            elif isinstance(node, Op) and node.is_heavy and node not in forward:
                first = Pass.INPUT if node in back or node in chain else Pass.WEIGHT
                last = Pass.INPUT if node in chain else last
            for bound in _BOUNDS:
                if last <= bound:
                    self._always(0, self.at(node, bound))
                if first > bound:
                    self._always(self.at(node, bound), 1)
            self._always(self.at(node, Pass.FORWARD), self.at(node, Pass.INPUT))
            # A node cannot run before the producers of the values that it reads.
            for value in self.reach.reads(node):
                for bound in _BOUNDS:
                    self._always(self.at(node, bound), self.at(self.reach.producer[value], bound))

    def _effects(self) -> dict[Node, Pass]:
        """Return the last pass in which each operation with effects may run.

        A weight pass drops operations whose results nobody reads, so effects run before it. Effects of the forward pass
        stay there. Recomputed copies of them come after the first operation that reads a cotangent.
        """
        found: dict[Node, Pass] = {}
        last = Pass.FORWARD
        if any(isinstance(node, Op) and node.has_effects for node in self.nodes):
            for node in self.nodes:
                if last is Pass.FORWARD and isinstance(node, Op | Carry):
                    last = Pass.INPUT if Source.COTANGENT in self.reach.ancestors([node]) else last
                if isinstance(node, Op) and node.has_effects:
                    found[node] = last
        return found

    def _chain(self) -> set[Node]:
        """Return the heavy operations that pass a cotangent to other heavy operations.

        They are the input pass of a stage whose input needs no gradient.
        """
        heavy = [node for node in self.nodes if isinstance(node, Op) and node.is_heavy]
        back = [node for node in heavy if Source.COTANGENT in self.reach.ancestors([node])]
        found = set[Node]()
        for node in back:
            found |= self.reach.ancestors(self.reach.producer[value] for value in self.reach.reads(node))
        return found & set(back)

    def _add_residuals(self) -> None:
        """Add an edge for each value and bound; it costs the value's bytes if it is read after and computed before."""
        readers: dict[Value, set[Node]] = {}
        for node in self.nodes:
            if isinstance(node, Sink) and node.is_added:
                continue
            for value in self.reach.reads(node):
                if value not in self.reach.of_weights and self.reach.producer[value] is not Source.BATCH:
                    readers.setdefault(value.storage, set()).add(node)
        for value, nodes in readers.items():
            for bound in _BOUNDS:
                # `kept` is one vertex for all readers, so a value with several later readers costs its bytes once.
                kept, self.size = self.size, self.size + 1
                self.edges.append((self.at(self.reach.producer[value], bound), kept, max(value.size_bytes, 1)))
                for node in nodes:
                    self._always(kept, self.at(node, bound))


def _hoist(reach: Reach, found: dict[Op | Carry, Pass], nodes: list[Node], passes: dict[Node, Pass]) -> None:
    """Hoist operations that depend on weights alone and are read by another pass, with all their ancestors."""
    crossing: list[Node] = []
    for node in nodes:
        for value in reach.reads(node):
            producer = reach.producer[value]
            if value in reach.of_weights and isinstance(producer, Op | Carry) and passes[producer] < passes[node]:
                crossing.append(producer)
    waiting, seen = crossing, set[Node]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Op | Carry) and node not in seen:
            seen.add(node)
            found[node] = Pass.HOISTED
            waiting += [reach.producer[value] for value in reach.reads(node)]
