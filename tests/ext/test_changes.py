"""Models that were changed after their bridge was made: refused when a run begins."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import SelectionError, StructureError

X = np.ones((8, 4), np.float32)


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def freeze(model: Any) -> None:
    model.layers[0].trainable = False


def unfreeze(model: Any) -> None:
    model.layers[1].trainable = True


def add(model: Any) -> None:
    model.layers[0].enable_lora(2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, r"frozen: sequential/first/kernel, sequential/first/bias"),
        (unfreeze, r"unfrozen: sequential/second/kernel, sequential/second/bias"),
        (add, r"frozen: sequential/first/kernel; added: .*lora"),
    ],
)
def test_a_keras_model_that_was_changed_needs_a_new_bridge(change: Any, text: str) -> None:
    import keras

    from lowtide.ext.keras import Bridge

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(4, name="second"), keras.layers.Dense(1)]
    model: Any = keras.Sequential([keras.Input((4,)), *layers], name="sequential")
    model.layers[1].trainable = False
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(1e-3))
    trainer.fit([(X, X[:, :1])] * 2, num_steps=1, progress=False)
    model.compile("sgd", "mse", metrics=["mae"])  # which adds variables of metrics
    model.test_on_batch(X, X[:, :1])
    trainer.fit([(X, X[:, :1])] * 2, num_steps=2, progress=False)
    change(model)
    with pytest.raises(
        StructureError, match=rf"(?s)changed since its bridge was made.*{text}.*hint: make a new Bridge"
    ):
        trainer.fit([(X, X[:, :1])] * 3, num_steps=3, progress=False)
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(1e-3))
    assert len(trainer.fit([(X, X[:, :1])] * 2, num_steps=2, progress=False)) == 2


def nnx_net() -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(self.first(x)))

    return Net(nnx.Rngs(0))


@pytest.mark.slow
def test_an_nnx_module_with_other_layers_needs_a_new_bridge() -> None:
    from flax import nnx

    from lowtide.ext.nnx import Bridge

    net = nnx_net()
    trainer = lt.Trainer(Bridge(net), lambda m, x: jnp.mean(m(x) ** 2), optax.sgd(1e-3))
    trainer.fit([X] * 2, num_steps=1, progress=False)
    net.eval()  # of no consequence for steps
    trainer.fit([X] * 2, num_steps=2, progress=False)
    net.first = nnx.LoRA(4, 2, 4, base_module=net.first, rngs=nnx.Rngs(1))
    text = r"added: first/base_module/bias.*removed: first/bias, first/kernel.*hint: make a new Bridge"
    with pytest.raises(StructureError, match=rf"(?s)changed since its bridge was made.*{text}"):
        trainer.fit([X] * 3, num_steps=3, progress=False)


def test_an_nnx_module_in_eval_mode_is_warned_of_unless_a_layer_alone_is_so() -> None:
    from lowtide.ext.nnx import Bridge

    net = nnx_net()
    net.eval()
    with pytest.warns(UserWarning, match=r"eval\(\) mode.*drop\.deterministic.*norm\.use_running_average.*train\(\)"):
        Bridge(net)
    net.drop.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bridge(net)  # statistics that are frozen on purpose


def test_an_equinox_module_with_modes_is_sent_to_its_bridge() -> None:
    import equinox as eqx

    net = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    with pytest.raises(SelectionError, match=r"(?s)layers/1/.*hint: .*bridge in lowtide\.ext"):
        lt.Trainer(net, lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), optax.sgd(1e-3))
