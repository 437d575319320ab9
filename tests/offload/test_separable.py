"""What is proved about an update: which leaves belong together, and how many of their axes may be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import StructureError
from lowtide.offload._separable import trace
from lowtide.offload._streaming import cut_block, plan, stream

HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
CHUNK = 8 * 4 * 128 * 4  # eight rows of four matrices' rows of 128


def on_host(*shape: int) -> Any:
    return jax.device_put(jnp.reshape(jnp.sin(jnp.arange(float(np.prod(shape)))), shape), HOST)


def rows_of(fn: Callable[..., Any], *args: Any) -> Any:
    """For `fn` that replaces its first argument: the axes that may be cut, and what prevents it."""
    (group,) = plan(fn, args, lambda *args: args[0], chunk_bytes=64).groups
    return group.rows, group.blocked_by


W, G = on_host(3, 16, 128), jnp.ones((3, 16, 128))


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("fn", "rows", "blocked_by"),
    [
        (lambda w, g: w + jnp.sin(g), 3, None),
        (lambda w, g: w * jnp.linalg.norm(g), 3, None),  # of the gradient: known before
        (lambda w, g: jnp.where(jnp.all(jnp.isfinite(g)), w + g, w), 3, None),
        (lambda w, g: jax.lax.cond(g[0, 0, 0] > 0, lambda: w + g, lambda: w), 3, None),
        (lambda w, g: jax.jit(jax.checkpoint(jax.nn.relu))(w) + jax.nn.gelu(g), 3, None),
        (lambda w, g: w / jnp.sqrt(jnp.sum(w * w, axis=-1, keepdims=True)), 2, None),
        (lambda w, g: w - jnp.mean(w, axis=(1, 2), keepdims=True), 1, None),
        (lambda w, g: jnp.einsum("lij,lkj->lik", w, jnp.ones((3, 128, 128))), 1, None),
        (lambda w, g: jnp.sort(w, axis=1), 1, None),
        (lambda w, g: w.reshape(3, 2048)[:, ::-1].reshape(3, 16, 128), 1, None),
        (lambda w, g: jnp.cumsum(w, axis=2), 2, None),
        (lambda w, g: w + jax.random.normal(jax.random.key(0), w.shape), 3, None),  # made before, then sliced
        (lambda w, g: w / jnp.linalg.norm(w), 0, "reduce_sum"),
        (lambda w, g: jnp.flip(w, 0), 0, "rev"),
        (lambda w, g: jnp.cumsum(w, axis=0), 0, "cumsum"),
        (lambda w, g: jnp.roll(w, 1, axis=0), 0, "slice"),
        (lambda w, g: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros((16, 128)), w)[1], 0, "scan"),
        (lambda w, g: jnp.swapaxes(jnp.swapaxes(w, 0, 1) + 1, 0, 1), 0, "transpose"),
    ],
)
def test_rows_of_an_operation_and_values_of_its_blocks(fn: Callable[..., Any], rows: int, blocked_by: Any) -> None:
    found, reason = rows_of(fn, W, G)
    assert (found, reason) == (rows, blocked_by)
    streamed = jax.jit(
        lambda w, g: stream(fn, (w, g), lambda w, g: w, chunk_bytes=4096, on_fallback=lambda paths, reason: None)
    )(W, G)
    assert streamed.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(streamed, fn(jax.device_put(W, jax.memory.Space.Device), G), rtol=1e-6, atol=1e-6)


def test_short_scans_over_stacked_matrices_leave_one_row_per_matrix() -> None:
    def newton_schulz(w: Any, g: Any, num_steps: int = 5) -> Any:
        def step(x: Any, coefficient: Any) -> Any:
            return 1.5 * x - coefficient * (x @ jnp.swapaxes(x, 1, 2)) @ x, None

        x = (w + g) / jnp.linalg.norm(w + g, axis=(1, 2), keepdims=True)
        return jax.lax.scan(step, x, jnp.linspace(0.4, 0.5, num_steps), reverse=True)[0]

    assert rows_of(newton_schulz, W, G) == (1, None)
    assert rows_of(lambda w, g: newton_schulz(w, g, 17), W, G) == (0, "scan")
    streamed = jax.jit(lambda w, g: stream(newton_schulz, (w, g), lambda w, g: w, chunk_bytes=4096))(W, G)
    np.testing.assert_allclose(
        streamed, newton_schulz(jax.device_put(W, jax.memory.Space.Device), G), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("is_long", "stays"), [(False, False), (True, True)])
def test_branches_with_loops_stay_branches_also_inside_of_others(is_long: bool, stays: bool) -> None:
    """A selection would run them whether they are taken or not."""

    def often(w: Any) -> Any:
        return jax.lax.fori_loop(0, 1000, lambda _, x: jnp.sin(x), w) if is_long else jnp.sin(w)

    def fn(w: Any, g: Any) -> Any:
        inner = lambda: jax.lax.cond(g[0, 0, 0] > 2, lambda: often(w), lambda: w)  # noqa: E731
        return jax.lax.cond(g[0, 0, 0] > 0, inner, lambda: w)

    primitives = [equation.primitive.name for equation in trace(fn, (W, G), [0])[0].equations]
    assert ("cond" in primitives, "select_n" in primitives) == (stays, not stays)


def test_leaves_that_meet_are_a_group_and_others_are_not() -> None:
    def fn(state: Any, grads: Any) -> Any:
        scale = sum(jnp.sum(g) for g in jax.tree.leaves(grads))  # of all gradients: binds nothing
        return {name: leaf * scale + grads[name[0]] for name, leaf in state.items()}

    state = {"a1": on_host(16, 128), "a2": on_host(16, 128), "b1": on_host(24, 128)}
    grads = {"a": jnp.ones((16, 128)), "b": jnp.ones((24, 128))}
    groups = plan(fn, (state, grads), lambda state, grads: state, chunk_bytes=CHUNK).groups
    assert sorted(len(group.outputs) for group in groups) == [1, 2]


def test_a_norm_over_host_leaves_binds_them_all() -> None:
    def fn(state: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in state))
        return [leaf / norm for leaf in state]

    (group,) = plan(fn, ([on_host(16, 128), on_host(24, 128)],), lambda state: state, chunk_bytes=CHUNK).groups
    assert (group.rows, group.blocked_by, len(group.outputs)) == (0, "reduce_sum", 2)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
@pytest.mark.parametrize(
    "of_rows",
    [
        lambda w: jnp.sum(w),
        lambda w: jnp.max(w),
        lambda w: jnp.min(jnp.abs(w), axis=(0, 1), keepdims=True),
        lambda w: jnp.any(w > 2).astype(w.dtype),
        lambda w: jnp.all(w < 2).astype(w.dtype),
        lambda w: jnp.vdot(w, w),
        lambda w: jnp.sum((w - jnp.max(w)) ** 2),  # a pass that needs another one
        lambda w: jnp.sum(w * jnp.arange(16, dtype=w.dtype)[None, :, None]),
    ],
)
def test_folds_over_rows_take_a_pass_and_leave_blocks(of_rows: Any, dtype: Any) -> None:
    def fn(w: Any) -> Any:
        return (w + of_rows(w)).astype(w.dtype)

    w = jax.device_put(jax.device_get(5 * on_host(3, 40, 128)[:, :16]).astype(dtype), HOST)
    made = plan(fn, (w,), lambda w: w, chunk_bytes=4096, fold=True)
    assert made.passes and [group.rows for group in made.groups] == [3]
    got = jax.jit(lambda w: stream(fn, (w,), lambda w: w, chunk_bytes=8192))(w)
    want = jax.jit(fn)(jax.device_put(w, jax.memory.Space.Device))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_branch_with_a_loop_stays_a_branch() -> None:
    def fn(w: Any, go: Any) -> Any:
        return jax.lax.cond(
            go, lambda w: jax.lax.while_loop(lambda c: jnp.all(c < 9), lambda c: c * 2, w), lambda w: w, w
        )

    assert rows_of(fn, on_host(16, 128), jnp.bool_(False)) == (0, "cond")


def test_parameters_on_the_host_and_gradients_on_either_side() -> None:
    def fn(params: Any, state: Any, grads: Any) -> Any:
        state = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), state, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state

    params, state = {"w": on_host(24, 128)}, {"w": on_host(24, 128)}
    for grads in ({"w": jnp.ones((24, 128), jnp.bfloat16)}, {"w": on_host(24, 128)}):
        got = jax.jit(
            lambda p, s, g: stream(fn, (p, s, g), lambda p, s, g: (p, s), chunk_bytes=16 * 1024)  # rows of 16 and 8
        )(params, state, grads)
        want = fn(*jax.device_put((params, state, grads), jax.memory.Space.Device))
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got)} == {"pinned_host"}
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_state_that_grows_is_read_as_it_was() -> None:
    def fn(grads: Any, state: Any) -> Any:
        return grads + state[:, :128], jnp.concatenate([state, grads], axis=1)

    grads, state = jnp.ones((64, 128)), on_host(64, 128)
    got = jax.jit(lambda g, s: stream(fn, (g, s), lambda g, s: (g, s), chunk_bytes=8 * 1024))(grads, state)
    for a, b in zip(got, fn(grads, jax.device_put(state, jax.memory.Space.Device)), strict=True):
        np.testing.assert_allclose(a, b)


def test_results_of_another_structure_are_refused() -> None:
    with pytest.raises(StructureError, match=r"not have the structure of the trees that it replaces(.|\n)*hint:"):
        plan(lambda w: (w, w), (on_host(16, 128),), lambda w: w, chunk_bytes=CHUNK)


@pytest.mark.parametrize(
    ("prefix", "ndim", "rows_in_chunk", "cut"),
    [
        ((64, 128), 2, 64, None),  # one block
        ((64, 128), 2, 16, (0, 16)),
        ((64, 128), 2, 21, (0, 16)),  # a multiple of the tile that divides
        ((56, 128), 2, 24, (0, 24)),  # none near divides: a tail of eight
        ((50257, 128), 2, 1000, None),  # broken tiles
        ((8, 4096), 2, 1, None),  # one tile of rows, which used to pass for a block
        ((16, 4096), 2, 1, (0, 8)),
        ((10, 64, 128), 3, 3.0 * 64, (0, 2)),  # whole layers where they fit
        ((10, 64, 128), 3, 8, (1, 8)),  # rows of one layer
        ((10, 60, 128), 3, 8, (0, 1)),  # layers of broken tiles stay whole
    ],
)
def test_blocks(prefix: Any, ndim: int, rows_in_chunk: float, cut: Any) -> None:
    num_bytes = int(np.prod(prefix)) * 4
    assert cut_block(prefix, ndim, num_bytes, int(rows_in_chunk * prefix[-1] * 4)) == cut
