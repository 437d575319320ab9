"""What happens in a run, as a session says it; failures after a failure, and the line that a warning is of."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Record = dict[str, float | int]
"""The values of a step, or of an evaluation, by name."""


class Event(NamedTuple):
    """Something that has happened, or is about to; but for two of them `Callback` has a method ``on_...``."""

    name: Literal[
        "train_begin",
        "resume",  # the states that a checkpoint kept of callbacks, by name
        "preflight",  # the memory report of the step
        "epoch_begin",  # its number
        "epoch_end",
        "step_begin",  # steps taken so far
        "step_end",
        "record",  # the values of a step, or of an evaluation
        "rollback",  # the step whose weights the run goes on with
        "evaluate_begin",
        "evaluate_end",  # the means
        "predict_begin",
        "predict_end",
        "checkpoint",  # its step
        "exception",  # what ends the run
        "train_end",
    ]
    value: Any = None
    """What belongs to it; None for nothing."""
    error: BaseException | None = None
    """The exception that is about to end the run, which nobody who hears of the event may replace."""


@contextlib.contextmanager
def noted(error: BaseException, what: str) -> Generator[None]:
    """Do something after an exception, to which a failure adds a note."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"lowtide: {what} failed: {type(failure).__name__}: {failure}")


def level_of_user() -> int:
    """Return the `stacklevel`, for who calls this, of the nearest line outside of this package."""
    ours = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


class LossLines:
    """Choose the steps whose loss is printed where no terminal shows a bar: in a log file or a notebook.

    This object is mutated: it remembers when it last chose a step.

    Args:
        num_steps: the step at which the run ends, or None where that is not known.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._interval = 100 if num_steps is None else max(num_steps // 10, 1)
        self._last: float | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to print: for the first step, for ten steps of a run, and after every minute."""
        now = time.monotonic()
        is_due = self._last is None or step % self._interval == 0 or now - self._last > 60
        if is_due:
            self._last = now
        return is_due
