"""Split of operations that contain other operations: a `cond` (or `switch`) and a `shard_map`.

JAX differentiates each of them as a whole: one operation of the backward pass computes gradients of input and weights.
This module replaces this operation by two. The first computes the values that the input gradient needs, and saves the
values that the second reads. The inside of each branch is cut in the same way as a stage. All branches save arrays of
the same shapes. A branch that does not compute one of them saves zeros, as JAX does for residuals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from ...jaxprs import bodies, close, is_closed, manual_devices, source_line
from ._cut import Pass, Reach, Sink, Source, assign
from ._graph import Atom, Graph, Loop, Op, Value, graph
from ._replay import Environment, Plan

_EARLY = (Pass.HOISTED, Pass.FORWARD, Pass.INPUT)
_LATE = (Pass.WEIGHT,)


@dataclasses.dataclass(frozen=True, eq=False)
class WholeOp:
    """An operation that contributes to gradients of input and weights and cannot be split."""

    eqn: Any
    flops: int
    """FLOPs in one run of the stage."""
    location: str
    """Source line of the operation, or of the operation that contains it; empty if unknown."""


def split_nested(outer_graph: Graph, sources: list[Source], sinks: list[Sink]) -> list[WholeOp]:
    """Replace operations that contribute to gradients of both input and weights by two operations each, where possible.

    Changes the items of `outer_graph` (a stage, or the inside of such an operation) in place. `sources` are the roles
    of its inputs. Returns the heavy operations (`Op.is_heavy`) that contribute to both gradients and stay whole.
    """
    reach = Reach(outer_graph, sources, sinks)
    effects = [op for op in reach.nodes if isinstance(op, Op) and op.has_effects]

    def values_read_by(nodes: Sequence[Op | Sink]) -> set[Value]:
        return {value for node in reach.ancestors(nodes) for value in reach.reads(node)}

    needed = values_read_by([*effects, *(sink for sink in sinks if not sink.is_added)])
    return _split_items(outer_graph.items, reach, needed, values_read_by([*effects, *sinks]), 1)


def _split_items(
    items: list[Op | Loop], reach: Reach, needed: set[Value], live: set[Value], num_times: int
) -> list[WholeOp]:
    new_items: list[Op | Loop] = []
    whole_ops: list[WholeOp] = []
    for item in items:
        if isinstance(item, Loop):
            whole_ops += _split_items(item.body, reach, needed, live, num_times * item.length)
            new_items.append(item)
            continue
        ops, inner_ops = _split_operation(item, reach, needed, live)
        new_items += ops
        whole_ops += [dataclasses.replace(whole_op, flops=whole_op.flops * num_times) for whole_op in inner_ops]
    items[:] = new_items
    return whole_ops


def _split_operation(op: Op, reach: Reach, needed: set[Value], live: set[Value]) -> tuple[list[Op], list[WholeOp]]:
    """Return `op` or its two replacements, and the heavy operations that stay whole: `op` or some inside of it."""
    # Early results are needed for the input gradient or an effect; late results only for weight gradients.
    early: list[int] = []
    late: list[int] = []
    for i, value in enumerate(op.outputs):
        if _is_read(value, live):
            (early if _is_read(value, needed) else late).append(i)
    if not (early and late) or op.eqn is None or Source.COTANGENT not in reach.ancestors([op]):
        return [op], []
    if op.name in _SEPARATE:
        return [_restrict(op, early), _restrict(op, late)], []
    if op.has_effects or op.name not in ("cond", "shard_map"):
        return [op], [WholeOp(op.eqn, op.flops, source_line(op.eqn))] if op.is_heavy else []

    def source(atom: Atom) -> Source:
        # Every pass has weights, the batch and literals, so no bytes are kept if a late operation reads them.
        is_available = not isinstance(atom, Value) or atom in reach.weight_only or atom in reach.batch_only
        return Source.BATCH if is_available else Source.COTANGENT

    return _split_in_two(op, early, late, [source(atom) for atom in op.reads])


_SEPARATE = {"optimization_barrier", "psum", "psum_invariant", "pvary"}
"""Operations on several arrays in which each result depends on one operand."""


def _restrict(op: Op, indices: list[int]) -> Op:
    """Return the operation for some of its operands and the results that belong to them."""
    eqn = op.eqn

    def run(*values: Any) -> Sequence[Any]:
        return eqn.primitive.bind(*values, **eqn.params)

    return Op(op.name, [op.reads[i] for i in indices], [op.outputs[i] for i in indices], run)


def _is_read(value: Value | None, read_values: set[Value]) -> bool:
    while value is not None and value not in read_values:
        value = value.stack
    return value is not None


class _Branch:
    """A branch of a `cond`, or the body of a `shard_map`, cut into an early and a late half."""

    def __init__(self, jaxpr: Any, early: Sequence[int], late: Sequence[int], sources: list[Source]) -> None:
        self.graph = graph(jaxpr if is_closed(jaxpr) else close(jaxpr))
        outputs = self.graph.outputs
        sinks = [Sink([outputs[i]], Pass.INPUT) for i in early]
        late_sinks = [Sink([outputs[i]], Pass.WEIGHT, is_added=True) for i in late]
        self.whole_ops = split_nested(self.graph, sources, [*sinks, *late_sinks])
        passes, free = assign(self.graph, sources, [*sinks, *late_sinks])
        # A branch has no gradient totals. So weight gradients that are computed early are saved for the second half.
        late_sinks = [dataclasses.replace(sink, is_added=False) for sink in late_sinks]
        self.plan = Plan(self.graph, passes, free, [*sinks, *late_sinks])
        self.saved_values = [
            v
            for v, (producer, last_reader) in self.plan.saved_values().items()
            if producer in _EARLY and last_reader in _LATE
        ]

    def reads(self, passes: Sequence[Pass]) -> set[int]:
        """Return the positions of the inputs that passes read."""
        inputs = enumerate(self.graph.inputs)
        return {i for i, value in inputs if self.plan.reads.get(value, set()).intersection(passes)}

    def run(self, passes: Sequence[Pass], outputs: Sequence[int], env: Environment) -> list[Any]:
        """Compute the outputs at these positions; intermediate values are added to the environment."""
        for pass_ in passes:
            self.plan.run(pass_, env, {}, {}, {})
        atoms: list[Any] = [self.graph.outputs[i] for i in outputs]
        return [jnp.asarray(self.plan.read(atom, env, {}), atom.aval.dtype) for atom in atoms]


@dataclasses.dataclass(frozen=True)
class _SavedArray:
    """An array that the first half saves for the second half, whichever branch runs."""

    shape: tuple[int, ...]
    dtype: Any
    varying_axes: tuple[str, ...] = ()
    """Axes of a `shard_map` along which it varies."""


def _split_in_two(op: Op, early: list[int], late: list[int], sources: list[Source]) -> tuple[list[Op], list[WholeOp]]:
    params, is_cond = op.eqn.params, op.name == "cond"
    num_index_operands = int(is_cond)  # the first operand of a `cond` is the branch index
    branches = [_Branch(body.jaxpr, early, late, sources[num_index_operands:]) for body in bodies(op.eqn)]
    arrays, positions = _match_saved_arrays(branches, params)
    loop = op.results[0].loop
    sizes = {} if is_cond else params["mesh"].shape
    saved_values: list[Value] = []
    for array in arrays:
        shape = array.shape if is_cond else (math.prod(sizes[axis] for axis in array.varying_axes), *array.shape)
        left_varying = frozenset(array.varying_axes if is_cond else ())
        saved_values.append(Value(ShapedArray(shape, array.dtype), loop, left_varying=left_varying))

    def make_run(
        branch: _Branch, branch_positions: list[int], inputs: list[int], *, is_first: bool
    ) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            env: Environment = dict(zip([branch.graph.inputs[i] for i in inputs], operands, strict=is_first))
            saved_positions = list(zip(branch.saved_values, branch_positions, strict=True))
            if not is_first:
                env.update((value, operands[len(inputs) + i]) for value, i in saved_positions)
                return branch.run(_LATE, late, env)
            results = branch.run(_EARLY, early, env)
            saved = {i: env[value] for value, i in saved_positions}
            return results + [_as_saved_array(saved.get(i), array, is_cond) for i, array in enumerate(arrays)]

        return run

    num_devices = 1 if is_cond else manual_devices(params)
    ops: list[Op] = []
    for is_first, passes, indices in ((True, _EARLY, early), (False, _LATE, late)):
        inputs = sorted({i for branch in branches for i in branch.reads(passes)})
        runs = [make_run(*pair, inputs, is_first=is_first) for pair in zip(branches, positions, strict=True)]
        run = _switch(runs) if is_cond else _shard_map_half(runs[0], params, inputs, indices, arrays, is_first=is_first)
        reads = [*op.reads[:num_index_operands], *(op.reads[num_index_operands + i] for i in inputs)]
        outputs = [op.outputs[i] for i in indices]
        (outputs if is_first else reads).extend(saved_values)
        flops = num_devices * max(sum(map(branch.plan.flops, passes)) for branch in branches)
        ops.append(Op(op.name, reads, outputs, run, is_heavy=True, flops=flops))
    return ops, [
        WholeOp(whole_op.eqn, whole_op.flops * num_devices, whole_op.location or source_line(op.eqn))
        for branch in branches
        for whole_op in branch.whole_ops
    ]


def _match_saved_arrays(branches: Sequence[_Branch], params: Any) -> tuple[list[_SavedArray], list[list[int]]]:
    """Return the arrays that branches save, and for each branch the positions of its arrays among them.

    Branches share a position if shape, dtype and varying axes agree.
    """
    saved_arrays: list[_SavedArray] = []
    positions: list[list[int]] = []
    for branch in branches:
        branch_positions: list[int] = []
        for value in branch.saved_values:
            saved_array = _SavedArray(value.struct.shape, value.struct.dtype, _varying_axes(value, params))
            matches = (
                i for i, candidate in enumerate(saved_arrays) if candidate == saved_array and i not in branch_positions
            )
            index = next(matches, len(saved_arrays))
            saved_arrays += [saved_array] if index == len(saved_arrays) else []
            branch_positions.append(index)
        positions.append(branch_positions)
    return saved_arrays, positions


def _varying_axes(value: Value, params: Any) -> tuple[str, ...]:
    if "newly_manual_axes" not in params:
        return tuple(sorted(value.varying))
    axes = params["newly_manual_axes"]
    if params["check_vma"]:  # a value that does not vary must not be typed as varying
        axes = axes & value.varying
    return tuple(axis for axis in params["mesh"].axis_names if axis in axes)


def _as_saved_array(value: Any, saved_array: _SavedArray, is_branch: bool) -> Any:
    """Return the array that a branch saves, or zeros, cast so that all branches agree on the varying axes."""
    value = jnp.zeros(saved_array.shape, saved_array.dtype) if value is None else value
    if not (is_branch and saved_array.varying_axes):
        return value
    missing = set(saved_array.varying_axes) - jax.typeof(value).manual_axis_type.varying
    return lax.pcast(value, tuple(sorted(missing)), to="varying")


def _switch(runs: Sequence[Callable[..., list[Any]]]) -> Callable[..., list[Any]]:
    return lambda index, *operands: lax.switch(index, runs, *operands)


def _shard_map_half(
    run: Callable[..., list[Any]],
    params: Any,
    reads: Sequence[int],
    outputs: Sequence[int],
    saved_arrays: Sequence[_SavedArray],
    *,
    is_first: bool,
) -> Callable[..., list[Any]]:
    """Make one half of a `shard_map`; each saved array gets a leading axis, with an entry for each device's part."""
    specs = [PartitionSpec(saved_array.varying_axes or None) for saved_array in saved_arrays]
    ins, outs = ([params[name][i] for i in indices] for name, indices in (("in_specs", reads), ("out_specs", outputs)))

    def run_on_device(*operands: Any) -> list[Any]:
        if not is_first:
            operands = (*operands[: len(reads)], *(array[0] for array in operands[len(reads) :]))
        results = run(*operands)
        return [*results[: len(outputs)], *(array[None] for array in results[len(outputs) :])]

    return jax.shard_map(
        run_on_device,
        mesh=params["mesh"],
        in_specs=tuple(ins if is_first else [*ins, *specs]),
        out_specs=[*outs, *specs] if is_first else outs,
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
