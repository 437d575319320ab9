"""Signals: held back while a step is sent to the device, and asked for between steps.

Between the sending of a step and the assignment of its results nobody holds a good state, so Ctrl-C and SIGTERM wait
until that moment has passed (`undisturbed`). SIGTERM ends a run after a step (`Terminated`).
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

_HELD = (signal.SIGTERM, signal.SIGINT)
"""In the order in which they are let through: an interrupt raises, and nothing comes after it."""
_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""`signal.getsignal` without its search among the names of handlers, which Python 3.11 does for functions, too."""


def _raise(number: int) -> None:
    """Let a signal do what its handler does; where that is the default one, nothing goes on after it.

    Linux drops a signal without a handler that comes to the first process of a container, as `exec lowtide` is one:
    who went on from here would end with status 0, and whatever had started it would take the run for completed.

    Raises:
        SystemExit: with the status that a shell gives a process that a signal has ended.
    """
    signal.raise_signal(number)
    if signal.getsignal(number) == signal.SIG_DFL:
        raise SystemExit(128 + number)


class _Valve:
    """A signal handler that passes signals on to the one before it, or keeps them while it is shut."""

    def __init__(self, number: int, before: Any) -> None:
        self.number, self.before, self.is_shut, self.has_come = number, before, False, False

    def shut(self) -> None:
        self.is_shut = True

    def open(self) -> None:
        self.is_shut = False

    def let_through(self) -> None:
        if self.has_come:
            self.has_come = False
            signal.raise_signal(self.number)

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_shut:
            self.has_come = True
        elif callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            _raise(number)


@contextlib.contextmanager
def valves() -> Generator[None]:
    """Make `undisturbed` cheap inside the block: handlers stay, where setting them is system calls in every step."""
    ours: dict[int, _Valve] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _HELD}
        # One that is None is not Python's.
        ours = {number: _Valve(number, handler) for number, handler in before.items() if handler is not None}
    try:
        for number, valve in ours.items():
            signal.signal(number, valve)
        yield
    finally:
        for number, valve in ours.items():
            if signal.getsignal(number) is valve:  # else somebody has set another
                signal.signal(number, valve.before)


class _Shut:
    """Keeps valves shut inside of a ``with`` block; not a generator, because every step enters one."""

    def __init__(self, valves: Sequence[_Valve]) -> None:
        self._valves = valves

    def __enter__(self) -> None:
        try:
            for valve in self._valves:
                valve.shut()
        except BaseException:  # an interrupt between two valves: nobody would open the first again
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for valve in self._valves:
            valve.open()
        for valve in self._valves:
            valve.let_through()


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Hold back Ctrl-C and SIGTERM until the block has ended; elsewhere than in the main thread they do not come."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    handlers = [_handler(number) for number in _HELD]
    shut = [handler for handler in handlers if isinstance(handler, _Valve)]
    return _Shut(shut) if len(shut) + handlers.count(None) == len(_HELD) else _shut_anew()


@contextlib.contextmanager
def _shut_anew() -> Generator[None]:
    with valves(), undisturbed():
        yield


class Ended(BaseException):
    """SIGTERM has come while data was waited for, which might never come."""


class Terminated:
    """Whether SIGTERM has come, asked for between steps; a context manager.

    The machine is about to be taken away: the loop ends at the next step, saves, and lets the signal do what it would
    have done. Processes that end together take leave of one another first, as at a normal end: JAX aborts one that
    sees the first gone, which would then say that it had failed.

    Args:
        is_alone: whether this is the only process; several have to end together.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self.has_come = False
        self._is_last, self._is_common = False, False
        self._is_alone, self._waits = is_alone, False
        self._before: Any = None

    def __enter__(self) -> Terminated:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None and self._is_common and self._before == signal.SIG_DFL:
            with contextlib.suppress(RuntimeError):  # of JAX, when another could not wait: this one ends all the same
                jax.distributed.shutdown()
        self._let_through()

    def _let_through(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
            if self.has_come:
                _raise(signal.SIGTERM)

    def come(self) -> None:
        """Note that it has come to one of the processes, which all end at this step."""
        self.has_come, self._is_common = True, not self._is_alone

    def last(self) -> None:
        """Only files are waited for from here on: a second signal ends that."""
        self._is_last = True

    def waited(self, wait: Callable[[], T]) -> T:
        """Return what a function returns that waits for data.

        Raises:
            Ended: when the signal comes meanwhile, or has come. Of several processes one cannot leave the others, so
                there a second signal ends the process.
        """
        self._waits = True
        try:
            if self.has_come and self._is_alone:
                raise Ended
            return wait()
        finally:
            self._waits = False

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Give the batches of an evaluation, each of them `waited` for."""
        iterator = self.waited(lambda: iter(data))
        nothing: Any = object()
        while (batch := self.waited(lambda: next(iterator, nothing))) is not nothing:
            yield batch

    def _note(self, *_: object) -> None:
        if (self._is_last or self._waits) and self.has_come:
            self._let_through()
        self.has_come = True
        if self._waits and self._is_alone:
            self._waits = False
            raise Ended
