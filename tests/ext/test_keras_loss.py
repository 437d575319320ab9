"""The loss and the metrics of a Keras bridge beside those of Keras' own ``compile``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError

NAMES = """mse mae mape msle huber log_cosh hinge squared_hinge categorical_hinge poisson kl_divergence
    cosine_similarity binary_crossentropy binary_focal_crossentropy crossentropy tversky dice""".split()
QUICK = ("mse", "huber", "categorical_hinge", "binary_crossentropy", "crossentropy", "dice", "a function")
METRICS = ["accuracy", "binary_accuracy", "mse", "mean_absolute_error", "cosine_similarity", "hinge"]


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def model_of(units: int = 1, activation: str = "sigmoid") -> Any:
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, activation=activation)])


def both(model: Any, loss: Any, metrics: Any, *batch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The values of an evaluation by a trainer, and by Keras."""
    from lowtide.ext.keras import Bridge

    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss(loss, metrics), optax.sgd(0.1))
    ours = trainer.evaluate([batch])
    model.compile("sgd", loss, metrics=list(metrics.values()))
    x, y, *weight = batch
    theirs = model.test_on_batch(x, y, *weight, return_dict=True)
    return ours, {name: float(value) for name, value in theirs.items()}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 2, 8).astype(np.float32)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_flat", [True, False], ids=["(B,)", "(B, 1)"])
@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*NAMES, "a function")]
)
def test_losses_of_every_name_and_rank_are_keras(loss: Any, is_flat: bool) -> None:
    x, y = data()
    given: Any = (lambda a, b: (a - b) ** 2) if loss == "a function" else loss
    ours, theirs = both(model_of(), given, {}, x, y if is_flat else y[:, None])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    weight = np.linspace(0.5, 2.0, 8, dtype=np.float32)
    ours, theirs = both(model_of(), given, {}, x, y if is_flat else y[:, None], weight)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("is_flat", [True, False], ids=["(B,)", "(B, 1)"])
@pytest.mark.parametrize("metric", METRICS)
def test_metrics_of_every_name_and_rank_are_keras(metric: str, is_flat: bool) -> None:
    x, y = data()
    ours, theirs = both(model_of(), "mse", {metric: metric}, x, y if is_flat else y[:, None])
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("labels", ["flat", "column", "one-hot"])
def test_accuracy_and_crossentropy_of_classes_go_by_the_shape_of_labels(labels: str) -> None:
    x, y = data()
    given = {"flat": y, "column": y[:, None], "one-hot": np.eye(3, dtype=np.float32)[y.astype(int)]}[labels]
    ours, theirs = both(model_of(3, "softmax"), "crossentropy", {"accuracy": "accuracy"}, x, given)
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_masked_moments_count_neither_in_the_loss_nor_in_a_metric() -> None:
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Embedding(7, 4, mask_zero=True), layers.Dense(3, "softmax")])
    x = np.array([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [1, 1, 6, 2, 0]], np.int32)
    y = np.random.default_rng(0).integers(0, 3, x.shape)
    metrics = {"accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy")}
    ours, theirs = both(model, "sparse_categorical_crossentropy", metrics, x, y)
    assert ours == pytest.approx(theirs, rel=1e-5)
    found = np.argmax(model(x), -1) == y
    assert ours["accuracy"] == pytest.approx(found[x > 0].mean()) != pytest.approx(found.mean())


@pytest.mark.parametrize(
    ("loss", "metrics", "text"),
    [
        ("no such loss", {}, r"loss must be a Keras loss.*, not 'no such loss'.*hint: pass for instance bridge\.loss"),
        (None, {}, r"loss must be a Keras loss.*, not None.*hint: "),
        (["mse", "mse"], {}, r"loss must be a Keras loss.*, not \['mse', 'mse'\].*hint: .*several outputs"),
        ("mse", {"a": "no such metric"}, r"metric 'a' must be a Keras metric.*, not 'no such metric'.*hint: "),
        (
            "mse",
            {"a": "AUC"},
            r"metric 'a' must be a mean over examples, not 'AUC'.*hint: compute it from trainer\.predict",
        ),
        ("mse", ["mse"], r"metrics must be a dictionary of names and metrics, not \['mse'\].*hint: "),
    ],
)
def test_losses_and_metrics_that_are_none_are_refused_at_once(loss: Any, metrics: Any, text: str) -> None:
    from lowtide.ext.keras import Bridge

    with pytest.raises(ConfigError, match=f"(?s){text}"):
        Bridge(model_of()).loss(loss, metrics)


def test_several_outputs_and_batches_of_another_form_are_refused() -> None:
    import keras

    from lowtide.ext.keras import Bridge

    inputs = keras.Input((4,))
    two = Bridge(keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)]))
    one, (x, y) = Bridge(model_of()), data()
    for bridge, labels in ((two, [y, y]), (two, y), (one, {"y": y})):
        trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1))
        with pytest.raises(ConfigError, match=r"(?s)one array of.*hint: write loss_fn\(model, batch, training\)"):
            trainer.fit([(x, labels)], num_steps=1, progress=False)
    trainer = lt.Trainer(one, one.loss("mse"), optax.sgd(0.1))
    for batch, got in (({"x": x, "y": y}, "a dict of x, y"), ((x,), "a tuple of 1"), (x, "Tracer")):
        with pytest.raises(
            DataError, match=rf"(?s)must be \(x, y\) or \(x, y, sample_weight\), not .*{got}.*hint: map"
        ):
            trainer.fit([batch], num_steps=1, progress=False)
