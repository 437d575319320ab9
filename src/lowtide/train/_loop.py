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

from ..core import NonFiniteError, Tree
from ._callbacks import Callback, Record
from ._feed import Event, Feed, StepData
from ._rollback import Terminated, valves

if TYPE_CHECKING:
    from ._trainer import Trainer

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

    def __post_init__(self) -> None:
        self.records: list[Record] = []
        self.feed = Feed(self.data, self.num_steps, self.num_epochs)
        self.feed.start(self.trainer.step, self.trainer.position)
        self._pending: list[tuple[int, Tree, float]] = []
        self._finished = 0.0
        self._evaluated_at: int | None = None
        self._num_rollbacks = 0
        self._is_untrained = False
        """Whether a batch was read that no step has been taken on."""

    def run(self) -> list[Record]:
        """Train; see `Trainer.fit`."""
        trainer = self.trainer
        with Terminated() as terminated, valves():
            try:
                self._tell("on_train_begin")
                if trainer.step == 0:
                    self._evaluate()
                trainer.keep_copy(self.feed.position())
                self._train(terminated)
                self._tell("on_train_end")
            except BaseException as error:
                self._fail(error)
                raise
        return self.records

    def _train(self, terminated: Terminated) -> None:
        trainer, is_open = self.trainer, False
        begun = step = trainer.step
        while not (trainer.is_stopped or terminated.has_come):
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
            self._step(step, batch)
            step += 1
        self._flush()
        if step > begun and not terminated.has_come:
            self._evaluate()
        self._save(step)
        trainer.position = self.feed.position()
        if trainer.checkpoints is not None:
            trainer.checkpoints.wait()

    def _step(self, step: int, batch: Tree) -> None:
        self._tell("on_step_begin", step)
        started = time.perf_counter()
        metrics = self.trainer.advance(batch)
        self._is_untrained = False
        if not self._flush():  # else the run went back, and this step's state is gone
            self._pending.append((step + 1, metrics, started))
        self._tell("on_step_end", step + 1)
        if self.eval_every and (step + 1) % self.eval_every == 0:
            self._flush()
            self._evaluate()
        if self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            self._flush()
            self._save(step + 1)

    def _end_epoch(self, step: int) -> None:
        self._flush()
        if not self.eval_every:
            self._evaluate()
        self.trainer.keep_copy(self.feed.position())
        self._tell("on_epoch_end", self.feed.epoch - 1)

    def _flush(self) -> bool:
        """Read the values of the step before; whether that made the run go back."""
        # A step begins on the device when it was sent there and the one before it has ended.
        pending, self._pending = self._pending, []
        for step, metrics, started in pending:
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
                self.trainer.roll_back()
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
        self._emit({"step": step, **{f"eval_{name}": value for name, value in values.items()}})

    def _save(self, step: int) -> None:
        trainer = self.trainer
        if trainer.checkpoints is None or not step:
            return
        trainer.position = self._position()
        if trainer.save():
            self._tell("on_checkpoint", step)

    def _position(self) -> dict[str, Any]:
        """Where the data is at the trainer's step: a batch that was read in vain has to come again."""
        return self.feed.before if self._is_untrained else self.feed.position()

    def _fail(self, error: BaseException) -> None:
        self._pending, trainer = [], self.trainer
        trainer.position = here = self._position()
        error.add_note(trainer.recover())
        went_back = trainer.position is not here
        if isinstance(error, KeyboardInterrupt | SystemExit) and not went_back:
            self._save(trainer.step)
        if trainer.checkpoints is not None:
            trainer.checkpoints.wait()
        self._tell("on_exception", error)

    def _emit(self, record: Record) -> None:
        self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)
        self._tell("on_record", record)

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.trainer, *arguments)
