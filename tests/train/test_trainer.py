import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError, DonationError, OutputError, SelectionError, StructureError
from lowtide.train import Trainer


def _model(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"base": jax.random.normal(keys[0], (4, 3)), "lora_a": 0.1 * jax.random.normal(keys[1], (3,))}


def _loss(model, batch):
    error = batch["x"] @ model["base"] + model["lora_a"][None] - batch["y"]
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


def _data(num=5, size=8):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(size, 4)).astype(np.float32), "y": rng.normal(size=(size, 3)).astype(np.float32)}
        for _ in range(num)
    ]


def _reference(model, data, tx, num_steps):
    """Plain JAX and Optax on the trainable leaf."""
    lora, losses = model["lora_a"], []
    state = tx.init({"base": None, "lora_a": lora})

    @jax.jit
    def step(lora, state, batch):
        def loss(lora):
            return _loss({**model, "lora_a": lora}, batch)[0]

        value, grad = jax.value_and_grad(loss)(lora)
        updates, state = tx.update({"base": None, "lora_a": grad}, state, {"base": None, "lora_a": lora})
        return lora + updates["lora_a"], state, value

    for i in range(num_steps):
        lora, state, value = step(lora, state, data[i])
        losses.append(float(value))
    return lora, losses


def test_training_equals_plain_jax_bit_for_bit():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 5)))
    want, losses = _reference(_model(), _data(), tx, 5)
    trainer = Trainer(_model(), _loss, tx, wrt="lora_*")
    records = trainer.fit(_data(), num_steps=5)
    assert [record["loss"] for record in records] == losses
    np.testing.assert_array_equal(trainer.model["lora_a"], want)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all({"grad_norm", "mae", "seconds"} <= record.keys() for record in records)


def test_frozen_leaves_are_the_very_arrays_that_were_given():
    model = _model()
    trainer = Trainer(model, _loss, optax.adam(0.1), wrt="lora_*")
    before = np.asarray(model["base"])
    trainer.fit(_data(), num_steps=3)
    assert trainer.model["base"] is model["base"]
    np.testing.assert_array_equal(model["base"], before)


def test_frozen_numpy_arrays_are_moved_to_the_device_once():
    trainer = Trainer(jax.tree.map(np.asarray, _model()), _loss, optax.adam(0.1), wrt="lora_*")
    before = trainer.frozen["base"]
    assert isinstance(before, jax.Array)
    trainer.fit(_data(), num_steps=2)
    assert trainer.frozen["base"] is before


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("num_devices", [0, 1, 2])
def test_frozen_codes_of_4_bits_train_wherever_they_were_put(num_devices):
    """JAX 0.10 refuses them on a device that somebody chose."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    model = {"codes": jnp.arange(-8, 8).astype(jnp.int4), "scale": jnp.ones(16)}
    want = {"scale": jnp.ones(16)}

    def loss_fn(model, batch):
        return jnp.mean((batch @ (model["codes"].astype(jnp.float32) * model["scale"]) - 1) ** 2)

    for _ in range(3):
        grads = jax.grad(lambda part: loss_fn({**model, **part}, x))(want)  # noqa: B023
        want = {"scale": want["scale"] - 1e-3 * grads["scale"]}
    if num_devices:
        mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        model = jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.P("x" if num_devices > 1 else None)))
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P()))
    trainer = Trainer(model, loss_fn, optax.sgd(1e-3), wrt="scale")
    trainer.fit([x] * 3, num_steps=3)
    np.testing.assert_allclose(np.asarray(trainer.model["scale"]), np.asarray(want["scale"]), rtol=1e-5)


def test_the_step_returns_only_what_changed_and_reuses_every_donated_buffer():
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    report = trainer.memory(_data()[0])
    state_bytes = 3 * 12 + 4 + 4
    assert report.device.alias_bytes == state_bytes
    assert report.by_role["frozen"] == 48
    assert report.by_role["trainable"] == 12
    assert report.by_role["optimizer"] == 28
    before = trainer.state.trainable["lora_a"]
    trainer.fit(_data(), num_steps=1)
    assert before.is_deleted()


@pytest.mark.slow
def test_microbatches_give_the_full_batch_step_however_tokens_fall():
    weights = jnp.array([0.0, 1.0, 5.0, 2.0, 0.0, 0.0, 1.0, 3.0])

    def loss(model, batch):
        error = jnp.sum((batch["x"] @ model["base"] + model["lora_a"][None] - batch["y"]) ** 2, axis=-1)
        total = jnp.sum(batch["w"])
        return jnp.sum(error * batch["w"]) / jnp.maximum(total, 1e-9), {"mean_w": total}

    data = [{**batch, "w": weights} for batch in _data()]

    def train(num_microbatches):
        trainer = Trainer(
            _model(),
            loss,
            optax.sgd(0.1),
            wrt="lora_*",
            num_microbatches=num_microbatches,
            weight=lambda batch: jnp.sum(batch["w"]),
        )
        return trainer.fit(data, num_steps=3), trainer.model["lora_a"]

    (one, full), (four, parts) = train(1), train(4)
    np.testing.assert_allclose(parts, full, rtol=1e-5)
    np.testing.assert_allclose([r["loss"] for r in four], [r["loss"] for r in one], rtol=1e-5)
    assert four[0]["mean_w"] == pytest.approx((1 * 1 + 7 * 7 + 4 * 4) / 12)


def test_no_recompile_after_the_first_step(compilations):
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    trainer.fit(_data(), num_steps=2)
    with compilations.none():
        trainer.fit(_data(), num_steps=4)
    assert trainer.step == 4


@pytest.mark.slow
def test_evaluation_weighs_batches_and_leaves_the_state_alone():
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*", weight=lambda batch: batch["x"].shape[0])
    big, small = _data(1, 8)[0], _data(1, 2)[0]
    want = (8 * _loss(_model(), big)[0] + 2 * _loss(_model(), small)[0]) / 10
    found = trainer.evaluate([big, small])
    assert found["loss"] == pytest.approx(float(want), rel=1e-6) and found["mae"] > 0
    assert trainer.step == 0
    with pytest.raises(ConfigError, match=r"evaluate got no batch(.|\n)*hint:"):
        trainer.evaluate([])


def test_evaluation_schedule():
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    seen = []
    trainer.fit(_data(), num_steps=5, eval_data=_data(1), eval_every=2, on_record=seen.append)
    assert [r["step"] for r in seen if "eval_loss" in r] == [0, 2, 4, 5]
    assert [r["step"] for r in seen if "loss" in r] == [1, 2, 3, 4, 5]


def test_a_donation_that_cannot_be_used_is_an_error_with_its_path():
    def widen(updates, state, params=None):
        return updates, state.astype(jnp.float16)

    tx = optax.GradientTransformation(lambda params: jnp.zeros((7,)), widen)
    trainer = Trainer(_model(), _loss, tx, wrt="lora_*")
    with pytest.raises(DonationError, match=r"optimizer.*donated, but no output reuses its buffer(.|\n)*hint:"):
        trainer.fit(_data(), num_steps=1)
    assert not trainer.state.trainable["lora_a"].is_deleted()


def test_two_trainable_paths_of_one_array_are_refused():
    w = jnp.ones((3,))
    with pytest.raises(SelectionError, match=r"a and b are the same array(.|\n)*hint:"):
        Trainer({"a": w, "b": w}, _loss, optax.sgd(0.1))


def test_checkpoints_resume_bit_for_bit(tmp_path):
    def trainer(where):
        return Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*", checkpoint_dir=where)

    whole = trainer(tmp_path / "whole")
    records = whole.fit(_data(), num_steps=5)
    first = trainer(tmp_path / "parts")
    assert first.restore() is None
    first.fit(_data(), num_steps=3, checkpoint_every=2)
    second = trainer(tmp_path / "parts")
    assert second.restore() == 3
    rest = second.fit(_data(), num_steps=5)
    assert [r["loss"] for r in rest] == [r["loss"] for r in records[3:]]
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)


@pytest.mark.slow
def test_checkpoints_hold_trainable_state_only(tmp_path):
    model = {"base": jnp.ones((512, 512)), "lora_a": jnp.zeros((4,))}
    trainer = Trainer(
        model,
        lambda m, b: (jnp.sum(m["base"][:4, 0] * m["lora_a"] - b), {}),
        optax.adam(0.1),
        wrt="lora_*",
        checkpoint_dir=tmp_path,
    )
    trainer.fit([jnp.ones(())], num_steps=1)
    stored = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert stored < 512 * 512 * 4 / 8


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*", checkpoint_dir=tmp_path).fit(_data(), num_steps=1)
    other = Trainer(_model(), _loss, optax.adam(0.1), wrt="**", checkpoint_dir=tmp_path)
    with pytest.raises(
        StructureError,
        match=r"base.*: the checkpoint of step 1 has no such leaf, but this trainer has float32(.|\n)*hint:",
    ):
        other.restore()


@pytest.mark.slow
def test_a_checkpoint_of_another_dtype_is_refused(tmp_path):
    Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*", checkpoint_dir=tmp_path).fit(_data(), num_steps=1)
    half = {**_model(), "lora_a": _model()["lora_a"].astype(jnp.bfloat16)}
    other = Trainer(half, _loss, optax.adam(0.1), wrt="lora_*", checkpoint_dir=tmp_path)
    with pytest.raises(
        StructureError, match=r"step 1 has float32\[3\], but this trainer has bfloat16\[3\](.|\n)*hint: resume"
    ):
        other.restore()


@pytest.mark.slow
def test_checkpoints_of_a_later_step_are_refused_before_anything_is_lost(tmp_path):
    def trainer():
        return Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*", checkpoint_dir=tmp_path)

    trainer().fit(_data(), num_steps=4)
    with pytest.raises(OutputError, match=r"a checkpoint of step 4, but the trainer is at step 0(.|\n)*hint:.*restore"):
        trainer().fit(_data(), num_steps=2)
    assert trainer().restore() == 4


def test_leaves_that_a_checkpoint_could_not_tell_apart_are_refused(tmp_path):
    model = {"a.b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}
    trainer = Trainer(
        model, lambda m, x: (jnp.sum(m["a.b"] + m["a"]["b"]) * x, {}), optax.sgd(0.1), checkpoint_dir=tmp_path
    )
    with pytest.raises(StructureError, match=r"leaf of the state is also stored as 'trainable.a.b'(.|\n)*hint:"):
        trainer.fit([jnp.ones(())], num_steps=1)


def test_data_that_ends_early_is_named():
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    with pytest.raises(DataError, match=r"no batch for step 2 of 3 steps(.|\n)*hint:"):
        trainer.fit(_data(2), num_steps=3)


def test_steps_that_overlap_are_not_counted_twice(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    before = next(ticks)
    records = trainer.fit(_data(), num_steps=5)
    assert sum(record["seconds"] for record in records) <= next(ticks) - before


@pytest.mark.slow
def test_an_equinox_module_and_a_loss_without_metrics_train():
    import equinox as eqx

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    trainer = Trainer(model, loss, optax.adam(0.05), wrt="layers/1/*")
    records = trainer.fit(_data(1) * 20, num_steps=20, eval_data=_data(1))
    assert records[-1]["eval_loss"] < 0.8 * records[0]["eval_loss"]
    assert trainer.model.activation is model.activation
    assert trainer.model.layers[0].weight is model.layers[0].weight
    assert trainer.memory(_data(1)[0]).by_role["trainable"] == 4 * (3 * 8 + 3)


def test_a_schedule_that_reads_the_loss_gets_it():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    trainer = Trainer(_model(), _loss, tx, wrt="lora_*")
    records = trainer.fit(_data(), num_steps=3)
    assert float(trainer.state.opt_state[1].best_value) == min(r["loss"] for r in records)


@pytest.mark.parametrize("data", [{"x": np.ones((4, 4))}, np.ones((4, 4)), 3])
def test_data_that_holds_no_batches_is_refused(data):
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    with pytest.raises(DataError, match=r"the data must be a list(.|\n)*hint: lowtide.train.array_data"):
        trainer.fit(data, num_steps=1)


@pytest.mark.slow
def test_what_has_no_weight_counts_nowhere_even_where_its_mean_is_nan():
    def loss(model, x):
        mean = jnp.sum(model["lora_a"] * x) / jnp.sum(x != 0)
        return mean, {"mean": mean}

    def trainer():
        model = {"lora_a": jnp.ones(())}
        return Trainer(model, loss, optax.sgd(0.1), num_microbatches=2, weight=lambda x: jnp.sum(x != 0))

    record = trainer().fit([np.array([1.0, 2.0, 0.0, 0.0], np.float32)], num_steps=1)[0]
    assert (record["loss"], record["mean"]) == (1.5, 1.5)
    assert trainer().evaluate([np.array([1.0, 2.0], np.float32), np.zeros(2, np.float32)])["loss"] == 1.5


def test_checkpoint_options_need_a_folder():
    trainer = Trainer(_model(), _loss, optax.adam(0.1), wrt="lora_*")
    with pytest.raises(ConfigError, match=r"checkpoint_every needs checkpoint_dir(.|\n)*hint:"):
        trainer.fit(_data(), num_steps=1, checkpoint_every=1)
    with pytest.raises(ConfigError, match=r"restore needs checkpoint_dir(.|\n)*hint:"):
        trainer.restore()


def test_the_root_exports_the_trainer():
    assert lt.Trainer is Trainer
