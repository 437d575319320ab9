"""Whatever goes wrong: the user holds the last good weights afterwards, and `fit` goes on.

Every way to fail is run for a pytree, an Equinox module, an NNX module and a Keras model. The weights after the failure
are compared bit for bit with those of a run that stopped there of itself, those of a second `fit` with an
uninterrupted run's.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import StateError
from lowtide.train import Callback

STEPS = 6
KINDS = ("plain", "equinox", "nnx", "keras")


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def batches(count: int = STEPS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
        for _ in range(count)
    ]


class Subject:
    """A model of one kind, how its loss is computed, and what its weights are outside of a trainer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        make: Callable[[], None] = getattr(self, f"_{kind}")
        make()

    def trainer(self, **options: Any) -> lt.Trainer:
        return lt.Trainer(self.given, self.loss, optax.adam(1e-2), **options)

    def _plain(self) -> None:
        key = jax.random.key(0)
        self.model: Any = {"w": jax.random.normal(key, (4, 2)), "b": jnp.zeros((2,))}
        self.given = self.model
        self.call = lambda model, x: x @ model["w"] + model["b"]
        self.loss = lambda model, batch: jnp.mean((self.call(model, batch["x"]) - batch["y"]) ** 2)
        self.weights = lambda trainer: jax.tree.map(np.array, trainer.model)

    def _equinox(self) -> None:
        import equinox as eqx

        from lowtide.ext.equinox import Bridge

        self.model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        self.given = Bridge(self.model)
        self.call = lambda model, x: jax.vmap(model)(x)
        self.loss = lambda model, batch: jnp.mean((self.call(model, batch["x"]) - batch["y"]) ** 2)
        self.weights = lambda trainer: jax.tree.map(np.array, eqx.filter(trainer.model, eqx.is_array))

    def _nnx(self) -> None:
        from flax import nnx

        from lowtide.ext.nnx import Bridge

        class Net(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.first = nnx.Linear(4, 8, rngs=rngs)
                self.norm = nnx.BatchNorm(8, rngs=rngs)
                self.drop = nnx.Dropout(0.2, rngs=rngs)
                self.last = nnx.Linear(8, 2, rngs=rngs)

            def __call__(self, x: Any) -> Any:
                return self.last(self.drop(self.norm(self.first(x))))

        self.model = Net(nnx.Rngs(0))
        self.given = Bridge(self.model)
        self.call = lambda model, x: model(x)
        self.loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        # The module itself, not by way of the trainer: that is what the user holds.
        def weights(trainer: Any) -> Any:
            keys = nnx.to_pure_dict(nnx.state(self.model, nnx.Not(nnx.RngKey)))
            return jax.tree.map(np.array, keys)

        self.weights = weights

    def _keras(self) -> None:
        import keras

        from lowtide.ext.keras import Bridge

        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, kernel_regularizer="l2"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2, seed=1),
                keras.layers.Dense(2),
            ]
        )
        self.given = Bridge(self.model)
        loss = self.given.loss("mse")
        self.call = lambda model, x: model(x)
        self.loss = lambda model, batch, training: loss(model, (batch["x"], batch["y"]), training)
        self.weights = lambda trainer: [np.array(v.value) for v in self.model.variables]


@functools.cache
def reference(kind: str, num_steps: int) -> Any:
    """The weights of an undisturbed run."""
    subject = Subject(kind)
    trainer = subject.trainer()
    if num_steps:
        trainer.fit(batches(), num_steps=num_steps)
    return subject.weights(trainer)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(theirs)) > 0
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("event", "step", "error"),
    [
        ("on_step_begin", 3, KeyboardInterrupt()),
        ("on_step_end", 3, RuntimeError("a callback's own mistake")),
        ("on_record", 2, KeyboardInterrupt()),
        ("on_evaluate_begin", 3, KeyboardInterrupt()),
        ("on_evaluate_end", 3, RuntimeError("after validation")),
    ],
)
def test_an_exception_in_a_callback(kind: str, event: str, step: int, error: BaseException) -> None:
    subject = Subject(kind)
    trainer = subject.trainer()
    options: dict[str, Any] = {"num_steps": STEPS}
    if "evaluate" in event:
        options |= {"eval_data": batches(2), "eval_every": 3}
    with pytest.raises(type(error)) as raised:
        trainer.fit(batches(), callbacks=[At(event, step, error)], **options)
    assert f"the trainer holds the state of step {trainer.step}" in raised.value.__notes__[-1]
    assert_same(subject.weights(trainer), reference(kind, trainer.step))
    trainer.fit(batches(), **options)
    assert_same(subject.weights(trainer), reference(kind, STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_while_data_is_read(kind: str) -> None:
    subject, data = Subject(kind), interrupted(batches(), 4)
    trainer = subject.trainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, num_steps=STEPS)
    assert trainer.step == 4
    assert_same(subject.weights(trainer), reference(kind, 4))
    trainer.fit(data, num_steps=STEPS)
    assert_same(subject.weights(trainer), reference(kind, STEPS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_an_interrupt_in_evaluation(kind: str, what: str) -> None:
    subject = Subject(kind)
    trainer = subject.trainer()
    trainer.fit(batches(), num_steps=3)

    def data() -> Any:
        yield batches(1)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        if what == "evaluate":
            trainer.evaluate(data())
        else:
            trainer.predict(data(), lambda model, batch: subject.call(model, batch["x"]))
    assert_same(subject.weights(trainer), reference(kind, 3))
    trainer.fit(batches(), num_steps=STEPS)
    assert_same(subject.weights(trainer), reference(kind, STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_while_the_first_step_compiles(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(kind)
    trainer, compile_ = subject.trainer(), jax.stages.Lowered.compile

    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        trainer.fit(batches(), num_steps=STEPS)
    assert "the trainer holds the state of step 0" in raised.value.__notes__[-1]
    assert_same(subject.weights(trainer), reference(kind, 0))
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    trainer.fit(batches(), num_steps=STEPS)
    assert_same(subject.weights(trainer), reference(kind, STEPS))


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


def failing(at: int | None) -> list[dict[str, Any]]:
    return [{**batch, "fail": np.asarray(step == at)} for step, batch in enumerate(batches())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_a_step_that_fails_after_it_has_consumed_its_state(kind: str, at: int, saved: bool, tmp_path: Any) -> None:
    whole = Subject(kind)
    whole.loss = Broken(whole.loss).wrapped()
    trainer = whole.trainer()
    trainer.fit(failing(None), num_steps=STEPS)

    subject = Subject(kind)
    subject.loss = Broken(subject.loss).wrapped()
    ours = subject.trainer(checkpoint_dir=tmp_path if saved else None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted on the device") as raised:
        ours.fit(failing(at), num_steps=STEPS, checkpoint_every=2 if saved else None)
    back = 2 if saved and at else 0
    assert f"back at step {back}" in raised.value.__notes__[-1], raised.value.__notes__
    assert ours.step == back
    assert_same(subject.weights(ours), reference(kind, back))
    ours.fit(failing(None), num_steps=STEPS)
    assert_same(subject.weights(ours), whole.weights(trainer))


def test_without_a_copy_the_error_says_that_the_state_is_gone() -> None:
    subject = Subject("plain")
    subject.loss = Broken(subject.loss).wrapped()
    trainer = subject.trainer(rollback=False)
    with pytest.raises(StateError, match=r"(?s)no copy of it.*expected: a checkpoint, or .*rollback=True.*hint:"):
        trainer.fit(failing(2), num_steps=STEPS)


@pytest.mark.parametrize("kind", ["nnx", "keras"])
def test_a_model_in_the_middle_of_fit_says_who_has_its_arrays(kind: str) -> None:
    subject, seen = Subject(kind), []

    class Closes(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                with pytest.raises(StateError, match=r"(?s)a trainer has this array.*hint: .*trainer.model"):
                    subject.call(subject.model, batches(1)[0]["x"])
                seen.append(np.asarray(subject.call(trainer.model, batches(1)[0]["x"])).shape)

    trainer = subject.trainer()
    trainer.fit(batches(), num_steps=STEPS, callbacks=[Closes()])
    assert seen == [(8, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_callback_edits_are_what_training_goes_on_with(kind: str) -> None:
    subject = Subject(kind)

    class Edits(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step != 3:
                return
            model = trainer.model
            if kind == "keras":
                for variable in model.weights:
                    variable.assign(0 * variable.value)
            elif kind == "nnx":
                model.last.kernel[...] = jnp.zeros_like(model.last.kernel[...])
            else:
                trainer.update(jax.tree.map(lambda x: 0 * x if isinstance(x, jax.Array) else x, model))

    trainer = subject.trainer()
    trainer.fit(batches(), num_steps=3, callbacks=[Edits()])
    weights = subject.weights(trainer)
    edited = {"keras": lambda: weights, "nnx": lambda: weights["last"]["kernel"]}.get(kind, lambda: weights)()
    arrays = [w for w in jax.tree.leaves(edited) if w.dtype == np.float32]
    assert all(not w.any() for w in arrays) and arrays
    trainer.fit(batches(), num_steps=4)
    assert any(w.any() for w in jax.tree.leaves(subject.weights(trainer)) if w.dtype == np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_one_copy_of_the_state_lives_while_steps_run(kind: str) -> None:
    import gc

    subject, live = Subject(kind), []

    class Counts(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.wait()
            gc.collect()
            mine = {id(leaf) for leaf in jax.tree.leaves((trainer.state, trainer.frozen))}
            shapes = {leaf.shape for leaf in jax.tree.leaves(trainer.state.trainable)}
            live.append([a for a in jax.live_arrays() if a.shape in shapes and a.ndim > 1 and id(a) not in mine])

    before = {id(a) for a in jax.live_arrays()}
    trainer = subject.trainer()
    trainer.fit(batches(), num_steps=3, callbacks=[Counts()])
    others = [[a for a in arrays if id(a) not in before and a.shape != (8, 4) and a.shape != (8, 2)] for arrays in live]
    assert others[1:] == [[], []]
