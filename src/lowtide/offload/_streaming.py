"""Update state in host memory block by block; each block is written back in place.

XLA hoists moves of whole trees: moving four Adam states to the device, updating them and moving them back saves 5 % of
the memory instead of half. XLA cannot hoist slices out of a loop. So each group of leaves that `_separable` proves
independent is updated in a loop over blocks of its leading axes: slice on the host, move, compute, move back, and write
into the same buffer. If the state is donated, there is one host copy and a few blocks on the device.

Trip counts are hidden from XLA, which would otherwise unroll loops of one block and overlap their copies. The count of
each loop depends on the previous loop, so temporaries exist for one group of leaves at a time.

Limits: on a mesh, a slice along a sharded axis would gather the leaf. Shardings have to be given, because a tracer has
none; the loops then run on each device's shard. Rows that do not fill a block are a second, shorter loop.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core import (
    PlacementWarning,
    StructureError,
    Tree,
    check_host_slices,
    is_row_major,
    leaf_bytes,
    leaves_with_paths,
    memory_space,
    most_tile_rows,
)
from ._folds import folded, identity
from ._platforms import DEVICE, HOST, cut_block, is_tall, later, put, warn_of_tall_tiles
from ._platforms import read as read_entry
from ._platforms import write as write_entry
from ._separable import Group, Program, separate, trace

# Host leaves of at most 1/64 of a block are moved whole, before the groups, as long as they have at most half a block
# together. Loops over them would save nothing. Also, values that depend on them alone (Adafactor's row and column
# statistics) then do not tie a group together.
_SMALL_PART = 64
_UNCUT_PART = 16
_is_traced = contextvars.ContextVar("is_traced", default=False)
"""Whether a function is being traced for analysis. Then `stream` calls its function directly, because loops would hide
the computation."""

_is_part = contextvars.ContextVar("is_part", default=False)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a stacked array's leading axis, used as a leaf of the arguments; it is updated in place."""

    array: Any
    """The stacked array."""
    index: Any
    """Position on the array's leading axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the entry."""
        return self.array.shape[1:]

    @property
    def ndim(self) -> int:
        """Number of axes of the entry."""
        return self.array.ndim - 1

    @property
    def dtype(self) -> Any:
        """Dtype of the entry."""
        return self.array.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The analysis of a function and its groups; made by `plan`."""

    program: Program
    treedef: Any
    """Structure of the result."""
    replaced: tuple[int, ...]
    """For each output, the flat position of the leaf that it overwrites."""
    on_host: frozenset[int]
    """Host leaves that are large enough for a loop."""
    groups: tuple[Group, ...]
    """Groups of leaves that are updated in loops."""
    passes: tuple[Group, ...]
    """Loops that run before the groups and only read, for reductions."""


def plan(
    fn: Callable[..., Any],
    args: Sequence[Tree],
    replaces: Callable[..., Any],
    *,
    chunk_bytes: int,
    declared: Collection[int] = (),
    fold: bool = False,
) -> Plan:
    """Trace a function and divide it into groups of leaves; arguments as in `stream`, `fold` as in `separate`.

    Returns:
        The plan. Its `groups` contain the number of leading axes of each that may be cut, and the operation that
        prevents more.

    Raises:
        StructureError: when the result does not have the structure that `replaces` returns.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    on_host = large_on_host(leaves, chunk_bytes, declared)
    with taken_apart():
        program, treedef = trace(fn, jax.tree.map(_shape, tuple(args)), on_host)
    numbers: Any = structure.unflatten(range(len(leaves)))
    replaced, expected = jax.tree.flatten(replaces(*numbers))
    refuse_other_structure(treedef, expected)
    passes, groups = map(tuple, separate(program, on_host, replaced, fold=fold))
    return Plan(
        program=program,
        treedef=treedef,
        replaced=tuple(replaced),
        on_host=frozenset(on_host),
        groups=groups,
        passes=passes,
    )


def traced_program(fn: Callable[..., Any], args: Sequence[Tree]) -> tuple[Program, Any]:
    """Trace a function of device arrays, with calls inlined.

    Args:
        fn: a function of trees of arrays.
        args: its arguments; only shapes and dtypes are read.

    Returns:
        The program, which computes any values that are requested, and the tree structure of the function's result.
    """
    with taken_apart():
        return trace(fn, args, ())


@contextlib.contextmanager
def taken_apart() -> Generator[None]:
    """Inside the block, make `stream` call its function directly, because it is traced for analysis."""
    token = _is_traced.set(True)
    try:
        yield
    finally:
        _is_traced.reset(token)


@contextlib.contextmanager
def of_a_part() -> Generator[None]:
    """Inside the block, `is_part` is true: transformations see a part of the parameters."""
    token = _is_part.set(True)
    try:
        yield
    finally:
        _is_part.reset(token)


def is_part() -> bool:
    """Return whether a transformation sees a part of the parameters, where selecting no leaf is not an error."""
    return _is_part.get()


def is_taken_apart() -> bool:
    """Return whether a function is being traced for analysis; the caller then decides how it runs."""
    return _is_traced.get()


def refuse_other_structure(got: Any, expected: Any) -> None:
    """Raise if an update's result has another structure than the trees that it replaces."""
    if expected != got:
        raise StructureError(
            "the result of an update has not the structure of what it replaces",
            expected=expected,
            got=got,
            hint="update(grads, state, params) has to return trees like grads and state",
        )


def stream(
    fn: Callable[..., Any],
    args: Sequence[Tree],
    replaces: Callable[..., Any],
    *,
    chunk_bytes: int,
    by_leaf: bool = False,
    shardings: Tree = None,
    prevented: str | None = None,
    declared: Collection[int] = (),
    on_fallback: Callable[[list[str], str], None] | None = None,
) -> Tree:
    """Call ``fn(*args)`` with arguments in host memory, with a few blocks at a time on the device.

    Inside a function that another `stream` traces, this calls `fn` directly, and the outer loops apply.

    Args:
        fn: a function of trees of arrays, such as ``tx.update``.
        args: its arguments. Leaves may be in device or host memory, or be `Entry`s of stacked arrays. A result that
            overwrites an `Entry` is the stacked array.
        replaces: receives placeholders for the leaves of `args` and returns those that the results overwrite, with the
            structure of the results: ``lambda grads, state, params: (grads, state)`` for ``tx.update``.
        chunk_bytes: approximate bytes that one block moves from the host; rows are cut in multiples of the hardware's
            tiles.
        by_leaf: whether to cut nothing: each group is on the device whole while it is updated.
        shardings: a tuple like `args` of trees of `jax.sharding.NamedSharding` or None, or None.
        prevented: why nothing can be cut, or None.
        declared: flat positions of leaves that count as host leaves although their type does not show it.
        on_fallback: called with the paths (position of the argument first) of a group that is larger than a block and
            cannot be cut, and with the reason. The default warns.

    Returns:
        The value of ``fn(*args)``, each leaf in the memory of the leaf that it replaces.

    Raises:
        StructureError: when the result does not have the structure that `replaces` returns.

    Memory:
        Donated host leaves are updated in place. The device holds about two blocks. A group that cannot be cut is on
        the device whole while it is updated, one group at a time.
    """
    if is_taken_apart():
        return fn(*args)
    names = [path for path, _ in leaves_with_paths(tuple(args))]
    leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in jax.tree.leaves(tuple(args))]
    placed = _flat_shardings(shardings, args)
    fold = not (by_leaf or prevented or any(not sharding.is_fully_replicated for sharding in placed.values()))
    made = plan(fn, args, replaces, chunk_bytes=chunk_bytes, declared=declared, fold=fold)
    program = made.program
    if program.effects:
        warnings.warn(
            f"the update has effects, which a streamed update leaves out: {', '.join(program.effects)}\n"
            'hint: jax.debug.print belongs outside of the optimizer; lt.offload.optimizer(mode="whole") keeps effects',
            PlacementWarning,
            stacklevel=3,
        )
    warn_of_tall_tiles((names[at], _array(leaves[at])) for at in made.on_host)
    _check_entries(program, [(names[at], leaves[at]) for at in made.replaced])
    # XLA would copy a whole array in tall tiles for each block, or libtpu 0.0.51 aborts. So such arrays move once.
    stays = {at for at in made.on_host if isinstance(leaves[at], Entry) or not is_tall(leaves[at])}
    values = {at: leaf if at in stays else _whole(leaf) for at, leaf in enumerate(leaves)}

    def compute(wanted: Collection[int]) -> None:
        values.update({at: program.constants[at] for at in program.constants.keys() & wanted})
        program.run(program.needed_for(wanted, known=values), values)

    # Reductions over rows run first, in loops of their level; later passes and groups read their results.
    after: Any = jnp.int32(0)
    for group in made.passes:
        compute(group.free)
        on_host = [names[at] for at in group.leaves if at in made.on_host]
        on_whole = functools.partial(on_fallback or _warn, on_host)
        loop = _Loop(plan=made, group=group, rows=group.rows, chunk_bytes=chunk_bytes, on_whole=on_whole, reason=None)
        totals = [identity(equation.primitive, program.avals[equation.outputs[0]]) for equation in group.folds]
        done, after = loop({at: values[at] for at in (*group.leaves, *group.free)}, totals, after)
        for equation, total in zip(group.folds, done, strict=True):
            (at,) = equation.outputs
            values[at] = total.astype(program.avals[at].dtype)
    in_loops = {position for group in made.groups for position in group.outputs}
    before = {at for group in made.groups for at in group.free}
    before.update(value for position, value in enumerate(program.outputs) if position not in in_loops)
    compute(before)

    results: dict[int, Any] = {}
    for group in made.groups:
        whole = by_leaf or prevented is not None
        rows, mesh, spec, reason = (0, None, None, prevented) if whole else _on_mesh(group, made.replaced, placed)
        on_host = [names[at] for at in group.leaves if at in made.on_host]
        loop = _Loop(
            plan=made,
            group=group,
            rows=rows,
            chunk_bytes=chunk_bytes,
            on_whole=None if by_leaf else functools.partial(on_fallback or _warn, on_host),
            reason=reason,
        )
        read = {at: values[at] for at in (*group.leaves, *group.free)}
        # Leaves that were moved whole are updated on the device and moved back whole.
        targets = {at: made.replaced[at] for at in group.outputs}
        moved = {at: target for at, target in targets.items() if values[target] is not leaves[target]}
        buffers = [_buffer(program, values[target], program.outputs[at]) for at, target in targets.items()]
        done, after = (loop if mesh is None else _in_shards(loop, mesh, spec))(read, buffers, after)
        results.update(zip(group.outputs, done, strict=True))
        results.update({at: _replaced(leaves[target], results[at]) for at, target in moved.items()})
    for position, value in enumerate(program.outputs):
        if position not in results:
            leaf = leaves[made.replaced[position]]
            is_same = values[value] is leaf  # the update does not change this state
            results[position] = _array(leaf) if is_same else _replaced(leaf, _whole(values[value]))
    return made.treedef.unflatten([results[at] for at in range(len(program.outputs))])


def _warn(paths: list[str], reason: str) -> None:
    listed = ", ".join(paths[:4]) + (f", … ({len(paths) - 4} more)" if len(paths) > 4 else "")
    warnings.warn(
        f"{listed}: updated as a whole on the device instead of block by block, because {reason}\n"
        "hint: the leaves of one such group are on the device together while it is updated; an optimizer that works "
        "element by element, such as optax.adamw, needs a few blocks only",
        PlacementWarning,
        stacklevel=2,
    )


def large_on_host(leaves: Sequence[Any], chunk_bytes: int, declared: Collection[int]) -> list[int]:
    """Return the positions of the host leaves that are worth a loop, in order."""
    on_host = [
        at
        for at, leaf in enumerate(leaves)
        if leaf.ndim and (at in declared or isinstance(leaf, Entry) or _space(leaf) is HOST)
    ]
    # Leaves that cannot be cut, such as block scales, are moved whole if they are small compared with all host leaves.
    # Otherwise they would force their groups to be updated whole.
    most = sum(leaf_bytes(leaves[at]) for at in on_host) // _UNCUT_PART
    on_host = [
        at for at in on_host if is_row_major(leaves[at].shape, leaves[at].dtype) or leaf_bytes(leaves[at]) > most
    ]
    small, total = set[int](), 0
    for at in sorted(on_host, key=lambda at: leaf_bytes(leaves[at])):
        num_bytes = leaf_bytes(leaves[at])
        total += num_bytes
        if num_bytes * _SMALL_PART > chunk_bytes or total * 2 > chunk_bytes:
            break
        small.add(at)
    return [at for at in on_host if at not in small]


def _flat_shardings(shardings: Tree, args: Sequence[Tree]) -> dict[int, Any]:
    if shardings is None:
        return {}
    structure = jax.tree.structure(tuple(args))
    return {at: s for at, s in enumerate(structure.flatten_up_to(shardings)) if s is not None}


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Entry) else leaf


def _space(leaf: Any) -> Any:
    return memory_space(leaf.array if isinstance(leaf, Entry) else leaf)


def _check_entries(program: Program, targets: Sequence[tuple[str, Any]]) -> None:
    """Raise if an output does not fit the entry of a stacked array that it replaces."""
    for (name, leaf), value in zip(targets, program.outputs, strict=True):
        aval = program.avals[value]
        if isinstance(leaf, Entry) and (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
            raise StructureError(
                f"{name}: an update changes the shape or dtype of a stacked leaf",
                expected=f"{leaf.dtype}{list(leaf.shape)}",
                got=f"{aval.dtype}{list(aval.shape)}",
                hint="choose an optimizer whose state keeps its dtype, or store parameters in that of their updates",
            )


def _buffer(program: Program, leaf: Any, value: int) -> Any:
    """Return the buffer for an output: the leaf that it replaces, or zeros if shape or dtype differ."""
    aval = program.avals[value]
    if leaf.dtype == aval.dtype and leaf.shape == aval.shape:
        return leaf
    return put(jnp.zeros(aval.shape, aval.dtype), memory_space(leaf))


def _on_mesh(group: Group, replaced: Sequence[int], placed: Mapping[int, Any]) -> tuple[int, Any, Any, str | None]:
    """Return how many axes of a group may be cut on a mesh.

    Returns:
        The number of axes; the mesh and the partition of these axes if the loop has to run on shards, else None for
        both; and the reason if the group has to stay whole.
    """
    if not group.rows:
        return 0, None, None, f"of the operation {group.blocked_by}"
    at = {*group.leaves, *(replaced[position] for position in group.outputs)} & placed.keys()
    known = [placed[leaf] for leaf in sorted(at) if not placed[leaf].is_fully_replicated]
    if not known:
        return group.rows, None, None, None
    rows = group.rows
    heads = {(*s.spec, *(None,) * rows)[:rows] for s in known}
    tails = [axis for s in known for axis in s.spec[rows:] if axis]
    if len(heads) == 1 and not tails:
        return rows, known[0].mesh, heads.pop(), None
    # A slice along axes before the first sharded one is local on each device.
    rows = min(rows, *(next(at for at, axis in enumerate(s.spec) if axis) for s in known))
    return rows, None, None, None if rows else "its leaves are sharded along axes that cannot be cut"


def _in_shards(loop: _Loop, mesh: Any, spec: Any) -> Callable[..., Any]:
    """Run the loop on each device's shard of every array."""

    def run(read: Mapping[int, Any], buffers: Sequence[Any], after: Any) -> Any:
        def of(array: Any) -> Any:  # an axis of size 1 is broadcast along rows
            return jax.P(*(axis if size > 1 else None for axis, size in zip(spec, array.shape, strict=False)))

        specs = ({at: of(array) for at, array in read.items()}, [of(b) for b in buffers], jax.P())
        return jax.shard_map(loop, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=specs[1:], check_vma=False)(
            dict(read), list(buffers), after
        )

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """The update of one group of leaves, called on full arrays or, inside a `shard_map`, on shards."""

    plan: Plan
    group: Group
    rows: int
    chunk_bytes: int
    on_whole: Callable[[str], None] | None
    reason: str | None

    def __call__(self, read: Mapping[int, Any], buffers: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
        streamed = [read[at] for at in self.group.leaves if at in self.plan.on_host]
        num_bytes = sum(map(leaf_bytes, streamed))
        on_host = [*streamed, *(buffer for buffer in buffers if _space(buffer) is HOST)]
        prefix = read[self.group.leaves[0]].shape[: self.rows]
        # 8-bit state is computed in float32. So a block counts in the widest dtype; otherwise it could have four times
        # `chunk_bytes`.
        wide = sum(leaf.size * max(leaf.dtype.itemsize, self._widest) for leaf in map(_shape, streamed))
        cut = None
        if self.rows and all(is_row_major(leaf.shape, leaf.dtype) for leaf in on_host):
            # XLA keeps the tiles of device arrays. A block of half a tile would change the layout of the whole array.
            is_on_device = not any(_space(leaf) is HOST for leaf in on_host)
            rows = max(most_tile_rows(leaf.dtype) for leaf in on_host) if is_on_device else None
            cut = cut_block(prefix, min(leaf.ndim for leaf in on_host), wide, self.chunk_bytes, device_rows=rows)
        if num_bytes > self.chunk_bytes and not cut and self.on_whole:
            self.on_whole(
                self.reason
                or "its shape cannot be cut into whole tiles of 8 x 128, as TPUs need and all backends keep to"
            )
        if cut is None:
            return self._run(read, buffers, after, (), 1, lambda i: ((), 0), prefix)
        axis, size = cut
        shapes = [_array(buffer).shape for buffer in buffers]
        read = {at: _merged(leaf, axis) for at, leaf in read.items()}
        buffers = [_merged(buffer, axis) for buffer in buffers]
        length, outer = prefix[axis], math.prod(prefix[:axis])

        def blocks_of(size: int, offset: int, buffers: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
            per = (length - offset) // size

            def start(i: Any) -> tuple[tuple[Any, ...], Any]:
                lead = jnp.unravel_index(i // per, prefix[:axis]) if axis else ()
                at = offset + i % per * size
                return (*lead, at), i // per * length + at

            return self._run(read, buffers, after, (*(1,) * axis, size), outer * per, start, prefix)

        done, after = blocks_of(size, 0, buffers, after)
        # The rows that do not fill a block run in a second loop, on the buffers that the first loop returned.
        if rest := length % size:
            again = [_like(buffer, array) for buffer, array in zip(buffers, done, strict=True)]
            done, after = blocks_of(rest, length - rest, again, after)
        return [array.reshape(shape) for array, shape in zip(done, shapes, strict=True)], after

    @property
    def _widest(self) -> int:
        """Number of bytes of the widest floating-point dtype in the computation of a block."""
        avals = self.plan.program.avals
        made = [avals[at].dtype for equation in self.group.equations for at in equation.outputs]
        return max((dtype.itemsize for dtype in made if jnp.issubdtype(dtype, jnp.inexact)), default=1)

    def _run(
        self,
        read: Mapping[int, Any],
        buffers: Sequence[Any],
        after: Any,
        sizes: Sequence[int],
        count: int,
        start: Callable[[Any], tuple[tuple[Any, ...], Any]],
        prefix: Sequence[int],
    ) -> tuple[list[Any], Any]:
        program, outputs = self.plan.program, self.group.outputs
        targets = [self.plan.replaced[at] for at in outputs]
        # The barrier hides the trip count from XLA, and makes this loop depend on the end of the previous one.
        trips, _ = jax.lax.optimization_barrier((jnp.int32(count), after))

        def body(carry: Any) -> Any:
            i, arrays = carry
            where = start(i)
            now = [_like(buffer, array) for buffer, array in zip(buffers, arrays, strict=True)]
            # A leaf that is overwritten is read from the buffer that is written, so there is one buffer instead of two.
            same = {at: b for at, b in zip(targets, now, strict=False) if at in read and _are_alike(b, read[at])}
            blocks = {at: _slice(leaf, where, sizes) for at, leaf in {**read, **same}.items()}
            # Beyond the cut axis, a shard may be shorter than the leaf that was traced.
            program.run(self.group.equations, blocks, (*sizes, *prefix[len(sizes) :]))
            if self.group.folds:
                folds = zip(self.group.folds, arrays, strict=True)
                return i + 1, [folded(e.primitive, e.params, blocks[e.inputs[0]], total) for e, total in folds]
            new = [blocks[program.outputs[at]] for at in outputs]
            written: list[Any] = []
            for pair in zip(now, new, strict=True):
                # XLA for CPUs may read the block of one array again to compute another, so the writes run one after the
                # other.
                wait = later(jnp.int32(0), written[-1:])
                written.append(_write(*pair, (tuple(at + wait for at in where[0]), where[1] + wait)))
            return i + 1, written

        first = [_array(buffer) for buffer in buffers]
        after, done = jax.lax.while_loop(lambda carry: carry[0] < trips, body, (jnp.int32(0), first))
        return done, after


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A host array with its leading axes merged, and the row where the leaf starts."""

    array: Any
    begin: Any

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, (Entry, _Rows)) else leaf


def _are_alike(leaf: Any, other: Any) -> bool:
    mine, others = _array(leaf), _array(other)
    return (mine.shape, mine.dtype) == (others.shape, others.dtype)


def _like(leaf: Any, array: Any) -> Any:
    """Return the leaf with another array."""
    return dataclasses.replace(leaf, array=array) if isinstance(leaf, (Entry, _Rows)) else array


def _merged(leaf: Any, axis: int) -> Any:
    """Merge the leading axes of a host array or an entry: libtpu aborts on a host slice that starts along two axes."""
    if memory_space(leaf.array if isinstance(leaf, Entry) else leaf) is HOST:
        check_host_slices()
    if isinstance(leaf, Entry):
        rows = leaf.array.reshape(-1, *leaf.shape[axis + 1 :])
        return _Rows(rows, leaf.index * math.prod(leaf.shape[: axis + 1]))
    if memory_space(leaf) is HOST and leaf.ndim:
        return _Rows(leaf.reshape(-1, *leaf.shape[axis + 1 :]), 0)
    return leaf


def _slice(leaf: Any, where: tuple[tuple[Any, ...], Any], sizes: Sequence[int]) -> Any:
    """Return a block of a leaf on the device; a scalar belongs to every block."""
    if isinstance(leaf, _Rows):
        block = jax.lax.dynamic_slice_in_dim(leaf.array, leaf.begin + where[1], sizes[-1])
        return put(block, DEVICE).reshape(*sizes, *leaf.array.shape[1:])
    if isinstance(leaf, Entry) or not leaf.ndim or not sizes:
        return _whole(leaf)
    # An axis of size 1 belongs to every block, too: elementwise operations broadcast it.
    where_here = [at if size > 1 else 0 for at, size in zip(where[0], leaf.shape, strict=False)]
    shape = (*map(min, sizes, leaf.shape), *leaf.shape[len(sizes) :])
    return jax.lax.dynamic_slice(leaf, _starts(where_here, leaf.ndim), shape)


def _write(leaf: Any, block: Any, where: tuple[tuple[Any, ...], Any]) -> Any:
    """Write a block into the array of a leaf."""
    if isinstance(leaf, _Rows):
        rows = put(block.reshape(-1, *leaf.array.shape[1:]), memory_space(leaf.array))
        return jax.lax.dynamic_update_slice_in_dim(leaf.array, rows, leaf.begin + where[1], 0)
    if not where[0] or isinstance(leaf, Entry):
        return _replaced(leaf, block)
    return jax.lax.dynamic_update_slice(leaf, block, _starts(where[0], leaf.ndim))


def _starts(leading: Sequence[Any], ndim: int) -> list[Any]:
    """Return the start of a slice along all axes, in int32 also if JAX's default integers have 64 bits."""
    return [jnp.asarray(at, jnp.int32) for at in (*leading, *(0,) * (ndim - len(leading)))]


def _whole(leaf: Any) -> Any:
    """Return a leaf on the device."""
    return read_entry(leaf.array, leaf.index) if isinstance(leaf, Entry) else put(leaf, DEVICE)


def _replaced(leaf: Any, value: Any) -> Any:
    """Replace the whole array of a leaf, in its memory."""
    return write_entry(leaf.array, value, leaf.index) if isinstance(leaf, Entry) else put(value, memory_space(leaf))
