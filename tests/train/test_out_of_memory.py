"""Out of memory, wherever it comes: the user holds the last good weights afterwards, and `fit` goes on.

What a CPU raises is genuine: a program whose temporaries are petabytes compiles there, and fails when it runs, after it
has consumed the state. Only the compiler's refusal is planted, for a CPU's compiler never refuses.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.train import Callback

SLOW = pytest.mark.slow
KINDS = ("plain", "nnx")
"""Equinox modules are pytrees to a trainer, Keras models lend their arrays as NNX modules do: those are in one test."""
WIDE = 16
"""Rows of a batch that is too large; others have half of them."""


def greedy(loss: Any) -> Any:
    """The same loss, which needs petabytes for a wide batch."""

    def add(value: Any, batch: Any) -> Any:
        if batch["x"].shape[0] < WIDE:
            return value
        scalar = jax.lax.stop_gradient(value[0] if isinstance(value, tuple) else value)
        large = jax.lax.optimization_barrier(jnp.broadcast_to(scalar, (2**26, 2**26)))
        nothing = 0 * jnp.sum(jnp.sort(large * scalar, axis=0)[::2])
        return (value[0] + nothing, *value[1:]) if isinstance(value, tuple) else value + nothing

    if "training" in inspect.signature(loss).parameters:
        return lambda model, batch, training: add(loss(model, batch, training), batch)
    return lambda model, batch: add(loss(model, batch), batch)


def with_wide(data: list[Any], at: int) -> list[Any]:
    """The batches, the one of a step repeated until it is wide."""
    return [jax.tree.map(lambda x: np.tile(x, (2, 1)), b) if i == at else b for i, b in enumerate(data)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "at", "saved"),
    [
        *((kind, 3, True) for kind in KINDS),
        *(pytest.param(kind, 3, True, marks=SLOW) for kind in ("equinox", "keras")),
        *(pytest.param("plain", at, False, marks=SLOW) for at in (0, 3)),
    ],
)
def test_while_a_step_runs(subjects: Any, kind: str, at: int, saved: bool, tmp_path: Any) -> None:
    subject, steps = subjects.Subject(kind), subjects.STEPS
    subject.loss = greedy(subject.loss)
    trainer = subject.trainer(checkpoint_dir=tmp_path if saved else None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory allocating") as raised:
        trainer.fit(with_wide(subjects.batches(), at), num_steps=steps, checkpoint_every=2 if saved else None)
    back = 2 if saved else 0
    assert f"had consumed its state; the trainer is back at step {back}" in raised.value.__notes__[-1]
    assert trainer.step == back
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, back))
    trainer.fit(subjects.batches(), num_steps=steps)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, steps))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_while_a_later_step_is_compiled(subjects: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subjects.Subject(kind)
    trainer, compile_ = subject.trainer(), jax.stages.Lowered.compile

    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        if f"tensor<{WIDE}x4xf32>" in self.as_text():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
        return compile_(self, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: planted") as raised:
        trainer.fit(with_wide(subjects.batches(), 3), num_steps=subjects.STEPS)
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(subjects.batches(), num_steps=subjects.STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, subjects.STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_while_a_batch_is_made_ready(subjects: Any, kind: str) -> None:
    """Before anything is consumed."""
    subject, data = subjects.Subject(kind), subjects.batches()
    trainer = subject.trainer()
    data[3] = {**data[3], "x": np.broadcast_to(data[3]["x"][0, 0], (2**26, 2**26))}
    with pytest.raises(MemoryError) as raised:
        trainer.fit(data, num_steps=subjects.STEPS)
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(subjects.batches(), num_steps=subjects.STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, subjects.STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_beside_the_steps(subjects: Any, kind: str, what: str) -> None:
    """In an evaluation inside of `fit`, and in a callback that predicts."""
    subject = subjects.Subject(kind)
    outputs, subject.loss = greedy(lambda model, batch: jnp.mean(subject.call(model, batch["x"]))), greedy(subject.loss)
    trainer, wide = subject.trainer(), with_wide(subjects.batches(1), 0)

    class Predicts(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.predict(wide, outputs)

    asked = {"callbacks": [Predicts()]}
    if what == "evaluate":

        class Widens(list):
            """Good batches at step 0, a wide one from then on."""

            def __iter__(self) -> Any:
                return iter(wide if trainer.step else subjects.batches(1))

        asked = {"eval_data": Widens(), "eval_every": 3}
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory allocating") as raised:
        trainer.fit(subjects.batches(), num_steps=subjects.STEPS, **asked)
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(subjects.batches(), num_steps=subjects.STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, subjects.STEPS))
