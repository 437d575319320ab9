"""Signal handling: signals are delayed while a step is dispatched, and checked between steps.

Between the dispatch of a step and the assignment of its results, no variable holds a valid state. So Ctrl-C and SIGTERM
are delayed until the assignment (`delay_signals`). SIGTERM ends a run after a step (`SigtermMonitor`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals in the order of their delivery: SIGINT raises, so it has to be last."""
_get_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""`signal.getsignal` without its conversion to an enum member, which Python 3.11 tries even for functions."""


def _deliver_signal(number: int) -> None:
    """Deliver a signal to its handler; if the default handler does not end the process, exit with 128 + `number`."""
    signal.raise_signal(number)
    # Linux drops a signal without a handler if it is sent to the first process of a container (`exec lowtide`).
    # The process would then end with status 0, and its supervisor would treat the run as completed.
    if signal.getsignal(number) == signal.SIG_DFL:
        raise SystemExit(128 + number)


class _Handler:
    """A signal handler that forwards signals to the previous handler, but delays them after `start_delay`.

    Mutable: it stores whether it delays, and whether a signal has arrived during the delay.
    """

    def __init__(self, number: int, previous: Any) -> None:
        self.number, self.previous, self.is_delaying, self.has_arrived = number, previous, False, False

    def start_delay(self) -> None:
        self.is_delaying = True

    def stop_delay(self) -> None:
        self.is_delaying = False

    def deliver(self) -> None:
        if self.has_arrived:
            self.has_arrived = False
            signal.raise_signal(self.number)

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_delaying:
            self.has_arrived = True
        elif callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            _deliver_signal(number)


@contextlib.contextmanager
def install_handlers() -> Generator[None]:
    """Install handlers once for the block, so that `delay_signals` needs no system calls in each step."""
    handlers: dict[int, _Handler] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        # getsignal returns None for a handler that was not installed from Python; it stays.
        handlers = {number: _Handler(number, handler) for number, handler in previous.items() if handler is not None}
    try:
        for number, installed in handlers.items():
            signal.signal(number, installed)
        yield
    finally:
        for number, installed in handlers.items():
            if signal.getsignal(number) is installed:  # else other code has installed its own handler
                signal.signal(number, installed.previous)


class _Delay:
    """Context manager that delays signals; a class is faster than a generator, and every step enters it."""

    def __init__(self, handlers: Sequence[_Handler]) -> None:
        self._handlers = handlers

    def __enter__(self) -> None:
        try:
            for handler in self._handlers:
                handler.start_delay()
        except BaseException:  # interrupted between two handlers: nothing else would end the delay of the first
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.stop_delay()
        for handler in self._handlers:
            handler.deliver()


def delay_signals() -> contextlib.AbstractContextManager[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block; threads other than the main thread never receive them."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    handlers = [_get_handler(number) for number in _SIGNALS]
    delayable = [handler for handler in handlers if isinstance(handler, _Handler)]
    return _Delay(delayable) if len(delayable) + handlers.count(None) == len(_SIGNALS) else _install_and_delay()


@contextlib.contextmanager
def _install_and_delay() -> Generator[None]:
    with install_handlers(), delay_signals():
        yield


class TerminationRequested(BaseException):
    """Raised when SIGTERM arrives during the wait for data, which might never end."""


class SigtermMonitor:
    """Context manager that records whether SIGTERM has arrived, and delivers it to the previous handler on exit.

    Mutable: the signal and the stages of a run change it.

    Several processes that end together (`is_alone=False`) first call `jax.distributed.shutdown`, as at a normal end.
    Without this call, JAX would abort the other processes when the first one ends, and they would report a failure.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self.has_arrived = False
        self._is_final_wait, self._is_joint = False, False
        self._is_alone, self._is_waiting = is_alone, False
        self._previous: Any = None

    def __enter__(self) -> SigtermMonitor:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous is not None:
                signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None and self._is_joint and self._previous == signal.SIG_DFL:
            with contextlib.suppress(RuntimeError):  # JAX raises when another process has gone; this one ends anyway
                jax.distributed.shutdown()
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
            if self.has_arrived:
                _deliver_signal(signal.SIGTERM)

    def mark_arrived(self) -> None:
        """Record that the signal has arrived in this or another process; all processes end at this step."""
        self.has_arrived, self._is_joint = True, not self._is_alone

    def begin_final_wait(self) -> None:
        """Record that the run now only waits for its checkpoint files, so that a second signal ends the process."""
        self._is_final_wait = True

    def wait_for_data(self, wait: Callable[[], T]) -> T:
        """Call `wait` to wait for data; a single process raises `TerminationRequested` once the signal has arrived."""
        # With several processes, nothing is raised, because one cannot leave the others. A second signal ends it.
        self._is_waiting = True
        try:
            if self.has_arrived and self._is_alone:
                raise TerminationRequested
            return wait()
        finally:
            self._is_waiting = False

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Yield the batches of an evaluation; each is read in `wait_for_data`."""
        iterator = self.wait_for_data(lambda: iter(data))
        sentinel: Any = object()
        while (batch := self.wait_for_data(lambda: next(iterator, sentinel))) is not sentinel:
            yield batch

    def _on_signal(self, *_: object) -> None:
        if (self._is_final_wait or self._is_waiting) and self.has_arrived:
            self._restore_handler()
        self.has_arrived = True
        if self._is_waiting and self._is_alone:
            self._is_waiting = False
            raise TerminationRequested
