"""DoRA, rsLoRA, (IA)³ and VeRA beside PEFT: what it trained gives its logits here, and what is written here, there."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.adapters import lora
from tests.models.kinds import KINDS

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(1, 96, (2, 11))
FAMILIES = ["qwen2", "llama", "mistral", "gemma2", "olmo2", "qwen3", "gemma3_text", "phi3"]
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss"]  # PEFT has DoRA, (IA)³ and VeRA of their attention alone
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def options(kind: str, family: str) -> Any:
    import peft

    every, inputs = (EVERY[:4], []) if family in MIXTURES else (EVERY, ["down_proj"])
    plain: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": every, "task_type": "CAUSAL_LM"}
    layers = {"layers_to_transform": [0, 2], "target_modules": ["q_proj", "down_proj"]}
    return {
        "DoRA": lambda: peft.LoraConfig(**plain, use_dora=True),
        "rsLoRA": lambda: peft.LoraConfig(
            **plain,
            use_rslora=True,
            rank_pattern={"q_proj": 2, "layers.1.self_attn.o_proj": 6},
            alpha_pattern={"layers.0.self_attn.o_proj": 3},
        ),
        "some layers": lambda: peft.LoraConfig(**(plain | layers), use_dora=True, alpha_pattern={"down_proj": 3}),
        "(IA)³": lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj", *inputs],
            feedforward_modules=inputs,
            task_type="CAUSAL_LM",
        ),
        "VeRA": lambda: peft.VeraConfig(r=8, target_modules=every, task_type="CAUSAL_LM"),
    }[kind]()


@functools.cache
def base(family: str) -> models.Decoder:
    def fill(path: Any, leaf: Any) -> Any:
        noise = jax.random.normal(jax.random.key(len(str(path))), leaf.shape)
        if leaf.dtype == jnp.int32:
            return leaf
        return leaf + 0.3 * noise if leaf.ndim < 3 and path[-2].key != "embed" else leaf * 6

    return jax.tree_util.tree_map_with_path(fill, models.init(KINDS[family], key=KEY))


def their_base(family: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        models.save(base(family), folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def theirs_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def ours_logits(model: models.Decoder) -> np.ndarray:
    return np.asarray(jax.jit(models.logits)(model, jnp.asarray(TOKENS)))


def trained(family: str, kind: str, folder: Path) -> Any:
    """An adapter of a kind that PEFT trained for a few steps."""
    return trained_with(family, options(kind, family), folder)


def trained_with(family: str, config: Any, folder: Path) -> Any:
    """An adapter that PEFT trained for a few steps."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(their_base(family, folder), config).train()
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(found, 0.05)
    for _ in range(3):
        model(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


CASES = [("qwen2", kind) for kind in ("DoRA", "rsLoRA", "some layers", "(IA)³", "VeRA")]
CASES += [(family, kind) for family in FAMILIES[1:] + MIXTURES for kind in ("DoRA", "(IA)³", "VeRA")]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_peft_trained_gives_its_logits_here_and_goes_back(family: str, kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(family, kind, tmp_path / "base")
    want, plain = theirs_logits(model), ours_logits(base(family))
    model.save_pretrained(tmp_path / "theirs")
    ours = lora.load(base(family), tmp_path / "theirs")
    assert np.abs(want - plain).max() > 1e-2
    np.testing.assert_allclose(ours_logits(ours), want, atol=1e-4)
    np.testing.assert_allclose(ours_logits(lora.merge(ours)), want, atol=1e-4)
    np.testing.assert_array_equal(ours_logits(lora.disable(ours)), plain)
    lora.save(ours, tmp_path / "ours")
    again = PeftModel.from_pretrained(their_base(family, tmp_path / "base"), tmp_path / "ours")
    np.testing.assert_allclose(theirs_logits(again), want, atol=1e-4)
    back = lora.load(base(family), tmp_path / "ours")
    assert jax.tree.structure(back) == jax.tree.structure(ours)
    jax.tree.map(np.testing.assert_array_equal, back, ours)
