"""Verification: what was placed passes, what was lost is named, and what a platform cannot tell is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from lowtide.core import ConfigError, PlacementError, PlacementWarning, SelectionError
from lowtide.memory import Program, compile, target
from lowtide.offload import checkpoint, scan, to_device, to_host, verify

SIZE = 1024 * 1024 * 4
EXPECTED: dict[str, Any] = {"0/*": "host", "1": "device"}
OUTPUTS: dict[str, Any] = {"*": "host"}


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def state() -> dict[str, Any]:
    return {"mu": shape(1024, 1024), "nu": shape(1024, 1024)}


def step(state: Any, grads: Any) -> Any:
    return to_host(jax.tree.map(lambda leaf: leaf * 0.9 + grads, to_device(state)))


def axlearn_step(state: Any, grads: Any) -> Any:
    """The same with AXLearn's guard: a tracer has no `sharding`, so nothing goes back to the host."""

    def move(leaf: Any) -> Any:
        if hasattr(leaf, "sharding"):
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
        return leaf

    return jax.tree.map(lambda leaf: move(leaf * 0.9 + grads), to_device(state))


def program(fn: Callable[..., Any] = step, goal: str = "v5e", *, place: bool = True, donate: bool = True) -> Program:
    placed = to_host(state()) if place else state()
    return compile(fn, placed, shape(1024, 1024), target=goal, donate_argnums=0 if donate else None)


@pytest.mark.tpu_aot
def test_a_placement_that_happened_passes_with_its_bytes(tpu_device: jax.Device) -> None:
    made = program()
    for compiled in (made, made.compiled):
        found = verify(compiled, EXPECTED, outputs=OUTPUTS, device_bytes="32 MiB")
        assert found.host_paths == ("0/mu", "0/nu")
        assert found.host_argument_bytes == found.host_output_bytes == found.host_alias_bytes == 2 * SIZE
        assert (found.platform, found.host_temp_bytes, found.num_moves, found.notes) == ("tpu", 0, 4, ())


@pytest.mark.tpu_aot
@pytest.mark.parametrize("bare", [False, True])
def test_axlearn_s_guard_is_caught(tpu_device: jax.Device, bare: bool) -> None:
    with pytest.warns(
        PlacementWarning, match=r"(?s)result\['mu'\], in device memory, overwrites a donated.*hint: also donate"
    ):
        made = program(axlearn_step)
    with pytest.raises(PlacementError, match="placements are wrong") as raised:
        verify(made.compiled if bare else made, EXPECTED, outputs=OUTPUTS)
    text = str(raised.value)
    assert "output mu: expected on the host, got on the device (4.00 MiB)" in text
    crossed = "parameter 0: donated to an output that is in another memory"
    assert (crossed if bare else "result['mu'], in device memory, overwrites a donated argument in pinned_host") in text
    assert "hint: place arguments with lt.offload.to_host" in text and "a tracer" in text


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_arguments_left_on_the_device_are_caught(tpu_device: jax.Device) -> None:
    with pytest.raises(PlacementError, match=re.escape("argument 0/mu: expected on the host, got on the device")):
        verify(program(axlearn_step, place=False), EXPECTED)
    with pytest.raises(PlacementError, match="argument 0/mu: expected on the device, got on the host"):
        verify(program(), {"0/*": "device"})


@pytest.mark.tpu_aot
def test_a_donation_that_no_output_takes_up_is_caught(tpu_device: jax.Device) -> None:
    def scaled_sum(factor: int, s: jax.Array) -> jax.Array:
        return jnp.sum(to_device(s)) * factor

    options: Any = {"target": "v5e", "static_argnums": 0, "donate_argnums": 1}
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        made = compile(scaled_sum, 2, to_host(shape(64, 128)), **options)
    with pytest.raises(PlacementError, match="1: donated, but no output reuses its buffer"):
        verify(made, {"1": "host"})


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_offloaded_activations_are_counted(tpu_device: jax.Device) -> None:
    def loss(xs: Any, x: Any, inputs: Any) -> Any:
        return jnp.sum(scan(lambda h, w: (jnp.tanh(h @ w), None), x, xs, inputs=inputs)[0])

    def made(inputs: str) -> Program:
        return compile(
            jax.grad(lambda xs, x: loss(xs, x, inputs)), to_host(shape(4, 512, 512)), shape(256, 512), target="v5e"
        )

    found = verify(made("host"), {"0": "host"}, outputs={"**": "host"}, host_temp_bytes=4 * 256 * 512 * 2)
    assert found.num_moves is not None and found.num_moves >= 4
    with pytest.raises(PlacementError, match="temporaries on the host: expected at least 1.00 MiB, got 0 B"):
        verify(made("device"), {"0": "host"}, host_temp_bytes="1 MiB")


@pytest.mark.tpu_aot
def test_device_bytes_have_a_limit(tpu_device: jax.Device) -> None:
    with pytest.raises(PlacementError, match="the device: expected at most 1.00 MiB"):
        verify(program(), EXPECTED, device_bytes=1 << 20)


@pytest.mark.tpu_aot
def test_static_arguments_keep_the_caller_s_numbering(tpu_device: jax.Device) -> None:
    made = compile(lambda n, s: to_device(s) * n, 2, to_host(shape(8, 128)), target="v5e", static_argnums=0)
    assert verify(made, {"1": "host"}).host_paths == ("1",)


@pytest.mark.parametrize("bare", [False, True])
def test_on_a_cpu_kinds_are_checked_and_the_rest_is_said(bare: bool) -> None:
    made = program(goal="cpu")
    found = verify(made.compiled if bare else made, EXPECTED, outputs=OUTPUTS, host_temp_bytes=1 << 30)
    assert found.host_paths == ("0/mu", "0/nu") and found.num_moves is None
    assert found.notes == ("a CPU has one memory: kinds were checked, bytes and copies were not",)
    with pytest.warns(PlacementWarning, match="overwrites a donated argument"):
        planted = program(axlearn_step, goal="cpu")
    with pytest.raises(PlacementError, match="output mu: expected on the host, got on the device"):
        verify(planted, EXPECTED, outputs=OUTPUTS)


@pytest.mark.tpu_aot
def test_what_is_not_donated_is_said_and_a_second_copy_has_a_limit(tpu_device: jax.Device) -> None:
    made = program(donate=False)
    for compiled in (made, made.compiled):
        with pytest.raises(PlacementError, match=r"(?s)0/nu: not donated, so the host holds it.* nu \(4.00 M"):
            verify(compiled, EXPECTED)
    notes = verify(made, EXPECTED, outputs=OUTPUTS, donated=False).notes
    assert notes == ("0/mu, 0/nu: on the host and not donated",)
    with pytest.raises(PlacementError, match="the host: expected at most 8.00 MiB, got 16.00 MiB"):
        verify(made, EXPECTED, host_bytes="8 MiB")
    assert verify(program(), EXPECTED, host_bytes="8 MiB").host_alias_bytes == 2 * SIZE


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_whole_step_that_donates_nothing_is_caught(tpu_device: jax.Device) -> None:
    def loss(params: Any) -> Any:
        return jnp.sum(scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.ones((8, 256)), params)[0])

    def update(params: Any) -> Any:
        grads = jax.grad(loss)(params)
        return to_host(to_device(params) - 0.1 * to_device(grads))

    made = compile(update, to_host(shape(4, 256, 256)), target="v5e")
    with pytest.raises(PlacementError, match="0: not donated, so the host holds it and the result"):
        verify(made, {"0": "host"})
    gradients = compile(jax.grad(loss), to_host(shape(4, 256, 256)), target="v5e")
    assert verify(gradients, {"0": "host"}).notes == ("0: on the host and not donated",)


@pytest.mark.tpu_aot
def test_shards_that_are_gathered_are_caught() -> None:
    mesh = jax.sharding.Mesh(np.array(target("v5e:2x2").devices()), ("fsdp",))
    leaf = jax.ShapeDtypeStruct((64, 128, 256), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))

    def forward(xs: Any) -> Any:  # along the sharded axis
        return scan(lambda h, w: (jnp.tanh(h @ w.T @ w), None), jnp.ones((8, 256)), xs)[0]

    made = compile(forward, to_host(leaf), target="v5e:2x2")
    for compiled in (made, made.compiled):
        with pytest.raises(PlacementError, match=r"0: its shards of \[16, 128, 256\] are gathered to \[64, "):
            verify(compiled, {"0": "host"})
    columns = to_host(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, jax.P(None, "fsdp")))
    )
    assert verify(compile(forward, columns, target="v5e:2x2"), {"0": "host"}).host_paths == ("0",)


@pytest.mark.parametrize("given", [jax.jit(step), 3])
def test_what_is_not_compiled_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"verify needs a compiled program, not a .*\nhint: .*compile"):
        verify(given, EXPECTED)
    with pytest.raises(ConfigError, match=r"expected must be a mapping of paths to memories, not .*\nhint:"):
        verify(program(goal="cpu"), ["0/**"])  # pyright: ignore


@pytest.mark.gpu_aot
def test_a_compile_only_gpu_is_checked_by_what_was_declared() -> None:
    made = program(goal="h100")
    found = verify(made, EXPECTED, outputs=OUTPUTS)
    assert found.host_paths == ("0/mu", "0/nu")
    assert found.notes == (
        "compile-only GPUs keep no memory kinds: arguments were checked as declared, outputs were not",
    )
    with pytest.raises(PlacementError, match="argument 0/mu: expected on the host, got on the device"):
        verify(program(axlearn_step, goal="h100", place=False), EXPECTED)
    with pytest.raises(
        PlacementError, match=r"does not show which arguments are on the host(.|\n)*hint: compile it with"
    ):
        verify(made.compiled, EXPECTED)


@pytest.mark.slow
@pytest.mark.gpu_aot
def test_slices_that_a_gpu_copies_in_a_fusion_are_counted_in_the_text_too() -> None:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(h @ w, "up")), None

    block = checkpoint(layer, offload=["up"], prevent_cse=False)
    grad = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(block, x, w)[0]))
    made = compile(grad, shape(6, 512, 512), shape(1024, 512), target="h100")
    assert verify(made.compiled, {}).num_moves == 2


def test_leaves_that_are_not_read_are_noted() -> None:
    compiled = jax.jit(lambda s, x: to_device(s["mu"]) + x).lower(to_host(state()), shape(1024, 1024)).compile()
    assert "0/nu: not read by the program" in verify(compiled, EXPECTED).notes


def test_later_globs_count() -> None:
    mixed = to_host(state(), "mu")
    compiled = jax.jit(lambda s: (to_device(s["mu"]), s["nu"])).lower(mixed).compile()
    assert verify(compiled, {"0/**": "host", "0/nu": "device"}).host_paths == ("0/mu",)


def test_patterns_that_match_nothing_are_refused() -> None:
    compiled = program(goal="cpu")
    with pytest.raises(SelectionError, match="pattern '2/mu' matches nothing(.|\n)*hint: "):
        verify(compiled, {"2/mu": "host"})
    with pytest.raises(ConfigError, match="0/mu: its memory must be .*, not 'hbm'\nhint: use \"host\" for every kind"):
        verify(compiled, {"0/mu": "hbm"})  # pyright: ignore[reportArgumentType]
