"""Callbacks: the base class, loggers of records, and profiles. Callbacks that monitor a value are in `_monitors`.

The trainer calls a callback's hooks at the beginning and the end of each part of a run. A callback may read and change
the trainer: `Trainer.model` is the current model, `Trainer.update` replaces its weights, and `Trainer.stop` ends the
run after the current step.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax

from ..core import ConfigError, OutputError, Tree, is_count
from ..distributed import Processes
from ..memory import MemoryReport
from ..pipeline import StageReport
from ._events import Event, Record, note_failure, user_stacklevel
from ._step import TrainState


class TrainerView(Protocol):
    """The part of the `Trainer` that callbacks may use."""

    history: list[Record]
    """Records so far."""
    processes: Processes
    """The other processes of the run."""
    budget_bytes: int | None
    """Bytes that a step may use on a device; None for all bytes of the device."""

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
        """Report on what each rank of a pipeline holds."""
        ...

    def stop(self) -> None:
        """End the run after the current step."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished all steps."""
        ...

    def update(self, model: Tree) -> None:
        """Replace the weights."""
        ...

    def evaluate(self, data: Iterable[Tree]) -> dict[str, float]:
        """Return the mean loss and metrics over batches."""
        ...

    def save(self) -> bool:
        """Start to write a checkpoint."""
        ...


class Callback:
    """Base class of callbacks, whose hooks `Trainer` calls; each hook does nothing by default.

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

        For a callback that changes the training by a step's record. By default, the time of a record depends on
        evaluations and checkpoints. If this is True, the device waits for the host after every step.
        """
        return False

    def state(self) -> dict[str, Any] | None:
        """Return the state of the callback that a checkpoint keeps, as JSON; None for no state."""
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a restored `state`; called after `on_train_begin`."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Run when `fit` begins."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """Run after `fit` has ended without an exception."""

    def on_preflight(self, trainer: TrainerView, report: MemoryReport) -> None:
        """Run after the step was compiled, before it runs for the first time in this `fit`."""

    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        """Run before the first step of an epoch, counted from 0."""

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """Run at the end of an epoch, after the records of its steps."""

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Run before step `step`, counted from 0."""

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Run when the state of `step` steps is available; its loss may still be computed on the device."""

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Run when the values of a step or of an evaluation are known: one step later, so that the device never waits.

        The values are read at once if a callback `is_immediate`, and before an evaluation, a checkpoint and the end.
        """

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        """Run when `evaluate` begins."""

    def on_evaluate_end(self, trainer: TrainerView, metrics: Record) -> None:
        """Run after `evaluate` has ended."""

    def on_predict_begin(self, trainer: TrainerView) -> None:
        """Run when `predict` begins."""

    def on_predict_end(self, trainer: TrainerView) -> None:
        """Run after `predict` has ended."""

    def on_checkpoint(self, trainer: TrainerView, step: int) -> None:
        """Run after a checkpoint of this step was started."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Run before `fit` raises; the trainer holds a valid state again."""


class Listeners:
    """The callbacks of a run, called for its events in order; `on_record` is called first with each record."""

    def __init__(
        self, trainer: TrainerView, callbacks: Sequence[Callback], on_record: Callable[[Record], None] | None = None
    ) -> None:
        if on_record is not None and not callable(on_record):
            raise ConfigError(
                "on_record is not a function", expected="on_record(record)", got=repr(on_record)[:80], hint="print"
            )
        self._trainer, self._callbacks, self._on_record = trainer, callbacks, on_record
        self._pending = deque[tuple[Event, str, Callable[..., None]]]()

    def notify(self, event: Event) -> None:
        """Call the hooks of all callbacks for an event.

        If a hook raises, the later callbacks miss the event, except for records and final events, which all receive. If
        a hook causes another event, as saving does, the remaining callbacks receive this event first.
        """
        self.flush()
        if event.name == "resume":
            self._resume(event.value)
            return
        self._pending.extend((event, *hook) for hook in self._hooks(f"on_{event.name}"))
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
                while self._pending:  # the others count a record, too, before any event that a hook caused meanwhile
                    event, other_name, hook = self._pending.popleft()
                    if event.name == "record":
                        with note_failure(failure, other_name):
                            hook(event.value)
                raise

    def _hooks(self, event: str) -> Generator[tuple[str, Callable[..., None]]]:
        """Yield the functions to call for an event, each with its name for a note."""
        if event == "on_record" and self._on_record is not None:
            yield event, self._on_record
        for callback in self._callbacks if hasattr(Callback, event) else ():
            yield f"{type(callback).__name__}.{event}", partial(getattr(callback, event), self._trainer)

    def states(self) -> dict[str, Any]:
        """Return the states of the callbacks that a checkpoint keeps."""
        # Copies, because a callback may continue to update the object that it returned.
        states = {name: copy.deepcopy(callback.state()) for name, callback in self._named_callbacks()}
        return {name: state for name, state in states.items() if state is not None}

    def _resume(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._named_callbacks():
            if (state := states.get(name)) is not None:
                callback.resume(state)

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        """Name the callbacks by class, and those of one class by a number in order."""
        classes = [type(callback).__name__ for callback in self._callbacks]
        return [(f"{name} {classes[:index].count(name)}", self._callbacks[index]) for index, name in enumerate(classes)]


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return the callbacks of any iterable as a tuple; raise for any other object, before anything runs."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            "callbacks is not a list of callbacks",
            expected="callbacks=[EarlyStopping()]",
            got=repr(callbacks)[:80],
            hint="put a single callback into a list",
        )
    checked_callbacks = tuple(callbacks)
    for callback in checked_callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"not a callback: expected an object of a subclass of `Callback`, got `{type(callback).__name__}`",
                expected="objects of subclasses of lowtide.train.Callback",
                got=repr(callback)[:80],
                hint="pass an object, EarlyStopping(), not its class; pass a function as on_record=",
            )
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


@contextlib.contextmanager
def _writing(path: Path, kind: str) -> Generator[None]:
    """Raise `OutputError` with the path when a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written", got=error.strerror or error, hint=f"choose another {kind}"
        ) from error


class JsonlLogger(Callback):
    """Write every record as a line of JSON; numbers that are not finite become null, because JSON has none.

    Args:
        path: the file. The first process appends the lines to it.

    Raises:
        OutputError: when it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_writing = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Make the folder, and raise now rather than at the first record if the file cannot be written."""
        if trainer.processes.is_first:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(trainer, "")

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Append a record."""
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._write(trainer, json.dumps(values) + "\n")

    def state(self) -> None:
        """Flush the file to disk, so that it survives a power cut; called before every checkpoint."""
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def _write(self, trainer: TrainerView, line: str) -> None:
        self._is_writing = trainer.processes.is_first
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                file.write(line)


class Scalars(Callback):
    """Pass every value of the records to a writer: TensorBoard's, or anything with ``add_scalar(name, value, step)``.

    Args:
        writer: for example a ``SummaryWriter(folder)`` of tensorboardX or of torch.utils.tensorboard; or a run of
            Weights & Biases, whose ``log(values, step=)`` is called.

    Raises:
        ConfigError: for a writer with neither method.
    """

    def __init__(self, writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise ConfigError(
                "the writer cannot write scalars",
                expected="add_scalar(name, value, step), or log(values, step=step)",
                got=type(writer).__name__,
                hint="pass tensorboardX.SummaryWriter(folder), or wandb.init(...)",
            )
        self.writer = writer

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if not trainer.processes.is_first:
            return
        values = {name: value for name, value in record.items() if name != "step"}
        if not hasattr(self.writer, "add_scalar"):
            self.writer.log(values, step=record["step"])
            return
        for name, value in values.items():
            self.writer.add_scalar(name, value, record["step"])

    def on_train_end(self, trainer: TrainerView) -> None:
        """Flush the writer."""
        if hasattr(self.writer, "flush"):
            self.writer.flush()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Flush the writer."""
        self.on_train_end(trainer)


class TensorBoard(Callback):
    """Write every value of the records for TensorBoard, with tensorboardX.

    A resumed run writes into the same folder, and TensorBoard then hides the old values of steps that are repeated.
    The last values before a process is killed may be missing; those of `JsonlLogger` are not. `Scalars` supports other
    writers.

    Args:
        directory: folder of the event files.

    Raises:
        ConfigError: when a run begins and tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._scalars: Scalars | None = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Open an event file, in the first process."""
        if not trainer.processes.is_first:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard needs tensorboardX", hint='pip install "lowtide[tensorboard]"') from error

        step = trainer.step
        # Files that are opened in the same second would have the same name without a suffix.
        purge_step, suffix = (step + 1, f".{step}") if step else (None, "")
        with _writing(self.directory, "folder"):
            writer = SummaryWriter(str(self.directory), purge_step=purge_step, filename_suffix=suffix)
        self._scalars = Scalars(writer)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write the values of a record."""
        if self._scalars is not None:
            self._scalars.on_record(trainer, record)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Close the file."""
        if self._scalars is not None:
            self._scalars.writer.close()
            self._scalars = None

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Close the file and keep its values."""
        self.on_train_end(trainer)


class Profile(Callback):
    """Write a profile of chosen steps, for TensorBoard's or Perfetto's viewer.

    Args:
        directory: folder of the profile; several processes have a subfolder each.
        first: first profiled step, counted from 0; a resumed run that begins later profiles from its own first step.
            The first step of a run includes compilation.
        num_steps: number of profiled steps.

    Raises:
        ConfigError: for a number out of range.
    """

    def __init__(self, directory: str | Path, *, first: int = 10, num_steps: int = 3) -> None:
        if not (is_count(first, 0) and is_count(num_steps, 1)):
            raise ConfigError(
                "no step would be profiled", got=f"{first!r}, {num_steps!r}", hint="first=10, num_steps=3"
            )
        self.directory, self.first, self.num_steps = Path(directory), first, num_steps
        self._is_profiling, self._end_step = False, -1

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Reset the profile in a run that begins before the first profiled step."""
        if trainer.step <= self.first:
            self._end_step = -1

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Start the profile before the first step, once."""
        if self._end_step < 0 and step >= self.first:
            subfolder = f"process-{jax.process_index()}" if trainer.processes.count > 1 else ""
            jax.profiler.start_trace(str(self.directory / subfolder))
            self._is_profiling, self._end_step = True, step + self.num_steps

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Stop the profile after the last step has finished on the device."""
        if self._is_profiling and step >= self._end_step:
            trainer.wait()
            self._stop()

    def on_train_end(self, trainer: TrainerView) -> None:
        """Stop the profile of a run that ended early."""
        self._stop()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Stop and keep the profile."""
        with contextlib.suppress(RuntimeError):
            self._stop()

    def _stop(self) -> None:
        if self._is_profiling:
            self._is_profiling = False
            jax.profiler.stop_trace()
