"""Copies between host and device: values with a prefetch, the schedule for an H100, and its simulation."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import hidden_in_groups, memory_space
from lowtide.hlo import compile_lowered, lower_program
from lowtide.planning import Remat, planned
from lowtide.train import _compilation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from _schedule import summary  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def block(layer: Any, h: Any, batch: Any) -> Any:
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


STACK = lt.LayerStack(
    lambda outer, batch: batch["x"] * outer["scale"],
    block,
    lambda outer, h, batch: (jnp.mean(jnp.square(h.astype(jnp.float32))), {}),
)


@pytest.mark.parametrize(("num_layers", "size"), [(5, 1), (5, 2), (4, 4)])
def test_inputs_that_are_fetched_ahead_give_the_same_gradients(num_layers: int, size: int) -> None:
    rng = np.random.default_rng(0)
    layers = {
        name: jnp.asarray(rng.normal(size=(num_layers, *shape)), jnp.float32)
        for name, shape in {"up": (8, 16), "down": (16, 8)}.items()
    }
    outer, batch = {"scale": jnp.float32(1.1)}, {"x": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}
    spaces: list[Any] = []

    def fetch(leaves: Any) -> Any:
        spaces.extend(memory_space(leaf) for leaf in leaves)
        return lt.offload.to_device(leaves)

    def grads(moves: Any) -> Any:
        def loss(params: Any) -> Any:
            h = hidden_in_groups(STACK, *params, batch, size, *moves)
            return STACK.last(params[0], h, batch)[0]

        return jax.jit(jax.value_and_grad(loss))((outer, layers))

    actual, wanted = grads([(lt.offload.to_host, fetch)]), grads([])
    assert spaces and set(spaces) == {jax.memory.Space.Host}
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu_aot
def test_copies_of_layer_inputs_have_kernels_to_hide_under() -> None:
    """At least 95 % of the bytes, in each direction, are copied while kernels run, and nothing more is recomputed."""
    target, sizes = lt.target("h100"), (8, 4096, 16384)
    layers = {
        name: jax.ShapeDtypeStruct((sizes[0], *shape), jnp.bfloat16)
        for name, shape in {"up": sizes[1:], "down": sizes[:0:-1]}.items()
    }
    batch = {"x": jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)}

    # Between both passes, the first inputs are fetched while the loss is computed.
    stack = dataclasses.replace(STACK, last=lambda outer, h, batch: (jnp.mean(jnp.tanh(h @ batch["head"]) ** 2), {}))
    batch["head"] = jax.ShapeDtypeStruct((4096, 32768), jnp.bfloat16)

    def loss(layers: Any, batch: Any) -> Any:
        return stack.apply({"scale": jnp.bfloat16(1)}, layers, batch, remat=True)[0]

    def compiled(hidden: Remat) -> Any:
        program = lower_program(planned(jax.value_and_grad(loss), hidden), (layers, batch), {}, target, None)
        assert bool(program.options) == (hidden.layer_inputs == "host")
        return compile_lowered(program).compiled

    program = compiled(Remat(layer_inputs="host"))
    text, input_bytes = program.as_text(), 2 * 16384 * 4096
    row = summary(text, target)
    assert row["to host"]["bytes"] == sizes[0] * input_bytes
    assert row["from host"]["bytes"] == (sizes[0] + 1) * input_bytes  # the last iteration fetches one layer more
    for direction in ("to host", "from host"):
        assert row[direction]["hidden_share"] >= 0.95 and row[direction]["hidden_by_products"] >= 0.95
    assert ".remat" not in text
    # A second buffer for the layer that is fetched ahead
    temporary = compiled(Remat()).memory_analysis().temp_size_in_bytes - program.memory_analysis().temp_size_in_bytes
    assert temporary > (sizes[0] - 4) * input_bytes


def test_the_simulation_waits_for_copies_that_are_longer_than_kernels() -> None:
    text = """
HloModule m, is_scheduled=true

%body (p: (f32[8,1024], f32[1024,1024])) -> (f32[8,1024], f32[1024,1024]) {
  %p = (f32[8,1024]{1,0:S(5)}, f32[1024,1024]{1,0}) parameter(0)
  %host = f32[8,1024]{1,0:S(5)} get-tuple-element(%p), index=0
  %w = f32[1024,1024]{1,0} get-tuple-element(%p), index=1
  %slice-start = ((f32[8,1024]{1,0:S(5)}), f32[1,1024]{1,0}, u32[]) fusion-start(%host), kind=kCustom, calls=%slices
  %out = f32[1024,1024]{1,0} fusion(%w), kind=kCustom, calls=%product
  %slice-done = f32[1,1024]{1,0} fusion-done(%slice-start)
  ROOT %t = (f32[8,1024]{1,0:S(5)}, f32[1024,1024]{1,0}) tuple(%host, %out)
}

%product (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %dot = f32[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: (f32[8,1024], f32[1024,1024])) -> (f32[8,1024], f32[1024,1024]) {
  %x = (f32[8,1024]{1,0:S(5)}, f32[1024,1024]{1,0}) parameter(0)
  ROOT %loop = (f32[8,1024]{1,0:S(5)}, f32[1024,1024]{1,0}) while(%x), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""
    flops = 2 * 1024**3
    for link, share, seconds in ((4096, 1.0, 3.0), (2048, 0.0, 6.0)):
        target = types.SimpleNamespace(flops=flops, hbm_bandwidth=1e12, host_link_bandwidth=link)
        row = summary(text, target)
        assert row["from host"]["bytes"] == 3 * 4096 and row["from host"]["hidden_share"] == share
        assert row["seconds"] == pytest.approx(seconds) and row["kernel_seconds"] == pytest.approx(3.0)


def test_a_trainer_compiles_its_step_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []

    def options_of(lowered: Any, has_host_arguments: bool, target: Any) -> dict[str, Any]:
        programs.append(lowered.as_text())
        return {"xla_embed_ir_in_executable": "not a boolean"}  # an option that XLA refuses

    monkeypatch.setattr(_compilation, "options_of", options_of)
    loss_fn = lambda model, batch: jnp.mean((batch["x"] @ model["w"]) ** 2)  # noqa: E731
    trainer = lt.Trainer({"w": jnp.ones((4, 2))}, loss_fn, optax.sgd(0.1))
    with pytest.raises(Exception, match="xla_embed_ir_in_executable"):
        trainer.fit([{"x": jnp.ones((3, 4))}], num_steps=1)
    assert len(programs) == 1


def test_options_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    options = lt.offload.copy_options("h100")
    assert options["xla_gpu_enable_command_buffer"] == ""
    assert lt.offload.copy_options("v5e") == lt.offload.copy_options("cpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert set(options) - set(lt.offload.copy_options("h100")) == {"xla_gpu_enable_command_buffer"}
