"""Modules and biases that train as a whole in addition to LoRA: logits of PEFT's files here, and of ours there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lowtide.adapters import lora
from lowtide.core import ModelFileError, map_with_paths
from tests.adapters.test_peft_kinds import KEY, base, drawn, in_peft, our_logits, peft_adapter, peft_logits, written
from tests.peers import Peer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

PLAIN = {
    "class": "LoraConfig",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
OUTPUTS = {"target_modules": ["q_proj", "o_proj"]}  # with and without a bias
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms and embeddings": ("qwen2", {"modules_to_save": ["norm", "embed_tokens"], "use_dora": True}),
    "a projection and its bias": ("qwen2", {"modules_to_save": ["k_proj"], "target_modules": ["q_proj", "k_proj"]}),
    "all biases": ("qwen2", {"bias": "all", **OUTPUTS}),
    "biases beside adapters and a head": ("qwen2", {"bias": "lora_only", "modules_to_save": ["lm_head"], **OUTPUTS}),
    "a tied embedding": ("gemma2", TIED),
}


def drawn_tied(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return drawn(name.replace("lm_head", "model.embed_tokens"), shape)


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_gives_its_logits_here_and_goes_back(case: str, peer: Peer, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = written(family, tmp_path / "base")
    draw = drawn_tied if options is TIED else drawn
    theirs = peft_adapter(peer, folder, PLAIN | options, tmp_path / "theirs", draw)
    ours = lora.load(base(family), theirs)
    lora.save(ours, tmp_path / "ours")
    want, plain = peft_logits(peer, folder, theirs, tmp_path / "ours"), our_logits(base(family))
    np.testing.assert_allclose(our_logits(ours), want, atol=1e-4)
    np.testing.assert_allclose(our_logits(lora.merge(ours)), want, atol=1e-4)
    np.testing.assert_array_equal(our_logits(lora.disable(ours)), plain)
    assert "trained whole" in {site.kind for site in lora.report(ours).matched}
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0]["bias"] == configs[1]["bias"]


def test_an_adapter_that_was_added_here_gives_its_logits_there(peer: Peer, tmp_path: Path) -> None:
    config = lora.Config(
        rank=2, alpha=4, targets="**/{q,o}_proj", modules_to_save=["outer/lm_head", "layers/*_norm"], bias="all"
    )
    model = lora.add(base("qwen2"), config, key=KEY)
    draw = lambda leaf: leaf + 0.2 * jax.random.normal(KEY, leaf.shape)  # noqa: E731
    model = map_with_paths(lambda path, leaf: draw(leaf) if "lora_" in path else leaf, model)
    lora.save(model, tmp_path / "ours")
    want = peft_logits(peer, written("qwen2", tmp_path / "base"), tmp_path / "ours")
    assert np.abs(our_logits(model) - our_logits(base("qwen2"))).max() > 0.1
    np.testing.assert_allclose(want, our_logits(model), atol=1e-4)


def test_a_head_that_peft_unties_is_refused_by_name(peer: Peer, tmp_path: Path) -> None:
    folder = written("gemma2", tmp_path / "base")
    for modules in (["embed_tokens"], ["lm_head"], ["lm_head", "embed_tokens"]):
        arguments = {"class": "LoraConfig", "r": 2, "target_modules": ["q_proj"], "modules_to_save": modules}
        theirs = peft_adapter(peer, folder, arguments | {"task_type": "CAUSAL_LM"}, tmp_path / " and ".join(modules))
        with pytest.raises(ModelFileError, match=r"(unties lm_head|lm_head and .* differ)(.|\n)*ensure_weight_tying"):
            lora.load(base("gemma2"), theirs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_began_as_a_part_of_the_weight(init: Any, peer: Peer, tmp_path: Path) -> None:
    folder = written("qwen2", tmp_path / "base")
    arguments = PLAIN | {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": init}

    def start() -> dict[str, np.ndarray]:
        layer = in_peft(folder, arguments).base_model.model.model.layers[2].mlp.down_proj
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        return {"product": product.detach().numpy(), "residual": layer.base_layer.weight.detach().numpy()}

    want = peer.answer("start", start, {"base": folder, "options": arguments})
    config = lora.Config(rank=4, alpha=8, targets="**/{q,down}_proj", init=init)
    node = lora.add(base("qwen2"), config, key=KEY).layers["mlp"]["down_proj"]["weight"]
    np.testing.assert_allclose(node.lora_b[2] @ node.lora_a[2], want["product"], atol=1e-4)
    residual = node.weight[2] - node.scaling * node.start_b[2] @ node.start_a[2]
    np.testing.assert_allclose(residual, want["residual"], atol=1e-4)

    theirs = peft_adapter(peer, folder, arguments, tmp_path / "theirs")
    ours = lora.load(base("qwen2"), theirs)
    lora.save(ours, tmp_path / "ours")
    logits = peft_logits(peer, folder, theirs, tmp_path / "ours")
    np.testing.assert_allclose(our_logits(ours), logits, atol=1e-4)
    np.testing.assert_allclose(our_logits(lora.load(base("qwen2"), tmp_path / "ours")), logits, atol=1e-4)
