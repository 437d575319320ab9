"""Directories that other software quantised: exact codes and scales, and what is wrong with damaged ones."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import lowtide as lt
from lowtide import models
from lowtide.core import ConfigError, LowtideError, ModelFileError, leaves_with_paths
from lowtide.models._safetensors import SINGLE
from lowtide.train import make_mesh

from .kinds import KINDS
from .quantized_files import SCHEMES, Tensors, quantized_directory, write_tensors

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2}
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
FORMATS = {"nf4": "nf4", "nf4 nested": "nf4", "int8": "int8", "int rows": "int8"}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Q_STATE = f"{Q_PROJ}.quant_state.bitsandbytes__nf4"
IGNORED = pytest.mark.filterwarnings("ignore:.*activation scales", "ignore:.*loaded as arrays")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "model"
    models.save(models.init(models.DecoderConfig(**SIZES, **HEADS), key=jax.random.key(0)), folder)
    return folder


@pytest.fixture(scope="module")
def nested(dense: Path) -> Path:
    quantized_directory(dense, dense.parent / "nested", "nf4 nested")
    return dense.parent / "nested"


def _weights(model: models.Decoder) -> dict[str, Any]:
    """By the names of files, of layers that are no longer stacked."""
    found: dict[str, Any] = {}
    for part, theirs in (("attn", "self_attn"), ("mlp", "mlp")):
        for name, module in model.layers[part].items():
            for layer in range(2 if name.endswith("_proj") else 0):
                found[f"model.layers.{layer}.{theirs}.{name}.weight"] = (module["weight"], layer)
    return found


@pytest.mark.slow_after(1)
@IGNORED
@pytest.mark.parametrize("kind", SCHEMES)
def test_weights_are_what_the_files_stand_for(dense: Path, tmp_path: Path, kind: str) -> None:
    values = quantized_directory(dense, tmp_path / "m", kind)
    model = models.load(tmp_path / "m")
    named = _weights(model)
    assert named.keys() == values.keys()
    dense_weights = _weights(model if kind == "fp4" else jax.jit(lt.dequantize)(model))
    for name, (weight, layer) in named.items():
        assert isinstance(weight, lt.QuantizedWeight) == (kind != "fp4"), name
        got = np.asarray(dense_weights[name][0])[layer]
        np.testing.assert_allclose(got, values[name], rtol=0, atol=1e-7, err_msg=name)
    if kind != "fp4":
        assert {weight.format for weight, _ in named.values()} == {FORMATS.get(kind, "fp8")}
    shapes = models.load_shapes(tmp_path / "m")
    assert jax.tree.structure(shapes) == jax.tree.structure(model)
    for (path, want), got in zip(leaves_with_paths(shapes), jax.tree.leaves(model), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype), path


@pytest.mark.slow
def test_codes_and_scales_of_scales_are_not_computed_again(nested: Path) -> None:
    model = models.load(nested, dtype="bfloat16")
    q, down = model.layers["attn"]["q_proj"]["weight"], model.layers["mlp"]["down_proj"]["weight"]
    with safe_open(nested / SINGLE, "numpy") as file:
        codes, scales = file.get_tensor(Q_PROJ).reshape(64, 32), file.get_tensor(f"{Q_PROJ}.absmax")
        largest = file.get_tensor(f"{Q_PROJ}.nested_absmax")
    np.testing.assert_array_equal(
        np.asarray(q.codes[0]).astype(np.uint8), np.stack([codes >> 4, codes & 15], -1).reshape(64, 64)
    )
    np.testing.assert_array_equal(q.scales[0].ravel(), scales)
    np.testing.assert_array_equal(q.nested_scales[0], largest)
    assert (q.block, q.dtype, q.offset.shape) == (64, jnp.bfloat16, (2,))
    # Blocks of 64 go on from row to row of 96: halves of them have their scales, which are numbers then.
    assert (down.block, down.scales.shape, down.nested_scales) == (32, (2, 64, 3), None)


@pytest.mark.parametrize("kind", ["nf4 nested", "blocks", "tensor"])
@IGNORED
def test_weights_are_divided_and_kept_on_the_host(dense: Path, tmp_path: Path, kind: str) -> None:
    quantized_directory(dense, tmp_path / "m", kind)
    plain = models.load(tmp_path / "m")
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    def divide(path: str, leaf: Any) -> Any:
        axes = (None, "fsdp", "tensor") if path.endswith("_proj/weight") else ()
        return jax.NamedSharding(mesh, jax.P(*axes))

    divided = models.load(tmp_path / "m", sharding=divide)
    hosted = models.load(tmp_path / "m", host="layers/mlp/**")
    for (path, want), got, on_host in zip(
        leaves_with_paths(plain), jax.tree.leaves(divided), jax.tree.leaves(hosted), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(want), np.asarray(got), err_msg=path)
        assert (on_host.sharding.memory_kind == "pinned_host") == path.startswith("layers/mlp/"), path
    codes = divided.layers["attn"]["q_proj"]["weight"].codes
    assert codes.sharding.shard_shape(codes.shape) == (2, 32, 32)


def test_layers_that_are_not_alike_become_arrays(dense: Path, tmp_path: Path) -> None:
    values = quantized_directory(dense, tmp_path / "m", "nf4 nested", skip="layers.1.self_attn.q_proj")
    with pytest.warns(UserWarning, match=r"layers/attn/q_proj/weight are loaded as arrays of 32\.00 KiB, because"):
        weight = models.load(tmp_path / "m").layers["attn"]["q_proj"]["weight"]
    np.testing.assert_allclose(weight[0], values[Q_PROJ], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(weight[1], models.load(dense).layers["attn"]["q_proj"]["weight"][1])


def test_experts_in_8_bits_are_read_as_arrays(tmp_path: Path) -> None:
    models.save(models.init(KINDS["qwen3_moe"], key=jax.random.key(0)), tmp_path / "dense")
    values = quantized_directory(tmp_path / "dense", tmp_path / "m", "blocks")
    with pytest.warns(
        UserWarning, match=r"experts/down/weight, layers(.|\n)* arrays of 144\.00 KiB, because they are experts"
    ):
        layers = models.load(tmp_path / "m").layers
    assert isinstance(layers["attn"]["q_proj"]["weight"], lt.QuantizedWeight)
    got = layers["mlp"]["experts"]["down"]["weight"]
    for layer, expert in np.ndindex(4, 4):
        want = values[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
        np.testing.assert_allclose(got[layer, expert], want, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_experts_in_mxfp4_are_read_as_arrays(tmp_path: Path) -> None:
    experts = models.Experts(num_experts=4, num_experts_per_token=2, intermediate_size=32, clamped=True)
    config = models.DecoderConfig(**{**vars(KINDS["gpt_oss"]), "experts": experts, "intermediate_size": 32})
    model = models.init(config, key=jax.random.key(0), dtype="bfloat16")
    models.save(model, tmp_path / "dense")
    tensors = _read(tmp_path / "dense")
    rng, values = np.random.default_rng(0), dict[str, np.ndarray]()
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, inner, out = tensors.pop(name)[1].shape
        blocks = rng.integers(0, 256, (number, out, inner // 32, 16), np.uint8)
        scales = rng.integers(118, 128, (number, out, inner // 32), np.uint8)
        tensors |= {f"{name}_blocks": ("U8", blocks), f"{name}_scales": ("U8", scales)}
        pairs = np.stack([e2m1[blocks & 15], e2m1[blocks >> 4]], -1).reshape(number, out, inner // 32, 32)
        values[name] = (pairs * 2.0 ** (scales.astype(int) - 127)[..., None]).reshape(number, out, inner).swapaxes(1, 2)
    _rewrite(tmp_path / "dense", tmp_path / "m", tensors, {"quant_method": "mxfp4"})
    with pytest.warns(UserWarning, match="weights in MXFP4 are loaded as arrays"):
        read = models.load(tmp_path / "m")
    for layer, part in np.ndindex(4, 2):
        name = ("gate_up", "down")[part]
        got = read.layers["mlp"]["experts"][name]["weight"]
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got[layer].astype("f"), values[f"model.layers.{layer}.mlp.experts.{name}_proj"])
    scales = tensors["model.layers.0.mlp.experts.down_proj_scales"]
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = ("U8", np.full_like(scales[1], 255))
    write_tensors(tmp_path / "m" / SINGLE, tensors)
    with pytest.warns(UserWarning), pytest.raises(ModelFileError, match=r"a scale that is NaN(.|\n)*hint:"):
        models.load(tmp_path / "m")


def _read(folder: Path) -> Tensors:
    with safe_open(folder / SINGLE, "numpy") as file:
        return {name: (file.get_slice(name).get_dtype(), file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def _rewrite(source: Path, target: Path, tensors: Tensors, scheme: Any) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    write_tensors(target / SINGLE, tensors)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"the checkpoint is quantised by 'gptq'",
        ),
        ({"quant_method": "awq"}, "the checkpoint is quantised by 'awq'"),
        ({"bits": 4}, "does not name the method"),
        ({"quant_method": 3}, "quant_method has an unusable value"),
        ([4], "quantization_config"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit or load_in_8bit"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "float-quantized or int-quantized"),
        ({**SCHEMES["rows"], "transform_config": {"config_groups": {"u": {}}}}, "no transform_config"),
        ({**SCHEMES["rows"], "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "weights of 8 bits"),
    ],
)
def test_what_is_not_read_is_refused_by_name(nested: Path, tmp_path: Path, scheme: Any, words: str) -> None:
    shutil.copytree(nested, tmp_path / "m")
    config = json.loads((nested / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    with pytest.raises(ModelFileError, match=rf"config.json(.|\n)*{words}(.|\n)*hint:"):
        models.load(tmp_path / "m")


def _state(**changes: Any) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        state = {**json.loads(tensors[Q_STATE][1].tobytes()), **changes}
        tensors[Q_STATE] = ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8))

    return change


def _table(tensors: Tensors) -> None:
    table = tensors[f"{Q_PROJ}.nested_quant_map"][1].copy()
    table[3] += 0.01
    tensors[f"{Q_PROJ}.nested_quant_map"] = ("F32", table)


DAMAGED: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no state": (lambda t: t.pop(Q_STATE), "is quantised, but its quantisation state is missing"),
    "no json": (lambda t: t.update({Q_STATE: ("U8", np.zeros(40, np.uint8))}), r"not valid JSON|no JSON|JSON"),
    "long": (lambda t: t.update({Q_STATE: ("U8", np.zeros(5000, np.uint8))}), "at most 4096 bytes"),
    "shape": (_state(shape=[64, 65]), "bytes in one column"),
    "huge": (_state(shape=[2**24, 2**24]), "bytes in one column"),
    "other shape": (_state(shape=[32, 128]), "absmax|the shape of"),
    "block": (_state(blocksize=48), "blocksize"),
    "block of more": (_state(blocksize=128), "absmax(.|\n)*does not match"),
    "offset": (_state(nested_offset=None), "absmax(.|\n)*does not match"),
    "nested": (_state(nested_blocksize=128), "nested_blocksize"),
    "dtype": (_state(dtype="int8"), "dtype"),
    "no absmax": (lambda t: t.pop(f"{Q_PROJ}.absmax"), r"absmax' is missing"),
    "no table": (lambda t: t.pop(f"{Q_PROJ}.quant_map"), r"quant_map' is missing"),
    "no scales": (lambda t: t.pop(f"{Q_PROJ}.nested_absmax"), r"nested_absmax' is missing"),
    "no weight": (lambda t: t.pop(Q_PROJ), r"q_proj.weight' is missing"),
    "table": (_table, "for code 3"),
    "more": (lambda t: t.update({f"{Q_PROJ}.zeros": ("U8", np.zeros(3, np.uint8))}), "does not describe"),
    "cut": (lambda t: t.update({f"{Q_PROJ}.absmax": ("U8", np.zeros(3, np.uint8))}), "64 values of U8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_does_not_fit_is_refused_by_name(nested: Path, tmp_path: Path, case: str) -> None:
    tensors = _read(nested)
    damage, words = DAMAGED[case]
    damage(tensors)
    _rewrite(nested, tmp_path / "m", tensors, SCHEMES["nf4 nested"])
    with pytest.raises(ModelFileError, match=rf"(.|\n)*{words}(.|\n)*hint:"):
        models.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("kind", "name", "shape", "words"),
    [
        ("int8", "SCB", (3, 1), "64 values of F32"),
        ("int8", "SCB", (1, 64), "one row for each of 64 rows of weights"),
        ("rows", "weight_scale", (3, 1), "one, or one for each of the 64 rows"),
        ("blocks", "weight_scale_inv", (3, 1), r"\(2, 2\) of \(32, 32\)"),
    ],
)
def test_scales_of_another_shape_are_refused(
    dense: Path, tmp_path: Path, kind: str, name: str, shape: tuple[int, int], words: str
) -> None:
    quantized_directory(dense, tmp_path / "m", kind)
    with safe_open(tmp_path / "m" / SINGLE, "numpy") as file:
        kinds = {each: file.get_slice(each).get_dtype() for each in file.keys()}  # noqa: SIM118
        tensors = {each: (kinds[each], file.get_tensor(each)) for each in kinds if kinds[each] != "F8_E4M3"}
    for each, dtype in kinds.items():
        if dtype == "F8_E4M3":
            tensors[each] = (dtype, np.zeros((64, 64), np.uint8))
    tensors[Q_PROJ.replace("weight", name)] = ("F32", np.ones(shape, np.float32))
    write_tensors(tmp_path / "m" / SINGLE, tensors)
    with pytest.raises(ModelFileError, match=rf"does not match(.|\n)*{words}(.|\n)*hint:"):
        models.load(tmp_path / "m")


@pytest.mark.slow
def test_a_quantised_directory_is_not_quantised_again_and_saves_as_arrays(nested: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"_proj/weight is already quantised, by bitsandbytes(.|\n)*hint: leave"):
        models.load(nested, quantize={"outer/**": "int8", "layers/attn/*": "int8"})
    model = models.load(nested)
    more = models.load(nested, quantize={"outer/**": "int8"})  # which bitsandbytes left as they were
    assert jax.tree.structure(more.layers) == jax.tree.structure(model.layers)
    np.testing.assert_array_equal(
        more.outer["embed"]["weight"].codes, lt.quantize(model.outer, "embed", "int8")["embed"]["weight"].codes
    )
    with pytest.raises(ModelFileError, match="lt.dequantize"):
        models.save(model, tmp_path / "m")
    arrays = lt.dequantize(model)
    models.save(arrays, tmp_path / "m")
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    tokens = jnp.arange(12)[None]
    got = models.logits(models.load(tmp_path / "m"), tokens)
    np.testing.assert_allclose(models.logits(model, tokens), got, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_random_damage_is_refused_or_loads(nested: Path, tmp_path: Path) -> None:
    good = (nested / SINGLE).read_bytes()
    shutil.copytree(nested, tmp_path / "m")
    header = int.from_bytes(good[:8], "little")
    found: set[str] = set()
    for seed in range(60):
        rng, data = random.Random(seed), bytearray(good)
        if seed % 2:  # names, dtypes, shapes
            at = rng.randrange(8, 8 + header)
            data[at] = rng.choice(b'0123456789_."UFI{}[]')
        else:  # the JSON of a state, which stands at the end with all bytes
            places = [at for at in range(8 + header, len(data)) if data[at : at + 13] == b'{"quant_type"']
            at = rng.choice(places) + rng.randrange(100)
            data[at] = rng.choice(b'0123456789_."UFI{}[]\0\xff')
        (tmp_path / "m" / SINGLE).write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                models.load_shapes(tmp_path / "m")
            found.add("loaded")
        except LowtideError as error:
            assert str(error).count("hint:") == 1, (seed, error)
            found.add(error.code)
    assert "LT004" in found


@pytest.mark.slow_after(1)
@IGNORED
@pytest.mark.filterwarnings("ignore:.*the model is multimodal")
@pytest.mark.parametrize("kind", ["int8", "rows"])
def test_a_model_of_images_and_text_is_read_like_its_text(kind: str, tmp_path: Path) -> None:
    models.save(models.init(KINDS["gemma3_text"], key=jax.random.key(0)), tmp_path / "dense")
    quantized_directory(tmp_path / "dense", tmp_path / "text", kind)
    raw = (tmp_path / "text" / SINGLE).read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = {name if name == "__metadata__" else f"language_model.{name}": each
              for name, each in json.loads(raw[8:begin]).items()}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + raw[begin:])
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "tie_word_embeddings": True}
    outer["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "both" / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    both, text = (jax.tree.leaves(models.load(tmp_path / name)) for name in ("both", "text"))
    for leaf, wanted in zip(both, text, strict=True):
        np.testing.assert_array_equal(leaf, wanted)
