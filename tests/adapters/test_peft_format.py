"""PEFT reads what we write and we read what PEFT writes: tensors, single layers, logits of a whole decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide import models
from lowtide.adapters import lora
from lowtide.core import ModelFileError, linear
from tests.adapters.test_peft_kinds import in_transformers, peft_adapter
from tests.peers import Peer, read_tensors

# PEFT's other warnings stay errors: missing and unexpected keys are only warnings to it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

KEY = jax.random.key(0)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 7))
INPUTS = {width: np.random.default_rng(1).normal(size=(5, width)).astype(np.float32) for width in (16, 24)}
CONFIG = models.DecoderConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)


def external(model: models.Decoder) -> dict[str, tuple[Any, int]]:
    """Return weights and layers by the names of transformers' modules."""
    short = {"attn": "self_attn", "mlp": "mlp"}
    return {
        f"model.layers.{layer}.{short[part]}.{proj}": (model.layers[part][proj]["weight"], layer)
        for part in short
        for proj in model.layers[part]
        for layer in range(CONFIG.num_layers)
    }


@pytest.fixture(scope="module")
def base() -> models.Decoder:
    # Larger weights than `init` gives, so that logits differ by far more than the tolerance.
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, models.init(CONFIG, key=KEY))


@pytest.fixture
def folder(base: models.Decoder, tmp_path: Path) -> Path:
    models.save(base, tmp_path / "base")
    return tmp_path / "base"


def torch_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


def our_logits(model: models.Decoder) -> np.ndarray:
    return np.asarray(jax.jit(models.logits)(model, jnp.asarray(TOKENS)))


def adapters_of(peft_model: Any) -> dict[str, Any]:
    """Return PEFT's layers by the names of the adapted modules."""
    named = peft_model.get_base_model().named_modules()
    return {name: module for name, module in named if hasattr(module, "lora_A") and "default" in module.lora_A}


def read_by_peft(folder: Path, adapter: Path) -> tuple[Any, dict[str, float]]:
    """Return PEFT's model of an adapter and its scalings by module; its tensors are exactly those of the file."""
    from peft import PeftModel

    peft_model = PeftModel.from_pretrained(in_transformers(folder), adapter).eval()
    tensors, _ = read_tensors(adapter / "adapter_model.safetensors")
    layers = adapters_of(peft_model)
    assert len(tensors) == 2 * len(layers)
    for name, layer in layers.items():
        for factor, parameters in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            values = parameters["default"].weight.detach().float().numpy()
            np.testing.assert_array_equal(values, tensors[f"base_model.model.{name}.{factor}.weight"])
    return peft_model, {name: layer.scaling["default"] for name, layer in layers.items()}


def assert_same_tensors(model: models.Decoder, adapter: Path) -> dict[str, Any]:
    """Check that adapters are exactly those of a file, and return them by module."""
    nodes = {name: site for name, site in external(model).items() if isinstance(site[0], lora.LoRAWeight)}
    tensors, _ = read_tensors(adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(nodes)
    for name, (node, layer) in nodes.items():
        np.testing.assert_array_equal(tensors[f"base_model.model.{name}.lora_A.weight"], node.lora_a[layer])
        np.testing.assert_array_equal(tensors[f"base_model.model.{name}.lora_B.weight"], node.lora_b[layer])
    return nodes


CONFIGS = {
    "default": [lora.Config(rank=4, alpha=8)],
    "every projection": [lora.Config(rank=3, alpha=2.5, targets="layers/*/*_proj")],
    "ranks differ": [
        lora.Config(rank=4, alpha=8, targets="**/{q,v}_proj"),
        lora.Config(rank=2, alpha=3, targets="**/down_proj"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_peft_reads_our_adapters(base: models.Decoder, folder: Path, peer: Peer, tmp_path: Path, case: str) -> None:
    model = base
    for config in CONFIGS[case]:
        model = lora.add(model, config, key=KEY)

    def fill(path: Any, leaf: Any) -> Any:
        is_zero = path[-1] == jax.tree_util.GetAttrKey("lora_b")
        return 0.3 * jax.random.normal(jax.random.key(len(str(path))), leaf.shape) if is_zero else leaf

    model = jax.tree_util.tree_map_with_path(fill, model)
    lora.save(model, tmp_path / "adapter", base_model_name_or_path="base")
    merged = lora.merge(model)
    models.save(merged, tmp_path / "merged")

    def compute() -> dict[str, Any]:
        import torch
        from peft.utils import load_peft_weights, set_peft_model_state_dict

        peft_model, scalings = read_by_peft(folder, tmp_path / "adapter")
        result = set_peft_model_state_dict(peft_model, load_peft_weights(tmp_path / "adapter"))
        assert not result.unexpected_keys
        assert not [key for key in result.missing_keys if "lora_" in key]
        with torch.no_grad():
            outputs = {
                name: layer(torch.tensor(INPUTS[layer.in_features])).numpy()
                for name, layer in adapters_of(peft_model).items()
            }
        return outputs | {
            "scalings": scalings,
            "plain": torch_logits(in_transformers(folder)),
            "logits": torch_logits(peft_model),
            "merged there": torch_logits(peft_model.merge_and_unload()),
            "merged here": torch_logits(in_transformers(tmp_path / "merged")),
        }

    question = {"base": folder, "adapter": tmp_path / "adapter", "merged": tmp_path / "merged", "tokens": TOKENS}
    want = peer.answer("reads", compute, question)
    nodes = assert_same_tensors(model, tmp_path / "adapter")
    assert want["scalings"] == pytest.approx({name: node.scaling for name, (node, _) in nodes.items()})
    for name, (node, index) in nodes.items():
        inputs = jnp.asarray(INPUTS[node.weight.shape[-1]])
        outputs = linear(inputs, jax.tree.map(lambda leaf, i=index: leaf[i], node))
        np.testing.assert_allclose(outputs, want[name], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(our_logits(base), want["plain"], atol=1e-4)
    assert np.abs(want["logits"] - want["plain"]).max() > 1e-2
    np.testing.assert_allclose(our_logits(model), want["logits"], atol=1e-4)
    np.testing.assert_allclose(our_logits(merged), want["logits"], atol=1e-4)
    np.testing.assert_allclose(want["merged here"], want["logits"], atol=1e-4)
    np.testing.assert_allclose(want["merged there"], our_logits(merged), atol=1e-4)


PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all-linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*\.(q_proj|up_proj)"},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"self_attn\.q_proj": 6, "v_proj": 5}},
    "rank-stabilised patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 6}},
    "excluded": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "rank above the smaller side": {"r": 40},
}
PLAIN = {
    "class": "LoraConfig",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("options", PEFT_OPTIONS)
def test_we_read_the_adapters_of_peft_and_write_them_again(
    base: models.Decoder, folder: Path, peer: Peer, tmp_path: Path, options: str
) -> None:
    theirs = peft_adapter(peer, folder, PLAIN | PEFT_OPTIONS[options], tmp_path / "theirs")
    model = lora.load(base, theirs)
    lora.save(model, tmp_path / "ours")

    def compute() -> dict[str, Any]:
        (first, scalings), (again, same) = (read_by_peft(folder, adapter) for adapter in (theirs, tmp_path / "ours"))
        assert scalings == pytest.approx(same)
        logits = torch_logits(first)
        np.testing.assert_allclose(torch_logits(again), logits, atol=1e-4)
        return {"scalings": scalings, "logits": logits}

    want = peer.answer("reads", compute, {"base": folder, "theirs": theirs, "ours": tmp_path / "ours"})
    nodes = assert_same_tensors(model, theirs)
    assert_same_tensors(model, tmp_path / "ours")
    assert want["scalings"] == pytest.approx({name: node.scaling for name, (node, _) in nodes.items()})
    np.testing.assert_allclose(our_logits(model), want["logits"], atol=1e-4)


def test_we_read_bfloat16_adapters_of_peft(base: models.Decoder, folder: Path, peer: Peer, tmp_path: Path) -> None:
    theirs = peft_adapter(peer, folder, PLAIN | {"dtype": "bfloat16"}, tmp_path / "theirs")
    tensors, _ = read_tensors(theirs / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    model = lora.load(base, theirs)
    assert model.layers["attn"]["q_proj"]["weight"].lora_a.dtype == jnp.float32
    assert_same_tensors(model, theirs)


def test_an_option_that_we_cannot_read_is_refused_by_name(
    base: models.Decoder, folder: Path, peer: Peer, tmp_path: Path
) -> None:
    theirs = peft_adapter(peer, folder, PLAIN | {"init_lora_weights": "pissa_niter_4"}, tmp_path / "theirs")
    with pytest.raises(ModelFileError, match="option 'init_lora_weights' is not supported"):
        lora.load(base, theirs)
