"""Greedy tokens compared with `transformers`; merged directories compared with PEFT."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lowtide import models
from lowtide.finetune import write_merged
from tests import peers

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

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
DELTA = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
}
# Every family's logits are compared in test_families.py, and a cache with no cache in test_generate.py.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": GEMMA,
    "Gemma3Text": {**GEMMA, **KINDS},
    "Phi3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    "GptOss": {**MIXTURE, "head_dim": 16, "sliding_window": 8},
    "Qwen3_5Text": DELTA,
    "Qwen3Next": {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Gemma4Text": {
        **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"sliding_window": 8, "hidden_size_per_layer_input": 0, "layer_types": KINDS["layer_types"][1:3] * 2},
    },
    "SmolLM3": {},
    "Ministral3": {"head_dim": 16},
}
PROMPTS = [[7, 5, 30, 9, 11], [*range(20, 39)]]  # one ends inside the window, one beyond it


def saved_by_transformers(family: str, peer: peers.Peer, path: Path) -> Path:
    """Write a random model as transformers does, with attention that is far from even."""
    options = {**SIZES, **FAMILIES[family]}

    def make(path: Path) -> None:
        import transformers

        config = getattr(transformers, f"{family}Config")(**options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # The embedding of a Gemma is its head, too: a large one would repeat the last token.
        return peers.normal(name, shape, 0.02 if family.startswith("Gemma") and "embed" in name else 0.16)

    return peer.folder(path, make, [family, options], draw)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "family",
    ["Llama", "Gemma3Text", "Phi3", "GptOss", "Qwen3_5Text", "Qwen3Next", "Gemma4Text", "SmolLM3", "Ministral3"],
)
def test_greedy_tokens_equal_those_of_transformers(family: str, peer: peers.Peer, tmp_path: Path) -> None:
    folder = saved_by_transformers(family, peer, tmp_path / "theirs")

    def compute() -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
        width = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
        tokens = theirs.generate(input_ids=ids, attention_mask=mask, **options)
        return {"tokens": tokens[:, width:].tolist()}

    want = peer.answer("greedy", compute, [folder, PROMPTS])["tokens"]
    ours = models.load(folder)
    sampling = models.Sampling(temperature=0)
    got = [[*c.tokens] for c in models.generate_batch(ours, PROMPTS, 20, key=jax.random.key(0), sampling=sampling)]
    assert got == want
    assert len({*got[0], *got[1]}) > 3


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe", "Qwen3_5Text"])
def test_transformers_reads_a_merged_directory_as_peft_computes(
    family: str, peer: peers.Peer, tiny_model_dir: str, tmp_path: Path
) -> None:
    base = saved_by_transformers(family, peer, tmp_path / "base")

    def make(path: Path) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        targets = ["q_proj", "v_proj", "o_proj"]
        config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=targets, task_type="CAUSAL_LM")
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(path)

    adapter = peer.folder(tmp_path / "adapter", make, family, lambda name, shape: peers.normal(name, shape, 0.1))

    def compute_adapted() -> dict[str, Any]:
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
        with torch.no_grad():
            logits = adapted(torch.tensor([PROMPTS[1]])).logits.numpy()
            with adapted.disable_adapter():
                plain = adapted(torch.tensor([PROMPTS[1]])).logits.numpy()
        return {"adapted": logits, "plain": plain}

    theirs = peer.answer("PEFT", compute_adapted, [base, adapter, PROMPTS[1]])
    shutil.copy(f"{tiny_model_dir}/tokenizer.json", base)
    write_merged(base, [adapter], tmp_path / "out", max_shard_bytes=40_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1

    def compute_merged() -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            return {"logits": merged(torch.tensor([PROMPTS[1]])).logits.numpy()}

    got = peer.answer("merged", compute_merged, [tmp_path / "out", PROMPTS[1]])["logits"]
    assert np.abs(theirs["plain"] - got).max() > 1e-2
    np.testing.assert_allclose(got, theirs["adapted"], atol=1e-4)
