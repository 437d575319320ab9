"""Every family compared with `transformers` and PEFT: logits, padding, packing, files, gradients of adapters."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora
from tests import peers

from .kinds import KINDS

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ADAPTED = {
    "phi3": ("**/qkv_proj", "**/o_proj", "**/gate_up_proj"),
    "olmo2": ("layers/**/*_proj",),
    # PEFT 0.21 converts the names gate_proj, up_proj and down_proj to those of experts, also for the shared expert.
    "glm4_moe": ("**/attn/*_proj",),  # for the reason of qwen3_next
    "gemma4_text experts": ("**/*_proj", "**/experts/*"),
    "qwen3_next": ("**/delta/{*_proj,beta_step}", "**/attn/*_proj"),
    "qwen3_5_text": ("**/*_proj", "**/delta/{beta,step}"),
}
# The backward pass of every other kind has the same code: rotary frequencies are constants.
WITH_GRADIENTS = ["llama", "gemma2", "gemma3_text", "phi3", "olmo2", "mixtral", "qwen3_moe", "gpt_oss"]
WITH_GRADIENTS += [
    "qwen3_5_text",
    "qwen3_next",
    "granite",
    "smollm3",
    "ministral3",
    "gemma4_text",
    "gemma4_text experts",
    "glm4_moe",
]


def random_model(kind: str) -> models.Decoder:
    """A model whose logits are far from even, with norms, biases and sinks that do something."""

    def fill(path: Any, leaf: Any) -> Any:
        if leaf.dtype == jnp.int32:
            return leaf
        noise = peers.normal(jax.tree_util.keystr(path), leaf.shape, std=1.0)
        if "q_norm" in jax.tree_util.keystr(path) and KINDS[kind].attention_scale == 1:
            # Gemma 4 does not scale scores, and its own norms are small. With large scores, rounding grows, too.
            return jnp.asarray(0.2 + 0.1 * noise, leaf.dtype)
        is_matrix = leaf.ndim > 2 or path[-2].key in ("embed", "lm_head")
        return jnp.asarray(noise * 0.12 if is_matrix else leaf + 0.3 * noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, models.init(KINDS[kind], key=jax.random.key(0)))


@functools.cache
def saved(kind: str, folder: Path) -> Path:
    models.save(random_model(kind), folder / kind.replace(" ", "_"))
    return folder / kind.replace(" ", "_")


def read_by_transformers(folder: Path) -> Any:
    """Load a model anew: its frequencies may follow the longest sequence so far."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def random_tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(1, 96, (rows, length))


def logits_of(theirs: Any, tokens: np.ndarray, **kwargs: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(tokens), **{k: torch.tensor(v) for k, v in kwargs.items()}).logits.numpy()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_padding_packing_and_beyond_the_window(kind: str, peer: peers.Peer, folder: Path) -> None:
    # Row 1 has padding on the left: the padding is another segment, and positions begin after it.
    # Row 2 has two documents: each has the logits that it has alone.
    tokens, lengths, padding = random_tokens(3, 32), (21, 11), np.array([[0], [9]])
    positions = np.maximum(np.arange(32)[None] - padding, 0)
    is_token = np.arange(32)[None] >= padding
    documents = np.split(tokens[2:], [lengths[0]], axis=1)
    # Ascending: transformers keeps the frequencies of the longest sequence.
    sequences = [random_tokens(2, length) for length in (5, 50)]

    def compute() -> dict[str, np.ndarray]:
        theirs = read_by_transformers(saved(kind, folder))
        padded = logits_of(theirs, tokens[:2], attention_mask=is_token.astype(int), position_ids=positions)
        packed = np.concatenate([logits_of(theirs, document) for document in documents], axis=1)
        short, long = (logits_of(theirs, sequence) for sequence in sequences)
        return {"padded and packed": np.concatenate([padded, packed])[:, ::3], "short": short, "long": long[:, 4::5]}

    question = [saved(kind, folder), tokens, lengths, is_token, positions, sequences]
    want = peer.answer("logits", compute, question)
    ours, logits = models.load(saved(kind, folder)), jax.jit(models.logits)
    segments = np.concatenate([is_token.astype(int), np.repeat([1, 2], lengths)[None]])
    starts = np.concatenate([np.arange(length) for length in lengths])
    positions = np.concatenate([positions, starts[None]])
    got = logits(ours, jnp.asarray(tokens), segment_ids=jnp.asarray(segments), positions=jnp.asarray(positions))
    difference = np.where(segments[..., None] > 0, got, np.nan)[:, ::3] - want["padded and packed"]
    assert np.nanmax(np.abs(difference)) < 1e-4
    assert np.isnan(difference).any(axis=-1).sum() == 3  # the recorded positions of padding
    got = logits(ours, jnp.asarray(sequences[1]))[:, 4::5]
    assert np.abs(want["long"] - got).max() < 1e-4
    assert np.abs(want["long"]).max() > (0.5 if KINDS[kind].logits_scaling == 1 else 0.05)
    if KINDS[kind].rope_scaling is not None:  # Frequencies may depend on the length.
        assert np.abs(want["short"] - logits(ours, jnp.asarray(sequences[0]))).max() < 1e-4


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_writes_the_same_tensors_again(kind: str, peer: peers.Peer, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(saved(kind, folder) / "model.safetensors")

    def expected(name: str, shape: tuple[int, ...]) -> np.ndarray:
        is_tied = name == "lm_head.weight" and KINDS[kind].tie_embeddings
        return tensors["model.embed_tokens.weight" if is_tied else name]

    def make(path: Path) -> None:
        read_by_transformers(saved(kind, folder)).save_pretrained(path)
        for name, tensor in load_file(path / "model.safetensors").items():
            np.testing.assert_array_equal(tensor, expected(name, tensor.shape), err_msg=name)

    theirs = peer.folder(tmp_path / "theirs", make, saved(kind, folder), expected)
    read = models.load(theirs)
    wanted = dataclasses.replace(KINDS[kind], bos_token_id=read.config.bos_token_id)
    assert dataclasses.replace(read.config, eos_token_id=None, sliding_layers=wanted.sliding_layers) == wanted
    models.save(read, tmp_path / "ours")
    want, got = (load_file(path / "model.safetensors") for path in (theirs, tmp_path / "ours"))
    want.pop("lm_head.weight", None) if read.config.tie_embeddings else None
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(tensor, got[name], err_msg=name)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", WITH_GRADIENTS)
def test_gradients_of_adapters_equal_peft(kind: str, peer: peers.Peer, folder: Path, tmp_path: Path) -> None:
    model = models.load(saved(kind, folder))
    model = lora.add(model, lora.Config(rank=3, alpha=6, targets=ADAPTED.get(kind, "**/*_proj")), key=jax.random.key(1))

    def fill(path: Any, leaf: Any) -> Any:
        scales = {jax.tree_util.GetAttrKey("lora_a"): 0.1, jax.tree_util.GetAttrKey("lora_b"): 0.3}
        values = peers.normal(jax.tree_util.keystr(path), leaf.shape, scales.get(path[-1], 0.0))
        return jnp.asarray(values, leaf.dtype) if path[-1] in scales else leaf

    model = jax.tree_util.tree_map_with_path(fill, model)
    lora.save(model, tmp_path / "adapter")
    tokens = random_tokens(2, 24)
    labels = np.where(np.arange(24)[None] >= 7, tokens, -100)

    def compute() -> dict[str, Any]:
        import torch
        from peft import PeftModel

        theirs = read_by_transformers(saved(kind, folder))
        tuned = PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
        loss = tuned(input_ids=torch.tensor(tokens), labels=torch.tensor(labels)).loss
        loss.backward()
        grads = {name: p.grad.numpy() for name, p in tuned.named_parameters() if p.grad is not None}
        grads = {name.replace(".default.", "."): peers.thin(grad, 5) for name, grad in grads.items()}
        return {"loss": float(loss.detach()), **grads}

    answer = peer.answer("gradients", compute, [saved(kind, folder), tmp_path / "adapter", tokens, labels])
    shifted = np.concatenate([labels[:, 1:], np.full((2, 1), -100)], axis=1)
    batch = {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(shifted)}
    step = jax.jit(lt.value_and_grad(lambda m, b: models.loss(m, b)[0], wrt="**/lora_*"))
    value, grads = step(model, batch)
    assert abs(answer.pop("loss") - float(value)) < 1e-4
    # Gradients that are saved as an adapter have the names that PEFT uses.
    lora.save(lt.combine(grads, lt.partition(model, "**/lora_*")[1]), tmp_path / "grads")
    ours = load_file(tmp_path / "grads" / "adapter_model.safetensors")
    assert answer.keys() == ours.keys() and len(ours) > 0
    for name, gradient in answer.items():
        np.testing.assert_allclose(peers.thin(ours[name], 5), gradient, rtol=0, atol=1e-4, err_msg=name)
