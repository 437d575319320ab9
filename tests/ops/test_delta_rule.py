"""The gated delta rule beside its definition, token by token: values, gradients, documents, states, bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import ConfigError
from lowtide.jaxprs import jaxpr_flops, make_jaxpr
from lowtide.ops import Documents, _delta_rule, gated_delta_rule, scan_spans, short_convolution

ROWS, KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 2, 4, 16, 8
SIZES = {
    "q": (KEYS, KEY_DIM),
    "k": (KEYS, KEY_DIM),
    "v": (VALUES, VALUE_DIM),
    "log_decay": (VALUES,),
    "beta": (VALUES,),
}


def inputs(length: int, seed: int = 0) -> dict[str, jax.Array]:
    """Draw inputs as a layer makes them: unit vectors, decays below one, betas between zero and one."""
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=(ROWS, length, *size)) for name, size in SIZES.items()}
    for name in ("q", "k"):
        values[name] /= np.linalg.norm(values[name], axis=-1, keepdims=True)
    values["log_decay"] = -np.abs(values["log_decay"]) / 4
    values["beta"] = 1 / (1 + np.exp(-values["beta"]))
    values["state"] = rng.normal(size=(ROWS, VALUES, KEY_DIM, VALUE_DIM))
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def token_by_token(
    q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any, segment_ids: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Follow the definition in `lowtide.ops._delta_rule`, one token after another."""
    q, k = (jnp.repeat(x, VALUES // KEYS, axis=2) for x in (q * KEY_DIM**-0.5, k))
    outs: list[jax.Array] = []
    for t in range(q.shape[1]):
        if segment_ids is not None and t:
            is_same = segment_ids[:, t] == segment_ids[:, t - 1]
            state = jnp.where(is_same[:, None, None, None], state, 0.0)
        state = state * jnp.exp(log_decay[:, t])[..., None, None]
        correction = beta[:, t, :, None] * (v[:, t] - jnp.einsum("bhxy,bhx->bhy", state, k[:, t]))
        state = state + k[:, t, ..., None] * correction[:, :, None]
        outs.append(jnp.einsum("bhxy,bhx->bhy", state, q[:, t]))
    return jnp.stack(outs, axis=1), state


def differentiated(fn: Any, arguments: dict[str, jax.Array], **options: Any) -> tuple[Any, Any]:
    """Return the results of a function, and the gradients of a random combination of them."""
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in jax.eval_shape(fn, **arguments)]

    def combined(arguments: dict[str, jax.Array]) -> Any:
        results = fn(**arguments, **options)
        return sum(jnp.sum(result * weight) for result, weight in zip(results, weights, strict=True)), results

    (_, results), grads = jax.jit(jax.value_and_grad(combined, has_aux=True))(arguments)
    return results, grads


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("length", [1, 2, 37, 64, pytest.param(150, marks=pytest.mark.slow_after(2))])
def test_values_and_gradients_equal_the_definition(
    length: int, with_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_delta_rule, "_SPAN_TOKENS", 70)  # lengths of one span, and of two spans and a rest
    options: dict[str, Any] = {}
    if with_documents:
        borders = np.random.default_rng(2).random((ROWS, length)) < 0.06
        options["segment_ids"] = jnp.asarray(np.cumsum(borders, axis=1))
    got, got_grads = differentiated(gated_delta_rule, inputs(length), **options)
    want, want_grads = differentiated(token_by_token, inputs(length), **options)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    for name, theirs in want_grads.items():
        np.testing.assert_allclose(got_grads[name], theirs, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_state_continues_a_text_and_documents_do_not_mix() -> None:
    values = inputs(90)
    state = values.pop("state")
    whole, last = gated_delta_rule(**values, state=state)
    first, between = gated_delta_rule(**{name: x[:, :41] for name, x in values.items()}, state=state)
    second, end = gated_delta_rule(**{name: x[:, 41:] for name, x in values.items()}, state=between)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=2e-6)
    np.testing.assert_allclose(end, last, atol=2e-6)
    alone, _ = gated_delta_rule(**{name: x[:, 41:] for name, x in values.items()})
    segments = jnp.broadcast_to(jnp.repeat(jnp.asarray([7, 3]), jnp.asarray([41, 49]), total_repeat_length=90), (2, 90))
    packed, _ = gated_delta_rule(**values, state=state, segment_ids=segments)
    np.testing.assert_allclose(packed, jnp.concatenate([first, alone], axis=1), atol=2e-6)


def test_equal_keys_stay_exact() -> None:
    # Equal keys with beta = 1 make the triangular system as badly scaled as it can be.
    values = inputs(64)
    values["k"] = jnp.broadcast_to(values["k"][:, :1], values["k"].shape)
    values |= {"beta": jnp.ones_like(values["beta"]), "log_decay": jnp.zeros_like(values["log_decay"])}
    got, want = gated_delta_rule(**values), token_by_token(**values)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_bfloat16_differs_by_a_few_roundings() -> None:
    values = inputs(200)
    rounded = {name: x.astype(jnp.bfloat16) if name in ("q", "k", "v") else x for name, x in values.items()}
    got, state = gated_delta_rule(**rounded)
    want, want_state = token_by_token(**values)
    assert (got.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    for ours, theirs in ((got, want), (state, want_state)):
        assert float(jnp.sqrt(jnp.mean((ours - theirs) ** 2) / jnp.mean(theirs**2))) < 0.01


def test_normalize_and_vmap_and_jvp() -> None:
    values = inputs(40)
    scaled = {**values, "q": 3 * values["q"], "k": 5 * values["k"]}
    want, state = gated_delta_rule(**values)
    np.testing.assert_allclose(gated_delta_rule(**scaled, normalize=True)[0], want, atol=1e-5)
    mapped = jax.vmap(lambda values: gated_delta_rule(**values))(jax.tree.map(lambda x: x[:, None], values))
    np.testing.assert_allclose(mapped[0][:, 0], want, atol=1e-5)

    def value(v: Any) -> Any:
        return jnp.sum(gated_delta_rule(**{**values, "v": v})[0])

    tangent = jnp.ones_like(values["v"])
    slope = jax.jvp(value, (values["v"],), (tangent,))[1]
    np.testing.assert_allclose(slope, jnp.sum(jax.grad(value)(values["v"])), rtol=1e-4)
    del state


def test_a_short_convolution_reads_its_own_document() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 20, 6)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)
    documents = np.cumsum(rng.random((2, 20)) < 0.2, axis=1)
    want = np.zeros_like(x)
    for row, t, tap in np.ndindex(2, 20, 4):
        source = t - 3 + tap
        if source >= 0 and documents[row, source] == documents[row, t]:
            want[row, t] += x[row, source] * weight[:, tap]

    def step(state: Any, x: Any, documents: Documents | None) -> Any:
        return short_convolution(x, jnp.asarray(weight), state, documents)[::-1]

    empty = jnp.zeros((2, 3, 6))
    _, got = scan_spans(step, empty, jnp.asarray(x), jnp.asarray(documents))
    np.testing.assert_allclose(got, want, atol=1e-6)
    # One token at a time, as in generation: a state belongs to the document of the next token.
    state, outs = empty, []
    for t in range(20):
        if t:
            state = jnp.where(jnp.asarray(documents[:, t] == documents[:, t - 1])[:, None, None], state, 0.0)
        out, state = short_convolution(jnp.asarray(x[:, t : t + 1]), jnp.asarray(weight), state)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), want, atol=1e-6)


def test_mistakes_are_named() -> None:
    values = inputs(4)
    with pytest.raises(ConfigError, match="3 value heads are no multiple of 2 key heads"):
        gated_delta_rule(**{name: x if name in ("q", "k", "state") else x[:, :, :3] for name, x in values.items()})
    for name, wrong in (("k", values["k"][:, :3]), ("beta", values["beta"][..., :1]), ("v", values["v"][:, :0])):
        with pytest.raises(ConfigError, match="gated_delta_rule: . has shape|gated_delta_rule: [a-z_]* has shape"):
            gated_delta_rule(**{**values, name: wrong})
    with pytest.raises(ConfigError, match="segment_ids has shape"):
        gated_delta_rule(**values, segment_ids=jnp.zeros(4, jnp.int32))
    with pytest.raises(ConfigError, match="chunk_size of gated_delta_rule"):
        gated_delta_rule(**values, chunk_size=0)


def published(length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a layer of Qwen3.5-9B for one row."""
    sizes = {"q": (16, 128), "k": (16, 128), "v": (32, 128), "log_decay": (32,), "beta": (32,)}
    return {name: jax.ShapeDtypeStruct((1, length, *size), jnp.bfloat16) for name, size in sizes.items()}


def test_arithmetic_is_that_of_the_chunks() -> None:
    length, chunk, keys, values, dim = 4096, 64, 16, 32, 128
    # Per chunk: two Gram matrices for each key head. For each value head the inverse of five levels, then w and u,
    # corrections, update, scores times corrections, and queries times the state.
    per_value = 10 * chunk**3 + 3 * chunk * chunk * dim + 3 * chunk * dim * dim
    want = 2 * (length // chunk) * (keys * 2 * chunk * chunk * dim + values * per_value)
    closed, _ = make_jaxpr(lambda values: gated_delta_rule(**values)[0])(published(length))
    got = jaxpr_flops(closed)
    assert got == pytest.approx(want, rel=0.15)
