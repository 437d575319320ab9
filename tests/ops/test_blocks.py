"""Attention over blocks: every kind and its gradients beside all scores, and what of it is not computed at all."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from lowtide.jaxprs import equations, jaxpr_flops
from lowtide.ops import AttentionMask, _blocks
from lowtide.ops._options import ScoreOptions
from tests.ops.all_scores import SINKS, drawn, loss_of, of_all_scores

LENGTH = 40
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 1, 1]], [7, 9, 20, 4], axis=1).astype(np.int32)
PLAIN = ScoreOptions(0.3)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "all keys": ({"causal": False}, {}),
    "window": ({"window": 5}, {}),
    "window of one": ({"window": 1}, {}),
    "window that layers differ in": ({"window": "traced 5"}, {}),
    "segments": ({"segments": SEGMENTS}, {}),
    "segments of others": ({"segments": SEGMENTS, "causal": False}, {}),
    "segments in a window": ({"segments": SEGMENTS, "window": 9}, {}),
    "soft cap": ({}, {"soft_cap": 2.0}),
    "sinks": ({"window": 8}, {"sinks": SINKS}),
    "all of it": ({"segments": SEGMENTS, "window": "traced 9"}, {"sinks": SINKS, "soft_cap": 3.0}),
    "nothing is seen": ({"segments": (np.full((2, LENGTH), 7, np.int32), SEGMENTS)}, {}),
}
EVERY_SIZE = ("causal", "segments of others", "window that layers differ in", "all of it")
CASES = [
    # Every kind in blocks that overlap in the end of the row.
    *((kind, 16) for kind in KINDS),
    # Some in blocks that divide the row, and in one that is the whole of it.
    *((kind, size) for kind in EVERY_SIZE for size in (8, 128)),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_blocks, "_LEAST_ROWS", 1)
    yield


def arrays(groups: int = 2, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    return tuple(drawn(seed, 2, LENGTH, heads, 8, dtype=dtype) for seed, heads in enumerate((4, groups, groups)))  # pyright: ignore[reportReturnType]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_values_and_gradients_are_those_of_all_scores(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: min(size, LENGTH))
    # No mask depends on how many heads share keys: two kinds of one size have every number of them.
    for groups in (1, 2, 4) if kind in ("causal", "all of it") and size == 16 else (2,):
        given = (*arrays(groups), jnp.asarray(SINKS))
        (value, out), grads = loss_of(_blocks.attend_in_blocks, *KINDS[kind])(*given)
        (want, wanted_out), wanted = loss_of(of_all_scores, *KINDS[kind])(*given)
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=2e-6)
        for one, other in zip((value, *grads), (want, *wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5, equal_nan=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("dtype", "most"), [(jnp.bfloat16, 4e-2), (jnp.float16, 5e-3)])
def test_half_precision(dtype: Any, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 16)
    for kind in ("causal", "segments in a window", "all of it"):
        given = (*arrays(dtype=dtype), jnp.asarray(SINKS))
        (_, out), grads = loss_of(_blocks.attend_in_blocks, *KINDS[kind])(*given)
        (_, wanted_out), wanted = loss_of(of_all_scores, *KINDS[kind])(*given)
        assert out.dtype == dtype and [each.dtype for each in grads[:3]] == [dtype] * 3
        for one, other in zip((out, *grads), (wanted_out, *wanted), strict=True):
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            assert np.abs(one - other).max() <= most * max(1, np.abs(other).max())


@pytest.mark.slow
def test_double_precision_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 16)
    with jax.enable_x64(True):
        q, k, v = arrays(dtype=np.float64)
        out = _blocks.attend_in_blocks(q, k, v, AttentionMask(), PLAIN)
        np.testing.assert_allclose(out, of_all_scores(q, k, v, AttentionMask(), PLAIN), rtol=0, atol=1e-14)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("start", [0, 25])
def test_queries_that_begin_later(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a cache of keys, whose first query is a number of the running program."""
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 8)
    q, k, v = arrays()
    run = jax.jit(lambda start: _blocks.attend_in_blocks(q[:, :15], k, v, AttentionMask(window=12, start=start), PLAIN))
    want = of_all_scores(q[:, :15], k, v, AttentionMask(window=12, start=start), PLAIN)
    np.testing.assert_allclose(run(start), want, rtol=0, atol=2e-6)


def block_flops(mask: AttentionMask, length: int, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass of one head with 64 numbers, and how many blocks there are."""
    monkeypatch.setattr(_blocks, "block_size", lambda *_: size)
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(_blocks.attend_in_blocks(q, k, v, mask, PLAIN))

    flops = jaxpr_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
    pairs = _blocks._pairs_of(_blocks.Config(mask.causal, mask.window, 1.0, None, size), NO_DATA, length, length)
    return flops, len(pairs.all_P.row)


NO_DATA = _blocks.RuntimeMask(None, None, None, None)


def test_half_of_the_scores_are_never_made_and_a_window_has_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = functools.partial(block_flops, size=128, monkeypatch=monkeypatch)
    products = 7 * 2 * 64  # two products forward, five backward
    for length in (2048, 4096):
        causal, _ = flops(AttentionMask(), length)
        assert causal <= 1.15 * products * length * length / 2 * 1.1
        every, _ = flops(AttentionMask(causal=False), length)
        assert causal < 0.55 * every
    windows = [flops(AttentionMask(window=window), 4096)[0] for window in (256, 512, 1024)]
    assert 1.5 < windows[1] / windows[0] < 2 and 1.5 < windows[2] / windows[1] < 2
    assert flops(AttentionMask(window=256), 8192)[0] / windows[0] == pytest.approx(2, rel=0.05)


def test_blocks_that_nobody_sees_are_passed_by_when_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 8)
    kind = _blocks.Config(True, None, 1.0, None, 8)
    documents = jnp.asarray(np.repeat(np.arange(5), 8)[None])

    def needed(**known: Any) -> np.ndarray:
        seen = _blocks.RuntimeMask(**{**NO_DATA._asdict(), **known})
        return np.asarray(_blocks._needed_pairs(kind, seen, _blocks._pairs_of(kind, seen, 40, 40)))

    assert _blocks._needed_pairs(kind, NO_DATA, _blocks._pairs_of(kind, NO_DATA, 40, 40)) is None
    assert needed(query_segments=documents, key_segments=documents).sum() == 5  # of 15: each document's own
    assert needed(window=jnp.int32(1)).sum() == 5 and needed(window=jnp.int32(2)).sum() == 9
    assert needed(window=jnp.int32(1000)).sum() == 15


@pytest.mark.slow
def test_policies_keep_the_result_and_the_sums_of_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 8)
    q, k, v = arrays()

    def block(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(_blocks.attend_in_blocks(jnp.sin(q), k, v, AttentionMask(), PLAIN) ** 2)

    def num_loops(policy: Any) -> int:
        fn = jax.checkpoint(block, policy=policy)
        return sum(eqn.primitive.name == "scan" for eqn in equations(jax.make_jaxpr(jax.grad(fn))(q, k, v).jaxpr))

    names = jax.checkpoint_policies.save_only_these_names
    assert num_loops(names("attn_out", "attn_lse")) == 3  # forward, backward, and each row's own part of its gradient
    assert num_loops(names("attn_out")) == num_loops(None) == 4
    kept = jax.grad(jax.checkpoint(block, policy=names("attn_out", "attn_lse")))(q, k, v)
    np.testing.assert_allclose(kept, jax.grad(block)(q, k, v), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_transformations_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of gradients, `vmap` over examples, and devices that divide rows by hand."""
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 16)
    q, k, v = arrays()
    mask = AttentionMask(segment_ids=jnp.asarray(SEGMENTS))

    def of(attend: Any) -> Any:
        return lambda q: jnp.sum(attend(q, k, v, mask, PLAIN) ** 2)

    def curvature(attend: Any) -> list[Any]:
        gradient, probe = jax.grad(of(attend)), jnp.cos(q)
        forward_over_reverse = jax.jvp(gradient, (q,), (probe,))[1]
        return [forward_over_reverse, jax.grad(lambda q: jnp.sum(gradient(q) * probe))(q)]

    # Compiled as a whole: the hundreds of operations of a derivative cost more one by one.
    in_blocks, at_once = (
        jax.jit(lambda run=run: curvature(run))() for run in (_blocks.attend_in_blocks, of_all_scores)
    )
    for one, other in zip(in_blocks, at_once, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

    def single(q: Any, k: Any, v: Any, segments: Any) -> Any:
        own = AttentionMask(segment_ids=segments[None])
        return _blocks.attend_in_blocks(q[None], k[None], v[None], own, PLAIN)[0]

    want = _blocks.attend_in_blocks(q, k, v, mask, PLAIN)
    mapped = jax.jit(jax.vmap(single))(q, k, v, jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(mapped, want, rtol=0, atol=1e-6)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def by_hand(q: Any, k: Any, v: Any, segments: Any) -> Any:
        out = _blocks.attend_in_blocks(q, k, v, AttentionMask(segment_ids=segments), PLAIN)
        return jax.lax.psum(jnp.sum(out**2), "data")

    divided = jax.shard_map(by_hand, mesh=mesh, in_specs=P("data"), out_specs=P())
    got = jax.jit(jax.grad(divided))(q, k, v, jnp.asarray(SEGMENTS))
    np.testing.assert_allclose(got, jax.jit(jax.grad(of(_blocks.attend_in_blocks)))(q), rtol=1e-5, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_devices_that_rows_and_heads_are_divided_among(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "block_size", lambda *_: 16)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType[kind],) * 2, devices=jax.devices()[:4])
    q, k, v = arrays()
    place = jax.NamedSharding(mesh, P("data", None, "tensor"))
    given = [jax.device_put(each, place) for each in (q, k, v)]

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(_blocks.attend_in_blocks(q, k, v, AttentionMask(), PLAIN) ** 2)

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    for one, other in zip(run(*given), run(q, k, v), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    text = run.lower(*given).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def test_how_large_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert _blocks.block_size((1, 512, 1, 64), 512) == 512
    assert _blocks.block_size((64, 4096, 64, 64), 4096) == 128  # fewer would leave nothing to multiply
    assert _blocks.block_size((1, 2**17, 1, 64), 2**17) == 1024
    assert _blocks.block_size((1, 5, 1, 64), 5) == 5
    assert [_blocks._even_size(length, 512) for length in (1100, 1024, 100)] == [384, 512, 100]
