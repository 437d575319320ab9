"""What a trainer takes, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import jax

from ..core import (
    ConfigError,
    DataError,
    ModelObject,
    OutputError,
    SelectionError,
    StateError,
    StructureError,
    Tree,
    Where,
    is_array_like,
    leaves_with_paths,
    on_host,
    parse_bytes,
    shared_leaves,
)
from ..distributed import ShardingRules
from ..memory import check_donation
from ..offload import LayerwiseStep
from ..pipeline import Pipeline, Schedule
from ._callbacks import Callback
from ._checkpoint import Checkpoints
from ._feed import IN_ORDER, is_count, refuse_arrays
from ._models import keywords
from ._step import STEP_ARGUMENTS, TrainState

P = ParamSpec("P")
R = TypeVar("R")
OnNan = Literal["abort", "skip", "roll_back", "ignore"]
_READ_ONCE = {"builtins", "itertools", "grain"}
"""Whose iterators never begin again; a loader of the user's may be its own iterator, and do so."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Of a pytree, where a `ModelObject` says its own."""

    wrt: Where = "**"
    """Everything trains."""
    mutable: Where | None = None
    """Nothing changes beside it."""


def guards(on_nan: str, state: TrainState, *, is_layerwise: bool) -> bool:
    """Whether the step can leave its own update out."""
    if on_nan not in ("abort", "skip", "roll_back", "ignore"):
        raise ConfigError(
            "unknown on_nan", expected='"abort", "skip", "roll_back" or "ignore"', got=repr(on_nan), hint='try "abort"'
        )
    hosted = [path for path, leaf in leaves_with_paths(state) if on_host(getattr(leaf, "sharding", None))]
    if is_layerwise:  # which may have updated layers before it meets a gradient that is not finite
        return on_nan == "skip"
    if on_nan == "skip" and hosted:
        raise ConfigError(
            "this step's updates cannot be left out",
            expected='on_nan="abort", "roll_back" or "ignore"',
            got=f"state on the host: {', '.join(hosted[:4])}",
            hint='"roll_back" returns to the last copy of the state; a layerwise step can skip',
        )
    return on_nan in ("abort", "skip") and not hosted


def refuse_rollback_to_nothing(on_nan: str, *, has_copies: bool) -> None:
    """Raise for a policy that could never do what it says."""
    if on_nan == "roll_back" and not has_copies:
        raise ConfigError(
            'on_nan="roll_back" has nothing to go back to',
            expected="rollback=True, or a checkpoint_dir",
            got="neither",
            hint="leave rollback=False out",
        )


def parse_budget(budget: int | str | None) -> int | None:
    """Bytes that a step may use, or None for what the device has."""
    found: Any = parse_bytes(budget) if isinstance(budget, str) else budget
    if found is not None and not is_count(found, 1):
        raise ConfigError("budget leaves nothing", got=budget, hint='budget="14 GiB", or None for the whole device')
    return found


def refuse_shared(parts: Tree) -> None:
    """Raise when one array stands at two paths of what a step consumes."""
    for paths in shared_leaves(parts):
        names = [path.partition("/")[2] for path in paths]
        raise SelectionError(
            f"{names[0]} and {names[1]} are the same array and both train",
            expected="one array at each trainable path, because each is donated to the step",
            hint="tie weights inside the model instead, or untie them with jnp.array(leaf, copy=True)",
        )


def refuse_arguments(
    model: Any, tx: Any, loss_fn: Any, sharding: Any, num_microbatches: Any, seed: Any, pipeline: Any
) -> None:
    """Raise for what cannot be a model, an optimizer, a loss function, rules, a number, or a pipeline."""
    # Who has such a model has imported its library.
    for name, library, kind in (("keras", "keras", "Model"), ("nnx", "flax.nnx", "Module")):
        cls = getattr(sys.modules.get(library), kind, None)
        if cls is not None and isinstance(model, cls):
            raise ConfigError(
                f"a {type(model).__name__} is a mutable object, which the trainer takes by way of its bridge",
                expected=f"Trainer(lowtide.ext.{name}.Bridge(model), ...)",
                got=type(model).__name__,
                hint=f"from lowtide.ext.{name} import Bridge",
            )
    if not (isinstance(tx, LayerwiseStep) or (hasattr(tx, "init") and hasattr(tx, "update"))):
        raise ConfigError(
            "tx is no optimizer of Optax",
            expected="an optax.GradientTransformation, such as optax.adamw(1e-3), or a layerwise step",
            got=repr(tx)[:80],
            hint="an optimizer of Keras or NNX cannot be used: choose Optax' of the same name",
        )
    if not (pipeline is None or isinstance(pipeline, Schedule | Pipeline)):
        raise ConfigError(
            "pipeline is no schedule",
            expected="a lowtide.pipeline.Schedule, or what lowtide.pipeline.value_and_grad made",
            got=repr(pipeline)[:80],
            hint='lt.pipeline.schedule("zb-h1", num_stages=4, num_microbatches=16)',
        )
    if not callable(loss_fn) and pipeline is None:
        raise ConfigError(
            "loss_fn is no function",
            expected="loss_fn(model, batch) that returns a scalar",
            got=repr(loss_fn)[:80],
            hint='of a Keras model its bridge makes it: bridge.loss("mse"); None is for pipeline= alone',
        )
    if (
        callable(loss_fn) and not isinstance(tx, LayerwiseStep) and not isinstance(model, ModelObject)
    ):  # Equinox' state is one argument more
        _refuse_signature(loss_fn)
    if not is_count(num_microbatches, 1):
        raise ConfigError(
            "num_microbatches is no number of parts",
            expected="an integer of at least 1",
            got=repr(num_microbatches),
            hint="1 means no accumulation",
        )
    if not is_count(seed, -(2**31)) or seed >= 2**32:
        raise ConfigError(
            "seed is no integer of 32 bits", expected="such as 0", got=repr(seed), hint="each seed is another run"
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
            "sharding is no ShardingRules",
            expected="ShardingRules(mesh=make_mesh(), rules={...})",
            got=type(sharding).__name__,
            hint="from lowtide.train import ShardingRules, make_mesh",
        )


def _refuse_signature(loss_fn: Any) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind("model", "batch", **keywords(loss_fn, key=None, training=True))
    except TypeError as error:
        raise ConfigError(
            "loss_fn does not take a model and a batch",
            expected="loss_fn(model, batch), which may also take key and training by name",
            got=f"{getattr(loss_fn, '__name__', type(loss_fn).__name__)}{signature}",
            hint="a batch is one pytree, such as a tuple (x, y); functools.partial fills other arguments in",
        ) from error


def refuse_fit_arguments(eval_every: Any, checkpoint_every: Any, eval_data: Any, on_record: Any) -> None:
    """Raise for arguments of `fit` that cannot be what they are for."""
    for name, every in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and not is_count(every, 1):
            raise ConfigError(
                f"{name} is no number of steps",
                expected="1 or more, or None for never",
                got=every,
                hint=f"{name}=100",
            )
    if on_record is not None and not callable(on_record):
        raise ConfigError(
            "on_record is no function", expected="on_record(record)", got=repr(on_record)[:80], hint="print"
        )
    if eval_data is None:
        if eval_every is not None:
            raise ConfigError("eval_every needs eval_data", got="no eval_data", hint="fit(..., eval_data=batches)")
        return
    refuse_arrays(eval_data)
    if isinstance(eval_data, Iterator) and type(eval_data).__module__.split(".")[0] in _READ_ONCE:
        raise DataError(
            "eval_data gives its batches only once, and is evaluated at least twice",
            expected="a list, a grain dataset, or an object whose __iter__ begins again",
            got=type(eval_data).__name__,
            hint="list(eval_data), if its batches fit in memory",
        )


def hints_at(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a method say what it takes in place of what other libraries' ``fit(x, y, batch_size=32)`` does."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                renamed = [f"{name} is {names[name]} here" for name in kwargs if name in names]
                data = "x" if method.__name__ == "predict" else "(x, y)"
                order, end = ("", ", num_epochs=1") if names else (f", {IN_ORDER}", "")
                call = f"{method.__name__}(lowtide.train.array_data({data}, batch_size=32{order}){end})"
                hint = "; ".join([*renamed, f"arrays become batches in array_data: {call}"])
                raise TypeError(f"Trainer.{method.__name__}: {error}\nhint: {hint}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks, of any iterable; raises for what is none, before anything runs."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            "callbacks is no list of callbacks",
            expected="callbacks=[EarlyStopping()]",
            got=repr(callbacks)[:80],
            hint="put a single one into a list",
        )
    found = tuple(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(
                "a callback is none",
                expected="objects of subclasses of lowtide.train.Callback",
                got=repr(callback)[:80],
                hint="a class has to be called, EarlyStopping(); a function goes into on_record=",
            )
        events = [name for name in dir(Callback) if name.startswith("on_")]
        for name in dir(type(callback)):
            ours = name.replace("train_batch", "step").replace("batch", "step")  # the words of other libraries
            if name.startswith("on_") and name not in events and (near := get_close_matches(ours, events, 1, 0.75)):
                warnings.warn(
                    f"{type(callback).__name__}.{name} is never called by a trainer\nhint: did you mean {near[0]}?",
                    UserWarning,
                    stacklevel=4,
                )
    return found


def refuse_copies(compiled: Any) -> None:
    """Raise when a compiled step would hold a part of its state twice."""
    if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
        warnings.warn(
            "jax_debug_nans is on, with which JAX donates nothing: each step holds its state twice\n"
            "hint: JAX stops at a step with NaN and cannot say where in it: call the loss function by itself for that",
            UserWarning,
            stacklevel=5,
        )
        return
    check_donation(compiled, arg_names=STEP_ARGUMENTS)


def refuse_consumed(*trees: Tree) -> None:
    """Raise when somebody else has consumed the arrays: another trainer of them, or of a copy that shares them."""
    leaves = [pair for tree in trees for pair in leaves_with_paths(tree)]
    gone = [path for path, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        raise StateError(
            f"{gone[0]} was consumed: another trainer or a donating function has taken it",
            expected="arrays that belong to this trainer alone",
            got=f"{len(gone)} deleted arrays",
            hint="give each trainer its own: jax.tree.map(jnp.array, model), or the first one's trainer.model",
        )


def refuse_other_types(name: str, new: Tree, old: Tree) -> None:
    theirs, ours = dict(leaves_with_paths(new)), dict(leaves_with_paths(old))
    for path in {**ours, **theirs}:
        a, b = (_kind(tree[path]) if path in tree else None for tree in (ours, theirs))
        if a != b:
            raise StructureError(
                f"{name} leaf {path} is not what it was when the trainer was made",
                expected=a or "no such leaf",
                got=b or "no such leaf",
                hint="the step is compiled for these shapes: make a new Trainer",
            )


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def refuse_beside_layerwise(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(
                f"{name} is said twice, to the trainer and to its layerwise step",
                expected=f"Trainer(..., layerwise_step(..., {name}=...))",
                got=f"{name}={value!r} for the trainer",
                hint=f"pass {name} to lt.offload.layerwise_step alone",
            )


def open_checkpoints(directory: str | Path | None, *, best: str | None, **options: Any) -> Checkpoints | None:
    """The checkpoints, when there is a folder for them."""
    if directory is not None:
        return Checkpoints(directory, best=best, **options)
    if best is not None:
        raise ConfigError("best needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
    return None


def refuse_unevaluated(checkpoints: Checkpoints | None, eval_data: Any) -> None:
    """Raise when nothing is evaluated that could be the best."""
    if checkpoints is not None and checkpoints.best is not None and eval_data is None:
        raise ConfigError(
            f"best={checkpoints.best!r} needs evaluations",
            expected="fit(..., eval_data=...)",
            got="no eval_data",
            hint="pass batches to evaluate on, and eval_every",
        )


def refuse_later_checkpoint(checkpoints: Checkpoints | None, step: int) -> None:
    """Raise when there is a checkpoint of a later step: a run from here would save nothing."""
    latest = None if checkpoints is None else checkpoints.look_again()
    if checkpoints is not None and latest is not None and latest > step:
        raise OutputError(
            f"{checkpoints.directory}: holds a checkpoint of a later step than the trainer's",
            expected=f"none after step {step}",
            got=f"step {latest}",
            hint="call trainer.restore() to continue that run, or choose another checkpoint_dir",
        )


def needs_checkpoints(checkpoints: Checkpoints | None, what: str) -> Checkpoints:
    """The checkpoints, or an error that there is no folder for them."""
    if checkpoints is None:
        raise ConfigError(f"{what} needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
    return checkpoints
