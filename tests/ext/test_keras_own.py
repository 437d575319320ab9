"""Keras models that say themselves how they learn: what would not be called is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, SelectionError
from lowtide.ext.keras import Bridge

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
DATA = [(X, X.sum(1, keepdims=True))] * 3


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


class Plain(keras.Model):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x)


class Hundredfold(Plain):
    """A loss of its own."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return 100 * keras.ops.mean((y - y_pred) ** 2)


def built(cls: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = cls()
    model(X)
    return model


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("name", ["compute_loss", "compute_metrics", "train_step", "test_step"])
def test_what_a_model_does_itself_is_not_passed_over(name: str, wraps: bool) -> None:
    def own(*args: Any, **kwargs: Any) -> None: ...

    if wraps:
        own = functools.wraps(getattr(keras.Model, name))(own)
    model = built(type("Own", (Plain,), {name: own}))
    bridge = Bridge(model)
    with pytest.raises(
        ConfigError, match=rf"(?s)Own overrides {name}, .*hint: write loss_fn.*model.compile\(loss=...\)"
    ):
        bridge.loss("mse")
    model = built(Plain)
    setattr(model, name, own)
    with pytest.raises(ConfigError, match=f"overrides {name}, "):
        Bridge(model).loss("mse")


@pytest.mark.slow
def test_its_loss_in_a_function_as_the_hint_says() -> None:
    def loss_fn(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        return model.compute_loss(x, y, model(x, training=training))

    ours, theirs = built(Hundredfold), built(Hundredfold)
    records = lt.Trainer(Bridge(ours), loss_fn, optax.sgd(1e-4)).fit(DATA, num_steps=3, progress=False)
    theirs.compile(keras.optimizers.SGD(1e-4))
    for record, (x, y) in zip(records, DATA, strict=True):
        theirs.reset_metrics()
        assert record["loss"] == pytest.approx(float(theirs.train_on_batch(x, y)), rel=1e-5)


def test_a_step_of_prediction_is_not_passed_over() -> None:
    model = built(type("Own", (Plain,), {"predict_step": lambda self, *args: None}))
    trainer = lt.Trainer(Bridge(model), lambda m, b: keras.ops.mean(m(b[0]) ** 2), optax.sgd(1e-4))
    with pytest.raises(ConfigError, match=r"(?s)overrides predict_step, .*hint: write fn\(model, batch\)"):
        trainer.predict([X])
    assert trainer.predict([X], lambda model, batch: model(batch)).shape == (8, 1)


def test_variables_that_gradients_overwrite_are_refused() -> None:
    model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])
    model(X)
    for layer in model.layers:
        layer.quantize("float8")
    with pytest.raises(ConfigError, match=r"(?s)overwrites.*gradient.*amax_history.*of 12.*hint:.*mixed_bfloat16"):
        Bridge(model)


def test_a_model_without_variables_is_not_built() -> None:
    model = Plain()
    with pytest.raises(SelectionError, match=r"(?s)no trainable variables.*got: a model that is not built"):
        Bridge(model)
    model = keras.Sequential([keras.layers.Flatten()])
    model(X)
    with pytest.raises(SelectionError, match="got: a model without variables"):
        Bridge(model)


@pytest.mark.slow
def test_the_states_of_a_recurrent_layer_are_state_of_the_step(tmp_path: Any) -> None:
    """Keras lists them nowhere, and its own `fit` loses what a call assigns to them."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 1))) for _ in range(4)]

    def made() -> tuple[Any, lt.Trainer]:
        keras.utils.set_random_seed(0)
        lstm = keras.layers.LSTM(3, stateful=True)
        model = keras.Sequential([keras.Input((5, 2), batch_size=4), lstm, keras.layers.Dense(1)])
        bridge = Bridge(model)
        return model, lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.0), checkpoint_dir=tmp_path)

    model, _ = made()
    want = [float(np.mean((np.asarray(model(x)) - y) ** 2)) for x, y in data]
    first, trainer = made()
    found = [record["loss"] for record in trainer.fit(data, num_steps=2, progress=False)]
    assert all(np.abs(state).sum() > 0 for state in first.layers[0].states)
    _, trainer = made()
    assert trainer.restore() == 2
    found += [record["loss"] for record in trainer.fit(data, num_steps=4, progress=False)]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model must be a keras.Model, not <class"):
        Bridge(keras.layers.Dense)  # type: ignore[arg-type]
