"""NNX modules and Keras models in the trainer: recurrence, dropout, statistics and regularisers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import SelectionError

TIME, WIDTH = 5, 3


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(count):
        x = rng.normal(size=(16, TIME, WIDTH)).astype(np.float32)
        data.append((x, np.tanh(x.sum(axis=(1, 2)))[:, None].astype(np.float32)))
    return data


def keras_model(cell: str = "LSTM", strength: float = 1e-3) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layer = getattr(keras.layers, cell)
    return keras.Sequential(
        [
            keras.Input((TIME, WIDTH)),
            layer(8, dropout=0.1, recurrent_dropout=0.1, seed=3, kernel_regularizer=keras.regularizers.L2(strength)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def keras_trainer(model: Any, **options: Any) -> lt.Trainer:
    from lowtide.ext.keras import Bridge

    bridge = Bridge(model)
    return lt.Trainer(bridge, bridge.loss("mse"), optax.adam(1e-2), **options)


def keras_arrays(model: Any) -> dict[str, np.ndarray]:
    return {f"{at} {v.name}": np.array(v.value) for at, v in enumerate(model.variables)}


def nnx_model(cell: str = "LSTM") -> Any:
    from flax import nnx

    class Dropped(nnx.Module):
        """A cell whose gates read its own last output through dropout: random numbers inside of the scan."""

        num_feature_axes = 1

        def __init__(self, rngs: Any) -> None:
            made = nnx.LSTMCell if cell == "LSTM" else nnx.GRUCell
            self.cell, self.drop = made(WIDTH, 8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def initialize_carry(self, shape: Any, rngs: Any = None) -> Any:
            return self.cell.initialize_carry(shape, rngs)

        def __call__(self, carry: Any, x: Any) -> Any:
            carry = (carry[0], self.drop(carry[1])) if cell == "LSTM" else self.drop(carry)
            return self.cell(carry, x)

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.rnn = nnx.RNN(Dropped(rngs))
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.norm(self.rnn(self.drop(x))[:, -1]))

    return Net(nnx.Rngs(0))


def nnx_loss(model: Any, batch: Any, strength: float = 1e-3) -> Any:
    penalty = strength * jnp.sum(nnx_kernel(model) ** 2)
    return jnp.mean((model(batch[0]) - batch[1]) ** 2) + penalty


def nnx_kernel(model: Any) -> Any:
    """The weights that the inputs of the recurrence are multiplied by."""
    cell = model.rnn.cell.cell
    gates = [cell.dense_i] if hasattr(cell, "dense_i") else [cell.ii, cell.if_, cell.ig, cell.io]
    return jnp.concatenate([gate.kernel[...] for gate in gates], axis=1)


def nnx_trainer(model: Any, **options: Any) -> lt.Trainer:
    from lowtide.ext.nnx import Bridge

    return lt.Trainer(Bridge(model), nnx_loss, optax.adam(1e-2), **options)


def nnx_arrays(model: Any) -> dict[str, np.ndarray]:
    from flax import nnx

    state = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngKey)))
    return {"/".join(map(str, path)): np.array(leaf.get_raw_value()) for path, leaf in state}


KINDS = {"keras": (keras_model, keras_trainer, keras_arrays), "nnx": (nnx_model, nnx_trainer, nnx_arrays)}

SEEDS_AND_STATISTICS = {
    "keras": ["seed_generator_state", "moving_mean", "moving_variance", "recurrent_kernel"],
    "nnx": ["drop/rngs/count", "rnn/cell/drop/rngs/count", "norm/mean", "norm/var", "rnn/cell/cell/"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cell"), [("keras", "LSTM"), ("nnx", "GRU")])
def test_recurrence_with_dropout_learns_and_resumes_bit_for_bit(kind: str, cell: str, tmp_path: Any) -> None:
    make, train, arrays = KINDS[kind]
    data, seen = batches(30), []

    class Watch(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step in (1, 2, 3):
                seen.append(arrays(trainer.model))

    whole = make(cell)
    records = train(whole).fit(data, num_steps=30, callbacks=[Watch()])
    assert np.mean([r["loss"] for r in records[-5:]]) < 0.7 * np.mean([r["loss"] for r in records[:5]])
    for before, after in zip(seen, seen[1:], strict=False):
        same = [name for name in before if np.array_equal(before[name], after[name])]
        assert same == [], "weights, statistics and seeds change in every step"
    named = " ".join(seen[0])
    assert all(name in named for name in SEEDS_AND_STATISTICS[kind]), named
    if kind == "nnx":
        drawn = [int(arrays["rnn/cell/drop/rngs/count"]) for arrays in seen]
        assert np.diff(drawn).tolist() == [TIME, TIME], "one draw for every moment of the sequence"
    half = make(cell)
    train(half, checkpoint_dir=tmp_path).fit(data, num_steps=12)
    other = make(cell)
    resumed = train(other, checkpoint_dir=tmp_path)
    assert resumed.restore() == 12
    resumed.fit(data, num_steps=30)
    for name, value in arrays(whole).items():
        np.testing.assert_array_equal(arrays(other)[name], value, err_msg=name)


@pytest.mark.slow
def test_a_regulariser_s_gradient_is_that_of_the_current_weights() -> None:
    """With the labels as they are predicted and a step of size 1, only the penalty moves the weights."""
    import keras

    from lowtide.ext.keras import Bridge

    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.1))]
    )
    start = np.array(model.layers[0].kernel.value)
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(1.0))
    data = [(np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32))] * 3
    records = trainer.fit(data, num_steps=3)
    np.testing.assert_allclose(model.layers[0].kernel.value, 0.8**3 * start, rtol=1e-5)
    penalties = [0.1 * float(np.sum((0.8**step * start) ** 2)) for step in range(3)]
    assert [record["loss"] for record in records] == pytest.approx(penalties, rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("cell", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_layer_s_regulariser_reads_the_current_weights(kind: str, cell: str) -> None:
    """Inputs that are zero leave the penalty alone to move the input's weights: by a fifth in every step."""
    from lowtide.ext import keras as keras_bridge
    from lowtide.ext import nnx as nnx_bridge

    if kind == "keras":
        model = keras_model(cell, strength=1.0)
        bridge = keras_bridge.Bridge(model)
        trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1))
        kernel = lambda: np.array(model.layers[0].cell.kernel.value)  # noqa: E731
    else:
        model = nnx_model(cell)
        loss = lambda m, b: nnx_loss(m, b, strength=1.0)  # noqa: E731
        trainer = lt.Trainer(nnx_bridge.Bridge(model), loss, optax.sgd(0.1))
        kernel = lambda: np.array(nnx_kernel(model))  # noqa: E731
    start, found = kernel(), []

    class Watch(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            assert trainer.model is not None  # the object has its arrays
            found.append(kernel())

    data = [(np.zeros_like(x), y) for x, y in batches(4)]
    trainer.fit(data, num_steps=4, callbacks=[Watch()])
    assert np.abs(start).max() > 0.1
    for step, value in enumerate(found):
        np.testing.assert_allclose(value, 0.8 ** (step + 1) * start, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_frozen_layers_stay_in_the_model_and_cost_no_state() -> None:
    model = keras_model()
    model.layers[0].trainable = False
    kernel = model.layers[0].cell.kernel.value
    trainer = keras_trainer(model)
    trainer.fit(batches(3), num_steps=3)
    assert model.layers[0].cell.kernel.value is kernel
    assert trainer.predict([x for x, _ in batches(3)]).shape == (48, 1)
    names = [path for path, leaf in lt.core.leaves_with_paths(trainer.state) if "lstm_cell/kernel" in path]
    assert names == []


def test_a_filter_that_selects_nothing_and_a_model_that_is_not_built_are_refused() -> None:
    import keras
    from flax import nnx

    from lowtide.ext.keras import Bridge
    from lowtide.ext.nnx import Bridge as Module

    with pytest.raises(SelectionError, match=r"(?s)filter selects no variable.*Param.*hint:"):
        Module(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), wrt=nnx.LoRAParam)
    with pytest.raises(SelectionError, match=r"(?s)no trainable variables.*not built.*hint: call model.build"):
        Bridge(keras.Sequential([keras.layers.Dense(2)]))


@pytest.mark.slow
def test_only_lora_trains_and_shared_variables_are_one() -> None:
    from flax import nnx

    from lowtide.ext.nnx import Bridge

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.base = nnx.Linear(4, 4, rngs=rngs)
            self.lora = nnx.LoRA(4, 2, 4, base_module=self.base, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.lora(x)

    model = Net(nnx.Rngs(0))
    kernel = model.base.kernel.get_raw_value()
    trainer = lt.Trainer(Bridge(model, wrt=nnx.LoRAParam), lambda m, x: jnp.mean((m(x) - 1.0) ** 2), optax.adam(1e-2))
    records = trainer.fit([np.ones((2, 4), np.float32)] * 5, num_steps=5)
    assert records[-1]["loss"] < records[0]["loss"]
    assert model.base.kernel.get_raw_value() is kernel
    assert {leaf.shape for leaf in jax.tree.leaves(trainer.state.trainable)} == {(4, 2), (2, 4)}


@pytest.mark.slow
def test_a_keras_model_predicts_outside_of_training_where_its_layers_train_by_default():
    import keras

    from lowtide.ext.keras import Bridge

    keras.utils.set_random_seed(0)
    layers = [keras.layers.RandomFlip(seed=3), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    bridge = Bridge(model)
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1))
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)
    np.testing.assert_allclose(trainer.predict([x]), model(x, training=False), rtol=1e-6)


def test_a_class_and_a_module_of_another_library_are_refused() -> None:
    import equinox as eqx
    from flax import nnx

    from lowtide.core import ConfigError, SelectionError
    from lowtide.ext.equinox import Bridge as EquinoxBridge
    from lowtide.ext.nnx import Bridge as NnxBridge

    with pytest.raises(SelectionError, match=r"(?s)is a class.*hint: call the class: Bridge\(Linear\("):
        NnxBridge(nnx.Linear)  # type: ignore[arg-type]
    for given in (eqx.nn.Linear, nnx.Linear(2, 1, rngs=nnx.Rngs(0))):
        with pytest.raises(ConfigError, match="(?s)must be an eqx.Module, not .*hint: .*ext.nnx.Bridge"):
            EquinoxBridge(given)
