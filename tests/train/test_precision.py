"""Mixed precision: the values of casts by hand, what stays float32, and the bytes of a TPU program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.train import Trainer

BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def model() -> dict[str, Any]:
    draw = np.random.default_rng(1).normal
    return {
        "base": jnp.asarray(draw(size=(4, 8)), jnp.float32),
        "half": jnp.full((8,), 0.5, BF16),
        "w": jnp.asarray(draw(size=(8, 2)), jnp.float32),
        "mean": jnp.zeros((8,)),
        "count": jnp.int32(7),
    }


def loss_fn(model: Any, batch: Any, training: bool) -> Any:
    assert {model[name].dtype for name in ("base", "half", "w")} == {BF16} == {batch["x"].dtype, batch["y"].dtype}
    assert (model["mean"].dtype, model["count"].dtype, batch["id"].dtype) == (jnp.float32, jnp.int32, jnp.int32)
    h = jnp.tanh(batch["x"] @ model["base"]) * model["half"]
    mean = 0.9 * model["mean"] + 0.1 * jnp.mean(h, axis=0) if training else model["mean"]
    error = h @ model["w"] - batch["y"]
    assert error.dtype == BF16
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}, {**model, "mean": mean}


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)

    def one() -> Any:
        x, y = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
        return {"x": x, "y": y, "id": np.arange(8, dtype=np.int32)}

    return [one() for _ in range(count)]


def trainer(**options: Any) -> Trainer:
    given = {"wrt": "w", "mutable": "mean", "compute_dtype": "bfloat16", **options}
    return Trainer(model(), loss_fn, optax.adam(1e-2), **given)


def by_hand(data: list[Any]) -> tuple[Any, list[float], list[float]]:
    given, tx = model(), optax.adam(1e-2)
    opt_state = tx.init(given["w"])

    @jax.jit
    def step(w: Any, mean: Any, opt_state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            low = {**given, "base": given["base"].astype(BF16), "w": w.astype(BF16), "mean": mean}
            batch_low = {**batch, "x": batch["x"].astype(BF16), "y": batch["y"].astype(BF16)}
            value, metrics, after = loss_fn(low, batch_low, True)
            return value.astype(jnp.float32), (metrics["mae"].astype(jnp.float32), after["mean"])

        (value, (mae, mean)), grads = jax.value_and_grad(loss, has_aux=True)(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), mean, opt_state, value, mae

    w, mean, losses, maes = given["w"], given["mean"], [], []
    for batch in data:
        w, mean, opt_state, value, mae = step(w, mean, opt_state, jax.tree.map(jnp.asarray, batch))
        losses.append(float(value))
        maes.append(float(mae))
    return {"w": w, "mean": mean}, losses, maes


def test_values_are_those_of_casts_by_hand_bit_for_bit(compilations: Any) -> None:
    want, losses, maes = by_hand(batches(5))
    ours = trainer(on_nan="ignore")  # whose choice of leaves a plain loop does not have
    records = ours.fit(batches(5), num_steps=2)
    with compilations.none():
        records += ours.fit(batches(5), num_steps=5)
    assert [record["loss"] for record in records] == losses
    assert [record["mae"] for record in records] == maes
    for name, value in want.items():
        np.testing.assert_array_equal(ours.model[name], value)


@pytest.mark.slow
def test_state_stays_float32_and_half_precision_is_not_upcast() -> None:
    ours = trainer(num_microbatches=2)
    before = ours.model["half"]
    ours.fit(batches(2), num_steps=2)
    state = [leaf.dtype for leaf in jax.tree.leaves(ours.state) if leaf.ndim]
    assert state == [jnp.float32] * 4, "the weight, two moments, the mean"
    assert ours.model["half"] is before and before.dtype == BF16


@pytest.mark.slow
def test_evaluation_and_predictions_are_of_the_same_precision() -> None:
    ours = trainer()
    batch = batches(1)[0]
    low = {name: leaf.astype(BF16) if name in ("base", "w") else leaf for name, leaf in ours.model.items()}
    h = jnp.tanh(batch["x"].astype(BF16) @ low["base"]) * low["half"]
    want = h @ low["w"]
    found = ours.predict([batch], lambda m, b: (jnp.tanh(b["x"] @ m["base"]) * m["half"]) @ m["w"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.asarray(want, np.float32), rtol=2e-2)
    assert not np.allclose(found, np.tanh(batch["x"] @ ours.model["base"]) * 0.5 @ ours.model["w"], rtol=1e-4)
    value = jnp.mean((want - batch["y"].astype(BF16)) ** 2)
    assert ours.evaluate([batch])["loss"] == pytest.approx(float(value), rel=2e-2)


def _keras() -> Any:
    import keras

    from lowtide.ext.keras import Bridge

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    net = keras.Sequential([keras.Input((4,)), *layers])
    bridge, seen = Bridge(net), []
    inner = bridge.loss("mse")

    def loss(model: Any, batch: Any, training: bool) -> Any:
        seen.append(model(batch["x"], training=training).dtype)
        return inner(model, (batch["x"], batch["y"]), training)

    return bridge, loss, lambda model, batch: model(batch["x"]), seen


def _nnx() -> Any:
    from flax import nnx

    from lowtide.ext.nnx import Bridge

    rngs, seen = nnx.Rngs(0), []
    net = nnx.Sequential(
        nnx.Linear(4, 8, rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.LayerNorm(8, dtype=jnp.float32, rngs=rngs),
        nnx.Linear(8, 2, rngs=rngs),
    )

    def loss(model: Any, batch: Any) -> Any:
        outputs = model(batch["x"])
        assert (model.layers[2].dtype, net.layers[0].dtype) == (jnp.float32, None), "what a layer says of itself stays"
        seen.append(outputs.dtype)
        return jnp.mean((outputs - batch["y"]) ** 2)

    return Bridge(net), loss, lambda model, batch: model(batch["x"]), seen


def _equinox() -> Any:
    import equinox as eqx

    from lowtide.ext.equinox import Bridge

    class Net(eqx.Module):
        first: Any
        norm: Any

        def __init__(self) -> None:
            self.first = eqx.nn.Linear(4, 2, key=jax.random.key(0))
            self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(self.first(x), state)

    seen: list[Any] = []

    def call(model: Any, state: Any, batch: Any) -> Any:
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)

    def loss(model: Any, state: Any, batch: Any) -> Any:
        seen.append(jax.vmap(model.first)(batch["x"]).dtype)
        outputs, state = call(model, state, batch)
        seen.append(outputs.dtype)
        return jnp.mean((outputs - batch["y"]) ** 2), state

    return Bridge(*eqx.nn.make_with_state(Net)()), loss, call, seen


@pytest.mark.slow
@pytest.mark.parametrize("make", [_keras, _nnx, _equinox])
def test_bridges_compute_in_half_precision_and_keep_their_state(make: Any) -> None:
    given, loss, call, seen = make()
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(given.arrays())]
    ours = Trainer(given, loss, optax.adam(1e-2), compute_dtype="bfloat16")
    records = ours.fit(batches(1) * 20, num_steps=20)
    assert seen and set(seen) == {BF16}
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert [leaf.dtype for leaf in jax.tree.leaves(given.arrays())] == dtypes
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(ours.state.opt_state) if leaf.ndim)
    assert ours.predict(batches(1), call).dtype == np.float32


@pytest.mark.slow
def test_keras_computes_what_its_own_mixed_policy_computes() -> None:
    import keras

    def net(policy: str) -> Any:
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu", dtype=policy), keras.layers.Dense(2, dtype=policy)]
        )

    from lowtide.ext.keras import Bridge

    def train(policy: str, **options: Any) -> list[float]:
        bridge = Bridge(net(policy))
        ours = Trainer(bridge, bridge.loss("mse"), optax.adam(1e-2), **options)
        return [r["loss"] for r in ours.fit([(b["x"], b["y"]) for b in batches(3)], num_steps=3)]

    assert train("float32", compute_dtype="bfloat16") == train("mixed_bfloat16") != train("float32")
    with pytest.raises(ConfigError, match=r"(?s)their own dtype policy.*mixed_bfloat16.*hint: leave compute_dtype"):
        train("mixed_bfloat16", compute_dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "half", "fast"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)\"bfloat16\" or None, not '{dtype}'.*hint: .*no loss scaling"):
        trainer(compute_dtype=dtype)


def test_a_layerwise_step_is_refused() -> None:
    def stack(*_: Any) -> Any:
        raise AssertionError("never called")

    step = lt.offload.layerwise_step(lt.LayerStack(first=stack, block=stack, last=stack), optax.sgd(0.1))
    layers = {"outer": {"w": jnp.zeros(2)}, "layers": {"w": jnp.zeros((2, 2))}}
    with pytest.raises(
        ConfigError, match=r"(?s)a layerwise step cannot be combined with compute_dtype.*hint: cast in the stack's"
    ):
        Trainer(layers, loss_fn, step, compute_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.usefixtures("little_optimized")
def test_activations_take_half_the_bytes_on_a_tpu() -> None:
    width, depth, rows = 128, 5, 2**16
    params = {f"w{at}": jnp.zeros((width, width)) for at in range(depth)}

    def loss(model: Any, x: Any) -> Any:
        for at in range(depth):
            x = jnp.tanh(x @ model[f"w{at}"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def compiled(dtype: Any) -> Any:
        return Trainer(params, loss, optax.adam(1e-3), compute_dtype=dtype).memory(batch, target="v5e")

    whole, half = compiled(None), compiled("bfloat16")
    for role in ("trainable", "optimizer"):
        assert half.by_role[role] == whole.by_role[role]
    assert half.device.temp_bytes < 0.6 * whole.device.temp_bytes
    assert whole.device.temp_bytes > depth * rows * width * 4 / 2, "activations are most of it"
