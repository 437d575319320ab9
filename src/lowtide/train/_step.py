"""What the trainer repeats: a pure step, how its state begins, and the model that is in it.

The trainer knows no more of a step than `Step` says, so that a loop, its checkpoints and its reports serve every way to
compute one. `WholeStep` differentiates the model as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from ..core import Tree, Where, accumulate, combine, is_array_like, partition, value_and_grad

LossFn = Callable[[Tree, Tree], Any]

STEP_ARGUMENTS = ("trainable", "optimizer", "step", "frozen", "batch")
"""Names of a step's arguments, in order; the roles of its memory report."""


class Step(Protocol):
    """A training step."""

    def init(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        """What trains, the optimizer's state for it, and what is frozen, each where it belongs."""
        ...

    def __call__(
        self, trainable: Tree, opt_state: Tree, step: Any, frozen: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Any, dict[str, Any]]:
        """One step: the first three arguments, which are donated, as they are after it, and the metrics."""
        ...

    def model(self, trainable: Tree, frozen: Tree) -> Tree:
        """The model that the two halves are of."""
        ...


class WholeStep:
    """All gradients of what trains, then one update of it.

    Args:
        model: the model, of which only leaves that hold no numbers are kept.
        loss_fn: ``loss_fn(model, batch)``, as `Trainer` takes it.
        tx: the optimizer.
        wrt: what trains.
        num_microbatches: parts of a batch.
        weight: weight of a microbatch.
    """

    def __init__(
        self,
        model: Tree,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        wrt: Where,
        num_microbatches: int,
        weight: Callable[[Tree], Any],
    ) -> None:
        self._static = split_static(model)[1]
        self._loss = bind_static(loss_fn, self._static)
        self._tx, self._wrt, self._num_microbatches, self._weight = tx, wrt, num_microbatches, weight

    def init(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        """See `Step`."""
        trainable, frozen = partition(split_static(model)[0], self._wrt)
        # jit gives the optimizer's state buffers of its own, also where init returns the parameters themselves.
        return trainable, jax.jit(self._tx.init)(trainable), frozen

    def __call__(
        self, trainable: Tree, opt_state: Tree, step: Any, frozen: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Any, dict[str, Any]]:
        """See `Step`."""

        def loss_fn(model: Tree, batch: Tree) -> tuple[Any, tuple[Tree, Any]]:
            loss, metrics = self._loss(model, batch)
            return loss, (metrics, self._weight(batch))

        grad_fn = value_and_grad(loss_fn, self._wrt, has_aux=True)
        grad_fn = accumulate(grad_fn, self._num_microbatches, weight=self._weight, has_aux=True)
        (loss, (metrics, weights)), grads = grad_fn(combine(trainable, frozen), batch)
        total = jnp.sum(weights)
        metrics = {name: jnp.sum(weighted(value, weights)) / total for name, value in metrics.items()}
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        update = optax.with_extra_args_support(self._tx).update
        updates, opt_state = update(grads, opt_state, trainable, value=loss)  # some schedules read the loss
        return optax.apply_updates(trainable, updates), opt_state, step + 1, metrics

    def model(self, trainable: Tree, frozen: Tree) -> Tree:
        """See `Step`."""
        return combine(trainable, frozen, self._static)


def split_static(model: Tree) -> tuple[Tree, Tree]:
    """The leaves of a model that hold numbers, and those that do not (an Equinox module's activation function)."""
    arrays = jax.tree.map(lambda leaf: leaf if is_array_like(leaf) else None, model)
    return arrays, jax.tree.map(lambda leaf: None if is_array_like(leaf) else leaf, model)


def bind_static(loss_fn: LossFn, static: Tree) -> Callable[[Tree, Tree], tuple[Any, Tree]]:
    """The loss as a function of the leaves that hold numbers, which returns ``(loss, metrics)`` always."""

    def loss(model: Tree, batch: Tree) -> tuple[Any, Tree]:
        result = loss_fn(combine(model, static), batch)
        return result if isinstance(result, tuple) else (result, {})  # pyright: ignore[reportReturnType]

    return loss


def weighted(value: Any, weight: Any) -> Any:
    """A value times its weight; what has weight 0 contributes nothing, also where a mean over no tokens is 0/0."""
    return jnp.where(weight == 0, 0, value * weight)
