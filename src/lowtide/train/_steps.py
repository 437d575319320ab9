"""Which step a trainer repeats, of what it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import ConfigError, ModelObject, Tree, Where
from ..distributed import ShardingRules
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule
from ._checks import Defaults, refuse_beside_layerwise
from ._pipelined import PipelineStep, make_pipeline
from ._precision import refuse_precision
from ._step import LayerStep, LossFn, WholeStep


class Chosen(NamedTuple):
    """A step, and what follows from it."""

    step: WholeStep | LayerStep
    weight: Callable[[Tree], Any] | None
    sharding: ShardingRules | None
    num_microbatches: int
    """Parts of a batch."""


def choose_step(
    model: Tree,
    loss_fn: LossFn | None,
    tx: Any,
    *,
    wrt: Where | None,
    mutable: Where | None,
    num_microbatches: int,
    weight: Callable[[Tree], Any] | None,
    compute_dtype: Any,
    seed: int,
    sharding: ShardingRules | None,
    pipeline: Schedule | Pipeline | None,
) -> Chosen:
    """The step; arguments and errors as of `Trainer`."""
    if pipeline is not None:
        _refuse_beside_pipeline(model, loss_fn, tx, mutable, num_microbatches, compute_dtype, seed)
        made, sharding = make_pipeline(model, pipeline, sharding, wrt=wrt, weight=weight)
        return Chosen(PipelineStep(model, tx, made, sharding), made.weight, sharding, made.schedule.num_microbatches)
    given: Any = loss_fn
    if isinstance(tx, LayerwiseStep):
        refuse_precision(compute_dtype)
        refuse_beside_layerwise(
            wrt=(wrt, None), mutable=(mutable, None), num_microbatches=(num_microbatches, 1), seed=(seed, 0)
        )
        if tx.weight is None:
            tx = dataclasses.replace(tx, weight=weight)
        elif weight not in (None, tx.weight):
            refuse_beside_layerwise(weight=(weight, None))
        return Chosen(LayerStep(model, given, tx), tx.weight, sharding, 1)
    defaults: Any = model if isinstance(model, ModelObject) else Defaults()
    selected = defaults.wrt if wrt is None else wrt
    changes = defaults.mutable if mutable is None else mutable
    arguments = (model, given, tx, selected, num_microbatches, weight)
    step = WholeStep(*arguments, mutable=changes, seed=seed, compute_dtype=compute_dtype)
    if sharding is not None:
        # The devices are those of the arguments, which may be moved to another target to be compiled for it.
        mesh: Any = sharding.mesh.abstract_mesh
        constrain = dataclasses.replace(sharding, mesh=mesh).constrain
        step.divide = constrain
        step.constrain = constrain if num_microbatches > 1 else step.constrain
    return Chosen(step, weight, sharding, num_microbatches)


def _refuse_beside_pipeline(
    model: Any, loss_fn: Any, tx: Any, mutable: Any, num_microbatches: int, compute_dtype: Any, seed: int
) -> None:
    given = {
        "a bridge": (isinstance(model, ModelObject), "a pytree of outer and layers", "pass the arrays as a pytree"),
        "a layerwise step": (isinstance(tx, LayerwiseStep), "an optimizer of Optax", "optax.adamw(1e-4)"),
        "loss_fn": (loss_fn is not None, "None: its loss is the stack's", "Trainer(model, None, tx, pipeline=...)"),
        "mutable": (mutable is not None, "functions of the stack that change no weights", "leave it out"),
        "num_microbatches": (num_microbatches != 1, "the schedule's own", "schedule(..., num_microbatches=...)"),
        "compute_dtype": (compute_dtype is not None, "a stack that casts by itself", "load(..., compute_dtype=...)"),
        "seed": (seed != 0, "random keys as leaves of batches", 'a batch {"key": jax.random.key(step), ...}'),
    }
    for name, (is_given, expected, hint) in given.items():
        if is_given:
            raise ConfigError(f"a pipeline is trained without {name}", expected=expected, got=name, hint=hint)
