"""Equinox modules in the trainer: state, dropout, filters, inference mode, checkpoints."""

from __future__ import annotations

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, SelectionError, StateError, StructureError, leaves_with_paths
from lowtide.ext.equinox import Bridge


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 2)
        self.first = eqx.nn.Linear(4, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(16, 1, key=keys[1])

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        h, state = self.norm(jax.nn.relu(self.first(x)), state)
        return self.last(self.drop(h, key=key)), state


def net() -> Any:
    return eqx.nn.make_with_state(Net)(jax.random.key(0))


def call(model: Any, state: Any, x: Any, key: Any) -> Any:
    keys = jax.random.split(key, len(x))
    return jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(x, state, keys)


def loss_fn(model: Any, state: Any, batch: Any, key: Any) -> Any:
    outputs, state = call(model, state, batch[0], key)
    return jnp.mean((outputs - batch[1]) ** 2), {"mae": jnp.mean(jnp.abs(outputs - batch[1]))}, state


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        found.append((x, np.tanh(x.sum(axis=1, keepdims=True))))
    return found


def trainer(**options: Any) -> lt.Trainer:
    wrt = options.pop("wrt", eqx.is_inexact_array)
    return lt.Trainer(Bridge(*net(), wrt=wrt), loss_fn, optax.adam(1e-2), **options)


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


@pytest.mark.slow
def test_values_are_those_of_a_plain_equinox_loop_bit_for_bit() -> None:
    (model, state), tx, losses = net(), optax.adam(1e-2), []
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        def loss(model: Any, state: Any) -> Any:
            value, _, state = loss_fn(model, state, batch, key)
            return value, state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt_state, value

    for at, batch in enumerate(batches(5)):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), at), 0)  # as the trainer makes them
        model, state, opt_state, value = step(model, state, opt_state, batch, key)
        losses.append(float(value))
    ours = trainer(on_nan="ignore")  # whose choice of leaves a plain loop does not have
    assert [record["loss"] for record in ours.fit(batches(5), num_steps=5)] == losses
    for a, b in zip(arrays((model, state)), arrays(ours.model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_statistics_change_in_training_and_serve_in_evaluation_and_predict() -> None:
    ours = trainer()
    before = arrays(ours.model[1])
    ours.fit(batches(3), num_steps=3)
    model, state = ours.model
    assert all(not np.array_equal(a, b) for a, b in zip(before, arrays(state), strict=True))
    x, y = batches(1)[0]
    want, _ = call(eqx.nn.inference_mode(model), state, x, jax.random.key(0))
    found = ours.predict([x], lambda model, state, x: call(model, state, x, jax.random.key(0)))
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert ours.evaluate([(x, y)])["loss"] == pytest.approx(float(jnp.mean((want - y) ** 2)), rel=1e-6)
    for a, b in zip(arrays(state), arrays(ours.model[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path: Any, compilations: Any) -> None:
    whole = trainer()
    records = whole.fit(batches(2), num_epochs=1) + whole.fit(batches(9), num_steps=4)
    with compilations.none():
        records += whole.fit(batches(9), num_steps=9)
    data = [*batches(2), *batches(9)[2:]]
    trainer(checkpoint_dir=tmp_path).fit(data, num_steps=5)
    resumed = trainer(checkpoint_dir=tmp_path)
    assert resumed.restore() == 5
    rest = resumed.fit(data, num_steps=9)
    assert [r["loss"] for r in rest] == [r["loss"] for r in records[5:]]
    for a, b in zip(arrays(whole.model), arrays(resumed.model), strict=True):
        np.testing.assert_array_equal(a, b)


def _last(model: Any) -> Any:
    mask = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda m: m.last, mask, replace=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wrt", ["last/*", ["last/weight", "last/bias"], _last(net()[0])])
def test_a_filter_or_patterns_freeze_the_rest(wrt: Any) -> None:
    others = jax.live_arrays()
    model, state = net()
    ours = lt.Trainer(Bridge(model, state, wrt=wrt), loss_fn, optax.adam(1e-2))
    assert [path for path, _ in leaves_with_paths(ours.state.trainable)] == ["last/bias", "last/weight"]
    ours.fit(batches(3), num_steps=3)
    assert ours.model[0].first.weight is model.first.weight, "frozen arrays are those that were given"
    assert model.last.weight.is_deleted(), "those that train are consumed"
    assert ours.memory(batches(1)[0]).by_role["trainable"] == 4 * 17
    held = [leaf for leaf in jax.live_arrays() if leaf.shape == (1, 16) and not any(leaf is x for x in others)]
    assert len(held) == 3, "one copy of the weight and of each moment"


@pytest.mark.slow
def test_python_values_of_a_module_stay_what_they_are() -> None:
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])

    def loss(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.split(key, len(batch[0]))
        return jnp.mean((jax.vmap(model)(batch[0], key=keys) - batch[1]) ** 2)

    ours = lt.Trainer(Bridge(model), loss, optax.sgd(0.1))
    ours.fit(batches(2), num_steps=2)
    assert (ours.model[1].p, ours.model[1].inference) == (0.5, False)
    x = batches(1)[0][0]
    whole = ours.predict([x], lambda model, x: jax.vmap(model)(x))  # needs no key in inference mode
    np.testing.assert_allclose(whole, jax.vmap(ours.model[0])(x), rtol=1e-6)


def test_other_weights_go_on_from_a_callback() -> None:
    ours = trainer()

    class Zero(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                model, state = trainer.model
                zeroed = eqx.tree_at(lambda m: m.last.weight, model, jnp.zeros_like(model.last.weight))
                trainer.update((zeroed, state))
                assert not np.any(trainer.model[0].last.weight)
                with pytest.raises(
                    StructureError,
                    match=r"(?s)does not fit the step.*float32\[1, 16\].*hint:",
                ):
                    trainer.update((eqx.tree_at(lambda m: m.last.weight, model, jnp.zeros((1, 8))), state))
                with pytest.raises(StructureError, match=r"(?s)structure differs.*\(model, state\).*Net.*hint:"):
                    trainer.update(model)
                with pytest.raises(StructureError, match=r"(?s)structure differs.*hint: .*tree_at"):
                    trainer.update((eqx.tree_at(lambda m: m.drop.p, model, 0.9), state))
                assert not np.any(trainer.model[0].last.weight)

    ours.fit(batches(4), num_steps=4, callbacks=[Zero()])
    assert ours.step == 4 and np.abs(ours.model[0].last.weight).max() < 0.1


@pytest.mark.slow
def test_the_bridge_says_who_has_the_arrays_while_steps_run() -> None:
    bridge = Bridge(*net())
    ours = lt.Trainer(bridge, loss_fn, optax.sgd(0.1))

    class Look(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            bridge.model[0].last.weight + 1.0

    with pytest.raises(StateError, match=r"(?s)last/weight: a trainer has borrowed this array.*hint: .*trainer.model"):
        ours.fit(batches(2), num_steps=2, callbacks=[Look()])
    assert bridge.model[0].last.weight.shape == (1, 16)
    assert len(ours.fit(batches(4), num_steps=4)) == 3


def test_random_keys_in_the_state_are_numbers_of_the_checkpoint(tmp_path: Any) -> None:
    class Noise(eqx.Module):
        scale: Any
        index: eqx.nn.StateIndex

        def __init__(self) -> None:
            self.scale, self.index = jnp.ones(()), eqx.nn.StateIndex(jax.random.key(3))

        def __call__(self, state: Any) -> Any:
            new, now = jax.random.split(state.get(self.index))
            return self.scale * jax.random.normal(now), state.set(self.index, new)

    def loss(model: Any, state: Any, batch: Any) -> Any:
        value, state = model(state)
        return jnp.mean((value - batch) ** 2), state

    def make(**options: Any) -> lt.Trainer:
        return lt.Trainer(Bridge(*eqx.nn.make_with_state(Noise)()), loss, optax.sgd(0.1), **options)

    data = [np.zeros(2, np.float32)] * 4
    whole = make().fit(data, num_steps=4)
    make(checkpoint_dir=tmp_path).fit(data, num_steps=2)
    resumed = make(checkpoint_dir=tmp_path)
    resumed.restore()
    assert [r["loss"] for r in resumed.fit(data, num_steps=4)] == [r["loss"] for r in whole[2:]]
    model, state = resumed.model
    assert jnp.issubdtype(state.get(model.index).dtype, jax.dtypes.prng_key)


def test_what_is_missing_is_named() -> None:
    model, state = net()
    with pytest.raises(ConfigError, match=r"(?s)has state, but no state is given.*hint: .*make_with_state"):
        Bridge(model)
    with pytest.raises(SelectionError, match=r"(?s)filter selects no array.*first/weight.*hint:"):
        Bridge(model, state, wrt=lambda leaf: False)
    with pytest.raises(SelectionError, match=r"(?s)middle.*hint:"):
        Bridge(model, state, wrt="middle/*")
    wrt = Bridge(model, state, wrt=[re.compile("first/.*")]).wrt
    assert [wrt(path, None) for path in ("first/weight", "first/bias", "last/weight")] == [True, True, False]
    forgetful = lt.Trainer(Bridge(model, state), lambda m, s, b, key: loss_fn(m, s, b, key)[:2], optax.sgd(0.1))
    with pytest.raises(StructureError, match=r"(?s)does not return the state.*2 values.*hint:"):
        forgetful.fit(batches(1), num_steps=1)
    with pytest.raises(
        ConfigError, match=r"(?s)predict cannot call .* with a batch.*hint: .*lambda model, state, batch"
    ):
        forgetful.predict([batches(1)[0][0]])
    partial = lt.Trainer(Bridge(*net()), lambda m, s, b, key: (0.0, s.substate(m.first)), optax.sgd(0.1))
    with pytest.raises(StructureError, match=r"(?s)a state of another structure.*hint: .*state.update"):
        partial.fit(batches(1), num_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_a_step_that_fails_on_the_device_leaves_the_last_good_module_and_state(saved: bool, tmp_path: Any) -> None:
    def fail(flag: Any, value: Any) -> Any:
        if flag:
            raise RuntimeError("planted on the device")
        return np.asarray(value)

    def planted(model: Any, state: Any, batch: Any, key: Any) -> Any:
        loss, metrics, state = loss_fn(model, state, batch, key)
        token = jax.pure_callback(
            fail, jax.ShapeDtypeStruct((), loss.dtype), batch[2], jax.lax.stop_gradient(loss), vmap_method="sequential"
        )
        return loss + 0 * token, metrics, state

    def make(**options: Any) -> lt.Trainer:
        return lt.Trainer(Bridge(*net()), planted, optax.adam(1e-2), **options)

    def data(at: int | None) -> list[Any]:
        return [(*batch, np.asarray(step == at)) for step, batch in enumerate(batches(6))]

    whole, ours = make(), make(checkpoint_dir=tmp_path if saved else None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted on the device") as raised:
        ours.fit(data(3), num_steps=6, checkpoint_every=2 if saved else None)
    back = 2 if saved else 0
    assert f"back at step {back}" in raised.value.__notes__[-1]
    if back:
        whole.fit(data(None), num_steps=back)
    for a, b in zip(arrays(whole.model), arrays(ours.model), strict=True):
        np.testing.assert_array_equal(a, b)
    for trainer in (whole, ours):
        trainer.fit(data(None), num_steps=6)
    for a, b in zip(arrays(whole.model), arrays(ours.model), strict=True):
        np.testing.assert_array_equal(a, b)
