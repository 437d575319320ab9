"""Training steps compiled from shapes, before anything is allocated: the trainer's step, and a naive one.

The naive step differentiates and optimises the whole model, with frozen weights behind `jax.lax.stop_gradient`. It is
a baseline for comparison, and never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import Tree, Where, accumulate, combine, memory_space, partition, split_static
from ..memory import Job, MemoryReport, Target, analyze
from ..offload import state_shardings
from ._models import parse_loss
from ._step import DONATED, STEP_ARGUMENTS, LossFn, WholeStep, flat_step, multi_device_sharding


def step_job(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Where,
    batch: Tree,
    *,
    num_microbatches: int = 1,
    weight: Callable[[Tree], Any] | None = None,
) -> Job:
    """Return the step that `Trainer` would run, with the shapes of its arguments.

    Args:
        model: the model, or its shapes (`jax.eval_shape` of its constructor).
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``.
        tx: the optimizer.
        wrt: selects the trainable leaves.
        batch: a batch, or shapes of one.
        num_microbatches: number of parts of the batch, as in `Trainer`.
        weight: weight of a microbatch, as in `Trainer`.

    Returns:
        The job, with the roles ``trainable``, ``optimizer``, ``mutable``, ``step``, ``frozen`` and ``batch``.

    Memory:
        None: arrays are replaced by their shapes.
    """
    step = WholeStep(model, loss_fn, tx, wrt, num_microbatches, weight)
    trainable, mutable, frozen = step.split(jax.tree.map(_placed_shape, split_static(model)[0]))
    opt_state = _state_shapes(tx, trainable)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return Job(
        fn=flat_step(step),
        args=(trainable, opt_state, mutable, count, frozen, jax.tree.map(_shape, batch)),
        roles={name: position for position, name in enumerate(STEP_ARGUMENTS)},
        donate_argnums=DONATED,
    )


def analyze_step(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Where,
    batch: Tree,
    *,
    target: Target | str | None = None,
    **options: Any,
) -> MemoryReport:
    """Compile the step that `Trainer` would run, and report its bytes.

    Args:
        model: as in `step_job`.
        loss_fn: as in `step_job`.
        tx: as in `step_job`.
        wrt: as in `step_job`.
        batch: as in `step_job`.
        target: the hardware to compile for; None for the hardware at hand.
        **options: ``num_microbatches`` and ``weight``, as in `step_job`.

    Returns:
        The report, with the roles of `step_job`.

    Memory:
        None on the target: arrays are replaced by their shapes.
    """
    return step_job(model, loss_fn, tx, wrt, batch, **options).analyze(target)


def analyze_naive(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Where,
    batch: Tree,
    *,
    num_microbatches: int = 1,
    weight: Callable[[Tree], Any] | None = None,
    target: Target | str | None = None,
) -> MemoryReport:
    """Return the compiled bytes of a training step that differentiates and optimises the whole model.

    Args:
        model: the model, or its shapes.
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``.
        tx: the optimizer.
        wrt: selects the trainable leaves; all others are put behind `jax.lax.stop_gradient`.
        batch: a batch, or shapes of one.
        num_microbatches: number of parts of the batch, as in `Trainer`.
        weight: weight of a microbatch, as in `Trainer`.
        target: the hardware to compile for; None for the hardware at hand.

    Returns:
        The report, with the roles ``trainable``, ``optimizer``, ``frozen`` and ``batch``.

    Memory:
        None: arrays are replaced by their shapes.
    """
    arrays, static = split_static(model)
    trainable, frozen = partition(jax.tree.map(_shape, arrays), wrt)
    opt_state = _state_shapes(tx, combine(trainable, frozen))

    def step(trainable: Tree, opt_state: Tree, frozen: Tree, batch: Tree) -> tuple[Any, ...]:
        def loss(halves: tuple[Tree, Tree], batch: Tree) -> Any:
            full_model = combine(halves[0], jax.tree.map(jax.lax.stop_gradient, halves[1]), static)
            return parse_loss(loss_fn(full_model, batch), halves, has_mutable=False)[:2]

        grad_fn = accumulate(jax.value_and_grad(loss, has_aux=True), num_microbatches, weight=weight, has_aux=True)
        (value, _), grads = grad_fn((trainable, frozen), batch)
        params, full_grads = combine(trainable, frozen), combine(*grads)
        updates, opt_state = tx.update(full_grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    arguments = (trainable, opt_state, frozen, jax.tree.map(_shape, batch))
    roles = {"trainable": 0, "optimizer": 1, "frozen": 2, "batch": 3}
    return analyze(step, *arguments, target=target, roles=roles, donate_argnums=(0, 1, 2))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=multi_device_sharding(leaf))


def _placed_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf of the trainer's step; a leaf in host memory stays there."""
    is_hosted = memory_space(leaf) == jax.memory.Space.Host
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding if is_hosted else multi_device_sharding(leaf)
    )


def _state_shapes(tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Return shapes of an optimizer's state, in host memory where `lowtide.offload.optimizer` keeps it."""
    shapes = jax.eval_shape(tx.init, params)
    default_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default_sharding), params
    )
    places = state_shardings(tx, placed)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, places)
