"""The decoder beside `transformers`' LlamaForCausalLM on random small models, both ways through the file format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

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
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "grouped": {"num_key_value_heads": 2},
    "one_kv_head": {"num_key_value_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    "llama3": {"rope_parameters": LLAMA3, "num_key_value_heads": 2},
}


def _torch_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**{**SIZES, **CASES[case]})).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = models.load(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 97, (2, 50))
    want = _torch_logits(theirs, tokens)
    got = models.logits(ours, jnp.asarray(tokens, jnp.int32))
    assert np.abs(want - got).max() < 1e-4

    models.save(ours, tmp_path / "ours", max_shard_bytes=30_000)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(_torch_logits(again, tokens), want)


GEMMA3 = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "eos_token_id": 1}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"layer_types": ["full_attention"] * 3},
        {"sliding_window_pattern": 2, "attn_logit_softcapping": 0.05, "final_logit_softcapping": 0.2},
    ],
    ids=["all sliding", "all full", "caps"],
)
@pytest.mark.filterwarnings("ignore:.*attn_logit_softcapping is not applied:UserWarning")
def test_gemma3_with_layers_of_one_kind_and_caps_equals_transformers(given, tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    theirs = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3, **given)).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = models.load(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(2, 97, (2, 50))
    want = _torch_logits(theirs, tokens)
    assert np.abs(want - models.logits(ours, jnp.asarray(tokens, jnp.int32))).max() < 1e-4
    assert np.abs(want).max() > 0.1

    models.save(ours, tmp_path / "ours")
    again = Gemma3ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(_torch_logits(again, tokens), want)
    assert models.load(tmp_path / "ours").config == ours.config
    assert again.config.rope_parameters["full_attention"] == theirs.config.rope_parameters["full_attention"]
    assert again.config.rope_parameters["sliding_attention"] == theirs.config.rope_parameters["sliding_attention"]


def test_the_embedded_model_loads_in_transformers():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(models.base_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(models.base_path())
    text = "def main(argv=None):\n    return 0\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == models.load_tokenizer(models.base_path()).encode(text).ids
    assert tokenizer.decode(ids) == text
    ours = models.load(models.base_path())
    got = models.logits(ours, jnp.asarray([ids], jnp.int32))
    assert np.abs(_torch_logits(theirs, [ids]) - got).max() < 1e-4
    assert jax.tree.leaves(ours)[0].dtype == jnp.bfloat16
