"""Placement: the memory kind or space changes, values and sharding do not, and a compiled program says the same."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lowtide.core import ConfigError, PlacementWarning, SelectionError, leaves_with_paths, memory_space
from lowtide.memory import analyze, compile, target
from lowtide.offload import memory_kinds, to_device, to_host, verify
from lowtide.offload._host_memory import fetch

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def tree() -> dict[str, Any]:
    return {
        "layers": {"w": jnp.arange(6.0).reshape(2, 3), "b": np.ones((2,), np.float32)},
        "head": jnp.ones(3),
        "act": jnp.tanh,
        "name": "model",
    }


def spaces(tree: Any) -> dict[str, Any]:
    return {path: memory_space(leaf) for path, leaf in leaves_with_paths(tree) if hasattr(leaf, "dtype")}


def test_arrays_move_and_keep_their_values() -> None:
    moved = to_host(tree(), "layers/**")
    assert spaces(moved) == {"layers/w": HOST, "layers/b": HOST, "head": DEVICE}
    np.testing.assert_array_equal(moved["layers"]["w"], tree()["layers"]["w"])
    back = to_device(moved, "layers/w")
    assert spaces(back) == {"layers/w": DEVICE, "layers/b": HOST, "head": DEVICE}
    np.testing.assert_array_equal(back["layers"]["w"], tree()["layers"]["w"])


def test_what_is_no_array_stays_the_same_object() -> None:
    model = {**tree(), "step": 3}
    moved = to_host(model, lambda path, leaf: True)
    assert moved["act"] is model["act"] and moved["name"] is model["name"] and moved["step"] == 3


def test_an_array_keeps_its_sharding() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    w = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, PartitionSpec("data")))
    moved = to_host(w)
    assert moved.sharding == w.sharding.with_memory_kind("pinned_host")
    assert to_device(moved).sharding == w.sharding


def test_keys_move() -> None:
    key = jax.random.key(3)
    np.testing.assert_array_equal(jax.random.key_data(to_device(to_host(key))), jax.random.key_data(key))


def test_tracers_move_inside_a_jitted_function() -> None:
    seen: list[Any] = []

    @jax.jit
    def double(w: jax.Array) -> jax.Array:
        on_device = to_device(w)
        seen.extend([memory_space(w), memory_space(on_device), memory_space(to_host(on_device))])
        return to_host(on_device * 2)

    out = double(to_host(jnp.ones(3)))
    assert seen == [HOST, DEVICE, HOST]
    assert out.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(out, np.full(3, 2.0))


def test_an_array_without_rows_is_fetched() -> None:
    fetched = jax.jit(fetch)(to_host({"empty": jnp.ones((0, 128)), "w": jnp.ones((16, 128))}), jnp.ones(3))
    assert fetched["empty"].shape == (0, 128) and float(fetched["w"].sum()) == 16 * 128


def test_a_second_call_compiles_nothing(compilations: Any) -> None:
    step = jax.jit(lambda tree: to_host(jax.tree.map(lambda leaf: leaf * 2, to_device(tree))))
    state = to_host({"w": jnp.ones((2, 3))})
    state = step(state)
    with compilations.none():
        jax.block_until_ready(to_host(to_device(step(state))))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_shape_in_host_memory_is_traced_as_such(sharded: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data")) if sharded else None
    shape = to_host(jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding))
    assert memory_space(shape) == HOST
    assert shape.sharding.spec == PartitionSpec(*["data"] * sharded)
    seen: list[Any] = []
    jax.eval_shape(lambda w: seen.append(memory_space(w)), shape)
    assert seen == [HOST]
    assert memory_space(to_device(shape)) == DEVICE


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_placed_argument_takes_no_device_bytes(tpu_device: jax.Device) -> None:
    state = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32), "x": jax.ShapeDtypeStruct((8, 1024), jnp.float32)}
    step = lambda s: {**s, "w": to_host(to_device(s["w"]) * 2)}  # noqa: E731
    on_device = analyze(lambda s: {**s, "w": s["w"] * 2}, state, target="v5e", donate_argnums=0)
    verify(compile(step, to_host(state, "w"), target="v5e", donate_argnums=0), {"0/w": "host"}, outputs={"w": "host"})
    on_host = analyze(step, to_host(state, "w"), target="v5e", donate_argnums=0)
    assert on_device.device.argument_bytes - on_host.device.argument_bytes == on_host.host.argument_bytes == 4 << 20
    assert on_host.host_bytes == on_host.host.alias_bytes == 4 << 20


# --- shardings by regular expression -------------------------------------------------------------------------------


def adam_state() -> dict[str, Any]:
    return {"0": {"mu": {"w": jnp.ones((4, 2))}, "nu": {"w": jnp.ones((4, 2))}, "count": jnp.zeros((), jnp.int32)}}


def kinds_of(tree: Any) -> dict[str, str]:
    return {path: sharding.memory_kind for path, sharding in leaves_with_paths(tree)}


def test_memory_kinds_follow_the_paths() -> None:
    kinds = memory_kinds(adam_state(), r".*/(mu|nu)/.*")
    assert kinds_of(kinds) == {"0/count": "device", "0/mu/w": "pinned_host", "0/nu/w": "pinned_host"}
    assert kinds_of(memory_kinds(kinds, ".*/mu/.*", "unpinned_host")) == {
        "0/count": "device",
        "0/mu/w": "unpinned_host",
        "0/nu/w": "device",
    }


def test_memory_kinds_serve_jit() -> None:
    state = adam_state()
    kinds = memory_kinds(state, r".*/(mu|nu)/.*")
    placed = jax.device_put(state, kinds)
    step = jax.jit(
        lambda s: to_host(jax.tree.map(lambda leaf: leaf * 2, to_device(s)), "0/{mu,nu}/**"),
        in_shardings=(kinds,),
        out_shardings=kinds,
    )
    out = step(placed)
    assert kinds_of(jax.tree.map(lambda leaf: leaf.sharding, out)) == kinds_of(kinds)
    np.testing.assert_array_equal(out["0"]["mu"]["w"], np.full((4, 2), 2.0))


def test_memory_kinds_of_shapes_and_specs() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = {"mu": PartitionSpec("data"), "count": PartitionSpec()}
    kinds = memory_kinds(specs, "mu", mesh=mesh)
    assert kinds == {
        "mu": NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host"),
        "count": NamedSharding(mesh, PartitionSpec(), memory_kind="device"),
    }
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert memory_kinds({"a": shape}, "a")["a"] == SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    assert memory_kinds({"a": shape}, "a", mesh=mesh)["a"].spec == PartitionSpec()


def test_memory_kinds_matches_whole_paths() -> None:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    kinds = memory_kinds({"mu": {"w": shape}, "mud": shape}, "mu/.*")
    assert (kinds["mu"]["w"].memory_kind, kinds["mud"].memory_kind) == ("pinned_host", "device")


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "kind", "error", "text", "hint"),
    [
        (".*/momentum/.*", "pinned_host", SelectionError, "'.*/momentum/.*' matches none of 3", "segments by '/'"),
        ("mu", "pinned_host", SelectionError, "3 whole paths: 0/count, 0/mu/w, 0/nu/w", "did you mean '.*(mu).*'?"),
        ("(mu", "pinned_host", SelectionError, "'(mu' is not a regular expression", "paths look like: 0/count"),
        (".*", "host", ConfigError, "or \"unpinned_host\", not 'host'", 'use "pinned_host", the host memory'),
    ],
)
def test_bad_matches_and_kinds_are_refused(match: str, kind: str, error: Any, text: str, hint: str) -> None:
    with pytest.raises(error, match=re.escape(text)) as raised:
        memory_kinds(adam_state(), match, kind)
    assert hint in str(raised.value).split("hint: ")[1]


def test_specs_need_a_mesh() -> None:
    with pytest.raises(ConfigError, match=r"hint: pass memory_kinds\(\.\.\., mesh=mesh\)"):
        memory_kinds({"mu": PartitionSpec("data")}, "mu")


@pytest.mark.parametrize("move", [to_host, to_device])
def test_a_selection_of_nothing_is_refused(move: Any) -> None:
    with pytest.raises(SelectionError, match="hint: near misses: layers"):
        move(tree(), "layer/**")


def test_devices_without_host_memory_warn() -> None:
    pytest.importorskip("jax_cuda13_plugin")
    device = target("h100").devices()[0]
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=SingleDeviceSharding(device))
    with pytest.warns(PlacementWarning, match=r"have no memory 'pinned_host'(.|\n)*hint: "):
        to_host({"w": shape})
