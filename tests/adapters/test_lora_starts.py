"""First values out of the weight: nothing changes at first, the base stays, files fit it; and what LoftQ gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.adapters import lora
from lowtide.core import ConfigError, ModelFileError, StructureError, combine, linear, map_with_paths, partition

KEY = jax.random.key(0)
RANK, LAYERS, OUT, IN = 4, 3, 24, 32
X = jnp.asarray(np.random.default_rng(5).normal(size=(5, IN)), jnp.float32)


def base(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.asarray((np.random.default_rng(0).normal(size=(LAYERS, OUT, IN)) / IN**0.5).astype(dtype))}


def added(init: str, **options: Any) -> Any:
    config = {"rank": RANK, "alpha": 6, "targets": "w", "init": init}
    return lora.add(base(), lora.Config(**(config | options)), key=KEY)


def noisy(model: Any) -> Any:

    def draw(path: str, leaf: Any) -> Any:
        noise = 0.1 * np.random.default_rng(len(path)).normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype)

    return map_with_paths(lambda path, leaf: draw(path, leaf) if "lora_" in path else leaf, model)


@jax.jit
def outputs(model: Any, x: Any = X) -> Any:
    return jax.lax.scan(lambda _, w: (None, linear(x, w)), None, model["w"])[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("init", "rslora"), [("pissa", False), ("pissa", True), ("olora", False), ("orthogonal", True)]
)
def test_nothing_changes_at_first_and_then_what_two_products_say(init: str, rslora: bool, tmp_path: Path) -> None:
    fresh = added(init, rslora=rslora)
    np.testing.assert_allclose(outputs(fresh), outputs(base()), atol=1e-5)
    model = noisy(fresh)
    node, first = (jax.tree.map(np.asarray, each["w"]) for each in (model, fresh))
    assert np.abs(first.lora_a).max() > 0.01 and np.abs(first.lora_b).max() > 0.01
    scale, weight, x = 6 / (RANK**0.5 if rslora else RANK), np.asarray(base()["w"]), np.asarray(X)
    want = weight + scale * (node.lora_b @ node.lora_a - first.lora_b @ first.lora_a)
    np.testing.assert_allclose(outputs(model), np.einsum("bi,loi->lbo", x, want), atol=1e-4)
    np.testing.assert_allclose(lora.merge(model)["w"], want, atol=1e-5)
    np.testing.assert_array_equal(lora.disable(model)["w"], weight)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[1]), node)
    left, right = jax.jit(lambda one: (one @ X.T, X @ one.mT))(one)
    np.testing.assert_allclose(left, want[1] @ x.T, atol=1e-4)
    np.testing.assert_allclose(right, x @ want[1].T, atol=1e-4)
    both = lora.combine([model, model], [1.0, 0.5])
    np.testing.assert_allclose(lora.merge(both)["w"], weight + 1.5 * (want - weight), atol=1e-5)
    lora.save(model, tmp_path)
    again = lora.load(base(), tmp_path)
    assert again["w"].rank == (RANK if init == "orthogonal" else 2 * RANK)
    np.testing.assert_allclose(lora.merge(again)["w"], want, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_gradients_are_those_of_the_factors_and_the_start_has_none(init: str) -> None:
    model = noisy(added(init))
    trainable, frozen = partition(model, lora.TRAINABLE)
    assert len(jax.tree.leaves(trainable)) == 2 and frozen["w"].start_a is not None

    def dense(trainable: Any) -> Any:
        node = combine(trainable, frozen)["w"]
        whole = node.weight + 1.5 * (node.lora_b @ node.lora_a - node.start_b @ node.start_a)
        return jnp.mean(jnp.sin(jnp.einsum("bi,loi->lbo", X, whole)))

    got = jax.jit(jax.grad(lambda t: jnp.mean(jnp.sin(outputs(combine(t, frozen))))))(trainable)
    want = jax.jit(jax.grad(dense))(trainable)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), got, want)


@pytest.mark.slow
def test_pissa_is_the_largest_singular_values_of_every_layer_and_base() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        node = lora.add(base(dtype), lora.Config(rank=RANK, targets="w", init="pissa"), key=KEY)["w"]
        for layer, matrix in enumerate(np.asarray(base(dtype)["w"], np.float32)):
            u, s, vt = np.linalg.svd(matrix, full_matrices=False)
            got = node.scaling * np.asarray(node.lora_b)[layer] @ np.asarray(node.lora_a)[layer]
            np.testing.assert_allclose(got, (u[:, :RANK] * s[:RANK]) @ vt[:RANK], atol=1e-5)
    quantised = lt.quantize(base(), "w", "int8")
    model = lora.add(quantised, lora.Config(rank=RANK, targets="w", init="pissa"), key=KEY)
    np.testing.assert_allclose(outputs(model), outputs(quantised), atol=1e-5)


def test_some_layers_dropout_and_shapes() -> None:
    model = noisy(added("pissa", layers=[1]))
    found, plain = np.asarray(outputs(model)), np.asarray(outputs(base()))
    np.testing.assert_array_equal(found[::2], plain[::2])
    assert not np.allclose(found[1], plain[1])
    dropped = lora.dropout(added("pissa"), 0.5, key=KEY)
    found = np.asarray(outputs(dropped, np.broadcast_to(np.asarray(X)[0], (4000, IN))))
    np.testing.assert_allclose(found.mean(1), plain[:, 0], atol=0.15)  # in the mean, dropout changes nothing
    assert not np.allclose(outputs(dropped), plain, atol=1e-3)
    shapes = lora.add(jax.eval_shape(base), lora.Config(rank=RANK, targets="w", init="pissa"), key=KEY)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, added("pissa", alpha=32))


def test_orthogonal_factors_have_no_product() -> None:
    node = added("orthogonal")["w"]
    np.testing.assert_allclose(np.asarray(node.lora_b) @ np.asarray(node.lora_a), 0, atol=1e-6)
    assert [float(np.std(leaf)) for leaf in (node.lora_a, node.lora_b)] == pytest.approx([0.07, 0.07], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int4"])
def test_loftq_adds_what_quantisation_lost(form: str) -> None:
    config = lora.Config(rank=RANK, alpha=6, targets="w", layers=[0, 2])
    plain, weight = lt.quantize(base(), "w", form)["w"], np.asarray(base()["w"])
    dense = jax.jit(lambda node: node.dense())
    lost = [np.linalg.norm(one) for one in weight - np.asarray(dense(plain))]
    errors = []
    for num_steps in (1, 4):
        node = lora.loftq(base(), config, form, key=KEY, num_steps=num_steps)["w"]
        missing = weight - np.asarray(dense(node.weight))
        rest = missing - node.scaling * np.asarray(node.lora_b) @ np.asarray(node.lora_a)
        errors.append([np.linalg.norm(one) for one in rest])
        for layer in (0, 2):  # the best approximation of its rank, by another library
            s = np.linalg.svd(missing[layer], compute_uv=False)
            assert errors[-1][layer] == pytest.approx(np.sqrt(np.sum(s[RANK:] ** 2)), rel=1e-4)
        if num_steps == 1:
            jax.tree.map(np.testing.assert_array_equal, node.weight, plain)
    assert errors[0][1] == pytest.approx(lost[1], rel=1e-5)  # a layer without an adapter
    assert all(errors[1][i] < errors[0][i] < 0.9 * lost[i] for i in (0, 2))
    matrix = {"w": jnp.asarray(np.asarray(base(jnp.bfloat16)["w"])[0])}
    half = lora.loftq(matrix, lora.Config(rank=2, targets="w"), form, key=KEY)["w"]
    shapes = lora.loftq(jax.eval_shape(base), config, form, key=KEY)["w"].weight
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    assert half.dtype == jnp.bfloat16 and jax.eval_shape(half.linear, X).shape == (5, OUT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "pissa", "dora": True}, r"init: 'pissa' contradicts dora"),
        ({"init": "orthogonal", "rank": 3}, r'init = "orthogonal" .* ranks must be even, not 3'),
        ({"init": "eva"}, r"init must be .*, not 'eva'"),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora.Config(**options)


def test_what_loftq_refuses() -> None:
    with pytest.raises(ConfigError, match=r"LoftQ computes the initial factors"):
        lora.loftq(base(), lora.Config(rank=2, targets="w", dora=True), key=KEY)
    with pytest.raises(ConfigError, match=r"config must be a lt.lora.Config, not IA3Config"):
        lora.loftq(base(), lora.IA3Config(targets="w"), key=KEY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"num_steps"):
        lora.loftq(base(), lora.Config(rank=2, targets="w"), key=KEY, num_steps=0)
    with pytest.raises(StructureError, match=r"w: is already quantised"):
        lora.loftq(lt.quantize(base(), "w"), lora.Config(rank=2, targets="w"), key=KEY)


def test_a_directory_that_names_pissa_needs_the_base_as_it_was(tmp_path: Path) -> None:
    lora.save(noisy(added("peft")), tmp_path)
    path = tmp_path / "adapter_config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"init_lora_weights": "pissa"}))
    with pytest.raises(ModelFileError, match=r"pissa subtracted from w is unknown(.|\n)*hint: convert it in PEFT"):
        lora.load(lt.quantize(base(), "w", "int8"), tmp_path)
    for changes in ({"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "pissa", "use_dora": True}):
        path.write_text(json.dumps(told | changes))
        with pytest.raises(ModelFileError, match=r"option 'init_lora_weights' is not supported"):
            lora.load(base(), tmp_path)
