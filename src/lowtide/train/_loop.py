"""The loop of `Trainer.fit`: what happens in which order, and what after an exception.

Values of a step are read a step later, so that the device never waits for the host to read a loss before the next step
is sent to it; unless a callback changes the training by them (`Callback.is_immediate`).

What has been done is told by the state, and not by how far the loop came: an interrupt may come between any two lines.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ..core import ConfigError, LowtideError, NonFiniteError, StateError, Tree, leaves_with_paths
from ..distributed import in_any, refuse_other_folders
from ..memory import is_out_of_memory
from ._callbacks import Callback, Record
from ._checks import refuse_fit_arguments
from ._feed import Event, Feed, StepData
from ._finite import not_finite
from ._rollback import Ended, Terminated, is_alive, valves

if TYPE_CHECKING:
    from ._trainer import Trainer

_STOP, _TERMINATE = 1, 2
"""What a process may wish of the others."""
_MAX_ROLLBACKS, _MAX_SKIPS = 3, 100
"""How often a run may go back to one copy, and how many steps in a row it may skip, before it gives up."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One call of `Trainer.fit`, whose arguments these are."""

    trainer: Trainer
    data: StepData | Iterable[Tree]
    num_steps: int | None
    num_epochs: int | None
    eval_data: Iterable[Tree] | None
    eval_every: int | None
    checkpoint_every: int | None
    callbacks: Sequence[Callback]
    on_record: Callable[[Record], None] | None
    progress: bool

    def __post_init__(self) -> None:
        self._refuse()
        self.records: list[Record] = []
        self.feed = Feed(self.data, self.num_steps, self.num_epochs)
        step, position = self.trainer.step, self.trainer.position or {}
        # Callbacks that go on from a failure have counted the evaluation of step 0, unless the position says no.
        is_first = step == 0 and self.trainer.callback_states is None
        self._due: int | None = step if is_first or position.get("evaluate", step == 0) else None
        """The step at which an evaluation is still to come, where no rule says so."""
        if not self.feed.go_on(self.trainer.feed, self.trainer.position):
            self.feed.start(self.trainer.step, self.trainer.position)
        if self.progress and self.trainer.processes.is_first:
            from ._progress import Progress

            self.callbacks = (Progress(self.feed.num_steps), *self.callbacks)
        self._keep = int(not any(callback.is_immediate for callback in self.callbacks))
        """The steps whose values are not read yet when the next one is sent."""
        self._batch: Tree = None
        """The last batch, to explain a shortage of memory with."""
        self._has_batch = False
        self._pending: list[tuple[int, Tree, float, Any]] = []
        self._started = 0.0
        self._wish = 0
        """The largest wish of all processes, as far as it is known: the same in all of them."""
        self._finished = 0.0
        self._begun = step
        self._evaluated_at: int | None = None
        self._num_wrong = 0
        """Steps in a row whose loss or gradients are no numbers."""
        self._odd: frozenset[str] | None = None
        """What trains and was not finite when the run began, which is no harm then; None before that."""
        self._asked_at = step
        """The step at which weights were last asked whether they are finite."""
        self._num_rollbacks, self._backs = 0, (-1, -1)
        """How often the run went back to one copy, its step, and the one it went on from: a checkpoint there is it."""
        self.is_over = False
        """Whether the last step was taken, or an exception has ended the run."""
        self._is_back = False
        """Whether the run ends at an earlier state than its last, whose data position the trainer has."""
        self._is_spoilt = False
        """Whether the last step that was read had no finite loss or gradients, and nothing was done about it yet."""
        self._is_waiting = False
        """Whether it only waits for its checkpoints."""
        self._terminated = Terminated(is_alone=self.trainer.processes.count == 1)

    def _refuse(self) -> None:
        if self.trainer.loop is not None:
            raise StateError(
                "fit was called while fit is running",
                expected="one at a time",
                hint="call it after the other has returned",
            )
        refuse_fit_arguments(self.eval_every, self.checkpoint_every, self.eval_data, self.on_record)

    def run(self) -> list[Record]:
        """Train; see `Trainer.fit`."""
        trainer = self.trainer
        trainer.loop, trainer.metrics = self, None
        try:
            with self._terminated as terminated, valves(), trainer.processes.watched():
                try:
                    self._agree()
                    self._begin()
                    if self._due == trainer.step:
                        self._evaluate()
                    trainer.keep_copy((self._position(), self._states()))
                    self._odd = not_finite(trainer.state.trainable)
                    self._train(terminated)
                    self._warn_of_nothing()
                    self.is_over = True
                    self._tell("on_train_end")
                except BaseException as error:
                    self._fail(error)
                    raise
        finally:
            trainer.loop = None
        return self.records

    def _warn_of_nothing(self) -> None:
        step = self.trainer.step
        if (
            step == self._begun > 0
            and not self.records
            and not self.trainer.is_stopped
            and not self._terminated.has_come
        ):
            warnings.warn(
                f"fit took no step: the trainer is at step {step} and epoch {self.feed.epoch}\n"
                "hint: num_steps and num_epochs count from the beginning of the run, not of this fit",
                UserWarning,
                stacklevel=4,
            )

    def _begin(self) -> None:
        self._tell("on_train_begin")
        states, self.trainer.callback_states = self.trainer.callback_states or {}, None
        for name, callback in self._named():
            if (state := states.get(name)) is not None:
                callback.resume(state)
        if self.trainer.processes.count > 1 and in_any(self.trainer.is_stopped):
            self._wish = _STOP

    def _named(self) -> list[tuple[str, Callback]]:
        """The callbacks by their classes, and of one class by their order."""
        classes = [type(callback).__name__ for callback in self.callbacks]
        return [(f"{name} {classes[:at].count(name)}", self.callbacks[at]) for at, name in enumerate(classes)]

    def _train(self, terminated: Terminated) -> None:
        trainer, is_open = self.trainer, False
        step = trainer.step
        while not self._is_over(terminated):
            try:
                batch = terminated.waited(partial(self.feed.next, step))
            except Ended:
                break
            if batch is Event.END_OF_RUN:
                break
            if batch is Event.END_OF_EPOCH:
                is_open = False
                self._end_epoch(step)
                if self.num_epochs is not None and self.feed.epoch >= self.num_epochs:
                    break
                continue
            if not is_open:
                self._tell("on_epoch_begin", self.feed.epoch)
                is_open = True
            self._step(step, batch, terminated)
            step += 1
        self._flush()
        is_terminated = terminated.has_come = in_any(terminated.has_come)  # a machine goes with the others
        if step > self._begun and not is_terminated:
            self._due = step
            self._evaluate()
        self._save(step)
        self._wait()
        self._leave()  # last: the end of an iterator may be waited for, and what was saved is not lost with it then
        if is_terminated and trainer.processes.is_first:
            where, kept = "not saved, without a checkpoint_dir", trainer.checkpoints
            if kept is not None:
                where = f"saved there: {kept.directory}" if kept.latest_step() == step else "with nothing to save"
            logging.getLogger("lowtide").warning("SIGTERM: stopped after step %d, %s", step, where)

    def _wait(self) -> None:
        if self.trainer.checkpoints is not None:
            self._is_waiting = self._terminated.is_last = True
            self.trainer.checkpoints.wait()

    def _agree(self) -> None:
        """Raise where processes would not run the same program."""
        trainer = self.trainer
        kinds = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_with_paths(trainer.state)]
        numbers = {name: getattr(self, name) for name in ("num_steps", "num_epochs", "eval_every", "checkpoint_every")}
        if trainer.checkpoints is not None:
            refuse_other_folders(trainer.processes, trainer.checkpoints.directory)
        evaluates = self.eval_data is not None
        trainer.processes.agree(step=trainer.step, **numbers, eval_data=evaluates, state=kinds)

    def _is_over(self, terminated: Terminated) -> bool:
        if self.trainer.processes.count == 1:
            return self.trainer.is_stopped or terminated.has_come
        return bool(self._wish)

    def _step(self, step: int, batch: Tree, terminated: Terminated) -> None:
        self._tell("on_step_begin", step)
        is_first, self._batch, self._has_batch = not self._has_batch, batch, True
        if is_first:
            self._tell("on_preflight", self.trainer.preflight(batch))
        self._started = time.perf_counter()
        metrics = self.trainer.take_step(batch)
        wish = _TERMINATE if terminated.has_come else _STOP * self.trainer.is_stopped
        self._pending.append((step + 1, metrics, self._started, self.trainer.processes.vote(wish)))
        self.trainer.metrics = None
        self._flush(self._keep)
        self._tell("on_step_end", step + 1)
        if self.eval_every and (step + 1) % self.eval_every == 0:
            self._flush()
            self._evaluate()
        if self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            self._flush()
            self._save(step + 1)

    def _end_epoch(self, step: int) -> None:
        self._flush()
        self.trainer.processes.agree(epoch=self.feed.epoch, steps=step)
        if not self.eval_every:
            self._due = step
            self._evaluate()
        self.trainer.give_back()  # the object is whole between two epochs
        self._tell("on_epoch_end", self.feed.epoch - 1)
        self.trainer.keep_copy((self._position(), self._states()))  # with what was changed at the end of the epoch

    def _flush(self, keep: int = 0) -> None:
        """Read the values of the steps before, but of the last `keep`."""
        # A step begins on the device when it was sent there and the one before it has ended.
        while len(self._pending) > keep:
            step, metrics, started, vote = self._pending[0]
            values = {name: float(value) for name, value in metrics.items()}
            self._wish = max(self._wish, int(vote))
            wrong = _not_finite(values)
            self._is_spoilt = bool(wrong)
            del self._pending[0]
            begun, self._finished = max(started, self._finished), time.perf_counter()
            record = {"step": step, **values, "seconds": self._finished - begun}
            try:
                self._judge(step, values, wrong)
            except BaseException as error:
                self._emit(record, error)
                raise
            self._emit(record)  # the trainer has a good state when callbacks hear of it
        if not keep and self._asked_at != (step := self.trainer.step):  # what comes takes the state for a good one
            self._asked_at = step
            if spoilt := self._spoilt():
                self._is_spoilt = True
                self._judge(step, dict.fromkeys(spoilt, math.nan), spoilt)

    def _spoilt(self) -> list[str]:
        """The weights of which an update has made NaN or infinity."""
        if self._odd is None or self.trainer.on_nan == "ignore":
            return []
        return sorted(not_finite(self.trainer.state.trainable) - self._odd)

    def _judge(self, step: int, values: dict[str, float], wrong: Sequence[str]) -> None:
        """What to do when a step's loss or gradients are no numbers: raise, return to the last copy, or nothing."""
        if not wrong:
            self._num_wrong = 0
            return
        policy = self.trainer.on_nan
        self._num_wrong += 1
        if policy == "roll_back" and self._num_rollbacks < _MAX_ROLLBACKS:
            count = jnp.array(self.trainer.state.step)  # a copy; the batches that were seen stay behind
            if (back := self.trainer.roll_back()) is not None:
                self._num_rollbacks = (self._num_rollbacks if back in self._backs else 0) + 1
                self._backs = back, int(count)
                self.trainer.state = dataclasses.replace(self.trainer.state, step=count)
                self._pending, self._is_spoilt = [], False  # steps of states that are gone
                warnings.warn(
                    f"step {step}: {wrong[0]} is not finite; back to the weights of step {back}", stacklevel=2
                )
                return
        spoilt = self._spoilt()
        if policy == "ignore" or (policy == "skip" and self._num_wrong < _MAX_SKIPS and not spoilt):
            self._is_spoilt = False
            return
        hint = "lower the learning rate, or look for NaN in weights and data"
        if spoilt:
            hint = f"an update has spoilt {spoilt[0]}: look at the learning rate, its schedule and the optimizer"
        if spoilt or not self.trainer.is_guarded:
            self._is_back = self.trainer.roll_back() is not None
            if not self._is_back:
                hint = "the weights have got this step's update, for there was no copy: make a new Trainer"
        can_skip = policy == "abort" and self.trainer.is_guarded and not spoilt
        raise NonFiniteError(
            f"step {step}: {wrong[0]} is not finite"
            + (f", nor was it in the {self._num_wrong - 1} steps before" if self._num_wrong > 1 else ""),
            got=values[wrong[0]],
            hint=hint + (', or go on with on_nan="skip"' if can_skip else ""),
        )

    def _evaluate(self) -> None:
        step = self.trainer.step
        if self.eval_data is None or self._evaluated_at == step:
            return
        if self._is_terminated():
            return
        self._tell("on_evaluate_begin")
        processes = self.trainer.processes
        processes.ends, processes.has_left = lambda: self._terminated.has_come, False
        try:
            values = self.trainer.evaluate(self._terminated.batches(self.eval_data))
        except Ended:
            processes.has_left, values = True, {}
        finally:
            processes.ends = lambda: False
        if processes.has_left:  # it is made up for by the run that goes on
            self._wish = _TERMINATE
            return
        self._tell("on_evaluate_end", {**values})
        record = {"step": step, **{f"eval_{name}": value for name, value in values.items()}}
        checkpoints = self.trainer.checkpoints
        is_best = checkpoints is not None and checkpoints.evaluated(step, record)
        self._evaluated_at = step  # before callbacks count it: after an interrupt in one they do not do so again
        self._emit(record)
        if is_best and self.trainer.save():
            self._tell("on_checkpoint", step)

    def _is_terminated(self) -> bool:
        """Whether a signal has come to any process; all of them ask."""
        sharding = self.trainer.sharding
        has_come = self._terminated.has_come
        has_come = has_come if sharding is None else in_any(has_come, sharding.timeout_seconds)
        self._wish = max(self._wish, _TERMINATE * has_come)
        return has_come

    def _is_due(self, step: int) -> bool:
        """Whether the evaluation of a step is still to come."""
        if self._evaluated_at == step or step < self._begun:
            return False
        every, last = self.eval_every, self.feed.num_steps
        by_rule = step > self._begun and (step == last or (every is not None and step % every == 0))
        return by_rule or step == self._due

    def _save(self, step: int) -> None:
        trainer = self.trainer
        if trainer.checkpoints is not None and step and trainer.save():
            self._tell("on_checkpoint", step)

    def notes(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """What a checkpoint of the trainer's state has to say of the run: where the data is, and its callbacks."""
        self._flush()
        return self._position(), self._states()

    def _states(self) -> dict[str, Any]:
        # Copies: a callback may go on counting in what it returned.
        states = {name: copy.deepcopy(callback.state()) for name, callback in self._named()}
        return {name: state for name, state in states.items() if state is not None}

    def _position(self) -> dict[str, Any]:
        """Where the data is at the trainer's step, and whether an evaluation is due there."""
        step = self.trainer.step
        due = {} if self.eval_data is None else {"evaluate": self._is_due(step)}
        return {**self.feed.position(step), **due}

    def _fail(self, error: BaseException) -> None:
        """Bring the trainer to a good state, save it unless it is of no use, and tell everyone."""
        trainer = self.trainer
        trainer.processes.is_failing = True
        is_alone = trainer.processes.count == 1  # to save or go back they would all have to be here
        try:
            self._read_last(error, is_alone)
            was_alive = is_alive(trainer.state)
            if was_alive and is_alone and not self._is_back and not self.is_over:
                _tried(error, "going back", self._heal, error)
            holds = trainer.recover()
            self._is_back = self._is_back or not was_alive
            if self._has_batch and is_out_of_memory(error) and not isinstance(error, LowtideError):
                self._explain(error)
            error.add_note(holds)
            if is_alone and self._is_worth_saving(error):
                _tried(error, "the checkpoint", self._save, trainer.step)
            if self._is_back or not self.is_over:  # else the run had left it, and a callback may have gone elsewhere
                _tried(error, "leaving the data", self._leave, error)
            if is_alone and not (self._is_waiting and isinstance(error, KeyboardInterrupt)):  # they wait no longer
                _tried(error, "the checkpoint", self._wait)
        finally:
            self.is_over = True
            self._tell_all(error, "on_exception", error)

    def _is_worth_saving(self, error: BaseException) -> bool:
        if self._is_spoilt or self._is_back or self.is_over or isinstance(error, NonFiniteError):
            return False
        # A mistake of the script that the first step has shown: the next one would find a checkpoint in its way.
        return not isinstance(error, ConfigError) or self.trainer.step > self._begun + 1

    def _read_last(self, error: BaseException, is_alone: bool) -> None:
        """Give the records that nobody has read, and go back from a state that the last step has spoilt."""
        trainer = self.trainer
        pending, self._pending = self._pending, []
        if trainer.metrics is not None:
            pending.append((-1, trainer.metrics, self._started, 0))
        for step, metrics, started, _ in pending:
            try:
                values = {name: float(value) for name, value in metrics.items()}
                step = trainer.step if step < 0 else step
            except Exception:  # the step failed on the device: there are none
                return
            begun, self._finished = max(started, self._finished), time.perf_counter()
            if _not_finite(values) and trainer.on_nan in ("abort", "roll_back") and not trainer.is_guarded:
                if is_alone and not self._is_back:
                    _tried(error, "going back", trainer.roll_back)
                    error.add_note(f"{_not_finite(values)[0]} of step {step} is not finite")
                self._is_back = True
            self._emit({"step": step, **values, "seconds": self._finished - begun}, error)

    def _heal(self, error: BaseException) -> None:
        """Go back from weights that an update has spoilt, and nobody has noticed."""
        if spoilt := self._spoilt():
            error.add_note(f"an update has made {spoilt[0]} not finite")
            self._is_spoilt, self._is_back = True, self.trainer.roll_back() is not None

    def _leave(self, error: BaseException | None = None) -> None:
        """Remember where the data is, for another `fit` that goes on with it, and after an exception the callbacks."""
        trainer = self.trainer
        if self._is_back:
            self.feed.lose(trainer.position)
        else:
            trainer.position, trainer.callback_states = self._position(), None
            self.feed.leave(trainer.step, trainer.position)
        trainer.feed = self.feed
        if error is not None and not self._is_back:
            trainer.callback_states = self._states()  # last: one that fails must not lose the data's position

    def _explain(self, error: BaseException) -> None:
        """Say of an out-of-memory error of JAX who owns the bytes of the step."""
        try:
            error.add_note(str(self.trainer.shortage(self._batch, "in fit")))
        except Exception as failure:  # the user's error must never be hidden by ours
            error.add_note(f"lowtide: explaining it failed: {type(failure).__name__}: {failure}")

    def _emit(self, record: Record, error: BaseException | None = None) -> None:
        """Give a record to everyone, also when one of them raises; after an `error` nobody may replace that."""
        self.records.append(record)
        told = [(f"{type(each).__name__}.on_record", partial(each.on_record, self.trainer)) for each in self.callbacks]
        own = [] if self.on_record is None else [("on_record", self.on_record)]
        left = iter([*own, *told])
        for what, tell in left:
            if error is not None:
                _tried(error, what, tell, record)
                continue
            try:
                tell(record)
            except BaseException as failure:  # the others count it, too
                for other, tell_other in left:
                    _tried(failure, other, tell_other, record)
                raise

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *arguments)

    def _tell_all(self, error: BaseException, event: str, *arguments: Any) -> None:
        """Tell of an event after an exception, which no callback may replace or keep from the others."""
        for callback in self.callbacks:
            _tried(error, f"{type(callback).__name__}.{event}", getattr(callback, event), self.trainer, *arguments)


def _not_finite(values: Mapping[str, float]) -> list[str]:
    return [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]


def _tried(error: BaseException, what: str, do: Callable[..., Any], *arguments: Any) -> None:
    """Do something after an exception, to which a failure adds a note."""
    try:
        do(*arguments)
    except Exception as failure:
        error.add_note(f"lowtide: {what} failed: {type(failure).__name__}: {failure}")
