"""A traced function as a graph whose operations can be assigned to passes, also inside loops.

The split of a backward pass assigns every operation to a pass (`_cut.Pass`), including those in the body of a `scan`.
So calls that only group operations (`jit`, `remat`, custom derivatives) are inlined, and a scan becomes a `Loop` whose
body is a list of operations. If another pass needs a value from inside a loop, the loop stacks the value over its
iterations.

Inlining `remat` keeps its purpose: the recomputed operations appear a second time in the backward pass, where they read
values that the forward pass saved. The boundary between the passes prevents common subexpression elimination, as the
barrier of `remat` did.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core as jex

from ...jaxprs import Kind, called, eqn_flops, fold, kind_of, runner, scan_counts


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """An input of the graph or a result of an operation: an array; inside a loop, one array per iteration."""

    aval: Any
    loop: Loop | None = None
    """The innermost loop that contains it."""
    stack: Value | None = None
    """Inside a loop: the value outside the loop that holds this one for all iterations, if any."""
    left_varying: frozenset[str] | None = None
    """Explicit `varying` for a value that the first half of a split operation saves for the second half."""

    @property
    def varying(self) -> frozenset[str]:
        """Axes of a `shard_map` along which the value varies, if the `shard_map` tracks them."""
        return self.aval.manual_axis_type.varying if self.left_varying is None else self.left_varying

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the value between passes: over all iterations of the loops that contain it."""
        lengths: list[int] = []
        loop = self.loop
        while loop is not None:
            lengths, loop = [loop.length, *lengths], loop.loop
        return jax.ShapeDtypeStruct((*lengths, *self.aval.shape), self.aval.dtype)

    @property
    def size_bytes(self) -> int:
        """Size of the value over all iterations."""
        return math.prod(self.struct.shape) * self.aval.dtype.itemsize

    @property
    def storage(self) -> Value:
        """The value that has to be kept so that another pass can read this one: its outermost stack, or itself."""
        value = self
        while value.stack is not None:
            value = value.stack
        return value


Atom: TypeAlias = "Value | jex.Literal"


@dataclasses.dataclass(eq=False, repr=False)
class Op:
    """An operation of the jaxpr."""

    name: str
    reads: list[Atom]
    outputs: list[Value | None]
    """Results; None for a result that no operation reads."""
    run: Callable[..., Sequence[Any]]
    """Function from the values of `reads` to all results."""
    has_effects: bool = False
    is_heavy: bool = False
    """Whether it is too expensive to run twice, or to run in another pass only to save bytes."""
    eqn: Any = None
    """Its equation; None for a constant, and for an operation that the split adds."""
    flops: int = 0
    """FLOPs of one iteration of the innermost loop that contains it."""

    @property
    def results(self) -> list[Value]:
        """Results that operations read."""
        return [value for value in self.outputs if value is not None]


@dataclasses.dataclass(eq=False, repr=False)
class Carry:
    """A value that a loop passes from one iteration to the next."""

    init: Atom
    carry_in: Value
    """Value at the start of an iteration."""
    carry_out: Atom
    """Value at the end of an iteration, computed inside the loop."""
    final: Value
    """Value after the loop."""

    @property
    def reads(self) -> list[Atom]:
        return [self.init, self.carry_out]

    @property
    def results(self) -> list[Value]:
        return [self.carry_in, self.final]


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """A `scan`. Its body reads values from outside the loop directly, not as constants of the scan."""

    length: int
    reverse: bool
    unroll: Any
    loop: Loop | None
    """The loop that contains this one."""
    body: list[Op | Loop] = dataclasses.field(default_factory=list)
    carries: list[Carry] = dataclasses.field(default_factory=list)
    slices: list[tuple[Atom, Value]] = dataclasses.field(default_factory=list)
    """Pairs of an array outside of the loop and the value that is its slice in an iteration."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """The graph of a traced function."""

    inputs: list[Value]
    items: list[Op | Loop]
    outputs: list[Atom]


def graph(closed: Any) -> Graph:
    """Make the graph of a `ClosedJaxpr`; its constants become part of the graph."""
    inputs = [Value(var.aval) for var in closed.jaxpr.invars]
    items: list[Op | Loop] = []
    outputs = _Reader(items, None).read(closed, inputs)
    return Graph(inputs, items, outputs)


def operations(items: Sequence[Op | Loop]) -> Iterator[Op | Carry]:
    """Yield every operation and carry, including those in loop bodies."""
    for item in items:
        if isinstance(item, Loop):
            yield from item.carries
            yield from operations(item.body)
        else:
            yield item


def repeated(items: Sequence[Op | Loop], num_runs: int = 1) -> Iterator[tuple[Op, int]]:
    """Yield every operation with the number of times that it runs, if `items` run `num_runs` times."""
    for item in items:
        if isinstance(item, Loop):
            yield from repeated(item.body, num_runs * item.length)
        else:
            yield item, num_runs


def hoist_loop_invariants(items: list[Op | Loop], weight_values: set[Value]) -> None:
    """Move loop-invariant operations on weights out of loops, in place.

    Inside a loop, their results would be kept once for each iteration. Operations whose results are larger than their
    operands stay. Results of other operations on weights, in and outside of loops, are added to `weight_values`.
    """

    def size(values: Sequence[Value]) -> int:
        return sum(math.prod(array.aval.shape) * array.aval.dtype.itemsize for array in values)

    def can_hoist(op: Op) -> bool:
        reads = [atom for atom in op.reads if isinstance(atom, Value)]
        is_free = not op.has_effects and not any(value.stack for value in op.results)
        return (
            bool(reads)
            and is_free
            and all(value in weight_values for value in reads)
            and size(op.results) <= size(reads)
        )

    result: list[Op | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            hoist_loop_invariants(item.body, weight_values)
            hoisted = [op for op in item.body if isinstance(op, Op) and can_hoist(op)]
            item.body[:] = [inner for inner in item.body if inner not in hoisted]
            result += hoisted
            for value in (value for op in hoisted for value in op.results):
                value.loop = item.loop
        elif can_hoist(item):
            weight_values.update(item.results)
        result.append(item)
    items[:] = result


TO_HOST, TO_DEVICE = "to_host", "to_device"


class _Reader:
    """Converter of jaxprs into items of a graph, which it appends to `items`."""

    def __init__(self, items: list[Op | Loop], loop: Loop | None) -> None:
        self.items, self.loop = items, loop

    def read(self, jaxpr: Any, inputs: Sequence[Atom]) -> list[Atom]:
        """Append the operations of a jaxpr with these inputs; return its outputs."""
        return fold(jaxpr, inputs, self._add_equation, self._constant)

    def _add_equation(self, eqn: Any, reads: list[Atom]) -> Sequence[Atom]:
        # A call with shardings is kept as one operation, because inlining would lose them.
        inner = called(eqn)
        if inner is not None and not _has_shardings(eqn):
            return self.read(inner, reads)
        return self._add_loop(eqn, reads) if kind_of(eqn) is Kind.SCAN else self._add_operation(eqn, reads)

    def _constant(self, var: Any, const: Any) -> Atom:
        if isinstance(var, jex.Literal):
            return var
        value = Value(var.aval, self.loop)
        self.items.append(Op("constant", [], [value], lambda: [const]))
        return value

    def _add_operation(self, eqn: Any, reads: list[Atom]) -> list[Value]:
        results = [Value(var.aval, self.loop) for var in eqn.outvars]
        pairs = zip(eqn.outvars, results, strict=True)
        outputs = [None if isinstance(var, jex.DropVar) else result for var, result in pairs]
        # Naming an axis of a `shard_map` does not count as an effect.
        has_effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
        # Heavy are products and operations of similar cost, and those that contain operations (loop, branch, kernel).
        is_heavy = eqn.primitive.name in _HEAVY or kind_of(eqn) not in (None, Kind.SCALAR)
        self.items.append(Op(_name(eqn), reads, outputs, runner(eqn), has_effects, is_heavy, eqn, eqn_flops(eqn)))
        return results

    def _add_loop(self, eqn: Any, reads: list[Atom]) -> list[Value]:
        params = eqn.params
        num_consts, num_carry = scan_counts(params)
        loop = Loop(params["length"], params["reverse"], params["unroll"], self.loop)
        consts, inits, stacked = reads[:num_consts], reads[num_consts:][:num_carry], reads[num_consts + num_carry :]
        avals = [var.aval for var in params["jaxpr"].jaxpr.invars]
        body_inputs = [Value(aval, loop) for aval in avals[num_consts:]]
        for outer, slice_ in zip(stacked, body_inputs[num_carry:], strict=True):
            slice_.stack = outer if isinstance(outer, Value) else None
            loop.slices.append((outer, slice_))
        results = _Reader(loop.body, loop).read(params["jaxpr"], [*consts, *body_inputs])
        finals = [Value(var.aval, self.loop) for var in eqn.outvars]
        for init, carry_in, carry_out, final in zip(inits, body_inputs, results, finals, strict=False):
            loop.carries.append(Carry(init, carry_in, carry_out, final))
        for result, outer in zip(results[num_carry:], finals[num_carry:], strict=True):
            # A stack belongs to exactly one value that the body computes. Any other result (an outer value, a slice, a
            # value that is already stacked) is copied first, and the copy is stacked.
            if not isinstance(result, Value) or result.loop is not loop or result.stack is not None:
                copy = Value(outer.aval.update(shape=outer.aval.shape[1:]), loop)
                loop.body.append(Op("copy", [result], [copy], lambda x: [x]))
                result = copy
            result.stack = outer
        self.items.append(loop)
        return finals


_HEAVY = {
    *("dot_general", "transposed_product", "ragged_dot_general", "conv_general_dilated"),
    *("custom_call", "ffi_call", "pure_callback", "device_put", "random_bits", "threefry2x32"),
    *("sort", "top_k", "cholesky", "triangular_solve", "eigh", "svd", "qr"),
}


def _name(eqn: Any) -> str:
    """Return the name of an operation; `TO_HOST` for a copy into host memory, `TO_DEVICE` for a copy out of it."""
    if eqn.primitive.name != "device_put":
        return eqn.primitive.name
    input_is_on_host, output_is_on_host = (
        {_is_on_host(var) for var in variables} for variables in (eqn.invars, eqn.outvars)
    )
    if output_is_on_host == {True}:
        return TO_HOST
    return TO_DEVICE if (input_is_on_host, output_is_on_host) == ({True}, {False}) else eqn.primitive.name


def _is_on_host(var: Any) -> bool:
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host


def _has_shardings(eqn: Any) -> bool:
    """Return whether a call fixes the sharding of its arguments or results; inlining it would lose the sharding."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
