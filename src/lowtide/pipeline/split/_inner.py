"""Split of operations that contain other operations: a `cond` (or `switch`) and a `shard_map`.

JAX differentiates each of them as a whole: one operation of the backward pass computes gradients of input and weights.
This module replaces it by two operations. The first computes the values that the input gradient needs and leaves the
values that the second reads. The inside of each branch is cut in the same way as a stage. All branches leave arrays of
the same shapes. If a branch does not compute one of them, it leaves zeros, as JAX does for residuals.
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
from ._replay import Environment, Plan, shape_of

_EARLY = (Pass.HOISTED, Pass.FORWARD, Pass.INPUT)
_LATE = (Pass.WEIGHT,)


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """An operation that contributes to gradients of input and weights and cannot be split."""

    eqn: Any
    flops: int
    """FLOPs in one run of the stage."""
    where: str
    """Source line of the operation, or of the operation that contains it; empty if unknown."""


def split_inner(whole: Graph, sources: list[Source], sinks: list[Sink]) -> list[Whole]:
    """Replace each container operation that contributes to both kinds of gradients by two operations.

    Args:
        whole: graph of a stage, or of the inside of such an operation; its items are changed in place.
        sources: role of each graph input.
        sinks: results of the graph.

    Returns:
        Operations that contribute to both and could not be replaced.
    """
    reach = Reach(whole, sources, sinks)
    effects = [op for op in reach.nodes if isinstance(op, Op) and op.has_effects]

    def read_by(nodes: Sequence[Op | Sink]) -> set[Value]:
        return {value for node in reach.ancestors(nodes) for value in reach.reads(node)}

    needed = read_by([*effects, *(sink for sink in sinks if not sink.is_added)])
    return _split_items(whole.items, reach, needed, read_by([*effects, *sinks]), 1)


def _split_items(
    items: list[Op | Loop], reach: Reach, read: set[Value], live: set[Value], num_times: int
) -> list[Whole]:
    found: list[Op | Loop] = []
    wholes: list[Whole] = []
    for item in items:
        if isinstance(item, Loop):
            wholes += _split_items(item.body, reach, read, live, num_times * item.length)
            found.append(item)
            continue
        ops, inner = _split_operation(item, reach, read, live)
        found += ops
        wholes += [dataclasses.replace(one, flops=one.flops * num_times) for one in inner]
    items[:] = found
    return wholes


def _split_operation(op: Op, reach: Reach, read: set[Value], live: set[Value]) -> tuple[list[Op], list[Whole]]:
    """Return the operation or its two replacements, and the operations that stay whole: itself, or some inside it."""
    # Early results are needed for the input gradient or an effect; late results only for weight gradients.
    early: list[int] = []
    late: list[int] = []
    for i, value in enumerate(op.gives):
        if _is_read(value, live):
            (early if _is_read(value, read) else late).append(i)
    if not (early and late) or op.eqn is None or Source.COTANGENT not in reach.ancestors([op]):
        return [op], []
    if op.name in _SEPARATE:
        return [_part(op, early), _part(op, late)], []
    if op.has_effects or op.name not in ("cond", "shard_map"):
        return [op], [Whole(op.eqn, op.flops, source_line(op.eqn))] if op.is_heavy else []

    def source(atom: Atom) -> Source:
        # Every pass has weights, the batch and literals, so reading them late keeps no bytes.
        is_there = not isinstance(atom, Value) or atom in reach.of_weights or atom in reach.of_batch
        return Source.BATCH if is_there else Source.COTANGENT

    return _two(op, early, late, [source(atom) for atom in op.reads])


_SEPARATE = {"optimization_barrier", "psum", "psum_invariant", "pvary"}
"""Operations on several arrays, where each result depends on one operand."""


def _part(op: Op, at: list[int]) -> Op:
    """Apply an operation to some of its arrays."""
    eqn = op.eqn

    def run(*values: Any) -> Sequence[Any]:
        return eqn.primitive.bind(*values, **eqn.params)

    return Op(op.name, [op.reads[i] for i in at], [op.gives[i] for i in at], run)


def _is_read(value: Value | None, read: set[Value]) -> bool:
    while value is not None and value not in read:
        value = value.stack
    return value is not None


class _Half:
    """Operations of one branch that run in the given passes."""

    def __init__(self, branch: _Branch, passes: Sequence[Pass], outputs: Sequence[int]) -> None:
        self.branch, self.passes, self.outputs = branch, passes, outputs
        inputs = enumerate(branch.graph.inputs)
        self.reads = {i for i, value in inputs if branch.plan.reads.get(value, set()).intersection(passes)}

    def run(self, env: Environment) -> list[Any]:
        """Compute the outputs; intermediate values are added to the environment."""
        for at in self.passes:
            self.branch.plan.run(at, env, {}, {}, {})
        atoms: list[Any] = [self.branch.graph.outputs[i] for i in self.outputs]
        return [jnp.asarray(self.branch.plan.read(atom, env, {}), atom.aval.dtype) for atom in atoms]


class _Branch:
    """A branch, or the body of a `shard_map`, cut in two."""

    def __init__(self, jaxpr: Any, early: Sequence[int], late: Sequence[int], sources: list[Source]) -> None:
        self.graph = graph(jaxpr if is_closed(jaxpr) else close(jaxpr))
        outputs = self.graph.outputs
        sinks = [Sink([outputs[i]], Pass.INPUT) for i in early]
        later = [Sink([outputs[i]], Pass.WEIGHT, is_added=True) for i in late]
        self.wholes = split_inner(self.graph, sources, [*sinks, *later])
        assignment = assign(self.graph, sources, [*sinks, *later])
        # No total exists inside a branch, so gradients that are computed early are left to the second half.
        later = [dataclasses.replace(sink, is_added=False) for sink in later]
        self.plan = Plan(self.graph, assignment, [*sinks, *later])
        self.left = [v for v, (made, last) in self.plan.kept().items() if made in _EARLY and last in _LATE]
        self.early, self.late = _Half(self, _EARLY, early), _Half(self, _LATE, late)

    def flops(self, passes: Sequence[Pass]) -> int:
        return sum(self.plan.flops(at) for at in passes)


@dataclasses.dataclass(frozen=True)
class _Left:
    """An array that the first half leaves to the second half, whichever branch runs."""

    shape: tuple[int, ...]
    dtype: Any
    varies: tuple[str, ...] = ()
    """Axes of a `shard_map` along which it varies."""


def _two(op: Op, early: list[int], late: list[int], sources: list[Source]) -> tuple[list[Op], list[Whole]]:
    params, is_cond = op.eqn.params, op.name == "cond"
    begin = int(is_cond)  # the first operand of a `cond` is the branch index
    branches = [_Branch(body.jaxpr, early, late, sources[begin:]) for body in bodies(op.eqn)]
    lefts, places = _places(branches, params)
    of_early = sorted({i for one in branches for i in one.early.reads})
    of_late = sorted({i for one in branches for i in one.late.reads})

    def first(branch: _Branch, place: list[int]) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            env: Environment = dict(zip([branch.graph.inputs[i] for i in of_early], operands, strict=True))
            results = branch.early.run(env)
            left = {number: env[value] for value, number in zip(branch.left, place, strict=True)}
            return results + [_typed(left.get(i), one, is_cond) for i, one in enumerate(lefts)]

        return run

    def second(branch: _Branch, place: list[int]) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            env: Environment = dict(zip([branch.graph.inputs[i] for i in of_late], operands, strict=False))
            env.update((value, operands[len(of_late) + i]) for value, i in zip(branch.left, place, strict=True))
            return branch.late.run(env)

        return run

    halves = ([make(*one) for one in zip(branches, places, strict=True)] for make in (first, second))
    if is_cond:
        run_first, run_second = (_switch(half) for half in halves)
    else:
        run_first, run_second = (
            _mapped(half[0], params, ins, outs, lefts, is_first=ins is of_early)
            for half, ins, outs in zip(halves, (of_early, of_late), (early, late), strict=True)
        )
    loop = op.results[0].loop
    sizes = {} if is_cond else params["mesh"].shape
    waiting: list[Value] = []
    for one in lefts:
        shape = one.shape if is_cond else (math.prod(sizes[axis] for axis in one.varies), *one.shape)
        waiting.append(
            Value(ShapedArray(shape, one.dtype), loop, left_varying=frozenset(one.varies if is_cond else ()))
        )
    given, reads = op.reads[:begin], op.reads[begin:]
    num_devices = 1 if is_cond else manual_devices(params)
    flops = [num_devices * max(branch.flops(passes) for branch in branches) for passes in (_EARLY, _LATE)]
    ops = [
        Op(
            op.name,
            [*given, *(reads[i] for i in of_early)],
            [*(op.gives[i] for i in early), *waiting],
            run_first,
            is_heavy=True,
            flops=flops[0],
        ),
        Op(
            op.name,
            [*given, *(reads[i] for i in of_late), *waiting],
            [op.gives[i] for i in late],
            run_second,
            is_heavy=True,
            flops=flops[1],
        ),
    ]
    wholes = [one for branch in branches for one in branch.wholes]
    return ops, [Whole(one.eqn, one.flops * num_devices, one.where or source_line(op.eqn)) for one in wholes]


def _places(branches: Sequence[_Branch], params: Any) -> tuple[list[_Left], list[list[int]]]:
    """Return the arrays that branches leave, and for each branch the positions of its arrays among them.

    Branches share a position where shape, dtype and varying axes agree.
    """
    lefts: list[_Left] = []
    places: list[list[int]] = []
    for branch in branches:
        place: list[int] = []
        for value in branch.left:
            shape = shape_of(value)
            one = _Left(shape.shape, shape.dtype, _varies(value, params))
            free = (i for i, other in enumerate(lefts) if other == one and i not in place)
            number = next(free, len(lefts))
            lefts += [one] if number == len(lefts) else []
            place.append(number)
        places.append(place)
    return lefts, places


def _varies(value: Value, params: Any) -> tuple[str, ...]:
    if "newly_manual_axes" not in params:
        return tuple(sorted(value.varying))
    axes = params["newly_manual_axes"]
    if params["check_vma"]:  # a value that does not vary must not be typed as varying
        axes = axes & value.varying
    return tuple(axis for axis in params["mesh"].axis_names if axis in axes)


def _typed(value: Any, left: _Left, is_branch: bool) -> Any:
    """Return the array that a branch leaves, or zeros; it is cast so that all branches agree on the varying axes."""
    value = jnp.zeros(left.shape, left.dtype) if value is None else value
    if not (is_branch and left.varies):
        return value
    missing = set(left.varies) - jax.typeof(value).manual_axis_type.varying
    return lax.pcast(value, tuple(sorted(missing)), to="varying")


def _switch(runs: Sequence[Callable[..., list[Any]]]) -> Callable[..., list[Any]]:
    return lambda index, *operands: lax.switch(index, runs, *operands)


def _mapped(
    run: Callable[..., list[Any]],
    params: Any,
    reads: Sequence[int],
    outputs: Sequence[int],
    lefts: Sequence[_Left],
    *,
    is_first: bool,
) -> Callable[..., list[Any]]:
    """Make one half of a `shard_map`; arrays that it leaves get a leading axis along which the devices' parts lie."""
    specs = [PartitionSpec(one.varies or None) for one in lefts]
    ins, outs = ([params[name][i] for i in at] for name, at in (("in_specs", reads), ("out_specs", outputs)))

    def each(*operands: Any) -> list[Any]:
        if not is_first:
            operands = (*operands[: len(reads)], *(one[0] for one in operands[len(reads) :]))
        results = run(*operands)
        return [*results[: len(outputs)], *(one[None] for one in results[len(outputs) :])]

    return jax.shard_map(
        each,
        mesh=params["mesh"],
        in_specs=tuple(ins if is_first else [*ins, *specs]),
        out_specs=[*outs, *specs] if is_first else outs,
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
