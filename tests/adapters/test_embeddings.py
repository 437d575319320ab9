"""Adapters of embeddings and heads: rows of W + B A, PEFT's files both ways, and what an embedding does not take."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ConfigError, ModelFileError, StructureError, map_with_paths, rows
from tests.adapters import test_peft_kinds as kinds
from tests.models.kinds import KINDS
from tests.peers import Peer

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(1, 96, (2, 11))
BOTH = ["outer/embed", "outer/lm_head"]
WEIGHTS = "adapter_model.safetensors"
EMBED = "base_model.model.model.embed_tokens"


LOGITS = jax.jit(models.logits)


@functools.cache
def base(family: str = "llama", **options: Any) -> models.Decoder:
    return models.init(dataclasses.replace(KINDS[family], **options), key=KEY)


def adapted(model: models.Decoder, **options: Any) -> models.Decoder:
    config = lora.Config(**({"rank": 3, "alpha": 2.0, "targets": BOTH} | options))

    def draw(path: str, leaf: Any) -> Any:
        return jnp.asarray(0.3 * np.random.default_rng(len(path)).normal(size=leaf.shape), leaf.dtype)

    return map_with_paths(lambda p, x: draw(p, x) if "lora_" in p else x, lora.add(model, config, key=KEY))


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, "int8"])
def test_rows_are_those_of_the_weight_multiplied_out(format: str | None) -> None:
    plain = base() if format is None else lt.quantize(base(), "outer/embed", format)
    model = adapted(plain)
    node: Any = model.outer["embed"]["weight"]
    weight = np.asarray(node.weight if format is None else node.weight.dense())
    a, b = np.asarray(node.lora_a), np.asarray(node.lora_b)
    ids = jnp.array([[3, 0], [95, 3]])
    want = weight + 2 / 3 * b @ a
    np.testing.assert_allclose(rows(node, ids), want[np.asarray(ids)], atol=1e-5)
    assert np.isnan(rows(node, jnp.array([96]))).all()
    batch = {"tokens": jnp.asarray(TOKENS), "labels": jnp.asarray(np.roll(TOKENS, -1, 1))}
    dense = dataclasses.replace(model, outer={**model.outer, "embed": {"weight": jnp.asarray(want)}})
    np.testing.assert_allclose(LOGITS(model, TOKENS), LOGITS(dense, TOKENS), atol=1e-4)
    # By the chain rule through B A.
    grads, of_whole = (
        jax.jit(lt.value_and_grad(models.loss, f"outer/embed/{what}", has_aux=True))(each, batch)[1]
        for what, each in (("**/lora_*", model), ("weight", dense))
    )
    whole_grad, got = np.asarray(of_whole.outer["embed"]["weight"]), grads.outer["embed"]["weight"]
    np.testing.assert_allclose(got.lora_b, 2 / 3 * whole_grad @ a.T, atol=1e-5)
    np.testing.assert_allclose(got.lora_a, 2 / 3 * b.T @ whole_grad, atol=1e-5)


def test_gradients_of_a_frequent_token_add_up_in_float32() -> None:
    table = jax.random.normal(KEY, (8, 16), jnp.bfloat16)
    node = lt.lora.LoRAWeight(table, jnp.ones((2, 16)), jnp.zeros((8, 2)), alpha=2.0)
    total = lambda b: jnp.sum(rows(dataclasses.replace(node, lora_b=b), jnp.zeros(4096, int)).astype(jnp.float32))  # noqa: E731
    grads = np.asarray(jax.jit(jax.grad(total))(node.lora_b))
    np.testing.assert_array_equal(grads[0], 4096 * 16.0)
    assert not grads[1:].any()


@pytest.mark.slow
def test_files_come_back_and_are_merged(tmp_path: Path) -> None:
    model = adapted(base())
    lora.save(model, tmp_path)
    node: Any = model.outer["embed"]["weight"]
    tensors = load_file(tmp_path / WEIGHTS)
    np.testing.assert_array_equal(tensors[f"{EMBED}.lora_embedding_A"], np.asarray(node.lora_b).T)
    np.testing.assert_array_equal(tensors[f"{EMBED}.lora_embedding_B"], np.asarray(node.lora_a).T)
    again = lora.load(base(), tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, again, model)
    np.testing.assert_allclose(LOGITS(lora.merge(again), TOKENS), LOGITS(model, TOKENS), atol=1e-4)


def test_what_an_embedding_does_not_take_is_refused(tmp_path: Path) -> None:
    tied = base("qwen2", tie_embeddings=True)
    for options in ({"dora": True}, {"init": "pissa"}):
        with pytest.raises(ConfigError, match="outer/embed/weight: an embedding supports only LoRA and rsLoRA"):
            adapted(base(), **options)
    with pytest.raises(ConfigError, match="an embedding supports only LoRA(.|\n)*IA3Config"):
        lora.add(base(), lora.IA3Config(targets="outer/embed", feedforward=()))
    with pytest.raises(StructureError, match="outer/embed/weight is also the model's head"):
        adapted(tied, targets="outer/embed")
    lora.save(adapted(base("qwen2", tie_embeddings=False), targets="outer/embed"), tmp_path)
    with pytest.raises(ModelFileError, match="outer/embed/weight is also the model's head"):
        lora.load(tied, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(ModelFileError, match="the embedding outer/embed/weight supports only LoRA and rsLoRA"):
        lora.load(base("qwen2", tie_embeddings=False), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_frozen_weight_in_the_file_has_to_be_the_model_s(dtype: str, tmp_path: Path) -> None:
    model = adapted(base())
    lora.save(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    key = f"{EMBED}.base_layer.weight"
    weight = np.asarray(base().outer["embed"]["weight"]).astype(dtype)
    save_file({**tensors, key: weight}, tmp_path / WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, lora.load(base(), tmp_path), model)
    lora.load(jax.eval_shape(lambda: base()), tmp_path)
    for other, message in (
        (weight + weight.dtype.type(0.01), r"differs from outer/embed/weight(.|\n)*a difference of 0.01"),
        (weight[:-1], r"tensor .*base_layer.weight does not fit"),
    ):
        save_file({**tensors, key: other}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=message):
            lora.load(base(), tmp_path)
    save_file({**tensors, f"{EMBED}s.base_layer.weight": weight}, tmp_path / WEIGHTS)
    with pytest.raises(ModelFileError, match="1 unexpected: .*embed_tokenss"):
        lora.load(base(), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_embeddings_and_heads_of_peft(peer: Peer, tmp_path: Path) -> None:
    plain: Any = kinds.base("llama")

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw adapters; PEFT also writes the frozen weights of embeddings and heads."""
        if "base_layer" not in name:
            return kinds.drawn(name, shape)
        return np.asarray(plain.outer["lm_head" if "lm_head" in name else "embed"]["weight"])

    arguments = {"class": "LoraConfig", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    arguments["target_modules"] = ["embed_tokens", "lm_head", "q_proj"]
    folder = kinds.written("llama", tmp_path / "base")
    theirs = kinds.peft_adapter(peer, folder, arguments, tmp_path / "theirs", draw)
    assert f"{EMBED}.base_layer.weight" in load_file(theirs / WEIGHTS)
    ours = lora.load(plain, theirs)
    lora.save(ours, tmp_path / "ours")
    want = kinds.peft_logits(peer, folder, theirs, tmp_path / "ours")
    assert np.abs(want - kinds.our_logits(plain)).max() > 1e-2
    np.testing.assert_allclose(kinds.our_logits(ours), want, atol=1e-4)
    np.testing.assert_allclose(kinds.our_logits(lora.merge(ours)), want, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # with a head of its own, and tied
def test_resized_tables_that_peft_stored_replace_those_of_the_model(family: str, tmp_path: Path) -> None:
    plain, num_rows = base(family), KINDS[family].vocab_size + 3
    lora.save(adapted(plain, targets="**/q_proj"), tmp_path)
    tensors, draw = load_file(tmp_path / WEIGHTS), np.random.default_rng(0)
    embed = draw.normal(size=(num_rows, KINDS[family].hidden_size)).astype(np.float32)
    head = embed if KINDS[family].tie_embeddings else 2 * embed
    tensors |= {f"{EMBED}.weight": embed, "base_model.model.lm_head.weight": head}
    save_file(tensors, tmp_path / WEIGHTS)
    model = lora.load(plain, tmp_path)
    assert model.config.vocab_size == num_rows
    np.testing.assert_array_equal(model.outer["embed"]["weight"], embed)
    assert KINDS[family].tie_embeddings or np.array_equal(model.outer["lm_head"]["weight"], head)
    logits = LOGITS(model, TOKENS + 3)  # the last of them are new
    assert logits.shape[-1] == num_rows and np.isfinite(logits).all()
    models.save(lora.merge(model), tmp_path / "merged")
    np.testing.assert_allclose(LOGITS(models.load(tmp_path / "merged"), TOKENS + 3), logits, atol=1e-4)
    if not KINDS[family].tie_embeddings:
        save_file(tensors | {"base_model.model.lm_head.weight": head[:-1].copy()}, tmp_path / WEIGHTS)
        with pytest.raises(ModelFileError, match=f"different numbers of rows: {num_rows - 1} and {num_rows}"):
            lora.load(plain, tmp_path)
        save_file(tensors, tmp_path / WEIGHTS)
    abstract = lora.load(jax.eval_shape(lambda: plain), tmp_path)
    assert abstract.outer["embed"]["weight"].shape == embed.shape
