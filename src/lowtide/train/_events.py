"""Events of a run, as a session yields them; notes on exceptions; the line of the user's code for a warning."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Record = dict[str, float | int]
"""Values of a step or of an evaluation, by name."""


class Event(NamedTuple):
    """Something that has happened or is about to; `Callback` has a hook ``on_...`` for all but resume and rollback."""

    name: Literal[
        "train_begin",
        "resume",  # the saved states of callbacks, by name
        "preflight",  # the memory report of the step
        "epoch_begin",  # the number of the epoch
        "epoch_end",
        "step_begin",  # steps taken so far
        "step_end",
        "record",  # the values of a step, or of an evaluation
        "rollback",  # the step of the restored weights
        "evaluate_begin",
        "evaluate_end",  # the means
        "predict_begin",
        "predict_end",
        "checkpoint",  # its step
        "exception",  # the exception that ends the run
        "train_end",
    ]
    value: Any = None
    """Data of the event, or None."""
    error: BaseException | None = None
    """Exception that is about to end the run; failures of hooks are added to it as notes."""


@contextlib.contextmanager
def note_failure(error: BaseException, action: str) -> Generator[None]:
    """Run a block after an exception; if the block fails, add a note to that exception."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"lowtide: {action} failed: {type(failure).__name__}: {failure}")


def user_stacklevel() -> int:
    """Return the `stacklevel`, for the caller, of the nearest line outside of this package."""
    package_prefixes = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(package_prefixes):
        level, frame = level + 1, frame.f_back
    return level


class LossLines:
    """Choose the steps whose loss is printed where there is no progress bar: in a log file or a notebook.

    Mutable: it stores when it last chose a step.

    Args:
        num_steps: the step at which the run ends. If None, each 100th step is chosen, instead of each tenth of the run.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._interval = 100 if num_steps is None else max(num_steps // 10, 1)
        self._last: float | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to print: at the first step, at each tenth of the run, and after every minute."""
        now = time.monotonic()
        is_due = self._last is None or step % self._interval == 0 or now - self._last > 60
        if is_due:
            self._last = now
        return is_due
