"""The trainer: one jitted step over the trainable leaves, one copy of its state, and recovery when a step fails.

`Trainer` is a façade: it checks its arguments, makes the parts and connects them. It owns the trainable leaves
(`_state`). Its step consumes (donates) them and returns the new ones, so there is never a second copy (`_compilation`).
After `fit` ends for any reason, the trainer holds a valid state (`checkpoint`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Unpack

import jax
import optax

from ..core import (
    ConfigError,
    ModelObject,
    OutOfMemoryError,
    Selector,
    StateError,
    Tree,
    check_choice,
    check_integer,
    check_type,
    is_array_like,
    leaves_with_paths,
    on_host,
    refuse_consumed,
    refuse_shared,
    shown,
)
from ..distributed import Processes, ShardingRules, placed
from ..memory import MemoryReport, Target
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule, StageReport
from ..planning import Plan
from ._callbacks import Callback, Listeners, as_callbacks
from ._compilation import CompiledStep, to_struct
from ._data import IN_ORDER, DataCursor, StepData
from ._evaluation import Evaluation, join
from ._events import Event, Record
from ._loop import FitOptions, Run, Session
from ._nan_policy import NonFinitePolicy, OnNan
from ._pipeline_step import PipelineStep, make_pipeline
from ._planning import placed_layers, plan_again, planned_tx
from ._state import TrainStateStore
from ._step import LayerStep, LossFn, Pytree, TrainingStep, TrainState, WholeStep, accepted_keywords
from .checkpoint import Snapshots, open_checkpoints, require_checkpoints

P = ParamSpec("P")
R = TypeVar("R")


def _add_hints(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add hints to the `TypeError` of a method called as in another library, such as ``fit(x, y, batch_size=32)``."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                renamed = [f"use {names[name]} instead of {name}" for name in kwargs if name in names]
                data = "x" if method.__name__ == "predict" else "(x, y)"
                order, end = ("", ", num_epochs=1") if names else (f", {IN_ORDER}", "")
                call = f"{method.__name__}(lowtide.train.array_data({data}, batch_size=32{order}){end})"
                hint = "; ".join([*renamed, f"array_data makes batches of arrays: {call}"])
                raise TypeError(f"Trainer.{method.__name__}: {error}\nhint: {hint}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


class Trainer:
    """Train the selected leaves of any model with any Optax optimizer. Mutable: `fit` changes its state.

    Args:
        model: a pytree, whose trainable and mutable arrays the trainer owns from then on, because steps donate them.
            Or a bridge of `lowtide.ext` for a Keras, Flax NNX or Equinox model.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss, or ``(loss, metrics)`` with a dictionary of scalars.
            For a pytree with `mutable` leaves it returns ``(loss, metrics, model)``. It may take two more arguments by
            name: ``key``, a new random key for every step and microbatch, and ``training``, False in evaluation.
        tx: the optimizer, with clipping and schedules chained as in Optax. Or a step of
            `lowtide.offload.layerwise_step`, for a model of ``outer`` and ``layers``. Such a step has its own settings
            for trainable leaves, microbatches and placement, and `loss_fn` is used for evaluation only.
        wrt: the trainable leaves: globs on tree paths, or a predicate ``(path, leaf) -> bool``; by default all leaves,
            or those that the bridge selects.
        mutable: the leaves that the model changes itself (batch statistics, caches), selected in the same way. They
            are saved with the trainable leaves and never trained. By default none, or those that the bridge selects.
        num_microbatches: number of parts into which a batch is split for gradient accumulation.
        weight: a function of a batch that returns its weight in means over microbatches and evaluations, such as the
            number of target tokens. By default 1, and in evaluations the number of rows of the batch's first array.
            A layerwise step or a pipeline may have a weight function instead.
        compute_dtype: ``"bfloat16"`` for mixed precision: float32 leaves of the model and of the batch, labels
            included, are cast to this dtype for `loss_fn` and for functions of `predict`. Trainable leaves, their
            gradients, the optimizer and `mutable` leaves keep their dtypes. The loss, metrics and predictions are
            float32. Integers and leaves of 16 bits or less are not cast. A Keras model runs under its own policy
            ``mixed_bfloat16``. By default nothing is cast.
        seed: seed of the keys for `loss_fn`; a key depends only on the seed, the step and the microbatch.
        on_nan: what to do when loss or gradients are not finite. ``"abort"`` drops the update of the step and raises.
            ``"skip"`` drops the update and continues; the hundredth such step in a row raises. ``"roll_back"`` restores
            the last copy of the state, each copy at most three times, and continues with the next batches.
            ``"ignore"`` does nothing. In three cases ``"abort"`` restores the last copy before it raises: optimizer
            state on the host, whose updates cannot be dropped; a layerwise step; an update that made weights
            non-finite. `layerwise_step` explains how it skips.
        rollback: whether to keep one copy of the state on the host, made at the start of `fit` and after each epoch.
            It replaces a state that was donated to a failed step. No copy is made of a state that a checkpoint holds.
        checkpoint_dir: folder for checkpoints of the trainable state; without it none are written.
        max_to_keep: number of newest checkpoints to keep.
        best: name of a value in the records of evaluations, such as ``"eval_loss"``. When an evaluation gives the best
            value so far, a checkpoint is saved, and kept in addition to the newest ones.
        best_mode: whether less (``"min"``) or more (``"max"``) is better.
        budget: bytes that a step may use on a device, such as ``"14 GiB"``; by default all bytes of the device. Larger
            steps are refused. With a budget, a loss that runs a `LayerStack` is planned before the first step: the plan
            replaces `remat`. A pipeline's schedule is chosen within the budget.
        sharding: how arrays and batches are sharded over devices, in one process or many. By default arrays stay where
            they are, and batches go to the default device. With a pipeline, batches are not sharded along ``stage``.
        pipeline: for a model of ``outer`` and ``layers``: a schedule that trains the layers in stages, along the mesh
            axis ``stage``. For a model without a ``stack``, or for other options: the result of
            `lowtide.pipeline.value_and_grad`. The stack defines the loss, so `loss_fn` has to be None; the schedule
            sets the number of microbatches. Without `sharding`, the remaining devices are used for FSDP. An ``"auto"``
            schedule without given costs and limits adapts to the memory left on the device. If the step would not fit,
            it keeps fewer bytes between passes, with a warning. If memory is left, it keeps more if that is faster.
        plan: the result of `lowtide.plan` for the same model, loss and shapes. It sets what each layer keeps until the
            backward pass, the memory of layer inputs, frozen layers and optimizer state, and the number of
            microbatches. A plan for this machine also sets the default of `budget`. If the device runs out of memory
            in `fit` all the same, the step is planned again, for fewer bytes.

    Raises:
        SelectionError: when `wrt` or `mutable` selects nothing, or one array is at two trainable or mutable paths.
        StructureError: for a layerwise step or a pipeline with a model that is not made of ``outer`` and ``layers``.
        ConfigError: for an invalid argument, for `best` without `checkpoint_dir`, or for arguments that a layerwise
            step or a pipeline sets itself.
        OutputError: for a `checkpoint_dir` that `Checkpoints` refuses.
        StateError: for arrays that another trainer has donated.

    Memory:
        Device: frozen leaves, one copy of trainable leaves and optimizer state, gradients of trainable leaves (and
        an accumulator of the same size with microbatches), activations of one microbatch. With `compute_dtype` also
        copies in that dtype of the float32 leaves in use, frozen ones included. Host: with `rollback` one copy of the
        state; the records, about 340 bytes per step; one program for each shape of a batch. The option to drop updates
        costs less than one leaf on a TPU and at most two leaves on a CPU (compiled); ``on_nan="ignore"`` avoids this.

    Examples:
        >>> import jax.numpy as jnp
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
        loss_fn: LossFn | None,
        tx: optax.GradientTransformation | LayerwiseStep,
        *,
        wrt: Selector | None = None,
        mutable: Selector | None = None,
        num_microbatches: int = 1,
        weight: Callable[[Tree], Any] | None = None,
        compute_dtype: Any = None,
        seed: int = 0,
        on_nan: OnNan = "abort",
        rollback: bool = True,
        checkpoint_dir: str | Path | None = None,
        max_to_keep: int = 2,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        budget: int | str | None = None,
        sharding: ShardingRules | None = None,
        pipeline: Schedule | Pipeline | None = None,
        plan: Plan | None = None,
    ) -> None:
        if plan is not None:
            num_microbatches = _microbatches_of(plan, num_microbatches, tx, pipeline, sharding)
            if budget is None and plan.target == "here":
                budget = plan.budget_bytes
            tx = planned_tx(tx, plan.optimizer, plan.formats)  # pyright: ignore[reportArgumentType]
            model = placed_layers(model, "**" if wrt is None else wrt) if plan.parameters == "host" else model
        step, weight, sharding, num_microbatches = _choose_step(
            model, loss_fn, tx, wrt, mutable, num_microbatches, weight, compute_dtype, seed, sharding, pipeline
        )
        refuse_consumed(model)
        if sharding is not None:
            model = placed(model, sharding, step.arranged)
        state, frozen = step.init(model)
        self.is_guarded = _can_drop_update(on_nan, state, is_layerwise=isinstance(step, LayerStep))
        """Whether a step drops its update when loss or gradients are not finite."""
        step.guard(self.is_guarded)
        refuse_shared(state.trainable, state.mutable)
        self.checkpoints = open_checkpoints(checkpoint_dir, state, on_nan, rollback, max_to_keep, best, best_mode)
        """The checkpoints; None without `checkpoint_dir`."""
        self.sharding = sharding
        """Sharding rules of the arrays; None if arrays stay where they are."""
        self.processes = Processes(sharding)
        """The processes of the run, including this one."""
        self.on_nan: OnNan = on_nan
        """Policy for a loss or gradients that are not finite."""
        self.history: list[Record] = []
        """Records of the current or last `fit`, even if it raised."""
        on_change = None if self.checkpoints is None else self.checkpoints.changed
        self._store = store = TrainStateStore(model, step, state, frozen, sharding, on_change=on_change)
        self._snapshots = Snapshots(store, step.arrangement, self.checkpoints, self.processes, rollback=rollback)
        planner, self._plan_arguments = None, None
        can_plan = isinstance(step, WholeStep) and mutable is None and not isinstance(model, ModelObject)
        if can_plan and sharding is None:
            shapes = jax.tree.map(lambda leaf: to_struct(leaf) if hasattr(leaf, "dtype") else leaf, model)
            given: dict[str, Any] = {"model": shapes, "loss_fn": loss_fn, "tx": tx, "wrt": "**" if wrt is None else wrt}
            given |= {"weight": weight, "compute_dtype": compute_dtype}
            planner = functools.partial(plan_again, **given, drops_updates=self.is_guarded)
            self._plan_arguments = given if plan is None else None  # a plan has changed the model and the optimizer
        arguments = step, store, sharding, self.processes, num_microbatches, budget, weight is not None
        self._compiled = CompiledStep(*arguments, plan, planner)
        self._evaluation = Evaluation(step, weight, seed, store, self._compiled, self.processes, sharding, model)
        self._session: Session | None = None  # the running `fit`, or briefly one that has just ended
        self._last_cursor: DataCursor | None = None  # data of the last `fit`, for another `fit` with the same iterator
        self._is_stopped = False

    @property
    def state(self) -> TrainState:
        """Everything that a step changes; may be set to another state with the same structure.

        Raises:
            StructureError: for other leaves, shapes, dtypes or containers.
            SelectionError: when an array of the new state is at two paths, or is also a frozen leaf.
            StateError: inside of `averaged`, for donated arrays, or for a state of another step while `fit` takes
                steps.
            ConfigError: for a `step` below 0 or above 2**31 - 1.
        """
        return self._store.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._store.replace(state, is_running=self._takes_steps())

    @property
    def plan_arguments(self) -> dict[str, Any]:
        """The arguments with which `lowtide.plan` plans this step; raises `ConfigError` if it cannot be planned."""
        if self._plan_arguments is None:
            hint = "use one device, without plan, mutable leaves, a bridge, a pipeline or layerwise updates"
            raise ConfigError("lt.plan cannot plan this trainer", hint=hint)
        return self._plan_arguments

    @property
    def frozen(self) -> Tree:
        """Leaves that no step changes."""
        return self._store.frozen

    @property
    def model(self) -> Any:
        """The current model. For a pytree, the next step donates its trainable and mutable arrays.

        A mutable object gets its arrays back; the next step starts from the changes made in it.
        """
        return self._store.model

    @property
    def step(self) -> int:
        """Number of steps taken so far.

        May be set between two calls of `fit`, for weights that were trained elsewhere: data by step number, random keys
        and records continue from there. The optimizer's own count, which schedules use, is in its state and unchanged.
        """
        return self._store.step

    @step.setter
    def step(self, number: int) -> None:
        self._refuse_running("setting step")
        self._store.set_step(number)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that a step may use on a device; None for all bytes of the device. May be set to another number."""
        return self._compiled.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget: int | str | None) -> None:
        self._compiled.set_budget(budget)

    def update(self, model: Tree) -> None:
        """Replace the weights by those of another pytree or Equinox module with the structure of the model.

        Args:
            model: the new model, whose trainable and mutable arrays the next step donates.

        Raises:
            StructureError: when a leaf has another shape or dtype, or paths or containers differ.
            SelectionError: when a trainable or mutable array is also at another path.
            ConfigError: for a layerwise step, and for a mutable object, which you change directly.
            StateError: inside of `averaged`, or for arrays that were donated.
        """
        self._store.update(model)

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the trainable leaves by the running average of `lowtide.train.ema`, inside a ``with`` block.

        Use it for evaluation, prediction and export. The block cannot train, save or restore, and loses all changes.

        Raises:
            ConfigError: when the optimizer keeps no average of all trainable leaves.
            StateError: inside of another `averaged`.
        """
        return self._store.averaged()

    def wait(self) -> None:
        """Wait until the device has finished all steps."""
        jax.block_until_ready(self.state)

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Position in the run's data, stored by the last restored checkpoint or ended `fit`; None before that."""
        return self._snapshots.metadata.position

    @property
    def has_eval_data(self) -> bool:
        """Whether a `fit` is running that has evaluation data."""
        return (session := self._active_session()) is not None and session.eval_data is not None

    @property
    def stages(self) -> StageReport | None:
        """Memory of each rank of a pipeline; None without a pipeline, or before `preflight` or `memory`."""
        return self._compiled.stages

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree]]:
        """The jitted step ``(trainable, optimizer, mutable, step, frozen, batch)``, which donates the first four.

        It returns their new values and the metrics. For a pipeline that adapts its schedule, it is the newest step.
        """
        return self._compiled.step_fn

    def memory(self, batch: Tree, *, target: Target | str | None = None) -> MemoryReport:
        """Return the compiled bytes of the training step, per argument of `step_fn`, before anything runs.

        Args:
            batch: a batch, or shapes of one.
            target: the hardware to compile for; None for the hardware at hand, whose compiled step `fit` then uses.

        Returns:
            The report for one device.
        """
        return self._compiled.memory(batch, target)

    def preflight(self, batch: Tree) -> MemoryReport:
        """Compile the step, and raise if it needs more memory than the device has; `fit` does so before its first step.

        Args:
            batch: a batch, or shapes of one.

        Returns:
            The same report as `memory`.

        Raises:
            OutOfMemoryError: for a step that needs more than `budget`, with the largest arrays and remedies.

        Memory:
            None on the device. A pipeline that adapts compiles up to four times; an error takes one more compilation.
        """
        return self._compiled.preflight(batch)

    def shortage(self, batch: Tree, when: str) -> OutOfMemoryError:
        """Return the error of `preflight`; `when` is text for its message, such as ``"in fit"``."""
        return self._compiled.shortage(batch, when)

    def advance(self, batch: Tree) -> Tree:
        """Take one step, outside of `fit`.

        Args:
            batch: batch of the step.

        Returns:
            The metrics, as device arrays.

        Raises:
            DonationError, OutOfMemoryError: as in `fit`.
            StateError: in a callback of `fit`, or inside of `averaged`.
        """
        self._store.refuse_averaged("advance")
        self._refuse_running("advance")
        with self._compiled.dispatch(batch) as metrics:
            return metrics

    def stop(self) -> None:
        """End `fit` after the current step, as if it were the last one; without a running `fit` do nothing."""
        if (session := self._active_session()) is not None:
            session.stop()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called in the current or last `fit`."""
        return self._is_stopped if (session := self._active_session()) is None else session.is_stopped

    @_add_hints(
        epochs="num_epochs",
        steps_per_epoch="num_steps (for all epochs)",
        validation_data="eval_data",
        verbose="progress",
    )
    def fit(
        self,
        data: StepData | Iterable[Tree],
        *,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        eval_data: Iterable[Tree] | None = None,
        eval_every: int | None = None,
        checkpoint_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        on_record: Callable[[Record], None] | None = None,
        progress: bool = True,
    ) -> list[Record]:
        """Train up to a step or an epoch, counted from the beginning of the run.

        Args:
            data: batches by step number: step k (from 0) trains on ``data[k]``, so a resumed run uses the same batches
                as an uninterrupted one. Or an iterable of batches, which is iterated once per epoch. An iterable other
                than that of the previous `fit` starts at its beginning, unless the trainer was restored since.
            num_steps: the step to stop at; a restored trainer continues from its own step.
            num_epochs: the epoch to stop after. Step k then trains on ``data[k % len(data)]``, or for a
                `grain.MapDataset` on ``data[k]``, where the dataset continues with later epochs.
            eval_data: batches for held-out evaluation, at the first and last step and every `eval_every` steps.
            eval_every: steps between evaluations; by default one evaluation after every epoch.
            checkpoint_every: steps between checkpoints. With a `checkpoint_dir` the last step is saved, too. After an
                exception, only a run of one process saves, and only if no earlier state was restored.
            callbacks: their hooks are called for every event.
            on_record: called with every record as soon as its values are known.
            progress: print the step's bytes, evaluations, and a progress bar (without a terminal, some losses) to
                standard error of the first process.

        Returns:
            The records. A training record has ``step``, ``loss``, ``grad_norm`` of the trainable leaves, the loss
            function's metrics, ``seconds`` of the step, and ``learning_rate`` with `optax.inject_hyperparams`. An
            evaluation record has ``step``, ``eval_loss`` and metrics as ``eval_...``.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            ConfigError: with neither `num_steps` nor `num_epochs`; for an invalid number or callback; for
                `checkpoint_every` without a `checkpoint_dir`; for `eval_every` or `best` without `eval_data`; when
                evaluations lack the value `best`.
            OutOfMemoryError: for a step that needs more than `budget`; JAX's own error gets the same explanation in a
                note.
            OutputError: when the `checkpoint_dir` holds a later step, or a checkpoint cannot be written.
            DataError: when `data` ends before the run, or `data` or `eval_data` cannot be used.
            NonFiniteError: for a loss, gradients or weights that are not finite, depending on `on_nan`.
            StateError: inside of `averaged` or of another `fit`; when a step failed after its state was donated,
                and no copy of the state exists.

        Any other exception is raised unchanged, with a note about the step that the trainer holds. Ctrl-C takes effect
        between steps, SIGTERM after a step. Both save a checkpoint first, except Ctrl-C in one of several processes.
        """
        with self.session(
            data,
            num_steps=num_steps,
            num_epochs=num_epochs,
            eval_data=eval_data,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            callbacks=callbacks,
            on_record=on_record,
            progress=progress,
        ) as run:
            for _ in run:
                pass
        return run.records

    @contextlib.contextmanager
    def session(self, data: StepData | Iterable[Tree], **options: Unpack[FitOptions]) -> Generator[Run]:
        """Train as `fit` does, in a loop of your own that receives every event.

        Leaving the loop early keeps the run at its current step: the values of all steps are read, but there is no last
        evaluation or checkpoint. Callbacks are notified of the end. Another session or `fit` continues from there, and
        callbacks start counting anew in it. `Run.stop` ends the run with an evaluation and a checkpoint. An exception
        in the ``with`` block is handled like one in `fit`. A SIGTERM right before the loop is left takes effect at the
        end of the block, without a checkpoint: call `save` in the block where that matters.

        Args:
            data: as in `fit`.
            **options: keyword arguments of `fit`; but `progress` is off by default.

        Returns:
            A context manager of the run. Its iterator yields each `Event` after the callbacks have received it. Events
            after the loop, such as an exception, go to callbacks only. Nothing is trained before the run is iterated.

        Raises:
            TypeError: for an unknown option.
            Exception: as in `fit`.

        Examples:
            >>> import jax.numpy as jnp
            >>> trainer = Trainer({"w": jnp.zeros(())}, lambda m, x: jnp.mean((m["w"] - x) ** 2), optax.sgd(0.5))
            >>> with trainer.session([jnp.ones(2)] * 4, num_steps=4) as run:
            ...     for event in run:
            ...         if event.name == "record" and event.value["loss"] < 1e-6:
            ...             run.stop()
            >>> trainer.step, float(trainer.model["w"])
            (3, 1.0)
        """
        if unknown := sorted(options.keys() - FitOptions.__annotations__.keys()):
            names = ", ".join(FitOptions.__annotations__)
            raise TypeError(f"Trainer.session got {', '.join(unknown)}\nhint: like fit, it takes {names}")
        eval_data, checkpoint_every = options.get("eval_data"), options.get("checkpoint_every")
        with self.processes.watched():  # if this process raises, the others do not wait for it
            if checkpoint_every is not None:
                require_checkpoints(self.checkpoints, "checkpoint_every")
            self._store.refuse_averaged("fit")
            callbacks = as_callbacks(options.get("callbacks", ()))
            self._store.refresh()
            if self._active_session() is not None:
                hint = "call it after the other fit has returned"
                raise StateError("fit was called while another fit is running", hint=hint)
            if self._session is not None:  # an interrupt arrived before `_finish_run`
                self._finish_run(self._session)
            cursor = DataCursor(data, options.get("num_steps"), options.get("num_epochs"))
            if options.get("progress") and self.processes.is_first:
                from ._progress import Progress  # takes a moment; `import lowtide` does not need it

                callbacks = (Progress(cursor.num_steps), *callbacks)
            listeners = Listeners(self, callbacks, options.get("on_record"))
            session = Session(
                store=self._store,
                compiled=self._compiled,
                snapshots=self._snapshots,
                processes=self.processes,
                nan_policy=NonFinitePolicy(self._store, self._snapshots, self.on_nan, is_guarded=self.is_guarded),
                evaluation=self._evaluation,
                listeners=listeners,
                cursor=cursor,
                previous=self._last_cursor,
                eval_data=eval_data,
                eval_every=options.get("eval_every"),
                checkpoint_every=checkpoint_every,
            )
            self._is_stopped, self.history = False, session.records
            try:
                self._session = session
                with session.running():
                    yield Run(session, listeners)
            finally:
                self._finish_run(session)

    def _finish_run(self, session: Session) -> None:
        """Keep the parts of an ended run that the next run needs."""
        self._is_stopped, self._last_cursor = session.is_stopped, session.final_cursor or self._last_cursor
        self._session = None
        self._store.give_back()

    def save(self) -> bool:
        """Start to write a checkpoint of the state, with the position in the data and the states of callbacks.

        Returns:
            False if this step is saved already. True if a checkpoint is written: for a new step, or for a saved
            step whose weights were changed since.

        Raises:
            ConfigError: without a `checkpoint_dir`.
            OutputError: when a checkpoint cannot be written.
            StateError: inside of `averaged`.
        """
        if (session := self._active_session()) is not None:
            return session.save()
        self._snapshots.prepare_save()
        return self._snapshots.save(self._snapshots.metadata)

    def restore(self, *, step: int | None = None, best: bool = False) -> int | None:
        """Load a checkpoint into the trainer.

        Args:
            step: step of the checkpoint; by default the newest one that can be read.
            best: load the checkpoint that the argument `best` of `Trainer` keeps.

        Returns:
            Step of the loaded checkpoint, or None when no checkpoint exists yet and `step` is None.

        Raises:
            ConfigError: without a `checkpoint_dir`; with both `step` and `best`; when there is no checkpoint of `step`;
                with `best`, when no checkpoint was evaluated.
            StructureError: when the checkpoint has other trainable leaves, or was trained over other frozen leaves.
            StateError: when no checkpoint can be read; inside of `averaged`; in a callback while `fit` takes steps.

        Warns:
            UserWarning: for each damaged checkpoint (the checkpoint before it is tried next); when damaged checkpoints
                are renamed; when JAX's random settings differ from those of the run that wrote the checkpoint.

        Memory:
            The state's arrays are deleted before those of the checkpoint are read, so there are never two copies on the
            device. With `rollback` the state is on the host meanwhile, in case the checkpoint cannot be read.
        """
        self._refuse_running("restore")
        self._store.refuse_averaged("restore")
        with self.processes.watched():
            return self._snapshots.restore(step, best=best)

    def _refuse_running(self, action: str) -> None:
        if self._takes_steps():
            hint = f"call trainer.stop() first; {action} is possible after fit, in on_train_end and in on_exception"
            raise StateError(f"{action} was called while fit takes steps", hint=hint)

    def _takes_steps(self) -> bool:
        return (session := self._active_session()) is not None and not session.is_over

    def _active_session(self) -> Session | None:
        """Return the session of a `fit` that has not ended, or None."""
        return None if self._session is None or self._session.is_closed else self._session

    @_add_hints()
    def evaluate(self, data: Iterable[Tree], *, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
        """Return the mean loss and metrics over batches, weighted by `weight`; the state stays unchanged.

        Args:
            data: a finite iterable of batches.
            callbacks: notified of the beginning and the end.

        Returns:
            The weighted means, including ``loss``; they are summed on the device and read once.

        Raises:
            ConfigError: when there is no batch.
            DataError: for data that is not a series of batches, or when the weights sum to 0.
        """
        listeners = Listeners(self, as_callbacks(callbacks))
        self._store.refresh()
        listeners.notify(Event("evaluate_begin"))
        with self.processes.watched():
            means = self._evaluation.means(data)
        listeners.notify(Event("evaluate_end", {**means}))
        return means

    def predict_batches(self, data: Iterable[Tree], fn: Callable[..., Any] | None = None) -> Iterator[Any]:
        """Return an iterator of the outputs of batches, in the order of the data, on the host.

        Args:
            data: batches.
            fn: ``fn(model, batch)``, traced once for each shape of a batch, and again for another function. If it takes
                `training`, that is False. By default ``model(batch)``.

        Returns:
            An iterator of NumPy arrays in the structure that `fn` returns. It reads the current weights for each batch.

        Raises:
            DataError: for data that is not a series of batches.
            StateError: from the iterator, when it is read inside `averaged` but was made outside, or the reverse.

        Memory:
            The outputs of two batches on the device.
        """
        self._store.refresh()
        return self._evaluation.outputs(data, fn)

    @_add_hints()
    def predict(
        self, data: Iterable[Tree], fn: Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = ()
    ) -> Any:
        """Return outputs of all batches, joined along their first axis, on the host.

        Args:
            data: batches, in the order of the outputs: `array_data` shuffles unless ``seed=None``, and drops an
                incomplete last batch unless ``drop_remainder=False``.
            fn: as in `predict_batches`.
            callbacks: notified of the beginning and the end.

        Returns:
            NumPy arrays, in the structure that `fn` returns.

        Raises:
            ConfigError: when there is no batch.
            StructureError: when outputs of two batches cannot be joined.

        Memory:
            The outputs of two batches on the device, all outputs on the host.
        """
        listeners = Listeners(self, as_callbacks(callbacks))
        listeners.notify(Event("predict_begin"))
        with self.processes.watched():
            joined = join(list(self.predict_batches(data, fn)))
        listeners.notify(Event("predict_end"))
        return joined


# --- arguments -------------------------------------------------------------------------------------------------------


def _choose_step(
    model: Tree,
    loss_fn: Any,
    tx: Any,
    wrt: Selector | None,
    mutable: Selector | None,
    num_microbatches: int,
    weight: Callable[[Tree], Any] | None,
    compute_dtype: Any,
    seed: int,
    sharding: ShardingRules | None,
    pipeline: Schedule | Pipeline | None,
) -> tuple[TrainingStep, Callable[[Tree], Any] | None, ShardingRules | None, int]:
    """Return the training step, weight, sharding and number of microbatches to use; arguments as in `Trainer`."""
    if weight is not None and not callable(weight):
        raise ConfigError(f"weight must be a function of a batch that returns a number, not {shown(weight)}")
    _check_arguments(model, tx, loss_fn, sharding, num_microbatches, seed, pipeline)
    if pipeline is not None:
        conflicts = {
            "a bridge": (isinstance(model, ModelObject), "pass the arrays as a pytree of outer and layers"),
            "a layerwise step": (isinstance(tx, LayerwiseStep), "use an Optax optimizer: optax.adamw(1e-4)"),
            "loss_fn": (loss_fn is not None, "the stack defines the loss: Trainer(model, None, tx, pipeline=...)"),
            "mutable": (mutable is not None, "leave it out: the functions of the stack change no weights"),
            "num_microbatches": (num_microbatches != 1, "set it in the schedule: schedule(..., num_microbatches=...)"),
            "compute_dtype": (compute_dtype is not None, "let the stack cast: lt.models.load(..., compute_dtype=...)"),
            "seed": (seed != 0, 'put random keys into batches: {"key": jax.random.key(step), ...}'),
        }
        _refuse_conflicts("a pipeline", conflicts)
        resolved_pipeline, sharding = make_pipeline(model, pipeline, sharding, wrt=wrt, weight=weight)
        step = PipelineStep(model, tx, resolved_pipeline, sharding)
        return step, resolved_pipeline.weight, sharding, resolved_pipeline.schedule.num_microbatches
    if isinstance(tx, LayerwiseStep):
        conflicts = {
            "compute_dtype": (
                compute_dtype is not None,
                "cast in the stack's functions, as lt.models.load(..., compute_dtype=...) does",
            ),
            "an axis context of the mesh": (
                sharding is not None and sharding.num_context_shards > 1,
                "use an Optax optimizer, with remat=True in the loss; its state is sharded along fsdp",
            ),
            "wrt": (wrt is not None, "pass wrt to lt.offload.layerwise_step"),
            "mutable": (mutable is not None, "leave it out: a layerwise step changes only trainable leaves"),
            "num_microbatches": (num_microbatches != 1, "pass num_microbatches to lt.offload.layerwise_step"),
            "seed": (seed != 0, "leave it out: the functions of the stack get no random keys"),
            "another weight": (
                tx.weight is not None and weight not in (None, tx.weight),
                "pass weight to lt.offload.layerwise_step alone",
            ),
        }
        _refuse_conflicts("a layerwise step", conflicts)
        tx = tx if tx.weight is not None else dataclasses.replace(tx, weight=weight)
        return LayerStep(model, loss_fn, tx), tx.weight, sharding, 1
    defaults: Any = model if isinstance(model, ModelObject) else Pytree
    selected_wrt = defaults.wrt if wrt is None else wrt
    selected_mutable = defaults.mutable if mutable is None else mutable
    options: dict[str, Any] = {"mutable": selected_mutable, "seed": seed, "compute_dtype": compute_dtype}
    if sharding is not None:
        # With an abstract mesh, the program runs on the devices of its arguments, and compiles for any target.
        mesh: Any = sharding.mesh.abstract_mesh
        options |= {"shard": dataclasses.replace(sharding, mesh=mesh).constrain, "mesh": mesh}
    step = WholeStep(model, loss_fn, tx, selected_wrt, num_microbatches, weight, **options)
    return step, weight, sharding, num_microbatches


def _microbatches_of(plan: Any, num_microbatches: int, tx: Any, pipeline: Any, sharding: Any) -> int:
    """Return the number of microbatches of a plan; raise if the other arguments contradict it."""
    check_type("plan", plan, Plan, "a Plan, the result of lt.plan")
    of_models = {"nf4_weights", "small_tiles"} & {*plan.formats}
    conflicts = {
        "another num_microbatches": (
            num_microbatches not in (1, plan.num_microbatches),
            "leave it out: the plan has chosen it",
        ),
        "sharding": (sharding is not None, "leave plan out: lt.plan plans steps on one device"),
        "nf4_weights or small_tiles": (bool(of_models), "plan a model that has them: lt.quantize, tile_tokens"),
        "a pipeline": (pipeline is not None, "leave plan out: a schedule adapts to the budget by itself"),
        "a layerwise step": (isinstance(tx, LayerwiseStep), "leave plan out: such a step keeps one layer at a time"),
    }
    _refuse_conflicts("a plan", conflicts)
    return plan.num_microbatches


def _refuse_conflicts(feature: str, conflicts: Mapping[str, tuple[bool, str]]) -> None:
    """Raise `ConfigError` for the first conflict with a feature; `conflicts` maps settings to (is set, hint)."""
    for name, (is_set, hint) in conflicts.items():
        if is_set:
            raise ConfigError(f"{feature} cannot be combined with {name}", hint=hint)


def _can_drop_update(on_nan: str, state: TrainState, *, is_layerwise: bool) -> bool:
    """Return whether a step can drop its own update; raise `ConfigError` for an impossible `on_nan`."""
    check_choice("on_nan", on_nan, ("abort", "skip", "roll_back", "ignore"))
    host_paths = [path for path, leaf in leaves_with_paths(state) if on_host(getattr(leaf, "sharding", None))]
    if is_layerwise:  # it may have updated layers before it reaches a gradient that is not finite
        return on_nan == "skip"
    if on_nan == "skip" and host_paths:
        problem = f"a step cannot drop its update with state on the host: {', '.join(host_paths[:4])}"
        hint = 'on_nan="roll_back" returns to the last copy of the state; a layerwise step can skip'
        raise ConfigError(problem, hint=hint)
    return on_nan in ("abort", "skip") and not host_paths


def _check_arguments(
    model: Any, tx: Any, loss_fn: Any, sharding: Any, num_microbatches: Any, seed: Any, pipeline: Any
) -> None:
    """Raise for an invalid model, optimizer, loss function, sharding, number or pipeline."""
    # A model of such a library exists only if the library is imported.
    for name, library, class_name in (("keras", "keras", "Model"), ("nnx", "flax.nnx", "Module")):
        cls = getattr(sys.modules.get(library), class_name, None)
        if cls is not None and isinstance(model, cls):
            problem = f"a {type(model).__name__} is a mutable object, which the trainer can use only through its bridge"
            raise ConfigError(problem, hint=f"Trainer(lowtide.ext.{name}.Bridge(model), ...)")
    if not (isinstance(tx, LayerwiseStep) or (hasattr(tx, "init") and hasattr(tx, "update"))):
        hint = "optimizers of Keras and NNX cannot be used: choose the Optax optimizer of the same name"
        raise ConfigError(f"tx must be an Optax optimizer or a layerwise step, not {shown(tx)}", hint=hint)
    hint = 'lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16), or lt.pipeline.value_and_grad(...)'
    check_type("pipeline", pipeline, (Schedule, Pipeline, type(None)), "a Schedule or a Pipeline", hint=hint)
    if not callable(loss_fn) and pipeline is None:
        hint = 'the bridge of a Keras model makes one: bridge.loss("mse"); None is valid only with pipeline='
        raise ConfigError(f"loss_fn must be a function loss_fn(model, batch), not {shown(loss_fn)}", hint=hint)
    # The loss of an Equinox bridge takes the module's state as one more argument.
    if callable(loss_fn) and not isinstance(tx, LayerwiseStep) and not isinstance(model, ModelObject):
        _check_signature(loss_fn)
    check_integer("num_microbatches", num_microbatches, hint="1 means no accumulation")
    check_integer("seed", seed, -(2**31), 2**32 - 1)
    if not (isinstance(model, ModelObject) or any(map(is_array_like, jax.tree.leaves(model)))):
        hint = "pass a pytree such as {'w': jnp.zeros(4)}"
        raise ConfigError(f"the model has no arrays: it is a {type(model).__name__}", hint=hint)
    hint = "ShardingRules(mesh=make_mesh(), rules={...}), both from lowtide.train"
    check_type("sharding", sharding, (ShardingRules, type(None)), "a ShardingRules object", hint=hint)


def _check_signature(loss_fn: Any) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind("model", "batch", **accepted_keywords(loss_fn, key=None, training=True))
    except TypeError as error:
        hint = "a batch is one pytree, such as (x, y); key and training are optional; functools.partial fills others"
        raise ConfigError(f"loss_fn must take a model and a batch, not {signature}", hint=hint) from error
