"""Events that `Session` yields during a run; helpers for exception notes, warnings and printed losses."""

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
    """An event of a run; `Callback` has a hook ``on_<name>`` for every event except resume and rollback."""

    name: Literal[
        "train_begin",
        "resume",  # the saved states of callbacks, by name
        "preflight",  # the memory report of the step
        "epoch_begin",  # the number of the epoch
        "epoch_end",  # the number of the epoch
        "step_begin",  # steps taken so far
        "step_end",  # steps taken so far, including this one
        "record",  # the values of a step, or of an evaluation
        "rollback",  # the step of the restored weights
        "evaluate_begin",
        "evaluate_end",  # the mean loss and metrics
        "predict_begin",
        "predict_end",
        "checkpoint",  # the step of the checkpoint
        "exception",  # the exception that ends the run
        "train_end",
    ]
    value: Any = None
    """Data of the event, or None."""
    error: BaseException | None = None
    """Exception that is about to end the run; failures of hooks are added to it as notes."""


@contextlib.contextmanager
def note_failure(error: BaseException, action: str) -> Generator[None]:
    """Run a ``with`` block while `error` is handled; if the block raises an `Exception`, only add a note to `error`."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"lowtide: {action} failed: {type(failure).__name__}: {failure}")


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a caller's `warnings.warn` points to the nearest line outside this package."""
    package_prefixes = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(package_prefixes):
        level, frame = level + 1, frame.f_back
    return level


class LossLines:
    """Choose the steps whose loss is printed where there is no progress bar: in a log file or a notebook.

    Mutable: it stores when it last chose a step.

    Args:
        num_steps: the step at which the run ends. The interval is a tenth of the run, or 100 steps for None.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._interval = 100 if num_steps is None else max(num_steps // 10, 1)
        self._last: float | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to print the loss of a step; if so, store the current time.

        The result is True for the first call, for steps at the interval, and over 60 seconds after the last True.
        """
        now = time.monotonic()
        is_due = self._last is None or step % self._interval == 0 or now - self._last > 60
        if is_due:
            self._last = now
        return is_due
