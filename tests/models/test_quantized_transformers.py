"""Directories that transformers and bitsandbytes quantise, beside what these two make of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import lora, models

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("Llama", {}, ["q_proj", "down_proj"]),
    "phi3": ("Phi3", {"original_max_position_embeddings": 64}, ["qkv_proj", "gate_up_proj"]),
    # Rows of 200 are no blocks of 64. Of 160, not 64 times but 16 times, bitsandbytes 0.50 makes others with AVX-512.
    "qwen3": ("Qwen3", {"intermediate_size": 200}, ["v_proj", "down_proj"]),
}


def _quantized(folder: Path, family: str, options: Any) -> Any:
    """Write a directory as transformers does; returns the model that it loads from it, of dense float32 weights."""
    import torch
    import transformers

    name, more, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    kind = getattr(transformers, f"{name}ForCausalLM")
    kind(config).to(torch.bfloat16).save_pretrained(folder / "dense")
    quantized = kind.from_pretrained(
        folder / "dense",
        quantization_config=transformers.BitsAndBytesConfig(**options),
        device_map="cpu",
        dtype=torch.bfloat16,
    )
    quantized.save_pretrained(folder / "quantized")
    return kind, quantized


def _dense_weights(quantized: Any) -> dict[str, Any]:
    """What bitsandbytes makes of each weight, float32, by the names of modules."""
    import torch
    from bitsandbytes import functional

    found: dict[str, Any] = {}
    for name, module in quantized.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            state.dtype = torch.float32
            found[name] = functional.dequantize_4bit(module.weight.data, state)
        elif getattr(getattr(module, "weight", None), "SCB", None) is not None:
            found[name] = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    return found


@pytest.mark.parametrize(("family", "double"), [*((family, True) for family in FAMILIES), ("llama", False)])
def test_weights_logits_and_gradients_are_theirs(family: str, double: bool, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    kind, quantized = _quantized(tmp_path, family, options)
    wanted = _dense_weights(quantized)
    model = models.load(tmp_path / "quantized", dtype="float32")
    _check_weights(model, wanted)

    theirs = kind.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    for name, weight in wanted.items():
        theirs.get_submodule(name).weight.data = weight.clone()
    tokens = np.random.default_rng(0).integers(3, 96, (2, 25))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got = models.logits(model, jnp.asarray(tokens, jnp.int32))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()

    tuned = get_peft_model(theirs, LoraConfig(r=2, lora_alpha=4, target_modules=FAMILIES[family][2]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    tuned.save_pretrained(tmp_path / "adapter")
    adapted = lora.load(model, tmp_path / "adapter")
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        tuned(torch.tensor(inputs)).logits.flatten(0, 1), torch.tensor(labels).flatten()
    )
    loss.backward()
    batch = {"tokens": jnp.asarray(inputs, jnp.int32), "labels": jnp.asarray(labels, jnp.int32)}
    (value, _), grads = lt.value_and_grad(partial(models.loss, remat=True), "**/lora_*", has_aux=True)(adapted, batch)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    by_name = {
        name: parameter.grad.numpy() for name, parameter in tuned.named_parameters() if parameter.grad is not None
    }
    parts = {"self_attn": "attn", "mlp": "mlp"}
    assert len(by_name) == 8
    for name, wanted_grad in by_name.items():
        layer, part, module, letter = (name.split(".")[i] for i in (-6, -5, -4, -3))
        node = grads.layers[parts[part]][module]["weight"]
        ours = getattr(node, f"lora_{letter[-1].lower()}")[int(layer)]
        assert np.abs(ours - wanted_grad).max() < 1e-3 * np.abs(wanted_grad).max(), name


def _check_weights(model: Any, wanted: dict[str, Any]) -> None:
    parts = {"self_attn": "attn", "mlp": "mlp"}
    assert len(wanted) == 2 * sum(name.endswith("_proj") for part in parts.values() for name in model.layers[part])
    for name, weight in wanted.items():
        _, _, layer, part, module = name.split(".")
        node = model.layers[parts[part]][module]["weight"]
        assert isinstance(node, lt.QuantizedWeight), name
        one = jax.tree.map(lambda leaf, layer=layer: leaf[int(layer)], node)
        np.testing.assert_allclose(one.dense(jnp.float32), weight.float().numpy(), rtol=0, atol=1e-6, err_msg=name)


def test_int8_weights_are_theirs(tmp_path: Path) -> None:
    _, quantized = _quantized(tmp_path, "llama", {"load_in_8bit": True})
    _check_weights(models.load(tmp_path / "quantized", dtype="float32"), _dense_weights(quantized))


def test_fp4_weights_are_theirs(tmp_path: Path) -> None:
    _, quantized = _quantized(tmp_path, "llama", {"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    with pytest.warns(UserWarning, match="weights in FP4 become arrays"):
        model = models.load(tmp_path / "quantized", dtype="float32")
    want = _dense_weights(quantized)["model.layers.1.mlp.up_proj"]
    np.testing.assert_allclose(model.layers["mlp"]["up_proj"]["weight"][1], want.float().numpy(), rtol=0, atol=1e-6)


def test_numbers_of_mxfp4_are_theirs() -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from lowtide.models.packed._views import MxExperts
    from lowtide.quant import format_named

    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 3, 16), np.uint8), rng.integers(1, 250, (2, 6, 3), np.uint8)
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    table = np.asarray(format_named("mxfp4").table, np.float32)
    ours = MxExperts(_Held(blocks), _Held(scales), table)  # pyright: ignore[reportArgumentType]
    assert ours.shape == want.shape == (2, 96, 6)
    np.testing.assert_array_equal(ours.read((slice(0, 2), slice(0, 96), slice(0, 6))).astype("f"), want)
    part = (slice(1, 2), slice(33, 70), slice(2, 5))
    np.testing.assert_array_equal(ours.read(part).astype("f"), want[part])


class _Held:
    """A tensor in memory, read as one of a file is."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.read = array, array.shape, array.__getitem__
