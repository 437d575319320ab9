"""`Trainer.fit`: epochs, iterables, callbacks, random keys, state that the model changes, losses that are NaN."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError, NonFiniteError, SelectionError, StructureError
from lowtide.train import Callback, EarlyStopping, JsonlLogger, Scalars, array_data


def model() -> Any:
    return {"w": jnp.arange(3.0), "b": jnp.zeros(())}


def loss(model: Any, batch: Any) -> Any:
    error = batch["x"] @ model["w"] + model["b"] - batch["y"]
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


def batches(count: int, size: int = 4, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(size, 3)).astype(np.float32), "y": rng.normal(size=(size,)).astype(np.float32)}
        for _ in range(count)
    ]


def trainer(fn: Any = loss, tx: Any = None, **options: Any) -> lt.Trainer:
    return lt.Trainer(model(), fn, tx or optax.adam(0.1), **options)


def weights(trained: lt.Trainer) -> Any:
    return jax.tree.map(np.array, trained.model)


def assert_same(ours: Any, theirs: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


class Diary(Callback):
    """Every event, by name and argument."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda trainer, *arguments: self.events.append((name, *arguments))


# --- epochs and data -----------------------------------------------------------------------------------------------


class Again:
    """An iterable that begins anew, and counts how often."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.begun = data, 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter(self.data)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["list", "iterable", "grain"])
def test_epochs_repeat_the_data_whatever_it_is(kind: str) -> None:
    data, whole = batches(3), trainer()
    whole.fit(data * 2, num_steps=6)
    given = {"list": data, "iterable": Again(data), "grain": grain.MapDataset.source(data).to_iter_dataset()}[kind]
    ours = trainer()
    records = ours.fit(given, num_epochs=2)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert_same(weights(ours), weights(whole))


@pytest.mark.slow
def test_epochs_are_counted_from_the_beginning_of_the_run() -> None:
    data, ours, whole = Again(batches(3)), trainer(), trainer()
    ours.fit(data, num_epochs=1)
    with pytest.warns(UserWarning, match="fit took no step: the trainer is at step 3 and epoch 1"):
        assert ours.fit(data, num_epochs=1) == []
    ours.fit(data, num_epochs=2)
    whole.fit(batches(3) * 2, num_steps=6)
    assert_same(weights(ours), weights(whole))


@pytest.mark.slow
def test_a_grain_iterator_resumes_from_its_state_and_sees_every_example_once(tmp_path: Any) -> None:
    def dataset() -> Any:
        made = grain.MapDataset.range(8).seed(1).shuffle()
        return made.map(lambda i: {**batches(1, seed=int(i))[0], "id": np.float32(i)}).to_iter_dataset()

    def named(model: Any, batch: Any) -> Any:
        return loss(model, batch)[0], {"id": batch["id"]}

    seen = trainer(named, checkpoint_dir=tmp_path).fit(dataset(), num_steps=3)
    second = trainer(named, checkpoint_dir=tmp_path)
    assert second.restore() == 3
    seen += second.fit(dataset(), num_epochs=1)
    assert sorted(record["id"] for record in seen) == list(range(8))
    whole = trainer(named)
    whole.fit(dataset(), num_epochs=1)
    assert_same(weights(second), weights(whole))


@pytest.mark.slow
def test_data_without_state_is_passed_over_and_says_so(tmp_path: Any) -> None:
    data = batches(5)
    trainer(checkpoint_dir=tmp_path).fit(Again(data), num_steps=2)
    resumed, whole = trainer(checkpoint_dir=tmp_path), trainer()
    resumed.restore()
    with pytest.warns(UserWarning, match=r"(?s)2 batches are skipped to reach step 2.*hint: a grain dataset"):
        resumed.fit(Again(data), num_steps=5)
    whole.fit(data, num_steps=5)
    assert_same(weights(resumed), weights(whole))


@pytest.mark.slow
def test_an_iterator_that_cannot_go_back_is_refused(tmp_path: Any) -> None:
    trainer(checkpoint_dir=tmp_path).fit(iter(batches(5)), num_steps=2)
    resumed = trainer(checkpoint_dir=tmp_path)
    resumed.restore()
    with pytest.raises(DataError, match=r"(?s)cannot go back to step 2.*list_iterator.*hint: pass a list"):
        resumed.fit(iter(batches(5)), num_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
def test_a_batch_that_was_read_in_vain_comes_again(event: str) -> None:
    class Interrupts(Callback):
        has_raised = False

    def interrupt(_: Any, step: int) -> None:
        if step == 2 and not Interrupts.has_raised:
            Interrupts.has_raised = True
            raise KeyboardInterrupt

    callback, ours, whole = Interrupts(), trainer(), trainer()
    setattr(callback, event, interrupt)
    data = grain.MapDataset.source(batches(5)).to_iter_dataset()
    with pytest.raises(KeyboardInterrupt):
        ours.fit(data, num_steps=5, callbacks=[callback])
    assert ours.step == 2
    ours.fit(data, num_steps=5)
    whole.fit(batches(5), num_steps=5)
    assert_same(weights(ours), weights(whole))


@pytest.mark.slow
def test_weights_may_be_replaced_by_numpy_arrays() -> None:
    ours, whole = trainer(), trainer()
    ours.update(jax.tree.map(np.array, model()))
    ours.fit(batches(3), num_steps=3)
    whole.fit(batches(3), num_steps=3)
    assert_same(weights(ours), weights(whole))


def test_an_iterator_that_ends_early_is_named() -> None:
    with pytest.raises(DataError, match=r"(?s)no batch for step 2 of 3 steps.*hint:"):
        trainer().fit(iter(batches(2)), num_steps=3)


def test_a_run_needs_an_end() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fit needs an end.*hint: fit"):
        trainer().fit(batches(2))

    class Endless:
        def __getitem__(self, step: int) -> Any:
            return batches(1)[0]

    with pytest.raises(ConfigError, match=r"(?s)num_epochs needs data with a length.*hint:"):
        trainer().fit(Endless(), num_epochs=1)


def test_arrays_are_cut_into_shuffled_batches_that_hold_every_example() -> None:
    arrays = {"x": np.arange(30.0, dtype=np.float32).reshape(10, 3), "y": np.arange(10, dtype=np.float32)}
    data = array_data(arrays, 3)
    assert len(data) == 3 and data[0]["x"].shape == (3, 3)
    np.testing.assert_array_equal(data[0]["x"][:, 0], 3 * data[0]["y"])
    assert len({float(y) for batch in data for y in batch["y"]}) == 9
    assert [len(batch["y"]) for batch in array_data(arrays, 3, drop_remainder=False)] == [3, 3, 3, 1]
    trainer().fit(data, num_epochs=2)
    with pytest.raises(DataError, match=r"(?s)different numbers of examples.*x: 10, y: 4.*hint:"):
        array_data({"x": arrays["x"], "y": arrays["y"][:4]}, 2)
    with pytest.raises(DataError, match="batch_size must be an integer from 1 to 10, not 11"):
        array_data(arrays, 11)


# --- callbacks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_callbacks_are_told_everything_in_order(tmp_path: Any) -> None:
    diary = Diary()
    options = {"eval_data": batches(1), "checkpoint_every": 2, "callbacks": [diary]}
    trainer(checkpoint_dir=tmp_path).fit(batches(2), num_epochs=1, **options)
    named = [(name, *(a for a in rest if isinstance(a, int))) for name, *rest in diary.events if name != "on_record"]
    assert named == [
        ("on_train_begin",),
        ("on_evaluate_begin",),
        ("on_evaluate_end",),
        ("on_epoch_begin", 0),
        ("on_step_begin", 0),
        ("on_preflight",),
        ("on_step_end", 1),
        ("on_step_begin", 1),
        ("on_step_end", 2),
        ("on_checkpoint", 2),
        ("on_evaluate_begin",),
        ("on_evaluate_end",),
        ("on_epoch_end", 0),
        ("on_train_end",),
    ]
    assert [r[1]["step"] for r in diary.events if r[0] == "on_record"] == [0, 1, 2, 2]


@pytest.mark.slow
def test_early_stopping_waits_for_its_patience() -> None:
    values = iter([3.0, 2.0, 2.5, 2.1, 1.0])
    stop, ours = EarlyStopping("eval_loss", patience=1), trainer()
    ours._evaluation.means = lambda data: {"loss": next(values)}  # pyright: ignore
    ours.fit(batches(9), num_steps=9, eval_data=[0], eval_every=1, callbacks=[stop])
    assert (ours.step, stop.best) == (3, 2.0)
    with pytest.raises(ConfigError, match=r"(?s)EarlyStopping monitors 'accuracy'.*one of grad_norm, loss, mae.*hint:"):
        trainer().fit(batches(2), num_steps=2, callbacks=[EarlyStopping("accuracy")])
    with pytest.raises(ConfigError, match='mode must be "min" or "max", not'):
        EarlyStopping(mode="least")


def test_records_go_to_files_and_writers(tmp_path: Any) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, step))

    writer = Writer()
    records = trainer().fit(batches(2), num_steps=2, callbacks=[JsonlLogger(tmp_path / "m.jsonl"), Scalars(writer)])
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == records
    assert ("loss", 1) in writer.seen and ("mae", 2) in writer.seen
    with pytest.raises(ConfigError, match=r"(?s)has neither add_scalar\(.*hint: "):
        Scalars(3)


# --- randomness, and state that the model changes ------------------------------------------------------------------


def noisy(model: Any, batch: Any, key: Any) -> Any:
    return loss(model, batch)[0] + jax.random.normal(key) * model["b"]


@pytest.mark.sentinel
@pytest.mark.slow
def test_every_step_and_microbatch_has_a_key_of_its_own_that_resuming_repeats(tmp_path: Any) -> None:
    def seen(model: Any, batch: Any, key: Any, training: bool) -> Any:
        return loss(model, batch)[0], {"draw": jax.random.normal(key), "training": jnp.float32(training)}

    records = trainer(seen).fit(batches(3), num_steps=3, eval_data=batches(1))
    draws = [record["draw"] for record in records if "draw" in record]
    assert len(set(draws)) == 3 and {r["training"] for r in records if "training" in r} == {1.0}
    assert {r["eval_training"] for r in records if "eval_training" in r} == {0.0}
    assert [r["draw"] for r in trainer(seen, seed=1).fit(batches(3), num_steps=3)] != draws
    split = trainer(seen, num_microbatches=2).fit(batches(1), num_steps=1)[0]["draw"]
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), part) for part in range(2)]
    assert split == pytest.approx(float(np.mean([jax.random.normal(key) for key in keys])), rel=1e-6)

    whole = trainer(noisy, checkpoint_dir=tmp_path / "whole")
    whole.fit(batches(4), num_steps=4)
    trainer(noisy, checkpoint_dir=tmp_path / "part").fit(batches(4), num_steps=2)
    resumed = trainer(noisy, checkpoint_dir=tmp_path / "part")
    resumed.restore()
    resumed.fit(batches(4), num_steps=4)
    assert_same(weights(resumed), weights(whole))


def counting(model: Any, batch: Any) -> Any:
    """A running mean of the inputs, which the loss reads."""
    mean = 0.9 * model["stats"]["mean"] + 0.1 * jnp.mean(batch["x"], axis=0)
    value = jnp.mean((batch["x"] - mean[None]) ** 2 @ model["w"] ** 2)
    return value, {}, {**model, "stats": {"mean": mean, "count": model["stats"]["count"] + 1}}


def with_stats() -> Any:
    return {"w": jnp.ones(3), "stats": {"mean": jnp.zeros(3), "count": jnp.int32(0)}}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_state_that_the_model_changes_is_threaded_through_microbatches_and_checkpoints(
    num_microbatches: int, tmp_path: Any
) -> None:
    def make(where: Any) -> lt.Trainer:
        options = {"mutable": "stats/**", "num_microbatches": num_microbatches, "checkpoint_dir": where}
        return lt.Trainer(with_stats(), counting, optax.sgd(0.1), **options)

    whole = make(tmp_path / "whole")
    whole.fit(batches(4), num_steps=4)
    assert int(whole.model["stats"]["count"]) == 4 * num_microbatches
    mean = np.zeros(3, np.float32)
    for batch in batches(4):
        for part in np.split(batch["x"], num_microbatches):
            mean = 0.9 * mean + 0.1 * part.mean(axis=0)
    np.testing.assert_allclose(whole.model["stats"]["mean"], mean, rtol=1e-5, atol=1e-6)
    make(tmp_path / "part").fit(batches(4), num_steps=2)
    resumed = make(tmp_path / "part")
    resumed.restore()
    resumed.fit(batches(4), num_steps=4)
    assert_same(weights(resumed), weights(whole))
    assert make(None).memory(batches(1)[0]).by_role["mutable"] == 16


def test_mutable_state_that_is_not_returned_or_changes_its_type_is_refused() -> None:
    def forgets(model: Any, batch: Any) -> Any:
        return counting(model, batch)[:2]

    def widens(model: Any, batch: Any) -> Any:
        value, metrics, after = counting(model, batch)
        return value, metrics, {**after, "stats": {**after["stats"], "count": jnp.float32(0)}}

    with pytest.raises(StructureError, match=r"(?s)must return \(loss, metrics, model\).*hint:"):
        lt.Trainer(with_stats(), forgets, optax.sgd(0.1), mutable="stats/**").fit(batches(1), num_steps=1)
    with pytest.raises(
        StructureError, match=r"stats/count: the model changes the type of its state from int32.* to float32"
    ):
        lt.Trainer(with_stats(), widens, optax.sgd(0.1), mutable="stats/**").fit(batches(1), num_steps=1)
    with pytest.raises(SelectionError, match="statistics"):
        lt.Trainer(with_stats(), counting, optax.sgd(0.1), mutable="statistics/**")
    with pytest.raises(
        StructureError, match=r"(?s)must return a floating-point scalar.*hint: average .* with jnp.mean"
    ):
        lt.Trainer(model(), lambda m, b: b["x"] @ m["w"], optax.sgd(0.1)).fit(batches(1), num_steps=1)


# --- losses that are no numbers ------------------------------------------------------------------------------------


def spoiled(count: int, at: int) -> list[Any]:
    data = batches(count)
    data[at]["x"] = data[at]["x"] * np.float32(np.nan)
    return data


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_update_out(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(NonFiniteError, match=r"(?s)step 3: loss is not finite.*got: nan.*hint: lower the learning"):
        ours.fit(spoiled(6, 2), num_steps=6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights(ours)))
    resumed = trainer(checkpoint_dir=tmp_path)
    assert resumed.restore() == ours.step >= 3  # the state is saved, as however else a run ends
    assert_same(weights(resumed), weights(ours))


@pytest.mark.slow
def test_a_step_that_is_no_number_can_be_skipped() -> None:
    ours, theirs, data = trainer(on_nan="skip"), trainer(), spoiled(5, 2)
    records = ours.fit(data, num_steps=5)
    assert [np.isfinite(record["loss"]) for record in records] == [True, True, False, True, True]
    theirs.fit([*data[:2], *data[3:]], num_steps=4)
    assert_same(weights(ours), weights(theirs))


@pytest.mark.slow
def test_a_run_rolls_back_and_goes_on_with_the_next_batches(tmp_path: Any) -> None:
    data = spoiled(8, 4)
    ours = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning, match="step 5: loss is not finite, so the weights of step 4 were restored"):
        ours.fit(data, num_steps=8, checkpoint_every=2)
    assert ours.step == 8
    theirs = trainer()
    theirs.fit(data[:4], num_steps=4)
    theirs.fit([*data[:4], *data[6:]], num_steps=6)
    assert_same(weights(ours), weights(theirs))


def test_a_run_whose_updates_cannot_be_left_out_goes_back_before_it_stops() -> None:
    hosted = trainer(tx=lt.offload.optimizer(optax.adam(0.1)))
    before = weights(hosted)
    with pytest.raises(NonFiniteError, match="step 3") as raised:
        hosted.fit(spoiled(6, 2), num_steps=6)
    assert "the trainer holds the state of step 0" in raised.value.__notes__[-1]
    assert_same(weights(hosted), before)


def test_a_run_that_only_rolls_back_gives_up() -> None:
    data = [{**batch, "x": batch["x"] * np.float32(np.nan)} for batch in batches(20)]
    with pytest.raises(NonFiniteError), pytest.warns(UserWarning, match="the weights of step 0 were restored") as told:
        trainer(on_nan="roll_back").fit(data, num_steps=20)
    assert len(told) == 3


def test_an_unknown_policy_and_one_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"on_nan must be .*\"ignore\", not"):
        trainer(on_nan="panic")
    hosted = lt.offload.optimizer(optax.adam(0.1))
    with pytest.raises(ConfigError, match=r"(?s)cannot drop its update with state on the host.*hint:"):
        trainer(tx=hosted, on_nan="skip")


# --- predict, and signals ------------------------------------------------------------------------------------------


def test_predictions_stream_to_the_host() -> None:
    ours, data = trainer(), batches(3, size=5)
    found = ours.predict(data, lambda model, batch: {"y": batch["x"] @ model["w"]})
    np.testing.assert_allclose(found["y"], np.concatenate([b["x"] for b in data]) @ np.arange(3.0), rtol=1e-5)
    assert all(isinstance(part["y"], np.ndarray) for part in ours.predict_batches(data, lambda m, b: {"y": b["y"]}))
    with pytest.raises(ConfigError, match="predict got no batch"):
        ours.predict([], lambda model, batch: batch["x"])
    with pytest.raises(ConfigError, match=r"(?s)predict cannot call a dict with a batch.*hint: .*lambda model, batch"):
        ours.predict(data)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number: int, tmp_path: Any) -> None:
    class Kill(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                os.kill(os.getpid(), number)

    class Ended(Exception):
        pass

    def end(*_: Any) -> None:
        raise Ended if number == signal.SIGTERM else KeyboardInterrupt

    before = signal.signal(number, end)
    try:
        with pytest.raises((Ended, KeyboardInterrupt)):
            trainer(checkpoint_dir=tmp_path).fit(batches(9), num_steps=9, callbacks=[Kill()])
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    resumed, whole = trainer(checkpoint_dir=tmp_path), trainer()
    assert resumed.restore() == 3
    resumed.fit(batches(9), num_steps=9)
    whole.fit(batches(9), num_steps=9)
    assert_same(weights(resumed), weights(whole))


# --- the average, and damaged checkpoints --------------------------------------------------------------------------


def test_the_average_follows_the_weights_and_stands_in_for_them() -> None:
    tx = optax.sgd(0.1)
    ours, data = trainer(tx=lt.train.ema(tx, 0.5)), batches(4)
    average = jax.tree.map(np.array, model())
    for step in range(4):
        ours.fit(data, num_steps=step + 1)
        average = jax.tree.map(lambda a, w: 0.5 * a + 0.5 * w, average, weights(ours))
    before = weights(ours)
    with ours.averaged():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), weights(ours), average)
        averaged = ours.evaluate(data)["loss"]
    assert_same(weights(ours), before)
    assert averaged != ours.evaluate(data)["loss"]
    assert [r["loss"] for r in trainer(tx=tx).fit(data, num_steps=4)] == [
        r["loss"] for r in trainer(tx=lt.train.ema(tx, 0.5)).fit(data, num_steps=4)
    ]
    with pytest.raises(ConfigError, match=r"(?s)the optimizer keeps no average.*hint: .*ema"), trainer().averaged():
        pass
    with pytest.raises(ConfigError, match="decay must be above 0 and below 1, not"):
        lt.train.ema(tx, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["remove", "notes"])
def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path: Any, damage: str) -> None:
    trainer(checkpoint_dir=tmp_path).fit(batches(4), num_steps=4, checkpoint_every=2)
    files = [file for file in (tmp_path / "4").rglob("*") if file.is_file()]
    for file in files:
        if (damage == "remove" and "state" in file.parts) or (damage == "notes" and "notes" in file.parts):
            file.unlink()
    resumed, whole = trainer(checkpoint_dir=tmp_path), trainer()
    said = r"(?s)checkpoint of step 4 in .* is damaged.*hint: the checkpoint before"
    with pytest.warns(UserWarning, match="were renamed: damaged-4"), pytest.warns(UserWarning, match=said):
        assert resumed.restore() == 2
    assert (tmp_path / "damaged-4").is_dir()
    resumed.fit(batches(6), num_steps=4)
    assert trainer(checkpoint_dir=tmp_path).restore() == 4
    whole.fit(batches(6), num_steps=4)
    assert_same(weights(resumed), weights(whole))


def test_another_base_is_refused(tmp_path: Any) -> None:
    def over(value: float) -> lt.Trainer:
        given = {**model(), "base": jnp.full((64, 64), value)}
        return lt.Trainer(given, loss, optax.sgd(0.1), wrt=["w", "b"], checkpoint_dir=tmp_path)

    over(1.0).fit(batches(2), num_steps=2)
    assert over(1.0).restore() == 2
    with pytest.raises(StructureError, match=r"(?s)step 2 was trained over other frozen weights.*hint: resume with"):
        over(2.0).restore()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_model_on_another_device_than_the_first_stays_there_and_is_resumed(tmp_path: Any, is_offloaded: bool) -> None:
    device, tx = jax.devices()[2], optax.adam(0.1)
    tx = lt.offload.optimizer(tx) if is_offloaded else tx

    def away() -> lt.Trainer:
        return lt.Trainer(jax.device_put(model(), device), loss, tx, checkpoint_dir=tmp_path)

    away().fit(batches(4)[:2], num_steps=2, progress=False)
    resumed, whole = away(), trainer(tx=tx)
    assert resumed.restore() == 2
    resumed.fit(batches(4), num_steps=4, progress=False)
    whole.fit(batches(4), num_steps=4)
    assert_same(weights(resumed), weights(whole))
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(resumed.state))
