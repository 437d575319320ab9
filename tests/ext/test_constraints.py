"""Constraints of Keras variables: after every update, as Keras' own optimizers have them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import lowtide as lt

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

X, Y = np.eye(4, dtype=np.float32), np.linspace(-9, 1, 12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def model_of(constraint: str, *, is_normed: bool = False) -> Any:
    import keras

    made = getattr(keras.constraints, constraint)()
    first = keras.layers.Dense(3, use_bias=False, kernel_initializer="ones", kernel_constraint=made)
    return keras.Sequential(
        [keras.Input((4,)), first, keras.layers.BatchNormalization()] if is_normed else [keras.Input((4,)), first]
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraint", ["NonNeg", "MaxNorm", "UnitNorm", "MinMaxNorm"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"on_nan": "skip"}, marks=pytest.mark.slow), {"num_microbatches": 2}], ids=str
)
def test_constraints_hold_after_every_step_as_in_keras(constraint: str, options: Any) -> None:
    import keras

    from lowtide.ext.keras import Bridge

    ours, theirs, free = model_of(constraint), model_of(constraint), model_of("Constraint")
    for model in (ours, free):
        bridge = Bridge(model)
        trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(1.0), **options)
        trainer.fit([(X, Y)] * 8, num_steps=8, progress=False)
    theirs.compile(keras.optimizers.SGD(1.0), "mse")
    theirs.fit(X, Y, epochs=8, batch_size=4, verbose=0)
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not np.allclose(ours.get_weights()[0], free.get_weights()[0]), "the constraint changes what is learnt"


@pytest.mark.slow
def test_a_constraint_leaves_frozen_weights_and_a_step_left_out_as_they_are() -> None:
    from lowtide.ext.keras import Bridge

    model = model_of("UnitNorm", is_normed=True)
    model.layers[0].trainable = False
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1), on_nan="skip")
    trainer.fit([(X, Y)], num_steps=1, progress=False)
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((4, 3)))
    model = model_of("UnitNorm")
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1), on_nan="skip")
    trainer.fit([(X * np.nan, Y)], num_steps=1, progress=False)
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((4, 3)))
