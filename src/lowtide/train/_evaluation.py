"""Evaluation and prediction: means of the loss and metrics over batches, and outputs of the model on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import ConfigError, DataError, ModelObject, StateError, StructureError, Tree, combine
from ..distributed import Processes, ShardingRules
from ._compilation import CompiledStep
from ._data import refuse_arrays
from ._state import TrainStateStore
from ._step import TrainingStep, scalar_weight, weighted

_EVALUATION_FOLD = 2**31 - 1
"""Number folded into the random keys of evaluations, instead of the number of a step."""


def _call_model(model: Any, *batch: Tree) -> Any:
    """Return ``model(batch)``; raise `ConfigError` if the model is not callable or also takes a state (Equinox)."""
    if len(batch) == 1 and callable(model):
        return model(*batch)
    arguments = "model, batch" if len(batch) == 1 else "model, state, batch"
    name = type(model).__name__
    raise ConfigError(f"predict cannot call a {name} with a batch", hint=f"predict(data, lambda {arguments}: ...)")


class Evaluation:
    """The compiled functions of evaluation and prediction. Mutable: it caches the last function of a prediction.

    Without `weight`, the weight of a batch is the number of rows of its first array.
    """

    def __init__(
        self,
        step: TrainingStep,
        weight: Callable[[Tree], Any] | None,
        seed: int,
        store: TrainStateStore,
        compiled: CompiledStep,
        processes: Processes,
        sharding: ShardingRules | None,
        model: Any,
    ) -> None:
        self._step, self._weight, self._seed = step, scalar_weight(weight or _num_rows), seed
        self._store, self._compiled, self._processes = store, compiled, processes
        self._out = None if sharding is None else sharding.replicated()
        self._default_fn = getattr(model, "call", _call_model) if isinstance(model, ModelObject) else _call_model
        self._means = jax.jit(self._batch_means, out_shardings=self._out)
        self._cache: tuple[Any, Any] | None = None

    def means(self, data: Iterable[Tree]) -> dict[str, float]:
        """Return the weighted means of the loss and metrics; the device adds them up, and the host reads them once."""
        refuse_arrays(data)
        parts, count, sums = self._store.parts, self._store.state.step, None
        for index, batch in enumerate(self._processes.batches(data)):
            on_device = self._compiled.place(batch, is_training=False)
            batch_sums = self._processes.wait_on_cpu(self._means(parts, count, index, on_device))
            jax.block_until_ready(sums)  # keeps at most two batches on the device, however fast they are read
            sums = batch_sums if sums is None else jax.tree.map(jnp.add, sums, batch_sums)
        if sums is None:
            raise ConfigError("evaluate got no batch", hint="pass at least one batch, from a re-iterable source")
        values, weights = sums
        if not float(weights):
            raise DataError("the weights of an evaluation sum to 0", hint="leave out batches without a target")
        return {name: float(value / weights) for name, value in values.items()}

    def outputs(self, data: Iterable[Tree], fn: Callable[..., Any] | None) -> Iterator[Any]:
        """Return an iterator of a function's outputs; the next batch is dispatched before the host reads an output."""
        refuse_arrays(data)
        target: Callable[..., Any] = self._default_fn if fn is None else fn
        if self._cache is None or self._cache[0] is not target:
            bound = self._step.bind(target)
            self._cache = target, jax.jit(lambda parts, batch: bound(combine(*parts), batch), out_shardings=self._out)
        return self._outputs(self._cache[1], data, self._store.is_averaged)

    def _outputs(self, run: Callable[..., Any], data: Iterable[Tree], is_averaged: bool) -> Iterator[Any]:
        pending: list[Any] = []
        for batch in self._processes.batches(data):
            if self._store.is_averaged != is_averaged:
                raise StateError("predict_batches was called inside of averaged and is read outside, or the reverse")
            # Read the leaves for each batch, because steps may run in between. A variable would keep old leaves alive.
            outputs = run(self._store.parts, self._compiled.place(batch, is_training=False))
            pending.append(self._processes.wait_on_cpu(outputs))
            if len(pending) > 1:
                yield jax.device_get(pending.pop(0))
        yield from map(jax.device_get, pending)

    def _batch_means(self, parts: tuple[Tree, ...], count: Any, index: Any, batch: Tree) -> tuple[dict[str, Any], Any]:
        # A separate key for every batch, different from all keys of training steps.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), _EVALUATION_FOLD), count)
        key = jax.random.fold_in(key, index)
        loss, metrics, _ = self._step.loss(combine(*parts), batch, key=key, training=False)
        weights = self._weight(batch)
        return {name: weighted(value, weights) for name, value in {**metrics, "loss": loss}.items()}, weights


def _num_rows(batch: Tree) -> int:
    """Return the default weight of a batch: the number of rows of its first array, or 1 if it has no array."""
    # A rule that compares the lengths of leaves could choose different rules for two batches of one evaluation.
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)


def join(parts: Sequence[Any]) -> Any:
    """Join outputs of batches along their first axis; raise `StructureError` if structures or shapes differ."""
    if not parts:
        raise ConfigError("predict got no batch", hint="pass at least one batch")
    try:
        return jax.tree.map(lambda *leaves: np.concatenate([np.atleast_1d(leaf) for leaf in leaves]), *parts)
    except ValueError as error:
        shapes = ", ".join(dict.fromkeys(str(jax.tree.map(np.shape, part)) for part in parts))
        hint = "predict_batches returns them one by one"
        raise StructureError(f"outputs of the shapes {shapes} cannot be joined", hint=hint) from error
