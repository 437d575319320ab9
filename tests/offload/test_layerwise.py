from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, PlacementError, SelectionError, StructureError
from lowtide.models import LlamaConfig, init
from lowtide.offload import Clip, layerwise_step

CONFIG = LlamaConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
HOST = {"layers": "host", "outer": "host", "opt_state": "host", "inputs": "host"}
DEVICE = dict.fromkeys(HOST, "device")


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def batches(count: int, size: int = 4, length: int = 8, seed: int = 0) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, CONFIG.vocab_size, (size, length + 1))
        labels = np.where(rng.random((size, length)) < 0.2, -100, tokens[:, 1:])
        made.append({"tokens": jnp.asarray(tokens[:, :-1], jnp.int32), "labels": jnp.asarray(labels, jnp.int32)})
    return made


def num_targets(batch: Any) -> Any:
    return jnp.sum(batch["labels"] != -100)


def plain(model: Any, tx: Any, data: list[Any]) -> tuple[Any, list[tuple[float, float]]]:
    """Training with all gradients, all state and one update a step."""

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: model.stack.apply(p["outer"], p["layers"], batch, remat=True)[0])(
            params
        )
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss, optax.tree.norm(grads)

    params = {"outer": copy(model.outer), "layers": copy(model.layers)}
    opt, seen = tx.init(params), []
    for batch in data:
        params, opt, loss, norm = step(params, opt, batch)
        seen.append((float(loss), float(norm)))
    return params, seen


def layerwise(model: Any, tx: Any, data: list[Any], **options: Any) -> tuple[Any, list[tuple[float, float]]]:
    step = layerwise_step(model.stack, tx, **options)
    state, frozen = step.init(copy(model.outer), copy(model.layers))
    jitted, seen = jax.jit(step, donate_argnums=0), []
    for batch in data:
        state, metrics = jitted(state, frozen, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    outer, layers = step.parameters(state, frozen)
    return {"outer": outer, "layers": layers}, seen


def assert_close(ours: Any, theirs: Any, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, theirs)


@pytest.mark.parametrize("place", [HOST, DEVICE, {}], ids=["host", "device", "default"])
@pytest.mark.parametrize("tied", [False, True])
def test_twenty_steps_equal_plain_adam(place: dict[str, str], tied: bool) -> None:
    model = init(dataclasses.replace(CONFIG, tie_embeddings=tied), key=jax.random.key(0))
    tx, data = optax.adam(1e-3), batches(20)
    ours, theirs = layerwise(model, tx, data, place=place), plain(model, tx, data)
    assert_close(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("place", [HOST, DEVICE], ids=["host", "device"])
def test_microbatches_equal_the_whole_batch(place: dict[str, str], tied: bool) -> None:
    model = init(dataclasses.replace(CONFIG, tie_embeddings=tied), key=jax.random.key(0))
    tx, data = optax.adam(1e-3), batches(4)
    ours = layerwise(model, tx, data, place=place, num_microbatches=4, weight=num_targets)
    theirs = plain(model, tx, data)
    assert_close(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_exact_norm_clips_like_optax(num_microbatches: int) -> None:
    model, data = init(CONFIG, key=jax.random.key(0)), batches(20)
    theirs = plain(model, optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)), data)
    ours = layerwise(
        model,
        optax.adam(1e-3),
        data,
        clip=Clip(max_norm=0.1),
        num_microbatches=num_microbatches,
        weight=num_targets,
    )
    assert_close(ours[0], theirs[0])
    assert min(norm for _, norm in ours[1]) > 0.1  # so that every step was clipped
