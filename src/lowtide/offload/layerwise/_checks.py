"""Checks that an optimizer and a mesh work with a layerwise step.

An optimizer cannot run inside the backward pass if one leaf's update needs another leaf's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...core import ConfigError, StructureError, Tree, leaves_with_paths
from ...jaxprs import Kind, bodies, called, equations, fold, kind_of
from .._streaming import tracing_for_analysis


def refuse_explicit_axes(**trees: Tree) -> None:
    """Raise `ConfigError` when a leaf is on a mesh with explicit axes, which are part of its type.

    A buffer of a layerwise step takes its sharding from the values written into it. Explicit axes do not allow this.
    """
    for path, leaf in leaves_with_paths(trees):
        if explicit := jax.typeof(leaf).sharding.mesh.explicit_axes:
            axes = ", ".join(map(str, explicit))
            hint = "pass axis_types=(jax.sharding.AxisType.Auto,) * num_axes to jax.make_mesh; its default is explicit"
            problem = f"{path}: its mesh has explicit axes ({axes}), which a layerwise step does not support"
            raise ConfigError(problem, hint=hint)


def refuse_coupled(tx: optax.GradientTransformation, params: Tree) -> None:
    """Raise `StructureError` when one leaf's update depends on another leaf's gradient, directly or through the state.

    Also raise it for optimizers that draw random numbers or need other arguments. `params` has one layer's shapes.
    """
    try:
        # Two layers are traced together, because with one leaf per layer a global norm mixes only leaves of different
        # layers.
        layers, layer_names = (params, params), ("layer 0: ", "layer 1: ")
        closed, state = _trace_update(tx, layers)
    except (TypeError, ValueError, AttributeError):
        # Labels or masks that are given as trees fit one layer only.
        layers, layer_names = (params,), ("",)
        closed, state = refuse_unusable(tx, params)
    for path, leaf in leaves_with_paths(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            problem = f"the optimizer draws random numbers: its state {path} is a random key, the same for every layer"
            hint = "wrap it with lt.offload.optimizer, which updates all layers at once"
            raise StructureError(problem, hint=hint)
    paths = [
        layer_name + path
        for layer_name, tree in zip(layer_names, layers, strict=True)
        for path, _ in leaves_with_paths(tree)
    ]
    state_start, state_end = len(paths), len(paths) + len(jax.tree.leaves(state))
    sources = [frozenset([index]) if index < state_start else frozenset[int]() for index in range(len(closed.in_avals))]
    sources[-1] = frozenset([_LOSS])
    while True:  # the next update can read gradients that this one stored in the state
        output_sources = _propagate_sources(closed, sources)
        merged = [
            old | new
            for old, new in zip(sources[state_start:state_end], output_sources[state_start:state_end], strict=True)
        ]
        if merged == sources[state_start:state_end]:
            break
        sources[state_start:state_end] = merged
    for index, leaf_sources in enumerate(output_sources[:state_start]):
        if other_leaves := sorted(leaf_sources - {index, _LOSS}):
            got, hint = _describe_cause(_LOSS in leaf_sources, {eqn.primitive.name for eqn in equations(closed)})
            raise StructureError(
                f"the update of {paths[index]} also depends on the gradient of {paths[other_leaves[0]]}",
                got=got,
                hint=f"{hint}; or use lt.offload.optimizer, which takes any optimizer",
            )


_LOSS = -1


def _describe_cause(reads_loss: bool, names: set[str]) -> tuple[str, str]:
    """Return a description of the kind of optimizer, with examples from Optax, and the remedy as a hint."""
    if "is_finite" in names:
        return (
            "one that checks all gradients before its update, such as optax.apply_if_finite",
            'remove it and pass on_nan="skip" to layerwise_step',
        )
    if reads_loss:
        return (
            "one whose step size depends on the loss and the norm of all gradients, such as optax.polyak_sgd",
            "choose a schedule, because this step size is unknown before the last gradient",
        )
    return (
        "one that mixes leaves, such as a chain with optax.clip_by_global_norm, or estimates its own step size",
        "remove clipping from the chain and pass clip=lt.offload.Clip(max_norm=...) to layerwise_step",
    )


def _trace_update(tx: optax.GradientTransformation, params: Tree) -> tuple[Any, Tree]:
    """Trace one update with gradients, state, parameters and loss; return its jaxpr and the shapes of the state."""
    state = jax.eval_shape(tx.init, params)
    update = optax.with_extra_args_support(tx).update
    value = jax.ShapeDtypeStruct((), "float32")

    def run(grads: Tree, state: Tree, params: Tree, value: Any) -> tuple[Tree, Tree]:
        return update(grads, state, params, value=value)

    with tracing_for_analysis():
        return jax.make_jaxpr(run)(params, state, params, value), state


def refuse_unusable(tx: optax.GradientTransformation, params: Tree) -> tuple[Any, Tree]:
    """Return the jaxpr of one update and shapes of the state; raise `StructureError` if the optimizer's call fails."""
    try:
        return _trace_update(tx, params)
    except (TypeError, ValueError, AttributeError) as error:
        raise StructureError(
            "the optimizer cannot be called with gradients, state and parameters of one layer, and the loss",
            got=str(error),
            hint="use lt.offload.optimizer for an optimizer that evaluates the loss itself (a line search), or has "
            "masks or labels as trees instead of functions: it cannot run inside the backward pass",
        ) from error


def _propagate_sources(jaxpr: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the sources (gradient leaf indices, or `_LOSS`) of each output of a jaxpr, given the inputs' sources."""

    def apply(eqn: Any, operand_sources: list[frozenset[int]]) -> list[frozenset[int]]:
        if (inner := called(eqn)) is not None:
            return _propagate_sources(inner, operand_sources)
        if kind_of(eqn) is Kind.BRANCH:
            columns = zip(
                *(_propagate_sources(branch.jaxpr, operand_sources[1:]) for branch in bodies(eqn)), strict=True
            )
            return [operand_sources[0].union(*column) for column in columns]
        return [frozenset[int]().union(*operand_sources)] * len(eqn.outvars)

    return fold(jaxpr, inputs, apply, lambda *_: frozenset())
