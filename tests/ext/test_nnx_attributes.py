"""NNX modules with arrays that stand in no variable, norms of weights, and calls that set attributes."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide.core import StateError, StructureError
from lowtide.ext.nnx import Bridge

X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """NNX adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def loss_fn(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


def trainer(model: Any, **options: Any) -> lt.Trainer:
    return lt.Trainer(Bridge(model), loss_fn, optax.sgd(0.1), **options)


def fit(model: Any, num_steps: int = 3) -> list[Any]:
    return [record["loss"] for record in trainer(model).fit([X] * num_steps, num_steps=num_steps, progress=False)]


class Bare(nnx.Module):
    """Arrays as attributes and in lists and dictionaries; some are read, some change in every call."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.scale = jnp.full(3, 2.0)
        self.offset = np.full(3, 0.5, np.float32)
        self.calls = nnx.data([jnp.zeros(()), {"mean": jnp.zeros(3)}])
        self.seen = nnx.List([jnp.zeros(())])
        self.key = jax.random.key(7)

    def __call__(self, x: Any) -> Any:
        self.calls[0] = self.calls[0] + 1
        self.key = jax.random.split(self.key)[0]
        self.seen[0] = self.seen[0] + x.shape[0]
        y = self.linear(x) * self.scale + self.offset
        self.calls[1]["mean"] = 0.9 * self.calls[1]["mean"] + 0.1 * jax.lax.stop_gradient(y).mean(0)
        return y


def plain_steps(model: Any, num_steps: int) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(model, X)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer)) for _ in range(num_steps)]


@pytest.mark.slow
def test_bare_arrays_are_state_of_the_step_as_in_a_loop_of_nnx() -> None:
    ours, plain = Bare(), Bare()
    np.testing.assert_allclose(fit(ours), plain_steps(plain, 3), rtol=1e-6)
    for mine, theirs in zip(*(jax.tree.leaves(nnx.state(model)) for model in (ours, plain)), strict=True):
        mine, theirs = (jax.random.key_data(k) if k.dtype == ours.key.dtype else k for k in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert (float(ours.calls[0]), float(ours.seen[0])) == (3.0, 12.0)


@pytest.mark.slow
def test_bare_arrays_are_lent_and_restored(tmp_path: Any) -> None:
    seen = []

    class Watch(lt.train.Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            with contextlib.suppress(StateError):
                seen.append(float(model.calls[0]))

    model = Bare()
    run = trainer(model, checkpoint_dir=tmp_path)
    run.fit([X] * 4, num_steps=2, progress=False, callbacks=[Watch()])
    assert seen == [], "the trainer has them"
    again = Bare()
    resumed = trainer(again, checkpoint_dir=tmp_path)
    assert resumed.restore() == 2
    assert float(resumed.model.calls[0]) == 2.0
    losses = [record["loss"] for record in resumed.fit([X] * 4, num_steps=4, progress=False)]
    assert losses == fit(Bare(), 4)[2:]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_norms_of_weights_train_and_what_they_write_is_said(norm: Any) -> None:
    model = norm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    first = float(loss_fn(nnx.clone(model), X))
    with pytest.warns(UserWarning, match=r"(?s)writes into trainable parameters: layer_instance/kernel.*hint:"):
        losses = fit(model)
    assert losses[0] == pytest.approx(first, rel=1e-6)
    assert losses[2] < losses[1] < losses[0]


class Setting(nnx.Module):
    """A call that sets an attribute of the module."""

    def __init__(self, name: str) -> None:
        self.linear, self.name, self.count, self.sizes = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), name, 0, (1, 2)
        self.number, self.pair = nnx.Variable(0), nnx.Variable((jnp.zeros(()), 1))

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        if self.name == "an array":
            self.last = y
        elif self.name == "a variable":
            self.last = nnx.BatchStat(y)
        elif self.name == "a number":
            self.count += 1
        elif self.name == "a tuple":
            self.sizes = (1, 3)
        elif self.name == "a longer tuple":
            self.sizes = (1, 2, 3)
        elif self.name == "a number in a variable":
            self.number.set_value(self.number.get_value() + 1)
        elif self.name == "a tuple in a variable, shorter":
            self.pair.set_value((self.pair.get_value()[0] + 1,))
        elif self.name == "removed":
            del self.count
        elif self.name == "sown":
            self.last = nnx.Intermediate(y)
        return y


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("an array", "added: last"),
        ("a variable", "added: last"),
        ("a number", "changed: count"),
        ("removed", "removed: count"),
        ("a tuple", "changed: sizes/1"),
        ("a longer tuple", "added: sizes/2"),
        ("a number in a variable", "changed: number"),
        ("a tuple in a variable, shorter", "changed: pair"),
    ],
)
def test_an_attribute_that_a_call_sets_is_an_error(name: str, said: str) -> None:
    with pytest.raises(StructureError, match=rf"(?s)attributes of the module.*{said}.*hint: .*nnx.Variable"):
        fit(Setting(name), 1)


def test_a_lower_precision_is_no_change_of_the_model() -> None:
    model = Bare()
    records = trainer(model, compute_dtype="bfloat16").fit([X] * 2, num_steps=2, progress=False)
    assert records[1]["loss"] < records[0]["loss"]
    assert (model.linear.dtype, float(model.calls[0])) == (None, 2.0)


@pytest.mark.slow
def test_a_mode_that_the_loss_function_sets_is_set_in_every_step() -> None:
    model = Setting("nothing")
    model.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def of_eval(model: Any, x: Any) -> Any:
        model.drop.eval()
        return loss_fn(lambda x: model.drop(model(x)), x)

    plain = fit(Setting("nothing"), 2)
    records = lt.Trainer(Bridge(model), of_eval, optax.sgd(0.1)).fit([X] * 2, num_steps=2, progress=False)
    assert [record["loss"] for record in records] == plain


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_transforms_hand_parameters_on_and_write_nothing(transform: Any) -> None:
    model = Setting("nothing")
    del model.number, model.pair  # which they make arrays
    whole = lt.Trainer(Bridge(model), lambda m, x: transform(loss_fn)(m, x), optax.sgd(0.1))
    records = whole.fit([X] * 2, num_steps=2, progress=False)
    assert [record["loss"] for record in records] == pytest.approx(fit(Setting("nothing"), 2))


def test_what_is_written_inside_of_a_transform_is_said() -> None:
    model = nnx.WeightNorm(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    of_remat = lt.Trainer(Bridge(model), lambda m, x: nnx.remat(loss_fn)(m, x), optax.sgd(0.1))
    with pytest.warns(UserWarning, match=r"writes into trainable parameters: layer_instance/"):
        of_remat.fit([X], num_steps=1, progress=False)


def test_an_attribute_that_gets_the_value_of_another_one_is_seen() -> None:
    model = Setting("a number")
    model.other = 1  # what the count becomes
    with pytest.raises(StructureError, match="changed: count"):
        fit(model, 1)


@pytest.mark.slow
def test_what_is_sown_is_for_the_call_alone() -> None:
    assert fit(Setting("sown")) == fit(Setting("nothing"))


def test_places_that_arrays_cannot_be_taken_from_are_refused() -> None:
    model = Bare()
    model.pair = nnx.data((jnp.ones(3), jnp.ones(2)))
    with pytest.raises(StructureError, match=r"(?s)pair/0: an array in a tuple.*hint:.*nnx.Variable"):
        fit(model, 1)
    model = Bare()
    model.twice = model.scale
    with pytest.raises(StructureError, match=r"(?s)scale and twice are the same array.*hint: share an nnx.Variable"):
        Bridge(model)


class Trees(nnx.Module):
    """Variables that hold a tree of dictionaries, and one with a number and a text beside an array."""

    def __init__(self) -> None:
        self.weights = nnx.Param({"kernel": jnp.full((2, 3), 0.5), "rest": {"a": jnp.ones(3), "b": jnp.ones(3)}})
        self.stats = nnx.BatchStat({"calls": jnp.zeros((), jnp.int32), "mean": jnp.zeros(2), "name": "x"})

    def __call__(self, x: Any) -> Any:
        weights, stats = self.weights.get_value(), dict(self.stats.get_value())
        self.stats.set_value({**stats, "calls": stats["calls"] + 1, "mean": 0.9 * stats["mean"] + 0.1 * x.mean(0)})
        return x @ weights["kernel"] * weights["rest"]["a"] + weights["rest"]["b"]


@pytest.mark.slow
def test_variables_that_hold_trees_train_as_in_a_loop_of_nnx(tmp_path: Any) -> None:
    model, plain = Trees(), Trees()
    ours = lt.Trainer(Bridge(model), loss_fn, optax.adam(0.1), checkpoint_dir=tmp_path)
    records = ours.fit([X] * 3, num_steps=3, progress=False)
    optimizer, losses = nnx.Optimizer(plain, optax.adam(0.1), wrt=nnx.Param), list[float]()
    for _ in range(3):
        loss, grads = nnx.value_and_grad(loss_fn)(plain, X)
        optimizer.update(plain, grads)
        losses.append(float(loss))
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-6)
    for name in ("weights", "stats"):
        values = [jax.tree.leaves(getattr(module, name).get_value()) for module in (model, plain)]
        assert len(values[0]) == 3 and values[0][-1] is not None
        for mine, theirs in zip(*values, strict=True):
            assert mine == theirs if isinstance(mine, str) else np.allclose(mine, theirs, rtol=1e-6)
    assert [path for path, _ in lt.core.leaves_with_paths(ours.state.trainable)] == [
        "weights/kernel",
        "weights/rest/a",
        "weights/rest/b",
    ]
    again = lt.Trainer(Bridge(Trees()), loss_fn, optax.adam(0.1), checkpoint_dir=tmp_path)
    assert again.restore() == 3
    assert int(again.model.stats.get_value()["calls"]) == 3


def test_part_of_a_tree_stays_frozen_with_its_variable() -> None:
    model = Trees()
    model.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    before = model.weights.get_value()["kernel"]
    bridge = Bridge(model, wrt=lambda path, _: "linear" in path)
    lt.Trainer(bridge, lambda m, x: jnp.mean(m.linear(m(x)) ** 2), optax.sgd(0.1)).fit([X], num_steps=1, progress=False)
    assert model.weights.get_value()["kernel"] is before
