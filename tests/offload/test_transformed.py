"""Optimizer state on the host where JAX computes otherwise: in 64 bits, transformed, on typed axes, on a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowtide import memory
from lowtide.core import PlacementWarning, StructureError
from lowtide.offload import optimizer, state_shardings, to_host

CHUNK = 24 * 1024  # for Adam's moments of 56 x 128: two blocks and a tail


def params(**shapes: tuple[int, ...]) -> Any:
    values = np.random.default_rng(0)
    return {name: jnp.asarray(values.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("shape", [(56, 128), (2, 3, 16, 128), (4096,)])
def test_integers_and_state_of_64_bits(shape: tuple[int, ...]) -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    with jax.enable_x64(True):
        start = {"w": jnp.linspace(-1, 1, int(np.prod(shape)), dtype=jnp.float64).reshape(shape)}
        wrapped = optimizer(tx, chunk_bytes=CHUNK // 2)
        got = jax.jit(step_of(wrapped))(start, wrapped.init(start), start)
        want = jax.jit(lambda p: step_of(tx)(p, tx.init(p), p))(start)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("tx", [optax.adamw(1e-2), optax.amsgrad(1e-2)], ids=["adamw", "amsgrad"])
def test_a_cpu_copies_no_leaf_at_each_block(tx: Any) -> None:
    start = params(w=(256, 256))
    wrapped = optimizer(tx, chunk_bytes=CHUNK)
    args = start, wrapped.init(start), start
    found = memory.lint(step_of(wrapped), *args, donate_argnums=(0, 1), target="cpu", min_bytes=1024)
    assert "copied-in-loop" not in [finding.rule for finding in found]


def test_eight_rows_that_are_longer_than_a_block_are_told_not_to_be_cut() -> None:
    start, wrapped = params(w=(8, 8192)), optimizer(optax.adam(1e-2), chunk_bytes=CHUNK)
    with pytest.warns(PlacementWarning, match=r"0/mu/w, 0/nu/w is (.|\n)*its shape cannot be cut"):
        jax.jit(wrapped.update).trace(start, wrapped.init(start), start)


@pytest.mark.parametrize("mode", ["streamed", "leaf", "whole"])
def test_state_of_another_structure_is_refused_in_every_mode(mode: str) -> None:
    tx = optax.GradientTransformation(
        lambda params: {"mu": params}, lambda grads, state, params=None: (grads, {**state, "nu": grads})
    )
    start, wrapped = params(w=(8, 128)), optimizer(tx, ".*", mode=mode)
    with pytest.raises(StructureError, match=r"the structure of the trees that it replaces(.|\n)*hint: return"):
        wrapped.update(start, wrapped.init(start))


def under_shards(update: Any, *, check_vma: bool) -> Any:
    """The update of arrays whose rows are divided, state and all, on each device's own rows."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(
        lambda *args: jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(specs := jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), args)),
            out_specs=specs[:2],
            check_vma=check_vma,
        )(*args)
    )


@pytest.mark.parametrize(
    ("under", "hint"),
    [
        (jax.vmap, r"jax\.vmap(.|\n)*hint: .*mode=\"leaf\""),
        (
            lambda update: jax.grad(lambda *args: jnp.sum(update(*args)[0]["w"])),
            r"differentiation(.|\n)*hint: .*\"whole\"",
        ),
        (lambda update: under_shards(update, check_vma=True), r"shard_map(.|\n)*hint: pass check_vma=False"),
    ],
)
def test_transformations_of_the_loops_are_refused(under: Any, hint: str) -> None:
    start, wrapped = params(w=(64, 128)), optimizer(optax.sgd(1e-2, momentum=0.9), ".*", chunk_bytes=8 * 1024)
    with pytest.raises(StructureError, match=hint):
        under(wrapped.update)(start, wrapped.init(start), start)


@pytest.mark.filterwarnings("error::lowtide.core.PlacementWarning")
def test_a_shard_is_streamed_like_any_array() -> None:
    tx, start = optax.adamw(1e-2), params(w=(64, 128))
    wrapped = optimizer(tx, chunk_bytes=8 * 1024)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grads, state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("data") if leaf.ndim else P())), (start, tx.init(start))
    )
    traced = under_shards(wrapped.update, check_vma=False).trace(grads, to_host(state, "0/{mu,nu}/**"), grads)
    assert "<host>[8,128]" in str(traced.jaxpr)
    got = traced.lower().compile()(grads, to_host(state, "0/{mu,nu}/**"), grads)
    want = jax.jit(lambda p: tx.update(p, tx.init(p), p))(start)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "tx",
    [
        optax.lamb(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
        optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    ],
    ids=["lamb", "adafactor", "MultiSteps"],
)
@pytest.mark.filterwarnings("ignore::lowtide.core.PlacementWarning")
def test_axes_that_are_part_of_the_type(tx: Any) -> None:
    """As `jax.make_mesh` makes them: an update repeats, selects and reduces, which is traced without shardings."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    plain = {
        "w": np.sin(np.arange(56 * 128, dtype=np.float32)).reshape(56, 128),
        "t": np.cos(np.arange(4 * 128, dtype=np.float32)).reshape(2, 2, 128),
    }
    specs = {"w": P("fsdp"), "t": P(None, None, "fsdp")}
    start = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), plain, specs)
    wrapped = optimizer(tx, ".*", chunk_bytes=CHUNK)
    state = jax.jit(wrapped.init, out_shardings=state_shardings(wrapped, start))(start)
    got = jax.jit(step_of(wrapped))(start, state, start)
    want = jax.jit(lambda p: step_of(tx)(p, tx.init(p), p))(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all(got[0][name].sharding.is_equivalent_to(start[name].sharding, start[name].ndim) for name in start)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(got[1])} == {"pinned_host"}
