"""The loop of `Trainer.fit`: what happens in which order, and what after an exception.

Values of a step are read a step later, so that the device never waits for the host to read a loss before the next step
is sent to it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ..core import LowtideError, NonFiniteError, Tree, leaves_with_paths
from ..memory import is_out_of_memory
from ._callbacks import Callback, Record
from ._feed import Event, Feed, StepData
from ._processes import in_any
from ._progress import Progress
from ._rollback import Terminated, valves

if TYPE_CHECKING:
    from ._trainer import Trainer

_STOP, _TERMINATE = 1, 2
"""What a process may wish of the others."""
_MAX_ROLLBACKS = 3
"""How often in a row a run returns to its last copy before it gives up."""


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
        self.records: list[Record] = []
        self.feed = Feed(self.data, self.num_steps, self.num_epochs)
        if not self.feed.go_on(self.trainer.feed, self.trainer.position):
            self.feed.start(self.trainer.step, self.trainer.position)
        if self.progress and self.trainer.processes.is_first:
            self.callbacks = (Progress(self.feed.num_steps), *self.callbacks)
        self._batch: Tree = None
        """The last batch, to explain a shortage of memory with."""
        self._pending: list[tuple[int, Tree, float, Any]] = []
        self._wish = 0
        """The largest wish of all processes, as far as it is known: the same in all of them."""
        self._finished = 0.0
        self._evaluated_at: int | None = None
        self._num_rollbacks = 0
        self._is_back = False
        """Whether the run ends at an earlier state than its last, whose data position the trainer has."""
        self._is_untrained = False
        """Whether a batch was read that no step has been taken on."""

    def run(self) -> list[Record]:
        """Train; see `Trainer.fit`."""
        trainer = self.trainer
        with Terminated() as terminated, valves(), trainer.processes.watched():
            try:
                self._agree()
                self._begin()
                if trainer.step == 0:
                    self._evaluate()
                trainer.keep_copy(self.feed.position())
                self._train(terminated)
                self._tell("on_train_end")
            except BaseException as error:
                self._fail(error)
                raise
        return self.records

    def _begin(self) -> None:
        self._tell("on_train_begin")
        states, self.trainer.callback_states = self.trainer.callback_states or {}, None
        for name, callback in self._named():
            if (state := states.get(name)) is not None:
                callback.resume(state)

    def _named(self) -> list[tuple[str, Callback]]:
        """The callbacks by their classes, and of one class by their order."""
        classes = [type(callback).__name__ for callback in self.callbacks]
        return [(f"{name} {classes[:at].count(name)}", self.callbacks[at]) for at, name in enumerate(classes)]

    def _train(self, terminated: Terminated) -> None:
        trainer, is_open = self.trainer, False
        begun = step = trainer.step
        while not self._is_over(terminated):
            self._is_untrained = True
            batch = self.feed.next(step)
            self._is_untrained = not isinstance(batch, Event)
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
        if step > begun and not is_terminated:
            self._evaluate()
        self._save(step)
        self._leave()
        if trainer.checkpoints is not None:
            trainer.checkpoints.wait()

    def _agree(self) -> None:
        """Raise where processes would not run the same program."""
        trainer = self.trainer
        kinds = [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_with_paths(trainer.state)]
        numbers = {name: getattr(self, name) for name in ("num_steps", "num_epochs", "eval_every", "checkpoint_every")}
        evaluates = self.eval_data is not None
        trainer.processes.agree(step=trainer.step, **numbers, eval_data=evaluates, state=kinds)

    def _is_over(self, terminated: Terminated) -> bool:
        if self.trainer.processes.count == 1:
            return self.trainer.is_stopped or terminated.has_come
        return bool(self._wish)

    def _step(self, step: int, batch: Tree, terminated: Terminated) -> None:
        self._tell("on_step_begin", step)
        is_first, self._batch = self._batch is None, batch
        if is_first:
            self._tell("on_preflight", self.trainer.preflight(batch))
        started = time.perf_counter()
        metrics = self.trainer.advance(batch)
        self._is_untrained = False
        wish = _TERMINATE if terminated.has_come else _STOP * self.trainer.is_stopped
        vote = self.trainer.processes.vote(wish)
        if not self._flush():  # else the run went back, and this step's state is gone
            self._pending.append((step + 1, metrics, started, vote))
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
            self._evaluate()
        self.trainer.keep_copy(self.feed.position())
        self._tell("on_epoch_end", self.feed.epoch - 1)

    def _flush(self) -> bool:
        """Read the values of the step before; whether that made the run go back."""
        # A step begins on the device when it was sent there and the one before it has ended.
        pending, self._pending = self._pending, []
        for step, metrics, started, vote in pending:
            self._wish = max(self._wish, int(vote))
            values = {name: float(value) for name, value in metrics.items()}
            begun, self._finished = max(started, self._finished), time.perf_counter()
            self._emit({"step": step, **values, "seconds": self._finished - begun})
            if self._goes_back(step, values):
                return True
        return False

    def _goes_back(self, step: int, values: dict[str, float]) -> bool:
        """What to do when a step's loss or gradients are no numbers: raise, return to the last copy, or nothing."""
        policy = self.trainer.on_nan
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]
        if not wrong:
            self._num_rollbacks = 0
            return False
        if policy == "roll_back" and self._num_rollbacks < _MAX_ROLLBACKS:
            self._num_rollbacks += 1
            count = jnp.array(self.trainer.state.step)  # a copy; the batches that were seen stay behind
            if self.trainer.roll_back() is not None:
                self.trainer.state = dataclasses.replace(self.trainer.state, step=count)
                return True
        if policy in ("abort", "roll_back"):
            if not self.trainer.is_guarded:
                self._is_back = self.trainer.roll_back() is not None
            name = wrong[0]
            raise NonFiniteError(
                f"step {step}: {name} is not finite",
                got=values[name],
                hint='lower the learning rate, look for NaN in weights and data, or go on with on_nan="skip"',
            )
        return False

    def _evaluate(self) -> None:
        step = self.trainer.step
        if self.eval_data is None or self._evaluated_at == step:
            return
        self._evaluated_at = step
        values = self.trainer.evaluate(self.eval_data, callbacks=self.callbacks)
        record = {"step": step, **{f"eval_{name}": value for name, value in values.items()}}
        self._emit(record)
        if self.trainer.checkpoints is not None and self.trainer.checkpoints.evaluated(step, record):
            self._save(step)

    def _save(self, step: int) -> None:
        trainer = self.trainer
        if trainer.checkpoints is None or not step:
            return
        trainer.position = self._position()
        states = {name: callback.state() for name, callback in self._named()}
        trainer.callback_states = {name: state for name, state in states.items() if state is not None}
        is_new, trainer.callback_states = trainer.save(), None
        if is_new:
            self._tell("on_checkpoint", step)

    def _position(self) -> dict[str, Any]:
        """Where the data is at the trainer's step: a batch that was read in vain has to come again."""
        return self.feed.before if self._is_untrained else self.feed.position()

    def _fail(self, error: BaseException) -> None:
        self._pending, trainer = [], self.trainer
        trainer.processes.is_failing = True
        if not self._is_back:
            trainer.position = self._position()
        here = trainer.position
        error.add_note(trainer.recover())
        if self._batch is not None and is_out_of_memory(error) and not isinstance(error, LowtideError):
            self._explain(error)
        went_back = self._is_back or trainer.position is not here
        is_alone = trainer.processes.count == 1  # to save they would all have to be here
        if isinstance(error, KeyboardInterrupt | SystemExit) and not went_back and is_alone:
            self._save(trainer.step)
        if not went_back:
            self._leave()
        if trainer.checkpoints is not None and is_alone:
            trainer.checkpoints.wait()
        self._tell("on_exception", error)

    def _leave(self) -> None:
        """Remember where the data is, for another `fit` that goes on with it."""
        self.trainer.position, self.trainer.feed = self._position(), self.feed
        self.trainer.callback_states = None
        self.feed.leave(self.trainer.position, is_untrained=self._is_untrained)

    def _explain(self, error: BaseException) -> None:
        """Say of an out-of-memory error of JAX who owns the bytes of the step."""
        try:
            error.add_note(str(self.trainer.shortage(self._batch, "in fit")))
        except Exception as failure:  # the user's error must never be hidden by ours
            error.add_note(f"lowtide: explaining it failed: {type(failure).__name__}: {failure}")

    def _emit(self, record: Record) -> None:
        self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)
        self._tell("on_record", record)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *arguments)
