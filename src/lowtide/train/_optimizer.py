"""Access to an optimizer's state: a running average of the weights (`ema`), and learning rates.

The average is part of the optimizer's state. So it is saved, sharded and rolled back like the rest of that state, and
`lowtide.offload.optimizer` can offload it (``match=r".*/average/.*"``). It covers the leaves that the optimizer gets:
in `Trainer`, the trainable ones. Learning rates are read from the state of `optax.inject_hyperparams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import ConfigError, Tree


class EmaState(NamedTuple):
    """State of `ema`."""

    inner: Tree
    """State of the wrapped optimizer."""
    average: Tree
    """The running average, shaped like the parameters, in float32 or wider."""


def ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the parameters in an optimizer's state.

    Args:
        tx: the optimizer.
        decay: decay of the average: ``average = decay * average + (1 - decay) * parameters`` after every update, but
            before the weight constraints of a Keras model are applied.

    Returns:
        A transformation with the updates of `tx`. `Trainer.averaged` replaces the parameters by the average.

    Raises:
        ConfigError: for a `decay` that is not above 0 and below 1; from ``update``, if it is called without parameters.

    Memory:
        One copy of the leaves passed to ``init``, in float32 or wider. The copy is also the initial average.

    Examples:
        >>> tx = ema(optax.sgd(1.0), decay=0.5)
        >>> params = {"w": jnp.array(4.0)}
        >>> updates, state = tx.update({"w": jnp.array(2.0)}, tx.init(params), params)
        >>> float(state.average["w"])
        3.0

    References:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
    """
    if not 0 < decay < 1:  # a scalar array is valid, too
        raise ConfigError(f"decay must be above 0 and below 1, not {decay!r}")
    transform = _Ema(optax.with_extra_args_support(tx), decay)
    return optax.GradientTransformationExtraArgs(transform.init, transform.update)


@dataclasses.dataclass(frozen=True)
class _Ema:
    """The ``init`` and ``update`` of the transformation that `ema` returns."""

    tx: Any
    decay: float

    def init(self, params: Tree) -> EmaState:
        average = jax.tree.map(lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True), params)
        return EmaState(self.tx.init(params), average)

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra: Any) -> Any:
        if params is None:
            raise ConfigError("ema needs the parameters for its average", hint="tx.update(grads, state, params)")
        updates, inner = self.tx.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        decay, share = self.decay, 1 - self.decay
        average = jax.tree.map(lambda mean, p: decay * mean + share * p.astype(mean.dtype), state.average, new)
        return updates, EmaState(inner, average)


def with_inner(
    tx: optax.GradientTransformation, change: Callable[[optax.GradientTransformation], optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Return ``change(tx)``; if `tx` was made by `ema`, change the wrapped transformation instead."""
    transform = getattr(tx.init, "__self__", None)
    return ema(with_inner(transform.tx, change), transform.decay) if isinstance(transform, _Ema) else change(tx)


def find_average(state: Tree) -> Tree | None:
    """Return the average of the first `ema` in an optimizer's state, or None."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, EmaState))
    return next((node.average for node in nodes if isinstance(node, EmaState)), None)


def find_learning_rates(opt_state: Tree, field_name: str = "hyperparams") -> list[tuple[Any, Any]]:
    """Return the path and the value of each learning rate in the states of `optax.inject_hyperparams`.

    `field_name` is the field to search: ``hyperparams`` (current values) or ``hyperparams_states`` (schedules).
    """
    # The field excludes moments of a parameter that is named ``learning_rate``.
    matches = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return [(path, value) for path, value in matches if len(path) > 1 and getattr(path[-2], "name", None) == field_name]


def learning_rate_metric(opt_state: Tree) -> dict[str, Any]:
    """Return the metric ``learning_rate`` if the optimizer's state has exactly one rate and it is scalar; else {}."""
    matches = find_learning_rates(opt_state)
    return {"learning_rate": matches[0][1]} if len(matches) == 1 and matches[0][1].ndim == 0 else {}
