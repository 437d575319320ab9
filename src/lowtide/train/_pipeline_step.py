"""A training step whose gradients come from a pipeline, and the choice of its schedule for the memory left.

The state holds layers in the order of ranks (`Pipeline.arrange`), so that no step moves weights between devices. The
model that the user sees has its own order. Apart from the gradients, the step is a `WholeStep`.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import (
    ConfigError,
    LayerStack,
    ScheduleError,
    Selector,
    StructureError,
    Tree,
    format_bytes,
    leaves_with_paths,
    num_layers,
    on_host,
    put,
    refuse_shared,
    split_static,
)
from ..distributed import STAGE, ShardingRules, make_mesh
from ..memory import MemoryReport
from ..pipeline import Pipeline, Schedule, StageReport, value_and_grad
from ._step import (
    Gradients,
    TrainingStep,
    TrainState,
    WholeStep,
    accepted_keywords,
    outer_and_layers,
    parse_loss,
    with_outer_and_layers,
)

_FEATURE = "a pipeline"
_MAX_ATTEMPTS = 3
"""Number of attempts with less memory: each program needs a different amount while a pass runs."""
_MAX_TIME_SHARE = 0.99
"""A schedule that needs more memory must take less than this share of the time: another compilation takes minutes."""


class PipelineStep:
    """A step that computes gradients in a pipeline, and then updates; `pipeline` takes arranged layers."""

    remedies = (
        "a schedule of more microbatches, or of one that keeps less (v-half, v-min); "
        "remat=True or inputs='host' of lt.pipeline.value_and_grad, lt.offload.optimizer(tx), or a larger budget"
    )

    def __init__(
        self, model: Tree, tx: optax.GradientTransformation, pipeline: Pipeline, sharding: ShardingRules
    ) -> None:
        layers = outer_and_layers(model, _FEATURE)[1]
        extra = [path for path, _ in leaves_with_paths(with_outer_and_layers(split_static(model)[0], None, None))]
        if extra:
            hint = "put it under outer, which the first and the last function of the stack receive"
            raise StructureError(f"{', '.join(extra[:4])}: no part of the pipeline reads it", hint=hint)
        # With an abstract mesh, the program runs on the devices of its arguments, and compiles for any target.
        self._pipeline = dataclasses.replace(pipeline, mesh=pipeline.mesh.abstract_mesh)
        self._concrete, self._sharding = pipeline, sharding
        self._num_layers = num_layers(layers)
        plan = pipeline.layout(self._num_layers)
        self._rows = plan.rows()
        is_layer = np.isin(np.arange(plan.num_rows), plan.positions())
        self.arrangement: list[int] | None = np.where(is_layer, self._rows, -1).tolist()
        """Layer of every row of the state, -1 for padding; None for the order of the model."""
        if self.arrangement == list(range(self._num_layers)):
            self.arrangement = None
        arguments = (model, self._evaluate, tx, pipeline.wrt, 1, pipeline.weight)
        self._whole = WholeStep(*arguments, gradients=self._gradients)

    @property
    def can_reschedule(self) -> bool:
        """Whether another schedule may be made for the memory left on the device."""
        remake = self._concrete.schedule.remake
        return remake is not None and remake.memory_limit is None and self._concrete.memory_limit is None

    def within(self, memory_limit: int) -> PipelineStep:
        """Return the step with another limit of the bytes that wait on each device; state and layers stay the same."""
        step = copy.copy(self)
        step._pipeline, step._concrete = self._pipeline.within(memory_limit), self._concrete.within(memory_limit)
        step._whole = self._whole.with_gradients(step._gradients)
        return step

    def init(self, model: Tree) -> tuple[TrainState, Tree]:
        """Return the initial state of a model that is arranged and on the mesh; see `TrainingStep`."""
        for path, leaf in leaves_with_paths(split_static(outer_and_layers(model, _FEATURE)[1])[0]):
            first_axis, *_ = (*getattr(leaf.sharding, "spec", ()), None)
            if first_axis not in (STAGE, (STAGE,)):
                problem = f"layers/{path} must be sharded along {STAGE!r} first, not as {leaf.sharding.spec}"
                raise ConfigError(problem, hint="change the rule for it in ShardingRules")
        return self._whole.init(model)

    def guard(self, is_guarded: bool) -> None:
        self._whole.guard(is_guarded)

    def split(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        return self._whole.split(model)

    def arranged(self, model: Tree) -> Tree:
        """Arrange a model and put its layers on the mesh; see `TrainingStep`."""
        refuse_shared(self.split(model)[0])  # arranging makes two arrays of one that is at two paths
        outer, layers = outer_and_layers(model, _FEATURE)
        if num_layers(layers) != self._num_layers:
            raise StructureError(f"the model has {num_layers(layers)} layers, but the pipeline has {self._num_layers}")

        def arrange_leaf(path: str, leaf: Any) -> Any:
            if not hasattr(leaf, "dtype"):
                return leaf
            if on_host(getattr(leaf, "sharding", None)):
                problem = f"layers/{path} is in host memory, but a pipeline needs its layers on the device"
                hint = "lt.offload.to_device, or more ranks; lt.offload.layerwise_step streams layers from the host"
                raise ConfigError(problem, hint=hint)
            # Rules apply to rows: with uneven stages the ranks shard rows, which include padding, and not layers.
            shape = (len(self._rows), *leaf.shape[1:])
            struct = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            other_axes = self._sharding.of(f"layers/{path}", struct).spec[1:]
            rows = leaf if self.arrangement is None else leaf[self._rows]
            return put(rows, NamedSharding(self._sharding.mesh, PartitionSpec(STAGE, *other_axes)))

        rows = [arrange_leaf(path, leaf) for path, leaf in leaves_with_paths(layers)]
        return with_outer_and_layers(model, outer, jax.tree.unflatten(jax.tree.structure(layers), rows))

    def __call__(self, state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        return self._whole(state, frozen, batch)

    def loss(self, arrays: Tree, batch: Tree, *, key: Any, training: bool) -> tuple[Any, dict[str, Any], Tree]:
        return self._whole.loss(arrays, batch, key=key, training=training)

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        kwargs = accepted_keywords(fn, training=False)
        return self._whole.bind(lambda model, *args: fn(self._in_model_order(model), *args, **kwargs))

    def model(self, *parts: Tree) -> Tree:
        return self._in_model_order(self._whole.model(*parts))

    def report(self, arrays: Tree, batch: Tree, memory: MemoryReport | None) -> StageReport:
        """Return a report on what each rank holds; `memory` is the report of the compiled step, or None."""
        return self._concrete.report(*outer_and_layers(arrays, _FEATURE), batch, memory=memory)

    def _gradients(self, state: TrainState, frozen: Tree, batch: Tree) -> Gradients:
        model = self._whole.model(state.trainable, state.mutable, frozen)
        (loss, metrics), grads = self._pipeline(*outer_and_layers(model, _FEATURE), batch)
        loss, metrics, _ = parse_loss((loss, metrics), None, has_mutable=False)
        return loss, metrics, state.mutable, with_outer_and_layers(state.trainable, *grads)

    def _in_model_order(self, model: Tree) -> Tree:
        if self.arrangement is None:
            return model
        outer, layers = outer_and_layers(model, _FEATURE)
        return with_outer_and_layers(model, outer, self._concrete.restore(layers, self._num_layers))

    def _evaluate(self, model: Tree, batch: Tree) -> tuple[Any, Tree]:
        return self._pipeline.evaluate(*outer_and_layers(model, _FEATURE), batch)


def make_pipeline(
    model: Tree,
    pipeline: Schedule | Pipeline,
    sharding: ShardingRules | None,
    *,
    wrt: Selector | None,
    weight: Callable[[Tree], Any] | None,
) -> tuple[Pipeline, ShardingRules]:
    """Return the pipeline of a trainer, and the sharding rules of its arrays; the arguments are those of `Trainer`."""
    if sharding is not None and STAGE in sharding.batch_axes:
        raise ConfigError(f"batch_axes must not include {STAGE!r}, because every stage needs all rows")
    if isinstance(pipeline, Schedule):
        stack = getattr(model, "stack", None)
        if not isinstance(stack, LayerStack):
            problem = f"a schedule needs a model with a stack, such as lt.models.Decoder, not a {type(model).__name__}"
            raise StructureError(problem, hint="pipeline=lt.pipeline.value_and_grad(stack, schedule, mesh=mesh)")
        count, ranks = jax.device_count(), pipeline.num_ranks
        if sharding is None and count % ranks:
            hint = f"sharding=ShardingRules(mesh=make_mesh(stage={ranks}, devices=...)), or another number of stages"
            raise ConfigError(f"{count} devices cannot be divided evenly among {ranks} ranks", hint=hint)
        sharding = sharding or ShardingRules(mesh=make_mesh(stage=ranks))  # FSDP over the devices that the ranks leave
        if STAGE not in sharding.mesh.shape:
            hint = f"make_mesh(stage={ranks})"
            raise ConfigError(f"the mesh has no axis {STAGE!r} for the ranks", hint=hint)
        wrt = "**" if wrt is None else wrt
        resolved = value_and_grad(stack, pipeline, mesh=sharding.mesh, axis=STAGE, wrt=wrt, weight=weight)
    else:
        if pipeline.axis != STAGE:
            raise ConfigError(f"the mesh axis of a trainer's pipeline must be named {STAGE!r}, not {pipeline.axis!r}")
        sharding = sharding or ShardingRules(mesh=pipeline.mesh, batch_axes=pipeline.batch_axes)
        resolved = pipeline
        for name, default, value in (("wrt", "**", wrt), ("weight", None, weight)):
            pipeline_value = getattr(pipeline, name)
            if value is not None and pipeline_value not in (value, default):
                problem = f"{name} is set twice: {pipeline_value!r} for the pipeline, {value!r} for the trainer"
                raise ConfigError(problem)
            if value is not None:
                resolved = dataclasses.replace(resolved, **{name: value})
        pairs = {
            "mesh": (pipeline.mesh, sharding.mesh),
            "batch_axes": (sorted({*pipeline.batch_axes}), sorted({*sharding.batch_axes})),
        }
        for name, (expected, got) in pairs.items():
            if expected != got:
                hint = f"pass the same {name} to both, or leave sharding out"
                raise ConfigError(f"sharding has the {name} {got}, but the pipeline has {expected}", hint=hint)
    # Once layers are arranged, the pipeline needs the sizes of uneven stages in advance.
    plan = resolved.layout(num_layers(outer_and_layers(model, _FEATURE)[1]))
    resolved = dataclasses.replace(
        resolved, arranged=True, layers_per_stage=plan.layers_per_stage, batch_axes=tuple(sharding.batch_axes)
    )
    return resolved, sharding


# --- the schedule for the memory left on the device ------------------------------------------------------------------
# An ``"auto"`` schedule without given costs or limit may keep more or less memory between passes than by default. Only
# the compiled step shows how much memory is left. So the step is compiled, a new schedule is made for the memory left,
# and the step with that schedule is compiled again.


class Trial(NamedTuple):
    """A compiled step."""

    step: TrainingStep
    program: Any
    """The result of the compilation: the compiled program, or the error of a step that does not fit."""
    report: MemoryReport | None
    """Memory report of the program; None where it was not requested."""
    free_bytes: int | None
    """Bytes left on a device, negative where the step is too large, None where unknown. The same in all processes of a
    run."""


def choose_schedule(step: PipelineStep, build: Callable[[PipelineStep], Trial], arrays: Tree, batch: Tree) -> Trial:
    """Return a trial of the step itself, or of one with another schedule that fits the device's memory better.

    If `step` does not fit, the other one keeps less between passes (the smallest one, if several do not fit). If memory
    is left, the other one ends sooner.
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
        # If a schedule cannot save all missing bytes, it may save a part: the memory that running passes need shrinks,
        # too.
        options = (_reschedule(best, int(part * (best.free_bytes or 0)), arrays, batch) for part in (1, 0.5, 0.25))
        smaller = next((option for option in options if option is not None), None)
        if smaller is None or ((trial := build(smaller[0])).free_bytes or 0) <= (best.free_bytes or 0):
            break
        best = trial
        if (best.free_bytes or 0) >= 0:
            _warn_slower(default_report, smaller[1])
            break
    return best


def _reschedule(trial: Trial, extra_bytes: int, arrays: Tree, batch: Tree) -> tuple[PipelineStep, StageReport] | None:
    """Return a step that keeps at most `extra_bytes` more between passes (fewer where it is negative), or None."""
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
    """Warn about a step that saves memory and takes longer."""
    if after.time_over_ideal > before.time_over_ideal / _MAX_TIME_SHARE:
        warnings.warn(
            f"the pipeline keeps {format_bytes(after.waiting_bytes)} between passes instead of "
            f"{format_bytes(before.waiting_bytes)}, for which the device has too little memory: it takes "
            f"{after.time_over_ideal:.2f} times the ideal time instead of {before.time_over_ideal:.2f}\n"
            "hint: use smaller microbatches, more stages, remat=True or inputs='host' of lt.pipeline.value_and_grad",
            UserWarning,
            stacklevel=2,
        )
