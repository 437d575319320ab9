"""Classify the values of a program by how it makes and uses them: pass, copied argument, gradient.

The classification uses no names that people choose. JAX records the transformation that made an operation (`jvp` for
the forward pass, `transpose` for the backward pass, `rematted_computation` for recomputation). Everything else follows
from the edges of the graph:

- an operation outside both passes that depends on the backward pass belongs to the **update**;
- a value is a **copy** of an argument if only moves and conversions lie between the two;
- an **activation** is made in the forward pass and read, possibly after moves, in the backward pass;
- the **gradient** of a leaf is the backward pass's input to the output that replaces the leaf. The search starts at
  that output and follows values with the same number of elements.

Known limits: a scatter into zeros counts as computed. If a leaf is updated in another shape than its own, its gradient
stays a cotangent.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence

from ..hlo import Edge, Graph, Value, reachable
from ._passes import Pass, Passes

# Operations of the backward pass after which a cotangent is still the cotangent of the same value.
_ELEMENTWISE = {"add", "all-reduce", "all-reduce-start", "divide", "multiply", "negate", "select", "subtract"}
# Operations that add up the parts of a gradient on different devices.
_COLLECTIVES = {"all-reduce", "all-reduce-start", "reduce-scatter"}
_REDUCTIONS = {"reduce", "reduce-window"}
_PRODUCTS = {"convolution", "dot"}
# Operations that do not work element by element: even a result of the operand's size is another value.
_MIXING = {"cholesky", "convolution", "custom-call", "dot", "fft", "gather", "scatter", "sort", "triangular-solve"}


class Dataflow:
    """Passes, copies, activations and gradients of a program's values.

    This object is mutated: `follow_gradients` adds the gradients.

    Args:
        graph: the program.
        leaves: argument leaf of each array of the entry's parameters.
    """

    def __init__(self, graph: Graph, leaves: Mapping[Value, int]) -> None:
        self.graph = graph
        self._leaves = leaves
        self._values = list(graph.values())
        self._sources = {value: graph.sources(value) for value in self._values}
        self.users: dict[Value, list[tuple[Value, Edge]]] = {}
        for value, sources in self._sources.items():
            for source, edge in sources:
                self.users.setdefault(source, []).append((value, edge))
        self._scopes = {at: graph.scope(at) for at in graph.instructions}
        self._names_after: dict[int, int | None] = {}
        self._copies = self._origins()
        self._named = self._named_passes()
        self.merged = set[Value]()
        self.partial = set[Value]()
        self.phases = self._phases()
        self._read_backward = self._reads()
        self._differentiated = self._computed_with()
        self._gradients: dict[Value, int] = {}

    def phase(self, value: Value) -> Pass:
        """Return the pass that makes a value."""
        if value in self.phases:
            return self.phases[value]
        at = self._named_by(value)  # a tuple of arrays, for which `phases` has no entry
        return (self._named[at] if at is not None else None) or "forward"

    def copy_of(self, value: Value) -> int | None:
        """Return the leaf of which a value is a copy; None if it is no copy."""
        origin = self._copies.get(value)
        return origin if isinstance(origin, int) else None

    def gradient_of(self, value: Value) -> int | None:
        """Return the leaf whose cotangent, or accumulator of cotangents, a value is; None for other values."""
        return self._gradients.get(value)

    def is_activation(self, value: Value) -> bool:
        """Return whether a value is data of the forward pass for the backward pass, or the backward pass's move of it.

        A move is a copy, such as a slice of a stack, whose data the forward pass computed.
        """
        maker = self._maker(value) if self.phase(value) == "backward" else value
        return value in self._read_backward and maker is not None and self.phase(maker) == "forward"

    def is_read_backward(self, value: Value) -> bool:
        """Return whether the backward pass reads a value, directly or after moves."""
        return value in self._read_backward

    def is_of_a_pass(self, value: Value) -> bool:
        """Return whether JAX made a value in the forward or the backward pass of a differentiation."""
        return self._named.get(value[0]) is not None or self.phase(value) in ("backward", "recompute")

    def is_constant(self, value: Value) -> bool:
        """Return whether a value depends on no argument, such as zeros."""
        return self._copies.get(value) == "none"

    def is_scratch(self, value: Value) -> bool:
        """Return whether the compiler added a value for an operation: workspace, indices, parts of an expansion."""
        graph, made = self.graph, self._made_as(value)
        if graph.instructions[made[0]].opcode == "custom-call" and any(made[1]):
            return graph.item_type(made)[0] in ("s8", "u8")  # a library's kernel takes its workspace as bytes
        if not graph.is_floating(value) and (self.phase(value) == "backward" or self.is_constant(value)):
            return True
        is_nameless = not (self._scopes[made[0]] or self._scopes[value[0]])
        return is_nameless and self._maker(value) == made

    def standing_for(self, value: Value) -> Value:
        """Return the value that determines the role of a buffer.

        For a loop's state inside the loop, and for an empty buffer that a loop fills, this is the result of the loop.
        Otherwise it is the value itself.
        """
        if (loop := self.graph.loop_of(value)) is not None:
            return (loop, value[1])
        if not self.is_constant(value):
            return value
        names = reachable([value], lambda one: [user for user, edge in self.users.get(one, ()) if edge == Edge.ALIAS])
        loops = (one for one in names if self.graph.instructions[one[0]].opcode == "while")
        return next((loop for loop in loops if not self.is_constant(loop)), value)

    def is_differentiated(self, leaf: int) -> bool:
        """Return whether the forward or the backward pass computes with the data of an argument leaf."""
        return leaf in self._differentiated

    def sources(self, value: Value) -> Sequence[tuple[Value, Edge]]:
        """Return the (value, edge) pairs from which a value is made; empty for arguments and constants."""
        return self._sources.get(value, ())

    def same_size(self, value: Value, *, through_backward: bool = False) -> Iterator[Value]:
        """Yield the values of equal size from which a value is made element by element, including itself.

        Args:
            value: where to start.
            through_backward: whether to continue behind values of the backward pass. In the backward pass of a product,
                the cotangent of each factor contains the data of the other factor.
        """
        size = self.graph.num_elements(value)

        def made_of(found: Value) -> list[Value]:
            mixes = self.graph.instructions[found[0]].opcode in _MIXING and self.copy_of(found) is None
            if mixes or (self.phase(found) == "backward" and not through_backward):
                return []
            return [source for source, _ in self.sources(found) if self.graph.num_elements(source) == size]

        return reachable([value], made_of)

    def described(self, value: Value) -> tuple[str, str]:
        """Return the scope and the source line of a value.

        For a value that was only moved (stacked by a loop, copied to another memory), they are those of the operation
        that computed its data. For a value without a scope, they are those of its nearest source or user with one.
        """
        at = self._named_by(value)
        return (self._scopes[at], self.graph.source(at)) if at is not None else ("", "")

    def _named_by(self, value: Value) -> int | None:
        """Return the instruction whose scope describes a value; None without any."""
        maker = self._maker(value)
        for found in (maker, value):
            if found is not None and self._scopes[found[0]]:
                return found[0]
        # The compiler expands an operation into several, of which only the last has a scope. So a computed value first
        # tries the scope of its users. A moved value first tries the scope of its source.
        start = maker or value
        ways = [lambda: self._nearest_scope([start], self._sources), lambda: self._named_after(start[0])]
        if maker is not None or self.is_constant(value):
            ways.reverse()
        return next((at for way in ways if (at := way()) is not None), None)

    def _named_after(self, at: int) -> int | None:
        """Return the first instruction with a scope among the direct and indirect users of an instruction, or None.

        The result is cached by instruction, since a tuple may have thousands of elements.
        """
        if at not in self._names_after:
            self._names_after[at] = self._nearest_scope(self.graph.results(at), self.users)
        return self._names_after[at]

    def _nearest_scope(self, start: list[Value], step: Mapping[Value, Sequence[tuple[Value, Edge]]]) -> int | None:
        """Return the first instruction with a scope that is reachable over the edges in `step`, or None."""
        found = reachable(start, lambda value: [new for new, _ in step.get(value, ())])
        return next((at for at, _ in found if self._scopes[at]), None)

    def _maker(self, value: Value) -> Value | None:
        """Return the operation that computed a value's data, before moves and aliases; None for data of an argument."""
        seen, border, starts = {value}, collections.deque([value]), collections.deque[Value]()
        while border or starts:
            found = border.popleft() if border else starts.popleft()
            sources = self._sources.get(found, ())
            if any(edge == Edge.COMPUTE for _, edge in sources) and not self.is_constant(found):
                return found
            new = [s for s, edge in sources if edge != Edge.COMPUTE and s not in seen and not self.is_constant(s)]
            seen.update(new)
            if self.graph.is_loop_state(found):
                # Search the values of a loop's iterations before its initial values.
                begin = {source for source, _ in sources[:1]}
                starts.extend(one for one in new if one in begin)
                new = [one for one in new if one not in begin]
            border.extend(new)
        return None

    def _named_passes(self) -> dict[int, Pass | None]:
        """Return the pass that the scope of each instruction names."""
        passes = Passes(self._scopes.values())
        phases: dict[str, Pass | None] = {scope: passes.phase(scope) for scope in set(self._scopes.values())}
        named: dict[int, Pass | None] = {at: phases[scope] for at, scope in self._scopes.items()}
        if inner := {at for at, scope in self._scopes.items() if passes.is_open(scope)}:
            # Such an inner gradient belongs to the outer forward pass if the outer backward pass depends on it.
            late = (v for v in self._values if named[v[0]] in ("backward", "recompute") and v[0] not in inner)
            needed = {at for at, _ in reachable(late, lambda value: [source for source, _ in self._sources[value]])}
            named |= {at: "forward" for at in inner & needed}
        return named

    def _phases(self) -> dict[Value, Pass]:
        named = self._named
        of_late_passes = (v for v in self._values if named[v[0]] in ("backward", "recompute"))
        late = set(reachable(of_late_passes, lambda value: [user for user, _ in self.users.get(value, ())]))
        phases: dict[Value, Pass] = {}
        for value in self._values:
            # The scope of a fusion is that of one of its operations, so use the operation that makes each result.
            made = self._made_as(value)
            own = named[made[0]]
            if own is None and not self._scopes[made[0]]:
                own = self._pass_of_nameless(value, made)
            elif own is None and (maker := self._maker(made)) not in (None, made):
                own = named[maker[0]]  # a loop's stack belongs to the pass of the operation that made its data
            default: Pass = "update" if value in late else "forward"
            phases[value] = default if own is None else own
        merged: dict[Value, Pass] = dict.fromkeys(self._merged(phases), "forward")
        return phases | merged

    def _merged(self, phases: Mapping[Value, Pass]) -> set[Value]:
        """Return the values of the recomputation that the forward pass reads.

        If nothing separates the two computations, a compiler may merge them (the CPU compiler does so outside loops).
        Then the value is kept, not recomputed.
        """

        def recomputed(value: Value) -> list[Value]:
            return [source for source, _ in self._sources[value] if phases[source] == "recompute"]

        forward = [v for v in self._values if phases[v] == "forward" and self._named[v[0]] == "forward"]
        self.merged = set(reachable((source for v in forward for source in recomputed(v)), recomputed))
        return self.merged

    def _pass_of_nameless(self, value: Value, made: Value) -> Pass | None:
        """Return the pass of a value that the compiler added.

        The first of these that has a pass decides: the value that it copies, the conditional of its branch, and the
        operation that it was made for.
        """
        moved = self._moved_from(made)
        for at in (moved[0] if moved else None, value[0], self._named_by(value)):
            if at is not None and (found := self._named[at]) is not None:
                return found
        return None

    def _made_as(self, value: Value) -> Value:
        """Return the operation behind a value's aliases; for a loop's state, the operation in the loop's body."""
        seen, stack = {value}, [value]
        while stack:
            found = stack.pop()
            sources = self._sources[found]
            if not sources or any(edge != Edge.ALIAS for _, edge in sources):
                return found
            new = [source for source, _ in sources if source not in seen]
            seen.update(new)
            stack.extend(new)  # the body's result is the last source, so it is visited first
        return value

    def _moved_from(self, value: Value) -> Value | None:
        """Return the first value with a scope behind moves and aliases."""
        seen = {value}
        while sources := [s for s, edge in self._sources.get(value, ()) if edge != Edge.COMPUTE and s not in seen]:
            value = sources[0]
            seen.add(value)
            if self._scopes[value[0]]:
                return value
        return None

    def _origins(self) -> dict[Value, int | str]:
        """Return the origin of each value: a leaf, ``"none"`` (no argument) or ``"mixed"``; absent if unknown."""
        # A fixpoint iteration, since loops make the graph cyclic: a changed origin revisits the users of the value.
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
        """Return the values that the backward pass reads, directly or after moves."""
        late = ("backward", "recompute")
        readers = {source for value in self._values if self.phases[value] in late for source, _ in self._sources[value]}
        # A compiler may repeat forward operations inside the backward fusions that read them. Then the backward pass
        # reads the fusion's operands.
        for at, instruction in self.graph.instructions.items():
            if instruction.opcode == "fusion" and self._named[at] in late:
                readers.update((operand, ()) for operand in instruction.proto.operand_ids)
        return set(reachable(readers, lambda value: [s for s, edge in self.sources(value) if edge != Edge.COMPUTE]))

    def _computed_with(self) -> set[int]:
        """Return the leaves whose data the forward or the backward pass computes with."""
        return {
            origin
            for value, origin in self._copies.items()
            if isinstance(origin, int)
            and any(edge == Edge.COMPUTE and self._named.get(u[0]) is not None for u, edge in self.users.get(value, ()))
        }

    def follow_gradients(self, replaced: Mapping[Value, int]) -> None:
        """Find the gradients by a search backwards from the outputs.

        Args:
            replaced: leaf that each array of the entry's result replaces, or whose gradient it is.
        """
        # A gradient also leads to the new momenta of its leaf. Differentiated leaves come first, so that the gradient
        # is assigned to the parameter and not to a momentum.
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
                    opcode = self.graph.instructions[value[0]].opcode
                    sums = (same_size and opcode in _ELEMENTWISE) or opcode in _COLLECTIVES
                    follows = edge != Edge.COMPUTE or sums if backward else same_size
                    if follows and source not in seen and not self._is_argument_data(source):
                        seen.add(source)
                        border.append(source)
        dims = {leaf: self.graph.shape(value).dimensions for value, leaf in self._leaves.items()}
        for value, leaf in list(self._gradients.items()):
            # Not for vectors: the gradient of a bias is a sum of cotangents of activations.
            if sum(dim > 1 for dim in dims.get(leaf, ())) > 1:
                self._gradients.update({one: leaf for one in self._summands(value) if one not in self._gradients})

    def _summands(self, total: Value) -> set[Value]:
        """Return the stacked gradients of a leaf (per example, task or microbatch) whose sum is a value.

        If a weight is added to each example, the cotangent of the activation has the same form. It is not a stack of
        gradients, since products of the backward pass use it, too.
        """
        many = total
        # A compiler may reduce in several steps.
        is_split = True
        while (one := self._added_up(made := self._made_as(many))) is not None:
            # A compiler may split a product into parts and sum them. Then the sum has no scope, or that of the product.
            is_sum = self.graph.instructions[made[0]].opcode in _REDUCTIONS
            is_split = is_split and is_sum and self._scopes[made[0]] in ("", self._scopes[self._made_as(one)[0]])
            many = one
        if many == total:
            return set()

        def alike(step: Mapping[Value, Sequence[tuple[Value, Edge]]], value: Value) -> list[Value]:
            return [one for one, _ in step.get(value, ()) if self._is_summand(one, many)]

        def made_of(value: Value) -> list[Value]:
            return [] if self.graph.instructions[value[0]].opcode in _MIXING else alike(self._sources, value)

        parts = set(reachable([many], made_of))
        readers = reachable(parts, lambda value: alike(self.users, value))
        goes_on = any(
            self.graph.instructions[user[0]].opcode in _MIXING and self.phases[user] == "backward"
            for value in readers
            for user, _ in self.users.get(value, ())
            if user not in parts
        )
        if is_split:
            self.partial |= parts
        return set() if goes_on else parts

    def _added_up(self, value: Value) -> Value | None:
        """Return the array whose sum along an axis a value is; a weighted sum, as of clipped gradients, counts, too."""
        instruction = self.graph.instructions[value[0]]
        operands: list[Value] = [(at, ()) for at in instruction.proto.operand_ids]
        if instruction.opcode in _REDUCTIONS:
            return operands[value[1][0] if value[1] else 0]
        if instruction.opcode in _PRODUCTS and len(operands) == 2 and not value[1]:
            weights, many = sorted(operands, key=self.graph.num_elements)
            count = self.graph.num_elements(weights)
            if 1 < count and count * self.graph.num_elements(value) == self.graph.num_elements(many):
                return many
        return None

    def _is_summand(self, value: Value, like: Value) -> bool:
        graph = self.graph
        late = self.phases[value] in ("backward", "update") and not self._is_argument_data(value)
        return late and graph.num_elements(value) == graph.num_elements(like)

    def _summed(self) -> set[Value]:
        """Return the values of the update that depend only on cotangents: accumulators, clipped gradients."""

        def updated(value: Value) -> list[Value]:
            size = self.graph.num_elements(value)
            users = [user for user, _ in self.users.get(value, ()) if self.phases.get(user) == "update"]
            return [u for u in users if self.graph.num_elements(u) == size or self._added_up(u) is not None]

        made = [v for v in self._values if self.graph.num_elements(v) > 1 and not self.is_constant(v)]
        cotangents = set(reachable((v for v in made if self.phases[v] == "backward"), updated))
        others = (v for v in made if self.phases[v] in ("forward", "recompute") or self.copy_of(v) is not None)
        return {v for v in cotangents.difference(reachable(others, updated)) if self.phases[v] == "update"}

    def _is_argument_data(self, value: Value) -> bool:
        return isinstance(self._copies.get(value), int) and self.phases.get(value) != "backward"
