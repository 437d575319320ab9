"""What a trainer keeps true of its state: averages, edits, copies, checkpoints, and counts over an interruption."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import (
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    OutputError,
    SelectionError,
    StateError,
    StructureError,
)
from lowtide.train import Callback

BATCHES = [np.full((4, 2), float(number), np.float32) for number in range(4)]
SPOILED = BATCHES[0] * np.float32(np.nan)


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((model["w"][None] - batch) ** 2)


def trainer(loss: Any = loss_fn, *, tx: Any = None, **options: Any) -> lt.Trainer:
    return lt.Trainer({"w": jnp.zeros(2)}, loss, tx or optax.sgd(0.1), **options)


# --- what happens to weights, steps and copies ---------------------------------------------------------------------


def averaging(**options: Any) -> lt.Trainer:
    return lt.Trainer({"w": jnp.ones(2)}, loss_fn, lt.train.ema(optax.sgd(0.1), decay=0.5), **options)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("use", ["fit", "advance", "save", "restore", "update", "averaged"])
def test_the_average_can_only_be_read(use: str, tmp_path: Any) -> None:
    ours = averaging(checkpoint_dir=tmp_path)
    ours.fit(BATCHES, num_steps=2, progress=False)
    before = np.array(ours.model["w"])
    uses: dict[str, Any] = {
        "fit": lambda: ours.fit(BATCHES, num_steps=4, progress=False),
        "advance": lambda: ours.advance(BATCHES[0]),
        "save": ours.save,
        "restore": ours.restore,
        "update": lambda: ours.update({"w": jnp.zeros(2)}),
        "averaged": lambda: ours.averaged().__enter__(),
    }
    with ours.averaged():
        assert not np.array_equal(ours.model["w"], before)
        with pytest.raises(StateError, match=rf"(?s){use} was called inside of averaged.*hint: leave the with block"):
            uses[use]()
    np.testing.assert_array_equal(ours.model["w"], before)
    assert ours.fit(BATCHES, num_steps=4, progress=False)[-1]["step"] == 4


def test_an_average_of_a_part_cannot_stand_in_for_all() -> None:
    tx = optax.multi_transform(
        {"a": lt.train.ema(optax.sgd(0.1), decay=0.5), "b": optax.sgd(0.1)}, {"v": "a", "w": "b"}
    )
    ours = lt.Trainer({"v": jnp.ones(2), "w": jnp.ones(2)}, loss_fn, tx)
    with pytest.raises(
        ConfigError, match=r"(?s)ema must cover all trainable leaves.*hint: lt.train.ema\(optax.multi_transform"
    ):
        ours.averaged().__enter__()


class Steps(Callback):
    def on_step_end(self, trainer: Any, step: int) -> None:
        trainer.advance(BATCHES[0])


def test_steps_inside_of_fit_are_its_own() -> None:
    with pytest.raises(StateError, match=r"(?s)advance was called while fit takes steps.*hint: .*after fit"):
        trainer().fit(BATCHES, num_steps=2, callbacks=[Steps()], progress=False)


def test_the_step_may_be_set_for_weights_that_were_trained_elsewhere() -> None:
    ours, whole = trainer(), trainer()
    ours.step = 2
    records = ours.fit(BATCHES, num_steps=4, progress=False)
    assert [record["step"] for record in records] == [3, 4]
    whole.fit(BATCHES[2:], num_steps=2, progress=False)
    np.testing.assert_array_equal(ours.model["w"], whole.model["w"])
    for wrong in (-1, 1.5, True, 2**31):
        with pytest.raises(ConfigError, match=f"step must be an integer from 0 to 2,147,483,647, not {wrong}"):
            ours.step = wrong  # pyright: ignore


def adam_trainer() -> lt.Trainer:
    model = {"v": jnp.zeros(2), "w": jnp.zeros(2), "f": jnp.zeros(2)}
    return lt.Trainer(model, loss_fn, optax.adam(0.1), wrt=["v", "w"])


def with_state(ours: lt.Trainer, **parts: Any) -> Any:
    adam, *rest = ours.state.opt_state
    return dataclasses.replace(ours.state, opt_state=(adam._replace(**parts), *rest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ours: with_state(ours, mu=ours.state.opt_state[0].nu),
            "opt_state/0/mu/v and state/opt_state/0/nu/v are the same.*hint:",
        ),
        (
            lambda ours: with_state(ours, mu=ours.state.trainable),
            "trainable/v and state/opt_state/0/mu/v are the same.*hint:",
        ),
        (
            lambda ours: dataclasses.replace(ours.state, trainable={**ours.state.trainable, "w": ours.frozen["f"]}),
            "frozen/f and state/trainable/w are the same array.*hint:",
        ),
        (
            lambda ours: dataclasses.replace(ours.state, opt_state=list(ours.state.opt_state)),
            "state has its leaves in other containers.*hint:",
        ),
        (
            lambda ours: dataclasses.replace(ours.state, step=jnp.int32(-1)),
            "step must be an integer from 0 to .*, not -1",
        ),
    ],
)
def test_a_state_with_which_no_step_runs_is_refused(change: Any, message: str) -> None:
    ours = adam_trainer()
    with pytest.raises((SelectionError, StructureError, ConfigError), match=f"(?s){message}"):
        ours.state = change(ours)
    with pytest.raises(SelectionError, match=r"(?s)trainable/w and state/opt_state/0/mu/w are the same array.*hint:"):
        ours.update({**ours.model, "w": ours.state.opt_state[0].mu["w"]})
    assert len(ours.fit(BATCHES, num_steps=2, progress=False)) == 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("given", ["NumPy", "another device"])
@pytest.mark.parametrize("is_hosted", [False, True])
def test_a_state_goes_where_the_one_before_it_was(is_hosted: bool, given: str) -> None:
    tx = lt.offload.optimizer(optax.adam(0.1)) if is_hosted else optax.adam(0.1)
    model, batches = {"w": jnp.zeros((256, 2))}, [batch[:1, None] for batch in BATCHES]
    ours, whole = (lt.Trainer(jax.tree.map(jnp.array, model), loss_fn, tx, on_nan="ignore") for _ in range(2))
    ours.fit(batches, num_steps=2, progress=False)
    before = jax.tree.map(lambda leaf: leaf.sharding, ours.state)
    if given == "NumPy":
        ours.state = jax.tree.map(np.asarray, ours.state)
    else:
        ours.state = jax.device_put(ours.state, jax.devices()[1])
        ours.update(jax.device_put(ours.model, jax.devices()[1]))
    assert jax.tree.map(lambda leaf: leaf.sharding, ours.state) == before
    for each in (ours, whole):
        each.fit(batches, num_steps=4, progress=False)
    np.testing.assert_array_equal(ours.model["w"], whole.model["w"])


def test_a_state_of_another_step_is_refused_while_a_run_counts() -> None:
    def change(trainer: Any) -> None:
        kept = jax.tree.map(jnp.array, trainer.state)
        trainer.state = dataclasses.replace(kept, step=jnp.int32(2))
        with pytest.raises(StateError, match=r"(?s)setting a state of another step.*hint: .*step=trainer\.state\.step"):
            trainer.state = dataclasses.replace(kept, step=jnp.int32(0))

    class Changes(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                change(trainer)

    records = trainer().fit(BATCHES, num_steps=4, callbacks=[Changes()], progress=False)
    assert [record["step"] for record in records] == [1, 2, 3, 4]


def test_a_fit_that_has_nothing_to_do_says_so() -> None:
    ours = trainer()
    ours.fit(BATCHES, num_epochs=1, progress=False)
    with pytest.warns(UserWarning, match=r"fit took no step: the trainer is at step 4.*\n.*beginning of the run"):
        assert ours.fit(BATCHES, num_epochs=1, progress=False) == []


@pytest.mark.slow
def test_every_shape_of_a_batch_is_held_against_the_budget() -> None:
    small, large = np.ones((4, 2), np.float32), np.ones((40_000, 2), np.float32)
    ours = trainer(budget="64 KiB")
    for use in (
        lambda: ours.fit([small, large], num_steps=2, progress=False),
        lambda: ours.advance(large),
        lambda: ours.fit([small, small, large], num_steps=3, progress=False),
    ):
        with pytest.raises(OutOfMemoryError, match=r"(?s)before its first step"):
            use()
    assert ours.step == 2


@pytest.mark.slow
def test_weights_that_were_changed_after_a_checkpoint_are_saved_anew(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path)
    ours.fit(BATCHES, num_steps=2, progress=False)
    assert not ours.save()
    ours.update({"w": jnp.full(2, 7.0)})
    assert ours.save()
    ours.checkpoints.wait()  # pyright: ignore
    again = trainer(checkpoint_dir=tmp_path)
    assert again.restore() == 2
    np.testing.assert_array_equal(again.model["w"], [7.0, 7.0])


@pytest.mark.slow
def test_two_runs_in_one_folder_are_told_apart(tmp_path: Any) -> None:
    first, second = trainer(checkpoint_dir=tmp_path), trainer(checkpoint_dir=tmp_path)
    first.fit(BATCHES, num_steps=3, progress=False)
    with pytest.raises(OutputError, match="a checkpoint of step 3, but the trainer is at step 0"):
        second.fit(BATCHES, num_steps=2, progress=False)

    class Other(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 1:
                first.step = 10
                first.save()
                first.checkpoints.wait()  # pyright: ignore

    third = trainer(checkpoint_dir=tmp_path)
    third.restore()
    third.step = 3
    with pytest.raises(OutputError, match=r"(?s)another run writes checkpoints here, .* step 10.*hint:"):
        third.fit(BATCHES * 2, num_steps=5, checkpoint_every=1, callbacks=[_At(4, Other())], progress=False)


class _At(Callback):
    def __init__(self, step: int, other: Callback) -> None:
        self.step, self.other = step, other

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step + 1 == self.step:
            self.other.on_step_end(trainer, 1)


def test_callbacks_may_come_from_any_iterable_and_are_checked() -> None:
    seen: list[int] = []

    class Sees(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            seen.append(step)

    trainer().fit(BATCHES, num_steps=2, callbacks=filter(None, [Sees(), None]), progress=False)  # pyright: ignore
    assert seen == [1, 2]
    for wrong in (Sees(), 3):
        with pytest.raises(ConfigError, match=r"(?s)callbacks must be a list.*hint: put a single callback into a list"):
            trainer().evaluate(BATCHES, callbacks=wrong)  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": "5"}, "num_steps must be an integer of at least 0, not '5'"),
        ({"num_steps": 2.5}, "num_steps must be an integer of at least 0, not 2.5"),
        ({"num_epochs": 1.5}, "num_epochs must be an integer of at least 0, not 1.5"),
        ({"num_steps": 2, "eval_every": 1}, "eval_every needs eval_data.*hint:"),
        (
            {"num_steps": 2, "eval_every": 1.5, "eval_data": BATCHES},
            "eval_every must be an integer of at least 1, not 1.5.*hint:",
        ),
        ({"num_steps": 2, "on_record": 3}, "on_record must be a function of a record, not 3"),
    ],
)
def test_wrong_arguments_of_fit_are_told_before_a_step(options: dict[str, Any], message: str) -> None:
    ours = trainer()
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        ours.fit(BATCHES, progress=False, **options)
    assert ours.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": None}, "seed must be an integer from .* to 4,294,967,295, not None"),
        ({"budget": True}, "budget must be an integer of at least 1, not True.*hint:"),
        ({"budget": [1]}, r"budget must be an integer of at least 1, not \[1\].*hint:"),
    ],
)
def test_wrong_arguments_of_the_trainer_are_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        trainer(**options)
    with pytest.raises(ConfigError, match=r"(?s)the model has no arrays: it is a dict.*hint:"):
        lt.Trainer({}, loss_fn, optax.sgd(0.1))


def test_arrays_that_somebody_else_consumed_are_named_wherever_they_are() -> None:
    shared = {"w": jnp.zeros(2), "frozen": jnp.zeros(2)}
    one = lt.Trainer(shared, loss_fn, optax.sgd(0.1), wrt="w")
    other = lt.Trainer(shared, loss_fn, optax.sgd(0.1), wrt="frozen")
    other.fit(BATCHES, num_steps=1, progress=False)
    for use in (
        lambda: one.fit(BATCHES, num_steps=1, progress=False),
        lambda: one.evaluate(BATCHES),
        lambda: one.predict(BATCHES, lambda model, batch: batch),
    ):
        with pytest.raises(StateError, match=r"(?s)frozen was consumed.*got: 1 deleted.*hint: use the trainer"):
            use()


def test_outputs_that_cannot_be_joined_are_described() -> None:
    with pytest.raises(StructureError, match=r"(?s)shapes \(4, 2\), \(2, 4\) cannot be joined.*hint: predict_batches"):
        trainer().predict([BATCHES[0], BATCHES[0].T], lambda model, batch: batch)


def test_predictions_go_on_with_the_weights_of_now() -> None:
    ours = trainer()
    outputs = ours.predict_batches(BATCHES, lambda model, batch: model["w"])
    np.testing.assert_array_equal(next(outputs), [0, 0])
    ours.fit(BATCHES, num_steps=2, progress=False)
    assert [np.array(output).tolist() for output in outputs][-1] == np.array(ours.model["w"]).tolist()


def test_numbers_may_stand_for_arrays_in_an_update() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) + (model["t"] - 5.0) ** 2

    ours = lt.Trainer({"w": jnp.zeros(2), "s": 1.0, "t": 1.0}, loss, optax.sgd(0.1), wrt=["w", "t"])
    ours.update({"w": np.ones(2, np.float32), "s": 2.0, "t": 4.0})
    ours.fit(BATCHES, num_steps=1, progress=False)
    assert float(ours.model["s"]) == 2.0 and float(ours.model["t"]) == pytest.approx(4.2)


def test_an_evaluation_without_weight_is_an_error() -> None:
    with pytest.raises(DataError, match=r"(?s)sum to 0.*hint: leave out batches"):
        trainer(weight=lambda batch: jnp.sum(batch) * 0).evaluate(BATCHES)


@pytest.mark.parametrize(("other", "mean"), [("a", 0.5), ("z", 0.75)])
def test_rows_are_those_of_the_first_array_in_every_batch_of_an_evaluation(other: str, mean: float) -> None:
    """Also where another one has as many in some of them."""
    ours = lt.Trainer({"w": jnp.zeros(2)}, lambda m, b: jnp.mean(m["w"][None] + b["x"]), optax.sgd(0.1))
    values = [np.ones((3, 2), np.float32), np.zeros((1, 2), np.float32)]
    assert ours.evaluate([{"x": x, other: np.ones(3), "0": 1.0} for x in values])["loss"] == mean


def test_keywords_that_are_bound_stay_as_they_are() -> None:
    seen: list[bool] = []

    def loss(model: Any, batch: Any, training: bool) -> Any:
        seen.append(training)
        return loss_fn(model, batch)

    trainer(functools.partial(loss, training=True)).evaluate(BATCHES)
    assert seen == [True]


def test_a_run_goes_back_to_the_copy_on_the_host_where_checkpoints_cannot_be_read(tmp_path: Any) -> None:
    class Breaks(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.checkpoints.wait()
                for path in (tmp_path / "2").rglob("*"):
                    if path.is_file():
                        path.write_bytes(b"")
                jax.tree.map(lambda x: x.delete(), trainer.state.trainable)
                raise RuntimeError("of the user")

    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="of the user") as raised:
        ours.fit(BATCHES, num_steps=4, checkpoint_every=2, callbacks=[Breaks()], progress=False)
    assert "the trainer is back at step 0" in "".join(raised.value.__notes__)
    np.testing.assert_array_equal(ours.model["w"], [0, 0])
    assert len(ours.fit(BATCHES, num_steps=2, progress=False)) == 2


# --- callbacks and data over an interruption -----------------------------------------------------------------------


class Raises(Callback):
    """An interrupt when a record that it wants is given."""

    def __init__(self, step: int, name: str) -> None:
        self.step, self.name = step, name

    def on_record(self, trainer: Any, record: Any) -> None:
        if record["step"] == self.step and self.name in record:
            raise KeyboardInterrupt


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_what_callbacks_count_is_counted_once_over_an_interrupt(name: str, is_new: bool, tmp_path: Any) -> None:
    """The evaluations never get better: the third that is no better stops, at step 6, whatever came between."""
    options: dict[str, Any] = {"num_steps": 20, "eval_data": BATCHES[:1], "eval_every": 2, "progress": False}
    stop = lt.train.EarlyStopping("eval_loss", patience=2)
    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ours.fit(BATCHES * 5, callbacks=[stop, Raises(4, name)], **options)
    if is_new:
        ours, stop = trainer(checkpoint_dir=tmp_path), lt.train.EarlyStopping("eval_loss", patience=2)
        ours.restore()
    ours.fit(BATCHES * 5, callbacks=[stop], **options)
    assert ours.step == 6


@pytest.mark.slow
def test_any_exception_leaves_a_checkpoint_of_the_last_step(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(DataError):
        ours.fit(BATCHES[:3], num_steps=5, progress=False)
    assert trainer(checkpoint_dir=tmp_path).restore() == 3


def test_a_new_generator_is_taken_after_the_run_went_back() -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                jax.tree.map(lambda x: x.delete(), trainer.state.trainable)
                raise RuntimeError("as if a step had failed")

    ours = trainer()
    ours.fit(iter(BATCHES), num_steps=1, progress=False)
    generator = iter(BATCHES)
    with pytest.raises(RuntimeError):
        ours.fit(generator, num_steps=4, callbacks=[Fails()], progress=False)
    assert ours.step == 1
    with pytest.raises(DataError, match="cannot go back to the step that was restored"):
        ours.fit(generator, num_steps=4, progress=False)
    assert [record["step"] for record in ours.fit(iter(BATCHES), num_steps=4, progress=False)] == [2, 3, 4]


def test_data_that_is_shorter_than_the_run_was_in_it_is_refused(tmp_path: Any) -> None:
    class Again:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            return iter(BATCHES[: self.count])

    trainer(checkpoint_dir=tmp_path).fit(Again(4), num_steps=3, progress=False)
    ours = trainer(checkpoint_dir=tmp_path)
    ours.restore()
    with (
        pytest.warns(UserWarning, match="are skipped"),
        pytest.raises(DataError, match=r"(?s)step 3 follows 3 batches of an epoch, but the data has only 2.*hint:"),
    ):
        ours.fit(Again(2), num_steps=5, progress=False)


@pytest.mark.parametrize("at", [0, 2])
def test_a_signal_says_where_the_run_was_saved(at: int, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Signals(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            self.on_step_end(trainer, 0)

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

    ours, waited = trainer(checkpoint_dir=tmp_path), []
    assert ours.checkpoints is not None
    wait = ours.checkpoints.wait

    def waits() -> None:
        waited.append(caplog.text)
        wait()

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        ours.checkpoints.wait = waits  # pyright: ignore
        ours.fit(BATCHES, num_steps=4, callbacks=[Signals()], progress=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    where = f"saved in {tmp_path}" if at else "with nothing to save"
    assert f"SIGTERM: stopped after step {at}, {where}" in caplog.text
    assert "SIGTERM" not in waited[-1], "it is said when it is true"


def test_records_are_written_into_a_folder_that_is_made(tmp_path: Any) -> None:
    log = lt.train.JsonlLogger(tmp_path / "a" / "b.jsonl")
    trainer().fit(BATCHES, num_steps=2, callbacks=[log], progress=False)
    assert len((tmp_path / "a" / "b.jsonl").read_text().splitlines()) == 2
    (tmp_path / "file").write_text("")
    ours = trainer()
    with pytest.raises(OutputError, match=r"(?s)cannot be written.*hint:"):
        ours.fit(BATCHES, num_steps=2, callbacks=[lt.train.JsonlLogger(tmp_path / "file" / "b.jsonl")], progress=False)
    assert ours.step == 0


def test_a_checkpoint_is_read_where_nothing_can_be_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(checkpoint_dir=tmp_path).fit(BATCHES, num_steps=2, progress=False)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lowtide.core._files.tempfile.TemporaryFile", refuse)
    ours = trainer(checkpoint_dir=tmp_path)
    assert ours.restore() == 2
    with pytest.raises(OutputError, match=r"(?s)no checkpoint can be written there.*Permission denied.*hint:"):
        ours.fit(BATCHES, num_steps=4, progress=False)


# --- losses that are no numbers ------------------------------------------------------------------------------------


def test_a_run_that_skips_every_step_gives_up() -> None:
    ours = trainer(on_nan="skip")
    with pytest.raises(NonFiniteError, match="step 100: loss is not finite, and was not finite in the 99 steps before"):
        ours.fit([SPOILED], num_epochs=200)
    assert len(ours.history) == 100
    np.testing.assert_array_equal(ours.model["w"], [0, 0])


def test_an_update_that_could_neither_be_left_out_nor_taken_back_is_said_to_be_in_the_weights() -> None:
    hosted = trainer(tx=lt.offload.optimizer(optax.adam(0.1)), rollback=False)
    with pytest.raises(NonFiniteError, match=r"(?s)step 1: loss.*hint: the weights contain this step's update"):
        hosted.fit([SPOILED] * 2, num_steps=1)


def test_a_run_does_not_go_back_to_one_copy_for_ever() -> None:
    ours = trainer(on_nan="roll_back")
    with pytest.raises(NonFiniteError, match="step 12"), pytest.warns(UserWarning, match="weights of step 0"):
        ours.fit([*BATCHES[:2], SPOILED] * 20, num_steps=60)
