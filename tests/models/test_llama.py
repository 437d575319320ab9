import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError, StructureError
from lowtide.models import LlamaConfig, RopeScaling, _attention, generate, init, logits, loss
from lowtide.models._attention import attention_implementation

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)


def _batch(seed=0, shape=(2, 9)):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (shape[0], shape[1] + 1))
    return {"tokens": jnp.asarray(tokens[:, :-1], jnp.int32), "labels": jnp.asarray(tokens[:, 1:], jnp.int32)}


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, batch = init(CONFIG, key=jax.random.key(0)), _batch()
    table = jax.nn.log_softmax(logits(model, batch["tokens"]))
    want = -jnp.mean(jnp.take_along_axis(table, batch["labels"][..., None], axis=-1))
    np.testing.assert_allclose(loss(model, batch)[0], want, rtol=1e-6)


def test_a_later_token_never_changes_an_earlier_logit():
    model, batch = init(CONFIG, key=jax.random.key(0)), _batch()
    before = logits(model, batch["tokens"])
    after = logits(model, batch["tokens"].at[:, 5].add(1))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_remat_changes_bytes_and_not_values():
    model, batch = init(CONFIG, key=jax.random.key(0)), _batch(shape=(8, 64))

    def grads(remat):
        return jax.jit(jax.value_and_grad(lambda m: loss(m, batch, remat=remat)[0]))

    plain, again = grads(False)(model), grads(True)(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)
    kept = grads(False).lower(model).compile().memory_analysis().temp_size_in_bytes
    recomputed = grads(True).lower(model).compile().memory_analysis().temp_size_in_bytes
    assert recomputed < 0.7 * kept


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_parameter_and_compute_dtypes_are_separate(param_dtype, compute_dtype):
    model = init(CONFIG, key=jax.random.key(0), dtype=param_dtype, compute_dtype=compute_dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {param_dtype}
    h = model.stack.hidden(model.outer, model.layers, _batch())
    assert h.dtype == compute_dtype
    reference = init(CONFIG, key=jax.random.key(0))
    np.testing.assert_allclose(loss(model, _batch())[0], loss(reference, _batch())[0], rtol=2e-2)


def loss_fn(model, batch):
    return loss(model, batch)[0]


@functools.cache
def _all_gradients(tie):
    model = init(dataclasses.replace(CONFIG, tie_embeddings=tie), key=jax.random.key(0))
    return model, *jax.value_and_grad(loss_fn)(model, _batch())


@pytest.mark.parametrize(
    ("tie", "wrt"),
    [
        (True, "layers/attn/q_proj/**"),
        (True, "outer/embed/*"),
        (True, "layers/**"),
        *(
            pytest.param(False, w, marks=pytest.mark.slow)
            for w in ("layers/attn/q_proj/**", "layers/**", "outer/embed/*")
        ),
    ],
)
def test_selected_gradients_equal_jax_bit_for_bit(wrt, tie):
    model, want_value, want = _all_gradients(tie)
    value, grads = lt.value_and_grad(loss_fn, wrt)(model, _batch())
    selected, _ = lt.partition(want, wrt)
    assert value == want_value
    assert jax.tree.structure(grads) == jax.tree.structure(selected)
    jax.tree.map(np.testing.assert_array_equal, grads, selected)


def test_no_recompile_on_the_second_call(compilations):
    model, batch = init(CONFIG, key=jax.random.key(0)), _batch()
    step = jax.jit(lt.value_and_grad(lambda m, b: loss(m, b)[0], "layers/attn/**"))
    step(model, batch)
    model = jax.tree.map(lambda x: x + 0, model)
    with compilations.none():
        step(model, batch)


def test_rope_scaling_turns_slower():
    tokens = _batch()["tokens"]

    def strong(config):
        return jax.tree.map(lambda x: 10 * x, init(config, key=jax.random.key(0)))

    plain = logits(strong(CONFIG), tokens)
    for scaling in (
        RopeScaling(rope_type="linear", factor=4.0),
        RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=16),
    ):
        config = dataclasses.replace(CONFIG, rope_scaling=scaling)
        assert np.abs(plain - logits(strong(config), tokens)).max() > 1e-3


def test_initialisation_allocates_nothing_abstractly():
    shapes = jax.eval_shape(lambda key: init(CONFIG, key=key, dtype=jnp.bfloat16), jax.random.key(0))
    assert shapes.layers["mlp"]["up_proj"]["weight"] == jax.ShapeDtypeStruct((3, 24, 16), jnp.bfloat16)


def test_generation_continues_the_prompt_and_repeats_by_key():
    model = init(CONFIG, key=jax.random.key(0))
    prompt = jnp.array([3, 1, 4], jnp.int32)
    first = generate(model, prompt, 6, key=jax.random.key(1))
    assert first.shape == (9,)
    np.testing.assert_array_equal(first[:3], prompt)
    np.testing.assert_array_equal(first, generate(model, prompt, 6, key=jax.random.key(1)))
    greedy = generate(model, prompt, 2, key=jax.random.key(2), temperature=0.0)
    assert greedy[3] == jnp.argmax(logits(model, prompt[None])[0, -1])
    with pytest.raises(ConfigError, match=r"nothing to continue(.|\n)*hint:"):
        generate(model, prompt[:0], 2, key=jax.random.key(2))


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"num_kv_heads has to divide(.|\n)*hint:"):
        dataclasses.replace(CONFIG, num_kv_heads=3)
    with pytest.raises(ConfigError, match=r"head_dim has to be even(.|\n)*hint:"):
        dataclasses.replace(CONFIG, head_dim=5)
    with pytest.raises(ConfigError, match=r"num_layers has to be at least 1(.|\n)*hint:"):
        dataclasses.replace(CONFIG, num_layers=0)


def test_an_embedding_that_cannot_look_rows_up_is_refused_by_name():
    model = init(CONFIG, key=jax.random.key(0))
    node = lt.lora.IA3Weight(model.outer["embed"]["weight"], jnp.ones(CONFIG.vocab_size))
    model = dataclasses.replace(model, outer={**model.outer, "embed": {"weight": node}})
    with pytest.raises(StructureError, match=r"outer/embed: an embedding looks rows up(.|\n)*IA3Weight(.|\n)*hint:"):
        loss(model, _batch())


@pytest.mark.tpu_aot
def test_a_machine_with_a_gpu_compiles_its_own_attention_for_itself_only(monkeypatch):
    config = dataclasses.replace(CONFIG, head_dim=8)
    model = jax.eval_shape(
        lambda key: init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(_attention, "has_cudnn", lambda: True)

    def chosen(dtype, capability, head_dim=8):
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda platform=None: [gpu])
        return attention_implementation(jnp.dtype(dtype), head_dim)

    assert chosen("bfloat16", "9.0") == chosen("float16", "8.0") == "cudnn"
    assert chosen("float32", "9.0") == chosen("bfloat16", "9.0", 12) == "xla"
    assert chosen("bfloat16", "7.5") == chosen("bfloat16", "gfx942") == "xla"
    with jax.default_device(cpu):
        assert chosen("bfloat16", "9.0") == "xla"
    monkeypatch.setattr(_attention, "has_cudnn", lambda: False)
    assert chosen("bfloat16", "9.0") == "xla"
    report = lt.memory.analyze(lambda m, b: loss(m, b)[0], model, _batch(), target="v5e:2x2")
    assert report.target.platform == "tpu"


def test_attention_in_blocks_of_queries_is_attention(monkeypatch: pytest.MonkeyPatch):
    # 9 tokens in blocks of 4: the last block is not full.
    model, batch = init(CONFIG, key=jax.random.key(0)), _batch()
    plain = jax.value_and_grad(lambda m: loss(m, batch)[0])(model)
    monkeypatch.setattr(_attention, "_MAX_QUERIES", 8)
    monkeypatch.setattr(_attention, "_QUERY_BLOCK", 4)
    blocks = jax.value_and_grad(lambda m: loss(m, batch)[0])(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, blocks)


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_attention_over_a_long_sequence_holds_the_scores_of_one_block():
    config = dataclasses.replace(CONFIG, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    model = jax.eval_shape(lambda key: init(config, key=key), jax.random.key(0))

    def temp_bytes(length):
        batch = {name: jax.ShapeDtypeStruct((1, length), jnp.int32) for name in ("tokens", "labels")}
        return lt.memory.analyze(jax.grad(lambda m, b: loss(m, b)[0]), model, batch, target="v5e").device.temp_bytes

    scores = 4 * 4096 * 4096 * 4
    assert temp_bytes(4096) < 0.6 * scores
