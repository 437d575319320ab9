"""The training loop: `Session` yields the events of a run; `Run` passes each to the callbacks, then to the user's loop.

The values of a step, its loss and metrics, are read one step later, so the device never waits for the host. They are
read at once if a callback changes the training according to them (`is_immediate`). An interrupt may come between any
two lines. So the attributes of `Session` record which work is done, not the position in the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

from ..core import (
    ConfigError,
    DataError,
    LowtideError,
    NonFiniteError,
    OutputError,
    StateError,
    Tree,
    check_integer,
    leaves_with_paths,
)
from ..distributed import Processes, any_process, check_shared_folder
from ..memory import is_out_of_memory
from ._callbacks import Callback, Listeners
from ._compilation import CompiledStep
from ._data import DataCursor, DataEnd, refuse_arrays
from ._evaluation import Evaluation
from ._events import Event, Record, note_failure, user_stacklevel
from ._nan_policy import NonFinitePolicy
from ._signals import SigtermMonitor, TerminationRequested, install_handlers
from ._state import TrainStateStore
from .checkpoint import RunMetadata, Snapshots

_STOP, _TERMINATE = 1, 2
"""Actions that a process may request of all processes; the higher one has priority."""
_SINGLE_PASS_MODULES = {"builtins", "itertools", "grain"}
"""Iterators from these modules cannot be restarted. Another class, such as a user's loader, may restart itself."""


class FitOptions(TypedDict, total=False):
    """Optional arguments of `Trainer.fit` in addition to the data; its docstring explains them."""

    num_steps: int | None
    num_epochs: int | None
    eval_data: Iterable[Tree] | None
    eval_every: int | None
    checkpoint_every: int | None
    callbacks: Sequence[Callback]
    on_record: Callable[[Record], None] | None
    progress: bool


class Run:
    """A run in a loop of your own, made by `Trainer.session`; iterate it once.

    Mutable: it stores whether it was started.

    Args:
        session: yields the events.
        listeners: the callbacks, which receive each event first.
    """

    def __init__(self, session: Session, listeners: Listeners) -> None:
        self._session, self._listeners = session, listeners
        self._is_started = False

    @property
    def records(self) -> list[Record]:
        """Values of steps and evaluations so far, as `Trainer.fit` returns them."""
        return self._session.records

    def stop(self) -> None:
        """End the run after the current step, as if it were the last one: with an evaluation and a checkpoint.

        Raises:
            StateError: outside of the run's ``with`` block.
        """
        self._refuse_closed("stopped")
        self._session.stop()

    def settle(self) -> None:
        """Read the values of all steps so far; callbacks receive the resulting events now, and the loop does later.

        Raises:
            StateError: outside of the run's ``with`` block.
            NonFiniteError: for a loss, gradients or weights that are not finite, depending on `on_nan`.
        """
        self._refuse_closed("settled")
        self._session.deliver()

    def __iter__(self) -> Iterator[Event]:
        """Train, and yield the events in order; raise `StateError` outside of the ``with`` block or a second time."""
        if self._is_started:
            raise StateError("a run was iterated twice", hint="another session continues where it ended")
        self._refuse_closed()
        self._is_started = True
        for event in self._session:
            self._listeners.notify(event)
            yield event
            self._refuse_closed()
            while self._session.undelivered:
                yield self._session.undelivered.popleft()
                self._refuse_closed()

    def _refuse_closed(self, action: str = "iterated") -> None:
        if self._session.is_closed:
            raise StateError(f"a run was {action} outside of its with block", hint="start another session to continue")


class _DispatchedStep(NamedTuple):
    """A step that was dispatched to the device."""

    step: int
    metrics: Tree
    started: float
    requested_action: Any = 0
    """Highest action that any process requested: an integer, or an array that is ready after the step."""


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run of `Trainer.fit`; iterate it once, inside of `running`. Mutable: every step changes it.

    `Trainer.fit` describes the arguments and lists their errors.
    """

    store: TrainStateStore
    compiled: CompiledStep
    snapshots: Snapshots
    processes: Processes
    nan_policy: NonFinitePolicy
    evaluation: Evaluation
    listeners: Listeners
    """The callbacks. The session saves their states, and notifies them of events that its iteration does not yield."""
    cursor: DataCursor
    previous: DataCursor | None = None
    """The `final_cursor` of the previous run, if any."""
    eval_data: Iterable[Tree] | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        self._validate_arguments()
        step, metadata = self.store.step, self.snapshots.metadata
        self.records: list[Record] = []
        self.final_cursor: DataCursor | None = None
        """Cursor that the next run continues from; None until this run has ended."""
        self.is_over = False
        """Whether the last step was taken, or an exception has ended the run."""
        self.is_closed = False
        """Whether `running` has ended; the run cannot be iterated, stopped or settled any more."""
        self.is_stopped = False
        position = metadata.position or {}
        # After a failure at step 0, callbacks may have counted the evaluation of step 0 already; `position` tells.
        is_first = step == 0 and metadata.callbacks is None
        self._due_step: int | None = step if is_first or position.get("evaluate", step == 0) else None
        """Step to evaluate although it is neither a multiple of `eval_every` nor the last step; None without one."""
        if not self.cursor.continue_from(self.previous, metadata.position):
            self.cursor.start(step, metadata.position)
        self._batch: Tree = None
        """The last batch, to explain an out-of-memory error."""
        self._has_batch = False
        self._deferred_error: BaseException | None = None
        """Exception of a failed step whose record was already delivered; re-raised on the next iteration."""
        self.undelivered = deque[Event]()
        """Events that the callbacks have received, and the loop has not."""
        self._pending: list[_DispatchedStep] = []
        """Steps whose values were not read yet."""
        self._last_finish_time = 0.0
        self._requested_action = 0
        """Highest action requested by any process until the last step that was read; equal in all processes."""
        self._start_step = step
        is_evaluated = position.get("evaluated_at") == step and not (is_first or self.store.is_edited)
        self._evaluated_step: int | None = step if is_evaluated else None
        self._is_best = False
        """Whether the evaluation at `_evaluated_step` was the best so far, and no checkpoint of it is saved yet."""
        self._is_started = False
        """Whether callbacks were notified of the beginning."""
        self._has_resumed = False
        """Whether callbacks have received the event ``resume``, with their states if there are any."""
        self._is_waiting = False
        """Whether the run only waits for its checkpoints."""
        self._sigterm = SigtermMonitor(is_alone=self.processes.count == 1)

    # --- for the caller ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Protect the run while it is iterated: signals wait for steps, and an exception leaves a valid state."""
        notify = self.listeners.notify
        try:
            with self._sigterm, install_handlers(), self.processes.watched():
                try:
                    yield
                    if self._deferred_error is not None:  # the user's loop ended at the record of a failed step
                        raise self._deferred_error
                    if not self.is_over:  # the user's loop ended early: the state has to be valid, too
                        for events in (self.settle(), self._save_best()):
                            for event in events:
                                notify(event)
                        self._store_position()
                        self.is_over = True
                        if self._is_started:
                            notify(Event("train_end"))
                except BaseException as error:
                    try:
                        for event in self._handle_exception(error):
                            notify(event)
                    finally:
                        self.is_over = True
                        notify(Event("exception", error, error))
                    raise
        finally:
            self.is_closed = True

    def stop(self) -> None:
        self.is_stopped = True

    def metadata(self) -> RunMetadata:
        """Return the metadata of the state: the position in the data, and the states of callbacks."""
        position = self._position() if self.final_cursor is None else self.snapshots.metadata.position
        callbacks = self.listeners.states() if self._has_resumed else self.snapshots.metadata.callbacks
        return RunMetadata(position, callbacks)

    def deliver(self) -> None:
        """Read the values of all steps so far; callbacks receive the resulting events now, and the loop does later."""
        self.listeners.flush()
        for event in self.settle():
            self.undelivered.append(event)
            self.listeners.notify(event)

    def save(self) -> bool:
        """Start to write a checkpoint of the state and `metadata`; return whether one is written."""
        self.snapshots.prepare_save()
        self.deliver()  # restores an earlier state if that of the last steps is not finite
        return self.snapshots.save(self.metadata())

    # --- the run ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Train, and yield the events in order; see `Event`."""
        self._check_processes()
        self._is_started = True
        yield Event("train_begin")
        yield Event("resume", self.snapshots.metadata.callbacks or {})
        self._has_resumed = True
        self.snapshots.set_metadata(self.snapshots.metadata._replace(callbacks=None))
        if self.processes.count > 1 and any_process(self.is_stopped):
            self._requested_action = _STOP
        if self._due_step == self.store.step:
            yield from self._evaluate()
        self.snapshots.take(self.metadata())
        self.nan_policy.begin()
        yield from self._train()
        step, is_unfinished = self.store.step, self.is_stopped or self._sigterm.has_arrived
        if step == self._start_step > 0 and not (self.records or is_unfinished):
            warnings.warn(
                f"fit took no step: the trainer is at step {step} and epoch {self.cursor.epoch}\n"
                "hint: num_steps and num_epochs count from the beginning of the run, not of this fit",
                UserWarning,
                stacklevel=user_stacklevel(),
            )
        self.is_over = True
        yield Event("train_end")

    def _train(self) -> Iterator[Event]:
        is_open, step = False, self.store.step
        while not self._is_ending():
            try:
                batch = self._sigterm.wait_for_data(partial(self.cursor.next, step))
            except TerminationRequested:
                break
            if batch is DataEnd.RUN:
                break
            if batch is DataEnd.EPOCH:
                is_open = False
                yield from self._end_epoch(step)
                if self.cursor.is_over:
                    break
                continue
            if not is_open:
                yield Event("epoch_begin", self.cursor.epoch)
                is_open = True
            try:
                yield from self._step(step, batch)
            except Exception as error:
                yield from self._retry_smaller(error, step, batch)
            step = self.store.step
        yield from self.settle()
        is_terminated = any_process(self._sigterm.has_arrived)  # a signal to one machine ends the run on all
        if is_terminated:
            self._sigterm.mark_arrived()
        elif step > self._start_step:
            self._due_step = step
            yield from self._evaluate()
        yield from self._save(step)
        self._wait()
        self._store_position()  # last: closing an iterator may block, and the saved checkpoint is safe by then
        if is_terminated and self.processes.is_first:
            text, manager = "not saved, because there is no checkpoint_dir", self.snapshots.checkpoints
            if manager is not None:
                text = f"saved in {manager.directory}" if manager.latest_step() == step else "with nothing to save"
            logging.getLogger("lowtide").warning("SIGTERM: stopped after step %d, %s", step, text)

    def _retry_smaller(self, error: Exception, step: int, batch: Tree) -> Iterator[Event]:
        """Continue a planned run after an out-of-memory error: with a smaller step, from the newest copy of the state.

        Raise the error again if the step cannot be planned again, or if there is no copy.
        """
        if self.processes.count > 1 or isinstance(error, LowtideError) or not is_out_of_memory(error):
            raise error
        # If the state is that of the next step, the error came later, in an evaluation or a checkpoint.
        is_alive = self.snapshots.is_alive()
        if (is_alive and self.store.step != step) or not self.compiled.replan(error, batch):
            raise error
        if is_alive:  # the step had not begun, so the batch is tried again
            yield from self._step(step, batch)
            return
        self._pending = []
        try:
            self.snapshots.recover()
            step = self.store.step
            self.cursor.go_back(step, self.snapshots.metadata.position)
        except LowtideError as failure:
            raise error from failure
        if self._evaluated_step is not None and self._evaluated_step > step:
            self._evaluated_step = None
        self.records[:] = [record for record in self.records if record["step"] <= step]
        yield Event("rollback", step)

    def _is_ending(self) -> bool:
        if self.processes.count == 1:
            return self.is_stopped or self._sigterm.has_arrived
        return bool(self._requested_action)

    def _step(self, step: int, batch: Tree) -> Iterator[Event]:
        yield Event("step_begin", step)
        is_first, self._batch, self._has_batch = not self._has_batch, batch, True
        if is_first:
            yield Event("preflight", self.compiled.preflight(batch))
        self._dispatch(step, batch)
        yield from self.settle(int(not self.listeners.is_immediate))
        yield Event("step_end", step + 1)
        if self.eval_every and (step + 1) % self.eval_every == 0:
            yield from self.settle()
            yield from self._evaluate()
        if self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            yield from self.settle()
            yield from self._save(step + 1)

    def _dispatch(self, step: int, batch: Tree) -> None:
        """Dispatch a step to the device; its values are pending from then on."""
        started = time.perf_counter()
        with self.compiled.dispatch(batch) as metrics:
            # An interrupt here would lose the values of a step that the state already includes.
            self._pending.append(_DispatchedStep(step + 1, metrics, started))
        action = _TERMINATE if self._sigterm.has_arrived else _STOP * self.is_stopped
        self._pending[-1] = self._pending[-1]._replace(requested_action=self.processes.max_action(action))

    def _end_epoch(self, step: int) -> Iterator[Event]:
        yield from self.settle()
        self.processes.agree(epoch=self.cursor.epoch, steps=step)
        if not self.eval_every:
            self._due_step = step
            yield from self._evaluate()
        self.store.give_back()  # a mutable object holds its arrays between epochs
        yield Event("epoch_end", self.cursor.epoch - 1)
        self.snapshots.take(self.metadata())  # after the hooks, which may change the model at the end of an epoch

    def settle(self, num_pending: int = 0) -> Iterator[Event]:
        """Read the values of all steps but the last `num_pending`; `nan_policy` may restore an earlier state."""
        while len(self._pending) > num_pending:
            sent = self._pending[0]
            # float() blocks until the device has computed the value.
            values = {name: float(value) for name, value in sent.metrics.items()}
            self._requested_action = max(self._requested_action, int(sent.requested_action))
            self.nan_policy.observe(values)
            del self._pending[0]
            record = self._make_record(sent, values)
            try:
                restored_step = self.nan_policy.check_step(sent.step, values)
            except BaseException as error:
                self._deferred_error = error
                yield self._record_event(record, error)
                self._deferred_error = None
                raise
            yield from self._rollback_events(restored_step)
            yield self._record_event(record)  # after the rollback: callbacks see a valid state
        if not num_pending:
            yield from self._rollback_events(self.nan_policy.check_weights())

    def _rollback_events(self, step: int | None) -> Iterator[Event]:
        if step is not None:
            self._pending = []  # steps of the discarded states
            yield Event("rollback", step)

    def _make_record(self, sent: _DispatchedStep, values: Mapping[str, float]) -> Record:
        # A step starts on the device once it is dispatched and the previous step has ended.
        start_time, self._last_finish_time = max(sent.started, self._last_finish_time), time.perf_counter()
        return {"step": sent.step, **values, "seconds": self._last_finish_time - start_time}

    def _record_event(self, record: Record, error: BaseException | None = None) -> Event:
        self.records.append(record)
        return Event("record", record, error)

    def _evaluate(self) -> Iterator[Event]:
        step = self.store.step
        if self.eval_data is None or self._evaluated_step == step:  # all processes agree on this
            return
        if self.processes.any(self._sigterm.has_arrived):
            self._requested_action = _TERMINATE
            return
        yield Event("evaluate_begin")
        values = None
        with (
            contextlib.suppress(TerminationRequested),
            self.processes.ending_together(lambda: self._sigterm.has_arrived),
        ):
            self.store.refresh()
            values = self.evaluation.means(self._sigterm.batches(self.eval_data))
        if values is None or self.processes.has_left:  # the run that continues evaluates again
            self._requested_action = _TERMINATE
            return
        yield Event("evaluate_end", {**values})
        record: Record = {"step": step, **{f"eval_{name}": value for name, value in values.items()}}
        checkpoints = self.snapshots.checkpoints
        self._is_best = checkpoints is not None and checkpoints.evaluated(step, record)
        self.store.mark_evaluated()
        self._evaluated_step = step  # before the hooks: after an interrupt, they must not count it again
        yield self._record_event(record)
        yield from self._save_best()

    def _save_best(self) -> Iterator[Event]:
        is_best, self._is_best = self._is_best, False
        if is_best and self.save():
            yield Event("checkpoint", self.store.step)

    def _is_due(self, step: int) -> bool:
        """Return whether the evaluation of a step is still due."""
        if self._evaluated_step == step or step < self._start_step:
            return False
        every, last_step = self.eval_every, self.cursor.num_steps
        is_scheduled = step > self._start_step and (step == last_step or (every is not None and step % every == 0))
        return is_scheduled or step == self._due_step

    def _save(self, step: int) -> Iterator[Event]:
        if self.snapshots.checkpoints is not None and step and self.save():
            yield Event("checkpoint", step)

    def _wait(self) -> None:
        if self.snapshots.checkpoints is not None:
            self._is_waiting = True
            self._sigterm.begin_final_wait()
            self.snapshots.checkpoints.wait()

    def _position(self) -> dict[str, Any]:
        """Return the position in the data at the state's step, and whether an evaluation is due there."""
        step = self.store.step
        if self.eval_data is None:
            return self.cursor.position(step)
        evaluated = {"evaluated_at": step} if self._evaluated_step == step and not self.store.is_edited else {}
        return {**self.cursor.position(step), "evaluate": self._is_due(step), **evaluated}

    def _store_position(self, error: BaseException | None = None) -> None:
        """Store the position in the data for a run that continues; after an exception, also the states of callbacks."""
        if self.nan_policy.has_rolled_back:
            self.cursor.end_after_rollback(self.snapshots.metadata.position)
        else:
            callbacks = None if self._has_resumed else self.snapshots.metadata.callbacks
            self.snapshots.set_metadata(RunMetadata(self._position(), callbacks))
            self.cursor.end_run(self.store.step, self.snapshots.metadata.position or {})
        self.final_cursor = self.cursor
        if error is not None and self._has_resumed and not self.nan_policy.has_rolled_back:
            # Last: if a callback's `state` raises, the position in the data must not be lost.
            self.snapshots.set_metadata(self.snapshots.metadata._replace(callbacks=self.listeners.states()))

    # --- after an exception ----------------------------------------------------------------------------------------

    def _handle_exception(self, error: BaseException) -> Iterator[Event]:
        """Restore a valid state after an exception; a single process also saves it if `_is_worth_saving` is true."""
        self.processes.fail()
        is_alone = self.processes.count == 1  # saving and restoring need all processes
        yield from self._read_pending(error, is_alone)
        was_alive = self.snapshots.is_alive()
        if was_alive and is_alone and not self.nan_policy.has_rolled_back and not self.is_over:
            self.nan_policy.restore_finite_weights(error)
        state_message = self.snapshots.recover()
        if not was_alive:
            self.nan_policy.mark_rolled_back()
        if self._has_batch and is_out_of_memory(error) and not isinstance(error, LowtideError):
            with note_failure(error, "explaining it"):
                error.add_note(str(self.compiled.shortage(self._batch, "in fit")))
        error.add_note(state_message)
        if is_alone and self._is_worth_saving(error):
            with note_failure(error, "the checkpoint"):
                for event in self._save(self.store.step):
                    yield event._replace(error=error)
        # A run that is over has stored its position, and a callback may have restored another state since.
        if self.nan_policy.has_rolled_back or not self.is_over:
            with note_failure(error, "leaving the data"):
                self._store_position(error)
        if is_alone and not (self._is_waiting and isinstance(error, KeyboardInterrupt)):  # Ctrl-C ends the wait
            with note_failure(error, "the checkpoint"):
                self._wait()

    def _read_pending(self, error: BaseException, is_alone: bool) -> Iterator[Event]:
        """Yield the records of the pending steps; `nan_policy` may restore an earlier state."""
        pending, self._pending = self._pending, []
        events: list[Event] = []
        for sent in pending:
            try:
                values = {name: float(value) for name, value in sent.metrics.items()}
            except Exception:  # the step failed on the device, so it has no values
                break
            record = self._make_record(sent, values)
            self.nan_policy.handle_last_step(error, sent.step, values, is_alone=is_alone)
            events.append(self._record_event(record, error))
        yield from events  # last: a hook may save the state, which `nan_policy` has to check first

    def _is_worth_saving(self, error: BaseException) -> bool:
        if self.nan_policy.has_nonfinite_values or self.nan_policy.has_rolled_back or self.is_over:
            return False
        if isinstance(error, NonFiniteError):
            return self.nan_policy.has_dropped_update
        # A ConfigError in the first step is a bug of the script. A checkpoint would be in the way of the fixed script.
        return not isinstance(error, ConfigError) or self.store.step > self._start_step + 1

    # --- validation ------------------------------------------------------------------------------------------------

    def _validate_arguments(self) -> None:
        """Raise for invalid arguments, or if a later step has a checkpoint, since Orbax saves no earlier step then."""
        checkpoints, eval_data, step = self.snapshots.checkpoints, self.eval_data, self.store.step
        latest = None if checkpoints is None else checkpoints.look_again()
        if checkpoints is not None and latest is not None and latest > step:
            problem = f"{checkpoints.directory} holds a checkpoint of step {latest}, but the trainer is at step {step}"
            hint = "call trainer.restore() to continue that run, or choose another checkpoint_dir"
            raise OutputError(problem, hint=hint)
        if checkpoints is not None and checkpoints.best is not None and eval_data is None:
            raise ConfigError(f"best={checkpoints.best!r} needs evaluations", hint="pass eval_data and eval_every")
        for name, interval in (("eval_every", self.eval_every), ("checkpoint_every", self.checkpoint_every)):
            if interval is not None:
                check_integer(name, interval, hint="None means never")
        if eval_data is None:
            if self.eval_every is not None:
                raise ConfigError("eval_every needs eval_data", hint="fit(..., eval_data=batches)")
            return
        refuse_arrays(eval_data)
        if isinstance(eval_data, Iterator) and type(eval_data).__module__.split(".")[0] in _SINGLE_PASS_MODULES:
            problem = f"eval_data must return its batches more than once, which a {type(eval_data).__name__} cannot"
            hint = "list(eval_data), if its batches fit in memory; or an object whose __iter__ starts again"
            raise DataError(problem, hint=hint)

    def _check_processes(self) -> None:
        """Raise if the processes would not run the same program."""
        types = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_with_paths(self.store.state)]
        if self.snapshots.checkpoints is not None:
            check_shared_folder(self.processes, self.snapshots.checkpoints.directory)
        self.processes.agree(
            step=self.store.step,
            **self.cursor.limits,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            eval_data=self.eval_data is not None,
            state=types,
        )
