"""Every family beside `transformers` and PEFT: logits, padding, packing, files, gradients of adapters."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import models
from lowtide.adapters import lora

from .kinds import KINDS

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ADAPTED = {"phi3": ("**/qkv_proj", "**/o_proj", "**/gate_up_proj"), "olmo2": ("layers/**/*_proj",)}


def random_model(kind: str) -> models.Decoder:
    """A model whose logits are far from even, with norms, biases and sinks that do something."""

    def fill(path: Any, leaf: Any) -> Any:
        noise = jax.random.normal(jax.random.key(len(str(path))), leaf.shape)
        if leaf.dtype == jnp.int32:
            return leaf
        return leaf + 0.3 * noise if leaf.ndim < 3 and path[-2].key != "embed" else leaf * 6

    return jax.tree_util.tree_map_with_path(fill, models.init(KINDS[kind], key=jax.random.key(0)))


@functools.cache
def written(kind: str, folder: Path) -> Path:
    models.save(random_model(kind), folder / kind.replace(" ", "_"))
    return folder / kind.replace(" ", "_")


def both(kind: str, folder: Path) -> tuple[models.Decoder, Any]:
    """The model as it is read again, and as `transformers` reads it: anew, for its frequencies have a state."""
    from transformers import AutoModelForCausalLM

    folder = written(kind, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return models.load(folder), theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def drawn(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(1, 96, (rows, length))


def their_logits(theirs: Any, tokens: np.ndarray, **given: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.tensor(tokens), **{k: torch.tensor(v) for k, v in given.items()}).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_with_padding_packing_and_beyond_the_window(kind: str, folder: Path) -> None:
    ours, theirs = both(kind, folder)
    logits = jax.jit(models.logits)
    # Padding on the left: what fills a row up is another segment, and positions begin after it.
    tokens, pad = drawn(2, 24), np.array([0, 9])
    keep = np.arange(24)[None] >= pad[:, None]
    positions = np.maximum(np.arange(24)[None] - pad[:, None], 0)
    want = their_logits(theirs, tokens, attention_mask=keep.astype(int), position_ids=positions)
    segments = jnp.asarray(keep, jnp.int32)
    got = logits(ours, jnp.asarray(tokens), segment_ids=segments, positions=jnp.asarray(positions))
    assert np.abs(np.where(keep[..., None], want - got, 0)).max() < 1e-4
    # Packing: two documents in one row are as each by itself.
    lengths = (21, 11)
    starts = np.concatenate([np.arange(length) for length in lengths])
    ids = np.repeat([1, 2], lengths)
    row = drawn(1, sum(lengths))
    got = logits(ours, jnp.asarray(row), segment_ids=jnp.asarray(ids)[None], positions=jnp.asarray(starts)[None])
    apart = [their_logits(theirs, part) for part in np.split(row, [lengths[0]], axis=1)]
    assert np.abs(np.concatenate(apart, axis=1) - got).max() < 1e-4
    # In this order: frequencies that follow the length stay with the longest in transformers.
    for length in (5, 24, 50):
        tokens = drawn(2, length)
        want = their_logits(theirs, tokens)
        assert np.abs(want - logits(ours, jnp.asarray(tokens))).max() < 1e-4
        assert np.abs(want).max() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_writes_the_same_tensors_again(kind: str, folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    _, theirs = both(kind, folder)
    theirs.save_pretrained(tmp_path / "theirs")
    read = models.load(tmp_path / "theirs")
    wanted = dataclasses.replace(KINDS[kind], bos_token_id=read.config.bos_token_id)
    assert dataclasses.replace(read.config, eos_token_id=None, sliding_layers=wanted.sliding_layers) == wanted
    models.save(read, tmp_path / "ours")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    one.pop("lm_head.weight", None) if read.config.tie_embeddings else None
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_equal_peft(kind: str, folder: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.numpy import load_file

    ours, theirs = both(kind, folder)
    model = lora.add(ours, lora.Config(rank=3, alpha=6, targets=ADAPTED.get(kind, "**/*_proj")), key=jax.random.key(1))

    def fill(path: Any, leaf: Any) -> Any:
        fresh = path[-1] == jax.tree_util.GetAttrKey("lora_b")
        return 0.3 * jax.random.normal(jax.random.key(len(str(path))), leaf.shape) if fresh else leaf

    model = jax.tree_util.tree_map_with_path(fill, model)
    lora.save(model, tmp_path / "adapter")
    tuned = PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    tokens = drawn(2, 24)
    labels = np.where(np.arange(24)[None] >= 7, tokens, -100)
    loss = tuned(input_ids=torch.tensor(tokens), labels=torch.tensor(labels)).loss
    loss.backward()

    shifted = np.concatenate([labels[:, 1:], np.full((2, 1), -100)], axis=1)
    batch = {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(shifted)}
    step = jax.jit(lt.value_and_grad(lambda m, b: models.loss(m, b)[0], wrt="**/lora_*"))
    value, grads = step(model, batch)
    assert abs(float(loss.detach()) - float(value)) < 1e-4
    # Written as an adapter, gradients have the names that PEFT knows.
    lora.save(lt.combine(grads, lt.partition(model, "**/lora_*")[1]), tmp_path / "grads")
    ours = load_file(tmp_path / "grads" / "adapter_model.safetensors")
    got = {name.replace(".default.", "."): p.grad.numpy() for name, p in tuned.named_parameters() if p.grad is not None}
    assert got.keys() == ours.keys() and len(got) > 0
    for name, gradient in got.items():
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4, err_msg=name)
