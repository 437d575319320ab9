"""`Trainer.session`: a run in a loop of the user's own; and the session alone, as an iterator of events."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import LowtideError, NonFiniteError, StateError, StructureError
from lowtide.train import Callback, Event
from lowtide.train._callbacks import Listeners
from lowtide.train._data import DataCursor
from lowtide.train._loop import Session
from lowtide.train._nan_policy import NonFinitePolicy

DATA = [np.float32(value) for value in (1, 2, 4, 8)]


def trainer(**options: Any) -> lt.Trainer:
    """Its weight is the sum of the batches that it was trained on."""
    return lt.Trainer({"w": jnp.zeros(())}, lambda model, x: jnp.sum(model["w"] * x), optax.sgd(-1.0), **options)


def taken(ours: lt.Trainer, data: Any = DATA, **options: Any) -> list[Event]:
    with ours.session(data, num_steps=4, **options) as run:
        return list(run)


@pytest.mark.slow
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
    assert ours.step == 2 and ours.is_stopped
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
    ours, counts = trainer(), Counting()
    with (
        pytest.raises(NonFiniteError),
        ours.session([DATA[0], np.float32(np.nan)], num_steps=2, callbacks=[counts]) as run,
    ):
        for event in run:
            if event == ("step_end", 2, None):
                break
    assert float(ours.model["w"]) == DATA[0] and counts.steps == [1, 2]


@pytest.mark.filterwarnings("ignore:step .* is not finite, so the weights")
@pytest.mark.parametrize(("on_nan", "numbers"), [("abort", 1), ("roll_back", 9)])
def test_so_does_leaving_it_at_the_record_of_that_loss(on_nan: Any, numbers: int) -> None:
    ours, data = trainer(on_nan=on_nan), [DATA[0], *[np.float32(np.nan)] * numbers]
    with pytest.raises(NonFiniteError), ours.session(data, num_steps=len(data)) as run:
        for event in run:
            if event.name == "record" and event.error is not None:
                break
    assert np.isfinite(ours.model["w"])


def test_a_loop_may_go_on_after_what_it_has_caught() -> None:
    ours = trainer()
    with ours.session([DATA[0], np.float32(np.nan)], num_steps=2) as run:
        with pytest.raises(NonFiniteError):
            list(run)
    assert ours.step == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the loop", "a callback"])
def test_a_loop_hears_of_what_saving_has_read(by: str, tmp_path: Any) -> None:
    ours, heard = trainer(checkpoint_dir=tmp_path), list[Any]()

    class Saving(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.save()

    with ours.session(DATA, num_steps=4, callbacks=[Saving()] if by == "a callback" else []) as run:
        for event in run:
            if event.name == "step_end" and by == "the loop":
                ours.save()
            if event.name in ("step_end", "record"):
                heard.append((event.name, event.value if event.name == "step_end" else event.value["step"]))
    assert heard == [(name, step) for step in (1, 2, 3, 4) for name in ("step_end", "record")]


def test_a_run_gives_nothing_outside_of_its_block() -> None:
    ours = trainer()
    with ours.session(DATA, num_steps=4) as run:
        pass
    with pytest.raises(StateError, match="outside of its with block"):
        next(iter(run))
    with ours.session(DATA, num_steps=4) as run:
        begun = iter(run)
        while next(begun).name != "step_end":
            pass
    with pytest.raises(StateError, match="outside of its with block"):
        next(begun)
    ours.fit(DATA, num_steps=4, progress=False)
    assert ours.step == 4 and float(ours.model["w"]) == sum(DATA)


@pytest.mark.filterwarnings("ignore:the data has no state")
def test_an_interrupt_while_a_run_is_left_loses_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def __iter__(self) -> Any:
            return iter(DATA)

    ours, data, leave, calls = trainer(), Loader(), Session._store_position, list[int]()  # pyright: ignore

    def interrupted(self: Any, error: Any = None) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(self, error)

    ours.fit(data, num_steps=1, progress=False)
    monkeypatch.setattr(Session, "_store_position", interrupted)
    with pytest.raises(KeyboardInterrupt), ours.session(data, num_steps=4) as run:
        for event in run:
            if event == ("step_end", 3, None):
                break
    ours.fit(data, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


def test_an_interrupt_before_a_run_is_put_away_leaves_a_trainer_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trainer()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ours, "_finish_run", interrupt)
        ours.fit(DATA, num_steps=2, progress=False)
    assert ours.advance(DATA[2]) is not None and not ours.is_stopped
    ours.fit(DATA, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_whether_it_is_stopped_is_read_only() -> None:
    with pytest.raises(AttributeError):
        trainer().is_stopped = True  # pyright: ignore


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
    with pytest.raises(TypeError, match=r"got epochs\nhint: like fit, it takes"), ours.session(DATA, epochs=2):  # type: ignore[call-arg]
        pass
    with ours.session(DATA, num_steps=2) as run:
        with pytest.raises(StateError, match="fit was called while another fit is running"):
            ours.fit(DATA, num_steps=2)
        with pytest.raises(StateError, match="called while another fit is running"), ours.session(DATA, num_steps=2):
            pass
        assert ours.step == 0
        events = list(run)
        with pytest.raises(StateError, match="iterated twice"):
            list(run)
    assert events[-1].name == "train_end" and ours.step == 2


def test_a_callback_of_another_library_is_said_where_it_is_passed() -> None:
    class Foreign(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            """The word of Keras."""

    ours, callbacks = trainer(), [Foreign()]
    with pytest.warns(UserWarning, match="did you mean on_step_end") as warned:
        ours.fit(DATA, num_steps=1, callbacks=callbacks, progress=False)
        with ours.session(DATA, num_steps=2, callbacks=callbacks):
            pass
        ours.evaluate(DATA, callbacks=callbacks)
    assert [warning.filename for warning in warned] == [__file__] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lt.train.EarlyStopping("loss", patience=float("nan")), "and min_delta must be numbers >= 0"),  # type: ignore
        (lambda: lt.train.EarlyStopping("loss", patience="3"), "and min_delta must be numbers >= 0"),  # type: ignore
        (lambda: lt.train.EarlyStopping("loss", min_delta=float("nan")), "and min_delta must be numbers >= 0"),
        (lambda: lt.train.array_data({"x": np.ones((4, 2))}, 2.5), "from 1 to 4, not 2.5"),  # type: ignore
        (lambda: lt.train.array_data({"x": np.ones((4, 2))}, True), "from 1 to 4, not True"),
        (lambda: trainer(weight=0), "weight must be a function"),
        (lambda: trainer(weight="mask"), "weight must be a function"),
        *((lambda v=v: lt.train.ReduceOnPlateau(cooldown=v), "cooldown must be") for v in (1.5, float("nan"), "x")),
        *((lambda v=v: lt.train.ReduceOnPlateau(minimum=v), "minimum at least 0, not") for v in (float("nan"), "0")),
        (lambda: lt.train.ReduceOnPlateau(factor="x"), "factor must be between 0 and 1, .* not 'x'"),
        (lambda: lt.train.EarlyStopping(patience=True), "patience and min_delta must be"),
        *((lambda v=v: lt.train.Profile("x", first=v), "first must be an integer") for v in (float("nan"), "1")),
        (lambda: lt.train.EarlyStopping(3), "monitor must be the name of a value"),  # type: ignore
        *((lambda v=v: trainer(checkpoint_dir=v), "checkpoint_dir must be a path or None") for v in ("", False, 0)),
        (lambda: trainer(rollback="no"), "rollback must be True or False"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(LowtideError, match=message):
        make()


class Counting(Callback):
    """Counts records, and keeps the number in checkpoints."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ends = 0

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def resume(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_begin(self, trainer: Any) -> None:
        self.steps = []

    def on_record(self, trainer: Any, record: Any) -> None:
        self.steps.append(record["step"])

    def on_train_end(self, trainer: Any) -> None:
        self.ends += 1


class SavesAtRecords(Callback):
    def on_record(self, trainer: Any, record: Any) -> None:
        trainer.save()


def test_steps_inside_of_averaged_are_refused_and_lose_nothing() -> None:
    ours = lt.Trainer(
        {"w": jnp.zeros((), jnp.bfloat16)}, lambda m, x: jnp.sum(m["w"] * x), lt.train.ema(optax.sgd(-1.0), decay=0.5)
    )
    data = [jnp.bfloat16(value) for value in (1, 2, 4, 8)]
    ours.fit(data, num_steps=2, progress=False)
    with pytest.raises(StateError, match="inside of averaged"), ours.session(data, num_steps=4) as run:
        with ours.averaged():
            list(run)
    assert (ours.step, float(ours.model["w"])) == (2, 3.0)
    ours.fit(data, num_steps=4, progress=False)
    assert float(ours.model["w"]) == 15.0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("how", ["not iterated", "left at its beginning", "failed at its beginning"])
def test_a_run_that_has_resumed_nobody_leaves_what_was_restored(how: str, tmp_path: Any) -> None:
    trainer(checkpoint_dir=tmp_path).fit(DATA, num_steps=2, callbacks=[Counting()], progress=False)
    ours, after = trainer(checkpoint_dir=tmp_path), Counting()
    assert ours.restore() == 2

    class Fails(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            raise OSError("no space")

    callbacks = [Counting(), *([Fails()] if "failed" in how else [])]
    with contextlib.suppress(OSError), ours.session(DATA, num_steps=4, callbacks=callbacks) as run:
        if how != "not iterated":
            next(iter(run))
    ours.fit(DATA, num_steps=4, callbacks=[after], progress=False)
    assert after.steps == [1, 2, 3, 4]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("order", [(SavesAtRecords, Counting), (Counting, SavesAtRecords)])
def test_who_saves_at_a_record_disturbs_no_order_and_saves_what_others_count(order: Any, tmp_path: Any) -> None:
    callbacks = [kind() for kind in order]
    taken(trainer(checkpoint_dir=tmp_path), callbacks=callbacks, eval_data=DATA[:1])
    counts = next(callback for callback in callbacks if isinstance(callback, Counting))
    assert counts.steps == [0, 1, 2, 3, 4, 4]
    resumed, again = trainer(checkpoint_dir=tmp_path), Counting()
    assert resumed.restore() == 4
    resumed.fit([*DATA, DATA[0]], num_steps=5, callbacks=[again], eval_data=DATA[:1], progress=False)
    assert again.steps == [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.mark.slow
def test_a_callback_that_fails_changes_neither_the_order_of_the_others_nor_what_is_saved_of_them(tmp_path: Any) -> None:
    class Fails(Callback):
        def on_record(self, trainer: Any, record: Any) -> None:
            if record["step"] == 3:
                raise ZeroDivisionError

    ours, counts, again = trainer(checkpoint_dir=tmp_path), Counting(), Counting()
    with pytest.raises(ZeroDivisionError):
        ours.fit(DATA, num_steps=4, callbacks=[Fails(), SavesAtRecords(), counts], progress=False)
    assert counts.steps == [1, 2, 3, 4]
    resumed = trainer(checkpoint_dir=tmp_path)
    assert resumed.restore() == 4
    resumed.fit([*DATA, DATA[0]], num_steps=5, callbacks=[again], progress=False)
    assert again.steps == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_callbacks_hear_the_end_of_a_run_that_is_left() -> None:
    ours, counts = trainer(), Counting()
    with ours.session(DATA, num_steps=4, callbacks=[counts]) as run:
        next(event for event in run if event.name == "step_end")
    assert (counts.steps, counts.ends) == ([1], 1)
    with ours.session(DATA, num_steps=4, callbacks=[counts]):
        pass
    assert counts.ends == 1  # nothing had begun


@pytest.mark.slow
def test_the_best_evaluation_is_saved_where_the_loop_is_left_at_it(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path, best="eval_loss", best_mode="max")
    with ours.session(DATA, num_steps=4, eval_data=DATA[:1], eval_every=1) as run:
        for event in run:
            if event.name == "record" and "eval_loss" in event.value and event.value["step"] == 3:
                break
    assert ours.checkpoints is not None
    ours.checkpoints.wait()
    assert ours.checkpoints.best_step() == ours.checkpoints.latest_step() == 3


@pytest.mark.slow
def test_the_end_of_an_epoch_is_evaluated_once_over_two_runs(tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path / "run")
    first = ours.fit(DATA, num_steps=4, eval_data=DATA[:1], progress=False)
    shutil.copytree(tmp_path / "run", copied := tmp_path / "copied")
    again = trainer(checkpoint_dir=copied)
    again.restore()
    for resumed in (again, ours):
        records = [*first, *resumed.fit(DATA, num_epochs=2, eval_data=DATA[:1], progress=False)]
        assert evaluated(records) == [0, 4, 8]


def evaluated(records: Any) -> list[int]:
    return [record["step"] for record in records if "eval_loss" in record]


def test_what_was_not_evaluated_yet_is() -> None:
    ours, options, after = trainer(), {"eval_data": DATA[:1], "progress": False}, Counting()
    for _ in range(2):
        ours.step = 0
        assert evaluated(ours.fit(DATA, num_steps=2, **options)) == [0, 2]
    ours = trainer()
    ours.fit(DATA, num_steps=4, **options)
    ours.update({"w": jnp.ones(())})
    assert evaluated(ours.fit(DATA, num_epochs=2, **options)) == [4, 8]
    assert evaluated(ours.fit(DATA, num_epochs=3, **options)) == [12]
    ours = trainer()
    for _ in range(2):
        assert evaluated(ours.fit(DATA, num_steps=0, **options)) == [0]
        ours.update({"w": jnp.ones(())})
    with ours.session(DATA, num_steps=2, eval_data=DATA[:1]) as run:
        next(event for event in run if event.name == "record")
    ours.fit(DATA, num_steps=2, callbacks=[after], **options)
    assert after.steps == [0, 1, 2, 2]


def test_a_run_that_was_left_is_neither_stopped_nor_settled() -> None:
    ours = trainer()
    with ours.session(DATA, num_steps=4) as run:
        pass
    ours.stop()
    assert not ours.is_stopped
    with pytest.raises(StateError, match="a run was stopped outside of its with block"):
        run.stop()
    with pytest.raises(StateError, match="a run was settled outside of its with block"):
        run.settle()


def test_a_run_without_a_step_warns_where_it_is_iterated() -> None:
    ours = trainer()
    ours.fit(DATA, num_steps=2, progress=False)
    with pytest.warns(UserWarning, match="fit took no step") as seen:
        with ours.session(DATA, num_steps=2) as run:
            list(run)
        ours.fit(DATA, num_steps=2, progress=False)
    assert [warning.filename for warning in seen] == [__file__] * 2


def test_a_state_that_is_none_of_this_trainer_is_refused() -> None:
    ours = trainer()
    for wrong in ({}, None, dataclasses.replace(ours.state, trainable={"w": jnp.zeros(2)})):
        with pytest.raises(StructureError, match="(?s)state .*hint:"):
            ours.state = wrong
    consumed = dataclasses.replace(ours.state, trainable={"w": jnp.zeros(())})
    consumed.trainable["w"].delete()
    with pytest.raises(StateError, match="was consumed"):
        ours.state = consumed
    ours.fit(DATA, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


def test_weights_that_were_consumed_do_not_replace_good_ones() -> None:
    initial = {"w": jnp.zeros(())}
    ours = lt.Trainer(initial, lambda model, x: jnp.sum(model["w"] * x), optax.sgd(-1.0))
    ours.fit(DATA, num_steps=2, progress=False)
    with pytest.raises(StateError, match="was consumed"):
        ours.update(initial)
    ours.fit(DATA, num_steps=4, progress=False)
    assert float(ours.model["w"]) == sum(DATA)


# --- the session alone ------------------------------------------------------------------------------------------------


def session(ours: Any, data: Any = DATA, num_steps: int = 4, listeners: Any = None, **options: Any) -> Session:
    return Session(
        store=ours._store,
        compiled=ours._compiled,
        snapshots=ours._snapshots,
        processes=ours.processes,
        nan_policy=NonFinitePolicy(ours._store, ours._snapshots, ours.on_nan, is_guarded=ours.is_guarded),
        evaluation=ours._evaluation,
        listeners=listeners or Listeners(ours, ()),
        cursor=DataCursor(data, num_steps, None),
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
    run = session(ours, listeners=types.SimpleNamespace(notify=told.append, is_immediate=False, states=dict))
    with pytest.raises(ZeroDivisionError) as raised, run.running():
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
