"""Nested and unusual programs: passes, and owners of what a step computes besides activations and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lowtide.memory import MemoryReport, compile
from lowtide.memory._dataflow import Passes

DIM, ROWS = 128, 64


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def nameless(report: MemoryReport) -> float:
    """The share of the peak that is unattributed or a temporary."""
    roles = report.peak_by_role
    return (roles.get("unattributed", 0) + roles.get("temporaries", 0)) / report.device_bytes


@pytest.mark.parametrize(
    ("scope", "beside", "phase"),
    [
        # A gradient inside of a gradient is part of the outer forward pass.
        ("jvp(vmap(transpose(jvp())))", "transpose(jvp(vmap(transpose(jvp()))))", "forward"),
        ("jvp()/while/body/transpose(jvp())", "transpose(jvp())/while/body/transpose(jvp())", "forward"),
        ("jvp(transpose(jvp(transpose(jvp()))))", "transpose(jvp(transpose(jvp())))", "forward"),
        ("transpose(jvp(vmap(transpose(jvp()))))", "jvp(vmap(transpose(jvp())))", "backward"),
        ("transpose(jvp())/while/body/jvp()", "jvp()", "backward"),
        # Forward over reverse, alone and beside a gradient.
        ("jvp(transpose(jvp()))", "jvp(jvp())", "backward"),
        ("jvp(transpose(jvp()))", "transpose(jvp())", "backward"),
        ("jvp(jvp())", "jvp(transpose(jvp()))", "forward"),
        ("jvp(transpose(jvp()))/checkpoint/rematted_computation", "jvp()", "recompute"),
        # Reverse over forward.
        ("jvp(jvp())", "transpose(jvp(jvp()))", "forward"),
        ("transpose(jvp(jvp()))", "jvp(jvp())", "backward"),
        # Several operations that the compiler made one.
        ("(jit(f)/transpose(jvp())/mul:jit(f)/add)", "jvp()", "backward"),
        # What a compiler expands, without the primitive.
        ("(jit(f)/transpose(jvp(jit(fft))):jit(f)/add)", "jvp()", "backward"),
    ],
)
def test_the_outermost_pass_that_is_transposed_decides(scope: str, beside: str, phase: str) -> None:
    full = scope if scope.startswith("(") else f"jit(step)/{scope}/mul"
    assert Passes([full, f"jit(step)/{beside}/mul"]).phase(full) == phase


def mlp(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["one"]) @ params["two"]


PARAMS = {"one": shape(DIM, DIM), "two": shape(DIM, DIM)}


def inner_gradient(params: Any, x: Any, *, stop: bool) -> Any:
    """One inner step of gradient descent, and the loss after it."""
    grads = jax.grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
    grads = jax.lax.stop_gradient(grads) if stop else grads
    return jnp.mean(mlp(jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads), x) ** 2)


@pytest.mark.parametrize("stop", [False, True])
def test_the_inner_gradient_of_meta_learning_is_forward(stop: bool) -> None:
    step = jax.grad(lambda params, x: inner_gradient(params, x, stop=stop))
    report = compile(step, PARAMS, shape(ROWS, DIM)).report()
    inner = [b for b in report.buffers if b.scope.startswith("jvp(transpose(") and b.num_bytes > 4096]
    assert inner
    assert {b.phase for b in inner} == {"forward"}
    assert nameless(report) <= 0.25


def test_a_curvature_beside_a_gradient_is_backward() -> None:
    def step(params: Any, vector: Any, x: Any) -> Any:
        def gradient(params: Any) -> Any:
            return jax.grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)

        return gradient(params), jax.jvp(gradient, (params,), (vector,))[1]

    report = compile(step, PARAMS, PARAMS, shape(ROWS, DIM)).report()
    product = [b for b in report.buffers if b.scope.startswith("jvp(transpose(")]
    assert product
    assert {b.phase for b in product} == {"backward"}


def pool(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


@pytest.mark.slow
def test_what_pooling_needs_in_the_backward_pass_has_a_name_and_its_phase() -> None:
    def loss(weight: Any, x: Any) -> Any:
        for _ in range(2):
            x = pool(jax.nn.relu(x @ weight))
        return jnp.mean(x**2)

    report = compile(jax.grad(loss), shape(16, 16), shape(8, 32, 32, 16)).report({"params": 0, "batch": 1})
    assert report.peak_by_role.get("unattributed", 0) == 0
    assert nameless(report) <= 0.25
    made = [b for b in report.buffers if "select_and_scatter" in b.scope]
    assert {b.phase for b in made} == {"backward"}
    assert {b.role for b in made if b.dtype == "s32"} == {"workspaces"}


def per_example(params: Any, x: Any) -> Any:
    """Gradients clipped for each example, as for differential privacy."""
    grads = jax.vmap(jax.grad(lambda p, x: jnp.sum(mlp(p, x) ** 2)), (None, 0))(params, x)
    norms = jnp.sqrt(sum(jnp.sum(leaf**2, (1, 2)) for leaf in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda leaf: jnp.sum(leaf / jnp.maximum(norms, 1)[:, None, None], 0), grads)
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, clipped)


def stacked(params: Any, x: Any) -> Any:
    """The gradients of all microbatches at once, and then their mean."""
    chunks = x.reshape(8, -1, DIM)
    gradient = jax.grad(lambda p, x: jnp.mean(mlp(p, x) ** 2))
    _, grads = jax.lax.scan(lambda carry, x: (carry, gradient(params, x)), 0, chunks)
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad.mean(0), params, grads)


def weighted(params: Any, x: Any) -> Any:
    """The same as one product with the weight of each example."""
    grads = jax.vmap(jax.grad(lambda p, x: jnp.sum(mlp(p, x) ** 2)), (None, 0))(params, x)
    norms = jnp.sqrt(sum(jnp.sum(leaf**2, (1, 2)) for leaf in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda leaf: jnp.einsum("b...,b->...", leaf, 1 / jnp.maximum(norms, 1)), grads)
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, clipped)


@pytest.mark.parametrize("step", [per_example, stacked, weighted])
def test_gradients_of_many_examples_are_gradients_of_their_leaf(step: Any) -> None:
    report = compile(step, PARAMS, shape(ROWS, DIM), donate_argnums=0).report({"params": 0})
    many = [b for b in report.buffers if b.role == "gradients" and b.num_bytes >= 8 * DIM * DIM * 4]
    assert {b.path for b in many} == {"params/one", "params/two"}
    assert nameless(report) <= 0.25


def test_a_cotangent_that_is_also_summed_for_a_weight_stays_a_cotangent() -> None:
    def loss(params: Any, x: Any) -> Any:  # a table of positions, added to every example
        return jnp.mean(jnp.tanh(jnp.tanh(x @ params["one"]) + params["two"][None]) ** 2)

    step = jax.grad(loss)
    report = compile(step, {**PARAMS, "two": shape(ROWS, DIM)}, shape(32, ROWS, DIM)).report({"params": 0})
    large = [b for b in report.buffers if b.num_bytes >= 32 * ROWS * DIM * 4 and b.phase == "backward"]
    assert large
    assert {b.role for b in large} == {"cotangents"}


def test_recomputed_activations_have_a_role_of_their_own() -> None:
    def loss(w: Any, x: Any) -> Any:
        for layer in range(3):
            x = jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w) @ w.T))(x, w[layer])
        return jnp.sum(x)

    report = compile(jax.grad(loss), shape(3, DIM, DIM), shape(8 * ROWS, DIM)).report()
    assert {b.phase for b in report.buffers if b.role == "recomputed"} == {"recompute"}
    assert {b.phase for b in report.buffers if b.role == "cotangents"} == {"backward"}
