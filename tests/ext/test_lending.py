"""What is written into a model while a trainer has its arrays is refused or reported, and the model ends up whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import StateError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
HUNDRED = np.full((4, 1), 100, np.float32)


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def made(kind: str) -> tuple[Any, lt.Trainer, Any]:
    """A linear model, its trainer, and a function that reads its kernel."""
    if kind == "keras":
        import keras

        from lowtide.ext.keras import Bridge

        keras.utils.set_random_seed(0)
        model: Any = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        bridge = Bridge(model)
        trainer = lt.Trainer(bridge, bridge.loss(lambda y, out: (out - 1.0) ** 2), optax.sgd(0.1))
        return model, trainer, lambda: np.array(model.layers[0].kernel.value)
    from flax import nnx

    from lowtide.ext.nnx import Bridge as Module

    net = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    trainer = lt.Trainer(Module(net), lambda m, b: jnp.mean((m(b[0]) - 1.0) ** 2), optax.sgd(0.1))
    return net, trainer, lambda: np.array(net.kernel.get_raw_value())


def load_weights(model: Any, folder: Any) -> None:
    model.load_weights(folder / "it.weights.h5")


def update(model: Any, folder: Any) -> None:
    from flax import nnx

    nnx.update(model, {"kernel": jnp.asarray(HUNDRED)})


def replace(model: Any, folder: Any) -> None:
    from flax import nnx

    model.kernel = nnx.Param(jnp.asarray(HUNDRED))


EDITS: dict[str, tuple[str, Any]] = {
    "assign": ("keras", lambda model, folder: model.layers[0].kernel.assign(HUNDRED)),
    "set_weights": ("keras", lambda model, folder: model.set_weights([HUNDRED, np.zeros(1)])),
    "load_weights": ("keras", load_weights),
    "_value": ("keras", lambda model, folder: setattr(model.layers[0].kernel, "_value", jnp.asarray(HUNDRED))),
    "item": ("nnx", lambda model, folder: model.kernel.__setitem__(..., jnp.asarray(HUNDRED))),
    "update": ("nnx", update),
    "replace": ("nnx", replace),
}
AT_ONCE = ("assign", "set_weights", "load_weights", "item")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_written_over_a_placeholder_raises_and_the_model_ends_with_the_trainer_s_arrays(
    edit: str, tmp_path: Any
) -> None:
    kind, write = EDITS[edit]
    want, trainer, kernel_of = made(kind)
    steps = 2 if edit in AT_ONCE else 4
    trainer.fit([(X, X)] * steps, num_steps=steps, progress=False)
    want = kernel_of()
    model, trainer, kernel_of = made(kind)
    if edit == "load_weights":
        model.save_weights(tmp_path / "it.weights.h5")

    class Edit(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                write(model, tmp_path)

    text = "a trainer has borrowed this array" if edit in AT_ONCE else "kernel: changed in the model"
    error = ValueError if edit == "load_weights" else StateError  # Keras wraps it
    with pytest.raises(error, match=rf"(?s){text}.*hint: in a callback read trainer\.model"):
        trainer.fit([(X, X)] * 4, num_steps=4, progress=False, callbacks=[Edit()])
    assert trainer.step == steps
    np.testing.assert_array_equal(kernel_of(), want)
    assert len(trainer.fit([(X, X)] * 6, num_steps=6, progress=False)) == 6 - steps, "and fit goes on"
    write(model, tmp_path)  # at rest the model is the user's
    trainer.fit([(X, X)] * 7, num_steps=7, progress=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_what_is_written_into_trainer_model_trains(kind: str) -> None:
    model, trainer, kernel_of = made(kind)

    class Edit(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                EDITS["assign" if kind == "keras" else "item"][1](trainer.model, None)

    trainer.fit([(X, X)] * 3, num_steps=3, progress=False, callbacks=[Edit()])
    assert np.abs(kernel_of() - 100).max() < 80 < np.abs(kernel_of()).max()
    assert model is trainer.model


@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_an_interrupt_while_arrays_are_lent_leaves_the_model_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    bridge = importlib.import_module(f"lowtide.ext.{kind}")
    _, trainer, kernel_of = made(kind)
    before, num_made = kernel_of(), [0]

    class Interrupted(bridge.Placeholder):
        def __init__(self, *given: Any) -> None:
            num_made[0] += 1
            if num_made[0] == 2:
                raise KeyboardInterrupt
            super().__init__(*given)

    with monkeypatch.context() as patch:
        patch.setattr(bridge, "Placeholder", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit([(X, X)] * 2, num_steps=2, progress=False)
    np.testing.assert_array_equal(kernel_of(), before)
    assert len(trainer.fit([(X, X)] * 2, num_steps=2, progress=False)) == 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_a_checkpoint_that_cannot_be_read_leaves_the_model_whole(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    from lowtide.train.checkpoint import Checkpoints

    model, _, kernel = made(kind)
    first = _again(kind, model, checkpoint_dir=tmp_path)
    first.fit([(X, X[:, :1])] * 2, num_steps=2, progress=False)
    before = kernel()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(Checkpoints, "restore", fail)
    with pytest.warns(UserWarning, match="planted"), pytest.raises(StateError, match="no checkpoint can be") as raised:
        first.restore()
    assert "the trainer holds the state of step 2, as before" in raised.value.__notes__
    np.testing.assert_array_equal(kernel(), before)
    assert len(first.fit([(X, X[:, :1])] * 3, num_steps=3, progress=False)) == 1


def _again(kind: str, model: Any, tx: Any = None, **options: Any) -> lt.Trainer:
    tx = tx or optax.sgd(0.1)
    if kind == "keras":
        from lowtide.ext.keras import Bridge

        bridge = Bridge(model)
        return lt.Trainer(bridge, bridge.loss("mse"), tx, **options)
    from lowtide.ext.nnx import Bridge as Module

    return lt.Trainer(Module(model), lambda m, b: jnp.mean((m(b[0]) - 1.0) ** 2), tx, **options)


@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_the_model_is_whole_between_two_epochs(kind: str) -> None:
    model, ours, kernel = made(kind)
    seen: list[Any] = []

    class Looks(lt.train.Callback):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            seen.append((kernel(), np.array(jax.tree.leaves(trainer.state.trainable)[-1])))

    ours.fit([(X, X[:, :1])] * 2, num_epochs=2, callbacks=[Looks()], progress=False)
    assert len(seen) == 2 and not np.array_equal(seen[0][0], seen[1][0])
    assert all(held.dtype == np.float32 for held, _ in seen)


def test_a_placeholder_is_neither_copied_nor_compared() -> None:
    import copy
    import pickle

    from lowtide.ext._placeholders import Placeholder

    lent = Placeholder("kernel", jnp.ones((4, 2)))
    uses: list[Any] = [
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda x: x == 0,
        lambda x: x != 0,
        lambda x: x < 1,
        lambda x: x**2,
        lambda x: 1 / x,
        np.asarray,
        abs,
    ]
    for use in uses:
        with pytest.raises(
            StateError, match=r"(?s)kernel: a trainer has borrowed this array.*hint: in a callback read trainer.model"
        ):
            use(lent)
    assert {lent: 1}[lent] == 1


def test_numpy_arrays_in_a_module_train() -> None:
    from flax import nnx

    from lowtide.ext.nnx import Bridge as Module

    net = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    nnx.update(net, {"kernel": np.ones((4, 1), np.float32)})
    ours = lt.Trainer(Module(net), lambda m, b: jnp.mean((m(b) - 1.0) ** 2), optax.sgd(0.1))
    ours.fit([X] * 2, num_steps=1, progress=False)
    assert not np.array_equal(net.kernel[...], np.ones((4, 1)))


def test_numbers_in_a_module_train() -> None:
    from flax import nnx

    from lowtide.ext.nnx import Bridge as Module

    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(4))
            self.scale, self.offset = nnx.Param(np.float32(1.0)), nnx.Param(1.0)
            self.size = nnx.Param(4)  # no number that could train

        def __call__(self, x: Any) -> Any:
            x = x.reshape(-1, self.size.get_raw_value())
            return x * self.weight[...] * self.scale.get_value() + self.offset.get_value()

    net = Scaled()
    ours = lt.Trainer(Module(net), lambda m, b: jnp.mean((m(b) - 7.0) ** 2), optax.sgd(0.1))
    ours.fit([X] * 2, num_steps=2, progress=False)
    assert set(ours.state.trainable) == {"weight", "scale", "offset"}
    assert float(net.scale.get_value()) != 1 and float(net.offset.get_value()) != 1
    assert net.offset.get_value().dtype == np.float32


@pytest.mark.parametrize("kind", ["keras", "nnx"])
def test_the_object_itself_has_the_average_where_it_stands_in(kind: str) -> None:
    model, _, kernel = made(kind)
    ours = _again(kind, model, tx=lt.train.ema(optax.sgd(0.1), decay=0.5))
    before = kernel()
    ours.fit([(X, X[:, :1])], num_steps=1, progress=False)
    trained = kernel()
    with ours.averaged():
        np.testing.assert_allclose(kernel(), (before + trained) / 2, rtol=1e-6)
    np.testing.assert_array_equal(kernel(), trained)


def test_float16_of_keras_is_told_of() -> None:
    import keras

    from lowtide.ext.keras import Bridge

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    with pytest.warns(UserWarning, match=r"(?s)computes in float16.*hint: use the policy mixed_bfloat16"):
        Bridge(model)


def test_predictions_of_an_object_are_compiled_once(compilations: Any) -> None:
    _, ours, _ = made("keras")
    ours.predict([X])
    with compilations.none():
        ours.predict([X])
