"""What a value is, from how the program makes and uses it: its phase, the argument it copies, whose gradient it is.

Nothing is read from names that people choose. JAX records which transformation made an operation (`jvp` for the forward
pass, `transpose` for the backward pass, `rematted_computation` for recomputation); everything else follows from the
edges of the graph:

- an operation outside of both passes that depends on the backward pass belongs to the **update**;
- a value is a **copy** of an argument when only moves and conversions lie between the two;
- an **activation** is made in the forward pass and read, possibly after moves, in the backward pass;
- the **gradient** of a leaf is what the backward pass hands to the output that replaces the leaf, found from that
  output through values of as many elements.

Known limits: a scatter into zeros counts as computed; the gradient of a leaf that is updated in another shape (Muon's
reshapes are fine, a sharded update after reduce-scatter is not) stays a temporary of the backward pass.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ._graph import Edge, Graph, Value

Pass = Literal["forward", "recompute", "backward", "update"]

# What may happen to a cotangent inside the backward pass without making it another value's.
_ELEMENTWISE = {"add", "all-reduce", "all-reduce-start", "divide", "multiply", "negate", "select", "subtract"}
# Operations whose result of equal size is another thing than their operand.
_MIXING = {"cholesky", "convolution", "custom-call", "dot", "fft", "gather", "scatter", "sort", "triangular-solve"}
# Transformations that JAX writes around each other: vmap(transpose(jvp(mlp))).
_TRANSFORMED = re.compile(r"(jvp|transpose|vmap|pmap|checkpoint|remat|shard_map)\((.*)\)")


def scope_phase(scope: str) -> Pass | None:
    """The pass that a scope of JAX names; None when it names none.

    Examples:
        >>> scope_phase("jit(step)/transpose(jvp(mlp))/dot_general"), scope_phase("jit(step)/jvp()/transpose")
        ('backward', 'forward')
        >>> scope_phase("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/tanh")
        'recompute'
    """
    # The compiler joins the scopes of operations that it merges with a semicolon; the last part is the primitive.
    parts = _segments(scope.partition(";")[0])[:-1]
    made = {name for part in parts for name in _transformations(part)}
    if "transpose" in made:
        return "recompute" if "rematted_computation" in parts else "backward"
    return "forward" if "jvp" in made else None


def _transformations(part: str) -> Iterator[str]:
    """The transformations around a part of a scope, the outermost first."""
    while found := _TRANSFORMED.fullmatch(part):
        yield found[1]
        part = found[2]


def _segments(scope: str) -> list[str]:
    """The parts between slashes that stand in no bracket."""
    parts, depth, begin = list[str](), 0, 0
    for at, char in enumerate(scope):
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            parts.append(scope[begin:at])
            begin = at + 1
    return [*parts, scope[begin:]]


class Dataflow:
    """Phases, copies, activations and gradients of a program's values.

    Args:
        graph: the program.
        leaves: the argument leaf that every array of the entry's parameters is.
    """

    def __init__(self, graph: Graph, leaves: Mapping[Value, int]) -> None:
        self.graph = graph
        self._leaves = leaves
        self._values = list(graph.values())
        # A token may stand for the whole result of an operation (a send), which is no value.
        known = set(self._values)
        self._sources = {value: [e for e in graph.sources(value) if e[0] in known] for value in self._values}
        self.users: dict[Value, list[tuple[Value, Edge]]] = {}
        for value, sources in self._sources.items():
            for source, edge in sources:
                self.users.setdefault(source, []).append((value, edge))
        self._named: dict[int, Pass | None] = {at: scope_phase(graph.scope(at)) for at in graph.instructions}
        self.phases = self._phases()
        self._copies = self._origins()
        self._read_backward = self._reads()
        self._differentiated = self._computed_with()
        self._gradients: dict[Value, int] = {}

    def phase(self, value: Value) -> Pass:
        """The pass that makes a value."""
        return self.phases.get(value, "forward")

    def copy_of(self, value: Value) -> int | None:
        """The leaf whose data a value holds and nothing else."""
        origin = self._copies.get(value)
        return origin if isinstance(origin, int) else None

    def gradient_of(self, value: Value) -> int | None:
        """The leaf that a value is the cotangent of, or an accumulator of it."""
        return self._gradients.get(value)

    def is_activation(self, value: Value) -> bool:
        """Whether the forward pass made it for the backward pass."""
        return value in self._read_backward and self.phase(value) == "forward"

    def is_read_backward(self, value: Value) -> bool:
        """Whether the backward pass reads a value, directly or behind moves."""
        return value in self._read_backward

    def is_of_a_pass(self, value: Value) -> bool:
        """Whether JAX made a value in the forward or the backward pass of a differentiation."""
        return self._named.get(value[0]) is not None or self.phase(value) in ("backward", "recompute")

    def is_constant(self, value: Value) -> bool:
        """Whether a value holds no data of any argument, such as zeros."""
        return self._copies.get(value) == "none"

    def standing_for(self, value: Value) -> Value:
        """The value that tells what a buffer is for.

        Of a loop's state inside the loop, and of a buffer that is made empty for a loop to fill, it is the result of
        the loop; else the value itself.
        """
        if (loop := self.graph.loop_of(value)) is not None:
            return (loop, value[1])
        if not self.is_constant(value):
            return value
        seen, border = {value}, [value]
        while border:
            found = border.pop(0)
            new = [user for user, edge in self.users.get(found, ()) if edge == Edge.ALIAS and user not in seen]
            for user in new:
                if self.graph.instructions[user[0]].opcode == "while" and not self.is_constant(user):
                    return user
            seen.update(new)
            border.extend(new)
        return value

    def is_differentiated(self, leaf: int) -> bool:
        """Whether the forward or the backward pass computes with the data of an argument leaf."""
        return leaf in self._differentiated

    def sources(self, value: Value) -> Sequence[tuple[Value, Edge]]:
        """What a value is made of: (value, how) pairs; empty for arguments and constants."""
        return self._sources.get(value, ())

    def same_size(self, value: Value, *, through_backward: bool = False) -> Iterator[Value]:
        """Values of as many elements that a value is made of element by element, itself included.

        Args:
            value: where to start.
            through_backward: whether to go on behind what the backward pass made. There, a product hands each of two
                arguments the data of the other one.
        """
        size = self.graph.num_elements(value)
        seen, border = {value}, [value]
        while border:
            found = border.pop()
            yield found
            mixes = self.graph.instructions[found[0]].opcode in _MIXING and self.copy_of(found) is None
            if mixes or (self.phase(found) == "backward" and not through_backward):
                continue
            new = [s for s, _ in self.sources(found) if s not in seen and self.graph.num_elements(s) == size]
            seen.update(new)
            border.extend(new)

    def described(self, value: Value) -> tuple[str, str]:
        """The scope and the source line of a value.

        Of one that was only moved (stacked by a loop, copied to another memory), those of the operation that computed
        its data; of a nameless one, those of what it is made of or goes into.
        """
        maker = self._maker(value)
        if maker is not None and (scope := self.graph.scope(maker[0])):
            return scope, self.graph.source(maker[0])
        for step in (self._sources.get, self.users.get):
            seen, border = {value}, [value]
            for _ in range(8):
                for at, _ in border:
                    if scope := self.graph.scope(at):
                        return scope, self.graph.source(at)
                border = [new for old in border for new, _ in step(old) or () if new not in seen]
                seen.update(border)
        return "", ""

    def _maker(self, value: Value) -> Value | None:
        """The operation that computed the data of a value, behind moves and other names; None for an argument's."""
        seen, border = {value}, collections.deque([value])
        while border:
            found = border.popleft()
            sources = self._sources.get(found, ())
            if any(edge == Edge.COMPUTE for _, edge in sources) and not self.is_constant(found):
                return found
            new = [s for s, edge in sources if edge != Edge.COMPUTE and s not in seen and not self.is_constant(s)]
            seen.update(new)
            border.extend(new)
        return None

    def _phases(self) -> dict[Value, Pass]:
        named = self._named
        late = self._spread(
            (v for v in self._values if named[v[0]] in ("backward", "recompute")),
            lambda value: self.users.get(value, ()),
        )
        phases: dict[Value, Pass] = {}
        for value in self._values:
            # A fusion is named after one of its operations; each result belongs to the one that makes it.
            made = self._made_as(value)
            own = named[made[0]]
            if own is None and not self.graph.scope(made[0]) and (moved := self._moved_from(made)):
                own = named[moved[0]]  # a compiler's copy belongs to what it copies
            if own is None and not self.graph.scope(made[0]):
                own = named[value[0]]  # a branch without a scope belongs to its conditional
            default: Pass = "update" if value in late else "forward"
            phases[value] = default if own is None else own
        return phases

    def _made_as(self, value: Value) -> Value:
        """The operation behind a value's other names; of the state of a loop, what the loop makes of it if anything."""
        seen, stack = {value}, [value]
        while stack:
            found = stack.pop()
            sources = self._sources[found]
            if not sources or any(edge != Edge.ALIAS for _, edge in sources):
                return found
            new = [source for source, _ in sources if source not in seen]
            seen.update(new)
            stack.extend(new)  # what the body returns comes last, and is looked at first
        return value

    def _moved_from(self, value: Value) -> Value | None:
        """The first value with a scope behind moves and other names."""
        seen = {value}
        while sources := [s for s, edge in self._sources.get(value, ()) if edge != Edge.COMPUTE and s not in seen]:
            value = sources[0]
            seen.add(value)
            if self.graph.scope(value[0]):
                return value
        return None

    def _origins(self) -> dict[Value, int | str]:
        """For every value: a leaf, ``"none"`` (no argument's data), or ``"mixed"``; absent while unknown."""
        origins: dict[Value, int | str] = dict(self._leaves)
        work = list(self._values)
        while work:
            changed: list[Value] = []
            for value in work:
                if value in self._leaves:
                    continue
                new = self._origin(value, origins)
                if new is not None and new != origins.get(value):
                    origins[value] = new
                    changed.extend(user for user, _ in self.users.get(value, ()))
            work = list(dict.fromkeys(changed))
        return origins

    def _origin(self, value: Value, origins: Mapping[Value, int | str]) -> int | str | None:
        sources = self._sources[value]
        if not sources:
            return "none" if self.graph.instructions[value[0]].is_free else "mixed"
        found = {origins[s] for s, _ in sources if s in origins}
        if not found:
            return None
        if found <= {"none"}:
            return "none"
        if any(edge == Edge.COMPUTE for _, edge in sources):
            return "mixed"
        data = found - {"none"}
        return next(iter(data)) if len(data) == 1 else "mixed"

    def _reads(self) -> set[Value]:
        """Values that the backward pass reads, directly or behind moves."""
        late = ("backward", "recompute")
        readers = {source for value in self._values if self.phases[value] in late for source, _ in self._sources[value]}
        # A compiler fuses forward operations that it repeats into the backward ones that read them.
        for at, instruction in self.graph.instructions.items():
            if instruction.opcode == "fusion" and scope_phase(self.graph.scope(at)) in late:
                readers.update((operand, ()) for operand in instruction.proto.operand_ids)
        return self._spread(readers, lambda value: [e for e in self._sources.get(value, ()) if e[1] != Edge.COMPUTE])

    def _computed_with(self) -> set[int]:
        """The leaves whose data the forward or the backward pass computes with."""
        return {
            origin
            for value, origin in self._copies.items()
            if isinstance(origin, int)
            and any(edge == Edge.COMPUTE and self._named.get(u[0]) is not None for u, edge in self.users.get(value, ()))
        }

    def follow_gradients(self, replaced: Mapping[Value, int]) -> None:
        """Find the gradients, from the outputs that replace the leaves or report on them.

        Args:
            replaced: the leaf that every array of the entry's result replaces or is the gradient of.
        """
        # A gradient also feeds the momenta of its leaf; the leaf is the one that the passes compute with.
        outputs = sorted(replaced.items(), key=lambda item: not self.is_differentiated(item[1]))
        summed = self._summed()
        for output, leaf in outputs:
            size = self.graph.num_elements(output)
            if size <= 1:
                continue
            seen, border = {output}, [output]
            while border:
                value = border.pop()
                backward = self.phases.get(value) == "backward"
                if backward or value in summed:
                    self._gradients.setdefault(value, leaf)
                for source, edge in self._sources.get(value, ()):
                    same_size = self.graph.num_elements(source) == size
                    sums = same_size and self.graph.instructions[value[0]].opcode in _ELEMENTWISE
                    follows = edge != Edge.COMPUTE or sums if backward else same_size
                    if follows and source not in seen and not self._is_argument_data(source):
                        seen.add(source)
                        border.append(source)

    def _summed(self) -> set[Value]:
        """Values of the update that are made of cotangents and nothing else: accumulators, clipped gradients."""

        def updated(value: Value) -> list[tuple[Value, Edge]]:
            size = self.graph.num_elements(value)
            return [
                e
                for e in self.users.get(value, ())
                if self.phases.get(e[0]) == "update" and self.graph.num_elements(e[0]) == size
            ]

        made = [v for v in self._values if self.graph.num_elements(v) > 1 and not self.is_constant(v)]
        cotangents = self._spread([v for v in made if self.phases[v] == "backward"], updated)
        others = [v for v in made if self.phases[v] in ("forward", "recompute") or self.copy_of(v) is not None]
        mixed = self._spread(others, updated)
        return {v for v in cotangents - mixed if self.phases[v] == "update"}

    def _is_argument_data(self, value: Value) -> bool:
        return isinstance(self._copies.get(value), int) and self.phases.get(value) != "backward"

    @staticmethod
    def _spread(seeds: Iterable[Value], step: Callable[[Value], Iterable[tuple[Value, Edge]]]) -> set[Value]:
        reached = set(seeds)
        border = list(reached)
        while border:
            for new, _ in step(border.pop()):
                if new not in reached:
                    reached.add(new)
                    border.append(new)
        return reached
