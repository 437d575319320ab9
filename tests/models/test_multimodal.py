"""Text models in the folders of multimodal models, and in folders that lack a head or fuse experts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import models
from lowtide.core import ModelFileError

from .kinds import KINDS


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the experts of each layer, as in published files of multimodal models."""
    joined = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        prefix = name.partition("0.gate_proj")[0]

        def stack(part: str, prefix: str = prefix) -> np.ndarray:
            return np.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(4)])

        joined[f"{prefix}gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], axis=1)
        joined[f"{prefix}down_proj"] = stack("down")
    return joined


def test_a_multimodal_folder_gives_the_text_model(tmp_path: Path) -> None:
    model = models.init(KINDS["qwen3_5_moe_text"], key=jax.random.key(0), dtype=jnp.bfloat16)
    models.save(model, tmp_path / "text")
    tensors, config = (
        load_file(tmp_path / "text/model.safetensors"),
        json.loads((tmp_path / "text/config.json").read_text()),
    )
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in fused(tensors).items()}
    nested |= {name: np.zeros(3, np.float32) for name in ("model.visual.patch_embed.proj.bias", "mtp.norm.weight")}
    architecture = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    folder = write(tmp_path / "all", nested, {**architecture, "text_config": config})
    with pytest.warns(UserWarning, match="only its text decoder is read"):
        read = models.load(folder)
    jax.tree.map(np.testing.assert_array_equal, (read.outer, read.layers), (model.outer, model.layers))
    adapted = lt.lora.add(read, lt.lora.Config(rank=2, alpha=2, targets="**/q_proj"), key=jax.random.key(0))
    lt.lora.save(adapted, tmp_path / "adapter")
    names = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert min(names) == "base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_A.weight"
    models.save(read, tmp_path / "again")  # as a text model, with a tensor for each expert
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == tensors.keys() and all(np.array_equal(again[name], tensors[name]) for name in tensors)


def test_the_text_model_decides_the_family(tmp_path: Path) -> None:
    models.save(models.init(KINDS["mistral"], key=jax.random.key(0)), tmp_path / "text")
    config = json.loads((tmp_path / "text/config.json").read_text())
    architecture = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    del config["rope_theta"], config["rope_scaling"]
    for text_type in ("mistral", "ministral3"):
        outer = {**architecture, "text_config": {**config, "model_type": text_type}}
        folder = write(tmp_path / text_type, {}, outer)
        with pytest.warns(UserWarning, match="only its text decoder is read"):
            assert models.load_config(folder).family == text_type
    folder = write(tmp_path / "other", {}, {**architecture, "text_config": {**config, "model_type": "llama"}})
    with pytest.raises(ModelFileError, match="unknown architecture 'Mistral3ForConditionalGeneration'"):
        models.load_config(folder)


def test_embedding_models_lack_a_prefix(tmp_path: Path) -> None:
    models.save(models.init(KINDS["qwen3"], key=jax.random.key(0)), tmp_path / "whole")
    tensors = load_file(tmp_path / "whole/model.safetensors")
    config = {**json.loads((tmp_path / "whole/config.json").read_text()), "tie_word_embeddings": True}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    read = models.load(write(tmp_path / "bare", bare, config))
    np.testing.assert_array_equal(read.outer["embed"]["weight"], tensors["model.embed_tokens.weight"])
