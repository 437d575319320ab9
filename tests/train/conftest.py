"""Models of every kind that a trainer takes, for tests of what is left of them."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt

STEPS = 6


def batches(count: int = STEPS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
        for _ in range(count)
    ]


class Subject:
    """A model of one kind, how its loss is computed, and what its weights are outside of a trainer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        make: Callable[[], None] = getattr(self, f"_{kind}")
        make()

    def trainer(self, **options: Any) -> lt.Trainer:
        return lt.Trainer(self.given, self.loss, optax.adam(1e-2), **options)

    def _plain(self) -> None:
        key = jax.random.key(0)
        self.model: Any = {"w": jax.random.normal(key, (4, 2)), "b": jnp.zeros((2,))}
        self.given = self.model
        self.call = lambda model, x: x @ model["w"] + model["b"]
        self.loss = lambda model, batch: jnp.mean((self.call(model, batch["x"]) - batch["y"]) ** 2)
        self.weights = lambda trainer: jax.tree.map(np.array, trainer.model)

    def _equinox(self) -> None:
        import equinox as eqx

        from lowtide.ext.equinox import Bridge

        self.model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        self.given = Bridge(self.model)
        self.call = lambda model, x: jax.vmap(model)(x)
        self.loss = lambda model, batch: jnp.mean((self.call(model, batch["x"]) - batch["y"]) ** 2)
        self.weights = lambda trainer: jax.tree.map(np.array, eqx.filter(trainer.model, eqx.is_array))

    def _nnx(self) -> None:
        from flax import nnx

        from lowtide.ext.nnx import Bridge

        class Net(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.first = nnx.Linear(4, 8, rngs=rngs)
                self.norm = nnx.BatchNorm(8, rngs=rngs)
                self.drop = nnx.Dropout(0.2, rngs=rngs)
                self.last = nnx.Linear(8, 2, rngs=rngs)

            def __call__(self, x: Any) -> Any:
                return self.last(self.drop(self.norm(self.first(x))))

        self.model = Net(nnx.Rngs(0))
        self.given = Bridge(self.model)
        self.call = lambda model, x: model(x)
        self.loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        # The module itself, not by way of the trainer: that is what the user holds.
        def weights(trainer: Any) -> Any:
            keys = nnx.to_pure_dict(nnx.state(self.model, nnx.Not(nnx.RngKey)))
            return jax.tree.map(np.array, keys)

        self.weights = weights

    def _keras(self) -> None:
        import keras

        from lowtide.ext.keras import Bridge

        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, kernel_regularizer="l2"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2, seed=1),
                keras.layers.Dense(2),
            ]
        )
        self.given = Bridge(self.model)
        loss = self.given.loss("mse")
        self.call = lambda model, x: model(x)
        self.loss = lambda model, batch, training: loss(model, (batch["x"], batch["y"]), training)
        self.weights = lambda trainer: [np.array(v.value) for v in self.model.variables]


@functools.cache
def stopped(kind: str) -> list[Any]:
    """The weights at the start of a run, and after each of its steps, where it stops and goes on."""
    subject = Subject(kind)
    trainer = subject.trainer()
    found = [subject.weights(trainer)]
    for step in range(1, STEPS):
        trainer.fit(batches(), num_steps=step)
        found.append(subject.weights(trainer))
    return found


@functools.cache
def undisturbed(kind: str) -> Any:
    """The weights after a run that stops nowhere."""
    subject = Subject(kind)
    trainer = subject.trainer()
    trainer.fit(batches(), num_steps=STEPS)
    return subject.weights(trainer)


def reference(kind: str, num_steps: int) -> Any:
    """The weights of a run that nothing went wrong in."""
    return undisturbed(kind) if num_steps == STEPS else stopped(kind)[num_steps]


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(theirs)) > 0
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture
def subjects() -> Any:
    """What this file defines; test files cannot import each other."""
    with jax.numpy_rank_promotion("allow"):  # Keras adds its biases by it
        yield types.SimpleNamespace(
            Subject=Subject, batches=batches, reference=reference, assert_same=assert_same, STEPS=STEPS
        )
