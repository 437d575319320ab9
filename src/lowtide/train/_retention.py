"""Retention policy of checkpoints: keep the newest, and the best of those that were evaluated.

The results of evaluations are in one small file next to the checkpoints, so that a checkpoint may also be evaluated
after it was written. A result is written before its checkpoint. So a checkpoint never lacks its result, and a result
without a checkpoint is ignored.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..core import ConfigError, check_choice, check_count, write_files

FILE = "evaluations.json"


class Retention:
    """Orbax's policy for the checkpoints to keep: the `max_to_keep` newest, and the one with the best value `best`."""

    def __init__(self, directory: Path, max_to_keep: int, best: str | None, best_mode: str) -> None:
        check_choice("unknown best_mode", best_mode, ("min", "max"), '"min" is for losses')
        check_count("no checkpoint would be kept", max_to_keep, 1, "max_to_keep >= 1", "max_to_keep=2")
        self.best, self._sign = best, 1 if best_mode == "min" else -1
        self._directory, self._max_to_keep = directory, max_to_keep
        self._evaluations: dict[int, dict[str, float]] = {}
        self._changed_step: int | None = None
        """Step at which weights were changed since they were evaluated or restored."""
        if best is not None and (directory / FILE).is_file():
            self._evaluations = _read(directory / FILE)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint, oldest first, whether it is kept; Orbax's ``PreservationPolicy``."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        steps_to_keep = {*steps[-self._max_to_keep :], self.best_step(steps)}
        return [step in steps_to_keep for step in steps]

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Return the best of these steps (the first of equal ones), or None when none was evaluated."""
        evaluated_steps = sorted(step for step in steps if math.isfinite(self._value(step)))
        return min(evaluated_steps, key=self._value) if evaluated_steps else None

    def add_evaluation(self, step: int, record: Mapping[str, float], steps: Iterable[int]) -> bool:
        """Store the result of an evaluation, and return whether it is the best so far.

        `steps` are the steps of the existing checkpoints. `ConfigError` is raised when the record lacks the value
        `best`.
        """
        names = [name for name in record if name != "step"]
        if self.best not in names:
            raise ConfigError(
                f"best={self.best!r} is not a value of the evaluation",
                expected=f"one of {', '.join(names)}",
                got=repr(self.best),
                hint="return it among the loss function's metrics, or choose another value",
            )
        other_steps = [number for number in steps if number != step]
        self._evaluations = {number: values for number, values in self._evaluations.items() if number in other_steps}
        self._evaluations[step] = {name: record[name] for name in names if math.isfinite(record[name])}
        self._changed_step = None
        self._write()
        return self.best_step([*other_steps, step]) == step

    def mark_changed(self, step: int | None) -> None:
        """Record that weights were changed at a step; None means that they are those of a checkpoint again."""
        self._changed_step = step

    def forget_if_changed(self, step: int) -> None:
        """Drop the result of weights that were changed since; call it before the checkpoint of a step is written."""
        if self._changed_step == step and self._evaluations.pop(step, None) is not None:
            self._write()

    def _write(self) -> None:
        if jax.process_index() == 0:
            write_files(self._directory, {FILE: (json.dumps(self._evaluations) + "\n").encode()})

    def _value(self, step: int) -> float:
        """Return a rank of a step: lower is better, and infinity means unknown."""
        return self._sign * self._evaluations.get(step, {}).get(self.best or "", math.inf)


def _read(path: Path) -> dict[int, dict[str, float]]:
    try:
        return {int(step): dict(values) for step, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is damaged, so the best checkpoint is not known: {error}\n"
            "hint: the next evaluation writes it again",
            UserWarning,
            stacklevel=4,
        )
        return {}
