"""Files of adapters of kernels: round trips, PEFT's convolutions, hostile files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lowtide as lt
from lowtide import lora
from lowtide.core import ModelFileError, StructureError, map_with_paths
from lowtide.models import DecoderConfig, init
from tests.peers import Peer, normal

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8, 8)), jnp.float32)


@functools.cache
def params() -> Any:
    draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return {
        "conv": {"weight": draw(1, 5, 3, 3, 3)},
        "heads": {"kernel": draw(2, 5, 2, 4)},
        "stack": draw(3, 3, 8, 2, 4),
        "table": draw(4, 9, 8),
        "out": {"weight": draw(5, 6, 8)},
    }


def fn(p: Any, x: Any) -> Any:
    h = jax.lax.conv_general_dilated(x, p["conv"]["weight"], (1, 1), "VALID").mean((2, 3))
    h = jnp.einsum("bi,ihd->bhd", h, p["heads"]["kernel"]).reshape(-1, 8) + p["table"][jnp.array([1, 2])]
    h, _ = jax.lax.scan(lambda h, w: (jnp.einsum("bi,ihd->bhd", h, w).reshape(-1, 8), None), h, p["stack"])
    return h @ p["out"]["weight"].T


EVERY = ["conv", "heads/kernel", "stack", "table", "out"]


def added(**options: Any) -> Any:
    config = lora.Config(**({"rank": 2, "alpha": 3, "targets": EVERY} | options))
    model = lora.add(params(), config, key=KEY, fn=fn, args=(X,))

    def draw(path: str, leaf: Any) -> Any:
        noise = 0.1 * np.random.default_rng(len(path)).normal(size=leaf.shape)
        return jnp.asarray(np.asarray(leaf) + noise, leaf.dtype)

    return map_with_paths(lambda path, leaf: draw(path, leaf) if "lora_" in path else leaf, model)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"rslora": True, "rank_pattern": {"conv": 3}}, {"modules_to_save": "out", "alpha_pattern": {"stack": 5}}],
    ids=["plain", "rsLoRA, ranks", "modules to save"],
)
def test_round_trip(options: Any, tmp_path: Path) -> None:
    model = added(**options)
    lora.save(model, tmp_path)
    again = lora.load(params(), tmp_path)
    run = jax.jit(lt.adapted(fn))
    np.testing.assert_allclose(run(again, X), run(model, X), rtol=1e-6)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(again)) == jax.tree.map(jnp.shape, jax.tree.leaves(model))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(model))
    kernel = again["conv"]["weight"]
    assert (kernel.num_rows, kernel.num_columns) == (1, 3)
    assert kernel.scaling == pytest.approx(model["conv"]["weight"].scaling)
    lora.load(model, tmp_path)  # over adapters of the same shapes
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    want = {"conv": [1, 3], "heads.kernel": [1, 2], "stack": [1, 2], "table": [1, 1]}
    assert config["lowtide_kernels"] == want
    shape = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.conv.lora_B.weight"].shape
    assert shape[2:] == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lowtide_kernels": {"gone": [1, 1]}}, r"lowtide_kernels names a kernel that the model lacks"),
        ({"lowtide_kernels": {"table": [2, 2]}}, r"lowtide_kernels names a kernel that the model lacks"),
        ({"lowtide_kernels": {"conv": [1, 3], "heads.kernel": [2, 1]}}, r"does not fit|tensors do not match"),
        ({"lowtide_kernels": {"conv": [0, 3]}}, r"lowtide_kernels"),
        ({"lowtide_kernels": {"conv": [1]}}, r"lowtide_kernels"),
        ({"lowtide_kernels": [1]}, r"lowtide_kernels"),
        ({"r": 3}, r"does not fit"),
        ({"use_dora": True}, r"only plain LoRA is supported for a kernel"),
        ({"init_lora_weights": "pissa"}, r"only plain LoRA is supported for a kernel"),
    ],
)
def test_damaged_configurations(changes: Any, message: str, tmp_path: Path) -> None:
    lora.save(added(), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelFileError, match=message):
        lora.load(params(), tmp_path)


def test_damaged_tensors(tmp_path: Path) -> None:
    lora.save(added(), tmp_path)
    path, key = tmp_path / "adapter_model.safetensors", "base_model.model.stack.lora_A.weight"
    tensors = load_file(path)
    for bad, message in (
        ({key: tensors[key] * np.nan}, "values that are not finite"),
        ({key: tensors[key][:2]}, "does not fit"),
        ({"base_model.model.stack.lora_C.weight": tensors[key]}, "1 unexpected"),
    ):
        save_file(tensors | bad, path)
        with pytest.raises(ModelFileError, match=message):
            lora.load(params(), tmp_path)
    save_file({name: values for name, values in tensors.items() if name != key}, path)
    with pytest.raises(ModelFileError, match=f"1 missing: {key}"):
        lora.load(params(), tmp_path)
    save_file(tensors, path)
    quantised = lt.quantize(params(), "table", "int8")
    with pytest.raises(ModelFileError, match=r"table has a kernel adapter, but is quantised"):
        lora.load(quantised, tmp_path)


def test_a_model_with_names_elsewhere_has_no_place_for_kernels(tmp_path: Path) -> None:
    config = DecoderConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
    )
    model = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: init(config, key=KEY)))
    embed = model.outer["embed"]
    embed["weight"] = lora.LoRAKernel(embed["weight"], jnp.ones((1, 8)), jnp.ones((32, 1)), 1.0, 1, 1)
    with pytest.raises(StructureError, match=r"embed/weight: PEFT's format cannot store the adapter"):
        lora.save(model, tmp_path)


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")
@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions_of_pytorch_are_pefts_both_ways(dims: int, peer: Peer, tmp_path: Path) -> None:
    shapes = {"0.weight": (5, 3, *[3] * dims), "0.bias": (5,), "2.weight": (4, 5, *[2] * dims), "2.bias": (4,)}
    values = {name: normal(name, shape).astype(np.float32) for name, shape in shapes.items()}
    x = normal("x", (2, 3, *[9] * dims), std=1.0).astype(np.float32)

    def theirs() -> Any:
        import torch

        convolution = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d}[dims]
        model = torch.nn.Sequential(convolution(3, 5, 3), torch.nn.ReLU(), convolution(5, 4, 2))
        model.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
        return model

    def make(path: Path) -> None:
        import peft

        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"])
        peft.get_peft_model(theirs(), config).save_pretrained(path)

    def compute() -> dict[str, np.ndarray]:
        import peft
        import torch

        adapters = (tmp_path / "theirs", tmp_path / "ours")
        read = [peft.PeftModel.from_pretrained(theirs(), adapter).eval() for adapter in adapters]
        first, again = (model(torch.tensor(x)).detach().numpy() for model in read)
        np.testing.assert_allclose(again, first, atol=1e-4)
        return {"y": first}

    weights = {n: {"weight": jnp.asarray(values[f"{n}.weight"])} for n in ("0", "2")}
    biases = {n: values[f"{n}.bias"].reshape(1, -1, *[1] * dims) for n in ("0", "2")}

    def ours(p: Any, x: Any) -> Any:
        conv = lambda x, n: jax.lax.conv_general_dilated(x, p[n]["weight"], (1,) * dims, "VALID")  # noqa: E731
        with jax.numpy_rank_promotion("allow"):
            return conv(jax.nn.relu(conv(x, "0") + biases["0"]), "2") + biases["2"]

    loaded = lora.load(weights, peer.folder(tmp_path / "theirs", make, values))
    lora.save(loaded, tmp_path / "ours", task_type=None)
    question = {"x": x, "model": values, "theirs": tmp_path / "theirs", "ours": tmp_path / "ours"}
    want = peer.answer("y", compute, question)["y"]
    assert np.abs(want - ours(weights, jnp.asarray(x))).max() > 1e-2
    np.testing.assert_allclose(lt.adapted(ours)(loaded, jnp.asarray(x)), want, atol=1e-4)
