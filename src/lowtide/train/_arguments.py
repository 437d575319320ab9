"""Arguments of a trainer: the choice of its training step, and validation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

from ..core import (
    ConfigError,
    ModelObject,
    Tree,
    Where,
    check_choice,
    check_count,
    is_array_like,
    is_count,
    leaves_with_paths,
    on_host,
    refuse_consumed,
    refuse_shared,
)
from ..distributed import ShardingRules, placed
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule
from ._data import IN_ORDER
from ._models import Pytree, accepted_keywords
from ._pipelined import PipelineStep, make_pipeline
from ._precision import refuse_precision
from ._step import LayerStep, LossFn, TrainingStep, TrainState, WholeStep

P = ParamSpec("P")
R = TypeVar("R")


class SelectedStep(NamedTuple):
    """A training step, and the settings that follow from it."""

    step: TrainingStep
    weight: Callable[[Tree], Any] | None
    sharding: ShardingRules | None
    num_microbatches: int

    def initialize(self, model: Any, on_nan: str) -> tuple[Any, TrainState, Tree, bool]:
        """Return the placed model, its state, the frozen leaves, and whether steps drop non-finite updates."""
        refuse_consumed(model)
        if self.sharding is not None:
            model = placed(model, self.sharding, self.step.arranged)
        state, frozen = self.step.init(model)
        is_guarded = _can_drop_update(on_nan, state, is_layerwise=isinstance(self.step, LayerStep))
        self.step.guard(is_guarded)
        refuse_shared(state.trainable, state.mutable)
        return model, state, frozen, is_guarded


def choose_step(
    model: Tree,
    loss_fn: LossFn | None,
    tx: Any,
    wrt: Where | None,
    mutable: Where | None,
    num_microbatches: int,
    weight: Callable[[Tree], Any] | None,
    compute_dtype: Any,
    seed: int,
    sharding: ShardingRules | None,
    pipeline: Schedule | Pipeline | None,
) -> SelectedStep:
    """Choose the training step; arguments and errors as in `Trainer`."""
    if weight is not None and not callable(weight):
        raise ConfigError(
            "weight is not a function",
            expected="a function weight(batch) that returns a number",
            got=repr(weight)[:80],
            hint='lambda batch: jnp.sum(batch["mask"])',
        )
    _check_arguments(model, tx, loss_fn, sharding, num_microbatches, seed, pipeline)
    if pipeline is not None:
        _check_pipeline_arguments(model, loss_fn, tx, mutable, num_microbatches, compute_dtype, seed)
        resolved_pipeline, sharding = make_pipeline(model, pipeline, sharding, wrt=wrt, weight=weight)
        return SelectedStep(
            PipelineStep(model, tx, resolved_pipeline, sharding),
            resolved_pipeline.weight,
            sharding,
            resolved_pipeline.schedule.num_microbatches,
        )
    checked_loss_fn: Any = loss_fn
    if isinstance(tx, LayerwiseStep):
        refuse_precision(compute_dtype)
        if sharding is not None and sharding.num_context_shards > 1:
            raise ConfigError(
                "a layerwise step cannot shard the tokens of rows over devices yet",
                expected="a mesh without an axis context",
                got=dict(sharding.mesh.shape),
                hint="use an Optax optimizer, with remat=True in the loss; its state is sharded along fsdp",
            )
        _check_layerwise_arguments(
            wrt=(wrt, None), mutable=(mutable, None), num_microbatches=(num_microbatches, 1), seed=(seed, 0)
        )
        if tx.weight is None:
            tx = dataclasses.replace(tx, weight=weight)
        elif weight not in (None, tx.weight):
            _check_layerwise_arguments(weight=(weight, None))
        return SelectedStep(LayerStep(model, checked_loss_fn, tx), tx.weight, sharding, 1)
    defaults: Any = model if isinstance(model, ModelObject) else Pytree
    selected_wrt = defaults.wrt if wrt is None else wrt
    selected_mutable = defaults.mutable if mutable is None else mutable
    arguments = (model, checked_loss_fn, tx, selected_wrt, num_microbatches, weight)
    sharding_kwargs: dict[str, Any] = {}
    if sharding is not None:
        # With an abstract mesh, the program runs on the devices of its arguments, and compiles for any target.
        mesh: Any = sharding.mesh.abstract_mesh
        sharding_kwargs = {"shard": dataclasses.replace(sharding, mesh=mesh).constrain, "mesh": mesh}
    step = WholeStep(*arguments, mutable=selected_mutable, seed=seed, compute_dtype=compute_dtype, **sharding_kwargs)
    return SelectedStep(step, weight, sharding, num_microbatches)


def _check_pipeline_arguments(
    model: Any, loss_fn: Any, tx: Any, mutable: Any, num_microbatches: int, compute_dtype: Any, seed: int
) -> None:
    conflicts = {
        "a bridge": (isinstance(model, ModelObject), "a pytree of outer and layers", "pass the arrays as a pytree"),
        "a layerwise step": (isinstance(tx, LayerwiseStep), "an Optax optimizer", "optax.adamw(1e-4)"),
        "loss_fn": (loss_fn is not None, "None: the stack defines the loss", "Trainer(model, None, tx, pipeline=...)"),
        "mutable": (mutable is not None, "functions of the stack that change no weights", "leave it out"),
        "num_microbatches": (
            num_microbatches != 1,
            "1: the schedule sets the number",
            "schedule(..., num_microbatches=...)",
        ),
        "compute_dtype": (compute_dtype is not None, "a stack that casts by itself", "load(..., compute_dtype=...)"),
        "seed": (seed != 0, "random keys as leaves of batches", 'a batch {"key": jax.random.key(step), ...}'),
    }
    for name, (is_set, expected, hint) in conflicts.items():
        if is_set:
            raise ConfigError(f"a pipeline cannot be trained with {name}", expected=expected, got=name, hint=hint)


def _check_layerwise_arguments(**arguments: tuple[Any, Any]) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            raise ConfigError(
                f"{name} is set twice, for the trainer and for its layerwise step",
                expected=f"Trainer(..., layerwise_step(..., {name}=...))",
                got=f"{name}={value!r} for the trainer",
                hint=f"pass {name} to lt.offload.layerwise_step alone",
            )


def _can_drop_update(on_nan: str, state: TrainState, *, is_layerwise: bool) -> bool:
    """Return whether the step itself can drop its update."""
    check_choice("unknown on_nan", on_nan, ("abort", "skip", "roll_back", "ignore"), 'try "abort"')
    host_paths = [path for path, leaf in leaves_with_paths(state) if on_host(getattr(leaf, "sharding", None))]
    if is_layerwise:  # it may have updated layers before it reaches a gradient that is not finite
        return on_nan == "skip"
    if on_nan == "skip" and host_paths:
        raise ConfigError(
            "a step with state on the host cannot drop its update",
            expected='on_nan="abort", "roll_back" or "ignore"',
            got=f"state on the host: {', '.join(host_paths[:4])}",
            hint='"roll_back" returns to the last copy of the state; a layerwise step can skip',
        )
    return on_nan in ("abort", "skip") and not host_paths


def _check_arguments(
    model: Any, tx: Any, loss_fn: Any, sharding: Any, num_microbatches: Any, seed: Any, pipeline: Any
) -> None:
    """Raise for an invalid model, optimizer, loss function, sharding, number or pipeline."""
    # A model of such a library exists only if the library is imported.
    for name, library, class_name in (("keras", "keras", "Model"), ("nnx", "flax.nnx", "Module")):
        cls = getattr(sys.modules.get(library), class_name, None)
        if cls is not None and isinstance(model, cls):
            raise ConfigError(
                f"a {type(model).__name__} is a mutable object, which the trainer can use only through its bridge",
                expected=f"Trainer(lowtide.ext.{name}.Bridge(model), ...)",
                got=type(model).__name__,
                hint=f"from lowtide.ext.{name} import Bridge",
            )
    if not (isinstance(tx, LayerwiseStep) or (hasattr(tx, "init") and hasattr(tx, "update"))):
        raise ConfigError(
            "tx is not an Optax optimizer",
            expected="an optax.GradientTransformation, such as optax.adamw(1e-3), or a layerwise step",
            got=repr(tx)[:80],
            hint="optimizers of Keras and NNX cannot be used: choose the Optax optimizer of the same name",
        )
    if not (pipeline is None or isinstance(pipeline, Schedule | Pipeline)):
        raise ConfigError(
            "pipeline is not a schedule",
            expected="a lowtide.pipeline.Schedule, or a result of lowtide.pipeline.value_and_grad",
            got=repr(pipeline)[:80],
            hint='lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)',
        )
    if not callable(loss_fn) and pipeline is None:
        raise ConfigError(
            "loss_fn is not a function",
            expected="loss_fn(model, batch) that returns a scalar",
            got=repr(loss_fn)[:80],
            hint='the bridge of a Keras model makes one: bridge.loss("mse"); None is valid only with pipeline=',
        )
    if (
        callable(loss_fn) and not isinstance(tx, LayerwiseStep) and not isinstance(model, ModelObject)
    ):  # the loss of an Equinox bridge takes the module's state as one more argument
        _check_signature(loss_fn)
    problem, hint = "num_microbatches is not a valid number of parts", "1 means no accumulation"
    check_count(problem, num_microbatches, 1, "an integer of at least 1", hint)
    if not is_count(seed, -(2**31)) or seed >= 2**32:
        raise ConfigError(
            "seed is not a 32-bit integer",
            expected="an integer, such as 0",
            got=repr(seed),
            hint="each seed gives another run",
        )
    if not (isinstance(model, ModelObject) or any(map(is_array_like, jax.tree.leaves(model)))):
        raise ConfigError(
            "the model has no arrays",
            expected="a pytree of arrays, or a bridge of lowtide.ext",
            got=f"a {type(model).__name__} of {len(jax.tree.leaves(model))} leaves",
            hint="pass parameters, such as {'w': jnp.zeros((4, 2))}",
        )
    if not (sharding is None or isinstance(sharding, ShardingRules)):
        raise ConfigError(
            "sharding is not a ShardingRules object",
            expected="ShardingRules(mesh=make_mesh(), rules={...})",
            got=type(sharding).__name__,
            hint="from lowtide.train import ShardingRules, make_mesh",
        )


def _check_signature(loss_fn: Any) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind("model", "batch", **accepted_keywords(loss_fn, key=None, training=True))
    except TypeError as error:
        raise ConfigError(
            "loss_fn does not take a model and a batch",
            expected="loss_fn(model, batch), which may also take key and training by name",
            got=f"{getattr(loss_fn, '__name__', type(loss_fn).__name__)}{signature}",
            hint="a batch is one pytree, such as a tuple (x, y); functools.partial fills other arguments in",
        ) from error


def add_hints(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add hints to the `TypeError` of a method that is called like another library's ``fit(x, y, batch_size=32)``."""

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
