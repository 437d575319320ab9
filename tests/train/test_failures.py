"""Whatever goes wrong: the user holds the last good weights afterwards, and `fit` goes on.

Every way to fail is run for a pytree and an NNX module, some for an Equinox module and a Keras model. The weights
after the failure are compared bit for bit with those of a run that stopped there of itself, those of a second `fit`
with an uninterrupted run's.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from typing import Any

import jax
import numpy as np
import pytest

from lowtide.core import StateError
from lowtide.train import Callback
from lowtide.train._step import TrainState

STEPS = 6
SLOW = pytest.mark.slow
KINDS = ("plain", "nnx")
"""Equinox modules are pytrees to a trainer, Keras models lend their arrays as NNX modules do: a few tests have all."""
ALL_KINDS = ("plain", pytest.param("equinox", marks=SLOW), "nnx", pytest.param("keras", marks=SLOW))


class At(Callback):
    """Raise in one of the methods, the first time that it is called with this step."""

    def __init__(self, event: str, step: int, error: BaseException) -> None:
        self.event, self.step, self.error, self.has_raised = event, step, error, False
        setattr(self, event, self._raise)

    def _raise(self, trainer: Any, *arguments: Any) -> None:
        at = arguments[0] if arguments else self.step
        at = at.get("step", self.step) if isinstance(at, dict) else at
        if at == self.step and not self.has_raised:
            self.has_raised = True
            raise self.error


def interrupted(data: list[Any], at: int) -> Any:
    """Batches whose reading is interrupted once."""

    class Interrupted:
        has_raised = False

        def __getitem__(self, step: int) -> Any:
            if step == at and not self.has_raised:
                self.has_raised = True
                raise KeyboardInterrupt
            return data[step]

    return Interrupted()


EVENTS = [
    ("on_step_begin", 3, KeyboardInterrupt()),
    ("on_step_end", 3, RuntimeError("a callback's own mistake")),
    ("on_record", 2, KeyboardInterrupt()),
    ("on_evaluate_begin", 3, KeyboardInterrupt()),
    ("on_evaluate_end", 3, RuntimeError("after validation")),
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "event", "step", "error"),
    # Every event of a pytree, the last one of modules that lend arrays.
    [*(("plain", *event) for event in EVENTS), ("nnx", *EVENTS[-1])],
)
def test_an_exception_in_a_callback(subjects: Any, kind: str, event: str, step: int, error: BaseException) -> None:
    subject = subjects.Subject(kind)
    trainer = subject.trainer()
    options: dict[str, Any] = {"num_steps": STEPS}
    if "evaluate" in event:
        options |= {"eval_data": subjects.batches(2), "eval_every": 3}
    with pytest.raises(type(error)) as raised:
        trainer.fit(subjects.batches(), callbacks=[At(event, step, error)], **options)
    assert f"the trainer holds the state of step {trainer.step}" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, trainer.step))
    trainer.fit(subjects.batches(), **options)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_while_data_is_read(subjects: Any, kind: str) -> None:
    subject, data = subjects.Subject(kind), interrupted(subjects.batches(), 4)
    trainer = subject.trainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, num_steps=STEPS)
    assert trainer.step == 4
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 4))
    trainer.fit(data, num_steps=STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_an_interrupt_in_evaluation(subjects: Any, kind: str, what: str) -> None:
    subject = subjects.Subject(kind)
    trainer = subject.trainer()
    trainer.fit(subjects.batches(), num_steps=3)

    def data() -> Any:
        yield subjects.batches(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if what == "evaluate":
            trainer.evaluate(data())
        else:
            trainer.predict(data(), lambda model, batch: subject.call(model, batch["x"]))
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(subjects.batches(), num_steps=STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_while_the_first_step_compiles(subjects: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, references = subjects.Subject(kind), [subjects.reference(kind, step) for step in (0, STEPS)]
    trainer, compile_ = subject.trainer(), jax.stages.Lowered.compile

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        trainer.fit(subjects.batches(), num_steps=STEPS)
    assert "the trainer holds the state of step 0" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), references[0])
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    trainer.fit(subjects.batches(), num_steps=STEPS)
    subjects.assert_same(subject.weights(trainer), references[1])


class Broken:
    """A loss that fails on the device, after the step has consumed its state, where the batch says so."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def fail(self, flag: Any, value: Any) -> Any:
        if flag:
            raise RuntimeError("planted on the device")
        return np.asarray(value)

    def wrapped(self) -> Any:
        import inspect

        def checked(value: Any, batch: Any) -> Any:
            loss = value[0] if isinstance(value, tuple) else value
            token = jax.pure_callback(
                self.fail, jax.ShapeDtypeStruct((), loss.dtype), batch["fail"], jax.lax.stop_gradient(loss)
            )
            return loss + 0 * jax.lax.stop_gradient(token)

        if "training" in inspect.signature(self.loss).parameters:
            return lambda model, batch, training: checked(self.loss(model, batch, training), batch)
        return lambda model, batch: checked(self.loss(model, batch), batch)


def failing(subjects: Any, at: int | None) -> list[dict[str, Any]]:
    return [{**batch, "fail": np.asarray(step == at)} for step, batch in enumerate(subjects.batches())]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("kind", "at", "saved"),
    [
        *((kind, *case) for kind in KINDS for case in ((0, False), (3, True))),
        *(pytest.param(kind, 3, True, marks=SLOW) for kind in ("equinox", "keras")),
        *(pytest.param("plain", *case, marks=SLOW) for case in ((3, False), (0, True))),
    ],
)
def test_a_step_that_fails_after_it_has_consumed_its_state(
    subjects: Any, kind: str, at: int, saved: bool, tmp_path: Any
) -> None:
    subject = subjects.Subject(kind)
    subject.loss = Broken(subject.loss).wrapped()
    ours = subject.trainer(checkpoint_dir=tmp_path if saved else None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted on the device") as raised:
        ours.fit(failing(subjects, at), num_steps=STEPS, checkpoint_every=2 if saved else None)
    back = 2 if saved and at else 0
    assert f"back at step {back}" in raised.value.__notes__[-1], raised.value.__notes__
    assert ours.step == back
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, back))
    ours.fit(failing(subjects, None), num_steps=STEPS)
    subjects.assert_same(subject.weights(ours), subjects.reference(kind, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_after_validation_fails_on_the_device(subjects: Any, kind: str) -> None:
    """The copy on the host is that of the last epoch's end."""
    subject = subjects.Subject(kind)
    subject.loss = Broken(subject.loss).wrapped()
    trainer, data = subject.trainer(), failing(subjects, None)
    poisoned = [[*data[:3]], [failing(subjects, 3)[3], *data[4:]]]

    class Epochs:
        """Two epochs of three steps."""

        def __init__(self, epochs: list[Any]) -> None:
            self.epochs = epochs

        def __getitem__(self, step: int) -> Any:
            return self.epochs[trainer.step // 3][step]

        def __len__(self) -> int:
            return 3

    with pytest.raises(jax.errors.JaxRuntimeError, match="planted on the device") as raised:
        trainer.fit(Epochs(poisoned), num_epochs=2, eval_data=data[:2])
    assert "back at step 3" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(Epochs([data[:3], data[3:]]), num_epochs=2, eval_data=data[:2])
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, STEPS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_callback_that_closes_over_the_model(subjects: Any, kind: str) -> None:
    """It finds placeholders, or arrays that a step has consumed: an error that is no reason to lose anything."""
    subject = subjects.Subject(kind)
    error: Any = StateError if kind in ("nnx", "keras") else RuntimeError

    class Closes(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                subject.call(subject.model, subjects.batches(1)[0]["x"])

    trainer = subject.trainer()
    with pytest.raises(error, match="a trainer has borrowed this array|deleted") as raised:
        trainer.fit(subjects.batches(), num_steps=STEPS, callbacks=[Closes()])
    assert "the trainer holds the state of step 3" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, 3))
    trainer.fit(subjects.batches(), num_steps=STEPS)
    subjects.assert_same(subject.weights(trainer), subjects.reference(kind, STEPS))


def test_a_state_that_cannot_be_read_is_given_up(subjects: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU returns arrays before it has computed them: when the step fails they exist, and reading them raises."""
    subject, wait = subjects.Subject("plain"), jax.block_until_ready
    trainer = subject.trainer()

    def fail(tree: Any) -> Any:
        if isinstance(tree, TrainState):
            raise jax.errors.JaxRuntimeError("INTERNAL: planted")
        return wait(tree)

    monkeypatch.setattr(jax, "block_until_ready", fail)
    with pytest.raises(RuntimeError, match="planted in step 3") as raised:
        trainer.fit(
            subjects.batches(), callbacks=[At("on_step_end", 3, RuntimeError("planted in step 3"))], num_steps=STEPS
        )
    monkeypatch.setattr(jax, "block_until_ready", wait)
    assert "back at step 0" in raised.value.__notes__[-1]
    subjects.assert_same(subject.weights(trainer), subjects.reference("plain", 0))


def test_without_a_copy_the_error_says_that_the_state_is_gone(subjects: Any) -> None:
    subject = subjects.Subject("plain")
    subject.loss = Broken(subject.loss).wrapped()
    trainer = subject.trainer(rollback=False)
    with pytest.raises(StateError, match=r"(?s)no copy of it.*hint: .*rollback=True or a checkpoint_dir"):
        trainer.fit(failing(subjects, 2), num_steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", pytest.param("keras", marks=SLOW)])
def test_a_model_in_the_middle_of_fit_says_who_has_its_arrays(subjects: Any, kind: str) -> None:
    subject, seen = subjects.Subject(kind), []

    class Closes(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                with pytest.raises(StateError, match=r"(?s)a trainer has borrowed this array.*hint: .*trainer.model"):
                    subject.call(subject.model, subjects.batches(1)[0]["x"])
                seen.append(np.asarray(subject.call(trainer.model, subjects.batches(1)[0]["x"])).shape)

    trainer = subject.trainer()
    trainer.fit(subjects.batches(), num_steps=STEPS, callbacks=[Closes()])
    assert seen == [(8, 2)]


def _halve(kind: str, trainer: Any) -> None:
    """Edit all weights that train, as users of each kind do."""
    model = trainer.model
    if kind == "keras":
        for variable in model.trainable_variables:
            variable.assign(variable.value / 2)
    elif kind == "nnx":
        model.last.kernel[...] = model.last.kernel[...] / 2
    else:
        trainer.update(jax.tree.map(lambda x: x / 2 if isinstance(x, jax.Array) else x, model))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weights_that_a_callback_edits_are_what_training_goes_on_with(subjects: Any, kind: str) -> None:
    class Edits(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                _halve(kind, trainer)

    whole, parts = (subjects.Subject(kind) for _ in range(2))
    ours, theirs = whole.trainer(), parts.trainer()
    ours.fit(subjects.batches(), num_steps=STEPS, callbacks=[Edits()])
    theirs.fit(subjects.batches(), num_steps=3)
    _halve(kind, theirs)
    theirs.fit(subjects.batches(), num_steps=STEPS)
    subjects.assert_same(whole.weights(ours), parts.weights(theirs))
    untouched = subjects.reference(kind, STEPS)
    leaves = zip(jax.tree.leaves(whole.weights(ours)), jax.tree.leaves(untouched), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)
