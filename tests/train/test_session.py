"""A run as an iterator: what it yields in which order, and what is left when somebody else than `fit` drives it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.train._data import DataCursor
from lowtide.train._events import Event
from lowtide.train._loop import Session
from lowtide.train._nan_policy import NonFinitePolicy

DATA = [np.float32(value) for value in (1, 2, 4, 8)]


def trainer(**options: Any) -> lt.Trainer:
    """Its weight is the sum of the batches that it was trained on."""
    return lt.Trainer({"w": jnp.zeros(())}, lambda model, x: jnp.sum(model["w"] * x), optax.sgd(-1.0), **options)


def session(ours: Any, data: Any = DATA, num_steps: int = 4, **options: Any) -> Session:
    return Session(
        store=ours._store,
        compiled=ours._compiled,
        snapshots=ours._snapshots,
        processes=ours.processes,
        nan_policy=NonFinitePolicy(ours._store, ours._snapshots, ours.on_nan, is_guarded=ours.is_guarded),
        cursor=DataCursor(data, num_steps, None),
        evaluate=ours.evaluate,
        save=ours.save,
        **options,
    )


def drive(run: Session) -> list[Event]:
    with run.running():
        return list(run)


def test_what_happens_comes_in_order(tmp_path: Any) -> None:
    run = session(trainer(checkpoint_dir=tmp_path), num_steps=2, eval_data=DATA[:1])
    events = drive(run)
    evaluated, step = ["evaluate_begin", "evaluate_end", "record"], ["step_begin", "step_end"]
    assert [event.name for event in events] == [
        *["train_begin", "resume", *evaluated, "epoch_begin"],
        *["step_begin", "preflight", "step_end", "step_begin", "record", "step_end", "record"],
        *[*evaluated, "checkpoint", "train_end"],
    ]
    assert [event.value for event in events if event.name in step] == [0, 1, 1, 2]
    assert [event.value for event in events if event.name == "record"] == run.records
    assert [record["step"] for record in run.records] == [0, 1, 2, 2]


def test_what_is_raised_by_who_drives_it_leaves_a_good_state() -> None:
    ours, told = trainer(), list[Event]()
    run = session(ours)
    with pytest.raises(ZeroDivisionError) as raised, run.running(told.append):
        for event in run:
            if event == ("step_end", 3, None):
                raise ZeroDivisionError
    assert [event.name for event in told] == ["record", "exception"]
    assert all(event.error is raised.value for event in told)
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    assert run.is_over and ours.step == 3 and float(ours.model["w"]) == 7
    ours.fit(DATA, num_steps=4)
    assert float(ours.model["w"]) == sum(DATA)


def test_a_run_that_is_left_goes_on_in_another_one() -> None:
    ours, live = trainer(), iter(DATA)
    first = session(ours, live)
    with first.running():
        for event in first:
            if event.name == "step_end" and event.value == 2:
                break
    assert first.is_over and ours.step == 2
    events = drive(session(ours, live, previous=first.final_cursor))
    assert [event.value for event in events if event.name == "step_end"] == [3, 4]
    assert float(ours.model["w"]) == sum(DATA)


def test_a_roll_back_is_said_before_the_record_of_the_step() -> None:
    data = [DATA[0], np.float32(np.nan), *DATA[2:]]
    with pytest.warns(UserWarning, match="step 2: loss is not finite, so the weights of step 0 were restored"):
        events = drive(session(trainer(on_nan="roll_back"), data))
    names = [event.name for event in events]
    at = names.index("rollback")
    assert events[at].value == 0 and names[at + 1] == "record" and events[at + 1].value["step"] == 2


def test_stop_ends_it_after_the_step() -> None:
    ours = trainer()
    run = session(ours)
    with run.running():
        for event in run:
            if event.name == "step_begin":
                run.stop()
    assert ours.step == 1 and run.records[-1]["step"] == 1
