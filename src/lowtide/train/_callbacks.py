"""Callbacks of a run: the base class, a profiler, early stopping, and a learning rate reduced on a plateau.

The trainer calls a callback's hooks at the beginning and the end of each part of a run. A callback may read and change
the trainer: `Trainer.model` is the current model, `Trainer.update` replaces its weights, and `Trainer.stop` ends the
run after the current step. A record is the dictionary of values of one step or one evaluation. Callbacks that write
records are in `_trackers`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import ConfigError, Tree, check_choice, check_integer, check_type, shown
from ..distributed import Processes
from ..memory import MemoryReport
from ..pipeline import StageReport
from ._events import Event, Record, note_failure, user_stacklevel
from ._optimizer import find_learning_rates
from ._step import TrainState


class TrainerView(Protocol):
    """The part of the `Trainer` that callbacks may use."""

    history: list[Record]
    """Records of the run so far."""
    processes: Processes
    """The processes of the run, including this one."""

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a step may use on a device; None for all bytes of the device."""
        ...

    @property
    def step(self) -> int:
        """Number of steps taken so far."""
        ...

    @property
    def model(self) -> Any:
        """The current model."""
        ...

    @property
    def state(self) -> TrainState:
        """Everything that a step changes."""
        ...

    @state.setter
    def state(self, state: TrainState) -> None: ...

    @property
    def has_eval_data(self) -> bool:
        """Whether the run has evaluation data."""
        ...

    @property
    def stages(self) -> StageReport | None:
        """Report on the memory of each rank of a pipeline; None without a pipeline, or before `on_preflight`."""
        ...

    def stop(self) -> None:
        """End the run after the current step."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished all steps."""
        ...

    def update(self, model: Tree) -> None:
        """Replace the weights by those of `model`."""
        ...

    def evaluate(self, data: Iterable[Tree]) -> dict[str, float]:
        """Return the mean loss and metrics over batches."""
        ...

    def save(self) -> bool:
        """Start to write a checkpoint; return False if this step is saved already."""
        ...


class Callback:
    """Base class of callbacks. `Trainer` calls the hooks (``on_...``); by default each hook does nothing.

    An exception in a hook ends the run like any other exception: the trainer keeps the state of the last step.

    Examples:
        >>> class Stop(Callback):
        ...     def on_record(self, trainer, record):
        ...         if record["loss"] < 0.1:
        ...             trainer.stop()
    """

    @property
    def is_immediate(self) -> bool:
        """Whether the values of each step are read before the next step is dispatched.

        Return True in a callback that changes the training according to the record of a step. The device then waits
        for the host after every step. If all callbacks return False, as by default, a record may arrive one step later,
        except before evaluations and checkpoints.
        """
        return False

    def state(self) -> dict[str, Any] | None:
        """Return the state to store in a checkpoint, as data that JSON can represent; None for no state."""
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a restored `state`; called after `on_train_begin`."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Run when `fit` begins."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Run after `fit` has ended without an exception."""

    def on_preflight(self, trainer: TrainerView, report: MemoryReport) -> None:
        """Run after the step is compiled and before its first run in this `fit`; `report` lists its bytes."""

    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        """Run before the first step of an epoch, counted from 0."""

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """Run at the end of an epoch, after the records of its steps."""

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Run before step `step`, counted from 0."""

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Run after a step; `step` steps are taken so far. The device may still compute the last step."""

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Run when the host has read the values of a step or of an evaluation.

        Values of a step are read one step later, so that the device never waits for the host. They are read at once if
        a callback `is_immediate`, and before an evaluation, a checkpoint and the end of the run.
        """

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        """Run when an evaluation begins, in `fit` or in `evaluate`."""

    def on_evaluate_end(self, trainer: TrainerView, metrics: Record) -> None:
        """Run after an evaluation; `metrics` has the mean loss and the mean metrics."""

    def on_predict_begin(self, trainer: TrainerView) -> None:
        """Run when `predict` begins."""

    def on_predict_end(self, trainer: TrainerView) -> None:
        """Run after `predict` has ended."""

    def on_checkpoint(self, trainer: TrainerView, step: int) -> None:
        """Run after `fit` has started to write the checkpoint of `step`."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Run before `fit` raises `error`; the trainer holds a valid state again, unless none could be restored."""


class Listeners:
    """Dispatcher of the events of a run to its callbacks, in order. Mutable: it queues the hooks of an event.

    The function `on_record` receives each record before the callbacks do.
    """

    def __init__(
        self, trainer: TrainerView, callbacks: Sequence[Callback], on_record: Callable[[Record], None] | None = None
    ) -> None:
        if on_record is not None and not callable(on_record):
            raise ConfigError(f"on_record must be a function of a record, not {shown(on_record)}")
        self._trainer, self._callbacks, self._on_record = trainer, callbacks, on_record
        self.is_immediate = any(callback.is_immediate for callback in callbacks)
        """Whether the values of a step are read before the next step is dispatched."""
        self._pending = deque[tuple[Event, str, Callable[..., None]]]()

    def notify(self, event: Event) -> None:
        """Call the hooks of all callbacks for an event.

        If a hook raises, the later callbacks miss the event, except for records and for events with an `error`. If a
        hook causes a second event, such as by saving, the remaining callbacks get the first event before the second.
        """
        self.flush()
        if event.name == "resume":
            for name, callback in self._named_callbacks():
                if (state := event.value.get(name)) is not None:
                    callback.resume(state)
            return
        hook_name = f"on_{event.name}"
        if event.name == "record" and self._on_record is not None:
            self._pending.append((event, hook_name, self._on_record))
        for callback in self._callbacks if hasattr(Callback, hook_name) else ():
            hook = partial(getattr(callback, hook_name), self._trainer)
            self._pending.append((event, f"{type(callback).__name__}.{hook_name}", hook))
        self.flush()

    def flush(self) -> None:
        """Deliver the pending event to the callbacks that have not received it yet."""
        while self._pending:
            event, name, hook = self._pending.popleft()
            values = () if event.value is None else (event.value,)
            if event.error is not None:
                with note_failure(event.error, name):
                    hook(*values)
                continue
            try:
                hook(*values)
            except BaseException as failure:
                while self._pending:  # the other callbacks still receive a record; other pending events are dropped
                    event, other_name, hook = self._pending.popleft()
                    if event.name == "record":
                        with note_failure(failure, other_name):
                            hook(event.value)
                raise

    def states(self) -> dict[str, Any]:
        """Return the states of the callbacks by name, for a checkpoint; callbacks without a state are left out."""
        # Copies, because a callback may continue to update the object that it returned.
        states = {name: copy.deepcopy(callback.state()) for name, callback in self._named_callbacks()}
        return {name: state for name, state in states.items() if state is not None}

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Pair each callback with a name: its class, and its number among the callbacks of that class, from 0."""
        classes = [type(callback).__name__ for callback in self._callbacks]
        return [(f"{name} {classes[:index].count(name)}", self._callbacks[index]) for index, name in enumerate(classes)]


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return an iterable of callbacks as a tuple; raise `ConfigError` for other objects, and warn of misspelt hooks."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        hint = "put a single callback into a list"
        raise ConfigError(f"callbacks must be a list of callbacks, not {shown(callbacks)}", hint=hint)
    checked_callbacks = tuple(callbacks)
    for callback in checked_callbacks:
        hint = "pass an object, EarlyStopping(), not its class; pass a function as on_record="
        check_type("a callback", callback, Callback, "an object of a subclass of lowtide.train.Callback", hint=hint)
        events = [name for name in dir(Callback) if name.startswith("on_")]
        for name in dir(type(callback)):
            hook = name.replace("train_batch", "step").replace("batch", "step")  # names in Keras and Lightning
            if name.startswith("on_") and name not in events and (matches := get_close_matches(hook, events, 1, 0.75)):
                warnings.warn(
                    f"{type(callback).__name__}.{name} is never called by a trainer\nhint: did you mean {matches[0]}?",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
    return checked_callbacks


class Profile(Callback):
    """Write a profile of chosen steps, for TensorBoard's or Perfetto's viewer.

    Mutable: it stores whether a profile is running, and the step at which the profile stops.

    Args:
        directory: folder of the profile; with several processes, each writes into its own subfolder.
        first: first profiled step, counted from 0. A run that resumes after it profiles from the run's own first step.
            The first step of a run includes compilation.
        num_steps: number of profiled steps.

    Raises:
        ConfigError: for a number out of range.
    """

    def __init__(self, directory: str | Path, *, first: int = 10, num_steps: int = 3) -> None:
        check_integer("first", first, 0)
        check_integer("num_steps", num_steps)
        self.directory, self.first, self.num_steps = Path(directory), first, num_steps
        self._is_profiling, self._end_step = False, -1

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Allow another profile if the run begins at or before the first profiled step."""
        if trainer.step <= self.first:
            self._end_step = -1

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Start the profile before its first step, unless a profile was already started."""
        if self._end_step < 0 and step >= self.first:
            subfolder = f"process-{jax.process_index()}" if trainer.processes.count > 1 else ""
            jax.profiler.start_trace(str(self.directory / subfolder))
            self._is_profiling, self._end_step = True, step + self.num_steps

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Stop the profile after its last step has finished on the device."""
        if self._is_profiling and step >= self._end_step:
            trainer.wait()
            self._stop()

    def on_train_end(self, trainer: TrainerView) -> None:
        """Stop a profile that is still running because the run ended early."""
        self._stop()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Stop a running profile and keep its data."""
        with contextlib.suppress(RuntimeError):
            self._stop()

    def _stop(self) -> None:
        if self._is_profiling:
            self._is_profiling = False
            jax.profiler.stop_trace()


# --- callbacks that monitor a value of the records -------------------------------------------------------------------


class _Monitor(Callback):
    """Base class of callbacks that call `on_plateau` when a value of the records no longer improves.

    The arguments are those of `EarlyStopping`. Mutable: each record changes the best value and the counts.
    """

    def __init__(self, monitor: str, patience: int, min_delta: float, mode: str) -> None:
        check_choice("mode", mode, ("min", "max"), hint='"min" is for losses')
        check_type("monitor", monitor, str, "the name of a value in the records")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, _number(patience), _number(min_delta)
        if not (self.patience >= 0 and self.min_delta >= 0):
            raise ConfigError(f"patience and min_delta must be numbers >= 0, not {patience!r} and {min_delta!r}")
        self.best = math.inf if mode == "min" else -math.inf
        self.waited, self._num_seen = 0, 0

    @property
    def is_immediate(self) -> bool:
        """Whether the monitored value belongs to steps, not to evaluations; see `Callback.is_immediate`."""
        return not self.monitor.startswith("eval_")

    def on_plateau(self, trainer: TrainerView) -> None:
        """React to a value that no longer improves."""

    def state(self) -> dict[str, Any]:
        """Return the name of the monitored value, the best value, and the counts of records."""
        best = self.best if math.isfinite(self.best) else None
        return {"monitor": self.monitor, "best": best, "waited": self.waited, "num_seen": self._num_seen}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the best value and the counts, unless the state belongs to another monitored value."""
        if state.get("monitor", self.monitor) == self.monitor:
            self.best = self.best if state["best"] is None else state["best"]
            self.waited, self._num_seen = state["waited"], state.get("num_seen", self._num_seen)

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the best value and the counters."""
        self.best = math.inf if self.mode == "min" else -math.inf
        self.waited, self._num_seen = 0, 0

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Compare the monitored value; raise `ConfigError` if the first record that should have it lacks it."""
        if self.monitor not in record:
            # Only a record of the same kind, of a step or of an evaluation, can contain the value.
            is_due = not trainer.has_eval_data or ("eval_loss" in record) == self.monitor.startswith("eval_")
            if not self._num_seen and is_due:
                names = ", ".join(name for name in record if name not in ("step", "seconds"))
                problem = f"{type(self).__name__} monitors {self.monitor!r}, which is not one of {names}"
                hint = "values with names eval_... come from evaluations, which need fit(..., eval_data=...)"
                raise ConfigError(problem, hint=hint)
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


class EarlyStopping(_Monitor):
    """Stop the run when a value no longer improves. Mutable: each record changes its counts.

    Args:
        monitor: name of the value in the records, such as ``eval_loss``.
        patience: tolerated number of records without improvement; one more stops the run. Keras stops a record earlier.
        min_delta: a change has to exceed this to count as an improvement.
        mode: whether less (``"min"``) or more (``"max"``) is better.

    Raises:
        ConfigError: for an unknown `mode` or a negative number; during a run, when no record has the value.

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
        """Restore the counts; stop the run at once if the saved counts already exceed `patience`."""
        super().resume(state)
        if self.waited > self.patience and self._stop is not None:
            self._stop()

    def on_plateau(self, trainer: TrainerView) -> None:
        """Stop the run."""
        trainer.stop()


class ReduceOnPlateau(_Monitor):
    """Reduce the learning rate when a value no longer improves. Mutable: each record changes its counts.

    The rate is part of the optimizer's state, so it is saved and restored with the state, and no step is recompiled.
    A rollback (``on_nan="roll_back"``) therefore also restores the learning rate of the earlier state.
    For a rate that depends only on the number of steps, use a schedule of Optax instead. For a rate that depends on the
    loss of every training step, `optax.contrib.reduce_on_plateau` works inside the step.

    Args:
        monitor: name of the value in the records, such as ``eval_loss``.
        factor: the rate is multiplied by this number between 0 and 1.
        patience: tolerated number of records without improvement; one more reduces. Keras reduces a record earlier.
        min_delta: a change has to exceed this to count as an improvement.
        mode: whether less (``"min"``) or more (``"max"``) is better.
        cooldown: number of records after a reduction that are not counted.
        minimum: lower bound of the rate.

    Raises:
        ConfigError: for an unknown `mode` or a number out of range. When a run begins, for an optimizer without a
            constant floating-point rate of `optax.inject_hyperparams`. During a run, when no record has the value.

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
        check_integer("cooldown", cooldown, 0)
        if not (0 < self.factor < 1 and 0 <= self.minimum < math.inf):
            raise ConfigError(f"factor must be between 0 and 1, and minimum at least 0, not {factor!r} and {minimum!r}")
        self._cooling = 0

    def state(self) -> dict[str, Any]:
        """Return the name of the monitored value, the best value, the counts, and the remaining cooldown."""
        return {**super().state(), "cooling": self._cooling}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the counts and the cooldown, unless the state belongs to another monitored value."""
        super().resume(state)
        if state.get("monitor", self.monitor) == self.monitor:
            self._cooling = state["cooling"]

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the best value and the counters; raise `ConfigError` if the optimizer has no rate to reduce."""
        super().on_train_begin(trainer)
        self._cooling = 0
        opt_state, problem = trainer.state.opt_state, None
        learning_rates = find_learning_rates(opt_state)
        integer_dtypes = [rate.dtype for _, rate in learning_rates if not jnp.issubdtype(rate.dtype, jnp.floating)]
        if find_learning_rates(opt_state, "hyperparams_states"):
            problem = "one that follows a schedule, which would overwrite a change"
        elif integer_dtypes:
            problem = f"one of type {integer_dtypes[0]}, not a floating-point one"
        elif not learning_rates:
            problem = "no learning rate"
        if problem is not None:
            hint = "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)"
            raise ConfigError(f"the learning rate cannot be changed, because the optimizer has {problem}", hint=hint)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Compare the monitored value; records during the cooldown are not counted."""
        is_cooling = self._cooling > 0 and self.monitor in record
        super().on_record(trainer, record)
        if is_cooling:
            self._cooling, self.waited = self._cooling - 1, 0

    def on_plateau(self, trainer: TrainerView) -> None:
        """Reduce the learning rate, except during the cooldown."""
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
    """Return a real number or a real scalar array as a float; NaN for any other value."""
    is_real = any(jnp.issubdtype(np.asarray(value).dtype, kind) for kind in (jnp.integer, jnp.floating))
    return float(value) if is_real and np.ndim(value) == 0 else math.nan
