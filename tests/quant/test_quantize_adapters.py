"""Every kind of adapter on a quantised weight: values and gradients are those on the dequantised one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import SelectionError, StructureError, leaves_with_paths, linear, map_with_paths
from lowtide.quant import QuantizedWeight

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


LOSS = jax.jit(loss)


# Every kind once. DoRA also reads the weight, so it gets the format with other scales.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "form"), [(kind, "int8" if kind == "DoRA" else "nf4") for kind in CONFIGS])
def test_adapters_of_every_kind(kind: str, form: str) -> None:
    random = np.random.default_rng(0)
    base = lt.quantize({"w": jnp.asarray(random.normal(size=(3, 64, 64)) / 8, jnp.float32)}, "w", form)
    x = jnp.asarray(random.normal(size=(5, 64)), jnp.float32)

    def moved(model: Any) -> Any:
        def one(leaf: Any) -> Any:
            noise = 0.1 * np.random.default_rng(leaf.ndim).normal(size=leaf.shape)
            return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype)

        return map_with_paths(lambda path, leaf: one(leaf) if "/lora_" in path else leaf, model)

    ours, theirs = (moved(lt.lora.add(each, CONFIGS[kind], key=KEY)) for each in (base, lt.dequantize(base)))
    grad = jax.jit(lt.value_and_grad(loss, lt.lora.TRAINABLE))
    found, expected = grad(ours, x), grad(theirs, x)
    for (path, one), (_, other) in zip(leaves_with_paths(found), leaves_with_paths(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()), err_msg=path)
        assert np.abs(other).max() > 0, path
    np.testing.assert_allclose(LOSS(lt.lora.merge(lt.dequantize(ours)), x), found[0], rtol=1e-4)


def test_a_kernel_with_an_adapter_is_refused_and_left_out_by_either_name() -> None:
    tree, config = {"e": jnp.ones((9, 64)), "w": jnp.ones((9, 64))}, lt.lora.Config(rank=2, targets="e")
    model = lt.lora.add(tree, config, key=KEY, fn=lambda p, ids: p["e"][ids], args=(jnp.arange(3),))
    with pytest.raises(StructureError, match=r'e/weight cannot be quantised: .*LoRAKernel(.|\n)*"!e/weight"'):
        lt.quantize(model, "*", "int8")
    with pytest.raises(StructureError, match=r"e: the adapter of a kernel or an embedding needs its weight"):
        lt.lora.attach(lt.quantize(tree, "e", "int8"), lt.lora.split(model)[0])
    for without in ("!e/weight", "!e"):
        left = lt.quantize(model, ["*", without], "int8")
        assert left["e"] is model["e"] or left["e"].weight is model["e"].weight
        assert isinstance(left["w"], QuantizedWeight)
    with pytest.raises(SelectionError, match="the exclusions leave nothing"):
        lt.quantize(model, ["e", "!e/weight"], "int8")


SHAPES = {"w": (3, 64, 64), "e": (32, 64)}


@functools.cache
def _quantized(seed: int) -> Any:
    random = np.random.default_rng(seed)
    base = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    base["w"] /= 8
    return lt.quantize(base, "*", "nf4")


def _model(seed: int = 0) -> Any:
    return lt.lora.add(_quantized(seed), lt.lora.Config(rank=2, targets="w"), key=KEY)


def _of_ids(model: Any, batch: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(linear(h, w)), None), lt.core.rows(model["e"], batch["x"]), model["w"])
    return jnp.mean((h - 1) ** 2)


@pytest.mark.slow
def test_a_trainer_resumes_over_the_same_base_and_no_other(tmp_path: Any) -> None:
    data = [{"x": jnp.arange(8)}] * 6

    def trainer(folder: Any, seed: int = 0) -> lt.Trainer:
        return lt.Trainer(_model(seed), _of_ids, optax.adam(1e-2), wrt="**/lora_*", checkpoint_dir=folder)

    trainer(tmp_path).fit(data, num_steps=3)
    again = trainer(tmp_path)
    assert again.restore() == 3
    resumed, whole = again.fit(data, num_steps=6), trainer(None).fit(data, num_steps=6)
    assert resumed[-1]["loss"] == whole[-1]["loss"] < whole[0]["loss"]
    assert again.model["w"].weight.codes.dtype == jnp.uint4
    with pytest.raises(StructureError, match="trained over other frozen weights"):
        trainer(tmp_path, seed=1).restore()
