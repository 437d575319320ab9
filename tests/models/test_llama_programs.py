"""Programs of a Llama: their bytes, dtypes and compilations, and what they generate."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.models import RopeScaling, generate, init, loss
from lowtide.ops import _dispatch, attention_implementation
from tests.models.tiny_llama import CONFIG, KEY, LOGITS, LOSS, make_batch, make_model


@pytest.mark.slow
def test_remat_changes_bytes_and_not_values():
    model, batch = init(dataclasses.replace(CONFIG, num_layers=8), key=KEY), make_batch(shape=(4, 32))

    def grads(remat):
        return jax.jit(jax.value_and_grad(lambda m: loss(m, batch, remat=remat)[0])).lower(model).compile()

    plain, again = grads(False), grads(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain(model), again(model))
    kept, recomputed = (each.memory_analysis().temp_size_in_bytes for each in (plain, again))
    assert recomputed < 0.5 * kept


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_parameter_and_compute_dtypes_are_separate(param_dtype, compute_dtype):
    model = dataclasses.replace(make_model(dtype=param_dtype), compute_dtype=compute_dtype)
    made = jax.eval_shape(lambda k: init(CONFIG, key=k, dtype=param_dtype, compute_dtype=compute_dtype), KEY)
    assert jax.eval_shape(lambda: model) == made
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {param_dtype}
    h = jax.eval_shape(model.stack.hidden, model.outer, model.layers, make_batch())
    assert h.dtype == compute_dtype
    np.testing.assert_allclose(LOSS(model, make_batch()), LOSS(make_model(), make_batch()), rtol=2e-2)


@pytest.mark.slow
def test_no_recompile_on_the_second_call(compilations):
    model, batch = make_model(), make_batch()
    step = jax.jit(lt.value_and_grad(lambda m, b: loss(m, b)[0], "layers/attn/**"))
    step(model, batch)
    model = jax.tree.map(lambda x: x + 0, model)
    with compilations.none():
        step(model, batch)


@pytest.mark.slow
def test_rope_scaling_turns_slower():
    tokens, strong = make_batch()["tokens"], jax.tree.map(lambda x: 10 * np.asarray(x), make_model())
    plain = LOGITS(strong, tokens)
    for scaling in (
        RopeScaling(rope_type="linear", factor=4.0),
        RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=16),
    ):
        config = dataclasses.replace(CONFIG, rope_scaling=scaling)
        slower = LOGITS(dataclasses.replace(strong, config=config), tokens)
        assert np.abs(np.asarray(plain) - np.asarray(slower)).max() > 1e-3


def test_initialisation_allocates_nothing_abstractly():
    shapes = jax.eval_shape(lambda key: init(CONFIG, key=key, dtype=jnp.bfloat16), KEY)
    assert shapes.layers["mlp"]["up_proj"]["weight"] == jax.ShapeDtypeStruct((3, 24, 16), jnp.bfloat16)


@pytest.mark.slow
def test_generation_continues_the_prompt_and_repeats_by_key():
    model = make_model()
    prompt = jnp.array([3, 1, 4], jnp.int32)
    first = generate(model, prompt, 6, key=jax.random.key(1))
    assert first.shape == (9,)
    np.testing.assert_array_equal(first[:3], prompt)
    np.testing.assert_array_equal(first, generate(model, prompt, 6, key=jax.random.key(1)))
    greedy = generate(model, prompt, 6, key=jax.random.key(2), temperature=0.0)
    assert greedy[3] == np.argmax(LOGITS(model, prompt[None])[0, -1])
    with pytest.raises(ConfigError, match=r"the prompt is empty\nhint: use the token of a newline"):
        generate(model, prompt[:0], 2, key=jax.random.key(2))


@pytest.mark.tpu_aot
def test_a_machine_with_a_gpu_compiles_its_own_attention_for_itself_only(monkeypatch):
    config = dataclasses.replace(CONFIG, head_dim=8)
    model = jax.eval_shape(
        lambda key: init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(_dispatch, "cudnn_version", lambda: 91400)

    def chosen(dtype, capability, head_dim=8):
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda platform=None: [gpu])
        return attention_implementation(jnp.dtype(dtype), head_dim).implementation

    assert chosen("bfloat16", "9.0") == chosen("float16", "8.0") == "cudnn"
    assert chosen("float32", "9.0") == chosen("bfloat16", "9.0", 12) == "blocks"
    assert chosen("bfloat16", "7.5") == chosen("bfloat16", "gfx942") == "blocks"
    with jax.default_device(cpu):
        assert chosen("bfloat16", "9.0") == "blocks"
    monkeypatch.setattr(_dispatch, "cudnn_version", lambda: 0)
    assert chosen("bfloat16", "9.0") == "blocks"
    report = lt.memory.analyze(lambda m, b: loss(m, b)[0], model, make_batch(), target="v5e:2x2")
    assert report.target.platform == "tpu"


@pytest.mark.tpu_aot
@pytest.mark.slow
@pytest.mark.usefixtures("little_optimized")
def test_attention_over_a_long_sequence_holds_the_scores_of_one_block():
    config = dataclasses.replace(CONFIG, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    model = jax.eval_shape(lambda key: init(config, key=key), KEY)
    length = 4096
    batch = {name: jax.ShapeDtypeStruct((1, length), jnp.int32) for name in ("tokens", "labels")}
    report = lt.memory.analyze(jax.grad(lambda m, b: loss(m, b)[0]), model, batch, target="v5e")
    scores = 4 * length * length * 4
    assert report.device.temp_bytes < 0.6 * scores
