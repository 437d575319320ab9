"""Signals while a step is sent, whoever has set the handlers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.train import Callback
from lowtide.train._signals import SigtermMonitor, _Delay, _Handler, delay_signals, install_handlers


class Ended(Exception):
    """What our handler of SIGTERM raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Ended

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end)
    ours = [signal.getsignal(number) for number in before]
    yield
    assert [signal.getsignal(number) for number in before] == ours
    for number, handler in before.items():
        signal.signal(number, handler)


SIGNALS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Ended)]


@pytest.mark.parametrize("has_valves", [False, True])
@pytest.mark.parametrize(("number", "raised"), SIGNALS)
def test_a_signal_waits_for_the_end_of_the_block(number: int, raised: Any, has_valves: bool) -> None:
    reached = []

    def send() -> None:
        with delay_signals():
            os.kill(os.getpid(), number)
            reached.append("end")

    with pytest.raises(raised):
        if has_valves:
            with install_handlers():
                send()
        else:
            send()
    assert reached == ["end"]


def test_outside_of_the_block_valves_let_signals_through() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), install_handlers():
        with delay_signals():
            reached.append("block")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the signal")
    assert reached == ["block"]


def test_an_interrupt_between_two_valves_opens_the_first_again() -> None:
    class Interrupted(_Handler):
        """Where an interrupt comes right before it is shut."""

        def __setattr__(self, name: str, value: Any) -> None:
            if (name, value) == ("is_delaying", True):
                os.kill(os.getpid(), signal.SIGINT)
            super().__setattr__(name, value)

    first, second = _Handler(signal.SIGTERM, None), Interrupted(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt), _Delay([first, second]):
        raise AssertionError("the block was entered")
    assert not first.is_delaying


def test_a_failure_in_the_block_opens_the_valves() -> None:
    with install_handlers():
        with pytest.raises(ValueError, match="planted"), delay_signals():
            raise ValueError("planted")
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM without a handler, as Linux drops it for the first process of a container."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raised = signal.raise_signal
    monkeypatch.setattr(
        signal, "raise_signal", lambda number: signal.getsignal(number) == signal.SIG_DFL or raised(number)
    )
    yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", [SigtermMonitor, delay_signals])
def test_nothing_goes_on_after_a_signal_that_the_system_drops(how: Any, dropped: None) -> None:
    reached = []
    with pytest.raises(SystemExit) as raised:
        with how():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("end of the block")
        reached.append("after the block")
    assert reached == ["end of the block"] and raised.value.code == 128 + signal.SIGTERM


def test_a_run_whose_signal_the_system_drops_has_saved(dropped: None, tmp_path: Path) -> None:
    made = lt.Trainer(jnp.zeros(3), lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1), checkpoint_dir=tmp_path)

    def data() -> Iterator[Any]:
        for number in range(9):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield np.ones(3, np.float32)

    with pytest.raises(SystemExit):
        made.fit(data(), num_steps=9, progress=False)
    assert made.step < 9 and (tmp_path / str(made.step)).is_dir()


def test_a_signal_that_is_ignored_ends_nothing() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with SigtermMonitor() as terminated:
        os.kill(os.getpid(), signal.SIGTERM)
    assert terminated.has_arrived and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_process_of_a_container_ends_with_the_status_of_the_signal() -> None:
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs unshare(1) and namespaces of one's own")
    code = """
import os, signal
from lowtide.train._signals import SigtermMonitor
assert os.getpid() == 1
with SigtermMonitor():
    os.kill(1, signal.SIGTERM)
print("went on")
"""
    done = subprocess.run([*apart, sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr


def test_nothing_is_set_in_other_threads() -> None:
    found: list[Any] = []

    def run() -> None:
        with install_handlers(), delay_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_run_in_another_thread_trains_and_saves(tmp_path: Path) -> None:
    """As workers of Ray do, whose main thread is Ray's."""
    made = lt.Trainer(jnp.zeros(3), lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1), checkpoint_dir=tmp_path)
    x = np.ones(3, np.float32)
    thread = threading.Thread(target=lambda: made.fit([x] * 3, num_steps=3, eval_data=[x], checkpoint_every=2))
    thread.start()
    thread.join()
    assert made.step == 3 and (tmp_path / "3").is_dir()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_signal_while_a_step_is_sent_finds_its_state_stored(replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a callback has set a handler of its own in the middle of the run."""
    trainer = lt.Trainer(jnp.zeros(3), lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1))
    x = np.ones(3, np.float32)
    trainer.fit([x] * 2, num_steps=2)
    compiled = trainer._compiled.compile(x)
    seen = []

    def interrupted(*arguments: Any) -> Any:
        result = compiled(*arguments)  # the state is consumed, and its successor stored nowhere yet
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("sent")
        return result

    class Replaces(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            if replaced:
                signal.signal(signal.SIGINT, lambda *_: signal.default_int_handler(*_))

        def on_preflight(self, trainer: Any, report: Any) -> None:
            monkeypatch.setattr(trainer._compiled, "compile", lambda batch: interrupted)
            monkeypatch.setattr(trainer._compiled, "_report", lambda compiled: report)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit([x] * 9, num_steps=9, callbacks=[Replaces()])
    assert seen == ["sent"] and trainer.step == 3
    signal.signal(signal.SIGINT, signal.default_int_handler)
