"""EVA starts A from the first right-singular vectors of the inputs of its weight, for every kind of product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ConfigError, NonFiniteError, StructureError, linear
from tests.models.kinds import KINDS
from tests.peers import Peer

KEY = jax.random.key(0)
LAYERS, IN, RANK = 3, 40, 4
RANDOM = np.random.default_rng(0)
W = jnp.asarray(RANDOM.normal(size=(LAYERS, IN, IN)) / IN**0.5, jnp.float32)
SIZES = np.exp(-np.arange(IN) / 5)
BATCHES = [jnp.asarray(RANDOM.normal(size=(2, 25, IN)) * SIZES, jnp.float32) for _ in range(3)]


def same_space(found: Any, inputs: Any, rank: int = RANK) -> None:
    """Assert that the rows of an A are the first right-singular vectors of inputs, in their order."""
    wanted = np.linalg.svd(np.asarray(inputs, np.float64), full_matrices=False)[2][:rank]
    found = np.asarray(found)
    np.testing.assert_allclose(np.abs(np.diag(wanted @ found.T)), 1, atol=1e-3)
    np.testing.assert_allclose(found @ found.T, np.eye(rank), atol=1e-5)


def scanned(model: Any, x: Any) -> Any:
    """A recurrence over stacked layers, recomputed; rows of zeros at the end are not learned from."""
    y, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(linear(x, w)), None)), x, model["w"])
    return jnp.sum(y[:, :20] ** 2), "more"


def inputs_of(layer: int, w: Any = W) -> Any:
    x = np.concatenate(BATCHES)[:, :20].reshape(-1, IN)
    for i in range(layer):
        x = np.tanh(x @ np.asarray(w)[i].T)
    return x


def config(**options: Any) -> lora.Config:
    return lora.Config(**({"rank": RANK, "targets": "w"} | options))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("format", [None, "int8"])
def test_each_layer_of_a_stack_has_the_vectors_of_its_inputs(format: str | None) -> None:
    base = {"w": W} if format is None else lt.quantize({"w": W}, "w", format)
    node = lora.eva(base, config(), scanned, BATCHES, key=KEY, has_aux=True)["w"]
    whole = W if format is None else base["w"].dense()
    for layer, lora_a in enumerate(np.asarray(node.lora_a)):
        same_space(lora_a, inputs_of(layer, whole))
    assert not np.any(node.lora_b) and node.weight is base["w"]
    run = jax.jit(lambda model: scanned(model, BATCHES[0])[0])
    assert run({"w": node}) == run(base)


def test_one_pass_is_exact_where_the_seed_is_a_basis_and_other_layers_stay_zero() -> None:
    add = {"key": KEY, "has_aux": True, "num_passes": 1}
    node = lora.eva({"w": W}, config(rank=16, layers=[1], dora=True), scanned, BATCHES, **add)["w"]
    first, second, third = np.asarray(node.lora_a)
    same_space(second, inputs_of(1), 16)
    assert not first.any() and not third.any() and node.lora_magnitude is not None


@pytest.mark.slow
def test_other_ways_to_multiply_are_seen() -> None:
    x = BATCHES[0].reshape(-1, IN)
    ways: dict[str, Any] = {
        "weight @ x under vmap": lambda model, x: jnp.sum(jax.vmap(lambda row: model["w"] @ row)(x) ** 2),
        "x @ weight.T": lambda model, x: jnp.sum((x @ model["w"].T) ** 2),
        "einsum": lt.adapted(lambda model, x: jnp.sum(jnp.einsum("...i,oi->...o", x, model["w"]) ** 2)),
    }
    for fn in ways.values():
        same_space(lora.eva({"w": W[0], "more": 1.0}, config(), fn, [x], key=KEY)["w"].lora_a, x)


@pytest.mark.slow
def test_an_adapter_that_is_there_stays_and_is_seen() -> None:
    first = lora.add({"v": W[0], "w": W[1]}, lora.Config(rank=2, targets="v"), key=KEY)
    first["v"] = lt.lora.LoRAWeight(W[0], W[2, :2], W[2, :, :2], alpha=3.0)
    loss = lambda model, x: jnp.sum(linear(jnp.tanh(linear(x, model["v"])), model["w"]) ** 2)  # noqa: E731
    both = lora.eva(first, config(), loss, BATCHES, key=KEY)
    assert both["v"] is first["v"]
    x, w = np.concatenate(BATCHES).reshape(-1, IN), np.asarray(W)
    same_space(both["w"].lora_a, np.tanh(x @ (w[0] + 1.5 * w[2, :, :2] @ w[2, :2]).T))


def test_what_eva_cannot_begin_with_is_an_error() -> None:
    def run(fn: Any = lambda model, x: jnp.sum(linear(x, model["w"])), batches: Any = BATCHES, **options: Any) -> Any:
        model = {"w": W[0]} | options.pop("model", {})
        return lora.eva(model, config(**options), fn, batches, key=KEY, num_passes=passes)

    passes: Any = 1
    with pytest.raises(ConfigError, match='init="peft"'):
        run(init="pissa")
    with pytest.raises(ConfigError, match="batches is empty"):
        run(batches=iter(()))
    with pytest.raises(NonFiniteError, match="w: its inputs are not finite"):
        run(batches=[BATCHES[0] * jnp.nan])
    with pytest.raises(StructureError, match="w: the loss of these batches does not depend"):
        run(lambda model, x: jnp.sum(x * 1.0))
    with pytest.raises(StructureError, match="w: the loss of these batches does not depend"):
        run(batches=[jnp.zeros((3, IN))])
    with pytest.raises(StructureError, match=r"multiplied as \[in, out\]"):
        run(lambda model, x: jnp.sum(x @ model["w"]))
    passes = 0
    with pytest.raises(ConfigError, match="num_passes must be an integer of at least 1, not 0"):
        run()
    experts = models.init(KINDS["mixtral"], key=KEY)
    with pytest.raises(StructureError, match="experts/up/weight: EVA supports only matrices"):
        lora.eva(experts, lora.Config(rank=2, targets="**/up"), models.loss, BATCHES, key=KEY)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_inputs_in_a_decoder_are_those_of_transformers(peer: Peer, tmp_path: Path) -> None:
    base = models.init(KINDS["llama"], key=KEY)
    models.save(base, tmp_path / "base")
    tokens = np.random.default_rng(0).integers(1, 96, (4, 32))
    names = {"self_attn.v_proj": "attn", "mlp.down_proj": "mlp"}

    def compute() -> dict[str, np.ndarray]:
        """Return the products X^T X of every module's inputs: they hold the singular values and vectors of X."""
        import torch
        from transformers import AutoModelForCausalLM

        products: dict[str, np.ndarray] = {}

        def record(name: str, inputs: Any) -> None:
            rows = inputs.detach().double().numpy().reshape(-1, inputs.shape[-1])
            products[name] = (rows.T @ rows).astype(np.float32)

        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        for name, module in model.named_modules():
            if name.endswith(tuple(names)):
                module.register_forward_hook(lambda _, inputs, __, name=name: record(name, inputs[0]))
        model(torch.tensor(tokens))
        return products

    products = peer.answer("products", compute, {"base": tmp_path / "base", "tokens": tokens})
    batch = {"tokens": tokens.astype(np.int32), "labels": np.roll(tokens, -1, 1).astype(np.int32)}
    targets = lora.Config(rank=RANK, targets=["**/v_proj", "**/down_proj"])
    ours = lora.eva(base, targets, models.loss, [batch], key=KEY, has_aux=True, num_passes=12)
    for name, place in names.items():
        lora_a = np.asarray(ours.layers[place][name.rpartition(".")[2]]["weight"].lora_a, np.float64)
        for layer in range(len(lora_a)):
            product = np.asarray(products[f"model.layers.{layer}.{name}"], np.float64)
            # No direction stands out where weights are random, so the sum over all four directions is compared.
            held = np.trace(lora_a[layer] @ product @ lora_a[layer].T)
            most = np.linalg.eigvalsh(product)[-RANK:].sum()
            np.testing.assert_allclose(held, most, rtol=1e-3)
