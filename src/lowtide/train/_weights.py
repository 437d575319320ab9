"""Weights of elements, from the weights of their classes and their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import ConfigError, DataError, StructureError


def example_weights(
    labels: Any, class_weight: Mapping[int, float] | Sequence[float], sample_weight: Any | None = None
) -> Any:
    """Return the weight of each element: the weight of its class times its own.

    A loss function uses the weights for a weighted mean, and `Trainer` gets their sum. Means over microbatches and over
    the batches of an evaluation are then means over all elements:
    ``Trainer(..., weight=lambda batch: jnp.sum(example_weights(batch["y"], class_weight)))``.

    Args:
        labels: classes as integers, of any shape. Floating-point labels are one-hot [..., C] (the largest counts), or
            binary, [...] or [..., 1], and rounded.
        class_weight: a mapping from class to weight; a class that is not in it has weight 1, as in Keras
            (``{-1: 0.0}`` leaves padding out). Or a sequence with a weight for each of the classes 0 to C - 1.
        sample_weight: float [...], weights of the elements, or None.

    Returns:
        float32 [...]: a NumPy array for NumPy arrays, else a JAX array.

    Raises:
        ConfigError: when `class_weight` is empty, negative, not finite, or has classes that are not integers.
        DataError: when a label is not one of the C classes, or a sample's weight is negative or not finite. This
            applies only to NumPy arrays. In a traced function such a label has weight NaN, which `Trainer`'s ``on_nan``
            detects, and weights of samples are not checked.
        StructureError: when `sample_weight` has another shape than the classes.

    Examples:
        >>> example_weights(np.array([0, 1, 1]), {1: 5.0}).tolist()
        [1.0, 5.0, 5.0]
        >>> example_weights(np.array([0, 1, 1]), [1.0, 5.0], sample_weight=np.array([1.0, 1.0, 0.5])).tolist()
        [1.0, 5.0, 2.5]

    References:
        https://keras.io/api/models/model_training_apis/#fit-method, ``class_weight`` and ``sample_weight``.
    """
    numpy: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in (labels, sample_weight)) else np
    classes, values = _class_table(class_weight)
    ids = _class_ids(numpy.asarray(labels), numpy)
    index = numpy.clip(numpy.searchsorted(classes, ids), 0, len(classes) - 1)
    has_weight = numpy.asarray(classes)[index] == ids
    if not isinstance(class_weight, Mapping) and numpy is np and not has_weight.all():
        raise DataError(
            "a label is not one of the classes that have a weight",
            expected=f"0 to {len(classes) - 1}",
            got=ids[~has_weight].flat[0],
            hint="pass more weights, or a dictionary, in which other classes have weight 1",
        )
    default_weight = 1.0 if isinstance(class_weight, Mapping) else np.nan
    weights = numpy.where(has_weight, numpy.asarray(values)[index], numpy.float32(default_weight))
    return weights if sample_weight is None else weights * _validate(numpy.asarray(sample_weight), ids.shape, numpy)


def _class_table(class_weight: Mapping[int, float] | Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes in ascending order, and their weights."""
    is_mapping = isinstance(class_weight, Mapping)
    try:
        pairs: list[tuple[Any, Any]] = list(class_weight.items() if is_mapping else enumerate(class_weight))
        values = np.array([value for _, value in pairs], np.float32)
    except (TypeError, ValueError):  # neither a mapping nor a sequence, or not of numbers
        pairs, values = [], np.zeros(0)
    are_classes = all(isinstance(key, int | np.integer) and abs(int(key)) < 2**31 for key, _ in pairs)
    if not pairs or not are_classes or values.ndim != 1 or not np.all(np.isfinite(values) & (values >= 0)):
        raise ConfigError(
            "class_weight does not have a valid weight for each class",
            expected="weights of at least 0 by class, such as {0: 1.0, 1: 5.0}, or one for each class in order",
            got=repr(class_weight),
            hint="number the classes from 0; a weight of 0 leaves a class out",
        )
    classes = np.array([key for key, _ in pairs], np.int32)
    order = np.argsort(classes)
    return classes[order], values[order]


def _class_ids(labels: Any, numpy: Any) -> Any:
    """Return the class of each label."""
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        return labels.astype(np.int32)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        return numpy.argmax(labels, axis=-1).astype(np.int32)
    return numpy.round(labels[..., 0] if labels.ndim > 1 else labels).astype(np.int32)


def _validate(sample_weight: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    if sample_weight.shape != shape:
        raise StructureError(
            "sample_weight does not have the shape of the labels",
            expected=f"one weight for each label, {list(shape)}",
            got=list(sample_weight.shape),
            hint="jnp.broadcast_to repeats the weight of an example for every position of a sequence",
        )
    if numpy is np and not np.all(np.isfinite(sample_weight) & (sample_weight >= 0)):
        raise DataError(
            "a sample has a weight that is negative or not finite",
            expected="weights of at least 0",
            got=sample_weight[~(np.isfinite(sample_weight) & (sample_weight >= 0))].flat[0],
            hint="a weight of 0 leaves a sample out",
        )
    return sample_weight.astype(np.float32)
