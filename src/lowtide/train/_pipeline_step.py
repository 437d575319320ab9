"""A training step whose gradients come from a pipeline.

The state holds the stacked layers in the order of ranks (`Pipeline.arrange`), so that no step moves weights between
devices. Each index of the stack is a row: a layer, or padding of an uneven stage. `Trainer.model` has the layers in the
order of the model. Apart from the gradients, the step is a `WholeStep`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import (
    ConfigError,
    LayerStack,
    Selector,
    StructureError,
    Tree,
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
    TrainState,
    WholeStep,
    accepted_keywords,
    outer_and_layers,
    parse_loss,
    with_outer_and_layers,
)

_FEATURE = "a pipeline"


class PipelineStep:
    """A step that computes gradients in a pipeline, and then updates weights; `pipeline` has ``arranged=True``."""

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
        """Index of the layer in each row of the state, -1 for padding; None for the order of the model."""
        if self.arrangement == list(range(self._num_layers)):
            self.arrangement = None
        loss_fn = partial(_evaluate, self._pipeline)
        self._whole = WholeStep(model, loss_fn, tx, pipeline.wrt, 1, pipeline.weight)

    @property
    def can_reschedule(self) -> bool:
        """Whether another schedule may be made for the memory left on the device."""
        remake = self._concrete.schedule.remake
        return remake is not None and remake.memory_limit is None and self._concrete.memory_limit is None

    def within(self, memory_limit: int) -> PipelineStep:
        """Return the step with a limit on the bytes kept between passes; state and layer order do not change."""
        step = copy.copy(self)
        step._pipeline, step._concrete = self._pipeline.within(memory_limit), self._concrete.within(memory_limit)
        return step

    def init(self, model: Tree) -> tuple[TrainState, Tree]:
        """Return the initial state and frozen leaves of a model that `arranged` returned; see `TrainingStep`."""
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
        """Bring the layers into the order of ranks and put them on the mesh; see `TrainingStep`."""
        refuse_shared(self.split(model)[0])  # arranging would make two arrays of a shared one
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
            # Rules apply to rows, not to layers: with uneven stages, the sharded axis includes padding.
            shape = (len(self._rows), *leaf.shape[1:])
            struct = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            other_axes = self._sharding.of(f"layers/{path}", struct).spec[1:]
            rows = leaf if self.arrangement is None else leaf[self._rows]
            return put(rows, NamedSharding(self._sharding.mesh, PartitionSpec(STAGE, *other_axes)))

        rows = [arrange_leaf(path, leaf) for path, leaf in leaves_with_paths(layers)]
        return with_outer_and_layers(model, outer, jax.tree.unflatten(jax.tree.structure(layers), rows))

    def __call__(self, state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        return self._whole.apply_gradients(state, self._gradients(state, frozen, batch))

    def loss(self, arrays: Tree, batch: Tree, *, key: Any, training: bool) -> tuple[Any, dict[str, Any], Tree]:
        return self._whole.loss(arrays, batch, key=key, training=training)

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        kwargs = accepted_keywords(fn, training=False)
        return self._whole.bind(lambda model, *args: fn(self._in_model_order(model), *args, **kwargs))

    def model(self, *parts: Tree) -> Tree:
        return self._in_model_order(self._whole.model(*parts))

    def report(self, arrays: Tree, batch: Tree, memory: MemoryReport | None) -> StageReport:
        """Return a report on the memory of each rank; `memory` is the report of the compiled step, or None."""
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


def _evaluate(pipeline: Pipeline, model: Tree, batch: Tree) -> tuple[Any, Tree]:
    return pipeline.evaluate(*outer_and_layers(model, _FEATURE), batch)


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
        sharding = sharding or ShardingRules(mesh=make_mesh(stage=ranks))  # FSDP over the remaining devices
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
