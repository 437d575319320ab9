"""`Trainer.session`: a run in a loop of the user's own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import NonFiniteError, StateError
from lowtide.train import Callback, Event

DATA = [np.float32(value) for value in (1, 2, 4, 8)]


def trainer(**options: Any) -> lt.Trainer:
    """Its weight is the sum of the batches that it was trained on."""
    return lt.Trainer({"w": jnp.zeros(())}, lambda model, x: jnp.sum(model["w"] * x), optax.sgd(-1.0), **options)


def taken(ours: lt.Trainer, data: Any = DATA, **options: Any) -> list[Event]:
    with ours.session(data, num_steps=4, **options) as run:
        return list(run)


def test_it_does_what_fit_does(tmp_path: Any) -> None:
    ours, theirs, told = trainer(checkpoint_dir=tmp_path / "a"), trainer(checkpoint_dir=tmp_path / "b"), list[Any]()
    events = taken(ours, eval_data=DATA[:1], checkpoint_every=2, on_record=told.append)
    theirs.fit(DATA, num_steps=4, eval_data=DATA[:1], checkpoint_every=2, progress=False)
    without_time = [[{**r, "seconds": 0} for r in records] for records in (ours.history, theirs.history)]
    assert without_time[0] == without_time[1] and told == ours.history
    assert [event.value for event in events if event.name == "record"] == ours.history
    assert [event.value for event in events if event.name == "checkpoint"] == [2, 4]
    assert float(ours.model["w"]) == float(theirs.model["w"]) == sum(DATA)


def test_callbacks_hear_before_the_loop_does() -> None:
    heard: list[str] = []

    class Ours(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            heard.append(f"callback {step}")

    with trainer().session(DATA, num_steps=2, callbacks=[Ours()]) as run:
        for event in run:
            heard += [f"loop {event.value}"] if event.name == "step_end" else []
    assert heard == ["callback 1", "loop 1", "callback 2", "loop 2"]


def test_stop_evaluates_and_saves(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path)
    with ours.session(DATA, num_steps=4, eval_data=DATA[:1]) as run:
        for event in run:
            if event.name == "step_begin" and event.value == 1:
                run.stop()
    assert ours.step == 2 and ours.is_stopped is False
    assert "eval_loss" in run.records[-1] and run.records[-1]["step"] == 2
    assert ours.checkpoints is not None and ours.checkpoints.latest_step() == 2


@pytest.mark.parametrize("live", [False, True], ids=["list", "iterator"])
def test_a_run_that_is_left_goes_on_in_the_next(live: bool) -> None:
    ours, data, told = trainer(), iter(DATA) if live else DATA, list[Any]()
    with ours.session(data, num_steps=4, on_record=told.append) as run:
        for event in run:
            if event.name == "step_end" and event.value == 2:
                break
    assert [record["step"] for record in run.records] == [1, 2]  # the last one was read when the loop was left
    assert told == run.records
    assert [event.value for event in taken(ours, data) if event.name == "step_end"] == [3, 4]
    assert float(ours.model["w"]) == sum(DATA)


def test_leaving_the_loop_after_a_loss_that_is_no_number_raises() -> None:
    ours = trainer()
    with pytest.raises(NonFiniteError), ours.session([DATA[0], np.float32(np.nan)], num_steps=2) as run:
        for event in run:
            if event == ("step_end", 2, None):
                break
    assert float(ours.model["w"]) == DATA[0]


def test_what_the_loop_raises_leaves_a_good_state() -> None:
    ours = trainer()
    with pytest.raises(ZeroDivisionError) as raised, ours.session(DATA, num_steps=4) as run:
        for event in run:
            if event.name == "step_end" and event.value == 3:
                raise ZeroDivisionError
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    assert ours.step == 3 and float(ours.model["w"]) == 7
    ours.fit(DATA, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


def test_the_model_is_there_between_steps() -> None:
    ours, seen = trainer(), list[Any]()
    with ours.session(DATA, num_steps=3) as run:
        for event in run:
            if event.name == "step_end":
                seen.append((float(ours.model["w"]), ours.evaluate(DATA[:1])["loss"]))
    assert seen == [(1, 1), (3, 3), (7, 7)]


def test_a_session_that_nobody_iterates_does_nothing() -> None:
    ours = trainer()
    with ours.session(DATA, num_steps=2):
        pass
    assert ours.step == 0 and ours.history == []
    ours.fit(DATA, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


def test_what_cannot_be_is_refused() -> None:
    ours = trainer()
    with pytest.raises(TypeError, match=r"got epochs\nhint: it takes num_steps"), ours.session(DATA, epochs=2):  # type: ignore[call-arg]
        pass
    with ours.session(DATA, num_steps=2) as run:
        with pytest.raises(StateError, match="fit was called while fit is running"):
            ours.fit(DATA, num_steps=2)
        with pytest.raises(StateError, match="fit was called while fit is running"), ours.session(DATA, num_steps=2):
            pass
        assert ours.step == 0
        events = list(run)
        with pytest.raises(StateError, match="iterated twice"):
            list(run)
    assert events[-1].name == "train_end" and ours.step == 2
