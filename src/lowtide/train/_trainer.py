"""The trainer: one jitted step over the trainable leaves, one copy of its state, and recovery when a step fails.

This class is a façade: it makes the parts, connects them, and passes a session's events to callbacks. From its
construction on, the trainer owns the trainable leaves (`_state`). Its step consumes them and returns only what changed,
so there is never a second copy (`_compiled`). After `fit` ends for any reason, the trainer holds a valid state
(`_recovery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Unpack

import jax
import optax

from ..core import OutOfMemoryError, Tree, Where
from ..distributed import Processes, ShardingRules
from ..memory import MemoryReport, Target
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule, StageReport
from ._arguments import add_hints, choose_step
from ._callbacks import Callback, Listeners, as_callbacks
from ._compiled import CompiledStep, parse_budget
from ._data import DataCursor, StepData
from ._evaluation import Evaluation, join
from ._events import Event, Record
from ._finite import NonFinitePolicy, OnNan
from ._recovery import Snapshots, open_checkpoints, require_checkpoints
from ._run import FitOptions, Run, refuse_unknown
from ._session import Session
from ._state import TrainStateStore
from ._step import LossFn, TrainState


class Trainer:
    """Train the selected leaves of any model with any Optax optimizer.

    Args:
        model: a pytree, whose trainable arrays the trainer owns from then on; or a bridge to a mutable object.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss, or ``(loss, metrics)`` with a dictionary of scalars.
            For a pytree with `mutable` leaves it returns ``(loss, metrics, model)``. It may take two more arguments by
            name: ``key``, a new random key for every step and microbatch, and ``training``, False in evaluation.
        tx: the optimizer, with clipping and schedules chained as in Optax. Or a step of
            `lowtide.offload.layerwise_step`, for a model of ``outer`` and ``layers``. Such a step sets trainable
            leaves, microbatches and placement, and `loss_fn` is then used for evaluation only.
        wrt: the trainable leaves: globs on tree paths, or a predicate ``(path, leaf) -> bool``; by default all leaves,
            or those that the bridge selects.
        mutable: the leaves that the model changes itself (batch statistics, caches), selected in the same way. They
            are saved with the trainable leaves and never trained. By default none, or those that the bridge selects.
        num_microbatches: number of parts into which a batch is split for gradient accumulation.
        weight: a function of a batch that returns its weight in means over microbatches and evaluations, such as the
            number of target tokens. By default 1, and in evaluations the number of rows of the batch's first array. A
            layerwise step uses its own.
        compute_dtype: ``"bfloat16"`` for mixed precision: `loss_fn` and functions of `predict` get float32 leaves of
            the model and of the batch in this dtype, labels included. Trainable leaves, the optimizer and `mutable`
            leaves keep their dtypes; gradients, the loss, metrics and predictions are float32. Integers and leaves of
            16 bits or less are passed unchanged. A Keras model runs under its own policy ``mixed_bfloat16``. By
            default nothing is cast.
        seed: seed of the keys for `loss_fn`; a key depends only on the seed and on the number of the step.
        on_nan: what to do when loss or gradients are not finite. ``"abort"`` drops the update of the step and raises.
            ``"skip"`` drops the update and continues; the hundredth in a row raises. ``"roll_back"`` restores the last
            copy and continues with the next batches. ``"ignore"`` does nothing. ``"abort"`` restores the last copy and
            raises in three cases: optimizer state on the host, whose updates cannot be dropped; a layerwise step; an
            update that made weights non-finite. A layerwise step skips as described in `layerwise_step`.
        rollback: whether to keep a copy on the host of the state at the start of `fit` and of each epoch. It replaces
            a state that a failed step has consumed. No copy is made of a state that a checkpoint holds.
        checkpoint_dir: folder for checkpoints of the trainable state; without it none are written.
        max_to_keep: number of newest checkpoints to keep.
        best: name of a value in the records of evaluations, such as ``"eval_loss"``. When an evaluation finds a better
            value than all before, a checkpoint is saved, and kept in addition to the newest ones.
        best_mode: whether less (``"min"``) or more (``"max"``) is better.
        budget: bytes that a step may use on a device, such as ``"14 GiB"``; by default all bytes of the device. Larger
            steps are refused, and a pipeline's schedule is chosen within the budget.
        sharding: how arrays and batches are sharded over devices, in one process or many. By default arrays stay where
            they are, and batches go to the default device; with a pipeline, rows are sharded along the other axes.
        pipeline: for a model of ``outer`` and ``layers``: a schedule that trains the layers in stages, along the mesh
            axis ``stage``. For a model without a ``stack``, or with more options: the result of
            `lowtide.pipeline.value_and_grad`. The stack defines the loss, so `loss_fn` has to be None; the schedule
            sets the number of microbatches. Without `sharding`, the remaining devices are used for FSDP. An ``"auto"``
            schedule without given costs and limits adapts to the memory left on the device: it keeps less between
            passes, with a warning, if the step would not fit, and more if that ends sooner.

    Raises:
        SelectionError: when `wrt` or `mutable` selects nothing, or one array is at two trainable paths.
        StructureError: for a layerwise step or a pipeline, and a model that is not made of ``outer`` and ``layers``.
        ConfigError: for an unknown or impossible `on_nan`, `best_mode`, `compute_dtype` or `budget`, for `best` without
            `checkpoint_dir`, or for arguments that a layerwise step or a pipeline sets itself.
        StateError: for arrays that another trainer has consumed.

    Memory:
        Device: frozen leaves, one copy of trainable leaves and optimizer state, gradients of trainable leaves (and
        an accumulator of the same size with microbatches), activations of one microbatch. With `compute_dtype` also
        copies in that dtype of the float32 leaves in use, frozen ones included. Host: with `rollback` one copy of the
        state; the records, about 340 bytes a step; a program for every shape of a batch. The option to drop an update
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
        wrt: Where | None = None,
        mutable: Where | None = None,
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
    ) -> None:
        selected = choose_step(
            model, loss_fn, tx, wrt, mutable, num_microbatches, weight, compute_dtype, seed, sharding, pipeline
        )
        step, weight, sharding, num_microbatches = selected
        model, state, frozen, self.is_guarded = selected.initialize(model, on_nan)
        """Whether a step drops its update when loss or gradients are not finite."""
        self.checkpoints = open_checkpoints(checkpoint_dir, state, on_nan, rollback, max_to_keep, best, best_mode)
        """The checkpoints, or None."""
        self.sharding = sharding
        """Sharding rules of the arrays; None for one device."""
        self.processes = Processes(sharding)
        """The other processes of the run."""
        self.on_nan: OnNan = on_nan
        """Policy for a loss or gradients that are not finite."""
        self.history: list[Record] = []
        """Records of the last `fit`, also of one that raised."""
        on_change = None if self.checkpoints is None else self.checkpoints.changed
        self._store = store = TrainStateStore(model, step, state, frozen, sharding, on_change=on_change)
        self._snapshots = Snapshots(store, step.arrangement, self.checkpoints, self.processes, rollback=rollback)
        self._compiled = CompiledStep(
            step, store, sharding, self.processes, num_microbatches, lambda: self.budget_bytes
        )
        self._evaluation = Evaluation(step, weight, seed, self._compiled, self.processes, sharding, model)
        self.budget_bytes = parse_budget(budget)
        """Bytes that a step may use on a device; None for all bytes of the device."""
        self._current_run: tuple[Session, Run] | None = None  # the running `fit`, or briefly one that has just ended
        self._last_cursor: DataCursor | None = None  # data of the last `fit`, for another `fit` with the same iterator
        self._is_stopped = False

    @property
    def state(self) -> TrainState:
        """Everything that a step changes; may be set to another state with the same structure.

        Raises:
            StructureError: for other leaves, shapes, dtypes or containers.
            SelectionError: when an array of the new state is at two paths, or is a frozen one.
            StateError: inside of `averaged`, for consumed arrays, or for a state of another step while `fit` takes
                steps.
            ConfigError: for a step that is not a valid number of steps.
        """
        return self._store.state

    @state.setter
    def state(self, state: TrainState) -> None:
        hint = "dataclasses.replace(state, step=trainer.state.step)"
        self._store.replace(state, lambda: self._refuse_running("setting a state of another step", hint))

    @property
    def frozen(self) -> Tree:
        """Leaves that no step changes."""
        return self._store.frozen

    @property
    def model(self) -> Any:
        """The current model. The next step consumes the trainable arrays of a pytree.

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

    def update(self, model: Tree) -> None:
        """Replace the weights by those of another pytree or Equinox module with the structure of the model.

        Args:
            model: the new model; the trainer owns its trainable and mutable arrays from then on.

        Raises:
            StructureError: when a leaf has another shape or dtype, or the leaves are others.
            ConfigError: for a mutable object, which is to be changed itself.
            StateError: inside of `averaged`, or for arrays that were consumed.
        """
        self._store.update(model)

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the trainable leaves by the running average of `lowtide.train.ema`, inside a ``with`` block.

        For evaluation, prediction and export: the block cannot train, save or restore, and changes in it are lost.

        Raises:
            ConfigError: when the optimizer keeps no average.
            StateError: inside of another `averaged`.
        """
        return self._store.averaged()

    def wait(self) -> None:
        """Wait until the device has finished all steps."""
        jax.block_until_ready(self.state)

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Position of the run's data iterator, as its last checkpoint or `fit` left it."""
        return self._snapshots.metadata.position

    @property
    def has_eval_data(self) -> bool:
        """Whether the `fit` that is running evaluates."""
        return (running := self._active_run()) is not None and running[0].eval_data is not None

    @property
    def stages(self) -> StageReport | None:
        """Report on what each rank of a pipeline holds; available after `preflight` or `memory`."""
        return self._compiled.stages

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree]]:
        """The jitted step: a function of `STEP_ARGUMENTS` that donates the first four, and returns them and metrics.

        For a pipeline with a chosen schedule, this is the step compiled last.
        """
        return self._compiled.step_fn

    def memory(self, batch: Tree, *, target: Target | str | None = None) -> MemoryReport:
        """Return the compiled bytes of the training step, per role (`STEP_ARGUMENTS`), before anything runs.

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
            OutOfMemoryError: for a step that needs more than `budget`, with the owners of its bytes and remedies.

        Memory:
            Compiles. A step that is refused is compiled twice, and a pipeline with a chosen schedule up to four times.
        """
        return self._compiled.preflight(batch)

    def shortage(self, batch: Tree, when: str) -> OutOfMemoryError:
        """Return the error that lists the owners of the step's bytes; see `preflight`."""
        return self._compiled.shortage(batch, when)

    def advance(self, batch: Tree) -> Tree:
        """Take one step, outside of `fit`.

        Args:
            batch: batch of the step.

        Returns:
            The metrics, on the device.

        Raises:
            DonationError, OutOfMemoryError: as `fit`.
            StateError: in a callback of `fit`, or inside of `averaged`.
        """
        self._store.refuse_averaged("advance")
        self._refuse_running("advance")
        return self._compiled.run(batch)

    def stop(self) -> None:
        """End `fit` after the current step, as if it were the last one; without a running `fit` do nothing."""
        if (running := self._active_run()) is not None:
            running[0].stop()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called in this run."""
        return self._is_stopped if (running := self._active_run()) is None else running[0].is_stopped

    @add_hints(
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
                as an uninterrupted one. Or an iterable of batches, which is iterated once per epoch. An object other
                than that of the previous `fit` starts at its beginning, unless the trainer was restored since.
            num_steps: the step to stop at; a restored trainer continues from its own step.
            num_epochs: the epoch to stop after. Step k then trains on ``data[k % len(data)]``, or for a
                `grain.MapDataset` on ``data[k]``, where the dataset continues with later epochs.
            eval_data: batches for held-out evaluation, at the first and last step and every `eval_every` steps.
            eval_every: steps between evaluations; with `num_epochs` by default one evaluation after every epoch.
            checkpoint_every: steps between checkpoints. With a `checkpoint_dir` the last step is saved however `fit`
                ends.
            callbacks: their hooks are called for every event.
            on_record: called with every record as soon as its values are known.
            progress: print the step's bytes, evaluations and, on a terminal, a bar to the first process's standard
                error.

        Returns:
            The records. A training record has ``step``, ``loss``, ``grad_norm`` of the trainable leaves, the loss
            function's metrics, ``seconds``, and ``learning_rate`` with `optax.inject_hyperparams`. An evaluation record
            has ``step``, ``eval_loss`` and metrics as ``eval_...``.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            ConfigError: without an end; for `checkpoint_every` without a `checkpoint_dir`; for `best` without
                `eval_data`, or with evaluations that lack its value.
            OutOfMemoryError: for a step that needs more than `budget`; JAX's own error gets the same explanation in a
                note.
            OutputError: when the `checkpoint_dir` holds a later step, so that nothing would be saved.
            DataError: when `data` ends before the run.
            NonFiniteError: for a loss that is not finite, depending on `on_nan`.
            StateError: when a step failed after it had consumed its state, and no copy of the state exists.

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
        callbacks start counting anew in it. `Run.stop` ends the run as its last step does. An exception in the ``with``
        block is handled like one in `fit`. A SIGTERM right before the loop is left takes effect at the end of the
        block, without a checkpoint: call `save` in the block where that matters.

        Args:
            data: as in `fit`.
            **options: keyword arguments of `fit`; but `progress` is off by default.

        Returns:
            A context manager of the run. Its iterator yields an `Event` for everything that a `Callback` is notified
            of, after the callbacks. Nothing is trained before the run is iterated.

        Raises:
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
        refuse_unknown(options)
        eval_data, checkpoint_every = options.get("eval_data"), options.get("checkpoint_every")
        with self.processes.watched():  # if this process raises, the others do not wait for it
            if checkpoint_every is not None:
                require_checkpoints(self.checkpoints, "checkpoint_every")
            self._store.refuse_averaged("fit")
            callbacks = as_callbacks(options.get("callbacks", ()))
            self._store.refresh()
            if (running := self._active_run()) is not None:
                running[0].refuse_another()
            if self._current_run is not None:  # an interrupt arrived before `_finish_run`
                self._finish_run(*self._current_run)
            session = Session(
                store=self._store,
                compiled=self._compiled,
                snapshots=self._snapshots,
                processes=self.processes,
                nan_policy=NonFinitePolicy(self._store, self._snapshots, self.on_nan, is_guarded=self.is_guarded),
                cursor=(cursor := DataCursor(data, options.get("num_steps"), options.get("num_epochs"))),
                previous=self._last_cursor,
                evaluate=lambda batches: self.evaluate(batches),
                save=lambda: self.save(),
                callback_states=lambda: listeners.states(),
                is_immediate=any(callback.is_immediate for callback in callbacks),
                eval_data=eval_data,
                eval_every=options.get("eval_every"),
                checkpoint_every=checkpoint_every,
            )
            if options.get("progress") and self.processes.is_first:
                from ._progress import Progress  # takes a moment; `import lowtide` does not need it

                callbacks = (Progress(cursor.num_steps), *callbacks)
            listeners = Listeners(self, callbacks, options.get("on_record"))
            self._is_stopped, self.history = False, session.records
            run = Run(session, listeners)
            try:
                self._current_run = session, run
                with session.running(listeners.notify):
                    yield run
            finally:
                self._finish_run(session, run)

    def _finish_run(self, session: Session, run: Run) -> None:
        """Keep the parts of an ended run that the next one needs."""
        run.close()
        self._is_stopped, self._last_cursor = session.is_stopped, session.final_cursor or self._last_cursor
        self._current_run = None
        self._store.give_back()

    def save(self) -> bool:
        """Start to write a checkpoint of the state; in a callback also of the position of `fit` in its data.

        Returns:
            False if this step is saved already. True if a checkpoint is written: for a new step, or for an old one
            whose weights were changed since.

        Raises:
            ConfigError: without a `checkpoint_dir`.
            StateError: inside of `averaged`.
        """
        require_checkpoints(self.checkpoints, "save")
        self._store.refuse_averaged("save")
        self._store.borrow(lend=False)  # includes changes made in a mutable object
        if (running := self._active_run()) is None:
            return self._snapshots.save(self._snapshots.metadata)
        session, run = running
        run.settle()  # restores an earlier state if the last steps made it non-finite
        return self._snapshots.save(session.metadata())

    def restore(self, *, step: int | None = None, best: bool = False) -> int | None:
        """Load a checkpoint into the trainer.

        Args:
            step: step of the checkpoint; by default the newest one that can be read.
            best: load the best checkpoint instead, which `Trainer` keeps.

        Returns:
            Step of the loaded checkpoint, or None when no checkpoint exists yet and `step` is None.

        Raises:
            ConfigError: without a `checkpoint_dir`; with both arguments; when there is no checkpoint of `step`, or
                none was evaluated.
            StructureError: when the checkpoint has other trainable leaves, or was trained over other frozen ones.
            StateError: when no checkpoint can be read; inside of `averaged`; in a callback while `fit` takes steps.

        Warns:
            UserWarning: for each damaged checkpoint, after which the one before it is tried, and for renamed ones.

        Memory:
            The state's arrays are deleted before those of the checkpoint are read, so there are never two copies on the
            device. With `rollback` the state is on the host meanwhile, in case the checkpoint cannot be read.
        """
        self._refuse_running("restore")
        self._store.refuse_averaged("restore")
        with self.processes.watched():
            return self._snapshots.restore(step, best=best)

    def _refuse_running(self, action: str, hint: str | None = None) -> None:
        if (running := self._active_run()) is not None:
            running[0].refuse(action, hint)

    def _active_run(self) -> tuple[Session, Run] | None:
        """Return the session and the run of a `fit` that has not ended, or None."""
        return None if self._current_run is None or self._current_run[0].is_closed else self._current_run

    @add_hints()
    def evaluate(self, data: Iterable[Tree], *, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
        """Return the mean loss and metrics over batches, weighted by `weight`; the state stays unchanged.

        Args:
            data: a finite iterable of batches.
            callbacks: notified of the beginning and the end.

        Returns:
            The weighted means, including ``loss``; they are summed on the device and read once.

        Raises:
            ConfigError: when there is no batch.
        """
        listeners = Listeners(self, as_callbacks(callbacks))
        self._store.refresh()
        listeners.notify(Event("evaluate_begin"))
        with self.processes.watched():
            means = self._evaluation.means(self._store.parts, self.state.step, data)
        listeners.notify(Event("evaluate_end", {**means}))
        return means

    def predict_batches(self, data: Iterable[Tree], fn: Callable[..., Any] | None = None) -> Iterator[Any]:
        """Return an iterator of the outputs of batches, in the order of the data, on the host.

        Args:
            data: batches.
            fn: ``fn(model, batch)``, traced once for each shape of a batch, and again for another function. If it takes
                `training`, that is False. By default ``model(batch)``.

        Returns:
            An iterator of NumPy arrays in the structure that `fn` returns. It uses the weights at the time it is read.

        Raises:
            StateError: from the iterator, when it is read inside `averaged` but was made outside, or the reverse.

        Memory:
            The outputs of two batches on the device.
        """
        self._store.refresh()
        return self._evaluation.outputs(self._store.deferred_parts(), data, fn)

    @add_hints()
    def predict(
        self, data: Iterable[Tree], fn: Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = ()
    ) -> Any:
        """Return outputs of all batches, joined along their first axis, on the host.

        Args:
            data: batches. Outputs are in their order: `array_data` shuffles unless ``seed=None``, and drops an
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
