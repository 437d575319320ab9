"""A run for who drives it: callbacks hear of what happens first, then the loop that iterates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypedDict

from ..core import StateError, Tree
from ._callbacks import Callback, Listeners
from ._events import Event, Record
from ._session import Session


class FitOptions(TypedDict, total=False):
    """What `Trainer.fit` takes beside the data, all of it optional; its docstring explains them."""

    num_steps: int | None
    num_epochs: int | None
    eval_data: Iterable[Tree] | None
    eval_every: int | None
    checkpoint_every: int | None
    callbacks: Sequence[Callback]
    on_record: Callable[[Record], None] | None
    progress: bool


def refuse_unknown(options: FitOptions) -> None:
    """Raise for what `Trainer.fit` does not take."""
    if unknown := sorted(options.keys() - FitOptions.__annotations__.keys()):
        raise TypeError(
            f"Trainer.session got {', '.join(unknown)}\nhint: it takes {', '.join(FitOptions.__annotations__)}, as fit"
        )


class Run:
    """A run in a loop of your own, made by `Trainer.session`; iterate it once.

    Args:
        session: what happens.
        listeners: who hears of it first.
    """

    def __init__(self, session: Session, listeners: Listeners) -> None:
        self._session, self._listeners = session, listeners
        self._is_begun, self._is_closed = False, False
        self._told = list[Event]()  # of which callbacks have heard, and the loop has not

    @property
    def records(self) -> list[Record]:
        """The values of steps and evaluations so far, as `Trainer.fit` returns them."""
        return self._session.records

    def stop(self) -> None:
        """End after the step that is running, as if its last one had come: evaluated and saved.

        Raises:
            StateError: outside of its ``with`` block.
        """
        self._refuse_closed("stopped")
        self._session.stop()

    def settle(self) -> None:
        """Read the values of all steps so far; callbacks hear of them now, the loop of them next.

        Raises:
            StateError: outside of its ``with`` block.
            NonFiniteError: for a loss that is no number, as `on_nan` says.
        """
        self._refuse_closed("settled")
        self._listeners.finish()
        for event in self._session.settle():
            self._told.append(event)
            self._listeners.tell(event)

    def close(self) -> None:
        """End it: nobody keeps a good state any more, so it gives no further event."""
        self._is_closed = True

    def __iter__(self) -> Iterator[Event]:
        """Train, and give what happens in its order.

        Raises:
            StateError: when it was iterated before, or outside of its ``with`` block.
            Exception: what `Trainer.fit` raises.
        """
        if self._is_begun:
            raise StateError(
                "a run was iterated twice",
                expected="one loop for each trainer.session(...)",
                hint="leave the with block, and begin another session: it goes on where this one is",
            )
        self._refuse_closed()
        self._is_begun = True
        for event in self._session:
            self._listeners.tell(event)
            yield event
            self._refuse_closed()
            while self._told:
                yield self._told.pop(0)
                self._refuse_closed()

    def _refuse_closed(self, what: str = "iterated") -> None:
        if self._is_closed:
            raise StateError(
                f"a run was {what} outside of its with block",
                expected="for event in run: inside of with trainer.session(...) as run:",
                hint="begin another session: it goes on where this one is",
            )
