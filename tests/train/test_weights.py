"""Weights of classes and samples: Keras' values, and means that microbatches and batches do not change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import ConfigError, DataError, NonFiniteError, StructureError
from lowtide.train import Trainer, example_weights

CLASSES, WEIGHTS = 3, {0: 0.5, 2: 4.0}


def _batch(size: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, 4)).astype(np.float32),
        "y": rng.integers(0, CLASSES, size).astype(np.int32),
        "w": rng.uniform(0, 3, size).astype(np.float32),
    }


def _weights(batch: Any) -> Any:
    return example_weights(batch["y"], WEIGHTS, batch["w"])


def _loss(model: Any, batch: Any) -> Any:
    each = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ model["w"], batch["y"])
    weights = _weights(batch)
    return jnp.sum(each * weights) / jnp.sum(weights)


def _trainer(num_microbatches: int = 1) -> Trainer:
    given = {"w": jax.random.normal(jax.random.key(0), (4, CLASSES))}
    weight = lambda batch: jnp.sum(_weights(batch))  # noqa: E731
    return Trainer(given, _loss, optax.sgd(0.1), num_microbatches=num_microbatches, weight=weight)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_a_weight_is_that_of_the_class_times_that_of_the_sample(of: Any) -> None:
    labels, samples = of([0, 1, 2, 2]), of(np.array([1.0, 2.0, 3.0, 0.0], np.float32))
    found = example_weights(labels, WEIGHTS, samples)
    assert found.dtype == np.float32 and isinstance(found, np.ndarray if of is np.asarray else jax.Array)
    assert found.tolist() == [0.5, 2.0, 12.0, 0.0]
    one_hot = of(np.eye(3, dtype=np.float32)[[0, 1, 2, 2]])
    assert example_weights(one_hot, [0.5, 1.0, 4.0]).tolist() == [0.5, 1.0, 4.0, 4.0]
    assert example_weights(of(np.array([[0.0], [1.0]])), {1: 5.0}).tolist() == [1.0, 5.0]
    assert example_weights(of([[0, -1], [2, 9]]), {-1: 0.0, **WEIGHTS}).tolist() == [[0.5, 0.0], [4.0, 1.0]]


def test_microbatches_of_unequal_weights_train_as_the_whole_batch() -> None:
    data = [_batch(seed=seed) for seed in range(4)]
    one, four = _trainer(), _trainer(4)
    losses = [[record["loss"] for record in trainer.fit(data, num_steps=4)] for trainer in (one, four)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    np.testing.assert_allclose(four.model["w"], one.model["w"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_an_evaluation_is_the_weighted_mean_of_all_examples() -> None:
    trainer, parts = _trainer(), [_batch(16), _batch(3, 1), {**_batch(5, 2), "w": np.zeros(5, np.float32)}]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    assert trainer.evaluate(parts)["loss"] == pytest.approx(float(_loss(trainer.model, whole)), rel=1e-6)


def test_labels_without_a_class_are_an_error_or_not_a_number() -> None:
    with pytest.raises(DataError, match=r"(?s)a label is 2, but only classes 0 to 1 .*hint: .*a dictionary"):
        example_weights(np.array([0, 2]), [1.0, 2.0])
    assert np.isnan(jax.jit(lambda y: example_weights(y, [1.0, 2.0]))(jnp.array([0, -1]))).tolist() == [False, True]
    loss = lambda model, y: jnp.mean(example_weights(y, [1.0, 2.0]) * model["w"])  # noqa: E731
    with pytest.raises(NonFiniteError, match=r"(?s)step 1: loss is not finite.*hint:"):
        Trainer({"w": jnp.ones(())}, loss, optax.sgd(0.1)).fit([np.array([0, 2])], num_steps=1)


@pytest.mark.parametrize("weights", [{}, [], {0: -1.0}, [1.0, np.nan], {"cat": 1.0}, {0.5: 1.0}])
def test_class_weights_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)class_weight must have a weight of at least 0.*hint: number the classes from 0"
    ):
        example_weights(np.array([0]), weights)


def test_sample_weights_that_are_none_are_refused() -> None:
    labels = np.array([0, 1])
    with pytest.raises(StructureError, match=r"(?s)has the shape \[2, 1\], but the labels have \[2\].*hint:"):
        example_weights(labels, WEIGHTS, np.ones((2, 1)))
    with pytest.raises(StructureError, match=r"(?s)has the shape \[3\], but the labels have \[2\].*hint:"):
        jax.eval_shape(lambda y, w: example_weights(y, WEIGHTS, w), jnp.zeros(2, jnp.int32), jnp.zeros(3))
    with pytest.raises(DataError, match=r"(?s)weight must be finite and at least 0, not -1.0.*hint:"):
        example_weights(labels, WEIGHTS, np.array([1.0, -1.0]))


def _keras_model(units: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "softmax" if units > 1 else "sigmoid")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "units", "labels"),
    [
        ("sparse_categorical_crossentropy", 3, lambda y: y),
        pytest.param("sparse_categorical_crossentropy", 3, lambda y: y[:, None], marks=pytest.mark.slow),
        pytest.param("categorical_crossentropy", 3, lambda y: np.eye(3, dtype=np.float32)[y], marks=pytest.mark.slow),
        ("binary_crossentropy", 1, lambda y: (y > 0).astype(np.float32)[:, None]),
    ],
)
def test_keras_class_weights_give_keras_losses(loss: str, units: int, labels: Any) -> None:
    from lowtide.ext.keras import Bridge

    weights = {0: 0.5, 1: 2.0}
    batch = _batch()
    x, y, w = batch["x"], labels(batch["y"]), batch["w"]

    def of_keras(**options: Any) -> float:
        model = _keras_model(units)
        model.compile("sgd", loss)
        return float(model.train_on_batch(x, y, **options))

    def ours(*batch: Any, class_weight: Any = weights, num_microbatches: int = 1) -> float:
        bridge = Bridge(_keras_model(units))
        given = bridge.loss(loss, class_weight=class_weight)
        trainer = Trainer(bridge, given, optax.sgd(0.1), num_microbatches=num_microbatches)
        return trainer.fit([batch], num_steps=1)[0]["loss"]

    with jax.numpy_rank_promotion("allow"):
        want = of_keras(class_weight=weights)
        assert ours(x, y) == pytest.approx(want, rel=1e-6) != pytest.approx(of_keras(), rel=1e-3)
        assert ours(x, y, num_microbatches=4) == pytest.approx(want, rel=1e-6)
        assert ours(x, y, w, class_weight=None) == pytest.approx(of_keras(sample_weight=w), rel=1e-6)
        both = w * np.array([weights.get(int(c), 1.0) for c in (batch["y"] if units > 1 else y[:, 0])], np.float32)
        assert ours(x, y, w) == pytest.approx(of_keras(sample_weight=both), rel=1e-6)
        bridge = Bridge(_keras_model(units))
        trainer = Trainer(bridge, bridge.loss(loss, class_weight=weights), optax.sgd(0.1))
        # Keras' validation has no class weights either.
        assert trainer.evaluate([(x, y)])["loss"] == pytest.approx(of_keras(), rel=1e-6)
        with pytest.raises(ConfigError, match=r"(?s)class_weight must have a weight of at least 0.*hint:"):
            bridge.loss(loss, class_weight={0: -1.0})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own fit
def test_a_fit_with_keras_class_weights_ends_with_keras_weights() -> None:
    from lowtide.ext.keras import Bridge

    data = [(b["x"], b["y"]) for b in (_batch(seed=seed) for seed in range(3))]
    with jax.numpy_rank_promotion("allow"):
        theirs, model = _keras_model(3), _keras_model(3)
        theirs.compile(optimizer=_sgd(), loss="sparse_categorical_crossentropy")
        x, y = (np.concatenate(leaves) for leaves in zip(*data, strict=True))
        theirs.fit(x, y, batch_size=16, shuffle=False, verbose=0, class_weight=WEIGHTS)
        bridge = Bridge(model)
        loss = bridge.loss("sparse_categorical_crossentropy", class_weight=WEIGHTS)
        Trainer(bridge, loss, optax.sgd(0.1)).fit(data, num_steps=3)
    for a, b in zip(theirs.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def _sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.1)


def test_class_weights_of_several_outputs_are_refused() -> None:
    import keras

    from lowtide.ext.keras import Bridge

    inputs = keras.Input((4,))
    bridge = Bridge(keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)]))
    trainer = Trainer(bridge, bridge.loss("mse", class_weight={1: 2.0}), optax.sgd(0.1))
    batch = (np.zeros((8, 4), np.float32), [np.zeros((8, 2), np.float32)] * 2)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(ConfigError, match=r"(?s)one array of.*list and list.*hint: .*loss_fn"),
    ):
        trainer.fit([batch], num_steps=1)
