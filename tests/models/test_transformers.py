"""The decoder compared with `transformers` on random small models, both ways through the file format."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from tests import peers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    "llama3": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
}
TOKENS = np.random.default_rng(0).integers(2, 97, (2, 50))
KEPT = slice(4, None, 5)
"""Positions whose logits are recorded. Each depends on all tokens before it."""


def saved_by_transformers(peer: peers.Peer, path: Path, kind: str, options: dict[str, Any]) -> Path:
    """Write a random model as transformers does."""

    def make(path: Path) -> None:
        import transformers

        config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
        getattr(transformers, f"{kind}ForCausalLM")(config(**options)).save_pretrained(path)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return peers.normal(name, shape, 1.0 if name.endswith("bias") else 0.2)

    return peer.folder(path, make, [kind, options], draw)


def read_by_transformers(peer: peers.Peer, name: str, folder: Path, tokens: Any) -> dict[str, Any]:
    """Logits of a folder, and the rotary parameters that transformers reads in it."""

    def compute() -> dict[str, Any]:
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor(tokens)).logits.numpy()[:, KEPT]
        return {"logits": logits, "rope": model.config.rope_parameters}

    return peer.answer(name, compute, [folder, tokens])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, peer: peers.Peer, tmp_path: Path) -> None:
    theirs = saved_by_transformers(peer, tmp_path / "theirs", "Llama", {**SIZES, **CASES[case]})
    ours = models.load(theirs)
    want = read_by_transformers(peer, "logits of theirs", theirs, TOKENS)["logits"]
    got = models.logits(ours, jnp.asarray(TOKENS, jnp.int32))[:, KEPT]
    assert np.abs(want - got).max() < 1e-4

    models.save(ours, tmp_path / "ours", max_shard_bytes=30_000)
    again = read_by_transformers(peer, "logits of ours", tmp_path / "ours", TOKENS)["logits"]
    np.testing.assert_array_equal(again, want)


GEMMA3 = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "eos_token_id": 1}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window_pattern": 2, "attn_logit_softcapping": 0.05, "final_logit_softcapping": 0.2},
    ],
    ids=["all sliding", "all full", "caps"],
)
@pytest.mark.filterwarnings("ignore:.*attn_logit_softcapping is not applied:UserWarning")
def test_gemma3_with_layers_of_one_kind_and_caps(options: dict[str, Any], peer: peers.Peer, tmp_path: Path) -> None:
    theirs = saved_by_transformers(peer, tmp_path / "theirs", "Gemma3", {**GEMMA3, **options})
    ours = models.load(theirs)
    want = read_by_transformers(peer, "logits of theirs", theirs, TOKENS)
    got = models.logits(ours, jnp.asarray(TOKENS, jnp.int32))[:, KEPT]
    assert np.abs(want["logits"] - got).max() < 1e-4
    assert np.abs(want["logits"]).max() > 0.1

    models.save(ours, tmp_path / "ours")
    again = read_by_transformers(peer, "logits of ours", tmp_path / "ours", TOKENS)
    np.testing.assert_array_equal(again["logits"], want["logits"])
    assert models.load(tmp_path / "ours").config == ours.config
    for kind in ("full_attention", "sliding_attention"):
        assert again["rope"][kind] == want["rope"][kind]


@pytest.mark.slow
def test_the_embedded_model_loads_in_transformers(peer: peers.Peer) -> None:
    folder = Path(models.base_path())
    text = "def main(argv=None):\n    return 0\n"

    def tokenize() -> dict[str, Any]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text)["input_ids"]
        return {"ids": ids, "text": tokenizer.decode(ids)}

    tokenized = peer.answer("tokens", tokenize, [{"tokenizer": folder / "tokenizer.json"}, text])
    ids = tokenized["ids"]
    assert ids == models.load_tokenizer(models.base_path()).encode(text).ids
    assert tokenized["text"] == text
    ours = models.load(models.base_path())
    want = read_by_transformers(peer, "logits", folder, [ids])["logits"]
    assert np.abs(want - models.logits(ours, jnp.asarray([ids], jnp.int32))[:, KEPT]).max() < 1e-4
    assert jax.tree.leaves(ours)[0].dtype == jnp.bfloat16
