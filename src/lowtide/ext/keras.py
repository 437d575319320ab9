"""Train Keras 3 models on the JAX backend with `lowtide.Trainer`.

Inside the step, a `keras.StatelessScope` maps the model's variables to the step's arrays. So the loss function calls
the model as usual, and `model.losses` use the current weights. The step returns the values that layers assign, such as
batch statistics and dropout seeds, and the next step starts from them.

The bridge takes the arrays out of ``Variable._value``, as Keras' own JAX trainer does. Checked with Keras 3.15.1.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from ..core import ConfigError, DataError, SelectionError, Tree, among, check_choice, check_type, shown
from ..train import example_weights
from ._placeholders import Placeholder, check_placeholders, refuse_changes


class Bridge:
    """A `keras.Model` for `lowtide.Trainer`; a `lowtide.train.ModelObject`.

    Args:
        model: a built model; it holds placeholders while the trainer has its arrays.

    Raises:
        ConfigError: for a backend other than JAX, and for an argument that is not a model. Also for variables that
            Keras overwrites with their gradient (the scales of ``float8``), because an optimizer would corrupt them.
        SelectionError: when the model is not built, or has no trainable variables.

    Warns:
        UserWarning: for a float16 policy, because the bridge does not scale the loss.

    Memory:
        No copy: the trainer uses the arrays of the model's variables.

    Examples:
        >>> import jax.numpy as jnp
        >>> import lowtide as lt
        >>> import optax
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> bridge = Bridge(model)
        >>> trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.sgd(0.1))
        >>> history = trainer.fit([(jnp.ones((4, 2)), jnp.zeros((4, 1)))] * 2, num_steps=2)
        >>> history[1]["loss"] < history[0]["loss"]
        True

    References:
        https://keras.io/guides/writing_a_custom_training_loop_in_jax/
    """

    def __init__(self, model: keras.Model) -> None:
        hint = "set the environment variable KERAS_BACKEND=jax before keras is imported"
        check_choice("the backend of Keras", keras.backend.backend(), ["jax"], hint=hint)
        check_type("the model", model, keras.Model, "a keras.Model")
        self.model = model
        """The model."""
        if not model.built or not model.trainable_variables:
            hint = "call model.build(input_shape), or the model on a batch; set layer.trainable = True"
            got = "only frozen variables" if model.built and model.variables else "a model without variables"
            got = got if model.built else "a model that is not built"
            raise SelectionError("the model has no trainable variables", got=got, hint=hint)
        overwritten = [
            variable.path
            for variable in model.trainable_variables
            if getattr(variable, "overwrite_with_gradient", False)
        ]
        if overwritten:
            problem = "Keras overwrites variables of the model with their gradient, and an optimizer would corrupt them"
            got = f"{', '.join(overwritten[:4])} of {len(overwritten)}"
            hint = "train under the policy mixed_bfloat16 and quantize afterwards; or freeze these layers"
            raise ConfigError(problem, got=got, hint=hint)
        layers = _layers(model)
        if any(layer.dtype_policy.compute_dtype == "float16" for layer in layers):
            warnings.warn(
                "the model computes in float16 without loss scaling, so small gradients become zero\n"
                "hint: use the policy mixed_bfloat16, which needs no scaling",
                UserWarning,
                stacklevel=2,
            )
        self._variables = _name_variables(_variables(model), layers)
        self._borrowed = set[str]()
        trainable_ids = {id(variable) for variable in model.trainable_variables}
        self._trainable = {name for name, variable in self._variables.items() if id(variable) in trainable_ids}
        # Weights of frozen layers. Calls do not change them; they may change other variables that do not train.
        frozen_ids = {id(variable) for layer in layers for variable in layer._trainable_variables} - trainable_ids
        self._frozen = {name for name, variable in self._variables.items() if id(variable) in frozen_ids}

    def wrt(self, path: str, leaf: Any) -> bool:
        """Return whether a leaf is in `model.trainable_variables`."""
        return path in self._trainable

    @property
    def mutable(self) -> Callable[[str, Any], bool] | None:
        """Selects leaves that a call may change: statistics and seeds, not frozen weights. None without such leaves."""
        names = set(self._variables) - self._trainable - self._frozen
        return among(names) if names else None

    def loss(
        self, loss: Any, metrics: Mapping[str, Any] | None = None, *, class_weight: Mapping[int, float] | None = None
    ) -> Callable[..., Any]:
        """Make a loss function for `lowtide.Trainer` that includes the model's own losses (regularisers).

        Args:
            loss: a Keras loss, the name of one, such as ``"sparse_categorical_crossentropy"``, or a function of one
                array of labels and one of outputs. Ranks and masks follow Keras: labels (B,) become (B, 1) if the
                outputs are (B, 1).
            metrics: dictionary from a name of your choice to a metric. A metric is a function of labels and outputs,
                such as `keras.metrics.binary_accuracy`, a Keras metric that is a mean over examples, or Keras' name
                of either. Each value is the mean over a batch, without sample weights and without masked examples;
                over several batches, it is the mean of the batches' means.
            class_weight: weights by class, as in `lowtide.train.example_weights`; used only in training, as in Keras'
                ``fit``. Labels with the shape of the outputs are one-hot. A `sample_weight` is multiplied by the
                weights.

        Returns:
            ``loss_fn(model, batch, training)`` for batches ``(x, y)`` or ``(x, y, sample_weight)``. The loss is the
            weighted sum over examples divided by the number of examples, as in Keras, and not by the sum of weights. So
            microbatches of one size have equal weight, and evaluation batches are weighted by their number of rows.

        Raises:
            ConfigError: for an unknown loss or metric, a metric that is not a mean, such as AUC, or invalid `metrics`
                or `class_weight`; for a model that overrides ``train_step`` or ``compute_loss``, because the override
                would not be called; in the step, for a model with several outputs.
            DataError: in the step, for a batch other than ``(x, y)`` or ``(x, y, sample_weight)``.
        """
        self._check_not_overridden(
            ("compute_loss", "compute_metrics", "train_step", "test_step", "compute_loss_and_updates"),
            "loss_fn(model, batch, training), which may return model.compute_loss(x, y, model(x, training=training)); "
            "add sum(model.losses) if that does not, and call model.compile(loss=...) first if it calls Keras' own, "
            "which is 0 without a compiled loss",
        )
        fn = _resolve_loss(loss)
        hint = 'pass for instance bridge.loss(loss, {"accuracy": "accuracy"})'
        check_type("metrics", metrics or {}, Mapping, "a dictionary of names and metrics", hint=hint)
        means = {name: _resolve_metric(name, metric) for name, metric in (metrics or {}).items()}
        if class_weight is not None:
            example_weights(np.zeros(0, np.int32), class_weight)  # raises now rather than in the first step

        # Ranks, masks and reductions are those of `keras.losses.Loss` and `keras.metrics.MeanMetricWrapper`.
        def loss_fn(model: Any, batch: Any, training: bool) -> tuple[Any, dict[str, Any]]:
            x, y, sample_weight = _split_batch(batch)
            outputs = model(x, training=training)
            if not hasattr(y, "shape") or not hasattr(outputs, "shape"):
                raise ConfigError(
                    "the bridge's loss needs one array of labels and one of outputs",
                    got=f"{type(y).__name__} and {type(outputs).__name__}",
                    hint="write loss_fn(model, batch, training), which adds up the losses of the outputs and "
                    "sum(model.losses)",
                )
            if class_weight is not None and training:
                sample_weight = example_weights(_class_labels(y, outputs), class_weight, sample_weight)
            value: Any = fn(y, outputs, sample_weight=sample_weight)
            value += sum(model.losses)
            return value, {name: _mean(metric, y, outputs) for name, metric in means.items()}

        return loss_fn

    def constrained(self, trainable: Tree) -> Tree:
        """Apply the variables' constraints to trainable leaves after an update, as Keras' own optimizers do."""
        constraints = {name: variable.constraint for name, variable in self._variables.items()}
        return {
            name: leaf
            if leaf is None or constraints[name] is None
            else jnp.asarray(constraints[name](leaf), leaf.dtype)
            for name, leaf in trainable.items()
        }

    def call(self, model: Any, batch: Any) -> Any:
        """Return the model's outputs outside of training; the default function of ``predict``.

        Args:
            model: the model that the trainer passes to functions.
            batch: inputs of the model.

        Raises:
            ConfigError: for a model that overrides ``predict_step``, because the override would not be called.
        """
        self._check_not_overridden(("predict_step",), "fn(model, batch), and trainer.predict(data, fn)")
        return model(batch, training=False)

    def arrays(self) -> Tree:
        """See `lowtide.train.ModelObject`.

        Raises:
            StructureError: when variables were added, removed, frozen or unfrozen since the bridge was made.
        """
        current = {id(variable): variable for variable in _variables(self.model)}
        trainable_ids = {id(variable) for variable in self.model.trainable_variables}
        names_by_id = {id(variable): name for name, variable in self._variables.items()}
        changes = {
            "frozen": [
                name
                for key, name in names_by_id.items()
                if key in current and name in self._trainable and key not in trainable_ids
            ],
            "unfrozen": [
                name for key, name in names_by_id.items() if key in trainable_ids and name not in self._trainable
            ],
            "added": [variable.path for key, variable in current.items() if key not in names_by_id],
            "removed": [name for key, name in names_by_id.items() if key not in current],
        }
        hint = "make a new Bridge and a new Trainer after layer.trainable = ... or enable_lora"
        refuse_changes(changes, "the model has changed since its bridge was made", hint)
        return {name: variable._value for name, variable in self._variables.items()}

    def lend(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`. Using a borrowed variable raises, and so does ``Variable.assign``."""
        placeholders = {name: Placeholder(name, leaf) for name, leaf in arrays.items() if leaf is not None}
        for name, placeholder in placeholders.items():
            # `Variable.assign` does not read `_value`, so it would overwrite the placeholder. It raises because this
            # attribute shadows the method `_direct_assign`.
            self._variables[name]._value = placeholder
            self._variables[name]._direct_assign = placeholder.refuse
        self._borrowed = set(placeholders)

    def give_back(self, arrays: Tree) -> None:
        """See `lowtide.train.ModelObject`."""
        values: dict[str, Any] = {}
        for name, variable in self._variables.items():
            if arrays[name] is not None:
                vars(variable).pop("_direct_assign", None)
                values[name], variable._value = variable._value, arrays[name]
        borrowed, self._borrowed = self._borrowed, set[str]()
        check_placeholders(values, borrowed)

    def _check_not_overridden(self, methods: Sequence[str], alternative: str) -> None:
        overridden = [name for name in methods if not _is_of_keras(getattr(self.model, name, None))]
        if overridden:
            problem = f"{type(self.model).__name__} overrides {' and '.join(overridden)}, which would not be called"
            raise ConfigError(problem, hint=f"write {alternative}")

    @contextlib.contextmanager
    def autocast(self, dtype: str) -> Generator[None]:
        """Compute in half precision with Keras' mixed policy inside a ``with`` block; variables stay float32.

        Args:
            dtype: compute dtype, such as ``"bfloat16"``.

        Raises:
            ConfigError: when a layer has a policy other than float32.
        """
        layers = _layers(self.model)
        policies = {layer.name: layer.dtype_policy.name for layer in layers if layer.dtype_policy.name != "float32"}
        if policies:
            got = ", ".join(f"{name}: {policy}" for name, policy in list(policies.items())[:4])
            hint = "leave compute_dtype out: Keras applies the model's policy"
            raise ConfigError("layers of the model have their own dtype policy", got=got, hint=hint)
        # Layers choose their dtype from the policy while the step is traced, so it only has to change during the trace.
        previous = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer.dtype_policy = f"mixed_{dtype}"
            yield
        finally:
            for layer, policy in zip(layers, previous, strict=True):
                layer.dtype_policy = policy

    def bind(self, fn: Callable[..., Any], *, training: bool) -> Callable[..., tuple[Any, Tree]]:
        """See `lowtide.train.ModelObject`. The function must pass `training` to the model's call."""

        def run(arrays: Tree, *args: Any) -> tuple[Any, Tree]:
            mapping = [(variable, arrays[name]) for name, variable in self._variables.items()]
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                # Inside the scope, reads and writes of variables go to the mapping and not to the model.
                result = fn(self.model, *args)
            return result, {name: scope.get_current_value(variable) for name, variable in self._variables.items()}

        return run


def _variables(model: Any) -> list[Any]:
    """Return the model's variables, without variables of metrics, plus variables that Keras does not list.

    The latter are states of recurrent layers with ``stateful=True``. Keras' ``fit`` loses their new values.
    """
    metric_ids = {id(variable) for variable in model.metrics_variables}
    listed = (*model.trainable_variables, *model.non_trainable_variables)
    listed_ids = metric_ids | {id(variable) for variable in listed}
    attributes = [
        item
        for layer in _layers(model)
        for value in vars(layer).values()
        for item in (value if isinstance(value, list | tuple) else [value])
        if isinstance(item, keras.Variable) and not item.trainable
    ]
    unlisted = {id(variable): variable for variable in attributes if id(variable) not in listed_ids}
    return [*(variable for variable in listed if id(variable) not in metric_ids), *unlisted.values()]


def _is_of_keras(method: Any) -> bool:
    """Return whether Keras defines a model's method; a missing method counts as defined by Keras."""
    # `functools.wraps` copies the module's name but not `__globals__`, so the globals identify the real module.
    module = getattr(getattr(method, "__func__", method), "__globals__", {}).get("__name__", "")
    return method is None or module.partition(".")[0] == "keras"


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def _name_variables(variables: list[Any], layers: list[Any]) -> dict[str, Any]:
    """Return variables by path, with Keras' automatic layer numbers counted within the model.

    Keras counts per process. In a rebuilt model ``lstm`` would become ``lstm_1``, and an old checkpoint would not fit.
    """
    automatic_names = {_snake_case(type(layer).__name__) for layer in layers} | {"seed_generator"}
    counts: dict[str, list[str]] = {}

    def renumbered(segment: str) -> str:
        base = re.sub(r"_\d+$", "", segment)
        if base not in automatic_names:
            return segment
        segments = counts.setdefault(base, [])
        if segment not in segments:
            segments.append(segment)
        index = segments.index(segment)
        return f"{base}_{index}" if index else base

    by_name: dict[str, Any] = {}
    for variable in variables:
        name = path = "/".join(map(renumbered, variable.path.split("/")))
        count = 1
        while name in by_name:  # two layers have the same name
            name, count = f"{path}_{count}", count + 1
        by_name[name] = variable
    return by_name


def _snake_case(name: str) -> str:
    """Return Keras' automatic layer name for a class: ``LSTMCell`` becomes ``lstm_cell``."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


class _Loss(keras.losses.Loss):
    """A Keras loss that calls a function; reduction and dtype are Keras' defaults. Keras' own wrapper is private."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(name="loss")
        self._fn = fn

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Compute the loss per example; the ranks of labels and outputs may differ by one axis of size 1."""
        y_true, y_pred = _match_rank(y_true, y_pred), _match_rank(y_pred, y_true)
        return self._fn(y_true, y_pred)


def _match_rank(x: Any, other: Any) -> Any:
    """Match the rank of another array, like Keras: (B,) may become (B, 1), and a last axis of size 1 may be dropped."""
    if x.ndim == other.ndim - 1 == 1 and other.shape[-1] == 1:
        return x[:, None]
    if x.ndim == other.ndim + 1 > 2 and x.shape[-1] == 1:
        return x[..., 0]
    return x


def _resolve_loss(loss: Any) -> keras.losses.Loss:
    try:
        resolved: Any = (
            _select_by_shape("losses", "crossentropy") if loss in ("crossentropy", "ce") else keras.losses.get(loss)
        )
    except (ValueError, TypeError):
        resolved = None
    if not callable(resolved):
        problem = f"the loss must be a Keras loss, its name, or a function of labels and outputs, not {shown(loss)}"
        hint = 'pass for instance bridge.loss("mse"); for several outputs write loss_fn(model, batch, training)'
        raise ConfigError(problem, hint=hint)
    return resolved if isinstance(resolved, keras.losses.Loss) else _Loss(resolved)


def _resolve_metric(name: str, metric: Any) -> Any:
    try:
        kind = {"acc": "accuracy", "ce": "crossentropy"}.get(metric, metric) if isinstance(metric, str) else None
        is_by_shape = kind in ("accuracy", "crossentropy")
        resolved: Any = _select_by_shape("metrics", kind) if is_by_shape else keras.metrics.get(metric)
    except (ValueError, TypeError):
        resolved = None
    is_metric = isinstance(resolved, keras.metrics.Metric)
    is_stateful = is_metric and not isinstance(resolved, keras.metrics.MeanMetricWrapper)
    if is_stateful or not callable(resolved):
        kind = "a mean over examples" if is_stateful else "a Keras metric, its name or a function of labels and outputs"
        hint = "compute it from trainer.predict, for instance in a callback"
        raise ConfigError(f"metric {name!r} must be {kind}, not {shown(metric)}", hint=hint)
    return resolved if is_metric else keras.metrics.MeanMetricWrapper(resolved, name=name)


def _mean(metric: Any, y: Any, outputs: Any) -> Any:
    """Return the mean of a metric over the unmasked examples of a batch."""
    return metric.stateless_result(metric.stateless_update_state(metric.stateless_reset_state(), y, outputs))


def _select_by_shape(module: str, kind: str) -> Callable[..., Any]:
    """Return Keras' crossentropy or accuracy, whose arguments' shapes select the binary, categorical or sparse form."""

    def fn(y_true: Any, y_pred: Any) -> Any:
        if y_pred.shape[-1] == 1:
            labels = "binary"
        else:
            labels = "sparse_categorical" if y_true.ndim < y_pred.ndim or y_true.shape[-1] == 1 else "categorical"
        return getattr(getattr(keras, module), f"{labels}_{kind}")(y_true, y_pred)

    return fn


def _split_batch(batch: Any) -> tuple[Any, Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""  # pyright: ignore[reportUnknownArgumentType]
        problem = f"a batch must be (x, y) or (x, y, sample_weight), not a {type(batch).__name__}{keys}{size}"
        hint = "map the batches to tuples, in which x may be a dictionary, or write loss_fn(model, batch, training)"
        raise DataError(problem, hint=hint)
    x, y, sample_weight = (*batch, None)[:3]
    return x, y, sample_weight


def _class_labels(y: Any, outputs: Any) -> Any:
    """Return the class of each label. Only labels with the shape of the outputs are one-hot, unlike in Keras."""
    if y.ndim > 1 and y.shape[-1] == 1:
        y = y[..., 0]
    elif y.ndim > 1 and y.shape == outputs.shape:
        return jnp.argmax(y, axis=-1)
    return jnp.round(y).astype(jnp.int32)
