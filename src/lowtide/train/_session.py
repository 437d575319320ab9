"""A run: an iterator of the events of a training loop. State, copies and data belong to other objects.

The caller that iterates it receives each `Event` after it has happened; `stop` ends the run. The values of a step are
read one step later, so the device never waits for the host to read a loss. The exception is `is_immediate`: callbacks
that change the training by the values.

An interrupt may come between any two lines. So the state records which work is done, not the position in the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..core import (
    ConfigError,
    DataError,
    LowtideError,
    NonFiniteError,
    OutputError,
    StateError,
    Tree,
    is_count,
    leaves_with_paths,
)
from ..distributed import Processes, in_any, refuse_other_folders
from ..memory import is_out_of_memory
from ._checkpoint import Checkpoints
from ._compiled import CompiledStep
from ._data import DataEnd, Feed, refuse_arrays
from ._events import Event, Record, level_of_user, noted
from ._finite import Guard
from ._recovery import Copies, Notes
from ._signals import Ended, Terminated, valves
from ._state import LiveState

_STOP, _TERMINATE = 1, 2
"""Actions that a process may request of all processes; the higher one has priority."""
_READ_ONCE = {"builtins", "itertools", "grain"}
"""Iterators from these modules cannot be restarted. A user's loader may be its own iterator and restart."""


class _Sent(NamedTuple):
    """A step that was dispatched to the device."""

    step: int
    metrics: Tree
    started: float
    vote: Any = 0


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run, to be iterated once, inside of `running`.

    Raises:
        ConfigError: for invalid arguments; see `Trainer.fit`.
        DataError: for data that holds no batches, or cannot continue at the run's step.
        OutputError: when there is a checkpoint of a later step.
    """

    live: LiveState
    """State of the training."""
    compiled: CompiledStep
    """The compiled step."""
    copies: Copies
    """Copies of the state that the run can return to."""
    processes: Processes
    """The other processes of the run."""
    guard: Guard
    """Policy for values that are not finite."""
    feed: Feed
    """Training data."""
    evaluate: Callable[[Iterable[Tree]], dict[str, float]]
    """Returns the means over the batches of an evaluation."""
    save: Callable[[], bool]
    """Starts to write a checkpoint of the state and `notes`; returns whether there was none."""
    states: Callable[[], Mapping[str, Any]] = dict
    """Returns the states of callbacks that a checkpoint keeps, as JSON."""
    is_immediate: bool = False
    """Whether the values of a step are read before the next step is dispatched."""
    before: Feed | None = None
    """Data of the run before (its `left`)."""
    eval_data: Iterable[Tree] | None = None
    """Batches for evaluation."""
    eval_every: int | None = None
    """Steps between evaluations."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        step, notes = self.live.step, self.copies.notes
        _refuse_later_checkpoint(self.copies.checkpoints, step)
        self._refuse()
        self.records: list[Record] = []
        """Records of steps and evaluations so far."""
        self.left: Feed | None = None
        """The data at the end of the run, for the run that continues."""
        self.is_over = False
        """Whether the last step was taken, or an exception has ended the run."""
        self.is_closed = False
        """Whether `running` has ended."""
        self.is_stopped = False
        """Whether `stop` was called."""
        position = notes.position or {}
        # Callbacks that continue after a failure have counted the evaluation of step 0, unless the position denies it.
        is_first = step == 0 and notes.callbacks is None
        self._due: int | None = step if is_first or position.get("evaluate", step == 0) else None
        """Step of an evaluation that is still to come and that no rule (`eval_every`, the last step) covers."""
        if not self.feed.go_on(self.before, notes.position):
            self.feed.start(step, notes.position)
        self._batch: Tree = None
        """The last batch, to explain an out-of-memory error."""
        self._has_batch = False
        self._unraised: BaseException | None = None
        """Exception of a failed step whose record was already delivered; re-raised on the next iteration."""
        self._pending: list[_Sent] = []
        """Steps whose values were not read yet."""
        self._finished = 0.0
        self._wish = 0
        """Highest action requested by any process, as far as it was read; equal in all processes."""
        self._begun = step
        is_seen = position.get("evaluated_at") == step and not (is_first or self.live.is_edited)
        self._evaluated_at: int | None = step if is_seen else None
        self._is_best = False
        """Whether the evaluation at that step was the best so far, and no checkpoint of it is saved yet."""
        self._is_begun = False
        """Whether callbacks were notified of the beginning."""
        self._has_resumed = False
        """Whether callbacks have received their state from a checkpoint."""
        self._is_waiting = False
        """Whether the run only waits for its checkpoints."""
        self._terminated = Terminated(is_alone=self.processes.count == 1)

    # --- for the caller ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, tell: Callable[[Event], Any] = lambda event: None) -> Generator[None]:
        """Iterate the run inside this context: signals wait for steps, and an exception leaves a valid state.

        Args:
            tell: called with the events after the iterator was left: the last records, and the handling of an
                exception before it propagates.
        """
        try:
            with self._terminated, valves(), self.processes.watched():
                try:
                    yield
                    if self._unraised is not None:  # the loop was left at the record of the failed step
                        raise self._unraised
                    if not self.is_over:  # the loop was left early: the state has to be valid then, too
                        for events in (self.settle(), self._save_best()):
                            for event in events:
                                tell(event)
                        self._leave()
                        self.is_over = True
                        if self._is_begun:
                            tell(Event("train_end"))
                except BaseException as error:
                    try:
                        for event in self._end(error):
                            tell(event)
                    finally:
                        self.is_over = True
                        tell(Event("exception", error, error))
                    raise
        finally:
            self.is_closed = True

    def stop(self) -> None:
        """End after the current step, as if it were the last one."""
        self.is_stopped = True

    def notes(self) -> Notes:
        """Return the metadata of the state: the position of the data, and the states of callbacks."""
        position = self._position() if self.left is None else self.copies.notes.position
        return Notes(position, self.states() if self._has_resumed else self.copies.notes.callbacks)

    # --- the run ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Yield what happens, in order; see `Event`."""
        self._agree()
        self._is_begun = True
        yield Event("train_begin")
        yield Event("resume", self.copies.notes.callbacks or {})
        self._has_resumed = True
        self.copies.leave(self.copies.notes._replace(callbacks=None))
        if self.processes.count > 1 and in_any(self.is_stopped):
            self._wish = _STOP
        if self._due == self.live.step:
            yield from self._evaluate()
        self.copies.keep(self.notes())
        self.guard.begin()
        yield from self._train()
        self._warn_of_nothing()
        self.is_over = True
        yield Event("train_end")

    def _train(self) -> Iterator[Event]:
        is_open, step = False, self.live.step
        while not self._is_ending():
            try:
                batch = self._terminated.waited(partial(self.feed.next, step))
            except Ended:
                break
            if batch is DataEnd.RUN:
                break
            if batch is DataEnd.EPOCH:
                is_open = False
                yield from self._end_epoch(step)
                if self.feed.is_over:
                    break
                continue
            if not is_open:
                yield Event("epoch_begin", self.feed.epoch)
                is_open = True
            yield from self._step(step, batch)
            step += 1
        yield from self.settle()
        is_terminated = in_any(self._terminated.has_come)  # a signal to one machine ends the run on all
        if is_terminated:
            self._terminated.come()
        elif step > self._begun:
            self._due = step
            yield from self._evaluate()
        yield from self._save(step)
        self._wait()
        self._leave()  # last: closing an iterator may block, and the saved checkpoint is safe by then
        if is_terminated and self.processes.is_first:
            where, kept = "not saved, without a checkpoint_dir", self.copies.checkpoints
            if kept is not None:
                where = f"saved there: {kept.directory}" if kept.latest_step() == step else "with nothing to save"
            logging.getLogger("lowtide").warning("SIGTERM: stopped after step %d, %s", step, where)

    def _is_ending(self) -> bool:
        if self.processes.count == 1:
            return self.is_stopped or self._terminated.has_come
        return bool(self._wish)

    def _step(self, step: int, batch: Tree) -> Iterator[Event]:
        yield Event("step_begin", step)
        is_first, self._batch, self._has_batch = not self._has_batch, batch, True
        if is_first:
            yield Event("preflight", self.compiled.preflight(batch))
        started = time.perf_counter()
        self.compiled.run(batch, lambda metrics: self._pending.append(_Sent(step + 1, metrics, started)))
        wish = _TERMINATE if self._terminated.has_come else _STOP * self.is_stopped
        self._pending[-1] = self._pending[-1]._replace(vote=self.processes.vote(wish))
        yield from self.settle(int(not self.is_immediate))
        yield Event("step_end", step + 1)
        if self.eval_every and (step + 1) % self.eval_every == 0:
            yield from self.settle()
            yield from self._evaluate()
        if self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            yield from self.settle()
            yield from self._save(step + 1)

    def _end_epoch(self, step: int) -> Iterator[Event]:
        yield from self.settle()
        self.processes.agree(epoch=self.feed.epoch, steps=step)
        if not self.eval_every:
            self._due = step
            yield from self._evaluate()
        self.live.give_back()  # the object holds its arrays between two epochs
        yield Event("epoch_end", self.feed.epoch - 1)
        self.copies.keep(self.notes())  # after the hooks, which may change the model at the end of an epoch

    def settle(self, keep: int = 0) -> Iterator[Event]:
        """Read the values of all steps but the last `keep`, and restore an earlier state if they require it.

        Call it before the state is used as a good one.
        """
        # A step starts on the device once it was dispatched and the step before it has ended (see `_timed`).
        while len(self._pending) > keep:
            sent = self._pending[0]
            # float() blocks until the device has computed the value.
            values = {name: float(value) for name, value in sent.metrics.items()}
            self._wish = max(self._wish, int(sent.vote))
            self.guard.see(values)
            del self._pending[0]
            record = self._timed(sent, values)
            try:
                back = self.guard.judge(sent.step, values)
            except BaseException as error:
                self._unraised = error
                yield self._recorded(record, error)
                self._unraised = None
                raise
            yield from self._gone_back(back)
            yield self._recorded(record)  # after the rollback: callbacks see a valid state
        if not keep:
            yield from self._gone_back(self.guard.ask())

    def _gone_back(self, step: int | None) -> Iterator[Event]:
        if step is not None:
            self._pending = []  # steps of the discarded states
            yield Event("rollback", step)

    def _timed(self, sent: _Sent, values: Mapping[str, float]) -> Record:
        begun, self._finished = max(sent.started, self._finished), time.perf_counter()
        return {"step": sent.step, **values, "seconds": self._finished - begun}

    def _recorded(self, record: Record, error: BaseException | None = None) -> Event:
        self.records.append(record)
        return Event("record", record, error)

    def _evaluate(self) -> Iterator[Event]:
        step = self.live.step
        if self.eval_data is None or self._evaluated_at == step or self._is_terminated():
            return
        yield Event("evaluate_begin")
        values = None
        with contextlib.suppress(Ended), self.processes.leaving(lambda: self._terminated.has_come):
            values = self.evaluate(self._terminated.batches(self.eval_data))
        if values is None or self.processes.has_left:  # the run that continues evaluates again
            self._wish = _TERMINATE
            return
        yield Event("evaluate_end", {**values})
        record: Record = {"step": step, **{f"eval_{name}": value for name, value in values.items()}}
        checkpoints = self.copies.checkpoints
        self._is_best = checkpoints is not None and checkpoints.evaluated(step, record)
        self.live.evaluated()
        self._evaluated_at = step  # before the hooks: an interrupt in one must not make them count it twice
        yield self._recorded(record)
        yield from self._save_best()

    def _save_best(self) -> Iterator[Event]:
        is_best, self._is_best = self._is_best, False
        if is_best and self.save():
            yield Event("checkpoint", self.live.step)

    def _is_terminated(self) -> bool:
        """Return whether any process has received a signal; all processes have to call this."""
        has_come = self.processes.any(self._terminated.has_come)
        self._wish = max(self._wish, _TERMINATE * has_come)
        return has_come

    def _is_due(self, step: int) -> bool:
        """Return whether the evaluation of a step is still to come."""
        if self._evaluated_at == step or step < self._begun:
            return False
        every, last = self.eval_every, self.feed.num_steps
        by_rule = step > self._begun and (step == last or (every is not None and step % every == 0))
        return by_rule or step == self._due

    def _save(self, step: int) -> Iterator[Event]:
        if self.copies.checkpoints is not None and step and self.save():
            yield Event("checkpoint", step)

    def _wait(self) -> None:
        if self.copies.checkpoints is not None:
            self._is_waiting = True
            self._terminated.last()
            self.copies.checkpoints.wait()

    def _position(self) -> dict[str, Any]:
        """Return the position of the data at the state's step, and whether an evaluation is due there."""
        step = self.live.step
        if self.eval_data is None:
            return self.feed.position(step)
        seen = {"evaluated_at": step} if self._evaluated_at == step and not self.live.is_edited else {}
        return {**self.feed.position(step), "evaluate": self._is_due(step), **seen}

    def _leave(self, error: BaseException | None = None) -> None:
        """Store the position of the data for a run that continues, and after an exception the states of callbacks."""
        if self.guard.is_back:
            self.feed.lose(self.copies.notes.position)
        else:
            self.copies.leave(Notes(self._position(), None if self._has_resumed else self.copies.notes.callbacks))
            self.feed.leave(self.live.step, self.copies.notes.position or {})
        self.left = self.feed
        if error is not None and self._has_resumed and not self.guard.is_back:
            # Last: if a callback's state raises, the position of the data must not be lost.
            self.copies.leave(self.copies.notes._replace(callbacks=self.states()))

    # --- after an exception ----------------------------------------------------------------------------------------

    def _end(self, error: BaseException) -> Iterator[Event]:
        """Restore a valid state after an exception, and save it if it is worth saving."""
        self.processes.fail()
        is_alone = self.processes.count == 1  # saving and restoring need all processes, which may not come
        yield from self._read_last(error, is_alone)
        was_alive = self.copies.is_alive()
        if was_alive and is_alone and not self.guard.is_back and not self.is_over:
            self.guard.heal(error)
        holds = self.copies.recover()
        if not was_alive:
            self.guard.fall_back()
        if self._has_batch and is_out_of_memory(error) and not isinstance(error, LowtideError):
            with noted(error, "explaining it"):
                error.add_note(str(self.compiled.shortage(self._batch, "in fit")))
        error.add_note(holds)
        if is_alone and self._is_worth_saving(error):
            with noted(error, "the checkpoint"):
                for event in self._save(self.live.step):
                    yield event._replace(error=error)
        if self.guard.is_back or not self.is_over:  # else the run has left its data, and a callback may have moved on
            with noted(error, "leaving the data"):
                self._leave(error)
        if is_alone and not (self._is_waiting and isinstance(error, KeyboardInterrupt)):  # Ctrl-C ends the waiting
            with noted(error, "the checkpoint"):
                self._wait()

    def _read_last(self, error: BaseException, is_alone: bool) -> Iterator[Event]:
        """Yield the records that were not read yet, and restore an earlier state if the last step requires it."""
        pending, self._pending = self._pending, []
        events: list[Event] = []
        for sent in pending:
            try:
                values = {name: float(value) for name, value in sent.metrics.items()}
            except Exception:  # the step failed on the device, so it has no values
                break
            record = self._timed(sent, values)
            self.guard.go_back(error, sent.step, values, is_alone=is_alone)
            events.append(self._recorded(record, error))
        yield from events  # last: a hook that saves at a record saves a state that the guard has judged

    def _is_worth_saving(self, error: BaseException) -> bool:
        if self.guard.is_spoilt or self.guard.is_back or self.is_over:
            return False
        if isinstance(error, NonFiniteError):
            return self.guard.has_left_out
        # A bug of the script that shows in the first step: its checkpoint would be in the way of the corrected script.
        return not isinstance(error, ConfigError) or self.live.step > self._begun + 1

    # --- validation ------------------------------------------------------------------------------------------------

    def refuse_another(self) -> None:
        """Raise when a run is started inside this one."""
        raise StateError(
            "fit was called while fit is running",
            expected="one at a time",
            hint="call it after the other has returned",
        )

    def refuse(self, what: str, hint: str | None = None) -> None:
        """Raise while the run takes steps."""
        if not self.is_over:
            raise StateError(
                f"{what} was called while fit takes steps",
                expected=f"{what} between two calls of fit, or in on_train_end or on_exception",
                got="a callback of steps, whose data and records would no longer be those of the state",
                hint=hint or f"call trainer.stop() there, and {what} after fit has returned",
            )

    def _refuse(self) -> None:
        """Raise for invalid arguments."""
        checkpoints, eval_data = self.copies.checkpoints, self.eval_data
        if checkpoints is not None and checkpoints.best is not None and eval_data is None:
            raise ConfigError(
                f"best={checkpoints.best!r} needs evaluations",
                expected="fit(..., eval_data=...)",
                got="no eval_data",
                hint="pass batches to evaluate on, and eval_every",
            )
        for name, every in (("eval_every", self.eval_every), ("checkpoint_every", self.checkpoint_every)):
            if every is not None and not is_count(every, 1):
                raise ConfigError(
                    f"{name} is no number of steps",
                    expected="1 or more, or None for never",
                    got=every,
                    hint=f"{name}=100",
                )
        if eval_data is None:
            if self.eval_every is not None:
                raise ConfigError("eval_every needs eval_data", got="no eval_data", hint="fit(..., eval_data=batches)")
            return
        refuse_arrays(eval_data)
        if isinstance(eval_data, Iterator) and type(eval_data).__module__.split(".")[0] in _READ_ONCE:
            raise DataError(
                "eval_data gives its batches only once, and is evaluated at least twice",
                expected="a list, a grain dataset, or an object whose __iter__ begins again",
                got=type(eval_data).__name__,
                hint="list(eval_data), if its batches fit in memory",
            )

    def _agree(self) -> None:
        """Raise where processes would not run the same program."""
        kinds = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_with_paths(self.live.state)]
        every = {"eval_every": self.eval_every, "checkpoint_every": self.checkpoint_every}
        if self.copies.checkpoints is not None:
            refuse_other_folders(self.processes, self.copies.checkpoints.directory)
        evaluates = self.eval_data is not None
        self.processes.agree(step=self.live.step, **self.feed.ends, **every, eval_data=evaluates, state=kinds)

    def _warn_of_nothing(self) -> None:
        step = self.live.step
        if step == self._begun > 0 and not (self.records or self.is_stopped or self._terminated.has_come):
            warnings.warn(
                f"fit took no step: the trainer is at step {step} and epoch {self.feed.epoch}\n"
                "hint: num_steps and num_epochs count from the beginning of the run, not of this fit",
                UserWarning,
                stacklevel=level_of_user(),
            )


def _refuse_later_checkpoint(checkpoints: Checkpoints | None, step: int) -> None:
    """Raise when there is a checkpoint of a later step, because a run from here would not save anything."""
    latest = None if checkpoints is None else checkpoints.look_again()
    if checkpoints is not None and latest is not None and latest > step:
        raise OutputError(
            f"{checkpoints.directory}: holds a checkpoint of a later step than the trainer's",
            expected=f"none after step {step}",
            got=f"step {latest}",
            hint="call trainer.restore() to continue that run, or choose another checkpoint_dir",
        )
