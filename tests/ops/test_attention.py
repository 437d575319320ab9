"""Attention of every kind beside a dense reference in float64, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.ops import AttentionMask, _attention, attention_implementation
from lowtide.ops._options import ScoreOptions
from tests.ops.all_scores import of_all_scores

SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], [7, 9, 20, 4], axis=1)
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": 5},
    "window beyond the row": {"window": 100},
    "segments": {"segment_ids": SEGMENTS},
    "segments in a window": {"segment_ids": SEGMENTS, "window": 3},
    "soft cap": {"soft_cap": 2.0, "segment_ids": SEGMENTS},
    "sinks": {"sinks": np.linspace(-1, 1, 4, dtype=np.float32), "window": 8},
    "scale": {"scale": 0.7, "causal": False, "segment_ids": SEGMENTS},
}


MASK_FIELDS = ("causal", "segment_ids", "window", "start")


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call `lowtide.ops.attention` with the fields of its mask among the keyword arguments."""
    fields = {name: options.pop(name) for name in MASK_FIELDS if name in options}
    return lt.ops.attention(q, k, v, mask=AttentionMask(**fields), **options)


def reference(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """Every score in float64; a query that sees nothing gives zeros."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (np.repeat(np.asarray(each, np.float64), repeats, axis=2) for each in (k, v))
    scale = options.get("scale", q.shape[-1] ** -0.5)
    scores = np.einsum("btnh,bsnh->bnts", np.asarray(q, np.float64), k) * scale
    if cap := options.get("soft_cap"):
        scores = cap * np.tanh(scores / cap)
    distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None]
    seen = distance >= 0 if options.get("causal", True) else np.ones_like(distance, bool)
    seen = seen & (distance < options.get("window", 10**6))
    seen = np.broadcast_to(seen, scores.shape)
    if (segments := options.get("segment_ids")) is not None:
        of_queries, of_keys = segments if isinstance(segments, tuple) else (segments, segments)
        seen = seen & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    if (sinks := options.get("sinks")) is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[None, :, None, None]
    return np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), v)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_a_dense_reference(kind: str, groups: int) -> None:
    q, k, v = drawn(0, 2, 40, 4, 8), drawn(1, 2, 40, groups, 8), drawn(2, 2, 40, groups, 8)
    want = reference(q, k, v, **KINDS[kind])
    for dtype, most in ((jnp.float32, 2e-6), (jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)):
        got = attention(*(jnp.asarray(each, dtype) for each in (q, k, v)), **KINDS[kind])
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=most)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["causal", "segments in a window", "soft cap"])
def test_long_rows_and_their_gradients_equal_those_of_all_scores(kind: str) -> None:
    options = dict(KINDS[kind])
    if "segment_ids" in options:
        options["segment_ids"] = np.repeat(SEGMENTS, 15, axis=1)
    q, k, v, probe = (jnp.asarray(drawn(at, 2, 600, 2, 8), jnp.float32) for at in range(4))
    np.testing.assert_allclose(attention(q, k, v, **options), reference(q, k, v, **options), rtol=0, atol=1e-5)

    mask = AttentionMask(segment_ids=options.get("segment_ids"), window=options.get("window"))
    scores = ScoreOptions(8**-0.5, options.get("soft_cap"))

    def dense(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(of_all_scores(q, k, v, mask, scores) * probe)

    ours = jax.jit(jax.grad(lambda *of: jnp.sum(attention(*of, **options) * probe), (0, 1, 2)))(q, k, v)
    for one, other in zip(ours, jax.jit(jax.grad(dense, (0, 1, 2)))(q, k, v), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_queries_of_another_length_see_their_own_segment_and_such_as_see_nothing_stay_finite() -> None:
    q, k, v = drawn(0, 1, 5, 2, 8), drawn(1, 1, 12, 2, 8), drawn(2, 1, 12, 2, 8)
    segments = np.array([[1, 1, 2, 2, 9]]), np.repeat([[1, 2]], [4, 8], axis=1)
    arrays = [jnp.asarray(each, jnp.float32) for each in (q, k, v)]
    options: dict[str, Any] = {"causal": False, "segment_ids": segments}
    got = attention(*arrays, **options)
    np.testing.assert_allclose(got[:, :4], reference(q, k, v, **options)[:, :4], rtol=0, atol=2e-6)
    grads = jax.grad(lambda *of: jnp.sum(attention(*of, **options)[:, :4] ** 2), (0, 1, 2))(*arrays)
    assert all(np.isfinite(each).all() for each in (got, *grads))


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 4, 2, 8), (2, 4, 2, 8), (2, 4, 8)), {}, r"four axes"),
        (((2, 0, 2, 8), (2, 0, 2, 8), (2, 0, 2, 8)), {}, r"only batch may be empty"),
        (
            ((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)),
            {},
            r"\[B, S, K, H\] where K divides N, not float32\[2, 4, 3, 8\], ",
        ),
        (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), {}, r"k and v the shape \[B, S, K, H\]"),
        (((2, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 4)), {}, r"k and v the shape \[B, S, K, H\]"),
        (
            ((2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)),
            {},
            r"needs 5 queries, one for each key, not 4\n(.|\n)*mask=AttentionMask\(start=start\)",
        ),
        (None, {"window": 0}, r"window must be an integer of at least 1"),
        (None, {"window": 2.5}, r"window must be an integer of at least 1"),
        (None, {"soft_cap": float("inf")}, r"soft_cap must be a finite number above 0"),
        (None, {"scale": np.ones(2)}, r"scale must be one number, .*, not float64\[2\]\n"),
        (None, {"scale": "0.5"}, r"scale must be one number"),
        (None, {"window": np.array([1, 2])}, r"window must be an integer .*, not int64\[2\]\n.*jax.vmap"),
        (None, {"window": jnp.array([1, 2])}, r"window must be an integer"),
        (None, {"window": jnp.float32(2)}, r"window must be an integer"),
        (None, {"start": 30.0}, r"start must be an integer of at least 0"),
        (None, {"start": jnp.array([3, 1])}, r"start must be an integer of at least 0.*\n.*jax.vmap"),
        (None, {"start": -1}, r"start must be an integer of at least 0"),
        (None, {"soft_cap": 0.0}, r"soft_cap must be a finite number above 0"),
        (None, {"scale": jnp.ones(2)}, r"scale must be one number"),
        (None, {"sinks": np.ones(3)}, r"one score for each query head"),
        (None, {"sinks": jnp.ones(())}, r"one score for each query head"),
        (None, {"sinks": [1.0, 2.0]}, r"one score for each query head, .*, not list"),
        (None, {"sinks": np.ones(4, np.int32)}, r"one score for each query head, .*, not int32"),
        (None, {"soft_cap": "2"}, r"soft_cap must be a finite number above 0"),
        (None, {"scale": float("nan")}, r"scale must be a finite number"),
        (None, {"scale": np.complex64(1j)}, r"scale must be (one|a finite) number"),
        (None, {"scale": np.array(np.nan)}, r"scale must be a finite number"),
        (None, {"scale": True}, r"scale must be one number"),
        (None, {"scale": np.array("a")}, r"scale must be a finite number"),
        (None, {"scale": jnp.int32(2)}, r"a traced scale must have a floating.*, not int32\[\]"),
        (None, {"soft_cap": True}, r"soft_cap must be a finite number above 0"),
        (
            None,
            {"soft_cap": jnp.float32(2)},
            r"soft_cap must be a finite number above 0, not Array.*\n.*Python or NumPy",
        ),
        (None, {"causal": "no"}, r"causal must be a bool, not 'no'"),
        (None, {"causal": 1}, r"causal must be a bool"),
        (None, {"causal": None}, r"causal must be a bool"),
        (None, {"causal": jnp.bool_(True)}, r"causal must be a bool, not bool\[\]"),
        (None, {"segment_ids": [np.ones((2, 4), np.int32)] * 2}, r"segment_ids must be integers of shape .*, not list"),
        (None, {"segment_ids": np.ones((2, 5), np.int32)}, r"segment_ids must be integers of shape"),
        (None, {"segment_ids": np.ones((2, 4), np.float32)}, r"segment_ids must be integers of shape"),
        (
            None,
            {"segment_ids": (np.ones((2, 4), np.int32), np.ones((2, 3), np.int32))},
            r"segment_ids must be integers of shape",
        ),
        (None, {"segment_ids": (np.ones((2, 4), np.int32),)}, r"segment_ids must be integers of shape"),
        (None, {"segment_ids": [1, 1, 2, 2]}, r"segment_ids must be integers of shape"),
        (None, {"implementation": "flash"}, r"implementation must be \"cudnn\", .* or \"xla\", not 'flash'"),
        (None, {"implementation": "cudnn"}, r"cuDNN's kernel cannot compute this\n(.|\n)*got: a device of kind cpu"),
    ],
)
def test_bad_input(shapes: Any, options: Any, message: str) -> None:
    arrays = [ones(*shape) for shape in shapes or [(2, 4, 2, 8)] * 3]
    with pytest.raises(ConfigError, match=message) as refused:
        attention(*arrays, **options)
    assert "\nhint: " in str(refused.value)


def test_a_row_of_kernels_is_checked_selected_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_attention.KERNELS) < set(lt.ops.IMPLEMENTATIONS)
    calls: list[bool] = []

    def attend(q: Any, *_: Any, is_required: bool) -> Any:
        calls.append(is_required)
        return q

    def unsupported_reason(case: Any) -> str:
        return "" if case.dtype == "float32" else case.dtype

    kernel = _attention.AttentionKernel(
        "a kernel", "float32", "cpu", unsupported_reason, lambda case: case.num_queries > 2, lambda _: "", attend
    )
    monkeypatch.setattr(_attention, "KERNELS", {"cudnn": kernel})
    for options in ({}, {"implementation": "cudnn"}):
        attention(*3 * [ones(1, 4, 2, 8)], **options)
    attention(*3 * [ones(1, 2, 2, 8)])  # not preferred
    attention(*3 * [ones(1, 4, 2, 8, dtype=jnp.bfloat16)])  # not supported
    assert calls == [False, True]
    with pytest.raises(ConfigError, match=r"a kernel cannot compute this\n.*expected: float32\n.*got: bfloat16"):
        attention(*3 * [ones(1, 4, 2, 8, dtype=jnp.bfloat16)], implementation="cudnn")


def test_a_mask_of_another_type_is_refused() -> None:
    x = ones(2, 4, 2, 8)
    for mask in (None, True, jnp.ones((4, 4), bool)):
        with pytest.raises(ConfigError, match=r"mask must be a lowtide.ops.AttentionMask(.|\n)*hint:"):
            lt.ops.attention(x, x, x, mask=mask)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match=r"mask must be a lowtide.ops.AttentionMask(.|\n)*hint:"):
            attention_implementation(jnp.float32, 64, mask=mask)  # pyright: ignore[reportArgumentType]


def test_what_is_no_array_or_does_not_fit_is_refused() -> None:
    x = ones(2, 4, 4, 8)
    for arrays, message in [
        (([1], [2], [3]), r"four axes(.|\n)*list \[1\]"),
        ((x, None, x), r"four axes(.|\n)*None"),
        ((x, x[:, :, :3], x[:, :, :3]), r"K divides N"),
        ((x, x.astype(jnp.bfloat16), x), r"one floating-point dtype"),
    ]:
        with pytest.raises(ConfigError, match=message):
            lt.ops.attention(*arrays)


@pytest.mark.slow
def test_what_means_the_same_computes_the_same() -> None:
    q, k, v = (jnp.asarray(drawn(seed, 2, 70, 2, 8), jnp.float32) for seed in range(3))
    shared = np.repeat([[1, 2]], [30, 40], axis=1)

    def attended(**options: Any) -> Any:
        return attention(q, k, v, **{"scale": 0.3, **options})

    want = attended(window=5, segment_ids=(np.repeat(shared, 2, 0),) * 2)
    for window in (np.int64(5), np.array(5), jnp.int32(5)):
        for segment_ids in (shared, (shared, shared)):
            np.testing.assert_allclose(attended(window=window, segment_ids=segment_ids), want, atol=1e-6)
    for scale in (np.array(0.3), jnp.float32(0.3)):
        for start in (0, np.array(0)):
            np.testing.assert_allclose(attended(start=start, scale=scale), attended(), atol=1e-6)
    np.testing.assert_array_equal(attended(scale=np.asarray(jnp.bfloat16(1))), attended(scale=1))
    np.testing.assert_array_equal(attended(scale=8**-0.5), attended(scale=None))
    assert lt.ops.attention(q[:0], k[:0], v[:0]).shape == (0, 70, 2, 8)


@pytest.mark.slow
def test_queries_at_the_start_of_a_longer_cache_see_its_first_keys() -> None:
    q, k, v = (jnp.asarray(drawn(seed, 1, length, 2, 8), jnp.float32) for seed, length in enumerate((3, 12, 12)))
    got = attention(q, k, v, start=0)
    np.testing.assert_allclose(got, attention(q, k[:, :3], v[:, :3]), rtol=0, atol=2e-6)


def test_sizes_may_be_unknown_when_a_program_is_exported() -> None:
    new, cached = jax.export.symbolic_shape("t, s", constraints=["s >= t", "t >= 1"])

    def step(q: Any, k: Any) -> Any:
        mask = AttentionMask(start=k.shape[1] - q.shape[1])  # pyright: ignore[reportArgumentType]
        return lt.ops.attention(q, k, k, mask=mask, scale=0.3, implementation="xla")

    shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for length in (new, cached)]
    exported = jax.export.export(jax.jit(step))(*shapes)
    assert exported.call(ones(1, 3, 2, 8), ones(1, 9, 2, 8)).shape == (1, 3, 2, 8)


@pytest.mark.slow
def test_rows_of_a_cache_that_begin_at_places_of_their_own_are_mapped() -> None:
    q, k, v = (jnp.asarray(drawn(seed, 2, length, 2, 8), jnp.float32) for seed, length in enumerate((3, 12, 12)))

    def one(q: Any, k: Any, v: Any, start: Any, window: Any) -> Any:
        return attention(q[None], k[None], v[None], window=window, start=start)[0]

    got = jax.vmap(one)(q, k, v, jnp.array([2, 9]), jnp.array([2, 5]))
    for row, (start, window) in enumerate([(2, 2), (9, 5)]):
        whole = jnp.zeros((1, 12, 2, 8)).at[:, start : start + 3].set(q[row])
        want = reference(whole, k[row : row + 1], v[row : row + 1], window=window)
        np.testing.assert_allclose(got[row], want[0, start : start + 3], rtol=0, atol=2e-6)


def test_dtypes_that_differ_or_are_no_numbers_of_attention() -> None:
    for dtypes in ([jnp.bfloat16, jnp.float32, jnp.float32], [jnp.int32] * 3):
        arrays = [ones(2, 4, 2, 8, dtype=dtype) for dtype in dtypes]
        with pytest.raises(ConfigError, match=r"one floating-point dtype(.|\n)*hint:"):
            lt.ops.attention(*arrays)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 3}], ids=str)
def test_float64_is_computed_in_float64(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 70, 2, 8))) for i in range(3))
        outs = [attention(q, k, v, implementation=name, **options) for name in ("xla", "blocks")]
        assert outs[0].dtype == jnp.float64
        np.testing.assert_allclose(*outs, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_few_tokens_of_float16_are_computed_by_a_compiled_program() -> None:
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 30, 2, 8)), jnp.float16)
    found = jax.jit(lt.ops.attention)(q, q, q)
    want = lt.ops.attention(*[q.astype(jnp.float32)] * 3)
    np.testing.assert_allclose(found, want, atol=2e-3)


@pytest.mark.slow
def test_small_cotangents_of_half_precision_are_kept() -> None:
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 512, 2, 16)), jnp.float16) for i in range(3))

    def gradient(x: Any, dtype: Any) -> Any:
        inputs = [each.astype(dtype) for each in (x, k, v)]
        out, vjp = jax.vjp(functools.partial(lt.ops.attention, implementation="blocks"), *inputs)
        return np.asarray(vjp(jnp.full(out.shape, 1e-4, dtype))[0], np.float64)

    want, found = gradient(q, jnp.float32), gradient(q, jnp.float16)
    assert np.linalg.norm(found - want) < 5e-3 * np.linalg.norm(want)


@pytest.mark.slow
def test_a_window_that_is_not_causal_is_the_same_to_all() -> None:
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 70, 2, 8)), jnp.float32) for i in range(3))
    outs = [attention(q, k, v, window=3, causal=False, implementation=name) for name in ("xla", "blocks")]
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_scale_may_be_learned() -> None:
    q, k, v = (jnp.asarray(drawn(seed, 1, 70, 2, 8), jnp.float32) for seed in range(3))

    def loss(scale: Any) -> Any:
        return jnp.sum(lt.ops.attention(q, k, v, scale=scale) ** 2)

    value, slope = jax.jit(jax.value_and_grad(loss))(jnp.float32(0.3))
    np.testing.assert_allclose(value, loss(0.3), rtol=1e-5)
    np.testing.assert_allclose(slope, (loss(0.301) - loss(0.299)) / 0.002, rtol=2e-2)
    with jax.enable_x64(True):
        out = lt.ops.attention(q, k, v, scale=1 / np.sqrt(8), soft_cap=np.float64(3))
    assert out.dtype == jnp.float32
