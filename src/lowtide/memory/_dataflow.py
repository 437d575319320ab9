"""Classify the values of a program by how the program makes and uses them: by pass, as copies, as gradients.

The passes of a gradient are the forward pass, recomputation, the backward pass and the update of the arguments. The
classification uses no names that people choose. `Passes` reads the scopes in which JAX records the transformation that
made an operation (`jvp`, `transpose`, `rematted_computation`). `Dataflow` follows the edges of the graph.

Known limits: a scatter into zeros counts as computed, not as a copy. If a leaf is updated in another shape than its
own, its gradient counts as a cotangent.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ..hlo import Edge, Graph, Value, reachable

Pass = Literal["forward", "recompute", "backward", "update"]
# Operations of the backward pass after which a cotangent is still the cotangent of the same value.
_ELEMENTWISE = {"add", "all-reduce", "all-reduce-start", "divide", "multiply", "negate", "select", "subtract"}
# Operations that add up the parts of a gradient on different devices.
_COLLECTIVES = {"all-reduce", "all-reduce-start", "reduce-scatter"}
_REDUCTIONS = {"reduce", "reduce-window"}
_PRODUCTS = {"convolution", "dot"}
# Operations that do not work element by element, so a result of the operand's size is another value.
_MIXING = {"cholesky", "convolution", "custom-call", "dot", "fft", "gather", "scatter", "sort", "triangular-solve"}
# Transformations that JAX nests in a scope: vmap(transpose(jvp(mlp))).
_TRANSFORMATION = re.compile(r"(jvp|transpose|vmap|pmap|checkpoint|remat|shard_map)\((.*)\)")
# JAX marks recomputation in a separate part of the scope, or with `jax_remat3`: transpose(jvp(rematted_computation)).
_RECOMPUTATION = re.compile(r"(?:^|[/(])rematted_computation[/)]")
_FORWARD, _BACKWARD = "f", "b"


class Dataflow:
    """Passes, copies, activations and gradients of a program's values.

    - The **update** consists of the operations outside of the other passes that depend on the backward pass.
    - A value is a **copy** of an argument if only moves and conversions lie between the argument and the value.
    - An **activation** is made in the forward pass and read, possibly after moves, in the backward pass.
    - The **gradient** of a leaf is the value of the backward pass from which the leaf's next value, an output, is
      computed. The search starts at this output and follows values with the same number of elements.

    Mutable: `follow_gradients` adds the gradients. `leaves` maps each array of the program's parameters to the index of
    its argument leaf.
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
        self._scopes = {instr_id: graph.scope(instr_id) for instr_id in graph.instructions}
        self._user_scopes: dict[int, int | None] = {}
        self._copies = self._find_origins()
        self._passes = self._find_passes()
        self.partial = set[Value]()
        self.phases = self._find_phases()
        self.read_backward = self._find_backward_reads()
        self._differentiated = self._find_differentiated()
        self._gradients: dict[Value, int] = {}

    def phase(self, value: Value) -> Pass:
        """Return the pass that makes a value."""
        if value in self.phases:
            return self.phases[value]
        instr_id = self._scope_instruction(value)  # a tuple of arrays, for which `phases` has no entry
        return (self._passes[instr_id] if instr_id is not None else None) or "forward"

    def copy_of(self, value: Value) -> int | None:
        """Return the leaf of which a value is a copy; None if the value is not a copy."""
        origin = self._copies.get(value)
        return origin if isinstance(origin, int) else None

    def gradient_of(self, value: Value) -> int | None:
        """Return the leaf of which a value is the gradient or an accumulator of gradients; None for other values."""
        return self._gradients.get(value)

    def is_activation(self, value: Value) -> bool:
        """Return whether the forward pass made a value's data, and the backward pass reads it, possibly after moves."""
        # A value of the backward pass may be a move, such as a slice of a stack, of data from the forward pass.
        maker = self._maker(value) if self.phase(value) == "backward" else value
        return value in self.read_backward and maker is not None and self.phase(maker) == "forward"

    def is_in_pass(self, value: Value) -> bool:
        """Return whether JAX made a value in the forward or the backward pass of a differentiation."""
        return self._passes.get(value[0]) is not None or self.phase(value) in ("backward", "recompute")

    def is_constant(self, value: Value) -> bool:
        """Return whether a value depends on no argument, such as zeros."""
        return self._copies.get(value) == "none"

    def is_scratch(self, value: Value) -> bool:
        """Return whether the compiler added a value to run an operation: a workspace, indices, intermediate steps."""
        graph, operation = self.graph, self._resolve_aliases(value)
        if graph.instructions[operation[0]].opcode == "custom-call" and any(operation[1]):
            return graph.item_type(operation)[0] in ("s8", "u8")  # a library's kernel takes its workspace as bytes
        if not graph.is_floating(value) and (self.phase(value) == "backward" or self.is_constant(value)):
            return True
        is_nameless = not (self._scopes[operation[0]] or self._scopes[value[0]])
        return is_nameless and self._maker(value) == operation

    def representative(self, value: Value) -> Value:
        """Return the value that determines the role of a buffer with `value`: usually `value` itself."""
        # For a loop's state inside the loop, and for an empty buffer that a loop fills, it is the loop's result.
        if (loop := self.graph.loop_of(value)) is not None:
            return (loop, value[1])
        if not self.is_constant(value):
            return value
        names = reachable([value], lambda node: [user for user, edge in self.users.get(node, ()) if edge == Edge.ALIAS])
        loops = (node for node in names if self.graph.instructions[node[0]].opcode == "while")
        return next((loop for loop in loops if not self.is_constant(loop)), value)

    def is_differentiated(self, leaf: int) -> bool:
        """Return whether the forward or the backward pass computes with the data of an argument leaf."""
        return leaf in self._differentiated

    def sources(self, value: Value) -> Sequence[tuple[Value, Edge]]:
        """Return the (value, edge) pairs from which a value is made; empty for arguments and constants."""
        return self._sources.get(value, ())

    def same_size_sources(self, value: Value, *, through_backward: bool = False) -> Iterator[Value]:
        """Yield `value`, and the values of equal size from which it is made element by element."""
        # Without `through_backward` the search stops at values of the backward pass. There, the cotangent of each
        # factor of a product contains the data of the other factor.
        size = self.graph.num_elements(value)

        def elementwise_sources(node: Value) -> list[Value]:
            is_mixing = self.graph.instructions[node[0]].opcode in _MIXING and self.copy_of(node) is None
            if is_mixing or (self.phase(node) == "backward" and not through_backward):
                return []
            return [source for source, _ in self.sources(node) if self.graph.num_elements(source) == size]

        return reachable([value], elementwise_sources)

    def scope_and_source(self, value: Value) -> tuple[str, str]:
        """Return the scope and the source line of a value."""
        # For a value that was only moved (stacked by a loop, copied to another memory), they are those of the operation
        # that computed its data. For a value without a scope, they are those of its nearest source or user with one.
        instr_id = self._scope_instruction(value)
        return (self._scopes[instr_id], self.graph.source(instr_id)) if instr_id is not None else ("", "")

    def _scope_instruction(self, value: Value) -> int | None:
        """Return the instruction whose scope describes a value, or None."""
        maker = self._maker(value)
        for candidate in (maker, value):
            if candidate is not None and self._scopes[candidate[0]]:
                return candidate[0]
        # The compiler expands an operation into several, of which only the last has a scope. So a computed value first
        # tries the scope of its users. A moved value first tries the scope of its source.
        start = maker or value
        searches = [lambda: self._nearest_scope([start], self._sources), lambda: self._user_scope(start[0])]
        if maker is not None or self.is_constant(value):
            searches.reverse()
        return next((instr_id for search in searches if (instr_id := search()) is not None), None)

    def _user_scope(self, instr_id: int) -> int | None:
        """Return the first instruction with a scope among the direct and indirect users of an instruction, or None."""
        if instr_id not in self._user_scopes:  # cached, since a tuple may have thousands of elements
            self._user_scopes[instr_id] = self._nearest_scope(self.graph.results(instr_id), self.users)
        return self._user_scopes[instr_id]

    def _nearest_scope(self, start: list[Value], edges: Mapping[Value, Sequence[tuple[Value, Edge]]]) -> int | None:
        """Return the first instruction with a scope that is reachable over `edges`, or None."""
        values = reachable(start, lambda value: [neighbour for neighbour, _ in edges.get(value, ())])
        return next((instr_id for instr_id, _ in values if self._scopes[instr_id]), None)

    def _maker(self, value: Value) -> Value | None:
        """Return the operation that computed a value, behind moves and aliases; None for arguments and constants."""
        visited, frontier, initial_frontier = {value}, collections.deque([value]), collections.deque[Value]()
        while frontier or initial_frontier:
            candidate = frontier.popleft() if frontier else initial_frontier.popleft()
            sources = self._sources.get(candidate, ())
            if any(edge == Edge.COMPUTE for _, edge in sources) and not self.is_constant(candidate):
                return candidate
            unvisited = [
                s for s, edge in sources if edge != Edge.COMPUTE and s not in visited and not self.is_constant(s)
            ]
            visited.update(unvisited)
            if self.graph.instructions[candidate[0]].opcode == "while" or self.graph.loop_of(candidate) is not None:
                # Search the values of a loop's iterations before its initial values.
                initial_values = {source for source, _ in sources[:1]}
                initial_frontier.extend(source for source in unvisited if source in initial_values)
                unvisited = [source for source in unvisited if source not in initial_values]
            frontier.extend(unvisited)
        return None

    def _find_passes(self) -> dict[int, Pass | None]:
        """Map each instruction to the pass that its scope names; None if the scope names no pass."""
        passes = Passes(self._scopes.values())
        phases: dict[str, Pass | None] = {scope: passes.phase(scope) for scope in set(self._scopes.values())}
        scope_passes: dict[int, Pass | None] = {instr_id: phases[scope] for instr_id, scope in self._scopes.items()}
        if open_ids := {instr_id for instr_id, scope in self._scopes.items() if passes.is_open(scope)}:
            # An inner gradient belongs to the outer forward pass if the outer backward pass depends on it.
            late_values = (
                v for v in self._values if scope_passes[v[0]] in ("backward", "recompute") and v[0] not in open_ids
            )
            required_values = reachable(late_values, lambda value: [source for source, _ in self._sources[value]])
            for instr_id, _ in required_values:
                if instr_id in open_ids:
                    scope_passes[instr_id] = "forward"
        return scope_passes

    def _find_phases(self) -> dict[Value, Pass]:
        passes = self._passes
        late_values = (v for v in self._values if passes[v[0]] in ("backward", "recompute"))
        dependents = set(reachable(late_values, lambda value: [user for user, _ in self.users.get(value, ())]))
        phases: dict[Value, Pass] = {}
        for value in self._values:
            # The scope of a fusion is that of one of its operations, so use the operation that makes each result.
            operation = self._resolve_aliases(value)
            own_pass = passes[operation[0]]
            if own_pass is None and not self._scopes[operation[0]]:
                own_pass = self._pass_without_scope(value, operation)
            elif own_pass is None and (maker := self._maker(operation)) not in (None, operation):
                own_pass = passes[maker[0]]  # a loop's stack belongs to the pass of the operation that made its data
            default: Pass = "update" if value in dependents else "forward"
            phases[value] = default if own_pass is None else own_pass
        self.merged = self._find_merged(phases)
        merged: dict[Value, Pass] = dict.fromkeys(self.merged, "forward")
        return phases | merged

    def _find_merged(self, phases: Mapping[Value, Pass]) -> set[Value]:
        """Return the recomputed values that the forward pass also reads; the program keeps them for both passes."""
        # A compiler may merge a computation and its recomputation if nothing separates them, as on a CPU outside loops.

        def recomputed_sources(value: Value) -> list[Value]:
            return [source for source, _ in self._sources[value] if phases[source] == "recompute"]

        forward_values = [v for v in self._values if phases[v] == "forward" and self._passes[v[0]] == "forward"]
        return set(reachable((source for v in forward_values for source in recomputed_sources(v)), recomputed_sources))

    def _pass_without_scope(self, value: Value, operation: Value) -> Pass | None:
        """Return the pass of a value that the compiler added."""
        # Try the value that it copies, the conditional whose result it is, and the operation that it was made for.
        source = self._scoped_source(operation)
        for instr_id in (source[0] if source else None, value[0], self._scope_instruction(value)):
            if instr_id is not None and (own_pass := self._passes[instr_id]) is not None:
                return own_pass
        return None

    def _resolve_aliases(self, value: Value) -> Value:
        """Return the operation behind a value's aliases; for a loop's state, the operation in the loop's body."""
        visited, stack = {value}, [value]
        while stack:
            candidate = stack.pop()
            sources = self._sources[candidate]
            if not sources or any(edge != Edge.ALIAS for _, edge in sources):
                return candidate
            unvisited = [source for source, _ in sources if source not in visited]
            visited.update(unvisited)
            stack.extend(unvisited)  # the body's result is the last source, so it is visited first
        return value

    def _scoped_source(self, value: Value) -> Value | None:
        """Return the nearest source with a scope behind moves and aliases of a value; None without such a source."""
        visited = {value}
        while sources := [s for s, edge in self._sources.get(value, ()) if edge != Edge.COMPUTE and s not in visited]:
            value = sources[0]
            visited.add(value)
            if self._scopes[value[0]]:
                return value
        return None

    def _find_origins(self) -> dict[Value, int | str]:
        """Map values to their origins: a leaf, ``"none"`` (no argument) or ``"mixed"``; unknown origins are missing."""
        # Loops make the graph cyclic, so iterate to a fixpoint: if an origin changes, visit the value's users again.
        origins: dict[Value, int | str] = dict(self._leaves)
        worklist = list(self._values)
        while worklist:
            next_worklist: list[Value] = []
            for value in worklist:
                if value in self._leaves:
                    continue
                origin = self._origin(value, origins)
                if origin is not None and origin != origins.get(value):
                    origins[value] = origin
                    next_worklist.extend(user for user, _ in self.users.get(value, ()))
            worklist = list(dict.fromkeys(next_worklist))
        return origins

    def _origin(self, value: Value, origins: Mapping[Value, int | str]) -> int | str | None:
        sources = self._sources[value]
        if not sources:
            return "none" if self.graph.instructions[value[0]].is_free else "mixed"
        source_origins = {origins[s] for s, _ in sources if s in origins}
        if not source_origins:
            return None
        if source_origins <= {"none"}:
            return "none"
        if any(edge == Edge.COMPUTE for _, edge in sources):
            return "mixed"
        data_origins = source_origins - {"none"}
        return next(iter(data_origins)) if len(data_origins) == 1 else "mixed"

    def _find_backward_reads(self) -> set[Value]:
        """Return the values that the backward pass reads, directly or after moves."""
        late_passes = ("backward", "recompute")
        readers = {
            source for value in self._values if self.phases[value] in late_passes for source, _ in self._sources[value]
        }
        # A compiler may repeat forward operations inside the backward fusions that read them. Then the backward pass
        # reads the fusion's operands.
        for instr_id, instruction in self.graph.instructions.items():
            if instruction.opcode == "fusion" and self._passes[instr_id] in late_passes:
                readers.update((operand, ()) for operand in instruction.proto.operand_ids)
        return set(reachable(readers, lambda value: [s for s, edge in self.sources(value) if edge != Edge.COMPUTE]))

    def _find_differentiated(self) -> set[int]:
        """Return the leaves whose data the forward or the backward pass computes with."""
        return {
            origin
            for value, origin in self._copies.items()
            for user, edge in self.users.get(value, ())
            if isinstance(origin, int) and edge == Edge.COMPUTE and self._passes.get(user[0]) is not None
        }

    def follow_gradients(self, replaced: Mapping[Value, int]) -> None:
        """Find the gradients by a search backwards from the outputs; `replaced` is `Owners.replaced`."""
        # A gradient also leads to the new momenta of its leaf. Differentiated leaves come first, so that the gradient
        # is assigned to the parameter and not to a momentum.
        outputs = sorted(replaced.items(), key=lambda item: not self.is_differentiated(item[1]))
        accumulators = self._cotangent_sums()
        for output, leaf in outputs:
            size = self.graph.num_elements(output)
            if size <= 1:
                continue
            visited, frontier = {output}, [output]
            while frontier:
                value = frontier.pop()
                is_backward = self.phases.get(value) == "backward"
                if is_backward or value in accumulators:
                    self._gradients.setdefault(value, leaf)
                for source, edge in self._sources.get(value, ()):
                    is_same_size = self.graph.num_elements(source) == size
                    opcode = self.graph.instructions[value[0]].opcode
                    is_sum = (is_same_size and opcode in _ELEMENTWISE) or opcode in _COLLECTIVES
                    is_followed = edge != Edge.COMPUTE or is_sum if is_backward else is_same_size
                    if is_followed and source not in visited and not self._is_argument_data(source):
                        visited.add(source)
                        frontier.append(source)
        dims = {leaf: self.graph.shape(value).dimensions for value, leaf in self._leaves.items()}
        for value, leaf in list(self._gradients.items()):
            # Skip vectors: the gradient of a bias is a sum of cotangents of activations.
            if sum(dim > 1 for dim in dims.get(leaf, ())) > 1:
                for summand in self._summands(value):
                    self._gradients.setdefault(summand, leaf)

    def _summands(self, total: Value) -> set[Value]:
        """Return the stacked gradients of a leaf (per example, task or microbatch) whose sum is `total`."""
        stack = total
        # A compiler may reduce in several steps.
        is_split = True
        while (operand := self._summed_operand(operation := self._resolve_aliases(stack))) is not None:
            # A compiler may split a product into parts and sum them. Then the sum has no scope, or that of the product.
            is_sum = self.graph.instructions[operation[0]].opcode in _REDUCTIONS
            is_split = (
                is_split
                and is_sum
                and self._scopes[operation[0]] in ("", self._scopes[self._resolve_aliases(operand)[0]])
            )
            stack = operand
        if stack == total:
            return set()

        def is_summand(value: Value) -> bool:
            is_late = self.phases[value] in ("backward", "update") and not self._is_argument_data(value)
            return is_late and self.graph.num_elements(value) == self.graph.num_elements(stack)

        def neighbours(edges: Mapping[Value, Sequence[tuple[Value, Edge]]], value: Value) -> list[Value]:
            return [neighbour for neighbour, _ in edges.get(value, ()) if is_summand(neighbour)]

        def elementwise_sources(value: Value) -> list[Value]:
            return [] if self.graph.instructions[value[0]].opcode in _MIXING else neighbours(self._sources, value)

        summands = set(reachable([stack], elementwise_sources))
        readers = reachable(summands, lambda value: neighbours(self.users, value))
        # If a weight is added to each example, the cotangent of the activations looks like a stack of gradients. Only
        # the cotangent is used by products of the backward pass, too.
        is_cotangent = any(
            self.graph.instructions[user[0]].opcode in _MIXING and self.phases[user] == "backward"
            for value in readers
            for user, _ in self.users.get(value, ())
            if user not in summands
        )
        if is_split:
            self.partial |= summands
        return set() if is_cotangent else summands

    def _summed_operand(self, value: Value) -> Value | None:
        """Return the array whose sum along an axis is this value, perhaps with weights (clipped gradients), or None."""
        instruction = self.graph.instructions[value[0]]
        operands: list[Value] = [(operand_id, ()) for operand_id in instruction.proto.operand_ids]
        if instruction.opcode in _REDUCTIONS:
            return operands[value[1][0] if value[1] else 0]
        if instruction.opcode in _PRODUCTS and len(operands) == 2 and not value[1]:
            weights, stack = sorted(operands, key=self.graph.num_elements)
            count = self.graph.num_elements(weights)
            if 1 < count and count * self.graph.num_elements(value) == self.graph.num_elements(stack):
                return stack
        return None

    def _cotangent_sums(self) -> set[Value]:
        """Return the values of the update that depend only on cotangents: accumulators, clipped gradients."""

        def updates(value: Value) -> list[Value]:
            size = self.graph.num_elements(value)
            users = [user for user, _ in self.users.get(value, ()) if self.phases.get(user) == "update"]
            return [u for u in users if self.graph.num_elements(u) == size or self._summed_operand(u) is not None]

        arrays = [v for v in self._values if self.graph.num_elements(v) > 1 and not self.is_constant(v)]
        cotangents = set(reachable((v for v in arrays if self.phases[v] == "backward"), updates))
        other_values = (v for v in arrays if self.phases[v] in ("forward", "recompute") or self.copy_of(v) is not None)
        return {v for v in cotangents.difference(reachable(other_values, updates)) if self.phases[v] == "update"}

    def _is_argument_data(self, value: Value) -> bool:
        return isinstance(self._copies.get(value), int) and self.phases.get(value) != "backward"


class Passes:
    """The passes of a program's operations; only all scopes together show which forward passes have a backward pass.

    A scope nests the transformations of an operation, the outermost first: ``jvp`` for the forward pass of a gradient,
    ``transpose(jvp)`` for its backward pass. With nested gradients (MAML, a gradient penalty, a PINN) the outer
    gradient decides: the whole inner gradient belongs to the outer forward pass. A ``jvp`` without a transpose is
    forward-mode differentiation (a Hessian-vector product as `jvp` of `grad`); then the next inner gradient decides.

    Examples:
        >>> inner = "jit(step)/jvp(transpose(jvp()))/mul"
        >>> Passes([inner]).phase(inner), Passes([inner, "jit(step)/transpose(jvp(transpose(jvp())))/mul"]).phase(inner)
        ('backward', 'forward')
        >>> scope = "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/tanh"
        >>> Passes([scope]).phase(scope), Passes(["jit(step)/jvp()/transpose"]).phase("jit(step)/jvp()/transpose")
        ('recompute', 'forward')
        >>> scope = "jit(step)/transpose(jvp(rematted_computation))/checkpoint/eval_jaxpr/jvp(jvp())/tanh"
        >>> Passes([scope]).phase(scope)
        'recompute'
    """

    def __init__(self, scopes: Iterable[str]) -> None:
        self._nestings = {levels for scope in set(scopes) if (levels := _levels(scope))}

    def phase(self, scope: str) -> Pass | None:
        """Return the pass that a scope names; None if the scope names no pass."""
        # `levels` has one letter for each differentiation around the operation, the outermost first. The first "b"
        # (backward) decides. A backward pass that an outer gradient differentiates belongs to the outer forward pass.
        levels = _levels(scope)
        index = levels.find(_BACKWARD)
        if index < 0:
            return "forward" if levels else None
        if self._is_transposed(levels, index):
            return "forward"
        return "recompute" if _RECOMPUTATION.search(first_scope(scope)) else "backward"

    def is_open(self, scope: str) -> bool:
        """Return whether scopes leave it open if this inner gradient is a part of an outer forward pass."""
        # Examples: first-order MAML, and a curvature in addition to the gradient. Nothing differentiates the inner
        # gradient.
        levels = _levels(scope)
        index = levels.find(_BACKWARD)
        has_outer = any(
            nesting.startswith(levels[:depth] + _BACKWARD) for nesting in self._nestings for depth in range(index)
        )
        return index > 0 and has_outer and not self._is_transposed(levels, index)

    def _is_transposed(self, levels: str, index: int) -> bool:
        """Return whether an outer gradient differentiates the gradient at this level in reverse mode."""
        prefixes = [levels[:depth] + _BACKWARD + levels[depth + 1 : index + 1] for depth in range(index)]
        return any(nesting.startswith(prefix) for prefix in prefixes for nesting in self._nestings)


@functools.lru_cache(maxsize=4096)
def _levels(scope: str) -> str:
    """Return a letter per differentiation around an operation, the outermost first: f for forward, b for backward."""
    levels = ""
    for part in _parts(scope):
        is_transposed = False
        for name in _transformations(part):
            if name == "transpose":
                levels, is_transposed = levels + _BACKWARD, True
            elif name == "jvp":
                levels, is_transposed = levels if is_transposed else levels + _FORWARD, False
    return levels


def first_scope(scope: str) -> str:
    """Return the first scope of an operation; a compiler joins the scopes of merged operations: ``a;b``, ``(a:b)``.

    Examples:
        >>> first_scope("jit(f)/mul;jit(f)/add"), first_scope("(jit(f)/mul:jit(f)/add)"), first_scope("jit(f)/mul")
        ('jit(f)/mul', 'jit(f)/mul', 'jit(f)/mul')
    """
    if scope.startswith("(") and ":" in scope:
        scope = scope[1:].partition(":")[0]
    return scope.partition(";")[0]


def _transformations(part: str) -> Iterator[str]:
    """Yield the transformations around a part of a scope, the outermost first."""
    while match := _TRANSFORMATION.fullmatch(part):
        yield match[1]
        part = match[2]


def _parts(scope: str) -> list[str]:
    """Split a scope at slashes outside brackets, and drop the primitive at the end, if there is one."""
    scope = first_scope(scope)
    parts, depth, start = list[str](), 0, 0
    for index, char in enumerate(scope):
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            parts.append(scope[start:index])
            start = index + 1
    return [*parts, scope[start:]] if _TRANSFORMATION.fullmatch(scope[start:]) else parts
