"""State of a model after a failed run: `lowtide.Trainer` versus Keras' `fit`, on the same Keras model.

    python benchmarks/failure_matrix.py [--json FILE]

Every row plants one failure in a run of six steps, and answers three questions. Are the model's weights readable? Are
they bitwise equal to those of an undisturbed run of as many steps with the same trainer? Does another `fit` work? With
both trainers, Keras draws dropout's random numbers as state of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
import optax
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.ext.keras import Bridge
from lowtide.train import Callback

STEPS = 6
RNG = np.random.default_rng(0)
DATA = [(RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)) for _ in range(STEPS)]
PLANTED = "planted"
WIDE = 16
"""Rows of a batch for which the model needs petabytes: the program compiles, and fails when it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """State after a failure."""

    failure: str
    """The planted failure."""
    trainer: str
    """The trainer whose `fit` ran."""
    raised: str
    """The exception that the user sees, and its note."""
    weights: str
    """``good`` (equal to those of an undisturbed run), ``other``, or the reason why they cannot be read."""
    fits_again: bool
    """Whether another `fit` works."""


class Failing(keras.layers.Layer):
    """A layer that fails on the device in a chosen call, after the step has consumed its state."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: int | None = None
        self.calls = 0
        self.traces_left: int | None = None
        self.is_refused = False
        """Whether the program contains an operation that the compiler rejects. (A CPU compiler never reports out of
        memory.)
        """

    def call(self, x: Any, training: bool = False) -> Any:
        if self.traces_left is not None:
            self.traces_left -= 1
            if self.traces_left < 0:
                raise RuntimeError(PLANTED)
        scalar = jax.lax.stop_gradient(x[0, 0])
        if self.is_refused:
            scalar = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), x.dtype))(scalar)
        if x.shape[0] == WIDE:
            large = jax.lax.optimization_barrier(jax.numpy.broadcast_to(scalar, (2**26, 2**26)))
            # The callback's result is part of the output, because JAX removes a pure callback whose result is unused.
            scalar = jax.numpy.sort(large * scalar, axis=0)[::2].sum()
        return 0 * jax.pure_callback(self._host, jax.ShapeDtypeStruct((), x.dtype), scalar) + x

    def _host(self, value: Any) -> Any:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError(PLANTED)
        return np.asarray(value)


def make() -> tuple[Any, Failing]:
    """Return the model, and its layer that can fail."""
    keras.utils.set_random_seed(0)
    failing = Failing()
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
    return keras.Sequential([keras.Input((4,)), failing, *layers, keras.layers.Dense(2)]), failing


def batch(step: int, stop_at: int | None = None, wide_at: int | None = None) -> Any:
    """Return the batch of a step, or interrupt the run before it, or return a batch that is too large."""
    if step == stop_at:
        raise KeyboardInterrupt
    return tuple(np.tile(x, (2, 1)) for x in DATA[step]) if step == wide_at else DATA[step]


def batches(stop_at: int | None = None, wide_at: int | None = None) -> Iterator[Any]:
    """Return the batches of a run."""
    return (batch(step, stop_at, wide_at) for step in range(STEPS))


class Keras:
    """The trainer of Keras: `fit`, `evaluate` and `predict` of the model."""

    name = "keras"

    def __init__(self) -> None:
        self.model, self.failing = make()
        self.model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse", jit_compile=True)

    def fit(self, count: int, *, event: Callable[[Any, int], None] | None = None, **planted: int | None) -> None:
        hook = keras.callbacks.LambdaCallback(on_train_batch_end=lambda at, logs: event and event(self.model, at + 1))
        data = batches(**planted)
        self.model.fit(data, steps_per_epoch=count, epochs=1, verbose=0, callbacks=[hook])

    def fit_validated(self) -> None:
        """Train one epoch, validate, and interrupt when the first step after the validation has ended."""

        class Next(keras.callbacks.Callback):
            epoch = 0

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if self.epoch == 1:
                    raise KeyboardInterrupt

        steps = {"steps_per_epoch": 3, "validation_steps": 2, "epochs": 2}
        self.model.fit(batches(), validation_data=batches(), verbose=0, callbacks=[Next()], **steps)

    def evaluate(self, stop_at: int) -> None:
        self.model.evaluate(batches(stop_at), steps=STEPS, verbose=0)

    def predict(self, stop_at: int) -> None:
        self.model.predict(((x,) for x, _ in batches(stop_at)), steps=STEPS, verbose=0)


class Ours:
    """`lowtide.Trainer` on the same model."""

    name = "lowtide"

    def __init__(self) -> None:
        self.model, self.failing = make()
        bridge = Bridge(self.model)
        self.trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.adam(1e-2))

    def fit(self, count: int, *, event: Callable[[Any, int], None] | None = None, **planted: int | None) -> None:
        class Hook(Callback):
            def on_step_end(self, trainer: Any, step: int) -> None:
                if event is not None:
                    event(trainer, step)

        class Data:
            def __getitem__(self, step: int) -> Any:
                return batch(step % STEPS, **planted)

        self.trainer.fit(Data(), num_steps=self.trainer.step + count, callbacks=[Hook()])

    def fit_validated(self) -> None:
        class Next(Callback):
            def on_step_end(self, trainer: Any, step: int) -> None:
                if step == 4:
                    raise KeyboardInterrupt

        self.trainer.fit(DATA, num_steps=STEPS, eval_data=DATA[:2], eval_every=3, callbacks=[Next()])

    def evaluate(self, stop_at: int) -> None:
        self.trainer.evaluate(batches(stop_at))

    def predict(self, stop_at: int) -> None:
        self.trainer.predict(x for x, _ in batches(stop_at))


def raise_at(step: int) -> Callable[[Any, int], None]:
    """Return a callback that raises KeyboardInterrupt after a step."""

    def event(_: Any, at: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    return event


def fails_at(subject: Any, call: int) -> None:
    """Fail on the device in a call of the layer, counted from 1."""
    subject.failing.fail_at = subject.failing.calls + call
    subject.fit(STEPS)


def closes_over(subject: Any) -> None:
    """Train with a callback that reads the model: for ours through the trainer, which provides the arrays."""

    def event(given: Any, at: int) -> None:
        if at == 3:
            model = given.model if isinstance(given, lt.Trainer) else subject.model
            [np.array(variable.value) for variable in model.variables]

    subject.fit(4, event=event)


def compile_error(subject: Any) -> None:
    """Raise an exception while the first step is traced. Keras traces the model once before that, to build it."""
    subject.failing.traces_left = 1 if isinstance(subject, Keras) else 0
    try:
        subject.fit(STEPS)
    finally:
        subject.failing.traces_left = None


def refused(subject: Any) -> None:
    """Train a step that the compiler rejects."""
    subject.failing.is_refused = True
    try:
        subject.fit(STEPS)
    finally:
        subject.failing.is_refused = False


def edit(subject: Any) -> None:
    """Change the weights, as the callback does."""
    model = subject.trainer.model if isinstance(subject, Ours) else subject.model
    for variable in model.trainable_variables:
        variable.assign(jax.numpy.full(variable.shape, 0.01))


def edits(subject: Any) -> None:
    """Train with a callback that changes the weights after the third step."""

    def event(_: Any, at: int) -> None:
        if at == 3:
            edit(subject)

    subject.fit(3, event=event)


FAILURES: dict[str, tuple[Callable[[Any], None], int]] = {
    "interrupt in a callback": (lambda s: s.fit(STEPS, event=raise_at(3)), 3),
    "interrupt in the data": (lambda s: s.fit(STEPS, stop_at=3), 3),
    "interrupt in evaluate": (lambda s: (s.fit(3), s.evaluate(2)), 3),
    "interrupt in predict": (lambda s: (s.fit(3), s.predict(2)), 3),
    "exception in the first step": (compile_error, 0),
    "compiler refuses the first step": (refused, 0),
    "failure on the device, first step": (lambda s: fails_at(s, 1), 0),
    "failure on the device, third step": (lambda s: fails_at(s, 3), 0),
    "failure: out of memory, third step": (lambda s: s.fit(STEPS, wide_at=2), 0),
    "interrupt after validation": (lambda s: s.fit_validated(), 4),
    "callback that reads the model": (closes_over, 4),
    "callback that edits the weights": (edits, 3),
}
"""Failures, and the step whose weights are good afterwards. After a failure on the device this is the step where `fit`
began, because the trainer keeps a copy of it on the host.
"""


def weights(model: Any) -> list[np.ndarray] | str:
    """Return the weights, or the reason why they cannot be read."""
    try:
        values = [np.array(variable.value) for variable in model.variables]
    except Exception as error:  # any exception of Keras or JAX
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return values if all(value.dtype != object for value in values) else "None"


def outcome(make_subject: Callable[[], Any], failure: str) -> Outcome:
    """Plant one failure and describe the state after it."""
    plant, good_step = FAILURES[failure]
    undisturbed = make_subject()
    if plant is closes_over and isinstance(undisturbed, Keras):
        good_step = 3  # in Keras the callback itself raises
    if good_step:
        undisturbed.fit(good_step)
    if plant is edits:
        edit(undisturbed)
    reference, subject, raised = weights(undisturbed.model), make_subject(), "nothing"
    try:
        plant(subject)
    except BaseException as error:  # includes KeyboardInterrupt
        note = getattr(error, "__notes__", [""])[-1]
        raised = f"{type(error).__name__}{': ' + note if 'trainer' in note else ''}"
    left = weights(subject.model)
    if isinstance(left, list) and isinstance(reference, list):
        same = all(np.array_equal(a, b) for a, b in zip(left, reference, strict=True))
        left = "good" if same else "other than at any whole step" if failure.startswith("failure") else "other"
    subject.failing.fail_at = None
    try:
        subject.fit(2)
        again = isinstance(weights(subject.model), list)
    except Exception:
        again = False
    return Outcome(failure=failure, trainer=subject.name, raised=raised, weights=str(left), fits_again=again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", default=ROOT / "results" / "failure_matrix.json", help="where to write the raw result"
    )
    options = parser.parse_args()
    table = Table("failure", "trainer", "raised", "weights", "another fit")
    rows: list[Outcome] = []
    for failure in FAILURES:
        for subject in (Keras, Ours):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(outcome(subject, failure))
            last = rows[-1]
            table.add_row(failure, last.trainer, last.raised, last.weights, "works" if last.fits_again else "fails")
    Console(width=170).print(table)
    content = {**header("python benchmarks/failure_matrix.py"), "keras": keras.__version__}
    write(Path(options.json), {**content, "rows": [dataclasses.asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
