"""A traced function as a graph of operations that can be told apart inside loops.

The split of a backward pass assigns every operation to a pass, those in the body of a `scan` too. So calls that only
group operations (`jit`, `remat`, custom derivatives) are dissolved, and a scan is a `Loop` whose body is a graph of its
own. An operation inside a loop that another pass needs leaves its values stacked along the loop's axis.

Dissolving `remat` keeps what it is for: its operations stand a second time in the backward pass, where they read what
the forward pass left. The barrier against common subexpressions is the boundary between the passes.
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
    """What an operation gives: an array, inside a loop one for each iteration."""

    aval: Any
    loop: Loop | None = None
    """The innermost loop that it is in."""
    stack: Value | None = None
    """Inside a loop: the value outside that holds those of all iterations, if there is one."""
    left_varying: frozenset[str] | None = None
    """`varying`, of what halves of an operation leave to each other."""

    @property
    def varying(self) -> frozenset[str]:
        """Along which axes of a `shard_map` with types it differs."""
        return self.aval.manual_axis_type.varying if self.left_varying is None else self.left_varying

    @property
    def size_bytes(self) -> int:
        """Of all iterations."""
        inner = math.prod(self.aval.shape) * self.aval.dtype.itemsize
        loop = self.loop
        while loop is not None:
            inner, loop = inner * loop.length, loop.loop
        return inner

    @property
    def storage(self) -> Value:
        """The value that has to be kept so that this one can be read in another pass."""
        value = self
        while value.stack is not None:
            value = value.stack
        return value


Atom: TypeAlias = "Value | jex.Literal"


@dataclasses.dataclass(eq=False, repr=False)
class Op:
    """One operation of the jaxpr."""

    name: str
    reads: list[Atom]
    gives: list[Value | None]
    """None for a result that nobody reads."""
    run: Callable[..., Sequence[Any]]
    """Of the values of `reads`, all results."""
    has_effects: bool = False
    is_heavy: bool = False
    """Whether it is too much to do twice, or to put off for a few bytes."""
    eqn: Any = None
    """The equation that it is of; not of what was made of one (`_inner`)."""
    flops: int = 0
    """Of one iteration of the loop that it is in."""

    @property
    def results(self) -> list[Value]:
        """Those that somebody reads."""
        return [value for value in self.gives if value is not None]


@dataclasses.dataclass(eq=False, repr=False)
class Carry:
    """What a loop hands from one iteration to the next."""

    init: Atom
    inside: Value
    """At the begin of an iteration."""
    after: Atom
    """At its end: a value inside."""
    final: Value
    """After the loop."""

    @property
    def reads(self) -> list[Atom]:
        """What it is made of, before the loop and at the end of an iteration."""
        return [self.init, self.after]

    @property
    def results(self) -> list[Value]:
        """What is made of it, inside the loop and after it."""
        return [self.inside, self.final]


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """A `scan`; its body reads values outside of it directly."""

    length: int
    reverse: bool
    unroll: Any
    loop: Loop | None
    """The loop around this one."""
    body: list[Op | Loop] = dataclasses.field(default_factory=list)
    carries: list[Carry] = dataclasses.field(default_factory=list)
    slices: list[tuple[Atom, Value]] = dataclasses.field(default_factory=list)
    """What iterations read a slice of, and the slice."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function."""

    inputs: list[Value]
    items: list[Op | Loop]
    outputs: list[Atom]


def graph(closed: Any) -> Graph:
    """Make the graph of a `ClosedJaxpr`; its constants become part of it."""
    inputs = [Value(var.aval) for var in closed.jaxpr.invars]
    items: list[Op | Loop] = []
    outputs = _Reader(items, None).read(closed, inputs)
    return Graph(inputs, items, outputs)


def operations(items: Sequence[Op | Loop]) -> Iterator[Op | Carry]:
    """Everything that can be assigned to a pass, loops' bodies included."""
    for item in items:
        if isinstance(item, Loop):
            yield from item.carries
            yield from operations(item.body)
        else:
            yield item


def repeated(items: Sequence[Op | Loop], times: int = 1) -> Iterator[tuple[Op, int]]:
    """Every operation, and how often it runs."""
    for item in items:
        if isinstance(item, Loop):
            yield from repeated(item.body, times * item.length)
        else:
            yield item, times


def lift(items: list[Op | Loop], given: set[Value]) -> None:
    """Move out of loops what does the same in every iteration: operations on weights that the loop does not slice.

    What they give would else be left once for each iteration. What is larger than what it is made of stays.

    Args:
        items: of a graph, changed in place.
        given: the weights; what is made of them alone is added.
    """

    def size(values: Sequence[Value]) -> int:
        return sum(math.prod(one.aval.shape) * one.aval.dtype.itemsize for one in values)

    def is_given(op: Op) -> bool:
        reads = [atom for atom in op.reads if isinstance(atom, Value)]
        is_free = not op.has_effects and not any(value.stack for value in op.results)
        return bool(reads) and is_free and all(value in given for value in reads) and size(op.results) <= size(reads)

    lifted: list[Op | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            lift(item.body, given)
            out = [op for op in item.body if isinstance(op, Op) and is_given(op)]
            item.body[:] = [one for one in item.body if one not in out]
            lifted += out
            for value in (value for op in out for value in op.results):
                value.loop = item.loop
        elif is_given(item):
            given.update(item.results)
        lifted.append(item)
    items[:] = lifted


TO_HOST, TO_DEVICE = "to_host", "to_device"


class _Reader:
    """Reads jaxprs into a list of items."""

    def __init__(self, items: list[Op | Loop], loop: Loop | None) -> None:
        self.items, self.loop = items, loop

    def read(self, jaxpr: Any, inputs: Sequence[Atom]) -> list[Atom]:
        """Add the operations of a jaxpr with these inputs; its outputs."""
        return fold(jaxpr, inputs, self._equation, self._known)

    def _equation(self, eqn: Any, reads: list[Atom]) -> Sequence[Atom]:
        inner = called(eqn)
        if inner is not None and not _has_shardings(eqn):
            return self.read(inner, reads)
        return self._scan(eqn, reads) if kind_of(eqn) is Kind.SCAN else self._operation(eqn, reads)

    def _known(self, var: Any, const: Any) -> Atom:
        if isinstance(var, jex.Literal):
            return var
        value = Value(var.aval, self.loop)
        self.items.append(Op("constant", [], [value], lambda: [const]))
        return value

    def _operation(self, eqn: Any, reads: list[Atom]) -> list[Value]:
        results = [Value(var.aval, self.loop) for var in eqn.outvars]
        dropped = [isinstance(var, jex.DropVar) for var in eqn.outvars]
        gives = [None if drop else result for drop, result in zip(dropped, results, strict=True)]
        op = Op(_name(eqn), reads, gives, runner(eqn), _has_effects(eqn), _is_heavy(eqn), eqn, eqn_flops(eqn))
        self.items.append(op)
        return results

    def _scan(self, eqn: Any, reads: list[Atom]) -> list[Value]:
        params = eqn.params
        num_consts, num_carry = scan_counts(params)
        loop = Loop(params["length"], params["reverse"], params["unroll"], self.loop)
        consts, inits, stacked = reads[:num_consts], reads[num_consts:][:num_carry], reads[num_consts + num_carry :]
        avals = [var.aval for var in params["jaxpr"].jaxpr.invars]
        inside = [Value(aval, loop) for aval in avals[num_consts:]]
        for outer, slice_ in zip(stacked, inside[num_carry:], strict=True):
            slice_.stack = outer if isinstance(outer, Value) else None
            loop.slices.append((outer, slice_))
        body = _Reader(loop.body, loop)
        results = body.read(params["jaxpr"], [*consts, *inside])
        finals = [Value(var.aval, self.loop) for var in eqn.outvars]
        for init, begin, after, final in zip(inits, inside, results, finals, strict=False):
            loop.carries.append(Carry(init, begin, after, final))
        for result, outer in zip(results[num_carry:], finals[num_carry:], strict=True):
            # Each stack is of one value of the body's own; whatever else is stacked, a copy of it is.
            if not isinstance(result, Value) or result.loop is not loop or result.stack is not None:
                result = body.copied(result, outer)
            result.stack = outer
        self.items.append(loop)
        return finals

    def copied(self, atom: Atom, like: Value) -> Value:
        """Give an atom a value of its own."""
        shape = like.aval.shape[1:]
        value = Value(like.aval.update(shape=shape), self.loop)
        self.items.append(Op("copy", [atom], [value], lambda x: [x]))
        return value


_HEAVY = {
    "dot_general",
    "turned_product",
    "ragged_dot_general",
    "conv_general_dilated",
    "custom_call",
    "ffi_call",
    "pure_callback",
    "random_bits",
    "threefry2x32",
    "sort",
    "top_k",
    "cholesky",
    "triangular_solve",
    "eigh",
    "svd",
    "qr",
    "device_put",
}


def _is_heavy(eqn: Any) -> bool:
    """Tell a product or the like; or a loop, a branch, a kernel: whatever holds operations of its own."""
    return eqn.primitive.name in _HEAVY or kind_of(eqn) not in (None, Kind.SCALAR)


def _has_effects(eqn: Any) -> bool:
    """Whether it does more than give results; that it names an axis of a `shard_map` is none."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _name(eqn: Any) -> str:
    """Of the operation; `TO_HOST` for a copy into the host's memory, `TO_DEVICE` for one out of it."""
    if eqn.primitive.name != "device_put":
        return eqn.primitive.name
    before, after = ({_is_on_host(var) for var in variables} for variables in (eqn.invars, eqn.outvars))
    if after == {True}:
        return TO_HOST
    return TO_DEVICE if (before, after) == ({True}, {False}) else eqn.primitive.name


def _is_on_host(var: Any) -> bool:
    return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host


def _has_shardings(eqn: Any) -> bool:
    """Whether a call says how its arguments are divided, which dissolving it would forget."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in given)
