"""Every kind of adapter on a quantised weight: values and gradients are those on the dequantised one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import leaves_with_paths, linear, map_with_paths

KEY = jax.random.key(0)
CONFIGS: dict[str, Any] = {
    "LoRA": lt.lora.Config(rank=2, targets="w"),
    "rsLoRA": lt.lora.Config(rank=2, targets="w", rslora=True),
    "DoRA": lt.lora.Config(rank=2, targets="w", dora=True),
    "DoRA of a layer": lt.lora.Config(rank=2, targets="w", dora=True, layers=[1]),
    "(IA)³": lt.lora.IA3Config(targets="w", feedforward=()),
    "VeRA": lt.lora.VeRAConfig(rank=2, targets="w"),
}


def loss(model: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(linear(h, w)), None)), x, model["w"])
    return jnp.mean(h**2)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_of_every_kind(kind: str, form: str) -> None:
    base = lt.quantize({"w": jax.random.normal(KEY, (3, 64, 64)) / 8}, "w", form)
    x = jax.random.normal(jax.random.key(1), (5, 64))

    def moved(model: Any) -> Any:
        noise = lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.ndim), leaf.shape)  # noqa: E731
        return map_with_paths(lambda path, leaf: leaf + noise(leaf) if "/lora_" in path else leaf, model)

    ours, theirs = (moved(lt.lora.add(each, CONFIGS[kind], key=KEY)) for each in (base, lt.dequantize(base)))
    grad = jax.jit(lt.value_and_grad(loss, lt.lora.TRAINABLE))
    found, expected = grad(ours, x), grad(theirs, x)
    for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()), err_msg=path)
        assert np.abs(other).max() > 0, path
    np.testing.assert_allclose(loss(lt.lora.merge(lt.dequantize(ours)), x), found[0], rtol=1e-4)
