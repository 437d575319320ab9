"""Directories that transformers and bitsandbytes quantise, compared with what these two compute from them."""

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
from tests import peers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
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
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("Llama", {}, ["q_proj", "down_proj"]),
    # Its fused projections are the only weights here with several groups of 256 scales.
    "phi3": ("Phi3", {"hidden_size": 128, "original_max_position_embeddings": 64}, ["qkv_proj", "gate_up_proj"]),
    # Rows of 200 are no blocks of 64. For rows of 160, bitsandbytes 0.50 with AVX-512 makes other blocks in 16 columns.
    "qwen3": ("Qwen3", {"intermediate_size": 200}, ["v_proj", "down_proj"]),
}
KEPT = np.s_[:, 4::5]
"""Positions whose logits are recorded. Each depends on all tokens before it."""
STEP = 31
"""One of 31 values of a weight is recorded: two of each block of 64."""


class Quantized:
    """A random model that transformers saves dense and quantised, and bitsandbytes' values of its weights."""

    def __init__(self, peer: peers.Peer, parent: Path, family: str, options: dict[str, Any], **sizes: Any) -> None:
        name, changes, _ = FAMILIES[family]
        self.options, self.class_name = options, f"{name}ForCausalLM"
        config = {**SIZES, **changes, **sizes}

        def make_dense(path: Path) -> None:
            import torch
            import transformers

            model = getattr(transformers, self.class_name)(getattr(transformers, f"{name}Config")(**config))
            model.to(torch.bfloat16).save_pretrained(path)

        self.dense = peer.folder(parent / "dense", make_dense, [family, config], partial(peers.normal, std=0.05))
        tensors, _ = peers.read_tensors(self.dense / "model.safetensors")

        def keep_dense(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
            return None if "_proj." in name else tensors[name]

        make = lambda path: self.read().save_pretrained(path)  # noqa: E731
        self.folder = peer.folder(parent / "quantized", make, [options, self.dense], keep_dense)

    def read(self) -> Any:
        """Quantise the dense directory."""
        import torch
        import transformers

        return getattr(transformers, self.class_name).from_pretrained(
            self.dense,
            quantization_config=transformers.BitsAndBytesConfig(**self.options),
            device_map="cpu",
            dtype=torch.bfloat16,
        )

    def weights(self) -> dict[str, Any]:
        """Values that bitsandbytes computes for each weight, float32, by the names of modules."""
        import torch
        from bitsandbytes import functional

        weights: dict[str, Any] = {}
        for name, module in self.read().named_modules():
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if state is not None:
                state.dtype = torch.float32
                weights[name] = functional.dequantize_4bit(module.weight.data, state)
            elif getattr(getattr(module, "weight", None), "SCB", None) is not None:
                weights[name] = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        return weights

    def thin_weights(self) -> dict[str, np.ndarray]:
        """Return some values of each weight."""
        return {name: peers.thin(weight.float().numpy(), STEP) for name, weight in self.weights().items()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("family", "double"), [("phi3", True), ("qwen3", True), ("llama", False)])
def test_weights_logits_and_gradients_are_theirs(family: str, double: bool, peer: peers.Peer, tmp_path: Path) -> None:
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    quantized = Quantized(peer, tmp_path, family, options)
    model = models.load(quantized.folder, dtype="float32")
    check_weights(model, peer.answer("weights", quantized.thin_weights, quantized.folder))

    def with_their_weights() -> Any:
        import torch
        import transformers

        theirs = getattr(transformers, quantized.class_name).from_pretrained(quantized.dense, dtype=torch.float32)
        for name, weight in quantized.weights().items():
            theirs.get_submodule(name).weight.data = weight.clone()
        return theirs.eval()

    def make_adapter(path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, lora_alpha=4, target_modules=FAMILIES[family][2])
        get_peft_model(with_their_weights(), config).save_pretrained(path)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return peers.normal(name, shape, 0.1 if "lora_A" in name else 0.02)

    adapter = peer.folder(tmp_path / "adapter", make_adapter, FAMILIES[family][2], draw)
    tokens = np.random.default_rng(0).integers(3, 96, (2, 25))

    def compute() -> dict[str, Any]:
        import torch
        from peft import PeftModel

        theirs = with_their_weights()
        with torch.no_grad():
            logits = theirs(torch.tensor(tokens)).logits.numpy()[KEPT]
        tuned = PeftModel.from_pretrained(theirs, adapter, is_trainable=True)
        loss = torch.nn.functional.cross_entropy(
            tuned(torch.tensor(tokens[:, :-1])).logits.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten()
        )
        loss.backward()
        grads = {name: p.grad.numpy() for name, p in tuned.named_parameters() if p.grad is not None}
        return {"logits": logits, "loss": loss.item(), **grads}

    theirs = peer.answer("logits and gradients", compute, [quantized.folder, adapter, tokens])
    want, loss = theirs.pop("logits"), theirs.pop("loss")
    got = jax.jit(models.logits)(model, jnp.asarray(tokens, jnp.int32))[KEPT]
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()

    adapted = lora.load(model, adapter)
    batch = {"tokens": jnp.asarray(tokens[:, :-1], jnp.int32), "labels": jnp.asarray(tokens[:, 1:], jnp.int32)}
    step = jax.jit(lt.value_and_grad(partial(models.loss, remat=True), "**/lora_*", has_aux=True))
    (value, _), grads = step(adapted, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    assert len(theirs) == 8
    for name, wanted_grad in theirs.items():
        layer, part, module, letter = (name.split(".")[i] for i in (-6, -5, -4, -3))
        node = grads.layers[PARTS[part]][module]["weight"]
        ours = getattr(node, f"lora_{letter[-1].lower()}")[int(layer)]
        assert np.abs(ours - wanted_grad).max() < 1e-3 * np.abs(wanted_grad).max(), name


PARTS = {"self_attn": "attn", "mlp": "mlp"}


def check_weights(model: Any, wanted: dict[str, Any], num_layers: int = 2) -> None:
    num_projections = sum(name.endswith("_proj") for part in PARTS.values() for name in model.layers[part])
    assert len(wanted) == num_layers * num_projections
    nodes = {}
    for name in wanted:
        _, _, layer, part, module = name.split(".")
        node = model.layers[PARTS[part]][module]["weight"]
        assert isinstance(node, lt.QuantizedWeight), name
        nodes[name] = jax.tree.map(lambda leaf, layer=layer: leaf[int(layer)], node)
    ours = jax.jit(lambda: {name: node.dense(jnp.float32) for name, node in nodes.items()})()
    for name, weight in wanted.items():
        np.testing.assert_allclose(peers.thin(ours[name], STEP), weight, rtol=0, atol=1e-6, err_msg=name)


def test_int8_weights_are_theirs(peer: peers.Peer, tmp_path: Path) -> None:
    quantized = Quantized(peer, tmp_path, "llama", {"load_in_8bit": True}, num_hidden_layers=1)
    want = peer.answer("weights", quantized.thin_weights, quantized.folder)
    check_weights(models.load(quantized.folder, dtype="float32"), want, num_layers=1)


def test_fp4_weights_are_theirs(peer: peers.Peer, tmp_path: Path) -> None:
    options = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    quantized = Quantized(peer, tmp_path, "llama", options, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="weights in FP4 are loaded as arrays"):
        model = models.load(quantized.folder, dtype="float32")
    want = peer.answer("weights", quantized.thin_weights, quantized.folder)["model.layers.0.mlp.up_proj"]
    got = peers.thin(model.layers["mlp"]["up_proj"]["weight"][0], STEP)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_numbers_of_mxfp4_are_theirs(peer: peers.Peer) -> None:
    from lowtide.models._quantized import MxExperts
    from lowtide.quant import format_named

    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 3, 16), np.uint8), rng.integers(1, 250, (2, 6, 3), np.uint8)

    def compute() -> dict[str, np.ndarray]:
        import torch
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return {"experts": convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()}

    want = peer.answer("values", compute, [blocks, scales])["experts"]
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
