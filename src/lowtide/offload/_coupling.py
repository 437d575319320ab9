"""Optimizers that cannot run inside the backward pass: one leaf's update waits there for another's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lowtide.core import StructureError, Tree, leaves_with_paths


def refuse_coupled(tx: optax.GradientTransformation, params: Tree) -> None:
    """Raise when an update of one leaf depends on the gradient of another.

    Args:
        tx: the optimizer.
        params: shapes of one layer's trainable leaves.

    Raises:
        StructureError: with the paths of two such leaves; for an optimizer that draws random numbers, or needs more
            than gradients, parameters and the loss.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    state = jax.eval_shape(tx.init, params)
    for path, leaf in leaves_with_paths(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise StructureError(
                f"the optimizer draws random numbers: its state {path} is a key",
                expected="an optimizer without randomness, such as optax.adamw",
                got=f"{leaf.dtype}, which would draw the same numbers for every layer",
                hint="wrap it with lt.offload.optimizer, which updates all layers at once",
            )
    update = optax.with_extra_args_support(tx).update
    value = jax.ShapeDtypeStruct((), "float32")
    try:
        closed = jax.make_jaxpr(lambda grads, state, params, value: update(grads, state, params, value=value)[0])(
            params, state, params, value
        )
    except TypeError as error:
        raise StructureError(
            "the optimizer cannot be called with gradients, state, parameters and the loss",
            expected="update(grads, state, params, value=loss)",
            got=str(error),
            hint="one that evaluates the loss by itself (a line search) cannot run inside the backward pass",
        ) from error
    sources = [frozenset([at]) if at < len(paths) else frozenset[int]() for at in range(len(closed.in_avals))]
    for at, reached in enumerate(_reach(closed.jaxpr, sources)):
        if other := sorted(reached - {at}):
            raise StructureError(
                f"the optimizer updates {paths[at]} by the gradient of {paths[other[0]]}, too",
                expected="an optimizer that treats leaves one by one, such as optax.adamw",
                got="one that mixes them, such as a chain with optax.clip_by_global_norm",
                hint="take clipping out of the chain and pass clip=lt.offload.Clip(max_norm=...) to layerwise_step",
            )


def _reach(jaxpr: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """For every output of a jaxpr the sources that it depends on, given those of the inputs."""
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(var: Any) -> frozenset[int]:
        return frozenset() if hasattr(var, "val") else known.get(var, frozenset())

    for eqn in jaxpr.eqns:
        read = [of(var) for var in eqn.invars]
        inner = [jax_ for jax_ in eqn.params.values() if hasattr(getattr(jax_, "jaxpr", None), "eqns")]
        whole = frozenset[int]().union(*read)
        if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call") and inner:
            results = _reach(inner[0].jaxpr, read)
        elif eqn.primitive.name == "cond":
            columns = zip(*(_reach(branch.jaxpr, read[1:]) for branch in eqn.params["branches"]), strict=True)
            results = [read[0].union(*column) for column in columns]
        else:
            results = [whole] * len(eqn.outvars)
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(var) for var in jaxpr.outvars]
