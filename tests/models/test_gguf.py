"""GGUF files: the model of the file, bit for bit, and what is wrong with files that are not read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowtide as lt
from lowtide import models
from lowtide.core import ModelFileError, leaves_with_paths
from lowtide.models import Experts, RopeScaling
from lowtide.models.gguf import GgufTensor, config_of, read_header
from lowtide.quant import QuantizedWeight
from lowtide.train import make_mesh

from .kinds import KINDS

gguf = pytest.importorskip("gguf", reason="needs lowtide[gguf]")
from gguf import GGMLQuantizationType as Kind  # noqa: E402

from .gguf_files import tensors, write_gguf  # noqa: E402

LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=512)  # fmt: skip
CONFIGS = {
    **{name: KINDS[name] for name in ("llama", "mistral", "qwen2", "phi3", "olmo2", "mixtral")},
    "wide mixtral": dataclasses.replace(
        KINDS["mixtral"],
        intermediate_size=64,
        experts=Experts(num_experts=4, num_experts_per_token=2, intermediate_size=64),
    ),
    "llama3": dataclasses.replace(KINDS["llama"], attention_bias=False, mlp_bias=False, rope_scaling=LLAMA3),
    "qwen3": dataclasses.replace(KINDS["qwen3"], sliding_window=None, sliding_layers=None, eos_token_id=2),
    "qwen3 yarn": dataclasses.replace(
        KINDS["qwen3 yarn"],
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "qwen3_moe": dataclasses.replace(
        KINDS["qwen3_moe"], experts=Experts(num_experts=4, num_experts_per_token=2, intermediate_size=24)
    ),
    "gemma2": dataclasses.replace(KINDS["gemma2"], attention_scale=16**-0.5),
    "gemma3_text": dataclasses.replace(
        KINDS["gemma3_text"], attention_scale=16**-0.5, num_layers=7, sliding_layers=(True,) * 5 + (False, True)
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make the directory of a kind, once."""
    made: dict[str, Path] = {}

    def make(name: str, **sizes: int) -> Path:
        key = f"{name} {sizes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("kind") / "model"
            config = dataclasses.replace(CONFIGS[name], **sizes)
            model = models.init(config, key=jax.random.key(0), dtype="float32")
            models.save(jax.tree.map(_moved, model), made[key])
        return made[key]

    return make


@pytest.fixture(scope="module")
def small(directory: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small file that is whole."""
    file = tmp_path_factory.mktemp("small") / "model.gguf"
    write_gguf(file, directory("llama3", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1))
    return file


def _moved(x: Any) -> Any:
    """Change values, so that no norm or bias is the same all over."""
    moved = lambda: np.asarray(x) + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape)  # noqa: E731
    return jnp.asarray(moved(), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _logits(model: models.Decoder) -> np.ndarray:
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 96)
    return np.asarray(jax.jit(models.logits)(model, tokens))


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_that_was_converted(name: str, directory: Any, tmp_path: Path) -> None:
    folder = directory(name)
    write_gguf(tmp_path / "model.gguf", folder)
    read, wanted = models.load(tmp_path / "model.gguf"), models.load(folder)
    assert read.config == wanted.config
    # Of Gemma's norms one was added and taken away again.
    tolerance = 1e-7 if name.startswith("gemma") else 0
    for (path, ours), (_, theirs) in zip(leaves_with_paths(read), leaves_with_paths(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "kind"), [("llama", Kind.Q8_0), ("llama", Kind.Q4_0), ("wide mixtral", Kind.Q8_0)])
def test_quantised_tensors_are_what_the_library_makes_of_them(
    name: str, kind: Kind, directory: Any, tmp_path: Path
) -> None:
    """Written again unquantised, by the inverse of what was undone, they are the library's."""
    folder = directory(name, hidden_size=64)
    wanted = write_gguf(tmp_path / "model.gguf", folder, kind)
    model = models.load(tmp_path, dtype="float32")
    models.save(model, tmp_path / "again")
    found = tensors(tmp_path / "again", json.loads((tmp_path / "again" / "config.json").read_text()))
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, wanted[name], err_msg=name)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, "bfloat16"), (Kind.F32, "float32")]
)
def test_auto_keeps_what_is_stored(kind: Kind, dtype: str, directory: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", directory("llama", hidden_size=64), kind)
    model, shapes = models.load(tmp_path), models.load_shapes(tmp_path)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), model) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert model.layers["attn"]["q_proj"]["weight"].dtype == model.outer["embed"]["weight"].dtype == dtype
    assert model.outer["norm"]["weight"].dtype == "float32"
    stored = models.stored_weights(tmp_path)["model.layers.1.self_attn.q_proj.weight"]
    assert stored == (kind.name, (64, 64), 64 * 64 // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1])


@pytest.mark.slow
def test_weights_are_quantised_while_they_are_read(directory: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", directory("llama", hidden_size=64), Kind.Q8_0)
    found = models.load(tmp_path, quantize="nf4").layers["mlp"]["up_proj"]["weight"]
    wanted = lt.quantize(models.load(tmp_path), "layers/**/*_proj", "nf4").layers["mlp"]["up_proj"]["weight"]
    assert isinstance(found, QuantizedWeight)
    np.testing.assert_array_equal(lt.dequantize(found), lt.dequantize(wanted))


def test_devices_and_the_host_hold_their_parts(directory: Any, tmp_path: Path) -> None:
    """Rows that stand in another order, cut in columns and rows; blocks cut in the middle."""
    write_gguf(tmp_path / "model.gguf", directory("llama", hidden_size=64), Kind.Q8_0)
    mesh = make_mesh(fsdp=2, tensor=4)

    def divide(path: str, leaf: Any) -> jax.sharding.Sharding:
        is_matrix = path.endswith("q_proj/weight") or path.endswith("down_proj/weight")
        return jax.sharding.NamedSharding(mesh, P(None, "fsdp", "tensor") if is_matrix else P())

    whole = models.load(tmp_path)
    for found in (models.load(tmp_path, sharding=divide), models.load(tmp_path, host="layers/attn/**")):
        for (path, ours), (_, theirs) in zip(leaves_with_paths(found), leaves_with_paths(whole), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=path)


def test_factors_of_frequencies_that_no_rule_made_are_taken_as_they_are(directory: Any, tmp_path: Path) -> None:
    """The rule of Llama 3 with another low factor is not looked for; its factors say the same, one by one."""
    folder = directory("llama3")
    raw = json.loads((folder / "config.json").read_text())
    odd = {**raw, "rope_scaling": {**raw["rope_scaling"], "low_freq_factor": 1.5}}
    shutil.copytree(folder, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps(odd))
    write_gguf(tmp_path / "model.gguf", tmp_path / "odd")
    read, wanted = models.load(tmp_path / "model.gguf"), models.load(tmp_path / "odd")
    assert read.config.rope_scaling.rope_type == "longrope"
    np.testing.assert_allclose(_logits(read), _logits(wanted), rtol=1e-5, atol=1e-5)
    ones = np.ones(raw["head_dim"] // 2, np.float32)
    write_gguf(tmp_path / "ones.gguf", folder, rope_freqs__weight=ones)
    assert models.load_config(tmp_path / "ones.gguf").rope_scaling is None
    write_gguf(tmp_path / "zero.gguf", folder, rope_freqs__weight=0 * ones)
    with pytest.raises(ModelFileError, match="factors above 0"):
        models.load_config(tmp_path / "zero.gguf")


def test_sizes_that_a_file_need_not_say(directory: Any, tmp_path: Path) -> None:
    """Widths of heads, and one number of heads for all layers, as files of Qwen 2 and others have them."""
    folder = directory("qwen2")
    absent = dict.fromkeys(("attention.key_length", "attention.value_length", "vocab_size", "rope.freq_base"))
    write_gguf(tmp_path / "x.gguf", folder, change={**absent, "attention.head_count_kv": [2, 2, 2, 2]})
    assert models.load_config(tmp_path / "x.gguf") == models.load_config(folder)


def test_scales_of_gemma_that_files_do_not_say(directory: Any, tmp_path: Path) -> None:
    """The 27B models are told by their layers, as llama.cpp tells them."""
    folder = directory("gemma2")
    for change, scale in (
        ({}, 16**-0.5),
        ({"attention.scale": 0.25}, 0.25),
        ({"attention.sliding_window_pattern": [True, True, False, True]}, 16**-0.5),
    ):
        write_gguf(tmp_path / "x.gguf", folder, change=change)
        config = models.load_config(tmp_path / "x.gguf")
        assert config.attention_scale == pytest.approx(scale)
    assert config.sliding_layers == (True, True, False, True)
    header = read_header(tmp_path / "x.gguf")
    wide = dataclasses.replace(header, fields={**header.fields, "gemma2.block_count": 46,
                                               "gemma2.attention.sliding_window_pattern": None})  # fmt: skip
    assert config_of(wide)["query_pre_attn_scalar"] == 32 / 4
    for scale in (1e-200, -0.25, 1e4):
        odd = dataclasses.replace(header, fields={**header.fields, "gemma2.attention.scale": scale})
        with pytest.raises(ModelFileError, match=r"(?s)attention\.scale.*0, or 1e-3 to 1e3"):
            config_of(odd)


def test_blocks_of_256_are_read_in_any_part(tmp_path: Path) -> None:
    """Of types that the library does not write: any bytes are some numbers."""
    for kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K, Kind.IQ4_XS):
        raw = np.random.default_rng(int(kind)).integers(0, 60, (6, 2 * gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.add_custom_alignment(64)
        writer.add_tensor("t", raw, raw_dtype=kind)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        place = read_header(tmp_path / "x.gguf").places["t"]
        source = GgufTensor(file=tmp_path / "x.gguf", place=place)
        whole = gguf.quants.dequantize(raw, kind)
        part = source.read((slice(1, 5), slice(200, 300)))
        np.testing.assert_array_equal(part, whole[1:5, 200:300])
