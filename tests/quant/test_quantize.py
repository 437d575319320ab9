"""Quantised weights: values, products, gradients, bytes, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError, ModelFileError, SelectionError, StructureError, linear, rows, tree_bytes
from lowtide.models import DecoderConfig, init, logits, loss
from lowtide.quant._weight import E2M1_VALUES, NF4_VALUES

FORMATS = ("nf4", "int8", "int4", "fp8", "mxfp4")
BITS = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8 + 32 / 1024, "int4": 4.5, "fp8": 8 + 32 / 1024, "mxfp4": 4.25}
WEIGHT = np.random.default_rng(0).normal(size=(24, 100)).astype(np.float32)
CONFIG = DecoderConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 96, (2, 12)))
BATCH = {"tokens": TOKENS, "labels": TOKENS}


def node(form: str = "nf4", weight: Any = WEIGHT, **kwargs: Any) -> Any:
    return lt.quantize({"w": jnp.asarray(weight)}, "w", form, **kwargs)["w"]


def blocks_of(weight: np.ndarray, size: int) -> list[np.ndarray]:
    return [row[start : start + size] for row in weight for start in range(0, weight.shape[1], size)]


def nearest(values: np.ndarray, table: Any) -> np.ndarray:
    table = np.asarray(table, np.float32)
    return table[np.argmin(np.abs(values[:, None] - table), axis=1)]


def reference(form: str, weight: np.ndarray) -> np.ndarray:
    """Quantise and dequantise block by block; of nf4 without scales of scales."""
    size = {"nf4": 64, "int4": 32, "mxfp4": 32}.get(form, weight.shape[1])
    made: list[np.ndarray] = []
    for block in blocks_of(weight, size):
        largest = np.max(np.abs(block))
        if form == "nf4":
            made.append(nearest(block / largest, NF4_VALUES) * largest)
        elif form == "mxfp4":
            scale = 2.0 ** (np.frexp(largest)[1] - 3)
            made.append(nearest(block / scale, E2M1_VALUES) * scale)
        elif form == "fp8":
            scale = largest / np.float32(448)
            made.append((block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale)
        else:
            most = {"int8": 127, "int4": 7}[form]
            scale = largest / np.float32(most)
            scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32) if form == "int4" else scale
            made.append(np.clip(np.round(block / scale), -most, most) * scale)
    return np.concatenate(made).reshape(weight.shape)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", FORMATS)
def test_values_are_those_of_a_plain_reference(form: str) -> None:
    """Rows of 100 numbers: the last block is shorter."""
    got = np.asarray(node(form).dense())
    # The 8-bit scales of nf4 are within one part in 30 of the largest's distance from the mean.
    np.testing.assert_allclose(got, reference(form, WEIGHT), rtol=0, atol=0.04 if form == "nf4" else 1e-6)
    half = node(form, WEIGHT.astype(ml_dtypes.bfloat16))
    assert half.dtype == jnp.bfloat16 and half.dense().dtype == jnp.bfloat16


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_the_arithmetic_of_the_format(form: str) -> None:
    made = node(form, np.ones((512, 1024), np.float32))
    assert tree_bytes(made) == pytest.approx(512 * 1024 * BITS[form] / 8, rel=0.03)
    shapes = jax.eval_shape(
        lambda w: lt.quantize({"w": w}, "w", form), jax.ShapeDtypeStruct((4, 512, 1024), "bfloat16")
    )
    given = lt.quantize({"w": jax.ShapeDtypeStruct((4, 512, 1024), "bfloat16")}, "w", form)
    assert shapes == given and tree_bytes(given) == 4 * tree_bytes(made)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", -126, 127), ("bfloat16", -126, 127), ("float16", -24, 15)]
)
def test_mxfp4_keeps_every_power_of_two(dtype: str, low: int, high: int) -> None:
    """A logarithm of 2¹³, 2¹⁵ or 2²⁶ is less than the exponent."""
    powers = np.ldexp(1.0, np.arange(low, high + 1))
    weight = jnp.asarray(powers[:, None] * np.array([1, -1] + [0] * 30), dtype)
    np.testing.assert_array_equal(node("mxfp4", weight).dense(), weight)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("form", FORMATS)
def test_numbers_near_the_largest_of_float32_stay_finite(form: str) -> None:
    got = np.asarray(node(form, np.ldexp(WEIGHT, 126)).dense()) * 2.0**-126
    np.testing.assert_allclose(got, reference(form, WEIGHT), rtol=0, atol=0.04 if form == "nf4" else 1e-6)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("form", FORMATS)
def test_under_jit_a_number_that_is_not_finite_makes_nan_of_its_block(form: str) -> None:
    weight = np.random.default_rng(0).normal(size=(300, 128)).astype(np.float32)
    want = reference(form, weight)
    size = {"int4": 32, "mxfp4": 32, "nf4": 64 * 256}.get(form, 128)  # of nf4 a block of scales
    for at, bad in (((5, 3), np.nan), ((290, 40), np.inf), ((299, 127), -np.inf)):
        weight[at] = bad
        start = (at[0] * 128 + at[1]) // size * size
        want.reshape(-1)[start : start + size] = np.nan
    got = jax.jit(lambda w: node(form, w).dense())(weight)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.04 if form == "nf4" else 1e-6)


def test_products_and_rows_are_those_of_the_array() -> None:
    x, left = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32), np.ones((2, 24), np.float32)
    quantized, ids = node(), jnp.array([[0, 23], [-1, 24]])

    @jax.jit
    def results(weight: Any, transposed: Any) -> list[Any]:
        products = [linear(x, weight), (weight @ x.T).T, x @ weight.T, jax.vmap(lambda row: linear(row, weight))(x)]
        return [*products, left @ weight, linear(left, transposed), rows(weight, ids)]

    dense = quantized.dense()
    for ours, theirs in zip(results(quantized, quantized.T), results(dense, dense.T), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert quantized.T.shape == (100, 24)
    assert jax.tree.structure(quantized.mT.mT) == jax.tree.structure(quantized)
    jax.tree.map(np.testing.assert_array_equal, quantized.mT.mT, quantized)


def test_rows_whose_scales_are_in_several_blocks_of_scales() -> None:
    wide = node(weight=np.random.default_rng(1).normal(size=(300, 192)) * np.arange(1.0, 301)[:, None])
    ids = jnp.array([-1, -150, -300, -301, 299, 128])
    np.testing.assert_array_equal(rows(wide, ids), jnp.take(wide.dense(), ids, axis=0))


def test_derivatives_in_x_of_every_kind() -> None:
    made, x = node("int4"), jnp.asarray(np.random.default_rng(0).normal(size=(2, 100)), jnp.float32)
    ours, theirs = (lambda x, w=w: jnp.sum(linear(x, w) ** 3) for w in (made, made.dense()))

    def derivatives(fn: Any) -> Any:
        second = lambda x: jax.grad(lambda x: jnp.sum(jax.grad(fn)(x) ** 2))(x)  # noqa: E731
        return jax.jit(lambda x: (jax.grad(fn)(x), jax.jvp(fn, (x,), (x,))[1], second(x)))(x)

    for one, other, tolerance in zip(derivatives(ours), derivatives(theirs), (1e-5, 1e-5, 1e-4), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance)


def test_only_codes_and_scales_wait_for_the_backward_pass() -> None:
    made = node("nf4", np.ones((40, 128), np.float32))
    _, vjp = jax.vjp(made.linear, jnp.ones((3, 128)))
    kept = sorted(leaf.dtype.name for leaf in jax.tree.leaves(vjp))
    assert kept == ["float32", "float32", "uint4", "uint8"]
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32) < 3


@pytest.fixture(scope="module")
def quantized() -> Any:
    model = init(CONFIG, key=jax.random.key(0))
    return lt.quantize(lt.quantize(model, "layers/**"), "outer/{embed,lm_head}", "int8")


@pytest.mark.slow
def test_a_decoder_with_everything_quantised_trains_as_the_dequantised_one(quantized: Any) -> None:
    model = lt.lora.add(quantized, lt.lora.Config(rank=4, targets="**/*_proj"), key=jax.random.key(1))
    model = jax.tree_util.tree_map_with_path(lambda at, x: x + 0.01 if "lora_b" in str(at) else x, model)
    step = jax.jit(lt.value_and_grad(lambda m, b: loss(m, b, remat=True)[0], "**/lora_*"))
    (value, grads), (want, wanted) = step(model, BATCH), step(lt.dequantize(model), BATCH)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, there in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, there, atol=1e-6)
        assert np.any(got)
    merged = lt.lora.merge(lt.dequantize(model))
    run = jax.jit(logits)
    np.testing.assert_allclose(run(merged, TOKENS), run(model, TOKENS), atol=1e-4)


def test_no_weight_gradient_and_no_stack_of_weights_in_the_step(quantized: Any) -> None:
    model = lt.lora.add(quantized, lt.lora.Config(rank=4, targets="**/*_proj"), key=jax.random.key(1))
    text = str(jax.make_jaxpr(lt.value_and_grad(lambda m, b: loss(m, b, remat=True)[0], "**/lora_*"))(model, BATCH))
    for shape in ("3,96,64", "3,64,96", "3,64,64", "3,32,64"):  # stacks of all projections: codes, no weight, no dW
        assert f":u4[{shape}]" in text
    for shape in ("3,96,64", "3,64,96", "3,64,64"):
        assert f":f32[{shape}]" not in text


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_compiled_for_a_chip_at_most_one_weight_is_made_at_a_time() -> None:
    """Bytes of the model are those of the codes, and no array has the shape of a stack of weights."""
    layers, width, wide = 8, 512, 2048
    shapes = {"up": (layers, wide, width), "down": (layers, width, wide)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    model = {"layers": {name: {"weight": weight} for name, weight in weights.items()}, "scale": jnp.bfloat16(1)}
    model = jax.eval_shape(lambda model: lt.quantize(model, "layers/**"), model)

    def fn(model: Any, x: Any) -> Any:
        def block(h: Any, layer: Any) -> Any:
            return h + linear(jax.nn.silu(linear(h, layer["up"]["weight"])), layer["down"]["weight"]), None

        h = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x * model["scale"], model["layers"])[0]
        return jnp.sum(h.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((256, width), jnp.bfloat16)
    report = lt.memory.analyze(lt.value_and_grad(fn, "scale"), model, x, target="v5e")
    made = [
        each for each in report.buffers if each.dtype == "bf16" and each.shape[-2:] in ((wide, width), (width, wide))
    ]
    assert all(len(each.shape) == 2 for each in made)
    arguments = sum(each.num_bytes for each in report.buffers if each.path.startswith("model/layers"))
    assert arguments == pytest.approx(layers * 2 * wide * width * BITS["nf4"] / 8, rel=0.03)
    assert report.device_bytes < 1.5 * arguments + 2 * wide * width * 2


@pytest.mark.slow
def test_a_quantised_stack_is_sharded_like_its_weight() -> None:
    mesh = lt.train.make_mesh(fsdp=4, tensor=2)
    place = jax.sharding.NamedSharding(mesh, jax.P(None, "tensor", "fsdp"))
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 512)), jnp.float32)
    plain = lt.quantize({"layers": {"w": weight}}, "layers/w")["layers"]["w"]
    made = lt.quantize({"layers": {"w": jax.device_put(weight, place)}}, "layers/w")["layers"]["w"]
    assert made.codes.sharding == place and made.sharding == place
    assert made.scales.sharding.spec == jax.P(None, "tensor", "fsdp")
    jax.tree.map(np.testing.assert_array_equal, made, plain)
    x = jnp.ones((8, 512))
    one = jax.tree.map(lambda leaf: leaf[1], made)
    second = np.asarray(plain.dense())[1]
    np.testing.assert_allclose(jax.jit(linear)(x, one), np.asarray(x) @ second.T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "path", "shape", "spec"),
    [
        ("nf4", "w", (16, 192), (None, "d")),  # blocks that lie on two devices
        ("mxfp4", "w", (16, 192), ("d", None)),
        ("nf4", "layers/w", (4, 8, 128), ("d", None, None)),
    ],
)
def test_axes_of_the_mesh_may_be_explicit(form: str, path: str, shape: Any, spec: Any) -> None:
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=explicit, devices=jax.devices()[:4])
    place = jax.sharding.NamedSharding(mesh, jax.P(*spec))
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def made(weight: Any) -> Any:
        return jax.tree.leaves(lt.quantize({path: weight}, path, form), is_leaf=lambda x: hasattr(x, "codes"))[0]

    plain, divided = made(jnp.asarray(weight)), jax.device_put(weight, place)
    one, dense = made(divided), np.asarray(plain.dense())
    for each in (one, jax.jit(made)(divided)):
        assert each.codes.sharding == place
        for got, there in zip(jax.tree.leaves(each), jax.tree.leaves(plain), strict=True):
            if got.dtype == jnp.float32:  # a mean's last digits depend on the order of its sum
                np.testing.assert_allclose(got, there, rtol=1e-6)
            else:
                np.testing.assert_array_equal(got, there)
    for back in (lt.dequantize({"w": one})["w"], jax.jit(lambda w: w.dense())(one), one.mT.dense().mT):
        assert back.sharding.is_equivalent_to(place, len(shape))
        np.testing.assert_allclose(back, dense, rtol=0, atol=1e-6)
    if len(shape) == 2:
        x = np.ones((3, shape[1]), np.float32)
        np.testing.assert_allclose(jax.jit(linear)(x, one), x @ dense.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(rows(one, jnp.array([1, 15])), dense[[1, 15]], rtol=0, atol=1e-6)


def test_what_is_chosen_may_be_an_expression() -> None:
    tree = {name: {"weight": jnp.ones((4, 64))} for name in "ab"}
    generated: Any = (pattern for pattern in ("*/weight", "!b"))
    for match in (re.compile("a"), [re.compile("[ab]"), "!b"], generated):
        found = lt.quantize(tree, match, "int8")
        assert [hasattr(found[name]["weight"], "codes") for name in "ab"] == [True, False]


@pytest.mark.parametrize(
    ("tree", "match", "form", "error", "text"),
    [
        ({"w": jnp.ones((2, 64), int)}, "w", "nf4", StructureError, "w is not a weight matrix"),
        ({"layers": {"norm": jnp.ones((3, 64))}}, "layers/*", "nf4", StructureError, "norm is not a weight matrix"),
        ({"w": jnp.ones((2, 64))}, "v", "nf4", SelectionError, "pattern 'v' matches nothing"),
        ({"w": jnp.ones((2, 64))}, "w", "nf5", ConfigError, "quantisation format must be .*'nf5'"),
        ({"w": jnp.ones((2, 64)).at[1, 3].set(jnp.nan)}, "w", "int8", StructureError, "w has a value that is not"),
        ({"w": jnp.ones((3, 2, 64)).at[2].set(jnp.inf)}, "w", "int8", StructureError, r"w\[2\] has a value"),
        ({"w": jnp.full((2, 64), jnp.finfo("bfloat16").max)}, "w", "int4", StructureError, "int4 rounds to infinity"),
    ],
)
def test_what_cannot_be_quantised_is_refused(tree: Any, match: str, form: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        lt.quantize(tree, match, form)
    assert "hint: " in str(caught.value)


def test_twice_blocks_merging_and_training_are_refused(quantized: Any) -> None:
    with pytest.raises(StructureError, match="q_proj/weight is already quantised in nf4"):
        lt.quantize(quantized, "**/q_proj")
    with pytest.raises(StructureError, match="has no quantised weight"):
        lt.dequantize({"w": jnp.ones(3)})
    for form, block in (("nf4", 7), ("nf4", 64.0), ("int4", "32"), ("int8", False), ("int4", 2**31), ("mxfp4", 64)):
        with pytest.raises(ConfigError, match=f"block of {form} must be .*, not {block!r}\nhint: "):
            node(form, block=block)
    with pytest.raises(StructureError, match=r"(?s)a product needs one matrix.*got: shape \[3, 64, 64\].*hint:"):
        node("int8", np.ones((3, 64, 64), np.float32)).linear(jnp.ones((2, 64)))
    with pytest.raises(SelectionError, match="codes: a leaf of type uint4 cannot be differentiated"):
        lt.value_and_grad(lambda m, b: loss(m, b)[0], "layers/**")(quantized, BATCH)
    with pytest.raises(SelectionError, match=r"weight/\w+: a leaf of a QuantizedWeight cannot be trained(.|\n)*hint:"):
        lt.value_and_grad(lambda m, b: loss(m, b)[0], "**/q_proj/weight/nested_scales")(quantized, BATCH)
    adapted = lt.lora.add(quantized, lt.lora.Config(rank=2, targets="**/q_proj"), key=jax.random.key(0))
    with pytest.raises(StructureError, match="cannot merge into a QuantizedWeight"):
        lt.lora.merge(adapted)


@pytest.mark.slow
def test_other_blocks_and_zeros() -> None:
    assert node("int4", block=0).scales.shape == (24, 1) and node("nf4", block=128).scales.shape == (24, 1)
    np.testing.assert_array_equal(node("int4", block=2**16).dense(), node("int4", block=0).dense())
    for form in FORMATS:
        np.testing.assert_array_equal(node(form, np.zeros((4, 64), np.float32)).dense(), np.zeros((4, 64)))


@pytest.mark.slow
def test_a_model_is_quantised_while_it_is_read(tmp_path: Any) -> None:
    model = init(CONFIG, key=jax.random.key(0))
    lt.models.save(model, tmp_path)
    read = lt.models.load(tmp_path, quantize="nf4")
    jax.tree.map(np.testing.assert_array_equal, read, lt.quantize(model, "layers/**/*_proj"))
    formats = {"layers/mlp/*_proj": "int8", "outer/embed": "fp8", "outer/**": "int8"}
    hosted = lt.models.load(tmp_path, quantize=formats, host="layers/**")
    wanted = lt.quantize(lt.quantize(model, ["layers/mlp/*_proj", "outer/lm_head"], "int8"), "outer/embed", "fp8")
    jax.tree.map(np.testing.assert_array_equal, hosted, wanted)
    codes = hosted.layers["mlp"]["up_proj"]["weight"].codes
    assert codes.sharding.memory_kind == "pinned_host"
    rules = lt.train.ShardingRules(mesh=lt.train.make_mesh(fsdp=8), min_bytes=0)
    divided = lt.models.load(tmp_path, quantize="nf4", sharding=rules.of)
    jax.tree.map(np.testing.assert_array_equal, divided, read)
    assert not divided.layers["mlp"]["up_proj"]["weight"].codes.sharding.is_fully_replicated
    with pytest.raises(SelectionError, match="matches nothing"):
        lt.models.load(tmp_path, quantize={"layers/nothing": "nf4"})
    with pytest.raises(ModelFileError, match="hint: dequantise weights with lt.dequantize"):
        lt.models.save(read, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_x64_and_strict_promotion_change_nothing(form: str) -> None:
    weight = np.stack([WEIGHT, 2 * WEIGHT])
    x = np.random.default_rng(2).normal(size=(3, 100)).astype(np.float32)

    def made() -> tuple[Any, Any]:
        whole = node(form, weight)
        return whole, jax.jit(linear)(jnp.asarray(x), jax.tree.map(lambda leaf: leaf[1], whole))

    whole, want = made()
    for context in (jax.enable_x64(True), jax.numpy_dtype_promotion("strict")):
        with context:
            again, product = made()
        jax.tree.map(np.testing.assert_array_equal, again, whole)
        assert product.dtype == jnp.float32
        np.testing.assert_allclose(product, want, rtol=1e-6)


def test_a_module_with_a_field_named_linear_is_not_a_weight() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Block:
        linear: Any

    block = lt.quantize(Block(jnp.ones((32, 64))), "linear", "int8")
    assert isinstance(block.linear, lt.QuantizedWeight)
