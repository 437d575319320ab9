"""Adapters of a decoder that a model of images and text holds: PEFT reads ours, and we read its."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lowtide import models
from lowtide.adapters import lora
from tests.models.kinds import KINDS
from tests.peers import Peer, normal

from .test_peft_kinds import base, our_logits, peft_adapter, peft_logits, written

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 4, "patch_size": 2}  # fmt: skip
OPTIONS = {
    "LoRA": {"class": "LoraConfig", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "VeRA": {"class": "VeraConfig", "r": 8, "target_modules": ["q_proj", "v_proj"]},
}
"""The tower of images has modules of these names, too."""


@pytest.fixture
def whole(peer: Peer, tmp_path: Path) -> Path:
    """A folder of Gemma3ForConditionalGeneration, as transformers writes it."""
    text = json.loads((written("gemma3_text", tmp_path / "text") / "config.json").read_text())

    def make(path: Path) -> None:
        import transformers

        config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        transformers.Gemma3ForConditionalGeneration(config).save_pretrained(path)

    return peer.folder(tmp_path / "whole", make, {"text": text, "vision": VISION}, normal)


@pytest.mark.filterwarnings("ignore:.*only its text decoder is read")
@pytest.mark.parametrize("kind", OPTIONS)
def test_adapters_go_to_peft_and_come_back(kind: str, peer: Peer, whole: Path, tmp_path: Path) -> None:
    model = models.load(whole)
    assert model.config.num_layers == KINDS["gemma3_text"].num_layers
    theirs = peft_adapter(peer, whole, OPTIONS[kind], tmp_path / "theirs")
    keys = [*load_file(theirs / "adapter_model.safetensors")]
    assert any("vision_tower" in key for key in keys)
    with pytest.warns(UserWarning, match="4 tensors of image modules are ignored, such as .*vision_tower"):
        adapted = lora.load(model, theirs)
    lora.save(adapted, tmp_path / "ours", base_model_name_or_path="base")
    logits = our_logits(adapted)
    assert np.abs(logits - our_logits(model)).max() > 1e-2
    np.testing.assert_allclose(logits, peft_logits(peer, whole, theirs, tmp_path / "ours"), atol=2e-4)


def rename(path: Path, old: str, new: str) -> None:
    tensors = {key.replace(old, new): values for key, values in load_file(path).items()}
    save_file(tensors, path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model."])
def test_names_of_other_versions_and_of_a_decoder_alone_are_read(prefix: str, tmp_path: Path) -> None:
    text = base("gemma3_text")
    nested = dataclasses.replace(text, config=dataclasses.replace(text.config, module_prefix="model.language_model."))
    for config in (lora.Config(rank=2, targets="**/q_proj"), lora.VeRAConfig(rank=2, targets="**/q_proj")):
        adapted = lora.add(nested, config, key=jax.random.key(1))
        lora.save(adapted, tmp_path)
        rename(tmp_path / "adapter_model.safetensors", "model.language_model.", prefix)
        jax.tree.map(np.testing.assert_array_equal, lora.load(nested, tmp_path), adapted)
        of_text = jax.tree.leaves(lora.load(text, tmp_path))
        for leaf, wanted in zip(of_text, jax.tree.leaves(adapted), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
