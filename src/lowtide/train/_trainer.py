"""The trainer: one jitted step over what trains, one copy of its state, and a way back when a step fails.

This is the façade: it makes the parts, hands them to one another, and tells callbacks what a session says. The trainer
owns the trainable leaves from its construction on (`_state`); its step consumes them and returns what changed, never a
second copy of anything (`_compiled`); and whatever ends `fit`, it holds a good state afterwards (`_recovery`).
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
from ._arguments import choose_step, hints_at
from ._callbacks import Callback, Listeners, as_callbacks
from ._compiled import CompiledStep, parse_budget
from ._data import Feed, StepData
from ._evaluation import Evaluation, join
from ._events import Event, Record
from ._finite import Guard, OnNan
from ._recovery import Copies, needs_checkpoints, open_checkpoints
from ._run import FitOptions, Run, refuse_unknown
from ._session import Session
from ._state import LiveState
from ._step import LossFn, TrainState


class Trainer:
    """Train the selected leaves of any model with any Optax optimizer.

    Args:
        model: a pytree, whose trainable arrays are the trainer's from now on; or a bridge to a mutable object.
        loss_fn: ``loss_fn(model, batch)``: a scalar loss, or ``(loss, metrics)`` with a dictionary of scalars, or of a
            pytree with `mutable` leaves ``(loss, metrics, model)``. It gets what it takes by name of ``key``, a random
            key of its own for every step and microbatch, and ``training``, which is False in evaluation.
        tx: the optimizer, with clipping and schedules chained in as Optax has them. Or a step made by
            `lowtide.offload.layerwise_step`, for a model of ``outer`` and ``layers``: what trains, microbatches and
            placement are then said there, and `loss_fn` is for evaluation alone.
        wrt: what trains: globs on tree paths, or a predicate ``(path, leaf) -> bool``; by default all, or the bridge's.
        mutable: which leaves the model changes itself (batch statistics, caches), selected likewise. They are saved
            with what trains, and never trained. By default none, or what the bridge says.
        num_microbatches: into how many parts a batch is split for gradient accumulation.
        weight: a function of a batch: its weight in means over microbatches and evaluations, such as its target tokens.
            By default 1, and in evaluations the rows of its first array; a layerwise step's own is taken.
        compute_dtype: ``"bfloat16"`` for mixed precision: `loss_fn` and functions of `predict` get the model's and the
            batch's float32 leaves in it, labels too. What trains, the optimizer and `mutable` leaves keep their dtypes;
            gradients, the loss, metrics and predictions are float32. Leaves of 16 bits or less, and integers, are given
            as they are. A Keras model runs under its own policy ``mixed_bfloat16``. By default nothing is cast.
        seed: of the keys that `loss_fn` gets; they follow from it and from the number of the step alone.
        on_nan: what to do when loss or gradients are not finite: ``"abort"`` raises and leaves the step's update out,
            ``"skip"`` leaves it out and goes on (the hundredth in a row raises), ``"roll_back"`` returns to the last
            copy and goes on with the next batches, ``"ignore"`` does nothing. With optimizer state on the host, whose
            updates cannot be left out, or a layerwise step, and where an update has made weights not finite,
            ``"abort"`` returns to the last copy and raises. A layerwise step skips as `layerwise_step` says.
        rollback: whether to keep a copy on the host of the state with which `fit` or an epoch began, where there is no
            checkpoint of it, for a step that fails after it has consumed its state.
        checkpoint_dir: where to keep checkpoints of the trainable state; none are written without it.
        max_to_keep: how many of the newest checkpoints to keep.
        best: name of a value in the records of evaluations, such as ``"eval_loss"``. When an evaluation finds a better
            one than all before, a checkpoint is written there, and it is kept beside the newest.
        best_mode: whether less (``"min"``) or more (``"max"``) is better.
        budget: bytes that a step may use on a device, such as ``"14 GiB"``; by default all. Larger steps are refused;
            a pipeline's schedule is chosen within it.
        sharding: how arrays and batches are divided among devices, of one process or of many. By default arrays stay
            where they are, and batches go to the default device; with a pipeline, rows are divided along other axes.
        pipeline: for a model of ``outer`` and ``layers``, the schedule by which layers are trained in stages, along the
            mesh's axis ``stage``; or for a model without a ``stack`` of its own, or with more options, what
            `lowtide.pipeline.value_and_grad` made. The loss is that of the stack, and `loss_fn` None; the schedule says
            the number of microbatches. Without `sharding`, FSDP along the devices that are left. ``"auto"`` without
            costs and limits of its own is made for what the device has left: less waits, with a warning, where the
            step would not fit, and more where that ends sooner.

    Raises:
        SelectionError: when `wrt` or `mutable` selects nothing, or one array stands at two trainable paths.
        StructureError: for a layerwise step or a pipeline, and a model that is not made of ``outer`` and ``layers``.
        ConfigError: for an unknown or impossible `on_nan`, `best_mode`, `compute_dtype` or `budget`, for `best` without
            `checkpoint_dir`, or for arguments that a layerwise step or a pipeline says itself.
        StateError: for arrays that another trainer has consumed.

    Memory:
        Device: frozen leaves, one copy of trainable leaves and optimizer state, gradients of trainable leaves (and
        an accumulator of the same size with microbatches), activations of one microbatch; with `compute_dtype` copies
        in it of the float32 leaves in use, also of frozen ones. Host: with `rollback` one copy of the state; the
        records, some 340 bytes a step; a program for every shape of a batch. That an update can be left out costs less
        than a leaf on a TPU and at most two leaves on a CPU (compiled); ``on_nan="ignore"`` does without.

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
        chosen = choose_step(
            model, loss_fn, tx, wrt, mutable, num_microbatches, weight, compute_dtype, seed, sharding, pipeline
        )
        step, weight, sharding, num_microbatches = chosen
        model, state, frozen, self.is_guarded = chosen.begin(model, on_nan)
        """Whether steps leave an update out whose loss or gradients are not finite."""
        self.checkpoints = open_checkpoints(checkpoint_dir, state, on_nan, rollback, max_to_keep, best, best_mode)
        """Where checkpoints are kept, or None."""
        self.sharding = sharding
        """Where arrays belong; None for one device."""
        self.processes = Processes(sharding)
        """The other processes of the run."""
        self.on_nan: OnNan = on_nan
        """What to do when loss or gradients are not finite."""
        self.history: list[Record] = []
        """The records of the last `fit`, also of one that raised."""
        changed = None if self.checkpoints is None else self.checkpoints.changed
        self._live = live = LiveState(model, step, state, frozen, sharding, on_change=changed)
        self._copies = Copies(live, step.arrangement, self.checkpoints, self.processes, rollback=rollback)
        self._compiled = CompiledStep(step, live, sharding, self.processes, num_microbatches, lambda: self.budget_bytes)
        self._evaluation = Evaluation(step, weight, seed, self._compiled, self.processes, sharding, model)
        self.budget_bytes = parse_budget(budget)
        """Bytes that a step may use on a device; None for what the device has."""
        self._running: tuple[Session, Run] | None = None  # the `fit` that is running; not for long one that has ended
        self._left: Feed | None = None  # the data of the last one, for another with the same iterator
        self._is_stopped = False

    @property
    def state(self) -> TrainState:
        """All that a step changes; may be set to another one with the same structure.

        Raises:
            StructureError: when that has other leaves, shapes, dtypes or containers.
            SelectionError: when one of its arrays is at two paths, or is a frozen one.
            StateError: inside of `averaged`, for consumed arrays, or for one of another step while `fit` takes steps.
            ConfigError: for a step that is no number of steps.
        """
        return self._live.state

    @state.setter
    def state(self, state: TrainState) -> None:
        hint = "dataclasses.replace(state, step=trainer.state.step)"
        self._live.replace(state, lambda: self._refuse_running("setting a state of another step", hint))

    @property
    def frozen(self) -> Tree:
        """What no step changes."""
        return self._live.frozen

    @property
    def model(self) -> Any:
        """The model as it is now. Of a pytree, its trainable arrays are consumed by the next step.

        A mutable object gets its arrays back; what is changed in it is what the next step begins with.
        """
        return self._live.model

    @property
    def step(self) -> int:
        """Steps taken so far.

        May be set, between two calls of `fit`, for weights that were trained elsewhere: data by step number, random
        keys and records go on from there. An optimizer's own count, of a schedule, is in its state and stays.
        """
        return self._live.step

    @step.setter
    def step(self, number: int) -> None:
        self._refuse_running("setting step")
        self._live.count_from(number)

    def update(self, model: Tree) -> None:
        """Go on with other weights: those of a pytree, or of an Equinox module, like the model.

        Args:
            model: the model; its trainable and mutable arrays belong to the trainer from now on.

        Raises:
            StructureError: when a leaf has another shape or dtype, or there are others.
            ConfigError: for a mutable object, which is changed itself.
            StateError: inside of `averaged`, or for arrays that were consumed.
        """
        self._live.update(model)

    def averaged(self) -> AbstractContextManager[None]:
        """Put the running average of `lowtide.train.ema` in the place of what trains, inside a ``with`` block.

        For evaluation, prediction and export: the block cannot train, save or restore, and changes in it are lost.

        Raises:
            ConfigError: when the optimizer keeps none.
            StateError: inside of another one.
        """
        return self._live.averaged()

    def wait(self) -> None:
        """Wait until the device has ended all steps."""
        jax.block_until_ready(self.state)

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Where the data of the run is, as its last checkpoint or `fit` left it."""
        return self._copies.notes.position

    @property
    def has_eval_data(self) -> bool:
        """Whether the `fit` that is running evaluates."""
        return (running := self._in_fit()) is not None and running[0].eval_data is not None

    @property
    def stages(self) -> StageReport | None:
        """Of a pipeline what each rank holds, from `preflight` or `memory` on."""
        return self._compiled.stages

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree]]:
        """The jitted step: a function of `STEP_ARGUMENTS` that donates the first four, and returns them and metrics.

        Of a pipeline whose schedule was chosen, that of the batches that were compiled for last.
        """
        return self._compiled.step_fn

    def memory(self, batch: Tree, *, target: Target | str | None = None) -> MemoryReport:
        """Compiled bytes of the training step, per role (`STEP_ARGUMENTS`), before anything runs.

        Args:
            batch: a batch, or shapes of one.
            target: what to compile for; None for the hardware at hand, whose compiled step `fit` then uses.

        Returns:
            The report for one device.
        """
        return self._compiled.memory(batch, target)

    def preflight(self, batch: Tree) -> MemoryReport:
        """Compile the step, and refuse it if the device is too small; `fit` does so before its first step.

        Args:
            batch: a batch, or shapes of one.

        Returns:
            What `memory` returns.

        Raises:
            OutOfMemoryError: for a step that needs more than `budget`, with the owners of its bytes and remedies.

        Memory:
            Compiles; a step that is refused is compiled twice, a pipeline whose schedule is chosen up to four times.
        """
        return self._compiled.preflight(batch)

    def shortage(self, batch: Tree, when: str) -> OutOfMemoryError:
        """Make the error that says who owns the bytes of the step, to raise or to add to another; see `preflight`."""
        return self._compiled.shortage(batch, when)

    def advance(self, batch: Tree) -> Tree:
        """Take one step, outside of `fit`.

        Args:
            batch: its batch.

        Returns:
            The metrics, on the device.

        Raises:
            DonationError, OutOfMemoryError: as `fit`.
            StateError: in a callback of `fit`, or inside of `averaged`.
        """
        self._live.refuse_averaged("advance")
        self._refuse_running("advance")
        return self._compiled.run(batch)

    def stop(self) -> None:
        """End `fit` after the step that is running, as if its last one had come; without one it does nothing."""
        if (running := self._in_fit()) is not None:
            running[0].stop()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called in this run."""
        return self._is_stopped if (running := self._in_fit()) is None else running[0].is_stopped

    @hints_at(epochs="num_epochs", steps_per_epoch="num_steps in all", validation_data="eval_data", verbose="progress")
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
            data: batches by step number; step k (from 0) trains on ``data[k]``, so a resumed run sees what an
                uninterrupted one would. Or an iterable of batches, one epoch each time that it is iterated; another
                object than that of the `fit` before begins at its start, unless the trainer was restored since.
            num_steps: the step to stop at; a restored trainer continues from its own step.
            num_epochs: the epoch to stop after; step k then trains on ``data[k % len(data)]``, or on ``data[k]`` of a
                `grain.MapDataset`, which goes on with later epochs there.
            eval_data: batches for held-out evaluation, at the first and last step and every `eval_every`.
            eval_every: steps between evaluations; with `num_epochs` by default one after every epoch.
            checkpoint_every: steps between checkpoints; in a `checkpoint_dir` the last step is saved however it ends.
            callbacks: told of everything that happens.
            on_record: called with every record as soon as its values are known.
            progress: print the step's bytes, evaluations and on a terminal a bar to the first process's standard error.

        Returns:
            The records: ``step``, ``loss``, ``grad_norm`` of what trains, the loss function's metrics, ``seconds``, and
            of `optax.inject_hyperparams` the ``learning_rate``; or ``step``, ``eval_loss`` and metrics as ``eval_...``.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            ConfigError: without an end; for `checkpoint_every` without a `checkpoint_dir`; when nothing could be the
                `best`: without `eval_data`, or with evaluations that lack the value.
            OutOfMemoryError: for a step that needs more than `budget`; JAX's own is explained likewise, in a note.
            OutputError: when the `checkpoint_dir` holds a later step, so that nothing would be saved.
            DataError: when `data` ends before the run.
            NonFiniteError: for a loss that is no number, as `on_nan` says.
            StateError: when a step failed after it had consumed its state, and there is no copy to go back to.

        Whatever else ends it is raised as it came, with a note that says which step the trainer holds. Ctrl-C comes
        through between steps, SIGTERM after a step; both after a checkpoint, except Ctrl-C in one of several processes.
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
        """Train as `fit` does, in a loop of your own that hears of everything that happens.

        Leaving the loop early leaves the run where it is, with the values of all its steps seen to, and without a last
        evaluation or checkpoint; callbacks hear of its end, and another session or `fit` goes on there, in which they
        count anew. `Run.stop` ends it like its last step. What is raised in the ``with`` block is handled as what is
        raised in `fit`. A SIGTERM right before the loop is left is let through at the end of the block, without a
        checkpoint: call `save` in the block where that matters.

        Args:
            data: as for `fit`.
            **options: as for `fit`, by name; but `progress` is off by default.

        Returns:
            A context manager of the run, whose iterator gives an `Event` for all that a `Callback` hears of, after the
            callbacks have. Nothing is trained before it is iterated.

        Raises:
            Exception: as `fit`.

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
        with self.processes.watched():  # the others do not wait for one that refuses
            if checkpoint_every is not None:
                needs_checkpoints(self.checkpoints, "checkpoint_every")
            self._live.refuse_averaged("fit")
            callbacks = as_callbacks(options.get("callbacks", ()))
            self._live.refresh()
            if (running := self._in_fit()) is not None:
                running[0].refuse_another()
            if self._running is not None:  # an interrupt came before it was put away
                self._put_away(*self._running)
            session = Session(
                live=self._live,
                compiled=self._compiled,
                copies=self._copies,
                processes=self.processes,
                guard=Guard(self._live, self._copies, self.on_nan, is_guarded=self.is_guarded),
                feed=(feed := Feed(data, options.get("num_steps"), options.get("num_epochs"))),
                before=self._left,
                evaluate=lambda batches: self.evaluate(batches),
                save=lambda: self.save(),
                states=lambda: listeners.states(),
                is_immediate=any(callback.is_immediate for callback in callbacks),
                eval_data=eval_data,
                eval_every=options.get("eval_every"),
                checkpoint_every=checkpoint_every,
            )
            if options.get("progress") and self.processes.is_first:
                from ._progress import Progress  # takes a moment; `import lowtide` does not need it

                callbacks = (Progress(feed.num_steps), *callbacks)
            listeners = Listeners(self, callbacks, options.get("on_record"))
            self._is_stopped, self.history = False, session.records
            run = Run(session, listeners)
            try:
                self._running = session, run
                with session.running(listeners.tell):
                    yield run
            finally:
                self._put_away(session, run)

    def _put_away(self, session: Session, run: Run) -> None:
        """Keep of a run that has ended what the next one asks for."""
        run.close()
        self._is_stopped, self._left = session.is_stopped, session.left or self._left
        self._running = None
        self._live.give_back()

    def save(self) -> bool:
        """Begin to write a checkpoint of the state; in a callback also of where `fit` is.

        Returns:
            Whether there was none of this step yet, or the weights were changed since and it is written anew.

        Raises:
            ConfigError: without a `checkpoint_dir`.
            StateError: inside of `averaged`.
        """
        needs_checkpoints(self.checkpoints, "save")
        self._live.refuse_averaged("save")
        self._live.borrow(lend=False)  # what was changed in a mutable object
        if (running := self._in_fit()) is None:
            return self._copies.save(self._copies.notes)
        session, run = running
        run.settle()  # goes back from what the last steps have spoilt
        return self._copies.save(session.notes())

    def restore(self, *, step: int | None = None, best: bool = False) -> int | None:
        """Load a checkpoint into the trainer.

        Args:
            step: which; by default the newest that can be read.
            best: the one that `Trainer` keeps as the best, instead.

        Returns:
            Its step, or None when there is no checkpoint yet (and none was named).

        Raises:
            ConfigError: without a `checkpoint_dir`; with both arguments; when there is no checkpoint of `step`, or
                none was evaluated.
            StructureError: when the checkpoint is of other trainable leaves, or was trained over other frozen ones.
            StateError: when no checkpoint can be read; inside of `averaged`; in a callback while `fit` takes steps.

        Warns:
            UserWarning: for each checkpoint that is damaged, whose predecessor is tried then, and for those renamed.

        Memory:
            The state's arrays are given up before those of the checkpoint are read: never two copies on the device.
            With `rollback` they are on the host meanwhile, for a checkpoint that cannot be read.
        """
        self._refuse_running("restore")
        self._live.refuse_averaged("restore")
        with self.processes.watched():
            return self._copies.restore(step, best=best)

    def _refuse_running(self, what: str, hint: str | None = None) -> None:
        if (running := self._in_fit()) is not None:
            running[0].refuse(what, hint)

    def _in_fit(self) -> tuple[Session, Run] | None:
        """Return the run that has not ended."""
        return None if self._running is None or self._running[0].is_closed else self._running

    @hints_at()
    def evaluate(self, data: Iterable[Tree], *, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
        """Mean loss and metrics over batches, weighted as `weight` says, without touching the state.

        Args:
            data: batches, finite.
            callbacks: told of the beginning and the end.

        Returns:
            The weighted means, ``loss`` among them; summed on the device, read once.

        Raises:
            ConfigError: when there is no batch.
        """
        listeners = Listeners(self, as_callbacks(callbacks))
        self._live.refresh()
        listeners.tell(Event("evaluate_begin"))
        with self.processes.watched():
            means = self._evaluation.means(self._live.parts, self.state.step, data)
        listeners.tell(Event("evaluate_end", {**means}))
        return means

    def predict_batches(self, data: Iterable[Tree], fn: Callable[..., Any] | None = None) -> Iterator[Any]:
        """Give outputs of batches, one after the other, in the order of the data, on the host.

        Args:
            data: batches.
            fn: ``fn(model, batch)``, traced once for each shape of a batch, and anew for another function;
                `training` is False where it takes it. By default ``model(batch)``.

        Returns:
            An iterator of NumPy arrays in the structure that `fn` returns, of the weights as they are when it is read.

        Raises:
            StateError: from the iterator, when it is read on the other side of the end of `averaged`.

        Memory:
            The outputs of two batches on the device.
        """
        self._live.refresh()
        return self._evaluation.outputs(self._live.later(), data, fn)

    @hints_at()
    def predict(
        self, data: Iterable[Tree], fn: Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = ()
    ) -> Any:
        """Return outputs of all batches, joined along their first axis, on the host.

        Args:
            data: batches, in whose order the outputs are: `array_data` shuffles unless it is told ``seed=None``, and
                leaves out what does not fill a batch unless it is told ``drop_remainder=False``.
            fn: as in `predict_batches`.
            callbacks: told of the beginning and the end.

        Returns:
            NumPy arrays, in the structure that `fn` returns.

        Raises:
            ConfigError: when there is no batch.
            StructureError: when outputs of two batches cannot be joined.

        Memory:
            The outputs of two batches on the device, all of them on the host.
        """
        listeners = Listeners(self, as_callbacks(callbacks))
        listeners.tell(Event("predict_begin"))
        with self.processes.watched():
            joined = join(list(self.predict_batches(data, fn)))
        listeners.tell(Event("predict_end"))
        return joined
