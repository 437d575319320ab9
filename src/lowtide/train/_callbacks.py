"""What happens beside the steps: records in files, profiles; what watches a value is in `_monitors`.

A callback is told of the beginning and end of everything. It may read and change the trainer: `Trainer.model` is the
model as it is, `Trainer.update` changes its weights, `Trainer.stop` ends the run after the step.
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
from ._events import Event, Record, level_of_user, noted
from ._step import TrainState


class TrainerView(Protocol):
    """What callbacks see of the `Trainer` that they are given."""

    history: list[Record]
    """The records so far."""
    processes: Processes
    """The other processes of the run."""
    budget_bytes: int | None
    """Bytes that a step may use on a device; None for what the device has."""

    @property
    def step(self) -> int:
        """Steps taken so far."""
        ...

    @property
    def model(self) -> Any:
        """The model as it is now."""
        ...

    @property
    def state(self) -> TrainState:
        """All that a step changes."""
        ...

    @state.setter
    def state(self, state: TrainState) -> None: ...

    @property
    def has_eval_data(self) -> bool:
        """Whether the run is evaluated."""
        ...

    @property
    def stages(self) -> StageReport | None:
        """Of a pipeline what each rank holds."""
        ...

    def stop(self) -> None:
        """End the run after the step."""
        ...

    def wait(self) -> None:
        """Wait until the device has ended all steps."""
        ...

    def update(self, model: Tree) -> None:
        """Go on with other weights."""
        ...

    def evaluate(self, data: Iterable[Tree]) -> dict[str, float]:
        """Mean loss and metrics over batches."""
        ...

    def save(self) -> bool:
        """Begin to write a checkpoint."""
        ...


class Callback:
    """Methods that `Trainer` calls; each does nothing until a subclass says otherwise.

    An exception in one of them ends the run like any other: the trainer keeps the state of the last step.

    Examples:
        >>> class Stop(Callback):
        ...     def on_record(self, trainer, record):
        ...         if record["loss"] < 0.1:
        ...             trainer.stop()
    """

    @property
    def is_immediate(self) -> bool:
        """Whether steps wait for their records.

        For a callback that changes the training by a step's record: when a record comes would else depend on
        evaluations and checkpoints. The device then waits for the host after every step.
        """
        return False

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps of it, as JSON; None for nothing."""
        return None

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a `state` that was restored; called after `on_train_begin`."""

    def on_train_begin(self, trainer: TrainerView) -> None:
        """`fit` begins."""

    def on_train_end(self, trainer: TrainerView) -> None:
        """`fit` has ended without an exception."""

    def on_preflight(self, trainer: TrainerView, report: MemoryReport) -> None:
        """Run when the step was compiled, and is about to run for the first time in this `fit`."""

    def on_epoch_begin(self, trainer: TrainerView, epoch: int) -> None:
        """Run before the first step of an epoch, counted from 0."""

    def on_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        """Run when an epoch's data has ended; the records of its steps were given."""

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Step `step`, counted from 0, is about to run."""

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Run when the state of `step` steps is there; its loss may still be computed on the device."""

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Run when the values of a step or of an evaluation are known: a step later, so that nothing waits for them.

        Or at once, where a callback `is_immediate`; before an evaluation, a checkpoint, and the end.
        """

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        """`evaluate` begins."""

    def on_evaluate_end(self, trainer: TrainerView, metrics: Record) -> None:
        """`evaluate` has ended."""

    def on_predict_begin(self, trainer: TrainerView) -> None:
        """`predict` begins."""

    def on_predict_end(self, trainer: TrainerView) -> None:
        """`predict` has ended."""

    def on_checkpoint(self, trainer: TrainerView, step: int) -> None:
        """Run when a checkpoint of this step is being written."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """`fit` is about to raise; the trainer holds a good state again."""


class Listeners:
    """Callbacks of a run, told of its events in their order.

    Args:
        trainer: what they are given.
        callbacks: the callbacks.
        on_record: gets each record first, or None.

    Raises:
        ConfigError: when `on_record` is no function.
    """

    def __init__(
        self, trainer: TrainerView, callbacks: Sequence[Callback], on_record: Callable[[Record], None] | None = None
    ) -> None:
        if on_record is not None and not callable(on_record):
            raise ConfigError(
                "on_record is no function", expected="on_record(record)", got=repr(on_record)[:80], hint="print"
            )
        self._trainer, self._callbacks, self._on_record = trainer, callbacks, on_record
        self._untold = deque[tuple[Event, str, Callable[..., None]]]()

    def tell(self, event: Event) -> None:
        """Tell all of them; of the first that fails the others hear nothing, but of records and last events all do.

        One that has something else told meanwhile, as saving does, has the others hear of this first.
        """
        self.finish()
        if event.name == "resume":
            self._resume(event.value)
            return
        self._untold.extend((event, *told) for told in self._told(f"on_{event.name}"))
        self.finish()

    def finish(self) -> None:
        """Tell those that have not heard yet of what is being told."""
        while self._untold:
            event, what, tell = self._untold.popleft()
            values = () if event.value is None else (event.value,)
            if event.error is not None:
                with noted(event.error, what):
                    tell(*values)
                continue
            try:
                tell(*values)
            except BaseException as failure:
                while self._untold:  # the others count a record, too, and before what one of them has told meanwhile
                    event, other, tell = self._untold.popleft()
                    if event.name == "record":
                        with noted(failure, other):
                            tell(event.value)
                raise

    def _told(self, event: str) -> Generator[tuple[str, Callable[..., None]]]:
        """Who hears of an event, and what it is called in a note."""
        if event == "on_record" and self._on_record is not None:
            yield event, self._on_record
        for callback in self._callbacks if hasattr(Callback, event) else ():
            yield f"{type(callback).__name__}.{event}", partial(getattr(callback, event), self._trainer)

    def states(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them."""
        # Copies: a callback may go on counting in what it returned.
        states = {name: copy.deepcopy(callback.state()) for name, callback in self._named()}
        return {name: state for name, state in states.items() if state is not None}

    def _resume(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._named():
            if (state := states.get(name)) is not None:
                callback.resume(state)

    def _named(self) -> list[tuple[str, Callback]]:
        """Name the callbacks by their classes, and those of one class by their order."""
        classes = [type(callback).__name__ for callback in self._callbacks]
        return [(f"{name} {classes[:at].count(name)}", self._callbacks[at]) for at, name in enumerate(classes)]


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return the callbacks, of any iterable; raise for what is none, before anything runs."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            "callbacks is no list of callbacks",
            expected="callbacks=[EarlyStopping()]",
            got=repr(callbacks)[:80],
            hint="put a single one into a list",
        )
    found = tuple(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(
                "a callback is none",
                expected="objects of subclasses of lowtide.train.Callback",
                got=repr(callback)[:80],
                hint="a class has to be called, EarlyStopping(); a function goes into on_record=",
            )
        events = [name for name in dir(Callback) if name.startswith("on_")]
        for name in dir(type(callback)):
            ours = name.replace("train_batch", "step").replace("batch", "step")  # the words of other libraries
            if name.startswith("on_") and name not in events and (near := get_close_matches(ours, events, 1, 0.75)):
                warnings.warn(
                    f"{type(callback).__name__}.{name} is never called by a trainer\nhint: did you mean {near[0]}?",
                    UserWarning,
                    stacklevel=level_of_user(),
                )
    return found


@contextlib.contextmanager
def _writing(path: Path, what: str) -> Generator[None]:
    """Say what cannot be written to."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written", got=error.strerror or error, hint=f"choose another {what}"
        ) from error


class JsonlLogger(Callback):
    """Write every record as a line of JSON; what is no finite number as null, for JSON has none.

    Args:
        path: the file; lines are added at its end, by the first process where there are several.

    Raises:
        OutputError: when it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_writing = False

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Make its folder, and raise now rather than at the first record."""
        if trainer.processes.is_first:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(trainer, "")

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write one."""
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._write(trainer, json.dumps(values) + "\n")

    def state(self) -> None:
        """Make what was written survive a power cut; asked for before every checkpoint."""
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def _write(self, trainer: TrainerView, line: str) -> None:
        self._is_writing = trainer.processes.is_first
        if self._is_writing:
            with _writing(self.path, "path"), self.path.open("a", encoding="utf-8") as file:
                file.write(line)


class Scalars(Callback):
    """Give every value of the records to a writer: TensorBoard's, or anything with ``add_scalar(name, value, step)``.

    Args:
        writer: for instance a ``SummaryWriter(folder)`` of tensorboardX or of torch.utils.tensorboard; of Weights &
            Biases a run, whose ``log(values, step=)`` is called.

    Raises:
        ConfigError: for what has neither method.
    """

    def __init__(self, writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise ConfigError(
                "the writer can write no scalars",
                expected="add_scalar(name, value, step), or log(values, step=step)",
                got=type(writer).__name__,
                hint="pass tensorboardX.SummaryWriter(folder), or wandb.init(...)",
            )
        self.writer = writer

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write one."""
        if not trainer.processes.is_first:
            return
        values = {name: value for name, value in record.items() if name != "step"}
        if not hasattr(self.writer, "add_scalar"):
            self.writer.log(values, step=record["step"])
            return
        for name, value in values.items():
            self.writer.add_scalar(name, value, record["step"])

    def on_train_end(self, trainer: TrainerView) -> None:
        """Flush."""
        if hasattr(self.writer, "flush"):
            self.writer.flush()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Flush."""
        self.on_train_end(trainer)


class TensorBoard(Callback):
    """Write every value of the records for TensorBoard, with tensorboardX.

    A run that is resumed writes into the same folder: TensorBoard then hides what was written of steps that are done
    again. Values of the last moments before a process is killed may be missing; those of `JsonlLogger` are not. For
    another writer there is `Scalars`.

    Args:
        directory: where to.

    Raises:
        ConfigError: when a run begins and tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._scalars: Scalars | None = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Open a file, in the first process where there are several."""
        if not trainer.processes.is_first:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard needs tensorboardX", hint='pip install "lowtide[tensorboard]"') from error

        step = trainer.step
        # Files of the same second would have the same name.
        purge_step, suffix = (step + 1, f".{step}") if step else (None, "")
        with _writing(self.directory, "folder"):
            writer = SummaryWriter(str(self.directory), purge_step=purge_step, filename_suffix=suffix)
        self._scalars = Scalars(writer)

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        """Write one."""
        if self._scalars is not None:
            self._scalars.on_record(trainer, record)

    def on_train_end(self, trainer: TrainerView) -> None:
        """Close the file."""
        if self._scalars is not None:
            self._scalars.writer.close()
            self._scalars = None

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Keep what there is."""
        self.on_train_end(trainer)


class Profile(Callback):
    """Write a profile of chosen steps, for TensorBoard's or Perfetto's viewer.

    Args:
        directory: where to; a folder below it for each process, where there are several.
        first: the first profiled step, from 0, or where a resumed run begins later, that one; the very first one
            compiles.
        num_steps: how many.

    Raises:
        ConfigError: for a number out of range.
    """

    def __init__(self, directory: str | Path, *, first: int = 10, num_steps: int = 3) -> None:
        if not (is_count(first, 0) and is_count(num_steps, 1)):
            raise ConfigError(
                "no step would be profiled", got=f"{first!r}, {num_steps!r}", hint="first=10, num_steps=3"
            )
        self.directory, self.first, self.num_steps = Path(directory), first, num_steps
        self._running, self._end = False, -1

    def on_train_begin(self, trainer: TrainerView) -> None:
        """Look for the first step again in a run that begins before it."""
        if trainer.step <= self.first:
            self._end = -1

    def on_step_begin(self, trainer: TrainerView, step: int) -> None:
        """Start before the first, once."""
        if self._end < 0 and step >= self.first:
            own = f"process-{jax.process_index()}" if trainer.processes.count > 1 else ""
            jax.profiler.start_trace(str(self.directory / own))
            self._running, self._end = True, step + self.num_steps

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        """Stop after the last, which has to have ended."""
        if self._running and step >= self._end:
            trainer.wait()
            self._stop()

    def on_train_end(self, trainer: TrainerView) -> None:
        """Stop where the run was shorter."""
        self._stop()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Keep what there is."""
        with contextlib.suppress(RuntimeError):
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
