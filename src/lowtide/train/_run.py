"""A run as the user iterates it: each event goes to the callbacks first, then to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict

from ..core import StateError, Tree
from ._callbacks import Callback, Listeners
from ._events import Event, Record
from ._session import Session


class FitOptions(TypedDict, total=False):
    """Optional arguments of `Trainer.fit` in addition to the data; its docstring explains them."""

    num_steps: int | None
    num_epochs: int | None
    eval_data: Iterable[Tree] | None
    eval_every: int | None
    checkpoint_every: int | None
    callbacks: Sequence[Callback]
    on_record: Callable[[Record], None] | None
    progress: bool


def refuse_unknown(options: FitOptions) -> None:
    """Raise for options that `Trainer.fit` does not take."""
    if unknown := sorted(options.keys() - FitOptions.__annotations__.keys()):
        raise TypeError(
            f"Trainer.session got {', '.join(unknown)}\n"
            f"hint: like fit, it takes {', '.join(FitOptions.__annotations__)}"
        )


class Run:
    """A run in a loop of your own, made by `Trainer.session`; iterate it once.

    Args:
        session: yields the events.
        listeners: the callbacks, which receive each event first.
    """

    def __init__(self, session: Session, listeners: Listeners) -> None:
        self._session, self._listeners = session, listeners
        self._is_started, self._is_closed = False, False
        self._undelivered = list[Event]()  # events that the callbacks have received, and the loop has not

    @property
    def records(self) -> list[Record]:
        """Values of steps and evaluations so far, as `Trainer.fit` returns them."""
        return self._session.records

    def stop(self) -> None:
        """End after the current step, as if it were the last one: with an evaluation and a checkpoint.

        Raises:
            StateError: outside of its ``with`` block.
        """
        self._refuse_closed("stopped")
        self._session.stop()

    def settle(self) -> None:
        """Read the values of all steps so far; callbacks receive their events now, the loop afterwards.

        Raises:
            StateError: outside of its ``with`` block.
            NonFiniteError: for a loss that is not finite, depending on `on_nan`.
        """
        self._refuse_closed("settled")
        self._listeners.flush()
        for event in self._session.settle():
            self._undelivered.append(event)
            self._listeners.notify(event)

    def close(self) -> None:
        """Close the run: it yields no further event, because its state is no longer protected."""
        self._is_closed = True

    def __iter__(self) -> Iterator[Event]:
        """Train, and yield the events in order; raise `StateError` outside of the ``with`` block or a second time."""
        if self._is_started:
            raise StateError(
                "a run was iterated twice",
                expected="one loop for each trainer.session(...)",
                hint="leave the with block, and start another session: it continues where this one ends",
            )
        self._refuse_closed()
        self._is_started = True
        for event in self._session:
            self._listeners.notify(event)
            yield event
            self._refuse_closed()
            while self._undelivered:
                yield self._undelivered.pop(0)
                self._refuse_closed()

    def _refuse_closed(self, action: str = "iterated") -> None:
        if self._is_closed:
            raise StateError(
                f"a run was {action} outside of its with block",
                expected="for event in run: inside of with trainer.session(...) as run:",
                hint="start another session: it continues where this one ended",
            )
