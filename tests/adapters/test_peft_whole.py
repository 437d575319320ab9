"""What trains as a whole beside LoRA, and biases, beside PEFT: its logits here, and ours there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lowtide.adapters import lora
from lowtide.core import ModelFileError, map_with_paths
from tests.adapters.test_peft_kinds import KEY, base, ours_logits, their_base, theirs_logits, trained_with

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("qwen2", {"modules_to_save": ["lm_head"]}),
    "norms and embeddings": ("qwen2", {"modules_to_save": ["norm", "embed_tokens"], "use_dora": True}),
    "a projection and its bias": ("qwen2", {"modules_to_save": ["k_proj"], "target_modules": ["q_proj", "k_proj"]}),
    "biases beside adapters": ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "o_proj"]}),
    "all biases": ("qwen2", {"bias": "all", "target_modules": ["q_proj", "o_proj"]}),
    "biases and a head": ("qwen2", {"bias": "lora_only", "modules_to_save": ["lm_head"]}),
    "a tied embedding": ("gemma2", TIED),
}


@pytest.mark.parametrize("case", CASES)
def test_what_peft_trained_gives_its_logits_here_and_goes_back(case: str, tmp_path: Path) -> None:
    import peft

    family, options = CASES[case]
    plain = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = trained_with(family, peft.LoraConfig(**(plain | options)), tmp_path / "base")
    want = theirs_logits(model)
    model.save_pretrained(tmp_path / "theirs")
    ours = lora.load(base(family), tmp_path / "theirs")
    np.testing.assert_allclose(ours_logits(ours), want, atol=1e-4)
    np.testing.assert_allclose(ours_logits(lora.merge(ours)), want, atol=1e-4)
    np.testing.assert_array_equal(ours_logits(lora.disable(ours)), ours_logits(base(family)))
    kinds = {each.kind for each in lora.report(ours).matched}
    assert "trained whole" in kinds
    lora.save(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(their_base(family, tmp_path / "base"), tmp_path / "ours")
    np.testing.assert_allclose(theirs_logits(again), want, atol=1e-4)
    words = [json.loads((tmp_path / who / "adapter_config.json").read_text())["bias"] for who in ("ours", "theirs")]
    assert words[0] == words[1]


def test_what_was_added_here_gives_its_logits_there(tmp_path: Path) -> None:
    import peft

    config = lora.Config(
        rank=2, alpha=4, targets="**/{q,o}_proj", modules_to_save=["outer/lm_head", "layers/*_norm"], bias="all"
    )
    model = lora.add(base("qwen2"), config, key=KEY)
    draw = lambda leaf: leaf + 0.2 * jax.random.normal(KEY, leaf.shape)  # noqa: E731
    model = map_with_paths(lambda path, leaf: draw(leaf) if "lora_" in path else leaf, model)
    lora.save(model, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(their_base("qwen2", tmp_path / "base"), tmp_path / "ours")
    assert np.abs(ours_logits(model) - ours_logits(base("qwen2"))).max() > 0.1
    np.testing.assert_allclose(theirs_logits(theirs), ours_logits(model), atol=1e-4)


@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["lm_head", "embed_tokens"]])
def test_a_head_that_peft_unties_is_refused_by_name(names: list[str], tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names, task_type="CAUSAL_LM")
    model = trained_with("gemma2", config, tmp_path / "base")
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ModelFileError, match=r"(unties lm_head|lm_head and .* differ)(.|\n)*ensure_weight_tying"):
        lora.load(base("gemma2"), tmp_path / "theirs")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_began_as_a_part_of_the_weight(init: str, tmp_path: Path) -> None:
    import peft

    plain = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    start = peft.get_peft_model(
        their_base("qwen2", tmp_path / "base"), peft.LoraConfig(**plain, init_lora_weights=init)
    )
    config = lora.Config(rank=4, alpha=8, targets="**/{q,down}_proj", init=init)
    node = lora.add(base("qwen2"), config, key=KEY).layers["mlp"]["down_proj"]["weight"]
    theirs = start.base_model.model.model.layers[2].mlp.down_proj
    want = (theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight).detach().numpy()
    np.testing.assert_allclose(node.lora_b[2] @ node.lora_a[2], want, atol=1e-4)
    residual = theirs.base_layer.weight.detach().numpy()
    np.testing.assert_allclose(node.weight[2] - node.scaling * node.start_b[2] @ node.start_a[2], residual, atol=1e-4)

    model = trained_with("qwen2", peft.LoraConfig(**plain, init_lora_weights=init), tmp_path / "base")
    trained = theirs_logits(model)
    model.save_pretrained(tmp_path / "as it is")
    ours = lora.load(base("qwen2"), tmp_path / "as it is")
    np.testing.assert_allclose(ours_logits(ours), trained, atol=1e-4)
    lora.save(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(their_base("qwen2", tmp_path / "base"), tmp_path / "ours")
    np.testing.assert_allclose(theirs_logits(again), trained, atol=1e-4)
    np.testing.assert_allclose(ours_logits(lora.load(base("qwen2"), tmp_path / "ours")), trained, atol=1e-4)
