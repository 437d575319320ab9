"""Generation: a cache changes no logits, rows do not see each other, sampling follows its settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide import lora, models
from lowtide.core import ConfigError, NonFiniteError, StructureError
from lowtide.models import DecoderConfig, Experts, RopeScaling, Sampling, _decoder
from lowtide.models import _generation as generation
from lowtide.models._generation import choose, empty_cache, knobs_of, prefill, step

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTURE = Experts(num_experts=4, num_experts_per_token=2, intermediate_size=12)
CASES = {
    "plain": {},
    "window": {"sliding_window": 4, "attention_bias": True},
    "kinds of layers": {
        "sliding_window": 4,
        "sliding_layers": (True, False, True),
        "local_rope_theta": 100.0,
        "qk_norm": "head",
        "scale_embedding": True,
    },
    "soft caps": {"attention_soft_cap": 2.0, "final_soft_cap": 3.0, "post_norm": True, "norm_offset": 1.0},
    "fused, norms of the whole width": {"fused_projections": True, "qk_norm": "width"},
    "norms after": {"pre_norm": False, "post_norm": True},
    "mixture": {"experts": MIXTURE, "sliding_window": 4},
    "sinks": {"attention_sinks": True, "sliding_window": 4, "sliding_layers": (True, False, True)},
    "yarn": {"rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)},
}
PROMPTS = [[5, 9, 2], [7, 1, 3, 3, 8, 20, 11]]


LOGITS = jax.jit(models.logits)


def _model(seed=0, **switches):
    config = DecoderConfig(**{**SIZES, **switches})
    model = models.init(config, key=jax.random.key(seed))
    if config.attention_sinks:  # at first zero, which a mistake might not show
        model.layers["attn"]["sinks"]["weight"] = jax.random.normal(jax.random.key(3), (3, 4))
    return jax.tree.map(lambda x: 8 * x if x.ndim > 2 else x, model)


def _stretched(kind):
    """A model whose frequencies change beyond 8 tokens."""
    factors = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (2.0, 3.0, 4.0, 6.0)}
    options = {"original_max_position_embeddings": 8, **factors} if kind == "longrope" else {}
    scaling = RopeScaling(rope_type=kind, factor=4.0, **options)
    return _model(rope_scaling=scaling, max_position_embeddings=8)


@pytest.mark.slow
def test_the_length_of_another_prompt_changes_no_answer():
    model = _stretched("longrope")
    prompts = [[5, 9, 2], np.random.default_rng(0).integers(0, 61, 30).tolist()]
    greedy = {"key": jax.random.key(0), "sampling": Sampling(temperature=0)}
    beside = [each.tokens for each in models.generate_batch(model, prompts, 4, **greedy)]
    alone = [next(models.generate_batch(model, [prompt], 4, **greedy)).tokens for prompt in prompts]
    assert beside == alone


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers"), [("dynamic", "stacked"), ("longrope", "apart")])
def test_a_text_that_outgrows_its_frequencies_continues_as_without_a_cache(kind, layers, monkeypatch):
    model = _stretched(kind)
    prompts = [[5, 9, 2], [7, 1, 3, 3, 8, 20]]  # they cross 8 tokens at different steps
    used = model if layers == "stacked" else models.unstack(model)
    seen = []

    def watched(state, logits, *rest):
        jax.debug.callback(lambda *each: seen.append([np.array(x) for x in each]), state.lengths, logits, ordered=True)
        return append(state, logits, *rest)

    append = generation._append
    monkeypatch.setattr(generation, "_append", watched)
    for program in (generation._start, generation._advance):
        program.clear_cache()
    greedy = {"key": jax.random.key(0), "sampling": Sampling(temperature=0)}
    found = [each.tokens for each in models.generate_batch(used, prompts, 10, **greedy)]
    for program in (generation._start, generation._advance):
        program.clear_cache()
    assert len(seen) == 10
    for row, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        whole = np.zeros((1, 16), np.int32)
        whole[0, : len(prompt) + 10] = [*prompt, *tokens]
        for lengths, logits in seen:
            last = lengths[row] - 1
            positions = np.minimum(np.arange(16, dtype=np.int32), last)[None]  # what follows is no part of the length
            want = np.asarray(LOGITS(model, whole, positions=positions))[0, last]
            np.testing.assert_allclose(logits[row], want, atol=2e-5)
            assert tokens[last + 1 - len(prompt)] == want.argmax()


# Layers apart are indexed instead of scanned, whatever a layer computes.
@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("case", "layers"),
    [("kinds of layers", "apart"), ("sinks", "stacked"), ("mixture", "apart")]
    + [(case, "stacked") for case in CASES if case != "sinks"],
)
def test_a_cache_changes_no_logits_of_rows_padded_on_the_left(case, layers):
    stacked = _model(**CASES[case])
    model = stacked if layers == "stacked" else models.unstack(stacked)
    ids = np.random.default_rng(0).integers(0, 61, (2, 16)).astype(np.int32)
    pad, width = 3, 7
    segments = np.ones((2, 16), np.int32)
    segments[1, :pad] = 0
    positions = np.maximum(np.cumsum(segments, axis=1, dtype=np.int32) - 1, 0)
    got, cache = jax.jit(prefill)(
        model, ids[:, :width], positions[:, :width], empty_cache(model, jnp.asarray(segments))
    )
    steps = [got]
    for column in range(width, 13):
        at = slice(column, column + 1)
        got, cache = jax.jit(step)(model, ids[:, at], positions[:, at], cache)
        steps.append(got)
    got = np.stack(steps, axis=1)
    assert np.std(got) > 1e-3
    for row, start in ((0, 0), (1, pad)):
        whole = np.asarray(LOGITS(stacked, ids[row : row + 1, start : start + 13]))[0]  # one shape compiles once
        want = whole[width - 1 - start : 13 - start]
        np.testing.assert_allclose(got[row], want, atol=2e-5)


@pytest.mark.slow
def test_rows_are_what_they_are_alone_and_end_where_they_ended():
    model = _model()
    options = {"key": jax.random.key(4), "sampling": Sampling(temperature=0.7, top_k=20)}
    free = list(models.generate_batch(model, PROMPTS, 12, num_samples=3, batch_size=4, **options))
    assert [(c.prompt, c.sample) for c in free] == [(p, s) for p in range(2) for s in range(3)]
    assert all(len(c.tokens) == 12 and not c.is_ended for c in free)
    assert len({c.tokens for c in free}) == 6
    end = free[0].tokens[4]
    ended = list(models.generate_batch(model, PROMPTS, 12, num_samples=3, batch_size=6, end_tokens=[end], **options))
    for one, other in zip(free, ended, strict=True):
        at = one.tokens.index(end) if end in one.tokens else 12
        assert other.tokens == one.tokens[:at]
        assert other.is_ended == (end in one.tokens)
    assert tuple(models.stream(model, PROMPTS[0], 12, **options)) == free[0].tokens
    assert tuple(models.stream(model, PROMPTS[0], 12, end_tokens=[end], **options)) == ended[0].tokens


@pytest.mark.slow
def test_layers_apart_write_the_same_and_are_refused_where_they_would_be_scanned():
    model = lt.quantize(_model(hidden_size=64, num_layers=2), "layers/**/{q,down}_proj/weight", "nf4")
    model = lora.add(model, lora.Config(rank=2, targets="**/{q,up}_proj"), key=jax.random.key(2))
    model = jax.tree.map(lambda x: x + 0.1 if x.dtype == jnp.float32 and x.ndim == 3 else x, model)
    options = {"key": jax.random.key(4), "sampling": Sampling(temperature=0.7), "num_samples": 2}
    want = list(models.generate_batch(model, PROMPTS, 6, **options))
    apart = models.unstack(model)
    assert models.unstack(apart, donate=True) is apart
    assert list(models.generate_batch(apart, PROMPTS, 6, **options)) == want
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((model, apart)))
    tokens = jnp.ones((1, 4), jnp.int32)
    for use in (lambda: models.logits(apart, tokens), lambda: models.loss(apart, {"tokens": tokens, "labels": tokens})):
        with pytest.raises(StructureError, match="layers are not stacked"):
            use()


@pytest.mark.parametrize("full", [False, True])
def test_donated_layers_are_gone_by_way_of_the_host_where_a_device_is_full(full, monkeypatch):
    model = _model()
    kept, want = jax.tree.leaves(model.layers), jax.tree.map(np.asarray, model.layers)
    if full:

        def none_is_left(leaf):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        monkeypatch.setattr(_decoder, "_split_stack", none_is_left)
        with pytest.raises(jax.errors.JaxRuntimeError):
            models.unstack(model)
    apart = models.unstack(model, donate=True)
    assert all(leaf.is_deleted() for leaf in kept)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda *parts: np.stack(parts), *apart.layers), want)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_step_of_layers_apart_copies_no_weights_on_a_gpu():
    sizes = {"vocab_size": 512, "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 4, "num_heads": 16}
    config = DecoderConfig(**sizes, num_kv_heads=4, head_dim=128)

    def begin(apart):
        model = models.init(config, key=jax.random.key(0), dtype="bfloat16", compute_dtype="bfloat16")
        if apart:
            each = [jax.tree.map(lambda leaf, at=at: leaf[at], model.layers) for at in range(4)]
            model = dataclasses.replace(model, layers=tuple(each))
        return model, empty_cache(model, jnp.ones((2, 64), jnp.int32))

    def temp_bytes(apart):
        model, cache = jax.eval_shape(lambda: begin(apart))
        column = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        report = lt.memory.analyze(step, model, column, column, cache, target="h100", donate_argnums=3)
        return report.device.temp_bytes

    one = 2048 * 8192 * 2
    assert temp_bytes(apart=True) < one / 8
    assert temp_bytes(apart=False) > one


@pytest.mark.slow
def test_the_same_shapes_compile_once(compilations):
    model = _model()

    def once(prompts, temperature):
        options = {"key": jax.random.key(1), "sampling": Sampling(temperature=temperature), "end_tokens": [60]}
        list(models.generate_batch(model, prompts, 6, **options))

    once(PROMPTS, 0.5)
    with compilations.none():
        once([[1], [4, 5]], 0.0)


@pytest.mark.slow
def test_one_prompt_equals_what_is_computed_without_a_cache():
    model = lora.add(_model(), lora.Config(rank=2, targets="**/{q,v}_proj"), key=jax.random.key(2))
    model = jax.tree.map(lambda x: x + 0.1, model)
    prompt = jnp.asarray(PROMPTS[1], jnp.int32)

    def hidden(model, batch):
        return model.stack.hidden(model.outer, model.layers, batch)

    for temperature in (0.0, 0.9):
        options = {"key": jax.random.key(6), "temperature": temperature}
        want = models.generate(model, prompt, 9, hidden=hidden, **options)
        np.testing.assert_array_equal(models.generate(model, prompt, 9, **options), want)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.35}, [3]),
        ({"min_p": 0.3}, [0, 1, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),
        ({"top_p": 0.5, "temperature": 0.5}, [3]),
    ],
)
def test_samples_have_the_distribution_asked_for(settings, kept):
    probs = np.array([0.15, 0.3, 0.1, 0.4, 0.05])
    sampling = Sampling(**settings)
    ways, knobs = knobs_of(sampling)
    num = 4000
    keys = jax.random.split(jax.random.key(0), num)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)) + 3, (num, 5))
    drawn = jax.jit(choose, static_argnums=3)(logits, keys, None, ways, knobs)
    found = np.bincount(np.asarray(drawn), minlength=5) / num
    want = np.where(np.isin(np.arange(5), kept), probs ** (1 / sampling.temperature), 0)
    np.testing.assert_allclose(found, want / want.sum(), atol=0.03)
    assert set(np.flatnonzero(found)) == {*kept}


@pytest.mark.slow
def test_a_penalty_keeps_from_repeating():
    model = _model()
    tokens = {}
    for penalty in (1.0, 1000.0):
        sampling = Sampling(temperature=0, repetition_penalty=penalty)
        (done,) = models.generate_batch(model, [[1, 2]], 15, key=jax.random.key(0), sampling=sampling)
        tokens[penalty] = done.tokens
    assert len({*tokens[1.0]}) < 10
    assert len({*tokens[1000.0], 1, 2}) == 17


@pytest.mark.slow
def test_logits_that_are_not_finite_are_an_error():
    model = _model()
    broken = dataclasses.replace(model, outer={**model.outer, "norm": {"weight": jnp.full(16, jnp.nan)}})
    for use in (
        lambda: list(models.generate_batch(broken, PROMPTS, 3, key=jax.random.key(0), batch_size=3)),
        lambda: list(models.stream(broken, PROMPTS[0], 3, key=jax.random.key(0))),
        lambda: models.generate(broken, jnp.asarray(PROMPTS[0]), 3, key=jax.random.key(0)),
    ):
        with pytest.raises(NonFiniteError, match=r"logits (.|\n)*not finite(.|\n)*hint: check for nan"):
            use()
    # A token that alone is broken, and comes after the prompt.
    logits = np.asarray(LOGITS(model, jnp.asarray([PROMPTS[0]])))[0, -1]
    embed = {"weight": model.outer["embed"]["weight"].at[int(logits.argmax())].set(jnp.nan)}
    broken = dataclasses.replace(model, outer={**model.outer, "embed": embed})
    tokens = models.stream(broken, PROMPTS[0], 3, key=jax.random.key(0), sampling=Sampling(temperature=0))
    assert next(tokens) == logits.argmax()
    with pytest.raises(NonFiniteError, match="not finite"):
        next(tokens)


def test_bytes_of_a_cache():
    model = _model()
    cache = empty_cache(model, jnp.ones((3, 32), jnp.int32))
    assert models.cache_bytes(model.config, 3, 32) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.entries))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[61]]}, "not in the vocabulary"),
        ({"num_tokens": 0}, "num_tokens must be an integer of at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, not 0"),
    ],
)
def test_bad_input(given, message):
    arguments = {"prompts": [[1]], "num_tokens": 3, **given}
    with pytest.raises(ConfigError, match=message):
        models.generate_batch(_model(), key=jax.random.key(0), **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0), ("min_p", 2)],
)
def test_a_sampling_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be .*, not {value}"):
        Sampling(**{name: value})


def test_one_prompt_of_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"not in the vocabulary(.|\n)*hint:"):
        models.generate(_model(), jnp.asarray([61]), 2, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["stacked", "apart"])
def test_x64_changes_no_answer(layers):
    model = _model()
    model = models.unstack(model) if layers == "apart" else model
    want = models.generate(model, jnp.asarray(PROMPTS[0]), 4, key=jax.random.key(0), temperature=0.0)
    with jax.enable_x64(True):
        got = models.generate(model, jnp.asarray(PROMPTS[0], jnp.int32), 4, key=jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(got, want)
