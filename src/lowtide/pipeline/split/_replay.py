"""Run the operations of one pass, including loop bodies, on the values that earlier passes left.

If the body of a loop belongs to several passes, the loop runs once in each of them, with the carries of that pass only.
Values of an iteration that a later pass reads leave the loop as a stack. Values between passes are stored under their
graph value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from ...core import tile_axes
from ...core._compat import laid_out, laid_out_on_tpus
from ._cut import Assignment, Pass, Sink
from ._graph import Atom, Carry, Graph, Loop, Op, Value, operations, repeated


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of an array. A loop reads them one by one, so they are never copied out of the array."""

    array: Any
    begin: Any
    """Index of the first row."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A position in a buffer that a pass changes: one entry, or the rows that a loop writes."""

    buffer: str
    begin: Any
    """Index of the first row."""


Environment = dict[Value, Any]
Buffers = dict[str, Any]
Places = Mapping[Value, Slot]


class Plan:
    """Reads, results and kept values of every pass, determined before anything runs."""

    def __init__(self, graph: Graph, assignment: Assignment, sinks: Sequence[Sink]) -> None:
        self.graph, self.passes, self.free = graph, assignment.passes, assignment.free
        self.made: dict[Value, Pass] = {}
        self._collect_made(graph.items)
        self.reads: dict[Value, set[Pass]] = {}
        """Passes that read a value directly, not through the stack of all iterations."""
        for one in operations(graph.items):
            for atom in one.reads if one in self.passes else []:
                self._read(atom, self.passes[one])
        self._results = [atom for sink in sinks for atom in sink.reads]
        for sink in sinks:
            for atom in sink.reads:
                self._read(atom, self.given(atom) if sink.is_added else sink.at)

    def given(self, atom: Atom) -> Pass:
        """Return the pass after which a weight gradient can be added to its total."""
        if any(atom is value for value in self.graph.inputs):
            return Pass.INPUT  # the gradient of a bias can be the cotangent itself
        made = self.made.get(atom, Pass.WEIGHT) if isinstance(atom, Value) else Pass.WEIGHT
        return max(made, Pass.INPUT)

    def _collect_made(self, items: Sequence[Op | Loop]) -> None:
        for item in items:
            for one in item.carries if isinstance(item, Loop) else [item]:
                if one in self.passes:
                    self.made.update(dict.fromkeys(one.results, self.passes[one]))
            if isinstance(item, Loop):
                self._collect_made(item.body)
                # The pass that computes a value in the body also computes its stack outside the loop.
                own = [(value.stack, made) for value, made in self.made.items() if value.loop is item]
                self.made.update((stack, made) for stack, made in own if stack is not None)

    def _read(self, atom: Atom, at: Pass) -> None:
        if not isinstance(atom, Value) or at in self.reads.get(atom, ()):
            return
        self.reads.setdefault(atom, set()).add(at)
        if atom in self.free:
            for read in self.free[atom].reads:
                self._read(read, at)
        elif atom.stack is not None and self.made.get(atom) is not at:
            self._read(atom.stack, at)  # the pass reads a slice of the stack

    def leaves_stack(self, value: Value) -> bool:
        """Return whether a loop has to stack one of its values."""
        stack = value.stack
        if stack is not None and (self.reads.get(stack) or (stack.stack is not None and self.leaves_stack(stack))):
            return True
        return any(at > self.made[value] for at in self.reads.get(value, ()))

    def kept(self) -> dict[Value, tuple[Pass, Pass]]:
        """Return the values kept between passes, each with the pass that computes it and its last reader."""
        found: dict[Value, tuple[Pass, Pass]] = {}
        for value, made in self.made.items():
            is_outside = value.loop is None or value.stack is None
            last = max(self.reads.get(value, ()), default=made)
            if is_outside and last > made:
                found[value] = made, last
        return found

    def flops(self, at: Pass) -> int:
        """Return the FLOPs of a pass."""
        return sum(op.flops * times for op, times in repeated(self.graph.items) if self.passes.get(op) is at)

    def is_stacked(self, value: Value) -> bool:
        """Return whether a loop computes a value row by row."""
        return value.loop is not None or any(made.stack is value for made in self.made)

    def run(self, at: Pass, env: Environment, buffers: Buffers, left: Places, totals: Places) -> None:
        """Run a pass.

        Args:
            at: the pass.
            env: the graph inputs that the pass reads, and the values that earlier passes left: arrays, `Rows` of them,
                or a `Slot`. Values that the pass computes are added.
            buffers: the buffers that slots refer to; buffers that the pass changes are replaced.
            left: slots for the values that later passes read. A value without a slot stays in `env` only.
            totals: slots of the totals to which stacked gradients of a loop are added (`adds_up`).
        """
        runner = _Runner(self, at, buffers, left, totals)
        runner.items(self.graph.items, [env])
        for value, slot in left.items():
            if not self.is_stacked(value):
                buffers[slot.buffer] = put(buffers[slot.buffer], runner.read(value, [env]), slot.begin)

    def read(self, atom: Atom, env: Environment, buffers: Buffers) -> Any:
        """Read a result after the pass that computes it."""
        return _Runner(self, Pass.WEIGHT, buffers, {}, {}).read(atom, [env])

    def adds_up(self, atom: Atom) -> bool:
        """Return whether a loop stacks a result that nothing else reads, so that `run` may add its rows to a total."""
        if not isinstance(atom, Value) or not any(value.stack is atom for value in self.made):
            return False
        # If two weights are added to each other, their gradients are the same value.
        is_shared = sum(other is atom for other in self._results) > 1
        return not (is_shared or any(atom in reads for reads in _all_reads(self.graph.items)))


def _all_reads(items: Sequence[Op | Carry | Loop]) -> Iterator[list[Atom]]:
    for item in items:
        if isinstance(item, Loop):
            yield [outer for outer, _ in item.slices]
            yield from _all_reads([*item.carries, *item.body])
        else:
            yield item.reads


class _Runner:
    """State of one running pass; environments are ordered from the outermost loop to the innermost."""

    def __init__(self, plan: Plan, at: Pass, buffers: Buffers, left: Places, totals: Places) -> None:
        self.plan, self.at, self.buffers, self.left, self.totals = plan, at, buffers, left, totals

    def read(self, atom: Atom, envs: Sequence[Environment]) -> Any:
        if isinstance(atom, jex.Literal):
            return atom.val
        for env in reversed(envs):
            if atom in env:
                return self._array(atom, env[atom])
        op = self.plan.free[atom]
        results = op.run(*(self.read(read, envs) for read in op.reads))
        envs[-1].update((value, one) for value, one in zip(op.gives, results, strict=True) if value is not None)
        return envs[-1][atom]

    def _can_read(self, atom: Atom, envs: Sequence[Environment]) -> bool:
        if not isinstance(atom, Value) or any(atom in env for env in envs):
            return True
        return atom in self.plan.free and all(self._can_read(read, envs) for read in self.plan.free[atom].reads)

    def _array(self, value: Value, found: Any) -> Any:
        if isinstance(found, Slot):
            buffer = self.buffers[found.buffer]
            if not self.plan.is_stacked(value):
                return entry(buffer, found.begin)
            found = Rows(buffer, found.begin)
        if isinstance(found, Rows):
            return lax.dynamic_slice_in_dim(found.array, found.begin, shape_of(value).shape[0])
        return found

    def _row(self, found: Rows | Slot, index: Any) -> Any:
        if isinstance(found, Rows):
            return at(found.array, found.begin + index)
        return entry(self.buffers[found.buffer], found.begin + index)

    def items(self, items: Sequence[Op | Loop], envs: Sequence[Environment]) -> None:
        for item in items:
            if isinstance(item, Loop):
                self.loop(item, envs)
            elif self.plan.passes.get(item) is self.at:
                results = item.run(*(self.read(read, envs) for read in item.reads))
                envs[-1].update((value, one) for value, one in zip(item.gives, results, strict=True) if value)

    def loop(self, loop: Loop, envs: Sequence[Environment]) -> None:
        """Run the part of a loop that belongs to this pass."""
        carries = [carry for carry in loop.carries if self.plan.passes.get(carry) is self.at]
        entering, leaving = self._entering(loop), self._leaving(loop)
        if not carries and not leaving:
            return
        for value in self.plan.free:  # otherwise every iteration would compute it
            if value.loop is loop.loop and self.at in self.plan.reads.get(value, ()) and self._can_read(value, envs):
                self.read(value, envs)
        found = {value: self._lookup(outer, envs) for value, outer in entering.items()}
        rows = {value: one for value, one in found.items() if isinstance(one, Rows | Slot)}
        sliced = {value: one for value, one in found.items() if value not in rows}
        # The outermost loop writes to slots. An inner loop only stacks its values.
        places = {value: self.left.get(value.stack or value) for value in leaving} if loop.loop is None else {}
        sums = {value: self.totals[stack] for value in leaving if (stack := value.stack) and stack in self.totals}
        stacked = [value for value in leaving if places.get(value) is None and value not in sums]
        written = {slot.buffer: None for slot in (*places.values(), *sums.values()) if slot is not None}

        def body(carried: Any, slices: Any) -> Any:
            values, buffers = carried
            given, index = slices
            # While the body is traced, `self.buffers` holds the buffers that the loop carries; then it is restored.
            before = dict(self.buffers)
            self.buffers.update(zip(written, buffers, strict=True))
            env: Environment = dict(zip(sliced, given, strict=True))
            env.update((value, self._row(one, index)) for value, one in rows.items())
            env.update((carry.inside, one) for carry, one in zip(carries, values, strict=True))
            inner = [*envs, env]
            self.items(loop.body, inner)
            after = [_as(self.read(carry.after, inner), carry.inside) for carry in carries]
            for value, slot in places.items():
                if slot is not None:
                    self.buffers[slot.buffer] = put(self.buffers[slot.buffer], env[value], slot.begin + index)
            for value, slot in sums.items():
                self.buffers[slot.buffer] = _add_row(self.buffers[slot.buffer], slot.begin + index, env[value])
            buffers = [self.buffers[buffer] for buffer in written]
            self.buffers.clear()
            self.buffers.update(before)
            return (after, buffers), [env[value] for value in stacked]

        inits = [_as(self.read(carry.init, envs), carry.inside) for carry in carries]
        given = (list(sliced.values()), jnp.arange(loop.length))
        (finals, buffers), results = lax.scan(
            body,
            (inits, [self.buffers[buffer] for buffer in written]),
            given,
            length=loop.length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )
        self.buffers.update(zip(written, buffers, strict=True))
        envs[-1].update((carry.final, final) for carry, final in zip(carries, finals, strict=True))
        envs[-1].update((value.stack or value, array) for value, array in zip(stacked, results, strict=True))
        envs[-1].update((value.stack or value, slot) for value, slot in places.items() if slot is not None)

    def _lookup(self, value: Value | jex.Literal, envs: Sequence[Environment]) -> Any:
        """Return a value to slice: its array, or its `Rows` or `Slot` if the rows can be read one by one."""
        for env in reversed(envs):
            if value in env:
                found = env[value]
                lies_whole = isinstance(found, Slot) and not self.plan.is_stacked(value)
                return self._array(value, found) if lies_whole else found
        return self.read(value, envs)

    def _entering(self, loop: Loop) -> dict[Value, Any]:
        """Return the body's values that come from outside: slices, and values of the body that earlier passes left."""
        outers = {inside: outer for outer, inside in loop.slices}
        found: dict[Value, Any] = {}
        for value in self.plan.reads:
            if value.loop is None or self.at not in self.plan.reads[value] or value in self.plan.free:
                continue
            if value in outers and value.loop is loop:
                found[value] = outers[value]
            elif self.plan.made.get(value, self.at) < self.at and _is_within(value.loop, loop):
                if value.loop is loop:
                    found[value] = value.stack or value
                elif value.stack is None:
                    found[value] = value  # belongs to an inner loop, which reads it from here
        return found

    def _leaving(self, loop: Loop) -> list[Value]:
        """Return the values of the body that this pass computes and has to stack."""
        return [
            value
            for value, made in self.plan.made.items()
            if made is self.at
            and value.loop is not None
            and (value.loop is loop or (value.stack is None and _is_within(value.loop, loop)))
            and self.plan.leaves_stack(value)
        ]


def _is_within(inner: Loop | None, outer: Loop) -> bool:
    while inner is not None and inner is not outer:
        inner = inner.loop
    return inner is outer


def _as(value: Any, like: Value) -> Any:
    """Convert a value to the type of a carry; literals can have another type."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, like.aval.dtype)


def at(array: Any, index: Any) -> Any:
    """Copy an entry of an array."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def entry(buffer: Any, index: Any) -> Any:
    """Copy an entry of a buffer that passes change."""
    return _fixed(at(buffer, index))


def put(buffer: Any, value: Any, index: Any) -> Any:
    """Return the buffer with one entry replaced."""
    return lax.dynamic_update_index_in_dim(buffer, _fixed(value), index, 0)


def _fixed(value: Any) -> Any:
    """Fix the layout of an entry for all readers. Otherwise the compiler may transpose the whole buffer for one reader.

    On a mesh with sharded axes only the TPU compiler keeps such an array sharded; others gather it first (jaxlib
    0.10.2). Compiled for an H100, this caused 11 gathers and 104.4 MB of temporaries, versus 0 and 94.9 MB without a
    layout. On a TPU the layout saves bytes: 16.2 MB versus 17.8 MB.

    This layout has the smallest padding on a TPU. Axes of size 1 are tiled only if fewer than two axes are longer:
    one-row tiles are for arguments, and XLA computes in larger tiles.
    """
    if value.ndim < 2 or not value.size or not jnp.issubdtype(value.dtype, jnp.number):
        return value
    long = [axis for axis, size in enumerate(value.shape) if size > 1]
    axes = long if len(long) > 1 else range(value.ndim)
    inner = [axes[at] for at in tile_axes([value.shape[axis] for axis in axes], value.dtype)]
    order = (*(axis for axis in range(value.ndim) if axis not in inner), *inner)
    mesh = jax.sharding.get_abstract_mesh()
    is_divided = any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in mesh.manual_axes)
    return laid_out_on_tpus(value, order) if is_divided else laid_out(value, order)


def _add_row(total: Any, index: Any, row: Any) -> Any:
    return put(total, entry(total, index) + row.astype(total.dtype), index)


def shape_of(value: Value) -> jax.ShapeDtypeStruct:
    """Return the shape of a value between passes, with the axes of the loops that contain it."""
    lengths: list[int] = []
    loop = value.loop
    while loop is not None:
        lengths, loop = [loop.length, *lengths], loop.loop
    return jax.ShapeDtypeStruct((*lengths, *value.aval.shape), value.aval.dtype)
