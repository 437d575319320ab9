"""What the trainer repeats: a pure step, how its state begins, and the model that is in it.

The trainer knows no more of a step than `Step` says, so that a loop, its checkpoints and its reports serve every way to
compute one. `WholeStep` differentiates the model as a whole; `LayerStep` is a `lowtide.offload.layerwise_step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from ..core import StructureError, Tree, Where, accumulate, combine, is_array_like, partition, value_and_grad
from ..offload import LayerwiseState, LayerwiseStep

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


class LayerStep:
    """Gradients of one layer at a time, each of which meets the optimizer before the next is computed.

    Args:
        model: a dictionary or a dataclass of ``outer`` and ``layers``, of which the rest is kept.
        step: what to do with it.

    Raises:
        StructureError: for any other model.
    """

    def __init__(self, model: Tree, step: LayerwiseStep) -> None:
        self._step = step
        fields = {"outer", "layers"}
        if isinstance(model, Mapping) and set(model) == fields:
            self._rest = None
        elif dataclasses.is_dataclass(model) and fields <= {field.name for field in dataclasses.fields(model)}:
            self._rest = dataclasses.replace(model, outer=None, layers=None)  # pyright: ignore[reportArgumentType]
        else:
            raise StructureError(
                "a layerwise step trains a model that is made of outer and layers",
                expected='{"outer": ..., "layers": ...}, or a dataclass with these fields',
                got=type(model).__name__,
                hint="put the stacked parameters under layers and all others under outer",
            )

    def init(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        """See `Step`."""
        outer, layers = (model["outer"], model["layers"]) if self._rest is None else (model.outer, model.layers)
        state, frozen = self._step.init(outer, layers)
        trainable, opt_state = _halves(state)
        return trainable, opt_state, frozen

    def __call__(
        self, trainable: Tree, opt_state: Tree, step: Any, frozen: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Any, dict[str, Any]]:
        """See `Step`."""
        state = LayerwiseState(
            step, **trainable, outer_opt=opt_state["outer"], layers_opt=opt_state["layers"], grad_norm=opt_state["norm"]
        )
        state, metrics = self._step(state, frozen, batch)
        return *_halves(state), state.step, metrics

    def model(self, trainable: Tree, frozen: Tree) -> Tree:
        """See `Step`."""
        params = combine(trainable, frozen)
        return params if self._rest is None else dataclasses.replace(self._rest, **params)


def _halves(state: LayerwiseState) -> tuple[Tree, Tree]:
    """What trains, and the optimizer's part, which the norm that the next step may clip by belongs to."""
    opt_state = {"outer": state.outer_opt, "layers": state.layers_opt, "norm": state.grad_norm}
    return {"outer": state.outer, "layers": state.layers}, opt_state


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
