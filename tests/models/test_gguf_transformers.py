"""GGUF files compared with transformers, whose code dequantises them and undoes their conversion independently."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.models import Experts
from tests import peers

from .kinds import KINDS

gguf = pytest.importorskip("gguf", reason="needs lowtide[gguf]")
from gguf import GGMLQuantizationType as Kind  # noqa: E402

from .gguf_files import metadata, write_gguf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "attention_scale": None}
PLAIN = {"rope_scaling": None, "attention_bias": False, "mlp_bias": False}
ALL = {"sliding_window": None, "sliding_layers": None}
KEPT = np.s_[:, 2::3, :96]
"""Positions and tokens whose logits are recorded."""
CHANGES = {
    "llama": PLAIN,
    "phi3": {"rope_scaling": None, "rotary_fraction": 1.0, "vocab_size": 32_001},  # its class has a token 32,000
    "qwen2": {"attention_bias": True},
    # transformers reads no head size, head scale, soft cap or expert share in a file: these are its defaults.
    "qwen3": {**ALL, "head_dim": 128},
    "qwen3_moe": {"experts": Experts(num_experts=4, num_experts_per_token=2, intermediate_size=768)},
    "gemma2": {"attention_soft_cap": 50.0, "final_soft_cap": 30.0, "head_dim": 256},
    "gemma3_text": {**PLAIN, "head_dim": 256, "num_layers": 7, "sliding_layers": (True,) * 5 + (False, True)},
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, Kind.Q8_0) for name in CHANGES), ("llama", Kind.F32), ("qwen3_moe", Kind.F32)]
)
def test_logits_are_those_of_transformers(name: str, kind: Kind, peer: peers.Peer, tmp_path: Path) -> None:
    config = dataclasses.replace(KINDS[name], **{**WIDE, **CHANGES[name]}, bos_token_id=1, eos_token_id=2)

    def fill(path: Any, leaf: Any) -> Any:
        if leaf.dtype == jnp.int32:
            return leaf
        noise = peers.normal(jax.tree_util.keystr(path), leaf.shape, std=0.02)
        is_matrix = leaf.ndim > 2 or path[-2].key in ("embed", "lm_head")
        return jnp.asarray(noise if is_matrix else leaf + noise, "float32")

    model = models.init(config, key=jax.random.key(0), dtype="float32")
    models.save(jax.tree_util.tree_map_with_path(fill, model), tmp_path / "hf")
    tensors = write_gguf(tmp_path / "model.gguf", tmp_path / "hf", kind)
    values = metadata(json.loads((tmp_path / "hf" / "config.json").read_text()))
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))

    def compute() -> dict[str, np.ndarray]:
        import torch
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
        with torch.no_grad():
            return {"logits": theirs(torch.tensor(tokens)).logits.numpy()[KEPT]}

    want = peer.answer("logits", compute, [kind.name, values, tensors, tokens])["logits"]
    got = jax.jit(models.logits)(models.load(tmp_path / "model.gguf", dtype="float32"), jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got[KEPT], want, rtol=2e-4, atol=1e-4)
