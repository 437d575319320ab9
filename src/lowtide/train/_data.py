"""Training data: the position of a run in its batches, batches of arrays, and weights of examples.

Data is either indexed by step number or an iterable that is read once per epoch. Data by step number resumes at any
step. An iterator with a state (``get_state`` of Grain) resumes from it. For any other iterator, the batches that were
already used are skipped.
"""

from __future__ import annotations

import base64
import enum
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from ..core import ConfigError, DataError, StructureError, Tree, check_integer, leaves_with_paths, require_extra, shown


@runtime_checkable
class StepData(Protocol):
    """Batches by step number, such as a list or a `grain.MapDataset`, so that a run can resume at any step."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the batch of a step."""
        ...


class DataEnd(enum.Enum):
    """Values that `DataCursor.next` returns in place of a batch."""

    EPOCH = "end of epoch"
    RUN = "end of run"


class DataCursor:
    """Position of a run in its training data. Mutable: every batch moves it.

    The run ends after `num_steps` or `num_epochs`, whichever comes first; None means no such limit.
    """

    def __init__(self, data: StepData | Iterable[Tree], num_steps: int | None, num_epochs: int | None) -> None:
        if num_steps is None and num_epochs is None:
            raise ConfigError("fit needs an end", expected="num_steps or num_epochs", hint="fit(data, num_steps=1000)")
        for name, number in (("num_steps", num_steps), ("num_epochs", num_epochs)):
            if number is not None:
                check_integer(name, number, 0)
        refuse_arrays(data)
        is_indexed = isinstance(data, StepData)
        self._data: Any = data
        self._is_indexed, self._num_steps, self._num_epochs = is_indexed, num_steps, num_epochs
        self._length: int | None = None
        if is_indexed and num_epochs is not None:
            if not hasattr(data, "__len__"):
                hint = "pass num_steps"
                raise ConfigError(f"num_epochs needs data with a length, not {type(data).__name__}", hint=hint)
            self._length = len(self._data)
            if not self._length:
                raise DataError("the data has no batch", got="a length of 0", hint="pass at least one batch")
        # A Grain dataset also returns batches beyond its length: those of later epochs, shuffled again.
        grain = sys.modules.get("grain")
        self._has_later_epochs = grain is not None and isinstance(data, grain.MapDataset)
        self._iterator: Any = None
        self._index_in_epoch = 0
        self.epoch = 0
        self._batch_position: tuple[int | None, dict[str, Any]] = None, {}
        """Number of a step and the position of its batch; set before the batch is read."""
        self._last_batch: list[Any] = []
        """The last batch, if the iterator cannot return it again; otherwise empty."""
        self._unused_batch: list[Any] = []
        """A batch that was read but not trained on, and comes next; otherwise empty."""
        self._end_position: Mapping[str, Any] | None = None
        self._is_rolled_back = False

    def end_run(self, step: int, position: Mapping[str, Any]) -> None:
        """End the run after `step` steps; a batch that was read but not trained on comes first in the next run."""
        self._end_position = position
        if step == self._batch_position[0] and self._last_batch:
            self._unused_batch, self._last_batch = self._last_batch, []
            self._index_in_epoch = self._batch_position[1]["in_epoch"]
        if not self._is_single_pass:
            self.close()

    def end_after_rollback(self, position: Mapping[str, Any] | None) -> None:
        """End the run after a rollback to the restored `position`, from which the iterator cannot continue."""
        self._end_position, self._is_rolled_back = position, True
        self.close()

    def close(self) -> None:
        """Close the iterator, unless it belongs to the user."""
        iterator, self._iterator = self._iterator, None
        self._close(iterator)

    def continue_from(self, previous: DataCursor | None, position: Mapping[str, Any] | None) -> bool:
        """Continue where the previous run ended, or begin a new iterable; return False if `start` has to be called.

        `position` is what the trainer stores now. If it is not the object that the previous run stored, the trainer was
        restored since, and the result is False. A new iterable begins with its first batch.
        """
        if previous is None or previous._end_position is not position:
            return False
        if previous._is_rolled_back and self._is_single_pass:
            if previous._data is self._data:
                self._refuse_rewind("to the step that was restored")
            self.epoch = (position or {}).get("epoch", 0)
            return True  # a new iterator is used from its first batch
        if previous._is_rolled_back:
            return False
        if previous._data is not self._data and not self._is_indexed:
            self.epoch = previous.epoch
            return True
        if previous._data is not self._data or not self._is_single_pass:
            return False
        self.epoch, self._index_in_epoch = previous.epoch, previous._index_in_epoch
        self._iterator, self._unused_batch = previous._iterator, previous._unused_batch
        return True

    def _refuse_rewind(self, target: str) -> NoReturn:
        hint = "pass a list, a grain dataset, or an object whose __iter__ starts from the beginning"
        raise DataError(f"the data cannot go back {target}: a {type(self._data).__name__} cannot restart", hint=hint)

    @property
    def limits(self) -> dict[str, int | None]:
        return {"num_steps": self._num_steps, "num_epochs": self._num_epochs}

    @property
    def is_over(self) -> bool:
        """Whether all epochs have ended."""
        return self._num_epochs is not None and self.epoch >= self._num_epochs

    @property
    def _is_single_pass(self) -> bool:
        """Whether the data is an iterator that cannot restart, such as a generator."""
        return not self._is_indexed and hasattr(self._data, "__next__") and not hasattr(self._data, "get_state")

    @property
    def num_steps(self) -> int | None:
        """Step at which the run ends, or None if unknown."""
        ends = [self._num_steps]
        ends.append(self._num_epochs * self._length if self._num_epochs is not None and self._length else None)
        return min((end for end in ends if end is not None), default=None)

    def start(self, step: int, position: Mapping[str, Any] | None = None) -> None:
        """Go to the batch after `step` steps, with a saved `position` if there is one. Raise `DataError` on failure."""
        if self._is_indexed:
            if self._length:
                self.epoch, self._index_in_epoch = divmod(step, self._length)
                saved_position = (position or {}).get("epoch"), (position or {}).get("in_epoch")
                if saved_position == (self.epoch - 1, self._length):
                    # Saved between an epoch's last step and its end: the evaluation at the end is still to come.
                    self.epoch, self._index_in_epoch = self.epoch - 1, self._length
            return
        if position is not None and "num_processes" in position:
            problem = f"{position['num_processes']} processes with parts of the data have read {step} steps of it"
            hint = "data by step number (lowtide.train.array_data, a grain.MapDataset) resumes on any number"
            raise DataError(f"{problem}, and the processes of this run do not match them", hint=hint)
        if step and position is None:
            position = {"epoch": 0, "in_epoch": step}
        self.epoch = 0 if position is None else position["epoch"]
        if position is None or (not position["in_epoch"] and position.get("iterator") is None):
            return
        self._iterator = iter(self._data)
        if position.get("iterator") is not None and hasattr(self._iterator, "set_state"):
            self._iterator.set_state(_decode_state(position["iterator"]))
            self._index_in_epoch = position["in_epoch"]
            return
        if self._iterator is self._data:
            self._refuse_rewind(f"to step {step}")
        warnings.warn(
            f"the data has no state, so {position['in_epoch']} batches are skipped to reach step {step}\n"
            "hint: a grain dataset reaches any step at once",
            UserWarning,
            stacklevel=3,
        )
        for number in range(position["in_epoch"]):
            if isinstance(self.next(-1), DataEnd):
                raise DataError(
                    f"step {step} follows {position['in_epoch']} batches of an epoch, but the data has only {number}",
                    hint="pass the data of the run that is resumed",
                )

    def go_back(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Go to an earlier step of this run; raise `DataError` for an iterator that cannot start again."""
        if self._is_single_pass:
            self._refuse_rewind(f"to step {step}")
        self._close(self._iterator)
        self._iterator, self._index_in_epoch, self._unused_batch = None, 0, []
        self.start(step, position)

    def position(self, step: int | None = None) -> dict[str, Any]:
        """Return the position in the data, as plain values for JSON.

        If the batch that follows `step` steps was already read, this is the position before that batch.
        """
        if step is not None and step == self._batch_position[0]:
            return {**self._batch_position[1]}
        state = self._iterator.get_state() if hasattr(self._iterator, "get_state") else None
        return {"epoch": self.epoch, "in_epoch": self._index_in_epoch, "iterator": _encode_state(state)}

    def next(self, step: int) -> Tree | DataEnd:
        """Return the batch after `step` steps, or `DataEnd`; raise `DataError` when the data ends before the run."""
        if self._length is not None and self._index_in_epoch == self._length:
            return self._end_epoch(step)
        position = self.position()
        self._batch_position, self._last_batch = (step, position), []
        if self.is_over or (self._num_steps is not None and step >= self._num_steps):
            return DataEnd.RUN
        index = step % self._length if self._length and not self._has_later_epochs else step
        try:
            if self._is_indexed:
                batch = self._data[index]
            elif self._unused_batch:
                batch = self._unused_batch[0]
            else:
                self._iterator = iter(self._data) if self._iterator is None else self._iterator
                batch = next(self._iterator)
        except (IndexError, StopIteration) as error:
            has_batch = not self._is_indexed or (hasattr(self._data, "__len__") and index < len(self._data))
            if isinstance(error, IndexError) and has_batch:
                raise  # an error inside the user's dataset
            if not self._is_indexed and self._index_in_epoch and (self._num_epochs or self._iterator is not self._data):
                return self._end_epoch(step)
            raise DataError(
                f"the data has no batch for step {step}" + (f" of {self._num_steps} steps" if self._num_steps else ""),
                hint="pass data that repeats, such as a grain.MapDataset with .repeat(), or lower num_steps",
            ) from error
        self._last_batch, self._unused_batch = [batch] if self._is_single_pass else [], []
        self._index_in_epoch += 1
        return batch

    def _end_epoch(self, step: int) -> DataEnd:
        iterator = self._iterator
        self.epoch, self._index_in_epoch, self._iterator = self.epoch + 1, 0, None
        self._batch_position = step, self.position()
        self._close(iterator)
        return DataEnd.EPOCH

    def _close(self, iterator: Any) -> None:
        """Close an iterator that the cursor has made."""
        # If a Grain iterator is only dropped, the garbage collector waits for its threads, in any thread.
        if iterator is not self._data and hasattr(iterator, "close"):
            iterator.close()


IN_ORDER = "seed=None, drop_remainder=False"
"""Arguments with which `array_data` returns every element once and in order, as outputs and evaluations need."""


def refuse_arrays(data: Any) -> None:
    """Raise `DataError` for arrays, and for other objects that cannot be a series of batches."""
    is_pair = isinstance(data, tuple) and any(map(_is_array, data))  # (x, y): whole arrays
    if is_pair or isinstance(data, Mapping) or _is_array(data) or not isinstance(data, StepData | Iterable):
        kind = "a tuple of arrays" if is_pair else type(data).__name__
        hint = f"lowtide.train.array_data splits arrays ({IN_ORDER} keeps their order); pass one batch as [batch]"
        raise DataError(f"the data must be a list, a dataset or an iterable of batches, not {kind}", hint=hint)


def _is_array(data: Any) -> bool:
    """Return whether `data` is an array, a tensor of another library, or a data frame."""
    return isinstance(data, np.ndarray | jax.Array) or (hasattr(data, "__array__") and hasattr(data, "shape"))


def _encode_state(state: Any) -> Any:
    """Convert an iterator's state to JSON; Grain's states are dictionaries or bytes."""
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _decode_state(state: Any) -> Any:
    return base64.b64decode(state["base64"]) if isinstance(state, dict) and set(state) == {"base64"} else state


def array_data(arrays: Tree, batch_size: int, *, seed: int | None = 0, drop_remainder: bool = True) -> Any:
    """Return batches of arrays, shuffled anew in every epoch unless `seed` is None.

    Args:
        arrays: a pytree of arrays, whose first axes have one length: the number of elements.
        batch_size: number of elements in a batch.
        seed: seed of the order; None keeps the order of the arrays.
        drop_remainder: drop the last elements if they do not fill a batch (such a batch would need another
            compilation).

    Returns:
        A `grain.MapDataset` with the batches of one epoch, for ``fit(..., num_epochs=...)``.

    Raises:
        DataError: for leaves that are no arrays or have no axis, for different lengths, or if no batch can be filled.
        ConfigError: when Grain is not installed.

    Memory:
        NumPy arrays are not copied; JAX arrays on an accelerator are copied to the host. One batch is made at a time.

    Examples:
        >>> data = array_data({"x": np.arange(6.0), "y": np.arange(6)}, batch_size=2, seed=None)
        >>> len(data), data[1]["x"].tolist()
        (3, [2.0, 3.0])
    """
    require_extra("train")
    import grain

    leaves = leaves_with_paths(arrays)
    lengths = {path: int(np.shape(leaf)[0]) if np.ndim(leaf) else -1 for path, leaf in leaves}
    if not leaves or -1 in lengths.values():
        kinds = ", ".join(f"{path or '(root)'}: {type(leaf).__name__}" for path, leaf in leaves[:4]) or "no array"
        hint = "np.asarray converts lists"
        raise DataError(f"array_data needs arrays whose first axis is the examples, not {kinds}", hint=hint)
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        raise DataError(f"the arrays have different numbers of examples, {sizes}", hint="cut them: arrays[:n]")
    length = next(iter(lengths.values()))
    if drop_remainder and not length:
        raise DataError("the arrays have a length of 0", hint="check where the examples were lost")
    check_integer("batch_size", batch_size, 1, length if drop_remainder else None, error=DataError)
    arrays = jax.tree.map(np.asarray, arrays)
    order = grain.MapDataset.range(length)
    order = order if seed is None else order.seed(seed).shuffle()
    return order.batch(batch_size, drop_remainder=drop_remainder, batch_fn=np.asarray).map(
        lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays)
    )


# --- weights of elements, from the weights of their classes and their own --------------------------------------------


def example_weights(
    labels: Any, class_weight: Mapping[int, float] | Sequence[float], sample_weight: Any | None = None
) -> Any:
    """Return the weight of each element: the weight of its class times its `sample_weight`.

    Use the weights for a weighted mean in the loss function, and pass their sum to `Trainer`. Means over microbatches
    and over the batches of an evaluation are then means over all elements:
    ``Trainer(..., weight=lambda batch: jnp.sum(example_weights(batch["y"], class_weight)))``.

    Args:
        labels: integer classes of any shape. Or floating-point labels: one-hot, [..., C], whose argmax is the class;
            or binary, [B] or [..., 1], which are rounded to the class.
        class_weight: a mapping from class to weight; a class that is not in it has weight 1, as in Keras
            (``{-1: 0.0}`` leaves padding out). Or a sequence with a weight for each of the classes 0 to C - 1.
        sample_weight: weights of the elements, of the shape of the classes; None for 1.

    Returns:
        float32, of the shape of the classes: a JAX array if `labels` or `sample_weight` is one, else a NumPy array.

    Raises:
        ConfigError: when `class_weight` is empty, negative, not finite, or has classes that are not integers.
        DataError: when a sequence `class_weight` has no weight for a label, or `sample_weight` is negative or not
            finite. JAX arrays are not checked: a label without a weight gets NaN, which ``on_nan`` detects.
        StructureError: when the shape of `sample_weight` differs from that of the classes.

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
        problem = f"a label is {ids[~has_weight].flat[0]}, but only classes 0 to {len(classes) - 1} have a weight"
        raise DataError(problem, hint="pass more weights, or a dictionary, in which other classes have weight 1")
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
        problem = f"class_weight must have a weight of at least 0 for each class, not {shown(class_weight)}"
        hint = "number the classes from 0, as in {0: 1.0, 1: 5.0}; a weight of 0 leaves a class out"
        raise ConfigError(problem, hint=hint)
    classes = np.array([key for key, _ in pairs], np.int32)
    order = np.argsort(classes)
    return classes[order], values[order]


def _class_ids(labels: Any, numpy: Any) -> Any:
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        return labels.astype(np.int32)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        return numpy.argmax(labels, axis=-1).astype(np.int32)
    return numpy.round(labels[..., 0] if labels.ndim > 1 else labels).astype(np.int32)


def _validate(sample_weight: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    if sample_weight.shape != shape:
        problem = f"sample_weight has the shape {list(sample_weight.shape)}, but the labels have {list(shape)}"
        hint = "jnp.broadcast_to repeats the weight of an example for every position of a sequence"
        raise StructureError(problem, hint=hint)
    if numpy is np and not np.all(np.isfinite(sample_weight) & (sample_weight >= 0)):
        invalid = sample_weight[~(np.isfinite(sample_weight) & (sample_weight >= 0))].flat[0]
        raise DataError(f"a sample's weight must be finite and at least 0, not {invalid}", hint="0 leaves a sample out")
    return sample_weight.astype(np.float32)
