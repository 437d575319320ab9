"""Training steps: pure functions from a state and a batch to a new state and metrics.

The leaves of a model are trainable, mutable (the model itself changes them) or frozen. The trainer uses steps only
through `TrainingStep`, so a run, its checkpoints and its reports work with every kind of step. `WholeStep`
differentiates the whole model, optionally in mixed precision. `LayerStep` wraps a `lowtide.offload.layerwise_step`. The
step of a pipeline is in `_pipeline_step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ..core import (
    ConfigError,
    ModelObject,
    Selector,
    StructureError,
    Tree,
    accumulate,
    activation_sharding,
    check_differentiable,
    check_type,
    combine,
    is_loss,
    leaves_with_paths,
    partition,
    products_explained,
    split_static,
)
from ..offload import LayerwiseState, LayerwiseStep, state_shardings
from ..optim import with_shardings
from ._optimizer import learning_rate_metric, with_inner

LossFn = Callable[..., Any]

Gradients = tuple[Any, dict[str, Any], Tree, Tree]
"""Loss, metrics, the mutable leaves after the call, and the gradients of the trainable leaves."""

STEP_ARGUMENTS = ("trainable", "optimizer", "mutable", "step", "frozen", "batch")
"""Names of a step's arguments, in order; the roles of its memory report."""
UPDATE_HINT = "change the object that `Trainer.model` returns"
DONATED = (0, 1, 2, 3)
"""Positions of the arguments that a step donates, and whose new values it returns."""
_RESERVED = frozenset({"step", "loss", "grad_norm", "learning_rate", "seconds"})
"""Names of values that the trainer itself writes into records."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "trainable", "opt_state", "mutable"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes."""

    step: Any
    """Number of steps taken, an int32 scalar."""
    trainable: Tree
    """The model's tree with only its trainable leaves; `None` elsewhere."""
    opt_state: Tree
    """State of the optimizer for the trainable leaves."""
    mutable: Tree = None
    """The model's tree with only leaves that the model itself changes, such as batch statistics; `None` elsewhere."""


def multi_device_sharding(leaf: Any) -> Any:
    """Return the sharding of an array on several devices, else None."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and len(sharding.device_set) > 1 else None


class TrainingStep(Protocol):
    """Interface of a training step."""

    arrangement: list[int] | None = None
    """Index of the layer in each row of the state's stacked layers, -1 for padding; None for the order of the model."""
    remedies: str
    """Text of the hint of an out-of-memory error."""

    def guard(self, is_guarded: bool) -> None:
        """Set whether updates are dropped when the loss or gradients are not finite."""
        ...

    def arranged(self, model: Tree) -> Tree:
        """Bring the layers of a model into the order of `arrangement`."""
        return model

    def init(self, model: Tree) -> tuple[TrainState, Tree]:
        """Return the state of step 0 and the frozen leaves, each with its sharding."""
        ...

    def split(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        """Split a model's arrays, or their shapes, into trainable, mutable and frozen leaves."""
        ...

    def __call__(self, state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        """Take one step: return the new state and the metrics."""
        ...

    def loss(self, arrays: Tree, batch: Tree, *, key: Any, training: bool) -> tuple[Any, dict[str, Any], Tree]:
        """Return the loss, the metrics, and the model's arrays after the call."""
        ...

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function of the model into a function of its arrays, for use outside of training."""
        ...

    def model(self, *parts: Tree) -> Tree:
        """Rebuild the model from its parts (trainable, mutable, frozen)."""
        ...


_OPTIMIZER_NOTE = (
    "raised by the optimizer, whose update gets the gradients, its state, the trainable leaves and value=loss: an "
    "optimizer that calls the loss function itself (optax.lbfgs, sophia), or needs other parameters (optax.lookahead), "
    "needs another training loop"
)


def flat_step(step: TrainingStep) -> Callable[..., tuple[Tree, Tree, Tree, Any, dict[str, Any]]]:
    """Return the step as a function of `STEP_ARGUMENTS` that returns new values of the first four, and the metrics."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        problem = "jax.disable_jit is on, and a step that is not compiled would hold its state twice"
        hint = "call the loss function alone to debug it; jax.debug.print also works in a compiled step"
        raise ConfigError(problem, hint=hint)

    def run(
        trainable: Tree, opt_state: Tree, mutable: Tree, count: Any, frozen: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Tree, Any, dict[str, Any]]:
        state, metrics = step(TrainState(count, trainable, opt_state, mutable), frozen, batch)
        return state.trainable, state.opt_state, state.mutable, state.step, metrics

    return run


class WholeStep(TrainingStep):
    """A step that first computes all gradients, and then updates the trainable leaves; arguments as in `Trainer`.

    Mutable: `init` and `guard` complete it before the first step.
    `shard` constrains the sharding of microbatches, and of activations between the layers of a stack, over `mesh`.
    """

    remedies = "fewer rows per batch, a larger num_microbatches, lt.offload.optimizer(tx), or a larger budget"

    def __init__(
        self,
        model: Tree,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        wrt: Selector,
        num_microbatches: int,
        weight: Callable[[Tree], Any] | None,
        *,
        mutable: Selector | None = None,
        seed: int = 0,
        compute_dtype: Any = None,
        shard: Callable[[Tree], Tree] = lambda arrays: arrays,
        mesh: Any = None,
    ) -> None:
        self.source: Any = model if isinstance(model, ModelObject) else Pytree(model)
        self._loss_fn, self._tx, self._wrt, self._mutable = loss_fn, tx, wrt, mutable
        self._num_microbatches, self._seed = num_microbatches, seed
        self._shard, self._mesh = shard, mesh
        self._weight = scalar_weight(weight or (lambda batch: 1))
        self._precision = _Precision(compute_dtype, self.source, mutable)
        self._constrained: Callable[[Tree], Tree] = getattr(self.source, "constrained", lambda trainable: trainable)
        self._is_guarded = False

    def guard(self, is_guarded: bool) -> None:
        self._is_guarded = is_guarded

    def set_num_microbatches(self, number: int) -> None:
        """Split later batches into another number of parts; a plan may change the number before a step is compiled."""
        self._num_microbatches = number

    def init(self, model: Tree) -> tuple[TrainState, Tree]:
        trainable, mutable, frozen = self.split(model)
        leaves = jax.tree.leaves(trainable)
        are_sharded = [isinstance(multi_device_sharding(leaf), jax.sharding.NamedSharding) for leaf in leaves]
        meshes = [leaf.sharding.mesh for leaf in leaves] if all(are_sharded) else []
        # Arrays on a mesh with explicit axes carry their sharding in their types.
        if meshes and not any(mesh.abstract_mesh.explicit_axes for mesh in meshes):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, trainable)
            self._tx = with_inner(self._tx, functools.partial(with_shardings, shardings=shardings))
        count = jnp.int32(0)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
        is_elsewhere = not any(are_sharded) and any(array.devices() != count.devices() for array in arrays)
        out_shardings = state_shardings(self._tx, trainable) if any(are_sharded) or is_elsewhere else None
        # Under jit, the optimizer's state gets its own buffers, even if `init` returns the parameters themselves.
        opt_state = jax.jit(self._tx.init, out_shardings=out_shardings)(trainable)
        if is_elsewhere:  # a restored checkpoint must have all leaves on one device
            count = jax.device_put(count, leaves[0].sharding)
        return TrainState(count, trainable, opt_state, mutable), frozen

    def split(self, model: Tree) -> tuple[Tree, Tree, Tree]:
        arrays = self.source.arrays() if self.source is model else split_static(model)[0]
        mutable = jax.tree.map(lambda _: None, arrays)
        if self._mutable is not None:
            mutable, arrays = partition(arrays, self._mutable)
        trainable, frozen = partition(arrays, self._wrt)
        check_differentiable(trainable)
        return trainable, mutable, frozen

    def _gradients(self, state: TrainState, frozen: Tree, batch: Tree) -> Gradients:
        key = jax.random.fold_in(jax.random.key(self._seed), state.step)

        def loss_fn(trainable: Tree, batch: Tree, carry: tuple[Tree, Any]) -> tuple[Any, Any]:
            mutable, index = carry
            batch = self._shard(batch) if self._num_microbatches > 1 else batch
            arrays = combine(trainable, mutable, frozen)
            loss, metrics, after = self.loss(arrays, batch, key=jax.random.fold_in(key, index), training=True)
            return loss, ((metrics, self._weight(batch)), (_updated_mutable(mutable, after), index + 1))

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        accumulated = accumulate(grad_fn, self._num_microbatches, weight=self._weight, has_aux=True, has_carry=True)
        carry = state.mutable, jnp.int32(0)
        (loss, ((metrics, weights), (mutable, _))), grads = accumulated(state.trainable, batch, carry)
        total = jnp.sum(weights)
        total = jnp.where(total == 0, 1, total)  # all weights are 0: metrics are 0, like the loss
        means = {name: jnp.sum(weighted(value, weights)) / total for name, value in metrics.items()}
        return loss, means, mutable, grads

    def __call__(self, state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        return self.apply_gradients(state, self._gradients(state, frozen, batch))

    def apply_gradients(self, state: TrainState, gradients: Gradients) -> tuple[TrainState, dict[str, Any]]:
        """Update the trainable leaves with the gradients of a batch; return the new state and the metrics."""
        loss, metrics, mutable, grads = gradients
        # In half precision, the squares may overflow where the gradients do not.
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(wide)}
        update = optax.with_extra_args_support(self._tx).update
        parameters = inspect.signature(update).parameters
        takes_value = "value" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        def advance(state: TrainState, mutable: Tree, grads: Tree, loss: Any) -> TrainState:
            extra = {"value": loss} if takes_value else {}  # reduce-on-plateau schedules use the loss
            try:
                updates, opt_state = update(grads, state.opt_state, state.trainable, **extra)
            except Exception as error:
                error.add_note(_OPTIMIZER_NOTE)
                raise
            trainable = self._constrained(optax.apply_updates(state.trainable, updates))
            return TrainState(state.step, trainable, opt_state, mutable)

        if self._is_guarded:
            is_finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
            new = _update_if_finite(is_finite, advance, state, mutable, grads, loss)
        else:
            new = advance(state, mutable, grads, loss)
        metrics = learning_rate_metric(new.opt_state) | metrics
        return dataclasses.replace(new, step=state.step + 1), metrics

    def loss(self, arrays: Tree, batch: Tree, *, key: Any, training: bool) -> tuple[Any, dict[str, Any], Tree]:
        kwargs = accepted_keywords(self._loss_fn, key=key, training=training)
        fn = functools.partial(self._loss_fn, **kwargs) if kwargs else self._loss_fn
        with activation_sharding(self._shard, self._mesh):
            result, after = self._precision.bind(fn, training=training)(arrays, batch)
        is_declared = self._mutable is not None and isinstance(self.source, Pytree)
        loss, metrics, after = parse_loss(result, after, has_mutable=is_declared, is_training=training)
        return *self._precision.widen((loss, metrics)), after

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        run = self._precision.bind(functools.partial(fn, **accepted_keywords(fn, training=False)), training=False)

        def bound(arrays: Tree, *args: Any) -> Any:
            with activation_sharding(self._shard, self._mesh):
                return self._precision.widen(run(arrays, *args)[0])

        return bound

    def model(self, *parts: Tree) -> Tree:
        return self.source.rebuild(*parts) if isinstance(self.source, Pytree) else self.source.model


def _updated_mutable(mutable: Tree, after: Tree) -> Tree:
    """Return the mutable leaves of a model after a call; raise if their shapes or dtypes have changed."""
    updated = jax.tree.map(
        lambda old, new: None if old is None else new, mutable, after, is_leaf=lambda leaf: leaf is None
    )
    for (path, old), (_, new) in zip(leaves_with_paths(mutable), leaves_with_paths(updated), strict=True):
        if (old.shape, old.dtype) != (jnp.shape(new), jnp.result_type(new)):
            new_type = f"{jnp.result_type(new)}{list(jnp.shape(new))}"
            problem = f"{path}: the model changes the type of its state from {describe(old)} to {new_type}"
            raise StructureError(problem, hint="cast the new value to the dtype of the old one")
    return updated


def _update_if_finite(is_finite: Any, advance: Callable[..., Tree], state: Tree, *arguments: Any) -> Tree:
    """Return the state after an update if `is_finite`, else the old state.

    On a CPU, `jax.lax.cond` skips the update, because XLA copies leaves there to select between two states
    (benchmarks/log/). On other devices, `jax.lax.select` costs no bytes, and `cond` on a GPU is said to wait for the
    host (not measured). If the update changes the shape or dtype of a leaf, `check_donation` later raises.
    """
    advance = jax.jit(advance)  # traced once for all calls below

    def is_same(new: Any, old: Any) -> bool:
        return (new.shape, new.dtype) == (old.shape, old.dtype)

    def choose(new: Any, old: Any) -> Any:
        return jax.lax.select(jnp.broadcast_to(is_finite, new.shape), new, old) if is_same(new, old) else new

    def selected(state: Tree, *arguments: Any) -> Tree:
        return jax.tree.map(choose, advance(state, *arguments), state)

    def branched(state: Tree, *arguments: Any) -> Tree:
        return jax.lax.cond(is_finite, advance, lambda state, *_: state, state, *arguments)

    if not all(jax.tree.leaves(jax.tree.map(is_same, jax.eval_shape(advance, state, *arguments), state))):
        return selected(state, *arguments)
    return jax.lax.platform_dependent(state, *arguments, cpu=branched, default=selected)


class LayerStep(TrainingStep):
    """A step that updates each layer before it computes the next layer's gradients; `loss_fn` is for evaluations.

    Mutable: `guard` completes it before the first step.
    """

    remedies = "fewer rows per batch, more num_microbatches of the layerwise step, or a larger budget"

    def __init__(self, model: Tree, loss_fn: LossFn, step: LayerwiseStep) -> None:
        outer_and_layers(model, "a layerwise step")
        self._step, self._loss_fn = step, loss_fn
        self._other_fields = with_outer_and_layers(model, None, None)

    def guard(self, is_guarded: bool) -> None:
        if is_guarded:  # a layerwise step that was made with on_nan="skip" skips in any case
            self._step = dataclasses.replace(self._step, on_nan="skip")

    def init(self, model: Tree) -> tuple[TrainState, Tree]:
        state, frozen = self._step.init(*outer_and_layers(model, "a layerwise step"))
        return _train_state(state), frozen

    def split(self, model: Tree) -> NoReturn:
        """Raise `ConfigError`: a layerwise step stores weights in another form, so they cannot be replaced."""
        raise ConfigError("update works only for a pytree", hint=UPDATE_HINT)

    def __call__(self, state: TrainState, frozen: Tree, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        opt, params = state.opt_state, state.trainable
        layerwise_state = LayerwiseState(
            state.step, **params, outer_opt=opt["outer"], layers_opt=opt["layers"], grad_norm=opt["norm"]
        )
        new_state, metrics = self._step(layerwise_state, frozen, batch)
        return _train_state(new_state), metrics

    def loss(self, arrays: Tree, batch: Tree, *, key: Any, training: bool) -> tuple[Any, dict[str, Any], Tree]:
        kwargs = accepted_keywords(self._loss_fn, key=key, training=training)
        return parse_loss(self._loss_fn(self.model(arrays), batch, **kwargs), arrays, has_mutable=False)

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda arrays, *args: fn(self.model(arrays), *args, **accepted_keywords(fn, training=False))

    def model(self, *parts: Tree) -> Tree:
        return with_outer_and_layers(self._other_fields, **combine(*parts))


def _train_state(state: LayerwiseState) -> TrainState:
    # The layerwise step may clip the next step by this gradient norm, so it is part of the optimizer's state.
    opt_state = {"outer": state.outer_opt, "layers": state.layers_opt, "norm": state.grad_norm}
    params = {"outer": state.outer, "layers": state.layers}
    return TrainState(state.step, params, opt_state, jax.tree.map(lambda _: None, params))


def weighted(value: Any, weight: Any) -> Any:
    """Multiply a value by its weight; weight 0 gives 0, even where the value is a mean over no tokens (0/0)."""
    return jnp.where(weight == 0, 0, value * weight)


def scalar_weight(weight: Callable[[Tree], Any]) -> Callable[[Tree], Any]:
    """Wrap a weight function so that it returns one float32 number for a batch, or raises `StructureError`."""

    def run(batch: Tree) -> Any:
        value = weight(batch)
        if jax.tree.structure(value) != jax.tree.structure(0) or jnp.ndim(value):
            raise StructureError(f"weight must return one number for a batch, not {describe(value)}")
        return jnp.asarray(value, jnp.float32)

    return run


# --- models and loss functions: arrays of a pytree, arguments and results of a loss ----------------------------------


class Pytree:
    """Wrapper that gives a pytree the methods of a `ModelObject` that steps use; it keeps only non-array leaves."""

    wrt: Selector = "**"
    mutable: Selector | None = None

    def __init__(self, model: Tree) -> None:
        self._static = split_static(model)[1]

    def rebuild(self, *parts: Tree) -> Tree:
        return combine(*parts, self._static)

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Make a pure function of the arrays, as `ModelObject.bind` does; it returns the arrays unchanged."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            model = combine(arrays, self._static)
            with products_explained(model):
                return fn(model, *args), arrays

        return run


def outer_and_layers(model: Any, feature: str) -> tuple[Tree, Tree]:
    """Return ``outer`` and ``layers`` of a dictionary with only these keys, or of a dataclass with these fields."""
    fields = {"outer", "layers"}
    if isinstance(model, Mapping) and set(model) == fields:
        return model["outer"], model["layers"]
    if dataclasses.is_dataclass(model) and fields <= {field.name for field in dataclasses.fields(model)}:
        dataclass_model: Any = model
        return dataclass_model.outer, dataclass_model.layers
    problem = f"{feature} needs a model that is made of outer and layers, not a {type(model).__name__}"
    hint = "put the stacked parameters under layers and all others under outer, in a dictionary or dataclass"
    raise StructureError(problem, hint=hint)


def with_outer_and_layers(model: Any, outer: Tree, layers: Tree) -> Any:
    """Return the model with other values of ``outer`` and ``layers``."""
    if isinstance(model, Mapping):
        return {**model, "outer": outer, "layers": layers}
    return dataclasses.replace(model, outer=outer, layers=layers)


def accepted_keywords(fn: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Return the `values`, such as ``key`` and ``training``, that a function takes by name; leave out all others."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin
        return {}
    bound: set[str] = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    return {name: value for name, value in values.items() if name in {*parameters} - bound}


def parse_loss(result: Any, arrays: Tree, *, has_mutable: bool, is_training: bool = True) -> tuple[Any, Tree, Tree]:
    """Return the three values of a loss function: a scalar, metrics, and the model's arrays after the call.

    `result` is ``loss``, ``(loss, metrics)`` or ``(loss, metrics, model)``. Without a model, the arrays are `arrays`.
    """
    parts = result if isinstance(result, tuple) else (result, {})
    if len(parts) == 3 and not has_mutable:
        hint = 'Trainer(..., mutable="**/stats") names the leaves that the model changes itself'
        raise StructureError("the loss function returns a model, but no leaf of it is declared mutable", hint=hint)
    if len(parts) == 3:
        parts, arrays = parts[:2], split_static(parts[2])[0]
    elif has_mutable and is_training:
        problem = "the loss function must return (loss, metrics, model), because some leaves of the model are mutable"
        raise StructureError(problem, hint="return the model with its new batch statistics, or leave `mutable` out")
    if len(parts) != 2 or not isinstance(parts[1], dict) or not is_loss(parts[0]):
        returned = jax.tree.map(describe, result, is_leaf=lambda x: x is None)
        raise StructureError(
            f"the loss function must return a floating-point scalar, or (scalar, {{name: scalar}}), not {returned}",
            hint="average the losses of the examples with jnp.mean; return {} for no metrics",
        )
    metrics: dict[Any, Any] = parts[1]
    for name, value in metrics.items():
        shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
        check_type("the name of a metric", name, str, "text", error=StructureError)
        if name in _RESERVED or name.startswith("eval_"):
            raise StructureError(f"metric {name!r} has a name that is reserved for the trainer", hint="rename it")
        is_real = shape is not None and not jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)
        if shape != () or not is_real:
            raise StructureError(f"metric {name!r} must be a real scalar, not {describe(value)}")
    return parts[0], parts[1], arrays


def describe(leaf: Any) -> str:
    """Return the dtype and shape of an array as text; for any other leaf, the name of its type."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


# --- mixed precision -------------------------------------------------------------------------------------------------
# The model computes in bfloat16, and trainable leaves keep their dtype. The casts are part of the differentiated
# function, so gradients have the dtype of the trainable leaves. `mutable` leaves are never cast, because state in half
# precision would lose small changes. bfloat16 has the range of float32 and needs no loss scaling. float16 would need
# it, and is refused.
#
# Layers of Keras and Flax NNX cast on their own, so their bridges set the dtype. The Keras bridge has
# ``autocast(dtype)``, a context for tracing the model, and `_Precision` then casts nothing. The NNX bridge has
# ``lowered(model, dtype)``, which sets the dtype of the layers of the model that is passed to a function.
#
# Known inefficiency: frozen float32 leaves are cast in every step. A frozen base is better stored in bfloat16.
#
# References: Micikevicius et al., "Mixed Precision Training", 2018; Kalamkar et al., "A Study of BFLOAT16 for Deep
# Learning Training", 2019.


class _Precision:
    """The dtype in which functions of a model compute: bfloat16, or None for the dtypes of the arrays."""

    def __init__(self, compute_dtype: Any, source: Any, mutable: Selector | None) -> None:
        self._source, self._mutable = source, mutable
        self._dtype: Any = None
        self._autocast: Any = None
        if compute_dtype is None:
            return
        with contextlib.suppress(TypeError):  # not a dtype
            self._dtype = jnp.dtype(compute_dtype)
        if self._dtype != jnp.bfloat16:
            hint = "bfloat16 needs no loss scaling"
            raise ConfigError(f'compute_dtype must be "bfloat16" or None, not {compute_dtype!r}', hint=hint)
        if hasattr(source, "autocast"):
            self._autocast = functools.partial(source.autocast, self._dtype.name)
            with self._autocast():  # raises now rather than in the first step
                pass

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """Bind a function as `ModelObject.bind` does; its model and other arguments are in the compute dtype."""
        if self._dtype is None:
            return self._source.bind(fn, training=training)

        def on_lowered_model(model: Any, *args: Any) -> Any:
            return fn(self._source.lowered(model, self._dtype), *args)

        run = self._source.bind(on_lowered_model if hasattr(self._source, "lowered") else fn, training=training)

        def with_autocast(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            with self._autocast():
                return run(arrays, *args)

        def on_lowered_arrays(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            if self._mutable is None:
                return run(self._lower(arrays), *self._lower(args))
            mutable, other_leaves = partition(arrays, self._mutable)
            return run(combine(mutable, self._lower(other_leaves)), *self._lower(args))

        return on_lowered_arrays if self._autocast is None else with_autocast

    def widen(self, results: Tree) -> Tree:
        """Convert half-precision results of a function to float32."""
        if self._dtype is None:
            return results
        return jax.tree.map(lambda x: x.astype(jnp.float32) if _bits(x) == 16 else x, results)

    def _lower(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(self._dtype) if _bits(x) > 16 else x, tree)


def _bits(leaf: Any) -> int:
    """Return the bits of a floating-point array's dtype; 0 for any other leaf."""
    dtype = getattr(leaf, "dtype", None)
    return jnp.finfo(dtype).bits if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else 0
