"""Models of every kind with adapters: they train, come back from a checkpoint bit for bit, and merge."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide import lora

KEY = jax.random.key(0)
Parts = tuple[Any, Callable[..., Any], Any, Any]


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def _vit() -> Parts:
    """A transformer of images in plain JAX: patches, attention by einsum, blocks in a scan."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / math.sqrt(shape[-2]), jnp.float32)  # noqa: E731
    blocks = {name: draw(2, 16, 2, 8) for name in "qkv"}
    blocks |= {"out": draw(2, 2, 8, 16), "up": draw(2, 16, 32), "down": draw(2, 32, 16)}
    params = {"patch": draw(48, 16), "place": 0.1 * draw(4, 16), "blocks": blocks, "head": draw(16, 3)}

    def block(h: Any, w: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhe->bthe", jax.nn.standardize(h), w[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bthe,buhe->bhtu", q, k) / math.sqrt(8))
        h = h + jnp.einsum("bhtu,buhe,hed->btd", scores, v, w["out"])
        return h + jax.nn.gelu(jax.nn.standardize(h) @ w["up"]) @ w["down"], None

    def logits(params: Any, images: Any) -> Any:
        patches = images.reshape(-1, 2, 4, 2, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 48)
        h = patches @ params["patch"] + params["place"]
        return jax.lax.scan(block, h, params["blocks"])[0].mean(1) @ params["head"]

    config = lora.Config(rank=2, targets=["patch", "blocks/*"])
    return params, logits, config, jax.random.normal(KEY, (6, 8, 8, 3))


def _lstm() -> Parts:
    """A cell of Equinox in a scan, and a linear layer."""
    keys = jax.random.split(KEY)
    model = {"cell": eqx.nn.LSTMCell(5, 12, key=keys[0]), "head": eqx.nn.Linear(12, 3, key=keys[1])}

    def one(model: Any, sequence: Any) -> Any:
        start = (jnp.zeros(12), jnp.zeros(12))
        return model["head"](jax.lax.scan(lambda state, x: (model["cell"](x, state), None), start, sequence)[0][0])

    logits = lambda model, x: jax.vmap(one, (None, 0))(model, x)  # noqa: E731
    return model, logits, lora.Config(rank=2, targets="cell/weight_*"), jax.random.normal(KEY, (6, 7, 5))


class _Convolutional(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.grouped = nnx.Conv(8, 8, (3, 3), feature_group_count=2, rngs=rngs)
        self.last = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in (self.first, self.grouped, self.last):
            x = jax.nn.relu(layer(x))
        return self.head(x.mean((1, 2)))


def _convolutions() -> Parts:
    graph, state = nnx.split(_Convolutional(nnx.Rngs(0)))

    def logits(params: Any, images: Any) -> Any:
        own = nnx.state(nnx.merge(graph, state))
        nnx.replace_by_pure_dict(own, params)
        return nnx.merge(graph, own)(images)

    config = lora.Config(rank=2, targets=["**/kernel", "!grouped/*"])
    return nnx.to_pure_dict(state), logits, config, jax.random.normal(KEY, (6, 8, 8, 3))


MODELS = {"a ViT": _vit, "an LSTM": _lstm, "a convolutional net": _convolutions}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_it_trains_comes_back_and_merges(name: str, tmp_path: Path) -> None:
    params, plain, config, x = MODELS[name]()
    logits = lt.adapted(plain)
    batch = {"x": x, "y": jnp.arange(6) % 3}

    def loss(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(model, batch["x"]), batch["y"]).mean()

    def trainer() -> lt.Trainer:
        model = lora.add(params, config, key=KEY, fn=plain, args=(x,))
        return lt.Trainer(model, loss, optax.adam(0.02), wrt=lora.TRAINABLE, checkpoint_dir=tmp_path)

    first, run, run_plain = trainer(), jax.jit(logits), jax.jit(plain)
    history = first.fit([batch] * 12, num_steps=12, checkpoint_every=12, progress=False)
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    merged = lora.merge(first.model)
    wanted, found = np.asarray(run(first.model, x)), np.asarray(run_plain(merged, x))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    assert np.abs(found - np.asarray(run_plain(params, x))).max() > 1e-2
    again = trainer()
    assert again.restore() == 12
    jax.tree.map(np.testing.assert_array_equal, again.state.trainable, first.state.trainable)
    jax.tree.map(np.testing.assert_array_equal, again.state.opt_state, first.state.opt_state)
    np.testing.assert_array_equal(run(again.model, x), wanted)


def test_a_grouped_convolution_is_refused_by_path_when_the_adapter_is_added() -> None:
    params, logits, _, images = _convolutions()
    config = lora.Config(rank=2, targets="**/kernel")
    with pytest.raises(
        lt.core.StructureError, match=r"grouped/kernel: the model does more with this weight(.|\n)*hint:"
    ):
        lora.add(params, config, key=KEY, fn=logits, args=(images,))
