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

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ._graph import Edge, Graph, Value

Pass = Literal["forward", "recompute", "backward", "update"]

# What may happen to a cotangent inside the backward pass without making it another value's.
_ELEMENTWISE = {"add", "all-reduce", "all-reduce-start", "divide", "multiply", "negate", "select", "subtract"}
_BACKWARD = re.compile(r"transpose\(.*\)")
_FORWARD = re.compile(r"(jvp|vmap|checkpoint|remat)?\(?.*jvp\(.*\)")


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
    if any(_BACKWARD.fullmatch(part) for part in parts):
        return "recompute" if "rematted_computation" in parts else "backward"
    return "forward" if any(_FORWARD.fullmatch(part) for part in parts) else None


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
        replaced: the leaf that every array of the entry's result replaces or reports on, where there is one.
    """

    def __init__(self, graph: Graph, leaves: Mapping[Value, int], replaced: Mapping[Value, int]) -> None:
        self.graph = graph
        self._leaves = leaves
        self._values = list(graph.values())
        self._sources = {value: graph.sources(value) for value in self._values}
        self.users: dict[Value, list[tuple[Value, Edge]]] = {}
        for value, sources in self._sources.items():
            for source, edge in sources:
                self.users.setdefault(source, []).append((value, edge))
        self._named: dict[int, Pass | None] = {at: scope_phase(graph.scope(at)) for at in graph.instructions}
        self.phases = self._phases()
        self._copies = self._origins()
        self._read_backward = self._reads()
        self._gradients = self._cotangents(replaced)

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

    def is_constant(self, value: Value) -> bool:
        """Whether a value holds no data of any argument, such as zeros."""
        return self._copies.get(value) == "none"

    def is_differentiated(self, leaf: int) -> bool:
        """Whether the forward or the backward pass computes with the data of an argument leaf."""
        data = (value for value, origin in self._copies.items() if origin == leaf)
        return any(
            edge == Edge.COMPUTE and self._named.get(user[0]) is not None
            for value in data
            for user, edge in self.users.get(value, ())
        )

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
        seen, border = {value}, [value]
        while border:
            found = border.pop(0)
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

    def _cotangents(self, replaced: Mapping[Value, int]) -> dict[Value, int]:
        gradients: dict[Value, int] = {}
        for output, leaf in replaced.items():
            size = self.graph.num_elements(output)
            if size <= 1:
                continue
            seen, border = {output}, [output]
            while border:
                value = border.pop()
                backward = self.phases.get(value) == "backward"
                if backward:
                    gradients.setdefault(value, leaf)
                for source, edge in self._sources.get(value, ()):
                    same_size = self.graph.num_elements(source) == size
                    sums = same_size and self.graph.instructions[value[0]].opcode in _ELEMENTWISE
                    follows = edge != Edge.COMPUTE or sums if backward else same_size
                    if follows and source not in seen and not self._is_argument_data(source):
                        seen.add(source)
                        border.append(source)
        return gradients

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
