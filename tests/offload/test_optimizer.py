"""Optimizer state on the host: in place, a few blocks on the device, on one chip and on a mesh; clear refusals."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowtide import memory
from lowtide.core import (
    ConfigError,
    PlacementError,
    PlacementWarning,
    SelectionError,
    StructureError,
    memory_space,
)
from lowtide.offload import _streaming, optimizer, state_shardings, to_host, verify
from lowtide.train import analyze_step

MIB = 2**20
CHUNK = 24 * 1024  # for Adam's moments of 56 x 128: two blocks and a tail
MOMENTS = r".*/(mu|nu)/.*"


def params(**shapes: tuple[int, ...]) -> Any:
    """On a device from the start: else the first step would put them there, and the second one be compiled again."""
    values = np.random.default_rng(0)
    made = {name: values.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return jax.device_put(made, jax.devices()[0])


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.memory_kind, tree)


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("mode", ["streamed", "leaf", "whole"])
def test_values_are_those_of_the_wrapped_optimizer_under_jit_and_eagerly(mode: str) -> None:
    tx, start = optax.adamw(1e-2), params(w=(56, 128), v=(16, 128))
    wrapped = optimizer(tx, mode=mode, chunk_bytes=CHUNK)
    want, got, state = start, start, wrapped.init(start)
    plain, step, reference = tx.init(start), jax.jit(step_of(wrapped)), jax.jit(step_of(tx))
    for at in range(3):
        grads = jax.tree.map(lambda p, at=at: np.sin(np.asarray(p) + at), start)
        eager = wrapped.update(grads, state, got)
        want, plain = reference(want, plain, grads)
        old, (got, state) = got, step(got, state, grads)
        for a, b in zip(jax.tree.leaves(eager[1]), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(np.asarray(old["w"]) + eager[0]["w"], got["w"], rtol=1e-6, atol=1e-7)
    for a, b in zip(jax.tree.leaves((got, state)), jax.tree.leaves((want, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_what_matches_is_on_the_host_and_nothing_else() -> None:
    wrapped = optimizer(optax.adamw(1e-2), MOMENTS)
    start = params(w=(8, 128))
    state = wrapped.init(start)
    assert kinds(state)[0] == optax.ScaleByAdamState(count="device", mu={"w": "pinned_host"}, nu={"w": "pinned_host"})
    updates, new = jax.jit(wrapped.update)(start, state, start)
    assert (kinds(updates), kinds(new)) == ({"w": "device"}, kinds(state))
    assert kinds(jax.jit(wrapped.init)(start)) == kinds(state)
    assert jax.tree.structure(jax.eval_shape(wrapped.init, start)) == jax.tree.structure(state)


def test_the_default_finds_the_moments_of_a_bare_array_and_of_a_bare_transformation() -> None:
    state = optimizer(optax.scale_by_adam()).init(jnp.ones((8, 128)))
    assert (state.mu.sharding.memory_kind, state.count.sharding.memory_kind) == ("pinned_host", "device")


@pytest.mark.slow
def test_a_second_step_compiles_nothing(compilations: Any) -> None:
    wrapped = optimizer(optax.adamw(1e-2), chunk_bytes=CHUNK)
    start = params(w=(56, 128))
    step, state = jax.jit(step_of(wrapped)), wrapped.init(start)
    got, state = step(start, state, start)
    wrapped.update(start, state, start)
    with compilations.none():
        got, state = step(got, state, start)
        jax.block_until_ready(wrapped.update(start, state, start))


@pytest.mark.slow
def test_extra_arguments_reach_the_wrapped_optimizer() -> None:
    tx = optax.chain(optax.scale_by_adam(), optax.polyak_sgd(1.0))
    start = params(w=(56, 128))
    want, _ = jax.jit(lambda p: tx.update(p, tx.init(p), p, value=jnp.float32(0.5)))(start)
    # The step size is computed from Adam's own update: of blocks, its sum is added in another order.
    for mode, tolerance in (("leaf", 2e-6), ("streamed", 1e-5)):
        wrapped = optimizer(tx, chunk_bytes=CHUNK, mode=mode)
        got, _ = jax.jit(wrapped.update)(start, wrapped.init(start), start, value=0.5)
        np.testing.assert_allclose(got["w"], want["w"], rtol=tolerance)


# --- what cannot be cut --------------------------------------------------------------------------------------------


FLIPPED = optax.chain(
    optax.scale_by_adam(), optax.stateless(lambda updates, _: jax.tree.map(lambda u: jnp.flip(u, 0), updates))
)
"""Each row of an update is another row's."""


def test_what_is_not_separable_warns_once_with_paths_and_operation() -> None:
    wrapped = optimizer(FLIPPED, chunk_bytes=CHUNK)
    start = params(w=(56, 128), v=(56, 128))
    state = wrapped.init(start)
    with pytest.warns(PlacementWarning) as caught:
        jax.jit(wrapped.update)(start, state, start)
        jax.jit(lambda *args: wrapped.update(*args))(start, state, start)
    (warning,) = caught
    assert str(warning.message) == (
        "optimizer state 0/mu/v, 0/nu/v is updated leaf by leaf instead of block by block, because of the operation "
        'rev\nhint: choose mode="leaf" to accept it, an optimizer that works element by element, or a narrower '
        "match"
    )


def test_one_block_or_the_mode_leaf_need_no_warning() -> None:
    start = params(w=(56, 128))
    for wrapped in (optimizer(FLIPPED), optimizer(FLIPPED, mode="leaf", chunk_bytes=CHUNK)):
        jax.jit(wrapped.update)(start, wrapped.init(start), start)


@pytest.mark.parametrize("shape", [(3001, 1111), (50257, 128), (3000001,)])
def test_shapes_that_cannot_be_sliced_on_the_host_say_so(shape: tuple[int, ...]) -> None:
    wrapped = optimizer(optax.adam(1e-2), chunk_bytes=MIB)
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")  # structs on a single device forget that they are on the host
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P()))
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        jax.eval_shape(wrapped.init, leaf),
        state_shardings(wrapped, leaf),
    )
    with pytest.warns(
        PlacementWarning, match=r"0/mu, 0/nu is (.|\n)*its shape cannot be cut into whole tiles(.|\n)*hint:"
    ):
        jax.jit(wrapped.update).trace(leaf, state, leaf)


# --- bytes ---------------------------------------------------------------------------------------------------------


def on_chip(tree: Any, device: Any, kind: str = "device") -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def compiled(tx: Any, shapes: dict[str, tuple[int, ...]], device: Any, **options: Any) -> Any:
    """XLA's figures for a whole step: gradients of a cheap loss, update, new parameters."""
    wrapped = optimizer(tx, **options)
    leaves = on_chip({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}, device)
    placed = state_shardings(wrapped, leaves)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        jax.eval_shape(wrapped.init, leaves),
        placed,
    )

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(p)))(params)
        return step_of(wrapped)(params, state, grads)

    program = memory.compile(step, leaves, state, target="v5e", donate_argnums=(0, 1))
    moments = {"1/**/{mu,nu}/**": "host"}
    verify(program, moments, outputs=moments)
    return program.compiled.memory_analysis()


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_step_of_adam_on_four_large_matrices(tpu_device: Any) -> None:
    stats = compiled(optax.adam(1e-3), {f"w{at}": (7168, 7168) for at in range(4)}, tpu_device)
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == 1568 * MIB
    assert stats.host_temp_size_in_bytes == 0
    total = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    assert total + stats.output_size_in_bytes - stats.alias_size_in_bytes <= 2700 * MIB
    assert stats.temp_size_in_bytes <= (4 * 64 + 196) * MIB  # four blocks, and the gradient in the making


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_temporaries_of_an_update_are_flat_in_the_number_of_leaves(tpu_device: Any) -> None:
    wrapped = optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), chunk_bytes=4 * MIB)
    temporaries = []
    for num_leaves in (4, 8):
        leaves = {f"w{at}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for at in range(num_leaves)}
        leaves = on_chip(leaves, tpu_device)
        state = jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
            jax.eval_shape(wrapped.init, leaves),
            state_shardings(wrapped, leaves),
        )
        report = memory.analyze(wrapped.update, leaves, state, leaves, target="v5e", donate_argnums=(0, 1))
        assert report.host.alias_bytes == report.host.argument_bytes == num_leaves * 32 * MIB
        assert report.host.temp_bytes == 0
        assert report.device.temp_bytes <= 4 * 4 * MIB
        temporaries.append(report.peak_by_role["temporaries"])
    # Alive at the peak; XLA's total has holes of 0.2 MiB more for each leaf, whatever its size.
    assert 0 < temporaries[1] <= 1.02 * temporaries[0]


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_leaf_by_leaf_holds_one_leaf_at_a_time_and_whole_holds_all(tpu_device: Any) -> None:
    shapes = {f"w{at}": (2048, 2048) for at in range(4)}
    leaf = compiled(optax.adam(1e-3), shapes, tpu_device, mode="leaf").temp_size_in_bytes
    whole = compiled(optax.adam(1e-3), shapes, tpu_device, mode="whole").temp_size_in_bytes
    assert leaf <= 5 * 16 * MIB < 4 * 32 * MIB <= whole


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_offloading_the_state_of_muon_saves_bytes() -> None:
    """Layers are updated one by one. As one group, all of the state would be on the device during the update."""
    matrices = optax.contrib.MuonDimensionNumbers(1, 2)
    tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: matrices, p))
    params = {"w": jax.ShapeDtypeStruct((12, 1024, 1024), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((), jnp.float32)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return batch["x"] * jnp.sum(jnp.cos(params["w"])), {}

    kept, offloaded = (
        analyze_step(params, loss_fn, transformation, "**", batch, target="v5e")
        for transformation in (tx, optimizer(tx, chunk_bytes=8 * MIB))
    )
    assert offloaded.host.argument_bytes == 48 * MIB
    assert offloaded.device_bytes < kept.device_bytes - 24 * MIB


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_norms_of_all_leaves_are_folded_before_the_blocks(tpu_device: Any) -> None:
    """MultiSteps clips what it has accumulated on the host: that bound all leaves together."""
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 2).gradient_transformation()
    shapes = {f"w{at}": (1024, 2048) for at in range(4)}
    streamed, whole = (
        compiled(tx, shapes, tpu_device, match=r".*/(mu|nu|acc_grads)/.*", chunk_bytes=2 * MIB, mode=mode)
        for mode in ("streamed", "whole")
    )
    assert streamed.host_temp_size_in_bytes == 0
    assert streamed.host_argument_size_in_bytes == streamed.host_alias_size_in_bytes == 4 * 3 * 8 * MIB
    assert 2 * streamed.temp_size_in_bytes < whole.temp_size_in_bytes


@pytest.mark.parametrize(("mu_dtype", "in_loops"), [(jnp.bfloat16, False), (jnp.float32, True)])
def test_narrow_state_of_one_block_is_moved_at_once(mu_dtype: Any, in_loops: bool) -> None:
    """Loops would hold more than all of it; of state as large as the gradients they hold one leaf."""
    start, wrapped = params(v=(512, 1024), w=(512, 1024)), optimizer(optax.lion(1e-3, mu_dtype=mu_dtype))
    traced = jax.jit(wrapped.update).trace(start, wrapped.init(start), start)
    assert ("while" in str(traced.jaxpr)) is in_loops


@pytest.mark.slow_after(1)
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "shape",
    [
        (3, 1000, 1024),
        (3001, 1111),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((50257, 128), (3 * 2**20,), (2, 3, 304, 1024))),
    ],
)
def test_shapes_that_a_tpu_stores_in_its_own_ways_compile(tpu_device: Any, shape: tuple[int, ...]) -> None:
    # libtpu aborts on host slices along two axes, and refuses slices along lanes or of broken tiles.
    options = {"mode": "leaf"} if shape in ((50257, 128), (3001, 1111)) else {}
    stats = compiled(optax.adam(1e-3), {"w": shape}, tpu_device, chunk_bytes=MIB, **options)
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes > 0
    assert stats.host_temp_size_in_bytes == 0


@pytest.mark.tpu_aot
def test_making_the_state_needs_one_leaf_on_the_device(tpu_device: Any) -> None:
    leaves = on_chip({f"w{at}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for at in range(8)}, tpu_device)
    stats = memory.compile(optimizer(optax.adam(1e-3)).init, leaves, target="v5e").compiled.memory_analysis()
    assert stats.host_output_size_in_bytes == 8 * 32 * MIB
    assert stats.temp_size_in_bytes <= 17 * MIB


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_a_device_without_host_memory_warns_and_updates_block_by_block() -> None:
    adam, leaves = optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
    state = to_host(jax.eval_shape(adam.init, leaves), "0/{mu,nu}/**")
    with pytest.warns(PlacementWarning, match=r"has no host memory(.|\n)*hint: use lowtide.memory.analyze"):
        report = memory.analyze(
            optimizer(adam, chunk_bytes=4 * MIB).update, leaves, state, target="h100", donate_argnums=(0, 1)
        )
    assert report.host_bytes == 32 * MIB
    assert report.device_bytes <= (16 + 4 * 4) * MIB  # gradients, which the updates overwrite, and blocks


# --- on a mesh -----------------------------------------------------------------------------------------------------


def fsdp(mesh: Any) -> dict[str, NamedSharding]:
    specs = {"rows": P("fsdp", None), "stack": P(None, "fsdp", None), "columns": P(None, None, "fsdp"), "norm": P()}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


AXLEARN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.ema(0.9))


@pytest.mark.slow
def test_shards_have_the_values_of_the_unsharded_update() -> None:
    shardings = fsdp(jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)))
    start = params(rows=(512, 128), stack=(3, 128, 128), columns=(2, 8, 1024), norm=(1024,))
    wrapped = optimizer(AXLEARN, MOMENTS, chunk_bytes=CHUNK, shardings=shardings)
    # By way of NumPy: on the CPU a replica may share the buffer that it was made of, and the step donates it.
    placed = jax.device_put(jax.tree.map(np.array, start), shardings)
    where = state_shardings(wrapped, placed)
    state = wrapped.init(placed)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == where
    step = jax.jit(step_of(wrapped), donate_argnums=(0, 1), out_shardings=(shardings, where))
    plain, want, reference = AXLEARN.init(start), start, jax.jit(step_of(AXLEARN))
    for at in range(2):
        grads = jax.tree.map(lambda p, at=at: np.cos(np.asarray(p) + at), start)
        want, plain = reference(want, plain, grads)
        placed, state = step(placed, state, jax.device_put(grads, shardings))
    for a, b in zip(jax.tree.leaves((placed, state)), jax.tree.leaves((want, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == where


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "tx",
    [optax.adan(1e-2), optax.sm3(1e-2), optax.rprop(1e-2), optax.apply_if_finite(optax.adam(1e-2), 3)]
    + [optax.MultiSteps(optax.adam(1e-2), 2), optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)],
    ids=["adan", "sm3", "rprop", "apply_if_finite", "MultiSteps", "adafactor"],
)
@pytest.mark.filterwarnings("ignore::lowtide.core.PlacementWarning")  # shards of 8 columns are no whole tiles
def test_shapes_inside_of_an_update_are_those_of_the_shard(tx: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_streaming, "_SMALL_PART", 4)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    start = params(rows=(64, 24), columns=(24, 64))
    shardings = {"rows": NamedSharding(mesh, P("fsdp", None)), "columns": NamedSharding(mesh, P(None, "fsdp"))}
    wrapped = optimizer(tx, ".*", chunk_bytes=1000, shardings=shardings)
    placed = jax.device_put(jax.tree.map(np.array, start), shardings)
    state, plain = wrapped.init(placed), tx.init(start)
    update, reference = jax.jit(wrapped.update), jax.jit(tx.update)
    for at in range(3):
        grads = jax.tree.map(lambda p, at=at: np.cos(np.asarray(p) + at), start)
        want, plain = reference(grads, plain, start)
        got, state = update(jax.device_put(grads, shardings), state, placed)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_on_eight_chips_only_shards_move() -> None:
    shardings = fsdp(jax.sharding.Mesh(np.array(memory.target("v5e:2x4").devices()), ("fsdp",)))
    shapes = {"rows": (8192, 4096), "stack": (4, 4096, 2048), "columns": (2, 1024, 8192), "norm": (1024,)}
    leaves = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=shardings[name]) for name in shapes}
    wrapped = optimizer(AXLEARN, MOMENTS, chunk_bytes=MIB, shardings=shardings)
    where = state_shardings(wrapped, leaves)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        jax.eval_shape(wrapped.init, leaves),
        where,
    )
    step = jax.jit(step_of(wrapped), donate_argnums=(0, 1), out_shardings=(shardings, where))
    made = memory.compile(step, leaves, state, leaves, target="v5e:2x4")
    hosted = {"1/**/{mu,nu}/**": "host"}
    verify(made, hosted, outputs=hosted)
    program = made.compiled
    stats, text = program.memory_analysis(), program.as_text()
    moments = 2 * (8192 * 4096 + 4 * 4096 * 2048 + 2 * 1024 * 8192) * 4 // 8 + 2 * 1024 * 4
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == moments
    assert stats.host_temp_size_in_bytes == 0
    assert stats.temp_size_in_bytes <= 4 * MIB
    assert "all-gather" not in text and text.count(" dynamic-slice-start(") >= 6


@pytest.mark.slow_after(1)
@pytest.mark.tpu_aot
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shardings_that_nobody_gave_gather_nothing(kind: str) -> None:
    """With `init` under `jax.jit` as documented, nobody sees an array that knows its sharding."""
    mesh = jax.sharding.Mesh(
        np.array(memory.target("v5e:2x4").devices()), ("fsdp",), axis_types=(getattr(jax.sharding.AxisType, kind),)
    )
    sharding = NamedSharding(mesh, P("fsdp", None))
    leaves = {name: jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=sharding) for name in ("v", "w")}
    wrapped = optimizer(optax.adam(1e-3), chunk_bytes=MIB)
    where = state_shardings(wrapped, leaves)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        jax.jit(wrapped.init, out_shardings=where).eval_shape(leaves),
        where,
    )
    step = jax.jit(step_of(wrapped), donate_argnums=(0, 1), out_shardings=({"v": sharding, "w": sharding}, where))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlacementWarning)
        made = memory.compile(step, leaves, state, leaves, target="v5e:2x4")
    said = [str(warning.message) for warning in caught if warning.category is PlacementWarning]
    assert len(said) == (kind == "Auto") and all("hint: pass shardings=" in text for text in said)
    found = verify(made, {"1/0/{mu,nu}/**": "host"}, host_bytes=4 * MIB)
    assert (found.host_argument_bytes, found.host_temp_bytes) == (4 * MIB, 0)
    assert "all-gather" not in made.compiled.as_text()


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_pattern_that_selects_nothing_lists_paths() -> None:
    with pytest.raises(SelectionError, match=r"selects no leaf(.|\n)*0/count, 0/mu/w, 0/nu/w(.|\n)*hint: use r\"\.\*"):
        optimizer(optax.adam(1e-3), "mu").init(params(w=(8, 128)))


@pytest.mark.parametrize("jit", [False, True])
def test_state_on_the_device_is_refused(jit: bool) -> None:
    tx, start = optax.adam(1e-3), params(w=(8, 128))
    wrapped = optimizer(tx)
    update = jax.jit(wrapped.update) if jit else wrapped.update
    with pytest.raises(PlacementError, match=r"0/mu/w is not in host memory(.|\n)*hint: .*lt\.offload\.to_host"):
        update(start, tx.init(start), start)
    shapes = jax.eval_shape(wrapped.init, start)
    if memory_space(shapes[0].mu["w"]) == jax.memory.Space.Host:  # JAX 0.12; earlier versions drop memory spaces
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
    with pytest.raises(PlacementError, match=r"hint: .*jax\.eval_shape.*lt\.offload\.to_host\(state, "):
        jax.eval_shape(update, start, shapes, start)
    jax.eval_shape(update, start, to_host(shapes, "**/{mu,nu}/**"), start)  # as the hint says


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "chunked"}, r"mode must be \"streamed\", \"leaf\" or \"whole\", not 'chunked'"),
        ({"chunk_bytes": 0}, r"chunk_bytes must be an integer of at least 1, not 0\nhint:"),
        ({"match": "*/mu"}, r"match='\*/mu' is not a regular expression: .*\nhint: write"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        optimizer(optax.adam(1e-3), **options)


def test_shardings_of_another_structure_are_refused() -> None:
    start = params(w=(8, 128))
    wrapped = optimizer(optax.adam(1e-3), shardings={"v": start["w"].sharding})
    with pytest.raises(StructureError, match=r"the structure of the parameters(.|\n)*hint: pass jax\.tree\.map"):
        wrapped.update(start, wrapped.init(start), start)


def test_state_shardings_need_shardings() -> None:
    with pytest.raises(PlacementError, match=r"parameter w, a ShapeDtypeStruct, has no sharding\nhint:"):
        state_shardings(optax.adam(1e-3), {"w": jax.ShapeDtypeStruct((8, 128), jnp.float32)})


@pytest.mark.parametrize("tx", [None, "adam"])
def test_what_is_no_transformation_is_refused(tx: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"must be an optax\.GradientTransformation, not .*\nhint: pass for instance optax.adamw"
    ):
        optimizer(tx)


def test_effects_that_streaming_leaves_out_are_said() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.print("{}", state["w"][0, 0])
        return updates, jax.tree.map(jnp.add, state, updates)

    tx = optimizer(
        optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update), ".*", chunk_bytes=CHUNK
    )
    start = params(w=(56, 128))
    with pytest.warns(
        PlacementWarning, match=r"(?s)effects, which a streamed update leaves out.*hint: call jax.debug.print"
    ):
        tx.update(start, tx.init(start), start)


def test_sharded_parameters_without_shardings_are_said() -> None:
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    start = jax.device_put(params(w=(16, 128)), NamedSharding(mesh, P("fsdp", None)))
    with pytest.warns(PlacementWarning, match=r"(?s)w is sharded, but the optimizer has no.*hint: .*shardings="):
        optimizer(optax.adam(1e-2)).init(start)


def test_an_optimizer_is_wrapped_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)already wrapped by lt.offload.optimizer.*hint: wrap it once"):
        optimizer(optimizer(optax.adam(1e-2)))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("around", [lambda tx: optax.MultiSteps(tx, 2), lambda tx: optax.apply_if_finite(tx, 3), None])
def test_what_calls_the_optimizer_in_a_branch_is_refused(around: Any, jit: bool) -> None:
    """A TPU compiles no branch with arrays on the host; others would copy the whole state."""
    wrapped, start = optimizer(optax.adam(1e-2)), params(w=(8, 128))
    tx: Any = wrapped if around is None else around(wrapped)

    def update(grads: Any, state: Any) -> Any:
        if around is not None:
            return tx.update(grads, state, start)
        return jax.lax.cond(True, lambda: tx.update(grads, state, start), lambda: (grads, state))

    with pytest.raises(StructureError, match=r"(?s)in a branch of jax.lax.cond.*hint: use lt.offload.optimizer\(optax"):
        (jax.jit(update) if jit else update)(start, tx.init(start))


@pytest.mark.slow
def test_updates_may_have_the_structure_of_the_parameters() -> None:
    tx = optax.lookahead(optax.adam(1e-2), 2, 0.5)
    wrapped = optimizer(tx, chunk_bytes=CHUNK)
    start = optax.LookaheadParams.init_synced(params(w=(56, 128)))
    grads, got, want = start.fast, start, start
    state, plain = wrapped.init(start), tx.init(start)
    update, reference = jax.jit(wrapped.update), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(grads, state, got)
        expected, plain = reference(grads, plain, want)
        got, want = optax.apply_updates(got, updates), optax.apply_updates(want, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)
    assert state.fast_state[0].mu["w"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("chunk_bytes", [0, 1.5, None])
def test_blocks_have_whole_bytes(chunk_bytes: Any) -> None:
    with pytest.raises(ConfigError, match=r"chunk_bytes must be an integer of at least 1, not .*\nhint:"):
        optimizer(optax.adam(1e-2), chunk_bytes=chunk_bytes)
    assert optimizer(optax.adam(1e-2), chunk_bytes="1 MiB")


@pytest.mark.parametrize("target", ["cpu", "v5e"])
def test_host_state_without_the_wrapper_is_named(target: str) -> None:
    adam, leaves = optax.adam(1e-2), {"w": jax.ShapeDtypeStruct((16, 128), jnp.float32)}
    state = to_host(jax.eval_shape(adam.init, leaves), "0/{mu,nu}/**")
    with pytest.raises(
        PlacementError,
        match=r"(?s)in host memory: 1/0/mu/w, 1/0/nu/w.*hint: .*wrap an optimizer .* with lt.offload.optim",
    ):
        memory.analyze(adam.update, leaves, state, target=target)
