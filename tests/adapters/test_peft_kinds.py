"""DoRA, rsLoRA, (IA)³ and VeRA compared with PEFT: logits of its files here, and of our files there."""

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
from tests.peers import Draw, Peer, normal

# PEFT's other warnings stay errors: missing and unexpected keys are only warnings to it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(1, 96, (2, 11))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODULES = {
    "qwen2": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "llama": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "gemma3_text": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_oss": ATTENTION,  # PEFT has DoRA, (IA)³ and VeRA of a mixture's attention alone
}
"""Modules by families that differ in what adapter files depend on: some biases, biases everywhere, no bias and a tied
head, fused projections, a mixture of experts."""


def options(kind: str, family: str) -> dict[str, Any]:
    """Return arguments of PEFT's configuration, with the name of its class."""
    modules = MODULES[family]
    plain = {"class": "LoraConfig", "r": 4, "lora_alpha": 8, "target_modules": modules, "task_type": "CAUSAL_LM"}
    outputs = [name for name in modules if name in ("k_proj", "v_proj", "qkv_proj")]
    inputs = [name for name in modules if name == "down_proj"]
    return {
        "DoRA": plain | {"use_dora": True},
        "rsLoRA": plain
        | {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.o_proj": 6},
            "alpha_pattern": {"layers.0.self_attn.o_proj": 3},
        },
        "some layers": plain
        | {
            "use_dora": True,
            "layers_to_transform": [0, 2],
            "target_modules": ["q_proj", "down_proj"],
            "alpha_pattern": {"down_proj": 3},
        },
        "(IA)³": {
            "class": "IA3Config",
            "target_modules": [*outputs, *inputs],
            "feedforward_modules": inputs,
            "task_type": "CAUSAL_LM",
        },
        "VeRA": {"class": "VeraConfig", "r": 8, "target_modules": modules, "task_type": "CAUSAL_LM"},
    }[kind]


@functools.cache
def base(family: str) -> models.Decoder:
    def fill(path: Any, leaf: Any) -> Any:
        noise = jax.random.normal(jax.random.key(len(str(path))), leaf.shape)
        if leaf.dtype == jnp.int32:
            return leaf
        return leaf + 0.3 * noise if leaf.ndim < 3 and path[-2].key != "embed" else leaf * 6

    return jax.tree_util.tree_map_with_path(fill, models.init(KINDS[family], key=KEY))


def written(family: str, folder: Path) -> Path:
    """Return a folder with the base model as we save it."""
    if not (folder / "config.json").exists():
        models.save(base(family), folder)
    return folder


def in_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def in_peft(folder: Path, arguments: dict[str, Any]) -> Any:
    """Return transformers' model of a folder with new adapters of PEFT, of the ``class`` and ``dtype`` of arguments."""
    import peft
    import torch

    options = {key: value for key, value in arguments.items() if key not in ("class", "dtype")}
    model = peft.get_peft_model(in_transformers(folder), getattr(peft, arguments["class"])(**options))
    return model.to(getattr(torch, arguments.get("dtype", "float32")))


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a tensor of an adapter; factors that multiply an output are near 1."""
    values = normal(name, shape, std=0.1)
    return 1 + values if "magnitude" in name or "ia3" in name else values


def peft_adapter(peer: Peer, folder: Path, arguments: dict[str, Any], path: Path, draw: Draw = drawn) -> Path:
    """Return an adapter that PEFT writes for the base model in a folder."""

    def make(path: Path) -> None:
        in_peft(folder, arguments).save_pretrained(path)
        config = path / "adapter_config.json"
        config.write_text(config.read_text().replace(str(folder), "base"))  # no temporary folder in a recording

    return peer.folder(path, make, {"base": folder, "options": arguments}, draw)


def peft_logits(peer: Peer, folder: Path, *adapters: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Return PEFT's logits of an adapter; it has the same logits for the further adapters."""

    def compute() -> dict[str, np.ndarray]:
        import peft

        read = [peft.PeftModel.from_pretrained(in_transformers(folder), adapter) for adapter in adapters]
        first, *others = [torch_logits(model, tokens) for model in read]
        for other in others:
            np.testing.assert_allclose(other, first, atol=1e-4)
        return {"logits": first}

    question = {"base": folder, "tokens": tokens, "adapters": list(adapters)}
    return peer.answer("logits", compute, question)["logits"]


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(tokens).long()).logits.numpy()


def our_logits(model: models.Decoder) -> np.ndarray:
    return np.asarray(jax.jit(models.logits)(model, jnp.asarray(TOKENS)))


CASES = [("qwen2", "rsLoRA"), ("qwen2", "some layers")]
CASES += [(family, kind) for family in MODULES for kind in ("DoRA", "(IA)³", "VeRA")]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_adapter_of_peft_gives_its_logits_here_and_goes_back(
    family: str, kind: str, peer: Peer, tmp_path: Path
) -> None:
    folder = written(family, tmp_path / "base")
    theirs = peft_adapter(peer, folder, options(kind, family), tmp_path / "theirs")
    ours = lora.load(base(family), theirs)
    lora.save(ours, tmp_path / "ours")
    want, plain = peft_logits(peer, folder, theirs, tmp_path / "ours"), our_logits(base(family))
    assert np.abs(want - plain).max() > 1e-2
    np.testing.assert_allclose(our_logits(ours), want, atol=1e-4)
    np.testing.assert_allclose(our_logits(lora.merge(ours)), want, atol=1e-4)
    np.testing.assert_array_equal(our_logits(lora.disable(ours)), plain)
    back = lora.load(base(family), tmp_path / "ours")
    assert jax.tree.structure(back) == jax.tree.structure(ours)
    jax.tree.map(np.testing.assert_array_equal, back, ours)
