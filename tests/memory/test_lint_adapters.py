"""Lint: a low-rank correction that is added to its weight is found, in a program of anybody's, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import lowtide as lt
from lowtide.memory import lint

RULE = "adapter-multiplied-out"


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Flax and Keras add their biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(trainable: Any, frozen: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(trainable, frozen, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, trainable, grads), value

    return step


def found(loss: Callable[..., Any], *args: Any) -> dict[str, int]:
    findings = lint(step_of(loss), *args, donate_argnums=0)
    return {finding.path: finding.num_bytes for finding in findings if finding.rule == RULE}


THIN = {"a": shape(8, 512), "b": shape(512, 8)}
X = shape(64, 512)


def added(thin: Any, w: Any, x: Any) -> Any:
    return jnp.mean((x @ (w + 2.0 * (thin["b"] @ thin["a"]))) ** 2)


def turned_and_cast(thin: Any, w: Any, x: Any) -> Any:
    delta = (thin["b"] @ thin["a"]).astype(jnp.bfloat16).T
    return jnp.mean((x.astype(jnp.bfloat16) @ (w.astype(jnp.bfloat16).T + delta * 0.5)) ** 2)


def of_layers(thin: Any, w: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, one: Any) -> Any:
        thin, w = one
        return jnp.tanh(h @ (w - jnp.einsum("or,ri->oi", thin["b"], thin["a"]))), None

    return jnp.mean(jax.lax.scan(layer, x, (thin, w))[0])


STACKED = {"a": shape(4, 8, 512), "b": shape(4, 512, 8)}


@pytest.mark.parametrize(
    ("loss", "args", "num_bytes"),
    [
        (added, (THIN, shape(512, 512), X), 2**20),
        (turned_and_cast, (THIN, shape(512, 512), shape(2048, 512)), None),
        (of_layers, (STACKED, shape(4, 512, 512), X), 2**20),
    ],
)
def test_a_correction_that_is_added_is_found(loss: Any, args: Any, num_bytes: int | None) -> None:
    findings = lint(step_of(loss), *args, donate_argnums=0, min_bytes=0)
    mine = [finding for finding in findings if finding.rule == RULE]
    assert [finding.path for finding in mine] == ["frozen"] and "test_lint_adapters.py:" in mine[0].detail
    assert num_bytes is None or mine[0].num_bytes == num_bytes
    assert "lowtide.adapted" in str(mine[0])


@pytest.mark.slow
def test_keras_adds_its_correction_and_the_same_layers_under_adapted_do_not() -> None:
    import keras

    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
    before = [variable.value for variable in model.trainable_variables]
    model.layers[0].enable_lora(8)
    trained, fixed = (
        [variable.value for variable in group] for group in (model.trainable_variables, model.non_trainable_variables)
    )

    def of_keras(trained: Any, fixed: Any, x: Any) -> Any:
        return jnp.mean(model.stateless_call(trained, fixed, x)[0] ** 2)

    assert list(found(of_keras, trained, fixed, X).values()) == [2**20]
    plain = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])

    def loss(variables: Any, x: Any) -> Any:
        return jnp.mean(plain.stateless_call(variables, [], x)[0] ** 2)

    config = lt.lora.Config(rank=8, targets="0")
    adapted = lt.lora.add(before, config, key=jax.random.key(0), fn=loss, args=(X,))
    trainable, frozen = lt.partition(adapted, "**/lora_*")

    def of_ours(trainable: Any, frozen: Any, x: Any) -> Any:
        return lt.adapted(loss)(lt.combine(trainable, frozen), x)

    assert found(of_ours, trainable, frozen, X) == {}


def nnx_lora(trainable: Any, frozen: Any, x: Any) -> Any:
    return jnp.mean((x @ frozen["w"] + x @ trainable["a"].T @ trainable["b"].T) ** 2)


def full_update(trainable: Any, frozen: Any, x: Any) -> Any:
    """Of two square matrices the product is no thin one."""
    return jnp.mean((x @ (frozen["w"] + trainable["c"] @ trainable["d"])) ** 2)


def positions(trainable: Any, frozen: Any, x: Any) -> Any:
    """A product of activations and a table is no adapter."""
    return jnp.mean((x @ frozen["w"] + frozen["table"]) ** 2) + jnp.mean(trainable["a"] ** 2)


@pytest.mark.parametrize("loss", [nnx_lora, full_update, positions])
def test_what_is_no_such_sum_gets_no_finding(loss: Any) -> None:
    trainable = {**THIN, "c": shape(512, 512), "d": shape(512, 512)}
    assert found(loss, trainable, {"w": shape(512, 512), "table": shape(64, 512)}, X) == {}


def test_an_optimizer_that_multiplies_matrices_gets_no_finding() -> None:
    tx = optax.contrib.muon(1e-3)
    params = {"w": shape(256, 512)}

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.mean((x @ params["w"].T) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    findings = lint(step, params, jax.eval_shape(tx.init, params), X, donate_argnums=(0, 1))
    assert RULE not in {finding.rule for finding in findings}


@pytest.mark.slow
def test_a_layer_of_nnx_gets_no_finding() -> None:
    layer = nnx.LoRA(512, 8, 512, base_module=nnx.Linear(512, 512, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    graph, trained, fixed = nnx.split(layer, nnx.LoRAParam, ...)

    def loss(trained: Any, fixed: Any, x: Any) -> Any:
        return jnp.mean(nnx.merge(graph, trained, fixed)(x) ** 2)

    assert found(loss, trained, fixed, X) == {}


def layers_of_codes(thin: Any, base: Any, x: Any, *, kept: bool) -> Any:
    def dequantised(h: Any, codes: Any, scales: Any) -> Any:
        low, high = (codes & 15).astype(jnp.int8), (codes >> 4).astype(jnp.int8)
        weight = (jnp.stack([low, high], axis=-1).reshape(512, 512) - 8).astype(jnp.float32) * scales[:, None]
        return h @ weight.T

    product = dequantised if kept else jax.checkpoint(dequantised)

    def layer(h: Any, one: Any) -> Any:
        thin, (codes, scales) = one
        return jnp.tanh(product(h, codes, scales) + (h @ thin["a"].T) @ thin["b"].T), None

    return jnp.mean(jax.lax.scan(layer, x, (thin, base))[0])


@pytest.mark.parametrize("kept", [True, False])
def test_a_dequantised_weight_that_waits_for_the_backward_pass(kept: bool) -> None:
    codes = shape(4, 512, 256, dtype=jnp.uint8)
    step = step_of(partial(layers_of_codes, kept=kept))
    findings = lint(step, STACKED, (codes, shape(4, 512)), X, donate_argnums=0, target="cpu")
    kept_bytes = {f.path: f.num_bytes for f in findings if f.rule == "dequantized-residual"}
    assert kept_bytes == ({"frozen/0": 4 * 512 * 512 * 4} if kept else {})


def test_quantised_weights_and_ids_of_rows_leave_no_residual() -> None:
    model = lt.quantize({"w": jnp.ones((512, 512)), "v": jnp.ones((512, 512))}, "*", "int8")

    def loss(scale: Any, base: Any, x: Any) -> Any:
        frozen, table, ids = base
        h = jnp.tanh(lt.core.linear(x, frozen["w"]) * scale + table[ids])
        return jnp.mean(lt.core.linear(h, frozen["v"]) ** 2)

    base = (model, shape(64, 512), shape(64, dtype=jnp.int32))
    assert [f.rule for f in lint(step_of(loss), shape(512), base, X, donate_argnums=0, target="cpu", min_bytes=0)] == []

    def of_pixels(scale: Any, base: Any, pixels: Any) -> Any:
        return jnp.mean(jnp.tanh((pixels.astype(jnp.float32) / 255 * scale) @ base) ** 2)

    pixels = shape(512, 512, dtype=jnp.uint8)
    found = lint(step_of(of_pixels), shape(512), shape(512, 512), pixels, donate_argnums=0, target="cpu", min_bytes=0)
    assert "dequantized-residual" not in {f.rule for f in found}
