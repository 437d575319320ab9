"""Callbacks that monitor a value of the records: early stopping, and a learning rate that is reduced on a plateau."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import ConfigError, Tree, check_choice, is_count
from ._callbacks import Callback, TrainerView
from ._events import Record
from ._rates import find_learning_rates


class _Monitor(Callback):
    """Base class that waits for a value to improve, and calls `on_plateau` after too many records without improvement.

    The arguments are those of `EarlyStopping`.
    """

    def __init__(self, monitor: str, patience: int, min_delta: float, mode: str) -> None:
        check_choice("unknown mode", mode, ("min", "max"), '"min" is for losses')
        name: Any = monitor
        if not isinstance(name, str):
            raise ConfigError(
                "monitor is not a name",
                expected="the name of a value in the records",
                got=repr(name),
                hint='"eval_loss"',
            )
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, _number(patience), _number(min_delta)
        if not (self.patience >= 0 and self.min_delta >= 0):
            raise ConfigError(
                "patience or min_delta is not a number of at least 0",
                expected="a number of records, and a difference",
                got=f"{patience!r}, {min_delta!r}",
                hint="0 is the smallest valid value",
            )
        self.best = math.inf if mode == "min" else -math.inf
        self.waited, self._num_seen = 0, 0

    @property
    def is_immediate(self) -> bool:
        """Whether the monitored value is one of a step, whose values are then read before the next step."""
        return not self.monitor.startswith("eval_")

    def on_plateau(self, trainer: TrainerView) -> None:
        """React to a value that no longer improves."""

    def state(self) -> dict[str, Any]:
        """Return the best value, and the number of records since."""
        best = self.best if math.isfinite(self.best) else None
        return {"monitor": self.monitor, "best": best, "waited": self.waited, "num_seen": self._num_seen}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue to wait, unless the state is that of a monitor of another value."""
        if not self._is_same_monitor(state):
            return
        self.best, self.waited = self.best if state["best"] is None else state["best"], state["waited"]
        self._num_seen = state.get("num_seen", int(state["best"] is not None))

    def _is_same_monitor(self, state: dict[str, Any]) -> bool:
        return state.get("monitor", self.monitor) == self.monitor

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the best value and the counters."""
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited, self._num_seen = 0, 0

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Compare the value. Raise at the first record that should contain it but does not, as with a misspelt name."""
        if self.monitor not in record:
            if not self._num_seen and self._is_due(trainer, record):
                raise ConfigError(
                    f"{type(self).__name__} monitors {self.monitor!r}, which is not in the records",
                    expected=f"one of {', '.join(name for name in record if name not in ('step', 'seconds'))}",
                    got=repr(self.monitor),
                    hint="values with names eval_... come from evaluations, which need fit(..., eval_data=...)",
                )
            return
        self._num_seen += 1
        value = record[self.monitor]
        gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            self.on_plateau(trainer)

    def _is_due(self, trainer: TrainerView, record: Record) -> bool:
        """Return whether this record has to contain the value: a step's record has no value of a later evaluation."""
        return not trainer.has_eval_data or ("eval_loss" in record) == self.monitor.startswith("eval_")


class EarlyStopping(_Monitor):
    """Stop the run when a value no longer improves.

    Args:
        monitor: name of the value in the records, such as ``eval_loss``.
        patience: number of tolerated records without improvement; the next one acts (Keras acts one record earlier).
        min_delta: a change has to exceed this to count as an improvement.
        mode: ``"min"`` or ``"max"``.

    Raises:
        ConfigError: for another `mode` or a negative number; during a run, when no record has the value.

    Examples:
        >>> EarlyStopping("eval_loss", patience=3).best
        inf
    """

    def __init__(
        self, monitor: str = "eval_loss", *, patience: int = 0, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode)
        self._stop: Callable[[], None] | None = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the best value and the counters."""
        super().on_train_begin(trainer)
        self._stop = trainer.stop

    def resume(self, state: dict[str, Any]) -> None:
        """Continue to wait, or stop at once if the run had been stopped."""
        super().resume(state)
        if self.waited > self.patience and self._stop is not None:
            self._stop()

    def on_plateau(self, trainer: TrainerView) -> None:
        """Stop the run."""
        trainer.stop()


class ReduceOnPlateau(_Monitor):
    """Reduce the learning rate when a value no longer improves.

    The rate is part of the optimizer's state, so it is saved and restored with the state, and no step is recompiled.
    ``on_nan="roll_back"`` thus also restores the rate of the copy.
    For a rate that depends only on the number of steps, use a schedule of Optax instead. For one that depends on the
    loss of every training step, `optax.contrib.reduce_on_plateau` works inside the step.

    Args:
        monitor: name of the value in the records, such as ``eval_loss``.
        factor: factor of a reduction.
        patience: number of tolerated records without improvement; the next one acts (Keras acts one record earlier).
        min_delta: a change has to exceed this to count as an improvement.
        mode: ``"min"`` or ``"max"``.
        cooldown: number of records after a reduction that are not counted.
        minimum: lower bound of the rate.

    Raises:
        ConfigError: for another `mode` or a number out of range; during a run, when no record has the value, or when
            the rate cannot be changed because the optimizer was not made with `optax.inject_hyperparams`.

    Examples:
        >>> tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
        >>> callback = ReduceOnPlateau("eval_loss", factor=0.5, patience=2, minimum=1e-5)
    """

    def __init__(
        self,
        monitor: str = "eval_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str = "min",
        cooldown: int = 0,
        minimum: float = 0.0,
    ) -> None:
        super().__init__(monitor, patience, min_delta, mode)
        self.factor, self.minimum, self.cooldown = _number(factor), _number(minimum), cooldown
        if not (0 < self.factor < 1 and 0 <= self.minimum < math.inf and is_count(cooldown, 0)):
            raise ConfigError(
                "these arguments could not lower the learning rate",
                expected="0 < factor < 1, cooldown a number of records, minimum >= 0",
                got=f"factor={factor!r}, cooldown={cooldown!r}, minimum={minimum!r}",
                hint="ReduceOnPlateau(factor=0.1)",
            )
        self._cooling = 0

    def state(self) -> dict[str, Any]:
        """Return the best value, the number of records since, and the remaining cooldown."""
        return {**super().state(), "cooling": self._cooling}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue to wait."""
        super().resume(state)
        if self._is_same_monitor(state):
            self._cooling = state["cooling"]

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the counters, and raise if the optimizer has no rate to reduce."""
        super().on_train_begin(trainer)
        self._cooling = 0
        _check_rates(trainer.state.opt_state)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Compare the value; records during the cooldown are not counted."""
        is_cooling = self._cooling > 0 and self.monitor in record
        super().on_record(trainer, record)
        if is_cooling:
            self._cooling, self.waited = self._cooling - 1, 0

    def on_plateau(self, trainer: TrainerView) -> None:
        """Reduce the learning rate."""
        if self._cooling:
            return
        opt_state = trainer.state.opt_state
        for rate_path, rate in find_learning_rates(opt_state):
            lower = np.maximum(np.asarray(rate) * self.factor, self.minimum).astype(rate.dtype)
            new = jax.device_put(np.minimum(lower, rate), rate.sharding)
            opt_state = optax.tree.set(opt_state, lambda path, _, target=rate_path: path == target, learning_rate=new)
        trainer.state = dataclasses.replace(trainer.state, opt_state=opt_state)
        self.waited, self._cooling = 0, self.cooldown


def _number(value: Any) -> float:
    """Return a real number, which may be in an array; NaN for any other value."""
    is_real = any(jnp.issubdtype(np.asarray(value).dtype, kind) for kind in (jnp.integer, jnp.floating))
    return float(value) if is_real and np.ndim(value) == 0 else math.nan


def _check_rates(opt_state: Tree) -> None:
    learning_rates, problem = find_learning_rates(opt_state), None
    integer_dtypes = [rate.dtype for _, rate in learning_rates if not jnp.issubdtype(rate.dtype, jnp.floating)]
    if find_learning_rates(opt_state, "hyperparams_states"):
        problem = "one that follows a schedule, which would overwrite it"
    elif integer_dtypes:
        problem = f"one of type {integer_dtypes[0]}"
    elif not learning_rates:
        problem = "no learning rate"
    if problem is not None:
        raise ConfigError(
            "the optimizer's learning rate cannot be changed",
            expected="a hyperparameter learning_rate in its state, a floating-point number",
            got=problem,
            hint="optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)",
        )
