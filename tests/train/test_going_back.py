"""What model, data, callbacks and checkpoints are after a failure, and after going back to a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError, NonFiniteError, StateError
from lowtide.train import Callback

BATCHES = [np.full((4, 2), float(number), np.float32) for number in range(4)]
SPOILED = BATCHES[0] * np.float32(np.nan)


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((model["w"][None] - batch) ** 2)


def trainer(loss: Any = loss_fn, *, tx: Any = None, **options: Any) -> lt.Trainer:
    return lt.Trainer({"w": jnp.zeros(2)}, loss, tx or optax.sgd(0.1), **options)


class Again:
    """An iterable that begins anew."""

    def __iter__(self) -> Any:
        return iter(BATCHES)


def lose_state(trainer: Any) -> None:
    """As if a step had failed on the device."""
    jax.tree.map(lambda leaf: leaf.delete(), trainer.state.trainable)
    raise RuntimeError("planted")


class On(Callback):
    """Does something at an event."""

    def __init__(self, event: str, do: Any) -> None:
        setattr(self, event, do)


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.step:
            self.do(trainer)


# --- a mutable object that has its arrays --------------------------------------------------------------------------


def read(trainer: Any) -> None:
    trainer.model  # noqa: B018 - gives the arrays back


def average(trainer: Any) -> None:
    with trainer.averaged():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("use", [read, average])
@pytest.mark.parametrize("kind", ["equinox", "nnx", "keras"])
def test_a_model_that_a_callback_has_read_goes_back_with_the_trainer(subjects: Any, kind: str, use: Any) -> None:
    subject, (good, *_) = subjects.Subject(kind), subjects.batches(1)
    bad = {**good, "x": good["x"] * np.float32(np.nan)}
    tx = lt.train.ema(optax.adam(1e-2), decay=0.9)
    ours = lt.Trainer(subject.given, subject.loss, tx, on_nan="roll_back")
    before = subject.weights(ours)
    with pytest.warns(UserWarning, match="step 1: loss is not finite, so the weights of step 0 were restored"):
        ours.fit([bad, good], num_steps=1, callbacks=[At(1, use)], progress=False)
    subjects.assert_same(subject.weights(ours), before)
    assert np.isfinite(ours.fit([bad, good], num_steps=2, progress=False)[-1]["loss"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["equinox", "nnx", "keras"])
def test_a_model_that_was_read_has_no_arrays_of_the_step_that_failed(subjects: Any, kind: str) -> None:
    subject = subjects.Subject(kind)
    ours = subject.trainer()

    def fail(trainer: Any) -> None:
        read(trainer)
        lose_state(trainer)

    with pytest.raises(RuntimeError, match="planted"):
        ours.fit(subjects.batches(), num_steps=subjects.STEPS, callbacks=[At(2, fail)], progress=False)
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, 0))
    ours.fit(subjects.batches(), num_steps=subjects.STEPS, progress=False)
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, subjects.STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["equinox", "nnx", "keras"])
def test_a_state_that_is_set_is_that_of_the_model(subjects: Any, kind: str) -> None:
    subject, data = subjects.Subject(kind), subjects.batches()
    ours = subject.trainer()
    ours.fit(data, num_steps=1, progress=False)
    kept = jax.tree.map(jnp.array, ours.state)
    ours.fit(data, num_steps=3, progress=False)
    ours.state = kept
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, 1))
    ours.fit(data, num_steps=subjects.STEPS, progress=False)
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, subjects.STEPS))


# --- what is kept of weights that are no numbers -------------------------------------------------------------------


def refuse(record: Any) -> None:
    if not np.isfinite(record.get("loss", 0.0)):
        raise ValueError("of the user: the loss is no number")


@pytest.mark.parametrize("checkpoint_every", [None, 3])
@pytest.mark.parametrize("is_hosted", [False, True])
def test_no_checkpoint_has_the_update_of_a_loss_that_is_no_number(
    is_hosted: bool, checkpoint_every: Any, tmp_path: Path
) -> None:
    """Whoever else raises by it. A step that leaves its update out has a good state, which is saved."""
    tx = lt.offload.optimizer(optax.adam(0.1)) if is_hosted else optax.adam(0.1)
    ours = trainer(tx=tx, rollback=False, checkpoint_dir=tmp_path)
    options: dict[str, Any] = {"on_record": refuse, "checkpoint_every": checkpoint_every, "progress": False}
    with pytest.raises(NonFiniteError, match="step 3: loss is not finite") as raised:
        ours.fit([*BATCHES[1:3], SPOILED], num_steps=3, **options)
    assert "lowtide: on_record failed: ValueError: of the user" in raised.value.__notes__[0]
    resumed = trainer(tx=tx, checkpoint_dir=tmp_path)
    assert resumed.restore() == (None if is_hosted else 3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.tree.map(np.array, resumed.state)))


def test_weights_that_could_not_go_back_are_not_saved(tmp_path: Path) -> None:
    class Damages(Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            if step == 2:
                for path in (tmp_path / "2").rglob("*"):
                    if path.is_file():
                        path.write_bytes(b"")

    ours = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)
    ours.fit(BATCHES, num_steps=2, progress=False)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(StateError, match="no checkpoint can be read"):
        ours.fit([*BATCHES[:2], SPOILED], num_steps=3, callbacks=[Damages()], progress=False)
    assert not (tmp_path / "3").exists()


# --- data, callbacks and edits -------------------------------------------------------------------------------------


def test_a_generator_for_each_epoch_goes_on_with_the_epoch_that_failed() -> None:
    ours = trainer()
    ours.fit(iter(BATCHES), num_epochs=1, progress=False)
    with pytest.raises(RuntimeError, match="planted"):
        ours.fit(iter(BATCHES), num_epochs=2, callbacks=[At(6, lose_state)], progress=False)
    assert ours.step == 4
    records = ours.fit(iter(BATCHES), num_epochs=2, progress=False)
    assert [record["step"] for record in records] == [5, 6, 7, 8]


def test_what_a_callback_counts_after_the_copy_is_not_in_it() -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.counted = {"records": 0}

        def state(self) -> Any:
            return self.counted

        def resume(self, state: Any) -> None:
            self.counted = state

        def on_record(self, trainer: Any, record: Any) -> None:
            self.counted["records"] += 1

    ours, counts = trainer(), Counts()
    with pytest.raises(RuntimeError, match="planted"):
        ours.fit(BATCHES, num_steps=4, callbacks=[counts, At(3, lose_state)], progress=False)
    ours.fit(BATCHES, num_steps=4, callbacks=[counts], progress=False)
    assert counts.counted == {"records": 4}


def test_an_edit_at_the_end_of_an_epoch_is_in_the_copy() -> None:
    edits = On("on_epoch_end", lambda trainer, epoch: trainer.update({"w": jnp.full(2, 50.0)}))
    ours = trainer()
    with pytest.raises(RuntimeError, match="planted"):
        ours.fit(BATCHES, num_epochs=2, callbacks=[edits, At(6, lose_state)], progress=False)
    assert ours.step == 4
    np.testing.assert_array_equal(ours.model["w"], [50.0, 50.0])


# --- failures as a run begins, between its records, and as it ends ----------------------------------------------------


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_the_evaluation_before_the_first_step_is_made_once_over_a_failure(is_evaluated: bool) -> None:
    """Another one, with the same weights, would be no better than it, and stop the run."""
    ours = trainer()
    options: dict[str, Any] = {"num_steps": 4, "progress": False}
    evaluated = {"eval_data": BATCHES[:1], "eval_every": 2, "callbacks": [lt.train.EarlyStopping(mode="max")]}
    with pytest.raises(DataError):
        ours.fit(["no numbers"] * 4, **options, **evaluated if is_evaluated else {})
    records = ours.fit(BATCHES, **options, **evaluated)
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 2, 4][is_evaluated:]
    assert ours.step == 4


@pytest.mark.parametrize("who", ["on_record", "callback"])
def test_a_record_is_given_to_all_when_one_of_them_raises(who: str) -> None:
    class Sees(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_record(self, trainer: Any, record: Any) -> None:
            self.steps.append(record["step"])

    def fail(record: Any) -> None:
        if record["step"] == 2:
            raise KeyboardInterrupt

    ours, sees = trainer(), Sees()
    with pytest.raises(KeyboardInterrupt):
        if who == "on_record":
            ours.fit(BATCHES, num_steps=4, callbacks=[sees], on_record=fail, progress=False)
        else:
            fails = lambda trainer, record: fail(record)  # noqa: E731
            ours.fit(BATCHES, num_steps=4, callbacks=[On("on_record", fails), sees], progress=False)
    assert sees.steps == [1, 2, 3]  # the third step had been sent
    ours.fit(BATCHES, num_steps=4, callbacks=[sees], progress=False)
    assert sees.steps == [1, 2, 3, 4]


def test_a_callback_whose_state_fails_does_not_lose_the_position_of_the_data() -> None:
    class Breaks(Callback):
        is_broken = False

        def state(self) -> Any:
            if self.is_broken:
                raise RuntimeError("planted")

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                self.is_broken = True
                raise ZeroDivisionError

    ours, data = trainer(lambda model, batch: (loss_fn(model, batch), {"example": batch[0, 0]})), Again()
    ours.fit(data, num_steps=1, progress=False)
    with pytest.warns(UserWarning, match="1 batches are"), pytest.raises(ZeroDivisionError) as raised:
        ours.fit(data, num_steps=4, callbacks=[Breaks()], progress=False)
    assert "lowtide: leaving the data failed: RuntimeError: planted" in raised.value.__notes__
    with pytest.warns(UserWarning, match="3 batches are skipped"):
        records = ours.fit(data, num_steps=4, progress=False)
    assert [record["example"] for record in records] == [3]


def test_a_callback_that_fails_after_another_went_to_the_best_leaves_the_data_there(tmp_path: Any) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    callbacks = [On("on_train_end", lambda trainer: trainer.restore(best=True)), On("on_train_end", fail)]
    ours, values = trainer(checkpoint_dir=tmp_path, best="eval_loss", max_to_keep=9), iter([3.0, 1.0, 2.0])
    ours._evaluation.means = lambda data: {"loss": next(values)}  # pyright: ignore
    options: dict[str, Any] = {"eval_data": BATCHES, "eval_every": 2, "progress": False}
    with pytest.raises(ZeroDivisionError) as raised:
        ours.fit(Again(), num_steps=4, callbacks=callbacks, **options)
    assert ours.step == 2 and ours.position is not None and ours.position["in_epoch"] == 2
    assert not any("the checkpoint failed" in note for note in raised.value.__notes__)


@pytest.mark.slow
def test_a_misspelt_monitor_leaves_no_checkpoint_in_the_way(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="EarlyStopping monitors 'los'"):
        options: dict[str, Any] = {"callbacks": [lt.train.EarlyStopping("los")], "progress": False}
        trainer(checkpoint_dir=tmp_path).fit(BATCHES, num_steps=4, **options)
    ours = trainer(checkpoint_dir=tmp_path)
    assert ours.restore() is None
    ours.fit(BATCHES, num_steps=4, callbacks=[lt.train.EarlyStopping("loss", patience=9)], progress=False)
    assert trainer(checkpoint_dir=tmp_path).restore() == 4
