"""To which pass every operation of a stage belongs, so that the fewest bytes wait between the passes.

Four passes: `Pass.HOISTED` (of weights alone, once a step), `FORWARD`, `INPUT`, `WEIGHT`. What the forward pass returns
is computed there, what the gradient of the input needs at the latest in the input pass. Between these bounds an
operation may run in any pass, but never twice: a minimum cut chooses, whose capacities are the bytes that are kept from
one pass to the next, and of equal cuts the latest. So a bias' gradient, a sum over tokens, is made in the input pass
rather than that the tokens' cotangents wait for it, and an activation's derivative waits as the activation's input.

Matrix products and their like are not put off or brought forward for bytes: those that only weight gradients need are
the weight pass, those that the forward pass does not need (recomputation) wait for the backward pass. What reads only
the batch, or changes only the view of a weight, costs little and is made in each pass that reads it; a copy out of the
host's memory is, too, since one that waited would be what was offloaded, on the device.
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
    """A part of a stage's work; later ones read what earlier ones left."""

    HOISTED = 0
    FORWARD = 1
    INPUT = 2
    WEIGHT = 3


class Source(enum.Enum):
    """What an input of the graph is."""

    WEIGHT = enum.auto()
    BATCH = enum.auto()
    ACTIVATION = enum.auto()
    COTANGENT = enum.auto()


@dataclasses.dataclass(eq=False)
class Sink:
    """Results that are there after a pass."""

    reads: list[Atom]
    at: Pass
    is_added: bool = False
    """Whether it is added to a total as soon as it is there, and so never kept."""


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
    """Which operation runs when."""

    passes: dict[Op | Carry, Pass]
    """Of every operation that has one; others are dead, or run in each pass that reads them."""
    free: dict[Value, Op]
    """What is made in each pass that reads it, and how."""


def assign(graph: Graph, sources: list[Source], sinks: list[Sink]) -> Assignment:
    """Give every operation its pass.

    Args:
        graph: the forward and the backward pass of a stage.
        sources: what its inputs are.
        sinks: its results.

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
    """Who gives and who reads a value."""

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
            # A carry is of weights alone when all that enters it is; nothing shows that before its body is read.
            of_weights = self._carries_of_weights(item)
            for carry in item.carries:
                self.nodes.append(carry)
                self.producer.update(dict.fromkeys(carry.results, carry))
                self.of_weights.update(carry.results if carry in of_weights else [])
            self._walk(item.body)
            for value, stack in _stacked(item):
                self._alias(stack, value)

    def _alias(self, value: Value, of: Atom) -> None:
        """Another view of the same memory."""
        if not isinstance(of, Value):
            return
        if of in self.producer:  # else of something free
            self.producer[value] = self.producer[of]
        for group in (self.of_weights, self.of_batch):
            if of in group:
                group.add(value)

    def _operation(self, op: Op) -> None:
        reads = [atom for atom in op.reads if isinstance(atom, Value)]
        is_own = not op.has_effects and not any(value.stack for value in op.results)
        is_light = is_own and not op.is_heavy
        is_view = op.name in _VIEWS and all(value in self.of_weights for value in reads)
        if is_own and op.name == TO_DEVICE:  # kept, it would wait on the device again
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
        """Whether it is made of literals alone."""
        if value not in self.producer and value.stack is not None:
            return self._is_constant(value.stack)
        op = self.free.get(value)
        return op is not None and all(not isinstance(read, Value) or self._is_constant(read) for read in op.reads)

    def _carries_of_weights(self, loop: Loop) -> set[Carry]:
        """Those whose begin and whose step read nothing else: found by taking all to be, and then away."""
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
        """Return what a node reads, through what is free."""
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
        """Return the nodes and all that they need."""
        waiting, seen = list(nodes), set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += [self.producer[value] for value in self.reads(node)]
        return seen


def _stacked(loop: Loop) -> list[tuple[Value, Value]]:
    """Return the values of a loop's own body that are stacked outside of it, and their stacks."""
    values = [carry.inside for carry in loop.carries]
    for item in loop.body:
        if isinstance(item, Op):
            values += item.results
        else:
            values += [*(carry.final for carry in item.carries), *(stack for _, stack in _stacked(item))]
    return [(value, value.stack) for value in values if value.stack is not None]


_BOUNDS = (Pass.FORWARD, Pass.INPUT)
"""The passes after which something may have to be kept."""
_ENDLESS = 2**30


class _Cut:
    """A network in which a node stands once for each bound: on the near side of it, the node's pass comes before."""

    def __init__(self, reach: Reach, nodes: list[Node], sinks: list[Sink]) -> None:
        self.reach, self.nodes, self.sinks = reach, nodes, sinks
        self.number = {node: i for i, node in enumerate(nodes)}
        self.size = 2 + len(nodes) * len(_BOUNDS)
        self.edges: list[tuple[int, int, int]] = []

    def at(self, node: Node, bound: Pass) -> int:
        return 2 + self.number[node] * len(_BOUNDS) + _BOUNDS.index(bound)

    def solve(self) -> dict[Node, Pass]:
        from scipy.sparse import coo_array  # takes 0.4 s; `import lowtide` does not need it
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        self._add_bounds()
        self._add_residuals()
        # Capacities are 32-bit numbers there, and those of equal edges would add up beyond.
        begins, ends, capacities = np.array(list(dict.fromkeys(self.edges)), np.int64).T
        between = (begins.astype(np.int32), ends.astype(np.int32))  # SciPy 1.14 takes no others
        network = coo_array((self._scaled(capacities), between), shape=(self.size, self.size)).tocsr()
        found = maximum_flow(network, 0, 1)
        assert found.flow_value < _ENDLESS, "an operation without any pass that it could be in"
        left = network - found.flow
        left.eliminate_zeros()
        near = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return {
            node: next((bound for bound in _BOUNDS if self.at(node, bound) in near), Pass.WEIGHT) for node in self.nodes
        }

    def _scaled(self, capacities: Any) -> Any:
        finite = capacities < _ENDLESS * 2**20
        unit = max(1, math.ceil(int(capacities[finite].sum()) / 2**28))
        return np.where(finite, np.maximum(capacities // unit, np.minimum(capacities, 1)), _ENDLESS).astype(np.int32)

    def _always(self, begin: int, end: int) -> None:
        """Where `begin` is on the near side, `end` is too."""
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
                last = Pass.FORWARD  # what is offloaded leaves the device at once
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
            for value in self.reach.reads(node):
                for bound in _BOUNDS:
                    self._always(self.at(node, bound), self.at(self.reach.producer[value], bound))

    def _effects(self) -> dict[Node, Pass]:
        """Return the last pass that operations with effects may be in: a weight pass leaves out what nobody reads.

        They stay in the forward pass; their copies that are recomputed come after the first cotangent.
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
        """Where no gradient of the input is wanted: what hands a cotangent on to other matrix products."""
        heavy = [node for node in self.nodes if isinstance(node, Op) and node.is_heavy]
        back = [node for node in heavy if Source.COTANGENT in self.reach.ancestors([node])]
        found = set[Node]()
        for node in back:
            found |= self.reach.ancestors(self.reach.producer[value] for value in self.reach.reads(node))
        return found & set(back)

    def _add_residuals(self) -> None:
        """Add what costs bytes when it is made before a bound and read after it."""
        readers: dict[Value, set[Node]] = {}
        for node in self.nodes:
            if isinstance(node, Sink) and node.is_added:
                continue
            for value in self.reach.reads(node):
                if value not in self.reach.of_weights and self.reach.producer[value] is not Source.BATCH:
                    readers.setdefault(value.storage, set()).add(node)
        for value, nodes in readers.items():
            for bound in _BOUNDS:
                kept, self.size = self.size, self.size + 1
                self.edges.append((self.at(self.reach.producer[value], bound), kept, max(value.size_bytes, 1)))
                for node in nodes:
                    self._always(kept, self.at(node, bound))


def _hoist(reach: Reach, found: dict[Op | Carry, Pass], nodes: list[Node], passes: dict[Node, Pass]) -> None:
    """Make once a step what weights alone give and another pass reads, with all that it is made of."""
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
