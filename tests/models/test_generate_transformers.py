"""Greedy tokens beside those of `transformers`, for every family; merged directories beside PEFT."""

import shutil

import jax
import numpy as np
import pytest

from lowtide import models
from lowtide.finetune import write_merged

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}
KINDS = {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 8, "head_dim": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": GEMMA,
    "Gemma3Text": {**GEMMA, **KINDS},
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": MIXTURE,
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "GptOss": {**MIXTURE, "head_dim": 16, "sliding_window": 8},
}
PROMPTS = [[7, 5, 30, 9, 11], [*range(20, 39)]]  # one ends inside of the window, one beyond it


def _theirs(family, folder):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # Larger, so that attention is not even and tokens change. The embedding of a Gemma is its head, too.
    factor, left = (3, "embed") if family.startswith("Gemma") else (8, "nothing")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and left not in name:
            parameter.data *= factor
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family, tmp_path):
    import torch

    theirs = _theirs(family, tmp_path)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    want = theirs.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()
    sampling = models.Sampling(temperature=0)
    ours = models.load(tmp_path)
    got = [[*c.tokens] for c in models.generate_batch(ours, PROMPTS, 20, key=jax.random.key(0), sampling=sampling)]
    assert got == want
    assert len({*got[0], *got[1]}) > 3


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe"])
def test_transformers_reads_a_merged_directory_as_peft_computes(family, tiny_model_dir, tmp_path):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    base = _theirs(family, tmp_path / "base")
    shutil.copy(f"{tiny_model_dir}/tokenizer.json", tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        want = adapted(tokens).logits.numpy()
    write_merged(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out", max_shard_bytes=40_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        got = merged(tokens).logits.numpy()
        with adapted.disable_adapter():
            plain = adapted(tokens).logits.numpy()
    assert np.abs(plain - got).max() > 1e-2
    np.testing.assert_allclose(got, want, atol=1e-4)
