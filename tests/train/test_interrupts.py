"""What a run holds, and goes on with, when it was ended between any two lines."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, StateError
from lowtide.train import Callback, EarlyStopping, ReduceOnPlateau
from lowtide.train._signals import SigtermMonitor
from lowtide.train.checkpoint import _storage


def trainer(tx: Any = None, **options: Any) -> lt.Trainer:
    """Its weight is the sum of the batches that it was trained on."""
    loss = lambda model, batch: jnp.sum(model["w"] * batch)  # noqa: E731
    return lt.Trainer({"w": jnp.zeros(())}, loss, optax.sgd(-1.0) if tx is None else tx, **options)


class Numbers:
    """0, 1, 2, ... from an iterator that has a state; `get_state` is interrupted at its call `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.next, self.calls, self.at = 0, 0, at

    def __iter__(self) -> Numbers:
        return Numbers(self.at)

    def __next__(self) -> Any:
        self.next += 1
        return np.float32(self.next - 1)

    def get_state(self) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return {"next": self.next}

    def set_state(self, state: Any) -> None:
        self.next = state["next"]


class At(Callback):
    """Does something at an event of a step."""

    def __init__(self, step: int, do: Any, event: str = "on_step_end") -> None:
        setattr(self, event, lambda trainer, at: do(trainer) if at == step else None)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def resumed(where: Any, num_steps: int = 8, **options: Any) -> lt.Trainer:
    ours = trainer(checkpoint_dir=where)
    assert ours.restore() is not None
    ours.fit(Numbers(), num_steps=num_steps, **options)
    return ours


@pytest.mark.slow
def test_a_signal_while_a_step_is_sent_leaves_the_position_after_its_batch(tmp_path: Any, monkeypatch: Any) -> None:
    ours, calls = trainer(checkpoint_dir=tmp_path), []
    compiled = ours._compiled.compile(np.float32(0))

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        result = compiled(*arguments)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(ours._compiled, "compile", lambda batch: interrupted)
    monkeypatch.setattr(ours._compiled, "_report", lambda compiled: None)
    monkeypatch.setattr(ours._compiled, "_refuse_large", lambda report, batch: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ours.fit(Numbers(), num_steps=8, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ours.step == 4 and ours.position is not None and ours.position["in_epoch"] == 4
    assert float(resumed(tmp_path).model["w"]) == sum(range(8))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("when", ["it waits for the one before", "it has half begun"])
def test_an_interrupt_of_a_save_loses_no_checkpoint(when: str, tmp_path: Any, monkeypatch: Any) -> None:
    import orbax.checkpoint as ocp

    begin, write, is_let_go = ocp.AsyncCheckpointer.save, _storage.write_checksums, threading.Event()
    ours, is_waiting = trainer(checkpoint_dir=tmp_path), when == "it waits for the one before"

    def slow(folder: Any) -> None:
        assert not is_waiting or is_let_go.wait(20)
        write(folder)

    def half(*arguments: Any, **options: Any) -> Any:
        result = begin(*arguments, **options)
        if ours.step == 4 and not (is_waiting or is_let_go.is_set()):
            signal.raise_signal(signal.SIGINT)
        return result

    def come(*_: Any) -> None:
        """Interrupt when what was being written is there."""
        is_let_go.set()
        while not (tmp_path / ("2" if is_waiting else "4")).exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    def interrupt_soon(_: Any) -> None:
        if is_waiting:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(_storage, "write_checksums", slow)
    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", half)
    before = signal.signal(signal.SIGINT, come)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            ours.fit(Numbers(), num_steps=8, checkpoint_every=2, callbacks=[At(4, interrupt_soon)], progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ours.step == 4 and not any("failed" in note for note in raised.value.__notes__)
    assert float(resumed(tmp_path).model["w"]) == sum(range(8))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("at", range(2, 8))
def test_an_interrupt_while_the_position_is_asked_for(at: int, tmp_path: Any) -> None:
    ours = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ours.fit(Numbers(at), num_steps=8)
    assert float(resumed(tmp_path).model["w"]) == sum(range(8))


@pytest.mark.slow
@pytest.mark.parametrize(("event", "step"), [("on_step_begin", 4), ("on_step_end", 5)])
def test_a_callback_may_save(event: str, step: int, tmp_path: Any) -> None:
    class Counts(Callback):
        num_steps, resumed_at = 0, None

        def on_step_begin(self, trainer: Any, step: int) -> None:
            self.num_steps = step

        def state(self) -> Any:
            return {"num_steps": self.num_steps}

        def resume(self, state: Any) -> None:
            self.resumed_at = state["num_steps"]

    def fail(trainer: Any) -> None:
        trainer._snapshots.save = lambda metadata: False
        raise RuntimeError("as if killed")

    ours = trainer(checkpoint_dir=tmp_path)
    callbacks = [Counts(), At(step, lambda trainer: trainer.save(), event), At(6, fail)]
    with pytest.raises(RuntimeError):
        ours.fit(Numbers(), num_steps=8, callbacks=callbacks)
    again = Counts()
    assert float(resumed(tmp_path, callbacks=[again]).model["w"]) == sum(range(8))
    assert again.resumed_at == 4


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_train_end", "on_exception"])
def test_a_callback_may_save_as_the_run_ends(event: str, tmp_path: Any) -> None:
    def save(trainer: Any, *_: Any) -> None:
        trainer.update({"w": trainer.model["w"]})
        trainer.save()
        trainer.checkpoints.wait()

    ours, saves = trainer(checkpoint_dir=tmp_path), Callback()
    setattr(saves, event, save)
    with contextlib.suppress(ZeroDivisionError), ours.session(Numbers(), num_steps=8, callbacks=[saves]) as run:
        next(each for each in run if each == ("step_end", 3, None))
        if event == "on_exception":
            raise ZeroDivisionError
    assert float(resumed(tmp_path).model["w"]) == sum(range(8))


def test_who_saves_at_the_last_records_saves_nothing_that_is_spoilt(tmp_path: Any) -> None:
    """An interrupt came when two steps were sent, of which nobody had read the values."""
    data = [np.float32(value) for value in (1, 1, np.nan, 1)]
    ours = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt), ours.session(data, num_steps=4, on_record=lambda _: ours.save()) as run:
        run._session.settle = lambda keep=0: iter(())  # pyright: ignore
        next(event for event in run if event == ("step_end", 3, None))
        raise KeyboardInterrupt
    again = trainer(checkpoint_dir=tmp_path)
    again.restore()
    assert np.isfinite(again.model["w"])


@pytest.mark.slow
def test_a_state_that_is_no_number_is_not_kept(tmp_path: Any) -> None:
    """An exception comes before the record of the step is read; updates cannot be left out."""
    data = [np.float32(value) for value in (1, 1, np.nan, 1)]
    ours = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt) as raised:
        ours.fit(data, num_steps=4, checkpoint_every=1, callbacks=[At(3, interrupt)])
    assert "loss of step 3 is not finite" in raised.value.__notes__[0]
    assert ours.step == 2 and float(ours.model["w"]) == 2
    assert ours.checkpoints is not None and ours.checkpoints.latest_step() == 2
    ours = trainer(on_nan="roll_back")
    with pytest.raises(KeyboardInterrupt):
        ours.fit(data, num_steps=4, callbacks=[At(3, interrupt)])
    assert ours.step == 0 and float(ours.model["w"]) == 0


def test_a_callback_cannot_save_a_state_that_is_no_number(tmp_path: Any) -> None:
    data = [np.float32(value) for value in (1, 1, np.nan, 1)]
    ours = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning, match="step 3: loss is not finite, so the weights of step 0 were restored"):
        ours.fit(data, num_steps=4, callbacks=[At(3, lambda trainer: trainer.save())])
    assert ours.checkpoints is not None
    for step in (3, 4):
        ours.restore(step=step)
        assert np.isfinite(float(ours.model["w"]))


def test_the_records_of_an_interrupted_run_are_complete() -> None:
    told: list[int] = []
    ours, options = trainer(), {"num_steps": 6, "on_record": lambda record: told.append(record["step"])}
    with pytest.raises(KeyboardInterrupt):
        ours.fit(Numbers(), callbacks=[At(3, interrupt)], **options)
    ours.fit(Numbers(), **options)
    assert told == [1, 2, 3, 4, 5, 6]


def adjustable() -> Any:
    return optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("monitor", [ReduceOnPlateau, EarlyStopping])
def test_neither_checkpoints_nor_evaluations_nor_interrupts_change_the_training(monitor: Any, tmp_path: Any) -> None:
    data = [np.float32(value) for value in (5, 0, 3, 1) * 3]

    def run(name: str, *callbacks: Callback, **options: Any) -> Any:
        extra: Any = {"factor": 0.5} if monitor is ReduceOnPlateau else {}
        policy = monitor("loss", patience=2, min_delta=1e3, **extra)
        ours = trainer(adjustable(), checkpoint_dir=tmp_path / name)
        ours.restore()
        ours.fit(data, num_steps=12, callbacks=[policy, *callbacks], **options)
        return ours.step, float(ours.model["w"])

    whole = run("whole")
    assert run("saved", checkpoint_every=1) == whole
    assert run("evaluated", eval_every=2, eval_data=data[:1]) == whole
    for at in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(f"cut {at}", At(at, interrupt))
        assert run(f"cut {at}") == whole


class Interrupted:
    """Data for evaluation; its pass `at` (from 1) does something before its second batch."""

    def __init__(self, at: int, do: Any) -> None:
        self.passes, self.at, self.do, self.num_read = 0, at, do, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number in range(50):
            if number == 1 and self.passes == self.at:
                self.do()
            self.num_read += self.passes == self.at
            yield np.float32(1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("by", "at", "how"),
    [
        ("steps", 3, "interrupt"),
        ("steps", 3, "terminate"),
        ("epochs", 5, "interrupt"),
        ("iterated epochs", 3, "terminate"),
        ("iterated epochs", 5, "interrupt"),
    ],
)
def test_an_evaluation_that_was_left_is_made_up_for(by: str, at: int, how: str, tmp_path: Any) -> None:
    """The 1st is at step 0, the 5th at the end."""
    records: list[Any] = []

    def run(name: str, eval_data: Any) -> lt.Trainer:
        ours = trainer(adjustable(), checkpoint_dir=tmp_path / name, best="eval_loss", best_mode="max")
        ours.restore()
        batches = [np.float32(1)] * 2
        data: Any = {"steps": batches * 4, "epochs": batches}.get(by) or type(
            "D", (), {"__iter__": lambda _: iter(batches)}
        )()
        end: Any = {"num_steps": 8, "eval_every": 2} if by == "steps" else {"num_epochs": 4}
        policy = ReduceOnPlateau("eval_loss", factor=0.5, patience=0)
        on_record = lambda record: records.append((record["step"], "eval_loss" in record))  # noqa: E731
        ours.fit(data, eval_data=eval_data, callbacks=[policy], on_record=on_record, **end)
        return ours

    whole = run("whole", [np.float32(1)] * 50)
    told, calls = [*records], []
    records.clear()
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        if how == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                run("cut", Interrupted(at, interrupt))
        else:
            eval_data = Interrupted(at, lambda: os.kill(os.getpid(), signal.SIGTERM))
            run("cut", eval_data)
            assert calls and eval_data.passes == at and eval_data.num_read < 4
    finally:
        signal.signal(signal.SIGTERM, before)
    ours = run("cut", [np.float32(1)] * 50)
    assert records == told
    assert float(ours.model["w"]) == float(whole.model["w"]) and ours.step == whole.step
    assert ours.checkpoints is not None and whole.checkpoints is not None
    assert ours.checkpoints.best_step() == whole.checkpoints.best_step()


def test_every_callback_is_told_of_the_user_s_exception() -> None:
    told: list[BaseException] = []

    class Bad(Callback):
        def on_exception(self, trainer: Any, error: BaseException) -> None:
            raise ValueError("planted")

    class Good(Callback):
        def on_exception(self, trainer: Any, error: BaseException) -> None:
            told.append(error)

    def fail(ours: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        trainer().fit(Numbers(), num_steps=4, callbacks=[Bad(), At(2, fail), Good()])
    assert told == [raised.value]
    assert "lowtide: Bad.on_exception failed: ValueError: planted" in raised.value.__notes__

    def consume(ours: Any) -> None:
        ours.state.trainable["w"].delete()
        raise ZeroDivisionError

    with pytest.raises(StateError, match="there is no copy of it"):
        trainer(rollback=False).fit(Numbers(), num_steps=4, callbacks=[At(2, consume), Good()])
    assert len(told) == 2


def test_fit_within_fit_is_refused() -> None:
    ours = trainer()
    with pytest.raises(StateError, match=r"(?s)fit was called while another fit is running.*hint: call it after"):
        ours.fit(Numbers(), num_steps=4, callbacks=[At(2, lambda trainer: trainer.fit(Numbers(), num_steps=6))])
    assert len(ours.fit(Numbers(), num_steps=4)) == 2


@pytest.mark.parametrize("name", ["eval_every", "checkpoint_every"])
@pytest.mark.parametrize("every", [0, -1])
def test_a_number_of_steps_that_is_none_is_refused(name: str, every: int, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){name} must be an integer of at least 1, not {every}.*hint:"):
        trainer(checkpoint_dir=tmp_path).fit(Numbers(), num_steps=1, **{name: every})


def test_a_second_signal_does_not_wait_for_checkpoints(tmp_path: Any) -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("handled"))

    def terminate(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        ours = trainer(checkpoint_dir=tmp_path)
        assert ours.checkpoints is not None
        wait = ours.checkpoints.wait

        def slow() -> None:
            calls.append("waiting")
            terminate()
            calls.append("waited")
            wait()

        ours.checkpoints.wait = slow  # pyright: ignore
        ours.fit(Numbers(), num_steps=8, callbacks=[At(3, terminate)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ours.step == 3 and calls[:3] == ["waiting", "handled", "waited"]


class Hangs:
    """Batches, of which one never comes: a signal does."""

    def __init__(self, at: int) -> None:
        self.at, self.given = at, 0

    def __iter__(self) -> Hangs:
        return self

    def __next__(self) -> Any:
        if self.given == self.at:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            threading.Event().wait(60)
            raise AssertionError("nothing ended the wait")
        self.given += 1
        return np.float32(1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("where", ["data", "evaluation"])
def test_a_signal_ends_a_wait_for_data(where: str, tmp_path: Any) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    ours = trainer(checkpoint_dir=tmp_path)
    try:
        if where == "data":
            ours.fit(Hangs(2), num_steps=8, progress=False)
        else:
            ours.fit([np.float32(1)] * 8, num_steps=8, eval_data=Hangs(4), eval_every=2, progress=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [1] and ours.checkpoints is not None
    if where == "data":
        assert ours.step == ours.checkpoints.latest_step() == 2
        assert ours.position is not None and ours.position["in_epoch"] == 2
    else:
        assert ours.step == 0


def test_of_several_processes_a_second_signal_ends_a_wait(monkeypatch: Any) -> None:
    """One of them cannot leave the others at the first."""
    calls: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("handled"))

    def wait() -> str:
        for _ in range(2):
            calls.append("sent")
            signal.raise_signal(signal.SIGTERM)
        return "done"

    try:
        with SigtermMonitor(is_alone=False) as terminated:
            assert terminated.wait_for_data(wait) == "done" and terminated.has_arrived
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == ["sent", "sent", "handled"]
