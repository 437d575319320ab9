"""Which checkpoints stay: the newest, and of those that were evaluated the best.

What evaluations found is in one small file beside the checkpoints instead of in each, so that a checkpoint may also be
evaluated after it was written. It is written before its checkpoint: a value without a checkpoint is passed over, a
checkpoint never lacks its value.
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
    """What Orbax asks for the checkpoints to keep.

    Args:
        directory: of the checkpoints.
        max_to_keep: how many of the newest.
        best: name of the value in evaluations whose best checkpoint is kept, too; or None.
        best_mode: ``"min"`` or ``"max"``.

    Raises:
        ConfigError: for another `best_mode`, or no checkpoint to keep.
    """

    def __init__(self, directory: Path, max_to_keep: int, best: str | None, best_mode: str) -> None:
        check_choice("unknown best_mode", best_mode, ("min", "max"), '"min" is for losses')
        check_count("no checkpoint would be kept", max_to_keep, 1, "max_to_keep >= 1", "max_to_keep=2")
        self.best, self._sign = best, 1 if best_mode == "min" else -1
        self._directory, self._max_to_keep = directory, max_to_keep
        self._found: dict[int, dict[str, float]] = {}
        self._changed: int | None = None
        """The step at which weights were changed since they were evaluated or restored."""
        if best is not None and (directory / FILE).is_file():
            self._found = _read(directory / FILE)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Of each checkpoint, oldest first, whether it stays; Orbax's ``PreservationPolicy``."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self._max_to_keep :], self.best_step(steps)}
        return [step in kept for step in steps]

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Return the best of these steps, or None when none was evaluated; of equal ones the first."""
        known = sorted(step for step in steps if math.isfinite(self._value(step)))
        return min(known, key=self._value) if known else None

    def note(self, step: int, record: Mapping[str, float], steps: Iterable[int]) -> bool:
        """Keep what an evaluation found.

        Args:
            step: where.
            record: its values.
            steps: of the checkpoints that there are.

        Returns:
            Whether it is the best so far.

        Raises:
            ConfigError: when it lacks the value.
        """
        names = [name for name in record if name != "step"]
        if self.best not in names:
            raise ConfigError(
                f"best={self.best!r}: an evaluation has no such value",
                expected=f"one of {', '.join(names)}",
                got=repr(self.best),
                hint="return it among the loss function's metrics, or choose another",
            )
        others = [at for at in steps if at != step]
        self._found = {at: values for at, values in self._found.items() if at in others}
        self._found[step] = {name: record[name] for name in names if math.isfinite(record[name])}
        self._changed = None
        self._write()
        return self.best_step([*others, step]) == step

    def changed(self, step: int | None) -> None:
        """Weights were changed at a step, or with None are those of a checkpoint again."""
        self._changed = step

    def forget(self, step: int) -> None:
        """Before a checkpoint is written: what was found of weights that it will not hold is no more."""
        if self._changed == step and self._found.pop(step, None) is not None:
            self._write()

    def _write(self) -> None:
        if jax.process_index() == 0:
            write_files(self._directory, {FILE: (json.dumps(self._found) + "\n").encode()})

    def _value(self, step: int) -> float:
        """How good a step is: less is better, infinite unknown."""
        return self._sign * self._found.get(step, {}).get(self.best or "", math.inf)


def _read(path: Path) -> dict[int, dict[str, float]]:
    try:
        return {int(step): dict(values) for step, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{path} is damaged, so which of the checkpoints was the best is not known: {error}\n"
            "hint: the next evaluation writes it anew",
            UserWarning,
            stacklevel=4,
        )
        return {}
