"""The step that people write first, to compare with: AdamW over the whole model, frozen weights behind stop_gradient.

It is only ever compiled, from shapes; nothing of it is allocated or run.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from ..core import Tree, Where, combine, partition
from ..memory import MemoryReport, Target, analyze
from ._trainer import LossFn


def analyze_naive(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Where,
    batch: Tree,
    *,
    target: Target | str | None = None,
) -> MemoryReport:
    """Compiled bytes of a training step that differentiates and optimises the whole model.

    Args:
        model: the model, or shapes of it.
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``.
        tx: the optimizer.
        wrt: what is meant to train; all else is put behind `jax.lax.stop_gradient`.
        batch: a batch, or shapes of one.
        target: what to compile for; None for the hardware at hand.

    Returns:
        The report, with the roles ``trainable``, ``optimizer``, ``frozen`` and ``batch``.

    Memory:
        None: arrays are replaced by their shapes.
    """
    trainable, frozen = partition(jax.tree.map(_shape, model), wrt)
    opt_state = jax.eval_shape(tx.init, combine(trainable, frozen))

    def step(trainable: Tree, opt_state: Tree, frozen: Tree, batch: Tree) -> tuple[Any, ...]:
        def loss(trainable: Tree, frozen: Tree) -> Any:
            return loss_fn(combine(trainable, jax.tree.map(jax.lax.stop_gradient, frozen)), batch)

        (value, _), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trainable, frozen)
        params, whole = combine(trainable, frozen), combine(*grads)
        updates, opt_state = tx.update(whole, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    roles = {"trainable": 0, "optimizer": 1, "frozen": 2, "batch": 3}
    return analyze(
        step, trainable, opt_state, frozen, jax.tree.map(_shape, batch), target=target, roles=roles, donate_argnums=(0, 1, 2)
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
