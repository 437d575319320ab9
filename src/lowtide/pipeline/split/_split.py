"""Split the backward pass of a stage in two: one pass for the input gradient, one for the weight gradients.

The previous stage of a pipeline waits for the input gradient. No rank waits for weight gradients, so a schedule may
compute them where a rank would be idle (Qi et al., "Zero Bubble Pipeline Parallelism", 2024). Both parts are cut out of
the traced backward pass: nothing is computed twice, and a part holds only the values that it reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core import Selector, StructureError, Tree, check_differentiable, combine, leaves_with_paths, partition
from ...jaxprs import kind_of, make_jaxpr, source_line
from ._cut import Pass, Reach, Sink, Source, assign
from ._graph import Op, Value, graph, hoist_loop_invariants, repeated
from ._nested import WholeOp, split_nested
from ._replay import Buffers, Environment, Plan

Arrays = tuple[Any, ...]


class Residuals(NamedTuple):
    """Values that a forward pass leaves for the backward pass."""

    for_input: Arrays
    """Not needed after the input pass."""
    for_weight: Arrays
    """Kept until the weight pass; the input pass may read them too."""


@dataclasses.dataclass(frozen=True)
class StageSplit:
    """A stage whose backward pass is split in two; made by `split_backward`."""

    stage: Callable[..., Any]
    """``stage(weights, x, *extras) -> y``."""
    wrt: Selector
    """Selects the weights that have gradients."""
    has_aux: bool
    """Whether the stage returns ``(y, aux)``."""

    def trace(self, weights: Tree, x: Tree, *extras: Tree) -> TracedSplit:
        """Trace the three passes for arguments of these shapes.

        Args:
            weights: parameters; arrays or shapes.
            x: output of the previous stage.
            extras: constants, passed to every pass and not differentiated.

        Returns:
            The passes.

        Raises:
            SelectionError: when `wrt` selects no weight, or one that has no gradient.
            StructureError: when the stage returns no array that has a gradient.
        """
        trainable, frozen = partition(weights, self.wrt)
        check_differentiable(trainable)
        return trace_split(self.stage, trainable, frozen, x, *extras, has_aux=self.has_aux)


def split_backward(stage: Callable[..., Any], *, wrt: Selector = "**", has_aux: bool = False) -> StageSplit:
    """Split the backward pass of a stage into its input part and its weight part.

    Args:
        stage: ``stage(weights, x, *extras) -> y``. It is differentiated with respect to the inexact arrays of `x` and
            the weights that `wrt` selects; `extras` (masks, positions, keys) are constants.
        wrt: globs on the paths of the weights, or a predicate, as in `lowtide.value_and_grad`.
        has_aux: whether the stage returns ``(y, aux)``.

    Returns:
        The split; its `trace` gives the passes for arguments of given shapes.

    Memory:
        Only values that a later pass reads are kept between passes, each until its last reader. Operations are assigned
        to passes so that these values have the fewest bytes. Values that depend on the weights alone are computed once,
        by `TracedSplit.hoist`.

    Examples:
        >>> stage = lambda weights, x: jnp.tanh(x @ weights)
        >>> w, x = jnp.ones((2, 2)), jnp.ones((3, 2))
        >>> split = split_backward(stage).trace(w, x)
        >>> y, residuals = split.forward(w, x)
        >>> dx, waiting = split.input(w, residuals, jnp.ones_like(y))
        >>> split.weight(w, residuals.for_weight, waiting).shape
        (2, 2)

    References:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    return StageSplit(stage, wrt, has_aux)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedSplit:
    """The passes of a stage for arguments of given shapes.

    Results of a pass are arguments of the passes after it, in the order of the passes. `weights`, `hoisted` and
    `extras` are the same arrays in all passes.
    """

    y: Tree
    """Shapes of the forward pass's results."""
    plan: Plan
    """Assignment of operations to passes."""
    arguments: Arguments
    """Graph values of the arguments and results."""
    kept: dict[tuple[Pass, Pass], list[Value]]
    """Values that one pass leaves and another reads last."""
    traced: Any
    """The jaxpr of all passes together."""
    flops: PassFlops
    """FLOPs of each pass, and the operations of the backward pass that are not split."""

    @property
    def hoisted(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the values that depend on the weights alone."""
        return tuple(value.struct for value in self.of(Pass.HOISTED))

    @property
    def residuals(self) -> Residuals:
        """Shapes of the values that the forward pass leaves."""
        value_groups = (self.of(Pass.FORWARD, last) for last in (Pass.INPUT, Pass.WEIGHT))
        return Residuals(*(tuple(value.struct for value in values) for values in value_groups))

    @property
    def waiting(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the values that the input pass leaves to the weight pass, in addition to `Residuals.for_weight`."""
        return tuple(value.struct for value in self.of(Pass.INPUT, Pass.WEIGHT))

    def hoist(self, weights: Tree) -> Arrays:
        """Compute the values that depend on the weights alone and that other passes read, once for all microbatches."""
        env = self.arguments.weights(weights)
        self.plan.run(Pass.HOISTED, env, {}, {}, {})
        return tuple(env[value] for value in self.of(Pass.HOISTED))

    def forward(self, weights: Tree, x: Tree, *extras: Tree, hoisted: Arrays | None = None) -> tuple[Any, Residuals]:
        """Run the forward pass.

        Args:
            weights: parameters.
            x: output of the previous stage.
            extras: constants.
            hoisted: result of `hoist`; computed here if omitted.

        Returns:
            The result of the stage, and the residuals for the backward pass.
        """
        env = self.env(weights, hoisted, extras)
        env.update(zip(self.arguments.x_values, self.arguments.x_arrays(x), strict=True))
        self.plan.run(Pass.FORWARD, env, {}, {}, {})
        saved_values = ([env[value] for value in self.of(Pass.FORWARD, last)] for last in (Pass.INPUT, Pass.WEIGHT))
        return self.results(env, {}), Residuals(*map(tuple, saved_values))

    def input(
        self, weights: Tree, residuals: Residuals, dy: Tree, *extras: Tree, hoisted: Arrays | None = None
    ) -> tuple[Tree, Arrays]:
        """Run the input part of the backward pass.

        Args:
            weights: parameters.
            residuals: residuals of `forward`.
            dy: cotangents of the stage's result, without `aux`; cotangents of integers are ignored.
            extras: constants.
            hoisted: result of `hoist`.

        Returns:
            The gradient of `x`, None where it has none; and the values that the weight pass needs in addition to
            `Residuals.for_weight`.
        """
        env = self.env(weights, hoisted, extras)
        env.update(zip(self.of(Pass.FORWARD, Pass.INPUT), residuals.for_input, strict=True))
        env.update(zip(self.of(Pass.FORWARD, Pass.WEIGHT), residuals.for_weight, strict=True))
        env.update(zip(self.arguments.dy_values, self.arguments.dy_arrays(dy), strict=True))
        self.plan.run(Pass.INPUT, env, {}, {}, {})
        waiting = [env[value] for value in self.of(Pass.INPUT, Pass.WEIGHT)]
        waiting += [jnp.asarray(self.plan.read(atom, env, {})) for _, atom in self.gradients(Pass.INPUT)]
        return self.dx(env, {}), tuple(waiting)

    def weight(
        self, weights: Tree, for_weight: Arrays, waiting: Arrays, *extras: Tree, hoisted: Arrays | None = None
    ) -> Tree:
        """Run the weight part of the backward pass.

        Args:
            weights: parameters.
            for_weight: part of the residuals of `forward`.
            waiting: second result of `input`.
            extras: constants.
            hoisted: result of `hoist`.

        Returns:
            The gradients of the weights, None for those that `wrt` does not select.
        """
        env = self.env(weights, hoisted, extras)
        env.update(zip(self.of(Pass.FORWARD, Pass.WEIGHT), for_weight, strict=True))
        env.update(zip(self.of(Pass.INPUT, Pass.WEIGHT), waiting, strict=False))
        self.plan.run(Pass.WEIGHT, env, {}, {}, {})
        early_gradients = waiting[len(self.of(Pass.INPUT, Pass.WEIGHT)) :]
        dweights = {i: gradient for (i, _), gradient in zip(self.gradients(Pass.INPUT), early_gradients, strict=True)}
        dweights |= {i: jnp.asarray(self.plan.read(atom, env, {})) for i, atom in self.gradients(Pass.WEIGHT)}
        return self.arguments.trainable_tree.unflatten([dweights[i] for i in sorted(dweights)])

    def env(self, weights: Tree, hoisted: Arrays | None, extras: Arrays) -> Environment:
        """Return the values that every pass reads; `hoist` computes hoisted values that are omitted."""
        hoisted = self.hoist(weights) if hoisted is None else hoisted
        env = self.arguments.weights(weights)
        env.update(zip(self.of(Pass.HOISTED), hoisted, strict=True))
        env.update(zip(self.arguments.extras_values, jax.tree.leaves(extras), strict=True))
        return env

    def of(self, made: Pass, last: Pass | None = None) -> list[Value]:
        """List the values that pass `made` leaves and pass `last` (None: any pass) reads last."""
        return [
            v for (begin, end), values in self.kept.items() for v in values if begin is made and last in (None, end)
        ]

    def gradients(self, at: Pass) -> list[tuple[int, Any]]:
        """List the weight gradients that a pass completes: their positions and atoms."""
        return [(i, atom) for i, atom in enumerate(self.arguments.dweights) if self.plan.completion_pass(atom) is at]

    def results(self, env: Environment, buffers: Buffers) -> Tree:
        """Return the result of the stage."""
        leaves = [jnp.asarray(self.plan.read(atom, env, buffers)) for atom in self.arguments.y]
        return self.arguments.y_tree.unflatten(leaves)

    def dx(self, env: Environment, buffers: Buffers) -> Tree:
        """Return the gradient of the input."""
        atoms = self.arguments.dx
        leaves = [None if atom is None else jnp.asarray(self.plan.read(atom, env, buffers)) for atom in atoms]
        return self.arguments.x_tree.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Tree structures of arguments and results, and the graph values of their leaves."""

    weights_tree: Any
    weights_values: list[Value]
    trainable_tree: Any
    dweights: list[Any]
    x_tree: Any
    x_values: list[Value]
    dx: list[Any]
    """None for leaves without a gradient."""
    extras_values: list[Value]
    y_tree: Any
    y: list[Any]
    dy_tree: Any
    dy_indices: list[int]
    """Positions of the results that have a cotangent."""
    dy_values: list[Value]

    def weights(self, weights: Tree) -> Environment:
        leaves = self.weights_tree.flatten_up_to(weights)
        return dict(zip(self.weights_values, leaves, strict=True))

    def x_arrays(self, x: Tree) -> list[Any]:
        return self.x_tree.flatten_up_to(x)

    def dy_arrays(self, dy: Tree) -> list[Any]:
        leaves = self.dy_tree.flatten_up_to(dy)
        return [leaves[i] for i in self.dy_indices]


def trace_split(
    stage: Callable[..., Any],
    trainable: Tree,
    frozen: Tree,
    x: Tree,
    *extras: Tree,
    has_aux: bool = False,
    rewrite: Callable[[Any], Any] = lambda jaxpr: jaxpr,
) -> TracedSplit:
    """Trace the passes as `StageSplit.trace` does, for weights that are already partitioned.

    `rewrite` maps the jaxpr of forward and backward pass to the one that is split; inputs and outputs stay the same.
    """
    trainable, frozen, x, extras = jax.tree.map(_shape, (trainable, frozen, x, extras))
    weights = combine(trainable, frozen)
    is_trainable = [leaf is not None for leaf in jax.tree.structure(weights).flatten_up_to(trainable)]
    x_leaves, x_tree = jax.tree.flatten(x)
    is_inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in x_leaves]
    y_shape = jax.eval_shape(stage, weights, x, *extras)
    y_shape = y_shape[0] if has_aux else y_shape
    dy_shape, dy_tree = jax.tree.flatten(y_shape)
    dy_indices = [i for i, leaf in enumerate(dy_shape) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not dy_indices:
        dtypes = ", ".join(f"{path}: {leaf.dtype}" for path, leaf in leaves_with_paths(y_shape)) or "no array"
        hint = "write stage(weights, x, *extras) -> y; with has_aux=True, -> (y, aux)"
        raise StructureError(f"the stage must return a floating-point array, not {dtypes}", hint=hint)
    passes = _forward_and_backward(stage, has_aux, (is_trainable, is_inexact, dy_indices), x_tree)
    dy = [dy_shape[i] for i in dy_indices]
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
    sources = [
        kind
        for kind, values in zip(kinds, (weights_values, x_values, extras_values, dy_values), strict=True)
        for _ in values
    ]
    # A weight gradient may be computed in any backward pass: it is added to its total at once and never kept.
    sinks = [Sink([atom], Pass.FORWARD) for atom in y_atoms]
    sinks += [Sink([atom], Pass.INPUT) for atom in jax.tree.leaves(dx_atoms)]
    sinks += [Sink([atom], Pass.WEIGHT, is_added=True) for atom in dweight_atoms]
    whole_ops = split_nested(stage_graph, sources, sinks)
    plan = Plan(stage_graph, *assign(stage_graph, sources, sinks), sinks)
    arguments = Arguments(
        weights_tree=jax.tree.structure(weights),
        weights_values=weights_values,
        trainable_tree=jax.tree.structure(trainable),
        dweights=dweight_atoms,
        x_tree=x_tree,
        x_values=x_values,
        dx=dx_atoms,
        extras_values=extras_values,
        y_tree=jax.tree.structure(shapes[0]),
        y=y_atoms,
        dy_tree=dy_tree,
        dy_indices=dy_indices,
        dy_values=dy_values,
    )
    return TracedSplit(
        y=shapes[0],
        plan=plan,
        arguments=arguments,
        kept=_residuals(plan, x_values, dy_values),
        traced=closed.jaxpr,
        flops=_pass_flops(plan, sources, sinks, whole_ops),
    )


def _forward_and_backward(
    stage: Callable[..., Any], has_aux: bool, selection: tuple[list[bool], list[bool], list[int]], x_tree: Any
) -> Callable[..., Any]:
    """Make a function of weights, leaves of `x`, extras and cotangents that runs the forward and the backward pass."""
    is_trainable, is_inexact, dy_indices = selection

    def passes(weights: Tree, x_leaves: list[Any], extras: Arrays, dy: list[Any]) -> Any:
        leaves, tree = jax.tree.flatten(weights)

        def forward(trainable: list[Any], inexact_x: list[Any]) -> Any:
            weights = tree.unflatten(_replace_leaves(leaves, trainable))
            x = x_tree.unflatten(_replace_leaves(x_leaves, inexact_x))
            result = stage(weights, x, *extras)
            results = jax.tree.leaves(result[0] if has_aux else result)
            return [results[i] for i in dy_indices], result

        trainable = [leaf if is_selected else None for leaf, is_selected in zip(leaves, is_trainable, strict=True)]
        inexact_x = [leaf if is_selected else None for leaf, is_selected in zip(x_leaves, is_inexact, strict=True)]
        _, vjp, result = jax.vjp(forward, trainable, inexact_x, has_aux=True)
        return result, *vjp(dy)

    return passes


def _replace_leaves(leaves: list[Any], replacements: list[Any]) -> list[Any]:
    """Replace leaves by the others that are not None."""
    return [old if new is None else new for old, new in zip(leaves, replacements, strict=True)]


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
# of its work belongs to which: a kernel, a `while` loop, a branch with an effect. Its work for weights then runs in the
# input pass. A zero-bubble schedule lacks this work in the weight pass, where it would fill the bubble.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsplit:
    """An operation whose work for weight gradients runs in the input pass."""

    name: str
    """Name of the JAX primitive: ``pallas_call``, ``while``, ``cond``."""
    where: str
    """Source line of the operation; empty if unknown."""
    flops: int | None
    """FLOPs of the operation; for an effect, FLOPs of the products that it waits for. None for calls of foreign code,
    whose FLOPs are unknown."""
    share: float | None
    """Share of the FLOPs of the backward pass, from 0 to 1."""
    hint: str
    """The remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassFlops:
    """FLOPs of one part of a model in each pass, for one microbatch."""

    forward: int
    """FLOPs of F."""
    input: int
    """FLOPs of I: the input gradient, its recomputation, and other work that is not delayed to W."""
    weight: int
    """FLOPs of W: products for weight gradients; 0 if no matrix has a gradient."""
    unsplit: tuple[Unsplit, ...] = ()
    """Operations that stayed whole, the most expensive first."""

    @property
    def ratio(self) -> str:
        """FLOPs of F, I and W divided by those of F, in the format of ``lowtide schedule --costs``."""
        return ",".join(f"{part / max(self.forward, 1):.3g}" for part in (self.forward, self.input, self.weight))


def _pass_flops(
    plan: Plan, sources: Sequence[Source], sinks: Sequence[Sink], whole_ops: Sequence[WholeOp]
) -> PassFlops:
    """Count the FLOPs of the passes of a stage. `whole_ops` is the result of `split_nested`."""
    totals = {pass_: plan.flops(pass_) for pass_ in Pass}
    backward_flops = max(totals[Pass.INPUT] + totals[Pass.WEIGHT], 1)
    entries: list[tuple[str, str, str, int | None]] = []
    for whole_op in whole_ops:
        flops = None if kind_of(whole_op.eqn) is None else whole_op.flops
        entries.append((whole_op.eqn.primitive.name, whole_op.location, _hint(whole_op.eqn), flops))
    entries += _early_effects(plan, Reach(plan.graph, list(sources), list(sinks)), sinks)
    merged: dict[tuple[str, str, str], int | None] = {}
    for name, location, hint, flops in entries:
        previous = merged.get((name, location, hint), 0)
        merged[name, location, hint] = None if flops is None or previous is None else previous + flops
    unsplit = [
        Unsplit(
            name=name,
            where=location,
            flops=flops,
            share=None if flops is None else min(flops / backward_flops, 1.0),
            hint=hint,
        )
        for (name, location, hint), flops in merged.items()
    ]
    unsplit.sort(key=lambda entry: math.inf if entry.flops is None else entry.flops, reverse=True)
    return PassFlops(
        forward=totals[Pass.FORWARD],
        input=totals[Pass.INPUT],
        weight=totals[Pass.WEIGHT],
        unsplit=tuple(unsplit),
    )


def _early_effects(plan: Plan, reach: Reach, sinks: Sequence[Sink]) -> list[tuple[str, str, str, int | None]]:
    """Return effects that force products into the input pass which nothing else in it needs."""
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
