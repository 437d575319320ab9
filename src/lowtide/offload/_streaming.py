"""Update arrays in host memory block by block; each block is written back in place.

If a program moves whole trees to the device, XLA hoists all moves together: for four Adam states, offloading saved 5 %
of the memory instead of half. XLA cannot hoist slices out of a loop. So each group of leaves that `_separable` proves
independent is updated in a loop over blocks of its leading axes: slice on the host, move, compute, move back, and write
into the same buffer. XLA would unroll a loop of one block and overlap its copies, so its trip count is hidden from XLA.
Each trip count depends on the previous loop, so temporaries exist for one group of leaves at a time.

Limits: on a mesh, a slice along a sharded axis would gather the leaf. A tracer has no sharding, so the caller has to
pass shardings; the loops then run on each device's shard.
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
from ._host_memory import DEVICE, HOST, cut_block, index_after, is_tall, put, warn_of_tall_tiles
from ._host_memory import read as read_entry
from ._host_memory import write as write_entry
from ._separable import Group, Program, fold_block, initial_value, separate, trace

# Host leaves of at most 1/64 of a block are moved whole, before the groups, as long as they have at most half a block
# together. Loops over them would save nothing. Then values that depend only on such leaves (Adafactor's row and column
# statistics) do not join other leaves to one group. Leaves that cannot be cut are moved whole if they have at most 1/16
# of the bytes of all host leaves.
_SMALL_PART = 64
_UNCUT_PART = 16
_is_analysed = contextvars.ContextVar("is_analysed", default=False)
"""Whether a function is being traced for analysis. Then `stream` calls its function directly, because loops would hide
the computation."""
_is_part = contextvars.ContextVar("is_part", default=False)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a stacked array's leading axis, as a leaf of the arguments of `stream`; it is updated in place."""

    array: Any
    index: Any
    """Position on the array's leading axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    @property
    def ndim(self) -> int:
        return self.array.ndim - 1

    @property
    def dtype(self) -> Any:
        return self.array.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The analysis of a function by `plan`: the loops in which `stream` runs it."""

    program: Program
    treedef: Any
    replaced: tuple[int, ...]
    """For each output, the flat position of the leaf that it overwrites."""
    on_host: frozenset[int]
    """Flat positions of the host leaves that are large enough for a loop."""
    groups: tuple[Group, ...]
    """Groups of leaves that are updated in loops."""
    passes: tuple[Group, ...]
    """Loops for reductions; they run before the groups and overwrite no leaf."""


def plan(
    fn: Callable[..., Any],
    args: Sequence[Tree],
    replaces: Callable[..., Any],
    *,
    chunk_bytes: int,
    declared: Collection[int] = (),
    fold: bool = False,
) -> Plan:
    """Trace a function and divide it into loops; arguments as in `stream`; `fold` allows loops for reductions.

    Returns:
        The plan. Each of its `groups` has the number of leading axes that may be cut (`rows`). If that is 0,
        `blocked_by` names the operation that prevents a cut.

    Raises:
        StructureError: when the result does not have the structure that `replaces` returns.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    on_host = large_on_host(leaves, chunk_bytes, declared)
    with tracing_for_analysis():
        program, treedef = trace(fn, jax.tree.map(_shape, tuple(args)), on_host)
    indices: Any = structure.unflatten(range(len(leaves)))
    replaced, expected = jax.tree.flatten(replaces(*indices))
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
        The program, whose ``run`` computes any of its values, and the tree structure of the function's result.
    """
    with tracing_for_analysis():
        return trace(fn, args, ())


@contextlib.contextmanager
def _true_inside(variable: contextvars.ContextVar[bool]) -> Generator[None]:
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


tracing_for_analysis = functools.partial(_true_inside, _is_analysed)
"""Context manager: inside it, `stream` calls its function directly, because the function is traced for analysis."""
part_of_parameters = functools.partial(_true_inside, _is_part)
"""Context manager: inside it, `is_part` is true, because an optimizer receives only a part of the parameters."""


def is_part() -> bool:
    """Return whether an optimizer receives only a part of the parameters; its patterns may then select no leaf."""
    return _is_part.get()


def is_taken_apart() -> bool:
    """Return whether a function is being traced for analysis; loops and kernels would then hide its operations."""
    return _is_analysed.get()


def refuse_other_structure(got: Any, expected: Any) -> None:
    """Raise `StructureError` if an update's result has another structure than the trees that it replaces."""
    if expected != got:
        problem = "the result of an update does not have the structure of the trees that it replaces"
        hint = "return trees like grads and state from update(grads, state, params)"
        raise StructureError(problem, expected=expected, got=got, hint=hint)


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
    """Compute ``fn(*args)`` for arguments in host memory, with a few blocks at a time on the device.

    Inside a function that another `stream` traces, `fn` is called directly, and the outer loops apply. A
    `PlacementWarning` names side effects of `fn`, which are left out, and arrays that a TPU has to move whole.

    Args:
        fn: a function of trees of arrays, such as ``tx.update``.
        args: its arguments. Leaves may be in device or host memory, or be an `Entry` of a stacked array. If a result
            overwrites an `Entry`, the whole stacked array is returned in its place.
        replaces: called with placeholders for the leaves of `args`; returns those that the results overwrite, in the
            structure of the results. For ``tx.update`` it is ``lambda grads, state, params: (grads, state)``.
        chunk_bytes: approximate bytes of the host leaves in one block. Blocks are cut at multiples of the hardware's
            tiles.
        by_leaf: if True, nothing is cut: leaves are updated whole, one group of dependent leaves at a time.
        shardings: None, or a tuple like `args` with a `jax.sharding.NamedSharding` or None for each leaf.
        prevented: the reason why nothing can be cut, for warnings; None if leaves may be cut.
        declared: flat positions of leaves that are streamed like host leaves, whatever memory their types show.
        on_fallback: called when a group is larger than a block and cannot be cut, with the paths of its host leaves and
            the reason. A path begins with the argument's position. None: a `PlacementWarning`.

    Returns:
        The value of ``fn(*args)``, each leaf in the memory of the leaf that it replaces.

    Raises:
        StructureError: when the result's structure is not that of `replaces`, or changes an `Entry`'s shape or dtype.

    Memory:
        Donated host leaves are updated in place. The device holds about two blocks. A group that cannot be cut is on
        the device whole while it is updated, one group at a time.
    """
    if is_taken_apart():
        return fn(*args)
    paths = [path for path, _ in leaves_with_paths(tuple(args))]
    leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in jax.tree.leaves(tuple(args))]
    flat_shardings = [] if shardings is None else jax.tree.structure(tuple(args)).flatten_up_to(shardings)
    specs = {index: sharding for index, sharding in enumerate(flat_shardings) if sharding is not None}
    fold = not (by_leaf or prevented or any(not sharding.is_fully_replicated for sharding in specs.values()))
    loops = plan(fn, args, replaces, chunk_bytes=chunk_bytes, declared=declared, fold=fold)
    program = loops.program
    if program.effects:
        warnings.warn(
            f"the update has effects, which a streamed update leaves out: {', '.join(program.effects)}\n"
            'hint: call jax.debug.print outside of the optimizer, or use lt.offload.optimizer(mode="whole"), which '
            "keeps effects",
            PlacementWarning,
            stacklevel=3,
        )
    warn_of_tall_tiles((paths[index], _array(leaves[index])) for index in loops.on_host)
    for index, value in zip(loops.replaced, program.outputs, strict=True):
        leaf = leaves[index]
        if isinstance(leaf, Entry):
            refuse_other_type(paths[index], leaf.array, program.avals[value])
    # With tall tiles, XLA would copy the whole array for each block, or libtpu 0.0.51 aborts. So such arrays move once.
    in_place = {index for index in loops.on_host if isinstance(leaves[index], Entry) or not is_tall(leaves[index])}
    values = {index: leaf if index in in_place else _to_device(leaf) for index, leaf in enumerate(leaves)}

    def compute(needed: Collection[int]) -> None:
        values.update({value: program.constants[value] for value in program.constants.keys() & needed})
        program.run(program.needed_for(needed, known=values), values)

    def make_loop(group: Group, rows: int, reason: str | None) -> tuple[_Loop, dict[int, Any]]:
        on_host = [paths[index] for index in group.leaves if index in loops.on_host]
        on_whole = None if by_leaf else functools.partial(on_fallback or _warn, on_host)
        loop = _Loop(plan=loops, group=group, rows=rows, chunk_bytes=chunk_bytes, on_whole=on_whole, reason=reason)
        return loop, {value: values[value] for value in (*group.leaves, *group.free)}

    # The passes (reductions over rows) run first, because later passes and the groups read their results.
    after: Any = jnp.int32(0)
    for group in loops.passes:
        compute(group.free)
        loop, loop_inputs = make_loop(group, group.rows, None)
        totals = [initial_value(equation.primitive, program.avals[equation.outputs[0]]) for equation in group.folds]
        updated, after = loop(loop_inputs, totals, after)
        for equation, total in zip(group.folds, updated, strict=True):
            (output,) = equation.outputs
            values[output] = total.astype(program.avals[output].dtype)
    looped = {position for group in loops.groups for position in group.outputs}
    early_values = {value for group in loops.groups for value in group.free}
    early_values.update(value for position, value in enumerate(program.outputs) if position not in looped)
    compute(early_values)
    results: dict[int, Any] = {}
    for group in loops.groups:
        is_whole = by_leaf or prevented is not None
        rows, mesh, spec, reason = (0, None, None, prevented) if is_whole else _mesh_rows(group, loops.replaced, specs)
        loop, loop_inputs = make_loop(group, rows, reason)
        # Leaves that were moved whole are updated on the device and moved back whole.
        targets = {output: loops.replaced[output] for output in group.outputs}
        moved = {output: target for output, target in targets.items() if values[target] is not leaves[target]}
        buffers = [_buffer_for(program, values[target], program.outputs[output]) for output, target in targets.items()]
        updated, after = (loop if mesh is None else _shard_map_loop(loop, mesh, spec))(loop_inputs, buffers, after)
        results.update(zip(group.outputs, updated, strict=True))
        results.update({output: _replace_array(leaves[target], results[output]) for output, target in moved.items()})
    for position, value in enumerate(program.outputs):
        if position not in results:
            leaf = leaves[loops.replaced[position]]
            is_same = values[value] is leaf  # the update does not change this state
            results[position] = _array(leaf) if is_same else _replace_array(leaf, _to_device(values[value]))
    return loops.treedef.unflatten([results[position] for position in range(len(program.outputs))])


def _warn(paths: list[str], reason: str) -> None:
    listed = ", ".join(paths[:4]) + (f", … ({len(paths) - 4} more)" if len(paths) > 4 else "")
    warnings.warn(
        f"{listed} is updated as a whole on the device instead of block by block, because {reason}\n"
        "hint: choose an optimizer that works element by element, such as optax.adamw, and needs only a few blocks; "
        "otherwise the leaves of one such group are on the device together while it is updated",
        PlacementWarning,
        stacklevel=2,
    )


def large_on_host(leaves: Sequence[Any], chunk_bytes: int, declared: Collection[int]) -> list[int]:
    """Return the flat positions, in order, of the host leaves that are large enough for a loop."""
    on_host = [
        index
        for index, leaf in enumerate(leaves)
        if leaf.ndim and (index in declared or isinstance(leaf, Entry) or _space(leaf) is HOST)
    ]
    # Leaves that cannot be cut, such as block scales, are moved whole if they are small compared with all host leaves.
    # In a loop, they would force their groups to be updated whole.
    max_uncut_bytes = sum(leaf_bytes(leaves[index]) for index in on_host) // _UNCUT_PART
    on_host = [
        index
        for index in on_host
        if is_row_major(leaves[index].shape, leaves[index].dtype) or leaf_bytes(leaves[index]) > max_uncut_bytes
    ]
    small, total = set[int](), 0
    for index in sorted(on_host, key=lambda index: leaf_bytes(leaves[index])):
        num_bytes = leaf_bytes(leaves[index])
        total += num_bytes
        if num_bytes * _SMALL_PART > chunk_bytes or total * 2 > chunk_bytes:
            break
        small.add(index)
    return [index for index in on_host if index not in small]


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Entry) else leaf


def _space(leaf: Any) -> Any:
    return memory_space(_array(leaf))


def refuse_other_type(name: str, stacked: Any, new: Any) -> None:
    """Raise `StructureError` if a new value has another shape or dtype than one entry of a stacked array."""
    if (new.shape, new.dtype) != (stacked.shape[1:], stacked.dtype):
        old_type, new_type = f"{stacked.dtype}{list(stacked.shape[1:])}", f"{new.dtype}{list(new.shape)}"
        hint = "choose an optimizer whose state keeps its dtype, or store parameters in the dtype of the updates"
        raise StructureError(f"an update changes the shape or dtype of {name}: {old_type} to {new_type}", hint=hint)


def _buffer_for(program: Program, leaf: Any, value: int) -> Any:
    """Return the buffer for an output: the leaf that it replaces, or zeros if shape or dtype differ."""
    aval = program.avals[value]
    if leaf.dtype == aval.dtype and leaf.shape == aval.shape:
        return leaf
    return put(jnp.zeros(aval.shape, aval.dtype), memory_space(leaf))


def _mesh_rows(
    group: Group, replaced: Sequence[int], leaf_shardings: Mapping[int, Any]
) -> tuple[int, Any, Any, str | None]:
    """Return how many leading axes of a group may be cut, a mesh, the partition of these axes, and a reason.

    Mesh and partition are None unless the loop has to run on shards. The reason is why no axis may be cut, or None.
    """
    if not group.rows:
        return 0, None, None, f"of the operation {group.blocked_by}"
    leaf_indices = {*group.leaves, *(replaced[position] for position in group.outputs)} & leaf_shardings.keys()
    shardings = [leaf_shardings[leaf] for leaf in sorted(leaf_indices) if not leaf_shardings[leaf].is_fully_replicated]
    if not shardings:
        return group.rows, None, None, None
    rows = group.rows
    row_specs = {(*s.spec, *(None,) * rows)[:rows] for s in shardings}
    other_axes = [axis for s in shardings for axis in s.spec[rows:] if axis]
    if len(row_specs) == 1 and not other_axes:
        return rows, shardings[0].mesh, row_specs.pop(), None
    # A slice along axes before the first sharded one is local on each device.
    rows = min(rows, *(next(position for position, axis in enumerate(s.spec) if axis) for s in shardings))
    return rows, None, None, None if rows else "its leaves are sharded along axes that cannot be cut"


def _shard_map_loop(loop: _Loop, mesh: Any, spec: Any) -> Callable[..., Any]:
    def run(loop_inputs: Mapping[int, Any], buffers: Sequence[Any], after: Any) -> Any:
        def spec_of(array: Any) -> Any:  # an axis of size 1 is broadcast along rows
            return jax.P(*(axis if size > 1 else None for axis, size in zip(spec, array.shape, strict=False)))

        specs = ({value: spec_of(x) for value, x in loop_inputs.items()}, [spec_of(b) for b in buffers], jax.P())
        return jax.shard_map(loop, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=specs[1:], check_vma=False)(
            dict(loop_inputs), list(buffers), after
        )

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """The loop of one group or pass; called with full arrays or, inside a `shard_map`, with shards."""

    plan: Plan
    group: Group
    rows: int
    chunk_bytes: int
    on_whole: Callable[[str], None] | None
    reason: str | None

    def __call__(self, loop_inputs: Mapping[int, Any], buffers: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
        streamed = [loop_inputs[index] for index in self.group.leaves if index in self.plan.on_host]
        on_host = [*streamed, *(buffer for buffer in buffers if _space(buffer) is HOST)]
        prefix = loop_inputs[self.group.leaves[0]].shape[: self.rows]
        # 8-bit state is computed in float32, so a block of it could need four times `chunk_bytes`. So bytes are counted
        # in the widest floating-point dtype of the computation.
        avals = self.plan.program.avals
        dtypes = [avals[value].dtype for equation in self.group.equations for value in equation.outputs]
        least_itemsize = max((dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)), default=1)
        widest_bytes = sum(leaf.size * max(leaf.dtype.itemsize, least_itemsize) for leaf in map(_shape, streamed))
        cut = None
        if self.rows and all(is_row_major(leaf.shape, leaf.dtype) for leaf in on_host):
            # XLA keeps the tiles of device arrays: for blocks of half a tile, it would change the whole array's layout.
            is_on_device = not any(_space(leaf) is HOST for leaf in on_host)
            rows = max(most_tile_rows(leaf.dtype) for leaf in on_host) if is_on_device else None
            ndim = min(leaf.ndim for leaf in on_host)
            cut = cut_block(prefix, ndim, widest_bytes, self.chunk_bytes, device_rows=rows)
        if sum(map(leaf_bytes, streamed)) > self.chunk_bytes and not cut and self.on_whole:
            self.on_whole(
                self.reason
                or "its shape cannot be cut into whole tiles of 8 x 128, which TPUs need and all backends use"
            )
        if cut is None:
            return self._run(loop_inputs, buffers, after, (), 1, lambda i: ((), 0), prefix)
        axis, size = cut
        shapes = [_array(buffer).shape for buffer in buffers]
        loop_inputs = {index: _merge_axes(leaf, axis) for index, leaf in loop_inputs.items()}
        buffers = [_merge_axes(buffer, axis) for buffer in buffers]
        length, num_outer = prefix[axis], math.prod(prefix[:axis])

        def blocks_of(size: int, offset: int, buffers: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
            blocks_per_row = (length - offset) // size

            def start(i: Any) -> tuple[tuple[Any, ...], Any]:
                leading = jnp.unravel_index(i // blocks_per_row, prefix[:axis]) if axis else ()
                row = offset + i % blocks_per_row * size
                return (*leading, row), i // blocks_per_row * length + row

            sizes, count = (*(1,) * axis, size), num_outer * blocks_per_row
            return self._run(loop_inputs, buffers, after, sizes, count, start, prefix)

        results, after = blocks_of(size, 0, buffers, after)
        # The rows that do not fill a block run in a second loop, on the buffers that the first loop returned.
        if remainder := length % size:
            remaining_buffers = [_with_array(buffer, array) for buffer, array in zip(buffers, results, strict=True)]
            results, after = blocks_of(remainder, length - remainder, remaining_buffers, after)
        return [array.reshape(shape) for array, shape in zip(results, shapes, strict=True)], after

    def _run(
        self,
        loop_inputs: Mapping[int, Any],
        buffers: Sequence[Any],
        after: Any,
        sizes: Sequence[int],
        count: int,
        start: Callable[[Any], tuple[tuple[Any, ...], Any]],
        prefix: Sequence[int],
    ) -> tuple[list[Any], Any]:
        program, outputs = self.plan.program, self.group.outputs
        targets = [self.plan.replaced[position] for position in outputs]
        # The barrier hides the trip count from XLA, and makes this loop depend on the end of the previous one.
        num_trips, _ = jax.lax.optimization_barrier((jnp.int32(count), after))

        def body(carry: Any) -> Any:
            i, arrays = carry
            offsets = start(i)
            current_buffers = [_with_array(buffer, array) for buffer, array in zip(buffers, arrays, strict=True)]
            # A leaf that a result overwrites is read from the buffer of the result, so there is only one buffer.
            overwritten = {
                index: b
                for index, b in zip(targets, current_buffers, strict=False)
                if index in loop_inputs and _has_same_type(b, loop_inputs[index])
            }
            blocks = {index: _slice(leaf, offsets, sizes) for index, leaf in {**loop_inputs, **overwritten}.items()}
            # Beyond the cut axis, a shard may be shorter than the leaf that was traced.
            program.run(self.group.equations, blocks, (*sizes, *prefix[len(sizes) :]))
            if self.group.folds:
                folds = zip(self.group.folds, arrays, strict=True)
                return i + 1, [fold_block(e.primitive, e.params, blocks[e.inputs[0]], total) for e, total in folds]
            new_blocks = [blocks[program.outputs[position]] for position in outputs]
            written: list[Any] = []
            for buffer_and_block in zip(current_buffers, new_blocks, strict=True):
                # To compute one array, XLA for CPUs may read the block of another array again. So the writes run one
                # after the other.
                wait = index_after(jnp.int32(0), written[-1:])
                waiting_offsets = tuple(offset + wait for offset in offsets[0]), offsets[1] + wait
                written.append(_write(*buffer_and_block, waiting_offsets))
            return i + 1, written

        first = [_array(buffer) for buffer in buffers]
        after, results = jax.lax.while_loop(lambda carry: carry[0] < num_trips, body, (jnp.int32(0), first))
        return results, after


@dataclasses.dataclass(frozen=True)
class _Rows:
    """An array with its leading axes merged to rows, and the row where the leaf begins (above 0 only in an `Entry`)."""

    array: Any
    begin: Any


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, (Entry, _Rows)) else leaf


def _has_same_type(leaf: Any, other_leaf: Any) -> bool:
    array, other_array = _array(leaf), _array(other_leaf)
    return (array.shape, array.dtype) == (other_array.shape, other_array.dtype)


def _with_array(leaf: Any, array: Any) -> Any:
    return dataclasses.replace(leaf, array=array) if isinstance(leaf, (Entry, _Rows)) else array


def _merge_axes(leaf: Any, axis: int) -> Any:
    """Merge the leading axes of a host array or an `Entry`, because libtpu aborts on host slices along two axes."""
    if _space(leaf) is HOST:
        check_host_slices()
    if not isinstance(leaf, Entry) and (memory_space(leaf) is not HOST or not leaf.ndim):
        return leaf
    index = leaf.index if isinstance(leaf, Entry) else 0
    return _Rows(_array(leaf).reshape(-1, *leaf.shape[axis + 1 :]), index * math.prod(leaf.shape[: axis + 1]))


def _slice(leaf: Any, offsets: tuple[tuple[Any, ...], Any], sizes: Sequence[int]) -> Any:
    """Return a block of a leaf on the device; the block of a scalar is the scalar."""
    if isinstance(leaf, _Rows):
        block = jax.lax.dynamic_slice_in_dim(leaf.array, leaf.begin + offsets[1], sizes[-1])
        return put(block, DEVICE).reshape(*sizes, *leaf.array.shape[1:])
    if isinstance(leaf, Entry) or not leaf.ndim or not sizes:
        return _to_device(leaf)
    # Every block includes an axis of size 1, too, because elementwise operations broadcast it.
    starts = [offset if size > 1 else 0 for offset, size in zip(offsets[0], leaf.shape, strict=False)]
    shape = (*map(min, sizes, leaf.shape), *leaf.shape[len(sizes) :])
    return jax.lax.dynamic_slice(leaf, _starts(starts, leaf.ndim), shape)


def _write(leaf: Any, block: Any, offsets: tuple[tuple[Any, ...], Any]) -> Any:
    if isinstance(leaf, _Rows):
        rows = put(block.reshape(-1, *leaf.array.shape[1:]), memory_space(leaf.array))
        return jax.lax.dynamic_update_slice_in_dim(leaf.array, rows, leaf.begin + offsets[1], 0)
    if not offsets[0] or isinstance(leaf, Entry):
        return _replace_array(leaf, block)
    return jax.lax.dynamic_update_slice(leaf, block, _starts(offsets[0], leaf.ndim))


def _starts(leading: Sequence[Any], ndim: int) -> list[Any]:
    """Return the start indices of a slice along all axes, in int32 even if JAX's default integers have 64 bits."""
    return [jnp.asarray(start, jnp.int32) for start in (*leading, *(0,) * (ndim - len(leading)))]


def _to_device(leaf: Any) -> Any:
    return read_entry(leaf.array, leaf.index) if isinstance(leaf, Entry) else put(leaf, DEVICE)


def _replace_array(leaf: Any, value: Any) -> Any:
    return write_entry(leaf.array, value, leaf.index) if isinstance(leaf, Entry) else put(value, memory_space(leaf))
