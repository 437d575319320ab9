"""Compilation of the training step: one program for each shape of a batch, with a memory report before it runs.

`check_donation` verifies that each program reuses every donated buffer, so exactly one copy of the state is on the
device. A program that needs more memory than the device has is refused. A pipeline that may change its schedule gets
the schedule that fits the memory of the device best.
`analyze_step` and `analyze_naive` compile a step from shapes, before anything is allocated.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..core import (
    OutOfMemoryError,
    ScheduleError,
    Selector,
    Tree,
    accumulate,
    argument_shapes,
    as_arguments,
    as_numpy,
    check_integer,
    combine,
    format_bytes,
    memory_space,
    numbers,
    parse_bytes,
    partition,
    split_static,
)
from ..core._compat import called
from ..distributed import Processes, ShardingRules, abstract
from ..hlo import options_of
from ..memory import (
    Job,
    MemoryReport,
    Target,
    analyze,
    analyze_compiled,
    check_donation,
    compile,
    is_out_of_memory,
    shortage,
)
from ..offload import state_shardings
from ..pipeline import StageReport
from ..planning import Plan, planned
from ..targets import resolve_target
from ._events import user_stacklevel
from ._pipeline_step import PipelineStep
from ._signals import delay_signals
from ._state import TrainStateStore
from ._step import (
    DONATED,
    STEP_ARGUMENTS,
    LossFn,
    TrainingStep,
    TrainState,
    WholeStep,
    flat_step,
    multi_device_sharding,
    parse_loss,
)

Planner = Callable[[Tree, int, Sequence[int]], Plan | None]
"""Plans the step for (batch, budget, numbers of microbatches); None for a loss that runs no stack."""
_ROLES = {name: position for position, name in enumerate(STEP_ARGUMENTS)}
_MAX_ATTEMPTS = 3
"""Largest number of smaller schedules to compile; only a compiled step shows whether its schedule fits."""
_MAX_TIME_SHARE = 0.99
"""A schedule that uses more memory is compiled only if it takes at most this share of the default schedule's time."""


class CompiledStep:
    """The step of a trainer, compiled for the shapes of its batches. Mutable: it caches the compiled programs.

    `store` holds the state and the frozen leaves.
    """

    def __init__(
        self,
        step: TrainingStep,
        store: TrainStateStore,
        sharding: ShardingRules | None,
        processes: Processes,
        num_microbatches: int,
        budget: int | str | None,
        has_weight: bool,
        plan: Plan | None = None,
        planner: Planner | None = None,
    ) -> None:
        self._plan, self._planner = plan, planner
        self._plans_itself, self._has_replanned = plan is None, False
        self._hint = step.remedies
        self._plans: dict[Any, Plan | None] = {}
        """Plans that the step made itself, by the shapes of a batch; None if no choice fits."""
        self._step, self._store, self._sharding, self._processes = step, store, sharding, processes
        self._reschedulable = step if isinstance(step, PipelineStep) and step.can_reschedule else None
        self._num_microbatches, self._has_weight = num_microbatches, has_weight
        self._programs: dict[Any, _Trial] = {}
        self._reports: dict[int, MemoryReport] = {}
        self.budget_bytes: int | None = None
        """Bytes that a step may use on a device; None for all bytes of the device."""
        self.set_budget(budget)
        self.stages: StageReport | None = None
        """Report on the memory of each rank of a pipeline; None without a pipeline, or before `preflight`."""

    def set_budget(self, budget: int | str | None) -> None:
        """Set the budget; raise `ConfigError` unless it is None, or a positive number of bytes such as ``"14 GiB"``."""
        budget_bytes: Any = parse_bytes(budget) if isinstance(budget, str) else budget
        if budget_bytes is not None:
            check_integer("budget", budget_bytes, hint='budget="14 GiB", or None for all bytes of the device')
        self.budget_bytes = budget_bytes
        if self._plans_itself and self._plans:
            self._plans, self._programs, self._reports = {}, {}, {}

    def _use_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._programs, self._reports = {}, {}
        if isinstance(self._step, WholeStep):
            self._step.set_num_microbatches(plan.num_microbatches)
            self._num_microbatches = plan.num_microbatches

    def _plan_first(self, shapes: Tree) -> None:
        """Plan the step for a batch of these shapes within the budget, unless the caller passed a plan.

        If no choice fits, the step is not planned, and refused with its owners and remedies.
        """
        if not self._plans_itself or self._planner is None or self.budget_bytes is None:
            return
        key = self._key(shapes)
        if key not in self._plans:
            self._plans[key], self._hint = None, self._step.remedies
            try:
                self._plans[key] = self._planner(shapes, self.budget_bytes, [self._num_microbatches])
            except OutOfMemoryError as error:
                note = f"The smallest planned step needs {error.got}. lt.plan may also choose microbatches"
                self._hint = f"{self._step.remedies}. {note}"
        self._plan = self._plans[key]

    def replan(self, error: BaseException, batch: Tree) -> bool:
        """Plan the step again for fewer bytes after an out-of-memory error, at most once; return whether it changed.

        The new step needs the missing bytes less, at least 2 % and at most 20 %. A step with microbatches, or with a
        weight, may get more microbatches.
        """
        if self._plan is None or self._planner is None or self._has_replanned or not is_out_of_memory(error):
            return False
        self._has_replanned, old = True, self._plan
        size, number = old.device_bytes, old.num_microbatches
        budget = size - min(max(_missing_bytes(error), size // 50), size // 5)
        shapes = self._shapes(batch)
        rows = {leaf.shape[0] for leaf in jax.tree.leaves(shapes) if leaf.shape}
        may_split = len(rows) == 1 and (number > 1 or self._has_weight)
        numbers = [n for n in range(number, max(rows) + 1) if max(rows) % n == 0] if may_split else [number]
        self._programs, self._reports = {}, {}  # frees the old executable
        try:
            new = self._planner(shapes, budget, numbers)
        except Exception as failure:
            if not (isinstance(failure, OutOfMemoryError) or is_out_of_memory(failure)):
                raise
            error.add_note(f"the step was planned again, but {failure}")
            return False
        if new is None:  # without a stack, there is nothing to recompute
            return False
        self._use_plan(new)
        self._plans = {self._key(shapes): new}
        warnings.warn(
            f"the device ran out of memory, so the step was planned again for {format_bytes(budget)}: {new.choice}\n"
            "hint: leave more memory free next time: a smaller budget",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
        return True

    @property
    def step_fn(self) -> Callable[..., tuple[Tree, Tree, Tree, Any, Tree]]:
        return self._jitted([self._step, *(trial.step for trial in self._programs.values())][-1])

    def _jitted(self, step: TrainingStep) -> Any:
        places = None
        if self._sharding is not None:
            state = self._arguments(None)[: len(DONATED)]
            # On an abstract mesh, the program runs on the devices of its arguments. `memory` may move them to a target.
            places = *jax.tree.map(lambda leaf: abstract(leaf.sharding), state), abstract(self._sharding.replicated())
        fn = flat_step(step)
        if self._plan is not None and self._plan.has_stack:
            fn = planned(fn, self._plan.hidden)
        return jax.jit(fn, donate_argnums=DONATED, keep_unused=True, out_shardings=places)

    def memory(self, batch: Tree, target: Target | str | None) -> MemoryReport:
        shapes = self._shapes(batch)
        if target is None:
            report = self._report(self.compile(shapes))
            if isinstance(step := self._step_for(shapes), PipelineStep):
                self.stages = step.report(combine(*self._store.parts), shapes, report)
            return report

        def analyze_trial(step: TrainingStep) -> _Trial:
            report = analyze(self._jitted(step), *self._arguments(shapes), target=target, roles=_ROLES)
            return _Trial(step, None, report, self._free_bytes(report))

        chosen_report = self._choose(analyze_trial, shapes).report
        assert chosen_report is not None
        return chosen_report

    def preflight(self, batch: Tree) -> MemoryReport:
        report = self.memory(batch, None)
        self._refuse_large(report, batch)
        return report

    def _choose(self, build: Callable[[TrainingStep], _Trial], shapes: Tree) -> _Trial:
        """Build the step; if its schedule may change, choose the schedule that fits the memory left on the device."""
        self._plan_first(shapes)
        if self._reschedulable is None:
            return build(self._step)
        arrays = jax.tree.map(to_struct, combine(*self._store.parts))
        return _choose_schedule(self._reschedulable, build, arrays, shapes)

    def _free_bytes(self, report: MemoryReport) -> int | None:
        """Return the bytes that a step leaves free on a device; negative if it is too large, None if unknown."""
        usable = report.target.budget_bytes if self.budget_bytes is None else self.budget_bytes
        return None if usable is None else usable - report.device_bytes

    def shortage(self, batch: Tree, when: str) -> OutOfMemoryError:
        batch = self._shapes(batch)
        program = compile(self._jitted(self._step_for(batch)), *self._arguments(batch))
        return shortage(program, when=when, roles=_ROLES, budget_bytes=self.budget_bytes, hint=self._hint)

    @contextlib.contextmanager
    def dispatch(self, batch: Tree) -> Generator[Tree]:
        """Dispatch a step, and yield its metrics on the device; signals are delayed until the ``with`` block ends."""
        self._store.refuse_averaged("a step")
        self._store.borrow()
        on_device = self.place(batch)
        program = self.compile(on_device)
        self._refuse_large(self._report(program), batch)
        # No interrupt between the call and `set`: the call donates the old state, so the new one must not be lost.
        with delay_signals():
            trainable, opt_state, mutable, step, metrics = called(program, *self._arguments(on_device))
            self._store.set(TrainState(step, trainable, opt_state, mutable))
            del trainable, opt_state, mutable, step  # the traceback of an interrupt must not keep the state alive
            yield metrics
        self._processes.wait_on_cpu(metrics)

    def place(self, batch: Tree, *, is_training: bool = True) -> Tree:
        if self._sharding is None:
            return as_arguments(batch)
        self._processes.agree_on_batch(batch := jax.tree.map(as_numpy, batch))
        return self._sharding.batch(batch, self._num_microbatches if is_training else None)

    def compile(self, batch: Tree) -> Any:
        """Return the program for batches of this shape; when it is new, check that it reuses every donated buffer."""
        key = self._key(batch)
        if key not in self._programs:
            trial = self._choose(lambda step: self._compile_trial(step, batch), batch)
            if isinstance(trial.program, Exception):
                raise trial.program
            if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
                warnings.warn(
                    "jax_debug_nans is on, so JAX donates no buffers: each step holds its state twice\n"
                    "hint: JAX stops at a step with NaN, but cannot locate it there: call the loss function alone to "
                    "find it",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
            else:
                check_donation(trial.program, arg_names=STEP_ARGUMENTS)
            self._programs[key] = trial
            if trial.report is not None:
                self._reports[id(trial.program)] = trial.report
        return self._programs[key].program

    def _compile_trial(self, step: TrainingStep, batch: Tree) -> _Trial:
        """Compile a step for this hardware; add a memory report if the schedule may change."""
        with warnings.catch_warnings():
            # JAX only warns about buffers that it cannot reuse, without a path. `check_donation` raises, with a path.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            lowered = self._jitted(step).lower(*self._arguments(batch))
            self._processes.agree_on_program(lowered)
            try:
                program: Any = lowered.compile(
                    compiler_options=options_of(lowered, False, resolve_target(None)) or None
                )
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                program = error
        if self._reschedulable is None:
            return _Trial(step, program, None, None)
        if isinstance(program, Exception):  # a TPU compiler reports memory even when the program does not fit
            report = analyze(self._jitted(step), *self._arguments(batch), roles=_ROLES)
        else:
            report = analyze_compiled(program, roles=_ROLES)
        # Devices of other processes may have less memory left; all processes choose by the smallest number.
        return _Trial(step, program, report, self._processes.min_over_processes(self._free_bytes(report)))

    def _step_for(self, shapes: Tree) -> TrainingStep:
        key = self._key(shapes)
        return self._programs[key].step if key in self._programs else self._step

    def _key(self, batch: Tree) -> Any:
        """Return the cache key of a program: the shapes of the batch, and the budget if the schedule may change."""
        leaves, structure = jax.tree.flatten(batch)
        budget = None if self._reschedulable is None else self.budget_bytes
        return structure, budget, *[(leaf.shape, leaf.dtype, multi_device_sharding(leaf)) for leaf in leaves]

    def _shapes(self, batch: Tree) -> Tree:
        """Return the shapes and shardings that a batch will have on the device."""
        if self._sharding is None:
            return argument_shapes(batch)
        self._processes.agree_on_batch(batch := numbers(batch))
        return self._sharding.batch_shapes(batch, self._num_microbatches)

    def _arguments(self, batch: Tree) -> tuple[Tree, Tree, Tree, Any, Tree, Tree]:
        state = self._store.state
        return state.trainable, state.opt_state, state.mutable, state.step, self._store.frozen, batch

    def _report(self, compiled: Any) -> MemoryReport:
        if id(compiled) not in self._reports:
            self._reports[id(compiled)] = analyze_compiled(compiled, roles=_ROLES)
        return self._reports[id(compiled)]

    def _refuse_large(self, report: MemoryReport, batch: Tree) -> None:
        if (self._free_bytes(report) or 0) < 0:
            raise self.shortage(batch, "before its first step")


def _missing_bytes(error: BaseException) -> int:
    """Return the bytes that an allocation lacked: those of the message, less the free bytes of the device."""
    # GPUs write "allocate 2.50GiB", CPUs "allocating 1024 bytes", TPUs "allocate 1.50G".
    match = re.search(r"allocat\w* ([\d.]+)\s?([KMGT]?)", str(error))
    stats = jax.local_devices()[0].memory_stats() or {}
    requested = int(float(match[1].rstrip(".")) * 1024 ** " KMGT".index(match[2] or " ")) if match else 0
    return max(requested - (stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)), 0)


def to_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


# --- the schedule for the memory left on the device ------------------------------------------------------------------
# An ``"auto"`` schedule without given costs or limit may keep more or less memory between passes than by default. Only
# the compiled step shows how much memory is left. So the step is compiled, a new schedule is made for the memory left,
# and the step with that schedule is compiled again.


class _Trial(NamedTuple):
    """A step that was compiled with one schedule, and its memory."""

    step: TrainingStep
    program: Any
    """The compiled program, the error of a step that does not fit, or None if only the memory was analysed."""
    report: MemoryReport | None
    """Memory report of the program; None if it was not requested."""
    free_bytes: int | None
    """Bytes left on a device, equal in all processes of a run; negative if the step is too large, None if unknown."""


def _choose_schedule(step: PipelineStep, build: Callable[[PipelineStep], _Trial], arrays: Tree, batch: Tree) -> _Trial:
    """Return a trial of the step, or of the step with another schedule that fits the device's memory better.

    If `step` does not fit, the new schedule keeps fewer bytes between passes; if no trial fits, the smallest trial is
    returned. If memory is left, the new schedule takes less time.
    """
    best = default = build(step)
    if default.free_bytes is None:
        return default
    default_report = step.report(arrays, batch, None)
    if default.free_bytes >= 0:
        larger = _reschedule(default, default.free_bytes, arrays, batch)
        if larger is None or larger[1].time_over_ideal > _MAX_TIME_SHARE * default_report.time_over_ideal:
            return default
        return default if ((trial := build(larger[0])).free_bytes or 0) < 0 else trial
    for _ in range(_MAX_ATTEMPTS):
        # If no schedule saves all missing bytes, one that saves a part may still fit, because running passes need less
        # memory, too.
        options = (_reschedule(best, int(part * (best.free_bytes or 0)), arrays, batch) for part in (1, 0.5, 0.25))
        smaller = next((option for option in options if option is not None), None)
        if smaller is None or ((trial := build(smaller[0])).free_bytes or 0) <= (best.free_bytes or 0):
            break
        best = trial
        if (best.free_bytes or 0) >= 0:
            _warn_slower(default_report, smaller[1])
            break
    return best


def _reschedule(trial: _Trial, extra_bytes: int, arrays: Tree, batch: Tree) -> tuple[PipelineStep, StageReport] | None:
    """Return a step that keeps at most `extra_bytes` more between passes than the step of `trial`, and its report.

    `extra_bytes` may be negative. Return None if no such schedule exists.
    """
    assert isinstance(trial.step, PipelineStep)
    counted, compiled = (trial.step.report(arrays, batch, memory).waiting_bytes for memory in (None, trial.report))
    # A schedule counts arrays as whole even where the compiler shards them, so the limit is scaled to that count.
    limit = int((compiled + extra_bytes) * counted / compiled) if compiled else 0
    if limit < 1:
        return None
    limited_step = trial.step.within(limit)
    try:
        return limited_step, limited_step.report(arrays, batch, None)
    except ScheduleError:
        return None


def _warn_slower(before: StageReport, after: StageReport) -> None:
    """Warn if the schedule that saves memory takes longer."""
    if after.time_over_ideal > before.time_over_ideal / _MAX_TIME_SHARE:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has too little memory: it takes "
            f"{after.time_over_ideal:.2f} times the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: use smaller microbatches, more stages, remat=True or inputs='host' of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )


# --- steps compiled from shapes: the trainer's, and a naive one ------------------------------------------------------
# The naive step differentiates and optimises the whole model, with frozen weights behind `jax.lax.stop_gradient`. It is
# a baseline for comparison, and never runs.


def step_job(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Selector,
    batch: Tree,
    *,
    num_microbatches: int = 1,
    weight: Callable[[Tree], Any] | None = None,
    compute_dtype: Any = None,
    drops_updates: bool = False,
) -> Job:
    """Return a `lowtide.memory.Job` for the step that `Trainer` would run, with shapes instead of arrays.

    Args:
        model: the model, or its shapes (`jax.eval_shape` of its constructor).
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``.
        tx: the optimizer.
        wrt: selects the trainable leaves.
        batch: a batch, or shapes of one.
        num_microbatches: number of parts of the batch, as in `Trainer`.
        weight: function of a batch that returns its weight, as in `Trainer`.
        compute_dtype: dtype in which `loss_fn` computes, as in `Trainer`.
        drops_updates: whether the step drops its update when loss or gradients are not finite, as `Trainer` does by
            default. It costs a few bytes, and optimizer state on the host does not allow it.

    Returns:
        The job, with one role (the name of an argument in a memory report) for each argument of the step:
        ``trainable``, ``optimizer``, ``mutable``, ``step``, ``frozen`` and ``batch``.

    Raises:
        SelectionError: when `wrt` selects nothing, or a leaf that cannot be differentiated.
    """
    step = WholeStep(model, loss_fn, tx, wrt, num_microbatches, weight, compute_dtype=compute_dtype)
    step.guard(drops_updates)
    trainable, mutable, frozen = step.split(jax.tree.map(_placed_shape, split_static(model)[0]))
    opt_state = _state_shapes(tx, trainable)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return Job(
        fn=flat_step(step),
        args=(trainable, opt_state, mutable, count, frozen, jax.tree.map(_shape, batch)),
        roles={**_ROLES},
        donate_argnums=DONATED,
    )


def analyze_step(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Selector,
    batch: Tree,
    *,
    target: Target | str | None = None,
    **options: Any,
) -> MemoryReport:
    """Compile the step that `Trainer` would run, and report its bytes.

    Args:
        model: as in `step_job`.
        loss_fn: as in `step_job`.
        tx: as in `step_job`.
        wrt: as in `step_job`.
        batch: as in `step_job`.
        target: the hardware to compile for; None for the hardware at hand.
        **options: ``num_microbatches``, ``weight`` and ``compute_dtype``, as in `step_job`.

    Returns:
        The report, with the roles of `step_job`.

    Raises:
        Exception: any exception of `step_job` or `lowtide.memory.analyze`.

    Memory:
        None on the target: arrays are replaced by their shapes.
    """
    return step_job(model, loss_fn, tx, wrt, batch, **options).analyze(target)


def analyze_naive(
    model: Tree,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    wrt: Selector,
    batch: Tree,
    *,
    num_microbatches: int = 1,
    weight: Callable[[Tree], Any] | None = None,
    target: Target | str | None = None,
) -> MemoryReport:
    """Compile a naive training step, which differentiates and optimises the whole model, and report its bytes.

    Args:
        model: the model, or its shapes.
        loss_fn: ``loss_fn(model, batch) -> (loss, metrics)``.
        tx: the optimizer.
        wrt: selects the trainable leaves; all others are put behind `jax.lax.stop_gradient`.
        batch: a batch, or shapes of one.
        num_microbatches: number of parts of the batch, as in `Trainer`.
        weight: function of a batch that returns its weight, as in `Trainer`.
        target: the hardware to compile for; None for the hardware at hand.

    Returns:
        The report, with the roles ``trainable``, ``optimizer``, ``frozen`` and ``batch``.

    Raises:
        SelectionError: when `wrt` selects nothing.
        Exception: any exception of `lowtide.memory.analyze`.
    """
    arrays, static = split_static(model)
    trainable, frozen = partition(jax.tree.map(_shape, arrays), wrt)
    opt_state = _state_shapes(tx, combine(trainable, frozen))

    def step(trainable: Tree, opt_state: Tree, frozen: Tree, batch: Tree) -> tuple[Any, ...]:
        def loss(halves: tuple[Tree, Tree], batch: Tree) -> Any:
            full_model = combine(halves[0], jax.tree.map(jax.lax.stop_gradient, halves[1]), static)
            return parse_loss(loss_fn(full_model, batch), halves, has_mutable=False)[:2]

        grad_fn = accumulate(jax.value_and_grad(loss, has_aux=True), num_microbatches, weight=weight, has_aux=True)
        (value, _), grads = grad_fn((trainable, frozen), batch)
        params, full_grads = combine(trainable, frozen), combine(*grads)
        updates, opt_state = tx.update(full_grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    arguments = (trainable, opt_state, frozen, jax.tree.map(_shape, batch))
    roles = {"trainable": 0, "optimizer": 1, "frozen": 2, "batch": 3}
    return analyze(step, *arguments, target=target, roles=roles, donate_argnums=(0, 1, 2))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=multi_device_sharding(leaf))


def _placed_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf, with its sharding if it is in host memory or on several devices."""
    return to_struct(leaf) if memory_space(leaf) == jax.memory.Space.Host else _shape(leaf)


def _state_shapes(tx: optax.GradientTransformation, params: Tree) -> Tree:
    """Return the shapes of an optimizer's state; leaves that `lowtide.offload.optimizer` moves are in host memory."""
    shapes = jax.eval_shape(tx.init, params)
    default_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default_sharding), params
    )
    places = state_shardings(tx, placed)
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, places)
