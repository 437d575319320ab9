from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import ConfigError, LayerStack, StructureError, num_layers

DIM = 8
STACK = LayerStack(
    first=lambda outer, batch: batch["x"] * outer["scale"],
    block=lambda layer, h, batch: jnp.tanh(h @ layer["w"] + layer["b"][None]),
    last=lambda outer, h, batch: (jnp.mean((h * outer["scale"] - batch["y"]) ** 2), {"h_max": jnp.max(h)}),
)


def parameters(layers: int = 3) -> tuple[dict, dict, dict]:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    stacked = {"w": draw(layers, DIM, DIM) / DIM**0.5, "b": draw(layers, DIM)}
    batch = {"x": draw(4, DIM), "y": draw(4, DIM)}
    return {"scale": jnp.float32(1.5)}, stacked, batch


def unrolled(outer: dict, layers: dict, batch: dict) -> tuple[jax.Array, dict]:
    h = STACK.first(outer, batch)
    for i in range(layers["w"].shape[0]):
        h = STACK.block(jax.tree.map(lambda leaf, i=i: leaf[i], layers), h, batch)
    return STACK.last(outer, h, batch)


REFERENCE = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("remat", [False, True, jax.checkpoint_policies.dots_saveable])
def test_the_stack_is_its_blocks_in_a_row(remat: object) -> None:
    args = parameters()

    def apply(*args: dict) -> tuple[jax.Array, dict]:
        return STACK.apply(*args, remat=remat)

    (loss, metrics), grads = jax.jit(jax.value_and_grad(apply, argnums=(0, 1), has_aux=True))(*args)
    (loss_ref, metrics_ref), grads_ref = REFERENCE(*args)
    for got, want in zip(
        jax.tree.leaves((loss, metrics, grads)), jax.tree.leaves((loss_ref, metrics_ref, grads_ref)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_hidden_is_what_enters_last() -> None:
    outer, layers, batch = parameters()
    h = STACK.hidden(outer, layers, batch)
    assert h.shape == (4, DIM)
    np.testing.assert_array_equal(STACK.last(outer, h, batch)[0], STACK.apply(outer, layers, batch)[0])


def temporaries(remat: bool, device: jax.Device | None = None) -> int:
    args = parameters(layers=16)
    outer, layers, batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((512, DIM), a.dtype), batch)
    wide = LayerStack(
        STACK.first,
        # Two activations eight times as wide inside the block: what remat has to save.
        lambda layer, h, batch: STACK.block(
            layer, jnp.mean(jnp.sin(jnp.exp(jnp.tile(h, (1, 8)))).reshape(-1, 8, DIM), 1), batch
        ),
        STACK.last,
    )
    step = jax.jit(jax.grad(lambda layers, outer, batch: wide.apply(outer, layers, batch, remat=remat)[0]))
    return step.trace(layers, outer, batch).lower().compile().memory_analysis().temp_size_in_bytes


def test_remat_keeps_one_activation_a_layer() -> None:
    activation = 512 * DIM * 4
    kept, recomputed = temporaries(remat=False), temporaries(remat=True)
    assert recomputed <= 16 * activation + 30 * activation
    assert kept > 16 * 8 * activation > recomputed


def test_stacked_layers_share_a_leading_axis() -> None:
    assert num_layers({"w": jnp.ones((3, 2)), "b": jax.ShapeDtypeStruct((3,), jnp.float32), "none": None}) == 3


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        ({}, "got: no leaf"),
        ({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, "b: 2, w: 3"),
        ({"w": jnp.ones((3, 2)), "scale": jnp.float32(1)}, "scale: no axis, w: 3"),
        ({"w": 1.0}, "w: no axis"),
        ({**{f"w{at}": jnp.ones((3, 2)) for at in range(6)}, "zact": print}, "zact: not an array but a builtin"),
        ({**{f"w{at}": jnp.ones((3, 2)) for at in range(6)}, "z": jnp.ones((2, 2))}, "got: z: 2, w0: 3"),
    ],
)
def test_layers_that_do_not_stack_are_named(layers: dict, got: str) -> None:
    with pytest.raises(StructureError, match="leading axes of one length") as error:
        num_layers(layers)
    assert got in str(error.value)
    assert "hint: stack the layers with" in str(error.value)


def test_a_stack_that_does_not_stack_is_refused_before_it_runs() -> None:
    outer, layers, batch = parameters()
    with pytest.raises(StructureError, match="leading axes of one length"):
        STACK.apply(outer, {**layers, "b": layers["b"][:2]}, batch)


def test_the_shapes_of_a_stack_are_what_its_functions_return() -> None:
    outer, layers, batch = parameters()
    shapes = STACK.shapes(outer, jax.tree.map(lambda leaf: leaf[0], layers), batch)
    assert shapes.h.shape == (4, DIM) and shapes.h.dtype == jnp.float32
    assert shapes.metrics["h_max"].shape == ()


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        (
            {"block": lambda layer, h, batch: {"h": h}},
            r"returns a tree whose structure differs.*expected: float32\[4, 8\].*got: {'h': float",
        ),
        (
            {"block": lambda layer, h, batch: (h @ layer["w"])[:, :4]},
            r"activations: a block returns a shape or dtype.*float32\[4, 8\].*got: float32\[4, 4\].*hint: .*block",
        ),
        (
            {"block": lambda layer, h, batch: (h @ layer["w"]).astype(jnp.bfloat16)},
            r"activations: .* or dtype.*float32\[4, 8\].*got: bfloat16.*hint: .*cast",
        ),
        (
            {"last": lambda outer, h, batch: jnp.mean(h)},
            r"does not return a loss.*\(loss, metrics\).*got: float32\[\]",
        ),
        ({"last": lambda outer, h, batch: (h, {})}, r"does not return a loss.*got: \(float32\[4, 8\], {}\)"),
        ({"last": lambda outer, h, batch: (jnp.int32(1), {})}, r"does not return a loss.*floating-point.*int32"),
        ({"last": lambda outer, h, batch: (jnp.sum(h) + 1j, {})}, r"does not return a loss.*floating-point.*complex64"),
        ({"last": lambda outer, h, batch: (None, {})}, r"does not return a loss.*floating-point.*None"),
    ],
)
def test_functions_that_do_not_fit_each_other_are_named(functions: dict, text: str) -> None:
    outer, layers, batch = parameters()
    layer = jax.tree.map(lambda leaf: leaf[0], layers)
    stack = dataclasses.replace(STACK, **functions)
    with pytest.raises(StructureError, match=f"(?s){text}"):
        stack.shapes(outer, layer, batch)
    if "block" in functions:  # also where the stack runs
        for options in ({}, {"remat": True}, {"remat": True, "layers_per_remat": 2}):
            with pytest.raises(StructureError, match=f"(?s){text}"):
                stack.apply(outer, layers, batch, **options)


@pytest.mark.parametrize("remat", ["yes", None, 1, 0])
def test_a_remat_that_is_none_is_refused(remat: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)remat must be .*True, False or a policy.*hint: "):
        STACK.apply(*parameters(), remat=remat)


def test_an_error_of_a_block_itself_stays_what_it_is() -> None:
    outer, layers, batch = parameters()
    words = {**batch, "activation": "gelu", "width": 4}  # which the functions may read
    stack = dataclasses.replace(STACK, block=lambda layer, h, batch: jnp.dot(h, batch["activation"]))
    with pytest.raises(TypeError, match="str") as error:
        stack.apply(outer, layers, words)
    assert "body" in {entry.name for entry in error.traceback}  # of the block in the scan, not of a second trace
    stack = dataclasses.replace(STACK, block=lambda layer, h, batch: jnp.zeros((batch["width"], DIM + 1)))
    with pytest.raises(StructureError, match=r"a block returns a shape(.|\n)*float32\[4, 9\]"):
        stack.apply(outer, layers, words)


def test_layers_in_host_memory_are_read_one_by_one_and_not_differentiated() -> None:
    from lowtide.offload import to_host

    rng = np.random.default_rng(0)
    outer, layers = {"w": jnp.float32(0.5)}, {"w": jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)}
    stack = LayerStack(
        first=lambda outer, batch: outer["w"] * batch,
        block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.sum(h * outer["w"]), {}),
    )
    batch, apply = jnp.ones((2, 4)), jax.jit(stack.apply)
    hosted = to_host(layers)
    assert apply(to_host(outer), hosted, batch)[0] == apply(outer, layers, batch)[0]
    # What is on the device may be differentiated.
    grads = [jax.jit(jax.grad(lambda o, layers: stack.apply(o, layers, batch)[0]))(outer, x) for x in (layers, hosted)]
    np.testing.assert_allclose(grads[1]["w"], grads[0]["w"], rtol=1e-6)
    with pytest.raises(StructureError, match="in host memory is differentiated(.|\n)*hint: use lt.offload.scan"):
        jax.grad(lambda layers: stack.apply(outer, layers, batch)[0])(hosted)
