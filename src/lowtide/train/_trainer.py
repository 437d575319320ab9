"""The trainer: one jitted step over what trains, one copy of its state, and a way back when a step fails.

The step consumes its state and returns what changed; the compiled program is checked to reuse every donated buffer, so
exactly one copy lives on the device. Frozen leaves are an argument of their own, never donated, copied or returned.

The trainer owns the trainable leaves from its construction on: of a pytree the arrays it was given are consumed by the
first step, a mutable object (`ModelObject`) holds placeholders while steps run. `Trainer.model` is the model as it is.

Whatever ends `fit`, the trainer holds a good state afterwards: that of the last step, or, when a step failed after it
had consumed its state, the one of the newest checkpoint or of a copy on the host (`_rollback`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..core import OutOfMemoryError, Tree, Where, argument_shapes, as_arguments, as_numpy, combine, numbers
from ..distributed import ShardingRules, abstract, placed
from ..memory import MemoryReport, Target, analyze, analyze_compiled, compile, shortage
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule, StageReport
from ._callbacks import Callback, Record
from ._checks import (
    OnNan,
    as_callbacks,
    guards,
    hints_at,
    needs_checkpoints,
    open_checkpoints,
    parse_budget,
    refuse_arguments,
    refuse_consumed,
    refuse_copies,
    refuse_later_checkpoint,
    refuse_rollback_to_nothing,
    refuse_shared,
    refuse_unevaluated,
)
from ._evaluation import Evaluation, call_model, join
from ._feed import StepData
from ._kept import Kept
from ._loop import Loop
from ._owned import settled
from ._pipelined import PipelineStep
from ._rollback import undisturbed
from ._step import DONATED, STEP_ARGUMENTS, LayerStep, LossFn, TrainState, flat, spread
from ._steps import choose_step

_ROLES = {name: position for position, name in enumerate(STEP_ARGUMENTS)}


class Trainer(Kept):
    """Train the selected leaves of any model with any Optax optimizer.

    Args:
        model: a pytree, whose trainable arrays belong to the trainer from now on; or a mutable object by way of its
            bridge in `lowtide.ext`.
        loss_fn: ``loss_fn(model, batch)``: a scalar loss, or ``(loss, metrics)`` with a dictionary of scalars, or of a
            pytree with `mutable` leaves ``(loss, metrics, model)``. It gets what it takes by name of ``key``, a random
            key of its own for every step and microbatch, and ``training``, which is False in evaluation.
        tx: the optimizer, with clipping and schedules chained in as Optax has them. Or a step made by
            `lowtide.offload.layerwise_step`, for a model of ``outer`` and ``layers``: what trains, microbatches and
            placement are then said there, and `loss_fn` is for evaluation alone.
        wrt: which leaves train: glob patterns on tree paths, or a predicate ``(path, leaf) -> bool``. By default all,
            or what the bridge says.
        mutable: which leaves the model changes itself (batch statistics, caches), selected likewise. They are saved
            with what trains, and never trained. By default none, or what the bridge says.
        num_microbatches: into how many parts a batch is split for gradient accumulation.
        weight: a function of a batch that gives its weight in means over microbatches and evaluation batches, for
            instance its number of target tokens. By default microbatches weigh the same and evaluation batches their
            number of rows, which is that of their first array; a layerwise step's own is taken.
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
        budget: bytes that a step may use on a device, as a number or such as ``"14 GiB"``; by default what the device
            has. A step that needs more is refused before it runs.
        sharding: how arrays and batches are divided among devices, of one process or of many. By default arrays stay
            where they are, and batches go to the default device; with a pipeline, rows are divided along other axes.
        pipeline: for a model of ``outer`` and ``layers``, the schedule by which layers are trained in stages, along the
            mesh's axis ``stage``; or for a model without a ``stack`` of its own, or with more options, what
            `lowtide.pipeline.value_and_grad` made. The loss is that of the stack, and `loss_fn` None; the schedule says
            the number of microbatches. Without `sharding`, FSDP along the devices that are left.

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
        refuse_arguments(model, tx, loss_fn, sharding, num_microbatches, seed, pipeline)
        step, weight, sharding, num_microbatches = choose_step(
            model,
            loss_fn,
            tx,
            wrt=wrt,
            mutable=mutable,
            num_microbatches=num_microbatches,
            weight=weight,
            compute_dtype=compute_dtype,
            seed=seed,
            sharding=sharding,
            pipeline=pipeline,
        )
        refuse_consumed(model)
        if sharding is not None:
            model = placed(model, sharding, step.arranged)
        state, frozen = step.init(model)
        self.is_guarded = guards(on_nan, state, is_layerwise=isinstance(step, LayerStep))
        """Whether steps leave an update out whose loss or gradients are not finite."""
        step.guard = self.is_guarded
        refuse_shared((state.trainable, state.mutable))
        refuse_rollback_to_nothing(on_nan, has_copies=rollback or checkpoint_dir is not None)
        # Python's numbers are no arrays that a step could consume.
        state = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), state)
        if sharding is None:
            state, frozen = settled((state, frozen), None, None)
        else:
            state, frozen = sharding.settle((state, frozen))
        self._num_microbatches = num_microbatches
        checkpoints = open_checkpoints(checkpoint_dir, max_to_keep=max_to_keep, best=best, best_mode=best_mode)
        super().__init__(model, step, state, frozen, sharding, checkpoints=checkpoints, rollback=rollback)
        self.budget_bytes = parse_budget(budget)
        """Bytes that a step may use on a device; None for what the device has."""
        self.on_nan = on_nan
        """What to do when loss or gradients are not finite."""
        self.is_stopped = False
        """Whether `stop` was called in this run."""
        self.history: list[Record] = []
        """The records of the last `fit`, also of one that raised."""
        self.stages: StageReport | None = None
        """Of a pipeline what each rank holds, from `preflight` on."""
        self._call: Callable[..., Any] = getattr(self._object, "call", call_model)  # bound once: it is told by identity
        self._compiled: dict[Any, Any] = {}
        self._reports: dict[int, MemoryReport] = {}
        self._evaluation = Evaluation(
            step,
            weight,
            seed,
            place=functools.partial(self._on_device, is_training=False),
            processes=self.processes,
            out_shardings=None if sharding is None else sharding.replicated(),
        )

    def _put(self, trainable: Tree, mutable: Tree, frozen: Tree) -> None:
        super()._put(trainable, mutable, frozen)
        if self.checkpoints is not None:
            self.checkpoints.changed(self.step)

    # --- training --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `fit` after the step that is running, as if its last one had come. For callbacks."""
        self.is_stopped = True

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree]]:
        """The pure step, a function of `STEP_ARGUMENTS` that returns the first four as they are after it, and metrics.

        Jitted with these four donated; `lowtide.memory.analyze` takes it as it is.
        """
        places = None
        if self.sharding is not None:
            kept = self._arguments(None)[: len(DONATED)]
            # On an abstract mesh: the devices are those of the arguments, which `memory` moves to a target's.
            places = *jax.tree.map(lambda leaf: abstract(leaf.sharding), kept), abstract(self.sharding.replicated())
        return jax.jit(flat(self._step), donate_argnums=DONATED, keep_unused=True, out_shardings=places)

    def memory(self, batch: Tree, *, target: Target | str | None = None) -> MemoryReport:
        """Compiled bytes of the training step, per role (`STEP_ARGUMENTS`), before anything runs.

        Args:
            batch: a batch, or shapes of one.
            target: what to compile for; None for the hardware at hand, whose compiled step `fit` then uses.

        Returns:
            The report for one device.
        """
        batch = self._shapes(batch)
        if target is None:
            return self._report(self._compile(batch))
        return analyze(self.step_fn, *self._arguments(batch), target=target, roles=_ROLES)

    def preflight(self, batch: Tree) -> MemoryReport:
        """Compile the step, and refuse it if the device is too small; `fit` does so before its first step.

        Args:
            batch: a batch, or shapes of one.

        Returns:
            What `memory` returns.

        Raises:
            OutOfMemoryError: for a step that needs more than `budget`, with the owners of its bytes and remedies.

        Memory:
            Compiles; a step that is refused is compiled twice.
        """
        shapes = self._shapes(batch)
        compiled = self._compile(shapes)
        if isinstance(self._step, PipelineStep):
            self.stages = self._step.report(combine(*self._parts), shapes, self._report(compiled))
        return self._refuse_large(compiled, batch)

    def _refuse_large(self, compiled: Any, batch: Tree) -> MemoryReport:
        report = self._report(compiled)
        usable = report.target.device_bytes if self.budget_bytes is None else self.budget_bytes
        if usable is not None and report.device_bytes > usable:
            raise self.shortage(batch, "before its first step")
        return report

    def shortage(self, batch: Tree, when: str) -> OutOfMemoryError:
        """The error that says who owns the bytes of the step, to raise or to add to another one; see `preflight`."""
        batch = self._shapes(batch)
        program = compile(self.step_fn, *self._arguments(batch))
        return shortage(program, when=when, roles=_ROLES, budget_bytes=self.budget_bytes, hint=self._step.remedies)

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
            checkpoint_every: steps between checkpoints; with a `checkpoint_dir` the last step is always saved, also
                that of a run which an exception or a signal ends.
            callbacks: told of everything that happens.
            on_record: called with every record as soon as its values are known.
            progress: print the bytes of the step and evaluations to standard error, and on a terminal a bar; in the
                first of several processes.

        Returns:
            The records: ``step``, ``loss``, ``grad_norm``, the loss function's metrics, ``seconds``; or ``step``,
            ``eval_loss`` and the metrics with ``eval_`` before their names. Norms cover trainable leaves only. With an
            optimizer of `optax.inject_hyperparams` also the step's ``learning_rate``.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            ConfigError: without an end, when `checkpoint_every` is given without a `checkpoint_dir`, or when nothing
                could be the `best`: without `eval_data`, or with evaluations that lack the value.
            OutOfMemoryError: for a step that needs more than `budget`. When memory runs out although it should not,
                JAX's error is raised with the same explanation as a note.
            OutputError: when the `checkpoint_dir` holds a later step, so that nothing would be saved.
            DataError: when `data` ends before the run.
            NonFiniteError: for a loss that is no number, as `on_nan` says.
            StateError: when a step failed after it had consumed its state, and there is no copy to go back to.

        Whatever else ends it is raised as it came, with a note that says which step the trainer holds. Ctrl-C comes
        through between steps, SIGTERM after a step; both after a checkpoint, except Ctrl-C in one of several processes.
        """
        with self.processes.watched():  # the others do not wait for one that refuses
            if checkpoint_every is not None:
                needs_checkpoints(self.checkpoints, "checkpoint_every")
            self._refuse_averaged("fit")
            callbacks = as_callbacks(callbacks)
            self._borrow(lend=False)  # what was changed in a mutable object
            refuse_consumed(self.state, self.frozen)
            refuse_later_checkpoint(self.checkpoints, self.step)
            refuse_unevaluated(self.checkpoints, eval_data)
            loop = Loop(
                trainer=self,
                data=data,
                num_steps=num_steps,
                num_epochs=num_epochs,
                eval_data=eval_data,
                eval_every=eval_every,
                checkpoint_every=checkpoint_every,
                callbacks=callbacks,
                on_record=on_record,
                progress=progress,
            )
            self.is_stopped, self.history = False, loop.records
            try:
                return loop.run()
            finally:
                self.give_back()

    def advance(self, batch: Tree) -> Tree:
        """Take one step, outside of `fit`.

        Args:
            batch: its batch.

        Returns:
            The metrics, on the device.

        Raises:
            DonationError: when the compiled step would keep a second copy of a donated leaf.
            OutOfMemoryError: for a step that needs more than `budget`.
            StateError: in a callback of `fit`, or inside of `averaged`.
        """
        self._refuse_averaged("advance")
        self._refuse_running("advance")
        return self.take_step(batch)

    def take_step(self, batch: Tree) -> Tree:
        """`advance`, for `fit`."""
        self._borrow()
        on_device = self._on_device(batch)
        compiled = self._compile(on_device)
        self._refuse_large(compiled, batch)
        with undisturbed():
            trainable, opt_state, mutable, step, metrics = compiled(*self._arguments(on_device))
            self.state, self.metrics = TrainState(step, trainable, opt_state, mutable), metrics
        return self.processes.in_turn(metrics)

    # --- evaluation ------------------------------------------------------------------------------------------------

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
        callbacks = as_callbacks(callbacks)
        self._borrow(lend=False)
        refuse_consumed(self.state, self.frozen)
        for callback in callbacks:
            callback.on_evaluate_begin(self)
        with self.processes.watched():
            means = self._evaluation.means(self._parts, self.state.step, data)
        for callback in callbacks:
            callback.on_evaluate_end(self, {**means})
        return means

    def predict_batches(self, data: Iterable[Tree], fn: Callable[..., Any] | None = None) -> Iterator[Any]:
        """Outputs of batches, one after the other, in the order of the data, on the host.

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
        self._borrow(lend=False)
        refuse_consumed(self.state, self.frozen)
        return self._evaluation.outputs(self._later(), data, fn or self._call)

    @hints_at()
    def predict(
        self, data: Iterable[Tree], fn: Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = ()
    ) -> Any:
        """Outputs of all batches, joined along their first axis, on the host.

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
        callbacks = as_callbacks(callbacks)
        for callback in callbacks:
            callback.on_predict_begin(self)
        with self.processes.watched():
            joined = join(list(self.predict_batches(data, fn)))
        for callback in callbacks:
            callback.on_predict_end(self)
        return joined

    def _on_device(self, batch: Tree, *, is_training: bool = True) -> Tree:
        if self.sharding is None:
            return as_arguments(batch)
        self.processes.agree_on_batch(batch := jax.tree.map(as_numpy, batch))
        return self.sharding.batch(batch, self._num_microbatches if is_training else None)

    def _shapes(self, batch: Tree) -> Tree:
        """Of what is not on the device yet the shapes that it will have there."""
        if self.sharding is None:
            return argument_shapes(batch)
        self.processes.agree_on_batch(batch := numbers(batch))
        return self.sharding.batch_shapes(batch, self._num_microbatches)

    def _arguments(self, batch: Tree) -> tuple[Tree, Tree, Tree, Any, Tree, Tree]:
        return self.state.trainable, self.state.opt_state, self.state.mutable, self.state.step, self.frozen, batch

    def _report(self, compiled: Any) -> MemoryReport:
        """The report of a compiled step, made once."""
        if id(compiled) not in self._reports:
            self._reports[id(compiled)] = analyze_compiled(compiled, roles=_ROLES)
        return self._reports[id(compiled)]

    def _compile(self, batch: Tree) -> Any:
        """The compiled step for batches of this shape, checked to reuse every donated buffer."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *[(leaf.shape, leaf.dtype, spread(leaf)) for leaf in leaves]
        if shapes not in self._compiled:
            with warnings.catch_warnings():
                # JAX only warns, and without a path; refuse_copies raises, with one.
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                lowered = self.step_fn.lower(*self._arguments(batch))  # pyright: ignore[reportFunctionMemberAccess]
                self.processes.agree_on_program(lowered)
                compiled = lowered.compile()
            refuse_copies(compiled)
            self._compiled[shapes] = compiled
        return self._compiled[shapes]
