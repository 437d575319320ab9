"""The training loop: one jitted step over what trains, with frozen leaves as a plain argument.

The step receives ``(trainable, opt_state, step, frozen, batch)`` and returns only what changed: the first three and
the metrics. Those three are donated, and the compiled program is checked to reuse every donated buffer, so exactly
one copy of the state lives on the device. Frozen leaves are never donated, copied or returned.

The trainer owns the trainable leaves from its construction on: the arrays it was given are consumed by the first
step. Read the current ones from `Trainer.model`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import (
    ConfigError,
    DataError,
    OutputError,
    SelectionError,
    Tree,
    Where,
    shared_leaves,
)
from ..memory import MemoryReport, Target, analyze, analyze_compiled, check_donation
from ..offload import LayerwiseStep
from ._checkpoint import Checkpoints
from ._step import STEP_ARGUMENTS, LayerStep, LossFn, Step, WholeStep, weighted

Record = dict[str, float | int]


class StepData(Protocol):
    """Batches by step number, such as a `grain.MapDataset`: what makes a run resumable at any step."""

    def __getitem__(self, index: int, /) -> Any:
        """The batch of a step."""
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "trainable", "opt_state"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    step: Any
    """Steps taken, an int32 scalar."""
    trainable: Tree
    """The trainable leaves, `None` elsewhere."""
    opt_state: Tree
    """The optimizer's state for them."""


class Trainer:
    """Train the selected leaves of any pytree with any Optax optimizer.

    Args:
        model: the model, a pytree. Its trainable arrays belong to the trainer from now on.
        loss_fn: ``loss_fn(model, batch)``: a scalar loss, or ``(loss, metrics)`` with a dictionary of scalars.
        tx: the optimizer, with clipping and schedules chained in as Optax has them. Or a step made by
            `lowtide.offload.layerwise_step`, for a model of ``outer`` and ``layers``: what trains, microbatches and
            placement are then said there, and `loss_fn` is for evaluation alone.
        wrt: which leaves train: glob patterns on tree paths, or a predicate ``(path, leaf) -> bool``.
        num_microbatches: into how many parts a batch is split for gradient accumulation.
        weight: a function of a batch that gives its weight in means over microbatches and evaluation batches, for
            instance its number of target tokens. By default all weigh the same; a layerwise step's own is taken.
        checkpoint_dir: where to keep checkpoints of the trainable state; none are written without it.
        max_to_keep: how many checkpoints to keep.

    Raises:
        SelectionError: when `wrt` selects nothing, or one array stands at two trainable paths.
        StructureError: for a layerwise step and a model that is not made of ``outer`` and ``layers``.
        ConfigError: when `wrt`, `num_microbatches` or a `weight` is given beside a layerwise step that has its own.

    Memory:
        Device: frozen leaves, one copy of trainable leaves and optimizer state, gradients of trainable leaves (and
        an accumulator of the same size with microbatches), activations of one microbatch.

    Examples:
        >>> model = {"base": jnp.full((), 2.0), "lora_a": jnp.zeros(())}
        >>> loss_fn = lambda m, x: (jnp.mean((m["base"] + m["lora_a"] - x) ** 2), {})
        >>> trainer = Trainer(model, loss_fn, optax.sgd(0.5), wrt="lora_*")
        >>> history = trainer.fit([jnp.ones(2)] * 3, num_steps=3)
        >>> float(trainer.model["lora_a"])
        -1.0
    """

    def __init__(
        self,
        model: Tree,
        loss_fn: LossFn,
        tx: optax.GradientTransformation | LayerwiseStep,
        *,
        wrt: Where = "**",
        num_microbatches: int = 1,
        weight: Callable[[Tree], Any] | None = None,
        checkpoint_dir: str | Path | None = None,
        max_to_keep: int = 2,
    ) -> None:
        if isinstance(tx, LayerwiseStep):
            _refuse_beside_layerwise(wrt=(wrt, "**"), num_microbatches=(num_microbatches, 1))
            if tx.weight is None:
                tx = dataclasses.replace(tx, weight=weight)
            elif weight not in (None, tx.weight):
                _refuse_beside_layerwise(weight=(weight, None))
            weight, self._step = tx.weight, LayerStep(model, tx)
        self._weight = weight or (lambda batch: jnp.float32(1))
        if not isinstance(tx, LayerwiseStep):
            self._step = WholeStep(model, loss_fn, tx, wrt, num_microbatches, self._weight)
        trainable, opt_state, frozen = self._step.init(model)
        # A NumPy array would be copied to the device again in every step.
        self.frozen = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, frozen)
        for paths in shared_leaves(trainable):
            raise SelectionError(
                f"{paths[0]} and {paths[1]} are the same array and both train",
                expected="one array at each trainable path, because each is donated to the step",
                hint="tie weights inside the model instead, or untie them with jnp.array(leaf, copy=True)",
            )
        self.state = TrainState(jnp.int32(0), trainable, opt_state)
        self._evaluate = jax.jit(functools.partial(_eval_step, self._step, loss_fn, self._weight))
        self._compiled: tuple[Any, Any] | None = None
        self.checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, max_to_keep=max_to_keep)

    @property
    def model(self) -> Tree:
        """The model as it is now; its trainable arrays are consumed by the next step."""
        return self._step.model(self.state.trainable, self.frozen)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return int(self.state.step)

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Any, Tree]]:
        """The pure step ``(trainable, opt_state, step, frozen, batch) -> (trainable, opt_state, step, metrics)``.

        Jitted with the first three arguments donated; `lowtide.memory.analyze` takes it as it is.
        """
        return jax.jit(self._step, donate_argnums=(0, 1, 2), keep_unused=True)

    def memory(self, batch: Tree, *, target: Target | str | None = None) -> MemoryReport:
        """Compiled bytes of the training step, per role (`STEP_ARGUMENTS`), before anything runs.

        Args:
            batch: a batch, or shapes of one.
            target: what to compile for; None for the hardware at hand, whose compiled step `fit` then uses.

        Returns:
            The report for one device.
        """
        roles = {name: position for position, name in enumerate(STEP_ARGUMENTS)}
        if target is None:
            return analyze_compiled(self._compile(batch), roles=roles)
        return analyze(self.step_fn, *self._arguments(batch), target=target, roles=roles)

    def fit(
        self,
        data: StepData,
        *,
        num_steps: int,
        eval_data: Iterable[Tree] | None = None,
        eval_every: int | None = None,
        checkpoint_every: int | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> list[Record]:
        """Train up to `num_steps` steps, counted from the beginning of the run.

        Args:
            data: batches by step number; step k (from 0) trains on ``data[k]``, so a resumed run sees what an
                uninterrupted one would.
            num_steps: the step to stop at; a restored trainer continues from its own step.
            eval_data: batches for held-out evaluation, at the first and last step and every `eval_every`.
            eval_every: steps between evaluations.
            checkpoint_every: steps between checkpoints; with a `checkpoint_dir` the last step is always saved.
            on_record: called with every record as soon as its values are known.

        Returns:
            The records: ``step``, ``loss``, ``grad_norm``, the loss function's metrics, ``seconds``; or ``step`` and
            ``eval_loss``. Norms cover trainable leaves only.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            ConfigError: when `checkpoint_every` is given without a `checkpoint_dir`.
            OutputError: when the `checkpoint_dir` holds a later step, so that nothing would be saved.
            DataError: when `data` ends before `num_steps`.
        """
        if checkpoint_every is not None and self.checkpoints is None:
            raise ConfigError("checkpoint_every needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
        self._refuse_later_checkpoint()
        records: list[Record] = []
        pending: list[tuple[int, Tree, float]] = []

        def emit(record: Record) -> None:
            records.append(record)
            if on_record is not None:
                on_record(record)

        finished = 0.0

        def flush() -> None:
            # One step late, so that reading a loss never keeps the device from starting the next step. A step begins
            # on the device when it was sent there and the one before it has ended.
            nonlocal finished
            for step, metrics, started in pending:
                values = {name: float(value) for name, value in metrics.items()}
                begun, finished = max(started, finished), time.perf_counter()
                emit({"step": step, **values, "seconds": finished - begun})
            pending.clear()

        if eval_data is not None and self.step == 0:
            emit({"step": 0, "eval_loss": self.evaluate(eval_data)})
        for step in range(self.step, num_steps):
            started = time.perf_counter()
            batch = jax.tree.map(jnp.asarray, _batch(data, step, num_steps))
            *state, metrics = self._compile(batch)(*self._arguments(batch))
            self.state = TrainState(state[2], state[0], state[1])
            flush()
            pending.append((step + 1, metrics, started))
            last = step + 1 == num_steps
            if eval_data is not None and (last or (eval_every and (step + 1) % eval_every == 0)):
                flush()
                emit({"step": step + 1, "eval_loss": self.evaluate(eval_data)})
            if self.checkpoints is not None and (last or (checkpoint_every and (step + 1) % checkpoint_every == 0)):
                flush()
                self.checkpoints.save(step + 1, self.state)
        flush()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return records

    def evaluate(self, data: Iterable[Tree]) -> float:
        """Mean loss over batches, weighted as `weight` says, without touching the state.

        Args:
            data: batches, finite.

        Returns:
            The weighted mean; summed on the device, read once.

        Raises:
            ConfigError: when there is no batch.
        """
        total = weights = None
        for batch in data:
            loss, weight = self._evaluate(self.state.trainable, self.frozen, jax.tree.map(jnp.asarray, batch))
            total = loss if total is None else total + loss
            weights = weight if weights is None else weights + weight
        if total is None or weights is None:
            raise ConfigError("evaluate got no batch", hint="pass at least one batch, from a re-iterable source")
        return float(total / weights)

    def restore(self) -> int | None:
        """Load the newest checkpoint into the trainer.

        Returns:
            Its step, or None when there is no checkpoint yet.

        Raises:
            ConfigError: without a `checkpoint_dir`.
            StructureError: when the checkpoint is of other trainable leaves.

        Memory:
            The state's arrays are given up before those of the checkpoint are read: never two copies.
        """
        if self.checkpoints is None:
            raise ConfigError("restore needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
        step = self.checkpoints.latest_step()
        if step is not None:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
            self.checkpoints.check(step, like)
            jax.tree.map(lambda x: x.delete(), self.state)
            self.state = self.checkpoints.restore(step, like)
        return step

    def _refuse_later_checkpoint(self) -> None:
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        if self.checkpoints is not None and latest is not None and latest > self.step:
            raise OutputError(
                f"{self.checkpoints.directory}: holds a checkpoint of a later step than the trainer's",
                expected=f"none after step {self.step}",
                got=f"step {latest}",
                hint="call trainer.restore() to continue that run, or choose another checkpoint_dir",
            )

    def _arguments(self, batch: Tree) -> tuple[Tree, Tree, Any, Tree, Tree]:
        return self.state.trainable, self.state.opt_state, self.state.step, self.frozen, batch

    def _compile(self, batch: Tree) -> Any:
        """The compiled step for batches of this shape, checked to reuse every donated buffer."""
        shapes = jax.tree.map(lambda x: (tuple(x.shape), jnp.dtype(x.dtype)), batch)
        if self._compiled is None or self._compiled[0] != shapes:
            with warnings.catch_warnings():
                # JAX only warns, and without a path; check_donation raises, with one.
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                compiled = self.step_fn.lower(*self._arguments(batch)).compile()  # pyright: ignore[reportFunctionMemberAccess]
            check_donation(compiled, arg_names=STEP_ARGUMENTS)
            self._compiled = shapes, compiled
        return self._compiled[1]


def _eval_step(
    step: Step, loss_fn: LossFn, weight: Callable[[Tree], Any], trainable: Tree, frozen: Tree, batch: Tree
) -> tuple[Any, Any]:
    result = loss_fn(step.model(trainable, frozen), batch)
    weights = jnp.asarray(weight(batch), jnp.float32)
    return weighted(result[0] if isinstance(result, tuple) else result, weights), weights


def _refuse_beside_layerwise(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(
                f"{name} is said twice, to the trainer and to its layerwise step",
                expected=f"Trainer(..., layerwise_step(..., {name}=...))",
                got=f"{name}={value!r} for the trainer",
                hint=f"pass {name} to lt.offload.layerwise_step alone",
            )


def _batch(data: StepData, step: int, num_steps: int) -> Tree:
    if not hasattr(data, "__getitem__"):
        raise DataError(
            "the data cannot be asked for the batch of a step",
            expected="batches by step number: a list, or a grain.MapDataset",
            got=type(data).__name__,
            hint="a resumed run has to see what an uninterrupted one would; pass list(data) when it is small",
        )
    try:
        return data[step]
    except IndexError as error:
        raise DataError(
            f"the data has no batch for step {step}",
            expected=f"a batch for each of {num_steps} steps",
            hint="pass data that repeats, such as a grain.MapDataset with .repeat(), or lower num_steps",
        ) from error
