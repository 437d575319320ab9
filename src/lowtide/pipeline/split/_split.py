"""Split the backward pass of a stage in two: one pass for the input gradient, one for the weight gradients.

The previous stage of a pipeline waits for the input gradient. No rank waits for weight gradients, so a schedule may
compute them where a rank would be idle (Qi et al., "Zero Bubble Pipeline Parallelism", 2024). Both parts are cut out of
the traced backward pass: no expensive operation runs in both, and a part holds only the values that it reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import StructureError, Tree, combine, leaves_with_paths
from ...jaxprs import kind_of, make_jaxpr, source_line
from ._cut import Pass, Reach, Sink, Source, assign
from ._graph import Op, Value, graph, hoist_loop_invariants, repeated
from ._nested import WholeOp, split_nested
from ._replay import Buffers, Environment, Plan


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Structure of a tree of arrays, and the graph values of its leaves; None for a leaf without a value."""

    tree: Any
    values: list[Any]

    def env(self, arrays: Tree) -> Environment:
        """Map the graph values of the leaves to the arrays of a tree with this structure."""
        leaves = self.tree.flatten_up_to(arrays)
        return {value: leaf for value, leaf in zip(self.values, leaves, strict=True) if value is not None}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TracedSplit:
    """The passes of a stage for given shapes, and the graph values of its input `x`, output `y` and gradients."""

    plan: Plan
    """Assignment of operations to passes."""
    kept: dict[tuple[Pass, Pass], list[Value]]
    """Saved values, by the pass that computes them and the pass that reads them last."""
    traced: Any
    """The jaxpr of all passes together."""
    flops: PassFlops
    """FLOPs of each pass, and the operations of the backward pass that are not split."""
    weights: Leaves
    dweights: list[Any]
    """Gradients of the trainable weights."""
    x: Leaves
    dx: Leaves
    extras: Leaves
    y: Leaves
    dy: Leaves

    @property
    def hoisted(self) -> list[Value]:
        """Values that depend on the weights alone and that passes of each microbatch read."""
        return [value for (producer, _), values in self.kept.items() for value in values if producer is Pass.HOISTED]

    def hoist(self, weights: Tree) -> tuple[Any, ...]:
        """Compute the hoisted values, once for all microbatches."""
        env = self.weights.env(weights)
        self.plan.run(Pass.HOISTED, env, {}, {}, {})
        return tuple(env[value] for value in self.hoisted)

    def env(self, weights: Tree, hoisted: Sequence[Any], extras: Tree) -> Environment:
        """Return the values that no pass of a microbatch computes: weights, hoisted values and `extras`."""
        return {
            **self.weights.env(weights),
            **dict(zip(self.hoisted, hoisted, strict=True)),
            **self.extras.env(extras),
        }

    def gradients(self, pass_: Pass) -> list[tuple[int, Any]]:
        """List the weight gradients that a pass completes: their positions in `dweights`, and their atoms."""
        return [(i, atom) for i, atom in enumerate(self.dweights) if self.plan.completion_pass(atom) is pass_]

    def read(self, results: Leaves, env: Environment, buffers: Buffers) -> Tree:
        """Return the arrays of `y` or `dx` (`results`) as a tree, after the pass that computes them."""
        return results.tree.unflatten(
            [None if atom is None else jnp.asarray(self.plan.read(atom, env, buffers)) for atom in results.values]
        )


def trace_split(
    stage: Callable[..., Any],
    trainable: Tree,
    frozen: Tree,
    x: Tree,
    *extras: Tree,
    rewrite: Callable[[Any], Any] = lambda jaxpr: jaxpr,
) -> TracedSplit:
    """Trace ``stage(weights, x, *extras) -> y`` and split its backward pass, for arrays or shapes.

    `trainable` and `frozen` are the two halves of a partition of the weights. The leaves of `trainable` and the inexact
    leaves of `x` have gradients. `rewrite` replaces the jaxpr of the forward and backward pass before the split, and
    keeps its inputs and outputs. Raises `StructureError` when the stage returns no floating-point array.
    """
    trainable, frozen, x, extras = jax.tree.map(_shape, (trainable, frozen, x, extras))
    weights = combine(trainable, frozen)
    is_trainable = [leaf is not None for leaf in jax.tree.structure(weights).flatten_up_to(trainable)]
    x_leaves, x_tree = jax.tree.flatten(x)
    is_inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in x_leaves]
    y_shape = jax.eval_shape(stage, weights, x, *extras)
    y_leaves, y_tree = jax.tree.flatten(y_shape)
    dy_indices = [i for i, leaf in enumerate(y_leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not dy_indices:
        dtypes = ", ".join(f"{path}: {leaf.dtype}" for path, leaf in leaves_with_paths(y_shape)) or "no array"
        hint = "return h with a floating-point leaf from first and block"
        raise StructureError(f"the stage must return a floating-point array, not {dtypes}", hint=hint)

    def passes(weights: Tree, x_leaves: list[Any], extras: Sequence[Tree], dy: list[Any]) -> Any:
        leaves, tree = jax.tree.flatten(weights)

        def forward(trainable: list[Any], inexact_x: list[Any]) -> Any:
            weights = tree.unflatten(replace_leaves(leaves, trainable))
            result = stage(weights, x_tree.unflatten(replace_leaves(x_leaves, inexact_x)), *extras)
            results = jax.tree.leaves(result)
            return [results[i] for i in dy_indices], result

        trainable = [leaf if is_selected else None for leaf, is_selected in zip(leaves, is_trainable, strict=True)]
        inexact_x = [leaf if is_selected else None for leaf, is_selected in zip(x_leaves, is_inexact, strict=True)]
        _, vjp, result = jax.vjp(forward, trainable, inexact_x, has_aux=True)
        return result, *vjp(dy)

    dy = [y_leaves[i] for i in dy_indices]
    closed, shapes = make_jaxpr(passes)(weights, x_leaves, extras, dy)
    closed = rewrite(closed)
    stage_graph = graph(closed)
    # User-defined pytree containers may inspect their leaves, so graph values are never unflattened into them.
    graph_inputs, graph_outputs = iter(stage_graph.inputs), iter(stage_graph.outputs)
    weights_values, x_values, extras_values, dy_values = (
        [next(graph_inputs) for _ in jax.tree.leaves(tree)] for tree in (weights, x_leaves, extras, dy)
    )
    hoist_loop_invariants(stage_graph.items, set(weights_values))
    y_atoms, dweight_atoms = ([next(graph_outputs) for _ in jax.tree.leaves(tree)] for tree in shapes[:2])
    dx_atoms = jax.tree.unflatten(jax.tree.structure(shapes[2]), list(graph_outputs))
    kinds = (Source.WEIGHT, Source.ACTIVATION, Source.BATCH, Source.COTANGENT)
    groups = (weights_values, x_values, extras_values, dy_values)
    sources = [kind for kind, values in zip(kinds, groups, strict=True) for _ in values]
    # A weight gradient may be computed in I or W: it is added to its total at once and never kept.
    sinks = [Sink([atom], Pass.FORWARD) for atom in y_atoms]
    sinks += [Sink([atom], Pass.INPUT) for atom in jax.tree.leaves(dx_atoms)]
    sinks += [Sink([atom], Pass.WEIGHT, is_added=True) for atom in dweight_atoms]
    whole_ops = split_nested(stage_graph, sources, sinks)
    plan = Plan(stage_graph, *assign(stage_graph, sources, sinks), sinks)
    cotangents = dict(zip(dy_indices, dy_values, strict=True))
    return TracedSplit(
        plan=plan,
        kept=_residuals(plan, x_values, dy_values),
        traced=closed.jaxpr,
        flops=_pass_flops(plan, sources, sinks, whole_ops),
        weights=Leaves(jax.tree.structure(weights), weights_values),
        dweights=dweight_atoms,
        x=Leaves(x_tree, x_values),
        dx=Leaves(x_tree, dx_atoms),
        extras=Leaves(jax.tree.structure(extras), extras_values),
        y=Leaves(y_tree, y_atoms),
        dy=Leaves(y_tree, [cotangents.get(i) for i in range(len(y_leaves))]),
    )


def replace_leaves(tree: Tree, replacements: Tree) -> Tree:
    """Replace each leaf of a tree by the leaf of `replacements` at the same place; None keeps a leaf."""
    return jax.tree.map(lambda old, new: old if new is None else new, tree, replacements)


def _residuals(plan: Plan, x_values: list[Value], dy_values: list[Value]) -> dict[tuple[Pass, Pass], list[Value]]:
    residuals: dict[tuple[Pass, Pass], list[Value]] = {}
    for value, passes in plan.saved_values().items():
        residuals.setdefault(passes, []).append(value)
    for values, producer_pass in ((x_values, Pass.FORWARD), (dy_values, Pass.INPUT)):
        for value in values:
            last_reader = max(plan.reads.get(value, ()), default=producer_pass)
            if last_reader > producer_pass:
                residuals.setdefault((producer_pass, last_reader), []).append(value)
    return residuals


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


# FLOPs are counted on the traced passes as in `jaxprs/_operations.py`, for one microbatch and all devices of a rank
# together. They compare passes with each other and do not predict time.
#
# An operation stays whole if it contributes to the input gradient and to weight gradients, and nothing shows which part
# of its work belongs to which: a kernel, a `while` loop, a branch with an effect. Its work for weight gradients then
# runs in the input pass. So the weight pass of a zero-bubble schedule has less work with which to fill the bubble.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsplit:
    """An operation whose work for weight gradients runs in the input pass."""

    name: str
    """Name of the JAX primitive, such as ``pallas_call``, ``while`` or ``cond``."""
    where: str
    """Source line of the operation; empty if unknown."""
    flops: int | None
    """FLOPs of the operation for one microbatch; for an effect, FLOPs of the products that it needs. None for calls of
    foreign code, whose FLOPs are unknown."""
    share: float | None
    """Share of the FLOPs of the backward pass, from 0 to 1; None if unknown."""
    hint: str
    """The remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassFlops:
    """FLOPs of one part of a model in each pass, for one microbatch."""

    forward: int
    """FLOPs of the forward pass, F."""
    input: int
    """FLOPs of the input pass, I: the input gradient, recomputation for it, and other work that is not delayed to W."""
    weight: int
    """FLOPs of the weight pass, W: products for weight gradients; 0 if no matrix has a gradient."""
    unsplit: tuple[Unsplit, ...] = ()
    """Operations that stayed whole, the most expensive first."""

    @property
    def ratio(self) -> str:
        """FLOPs of F, I and W divided by those of F, in the format of ``lowtide schedule --costs``."""
        return ",".join(f"{part / max(self.forward, 1):.3g}" for part in (self.forward, self.input, self.weight))


def _pass_flops(plan: Plan, sources: list[Source], sinks: list[Sink], whole_ops: Sequence[WholeOp]) -> PassFlops:
    """Count the FLOPs of the passes of a stage. `whole_ops` is the result of `split_nested`."""
    totals = {pass_: plan.flops(pass_) for pass_ in Pass}
    backward_flops = max(totals[Pass.INPUT] + totals[Pass.WEIGHT], 1)
    entries: list[tuple[str, str, str, int | None]] = [
        (op.eqn.primitive.name, op.location, _hint(op.eqn), None if kind_of(op.eqn) is None else op.flops)
        for op in whole_ops
    ]
    entries += _early_effects(plan, Reach(plan.graph, sources, sinks), sinks)
    merged: dict[tuple[str, str, str], int | None] = {}
    for name, location, hint, flops in entries:
        previous = merged.get((name, location, hint), 0)
        merged[name, location, hint] = None if flops is None or previous is None else previous + flops
    unsplit: list[Unsplit] = []
    for (name, location, hint), flops in merged.items():
        share = None if flops is None else min(flops / backward_flops, 1.0)
        unsplit.append(Unsplit(name=name, where=location, flops=flops, share=share, hint=hint))
    unsplit.sort(key=lambda entry: math.inf if entry.flops is None else entry.flops, reverse=True)
    return PassFlops(
        forward=totals[Pass.FORWARD], input=totals[Pass.INPUT], weight=totals[Pass.WEIGHT], unsplit=tuple(unsplit)
    )


def _early_effects(plan: Plan, reach: Reach, sinks: Sequence[Sink]) -> list[tuple[str, str, str, int | None]]:
    """Return name, location, hint and FLOPs of each effect without which products would run in the weight pass."""
    effects = [op for op in reach.nodes if isinstance(op, Op) and op.has_effects and op.eqn is not None]
    if not effects:
        return []
    run_counts = dict(repeated(plan.graph.items))
    needed = reach.ancestors(sink for sink in sinks if not sink.is_added)
    entries: list[tuple[str, str, str, int | None]] = []
    for effect in effects:
        products = [op for op in reach.ancestors([effect]) - needed if isinstance(op, Op) and op.is_heavy]
        products = [op for op in products if op is not effect and Source.COTANGENT in reach.ancestors([op])]
        if products:
            needed |= set(products)
            hint = "inspect the weight gradients that the pipeline returns: those that it reads cannot be delayed"
            flops = sum(op.flops * run_counts[op] for op in products)
            entries.append((effect.eqn.primitive.name, source_line(effect.eqn), hint, flops))
    return entries


_KERNEL = "use separate kernels for the gradients of input and weights, in the backward function of its custom_vjp"
_HINTS = {
    "while": "use lax.scan, or lax.fori_loop with known bounds: their carries are split one by one",
    "jit": "remove shardings from jax.jit inside of a block, and use lax.with_sharding_constraint instead",
    "device_put": "call jax.device_put for one array at a time",
}


def _hint(eqn: Any) -> str:
    name = eqn.primitive.name
    if name in ("cond", "shard_map"):
        effects = ", ".join(sorted({type(effect).__name__.removesuffix("Effect") for effect in eqn.effects}))
        return f"move its effect ({effects}) out of it: without an effect it is split"
    return _HINTS.get(name, _KERNEL)
