"""A run: an iterator of what happens in it, over a state, copies and data that others hold.

Who iterates it hears of each `Event` when it has happened, and decides nothing; `stop` ends it. The values of a step
are read a step later, so that the device never waits for the host to read a loss before the next step is sent to it;
unless somebody changes the training by them (`is_immediate`).

What has been done is told by the state, and not by how far the run came: an interrupt may come between any two lines.
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
"""What a process may wish of the others."""
_READ_ONCE = {"builtins", "itertools", "grain"}
"""Whose iterators never begin again; a loader of the user's may be its own iterator, and do so."""


class _Sent(NamedTuple):
    """A step that was sent to the device."""

    step: int
    metrics: Tree
    started: float
    vote: Any = 0


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run, to be iterated once, inside of `running`.

    Raises:
        ConfigError: for arguments that cannot be what they are for; see `Trainer.fit`.
        DataError: for data that holds no batches, or cannot go where the run is.
        OutputError: when there is a checkpoint of a later step.
    """

    live: LiveState
    """The state."""
    compiled: CompiledStep
    """The step."""
    copies: Copies
    """Where it can go back to."""
    processes: Processes
    """The other processes of the run."""
    guard: Guard
    """What to do about values that are no numbers."""
    feed: Feed
    """Its data."""
    evaluate: Callable[[Iterable[Tree]], dict[str, float]]
    """The means over the batches of an evaluation."""
    save: Callable[[], bool]
    """Begins to write a checkpoint of the state and `notes`; gives whether there was none."""
    states: Callable[[], Mapping[str, Any]] = dict
    """What a checkpoint keeps of those who hear of events, as JSON."""
    is_immediate: bool = False
    """Whether steps wait for their values."""
    before: Feed | None = None
    """The data that the run before has `left`."""
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
        """The values of steps and evaluations so far."""
        self.left: Feed | None = None
        """Its data, once it has left that, for the run that goes on."""
        self.is_over = False
        """Whether the last step was taken, or an exception has ended the run."""
        self.is_closed = False
        """Whether `running` has ended."""
        self.is_stopped = False
        """Whether `stop` was called."""
        position = notes.position or {}
        # Callbacks that go on from a failure have counted the evaluation of step 0, unless the position says no.
        is_first = step == 0 and notes.callbacks is None
        self._due: int | None = step if is_first or position.get("evaluate", step == 0) else None
        """The step at which an evaluation is still to come, where no rule says so."""
        if not self.feed.go_on(self.before, notes.position):
            self.feed.start(step, notes.position)
        self._batch: Tree = None
        """The last batch, to explain a shortage of memory with."""
        self._has_batch = False
        self._unraised: BaseException | None = None
        """What a step has failed with whose record was given, until it is raised."""
        self._pending: list[_Sent] = []
        """Steps whose values were not read yet."""
        self._finished = 0.0
        self._wish = 0
        """The largest wish of all processes, as far as it is known: the same in all of them."""
        self._begun = step
        is_seen = position.get("evaluated_at") == step and not (is_first or self.live.is_edited)
        self._evaluated_at: int | None = step if is_seen else None
        self._is_best = False
        """Whether the evaluation there was the best so far, and is not saved yet."""
        self._is_begun = False
        """Whether callbacks have heard of the beginning."""
        self._has_resumed = False
        """Whether they have what a checkpoint kept of them."""
        self._is_waiting = False
        """Whether it only waits for its checkpoints."""
        self._terminated = Terminated(is_alone=self.processes.count == 1)

    # --- for who drives it -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, tell: Callable[[Event], Any] = lambda event: None) -> Generator[None]:
        """Iterate it in here: signals wait for steps, and what is raised leaves a good state.

        Args:
            tell: hears of what happens after the iterator was left: the last records, or what is done about an
                exception before that goes on.
        """
        try:
            with self._terminated, valves(), self.processes.watched():
                try:
                    yield
                    if self._unraised is not None:  # who iterates it has left at the record
                        raise self._unraised
                    if not self.is_over:  # who leaves early leaves a good state, too
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
        """End after the step that is running, as if its last one had come."""
        self.is_stopped = True

    def notes(self) -> Notes:
        """Return what belongs to the state: where the data is, and who hears of events."""
        position = self._position() if self.left is None else self.copies.notes.position
        return Notes(position, self.states() if self._has_resumed else self.copies.notes.callbacks)

    # --- the run ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Give what happens, in order; see `Event`."""
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
        is_terminated = in_any(self._terminated.has_come)  # a machine goes with the others
        if is_terminated:
            self._terminated.come()
        elif step > self._begun:
            self._due = step
            yield from self._evaluate()
        yield from self._save(step)
        self._wait()
        self._leave()  # last: the end of an iterator may be waited for, and what was saved is not lost with it then
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
        self.live.give_back()  # the object is whole between two epochs
        yield Event("epoch_end", self.feed.epoch - 1)
        self.copies.keep(self.notes())  # with what was changed at the end of the epoch

    def settle(self, keep: int = 0) -> Iterator[Event]:
        """Read the values of the steps so far, but of the last `keep`; and go back from what they have spoilt.

        Who takes the state for a good one does so first.
        """
        # A step begins on the device when it was sent there and the one before it has ended.
        while len(self._pending) > keep:
            sent = self._pending[0]
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
            yield self._recorded(record)  # there is a good state when callbacks hear of it
        if not keep:
            yield from self._gone_back(self.guard.ask())

    def _gone_back(self, step: int | None) -> Iterator[Event]:
        if step is not None:
            self._pending = []  # steps of states that are gone
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
        if values is None or self.processes.has_left:  # it is made up for by the run that goes on
            self._wish = _TERMINATE
            return
        yield Event("evaluate_end", {**values})
        record: Record = {"step": step, **{f"eval_{name}": value for name, value in values.items()}}
        checkpoints = self.copies.checkpoints
        self._is_best = checkpoints is not None and checkpoints.evaluated(step, record)
        self.live.evaluated()
        self._evaluated_at = step  # before callbacks count it: after an interrupt in one they do not do so again
        yield self._recorded(record)
        yield from self._save_best()

    def _save_best(self) -> Iterator[Event]:
        is_best, self._is_best = self._is_best, False
        if is_best and self.save():
            yield Event("checkpoint", self.live.step)

    def _is_terminated(self) -> bool:
        """Whether a signal has come to any process; all of them ask."""
        has_come = self.processes.any(self._terminated.has_come)
        self._wish = max(self._wish, _TERMINATE * has_come)
        return has_come

    def _is_due(self, step: int) -> bool:
        """Whether the evaluation of a step is still to come."""
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
        """Where the data is at the step of the state, and whether an evaluation is due there."""
        step = self.live.step
        if self.eval_data is None:
            return self.feed.position(step)
        seen = {"evaluated_at": step} if self._evaluated_at == step and not self.live.is_edited else {}
        return {**self.feed.position(step), "evaluate": self._is_due(step), **seen}

    def _leave(self, error: BaseException | None = None) -> None:
        """Remember where the data is, for another run that goes on with it, and after an exception the callbacks."""
        if self.guard.is_back:
            self.feed.lose(self.copies.notes.position)
        else:
            self.copies.leave(Notes(self._position(), None if self._has_resumed else self.copies.notes.callbacks))
            self.feed.leave(self.live.step, self.copies.notes.position or {})
        self.left = self.feed
        if error is not None and self._has_resumed and not self.guard.is_back:
            # Last: one that fails must not lose the data's position.
            self.copies.leave(self.copies.notes._replace(callbacks=self.states()))

    # --- after an exception ----------------------------------------------------------------------------------------

    def _end(self, error: BaseException) -> Iterator[Event]:
        """Bring the state to a good one, and save it unless it is of no use."""
        self.processes.fail()
        is_alone = self.processes.count == 1  # to save or go back they would all have to be here
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
        if self.guard.is_back or not self.is_over:  # else the run had left it, and a callback may have gone elsewhere
            with noted(error, "leaving the data"):
                self._leave(error)
        if is_alone and not (self._is_waiting and isinstance(error, KeyboardInterrupt)):  # they wait no longer
            with noted(error, "the checkpoint"):
                self._wait()

    def _read_last(self, error: BaseException, is_alone: bool) -> Iterator[Event]:
        """Give the records that nobody has read, and go back from a state that the last step has spoilt."""
        pending, self._pending = self._pending, []
        events: list[Event] = []
        for sent in pending:
            try:
                values = {name: float(value) for name, value in sent.metrics.items()}
            except Exception:  # the step failed on the device: there are none
                break
            record = self._timed(sent, values)
            self.guard.go_back(error, sent.step, values, is_alone=is_alone)
            events.append(self._recorded(record, error))
        yield from events  # last: who saves at a record saves a state that is judged

    def _is_worth_saving(self, error: BaseException) -> bool:
        if self.guard.is_spoilt or self.guard.is_back or self.is_over:
            return False
        if isinstance(error, NonFiniteError):
            return self.guard.has_left_out
        # A mistake of the script that the first step has shown: the next one would find a checkpoint in its way.
        return not isinstance(error, ConfigError) or self.live.step > self._begun + 1

    # --- what is refused -------------------------------------------------------------------------------------------

    def refuse_another(self) -> None:
        """Raise for a run within this one."""
        raise StateError(
            "fit was called while fit is running",
            expected="one at a time",
            hint="call it after the other has returned",
        )

    def refuse(self, what: str, hint: str | None = None) -> None:
        """Raise while it takes steps."""
        if not self.is_over:
            raise StateError(
                f"{what} was called while fit takes steps",
                expected=f"{what} between two calls of fit, or in on_train_end or on_exception",
                got="a callback of steps, whose data and records would no longer be those of the state",
                hint=hint or f"call trainer.stop() there, and {what} after fit has returned",
            )

    def _refuse(self) -> None:
        """Raise for arguments that cannot be what they are for."""
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
    """Raise when there is a checkpoint of a later step: a run from here would save nothing."""
    latest = None if checkpoints is None else checkpoints.look_again()
    if checkpoints is not None and latest is not None and latest > step:
        raise OutputError(
            f"{checkpoints.directory}: holds a checkpoint of a later step than the trainer's",
            expected=f"none after step {step}",
            got=f"step {latest}",
            hint="call trainer.restore() to continue that run, or choose another checkpoint_dir",
        )
