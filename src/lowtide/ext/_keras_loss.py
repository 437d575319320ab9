"""Loss function for a trainer from the loss and metrics that Keras' ``compile`` accepts (checked with Keras 3.15.1).

Ranks, masks and reductions are those of `keras.losses.Loss` and `keras.metrics.MeanMetricWrapper`. Keras handles a bare
function as a loss in a private class, so `_Loss` does the same here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from ..core import ConfigError, DataError
from ..train import example_weights


def compiled_loss(loss: Any, metrics: Any, class_weight: Mapping[int, float] | None) -> Callable[..., Any]:
    """See `lowtide.ext.keras.Bridge.loss`."""
    fn = _resolve_loss(loss)
    if not isinstance(metrics or {}, Mapping):
        raise ConfigError(
            "metrics is not a dictionary",
            expected="a dictionary of names and metrics",
            got=type(metrics).__name__,
            hint='pass for instance bridge.loss(loss, {"accuracy": "accuracy"})',
        )
    means = {name: _resolve_metric(name, metric) for name, metric in (metrics or {}).items()}
    if class_weight is not None:
        example_weights(np.zeros(0, np.int32), class_weight)  # raises now rather than in the first step

    def loss_fn(model: Any, batch: Any, training: bool) -> tuple[Any, dict[str, Any]]:
        x, y, sample_weight = _split_batch(batch)
        outputs = model(x, training=training)
        _check_single_output(y, outputs)
        if class_weight is not None and training:
            sample_weight = example_weights(_class_labels(y, outputs), class_weight, sample_weight)
        value: Any = fn(y, outputs, sample_weight=sample_weight)
        value += sum(model.losses)
        return value, {name: _mean(metric, y, outputs) for name, metric in means.items()}

    return loss_fn


class _Loss(keras.losses.Loss):
    """A function of labels and outputs as a loss, in float32 and with the reduction of ``compile``."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(name="loss")
        self._fn = fn

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Compute the loss per example; the ranks of labels and outputs may differ by one axis of size 1."""
        y_true, y_pred = _match_rank(y_true, y_pred), _match_rank(y_pred, y_true)
        return self._fn(y_true, y_pred)


def _match_rank(x: Any, other: Any) -> Any:
    """Add or drop a last axis to match another array, like Keras: (B,) becomes (B, 1), else a last axis of 1 is cut."""
    if x.ndim == other.ndim - 1 == 1 and other.shape[-1] == 1:
        return x[:, None]
    if x.ndim == other.ndim + 1 > 2 and x.shape[-1] == 1:
        return x[..., 0]
    return x


def _resolve_loss(loss: Any) -> keras.losses.Loss:
    try:
        resolved: Any = (
            _select_by_shape("losses", "crossentropy") if loss in ("crossentropy", "ce") else keras.losses.get(loss)
        )
    except (ValueError, TypeError):
        resolved = None
    if not callable(resolved):
        raise ConfigError(
            "the loss is not a Keras loss",
            expected="a Keras loss, its name, or a function of labels and outputs, for a model of one output",
            got=repr(loss),
            hint='pass for instance bridge.loss("mse"); for several outputs write loss_fn(model, batch, training)',
        )
    return resolved if isinstance(resolved, keras.losses.Loss) else _Loss(resolved)


def _resolve_metric(name: str, metric: Any) -> Any:
    try:
        kind = {"acc": "accuracy", "ce": "crossentropy"}.get(metric, metric) if isinstance(metric, str) else None
        is_by_shape = kind in ("accuracy", "crossentropy")
        resolved: Any = _select_by_shape("metrics", kind) if is_by_shape else keras.metrics.get(metric)
    except (ValueError, TypeError):
        resolved = None
    is_stateful = isinstance(resolved, keras.metrics.Metric) and not isinstance(
        resolved, keras.metrics.MeanMetricWrapper
    )
    if is_stateful or not callable(resolved):
        raise ConfigError(
            f"metric {name!r} is not a mean over examples" if is_stateful else f"metric {name!r} is not a Keras metric",
            expected="a function of labels and outputs, the name of a Keras metric, or one that is a mean",
            got=repr(metric),
            hint="compute it from trainer.predict, for instance in a callback",
        )
    return (
        resolved if isinstance(resolved, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(resolved, name=name)
    )


def _mean(metric: Any, y: Any, outputs: Any) -> Any:
    """Return the mean of a metric over the unmasked examples of a batch."""
    return metric.stateless_result(metric.stateless_update_state(metric.stateless_reset_state(), y, outputs))


def _select_by_shape(module: str, kind: str) -> Callable[..., Any]:
    """Return the function for ``"crossentropy"`` or ``"accuracy"``; like ``compile``, it chooses by shapes."""

    def fn(y_true: Any, y_pred: Any) -> Any:
        if y_pred.shape[-1] == 1:
            labels = "binary"
        else:
            labels = "sparse_categorical" if y_true.ndim < y_pred.ndim or y_true.shape[-1] == 1 else "categorical"
        return getattr(getattr(keras, module), f"{labels}_{kind}")(y_true, y_pred)

    return fn


def _split_batch(batch: Any) -> tuple[Any, Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""  # pyright: ignore[reportUnknownArgumentType]
        raise DataError(
            "a batch does not consist of inputs and labels",
            expected="(x, y) or (x, y, sample_weight)",
            got=f"a {type(batch).__name__}{keys}{size}",
            hint="map the batches to tuples, in which x may be a dictionary, or write loss_fn(model, batch, training)",
        )
    x, y, sample_weight = (*batch, None)[:3]
    return x, y, sample_weight


def _check_single_output(y: Any, outputs: Any) -> None:
    if not hasattr(y, "shape") or not hasattr(outputs, "shape"):
        raise ConfigError(
            "the bridge's loss needs one array of labels and one array of outputs",
            expected="a model of one output",
            got=f"{type(y).__name__} and {type(outputs).__name__}",
            hint="write loss_fn(model, batch, training), which adds up the losses of the outputs and sum(model.losses)",
        )


def _class_labels(y: Any, outputs: Any) -> Any:
    """Return the class of each label; Keras would take the argmax over any last axis, also of integer sequences."""
    if y.ndim > 1 and y.shape[-1] == 1:
        y = y[..., 0]
    elif y.ndim > 1 and y.shape == outputs.shape:
        return jnp.argmax(y, axis=-1)
    return jnp.round(y).astype(jnp.int32)
