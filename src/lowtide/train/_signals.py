"""Signal handling: signals are delayed while a step is dispatched, and checked between steps.

Between the dispatch of a step and the assignment of its results, no variable holds a valid state. So Ctrl-C and SIGTERM
wait until that moment has passed (`undisturbed`). SIGTERM ends a run after a step (`Terminated`).
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
"""Signals in the order of their delivery: SIGINT raises, so it has to be last."""
_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""`signal.getsignal` without its conversion to an enum member, which Python 3.11 tries even for functions."""


def _raise(number: int) -> None:
    """Deliver a signal to its handler; if that is the default handler and returns, exit.

    Linux drops a signal without a handler that is sent to the first process of a container, such as `exec lowtide`. The
    process would then end with status 0, and its supervisor would treat the run as completed.

    Raises:
        SystemExit: with the status that a shell reports for a process ended by the signal.
    """
    signal.raise_signal(number)
    if signal.getsignal(number) == signal.SIG_DFL:
        raise SystemExit(128 + number)


class _Valve:
    """A signal handler that forwards signals to the previous handler, or delays them while it is shut."""

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
    """Install handlers once for the block, so that `undisturbed` needs no system calls in each step."""
    ours: dict[int, _Valve] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _HELD}
        # getsignal returns None for a handler that was not installed from Python; it stays.
        ours = {number: _Valve(number, handler) for number, handler in before.items() if handler is not None}
    try:
        for number, valve in ours.items():
            signal.signal(number, valve)
        yield
    finally:
        for number, valve in ours.items():
            if signal.getsignal(number) is valve:  # else other code has installed its own handler
                signal.signal(number, valve.before)


class _Shut:
    """Context manager that shuts valves; a class rather than a generator, because every step enters it."""

    def __init__(self, valves: Sequence[_Valve]) -> None:
        self._valves = valves

    def __enter__(self) -> None:
        try:
            for valve in self._valves:
                valve.shut()
        except BaseException:  # interrupted between two valves: nothing else would open the first one again
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for valve in self._valves:
            valve.open()
        for valve in self._valves:
            valve.let_through()


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block; in other threads than the main one they never arrive."""
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
    """Raised when SIGTERM arrives during the wait for data, which might never end."""


class Terminated:
    """Context manager that records whether SIGTERM has arrived, for a check between steps.

    The machine is about to be taken away. So the loop ends at the next step, saves, and then delivers the signal to the
    previous handler. Processes that end together first call `jax.distributed.shutdown`, as at a normal end. Otherwise
    JAX would abort a process that sees the first one gone, and that process would report a failure.

    Args:
        is_alone: whether this is the only process; several processes have to end together.
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
            with contextlib.suppress(RuntimeError):  # JAX raises when another process has gone; this one ends anyway
                jax.distributed.shutdown()
        self._let_through()

    def _let_through(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
            if self.has_come:
                _raise(signal.SIGTERM)

    def come(self) -> None:
        """Record that the signal has arrived in any process; all processes end at this step."""
        self.has_come, self._is_common = True, not self._is_alone

    def last(self) -> None:
        """Record that the run only waits for files from now on, so that a second signal ends it."""
        self._is_last = True

    def waited(self, wait: Callable[[], T]) -> T:
        """Call a function that waits for data, and return its result.

        Raises:
            Ended: if the signal arrives meanwhile, or has arrived before. With several processes it does not raise,
                because one process cannot leave the others; there a second signal ends the process.
        """
        self._waits = True
        try:
            if self.has_come and self._is_alone:
                raise Ended
            return wait()
        finally:
            self._waits = False

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Yield the batches of an evaluation; each read is `waited`."""
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
