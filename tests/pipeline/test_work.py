"""FLOPs of the passes of a stage, and the operations that are said to stay whole."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from rich.console import Console

from lowtide.core import LayerStack
from lowtide.jaxprs import jaxpr_flops
from lowtide.jaxprs._versions import make_jaxpr
from lowtide.pipeline import PassFlops, schedule, value_and_grad
from lowtide.pipeline.split._split import trace_split

from .test_executor import mesh_of
from .test_split import CASES, ArrayPasses, normal

ROWS, WIDTH = 6, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH
W, X = normal(0, WIDTH, WIDTH), normal(1, ROWS, WIDTH)


def flops_of(stage: Any, weights: Any, x: Any = X, *extras: Any, wrt: Any = "**") -> PassFlops:
    return ArrayPasses(stage, weights, x, *extras, wrt=wrt).flops


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_those_of_the_traced_passes(name: str) -> None:
    case = CASES[name]
    split = ArrayPasses(case.stage, case.weights, case.x, *case.extras)

    def run(fn: Any, *args: Any) -> tuple[int, Any]:
        closed, shapes = make_jaxpr(fn)(*args)
        return jaxpr_flops(closed.jaxpr), shapes

    hoisted = jax.eval_shape(split.hoist, case.weights)
    forward, (y, left) = run(lambda *args: split.forward(*args, hoisted=hoisted), case.weights, case.x, *case.extras)
    back, (_, waiting) = run(lambda *args: split.input(*args, hoisted=hoisted), case.weights, left, y, *case.extras)
    weight, _ = run(
        lambda *args: split.weight(*args, hoisted=hoisted), case.weights, left.for_weight, waiting, *case.extras
    )
    assert split.flops.unsplit == ()
    for found, wanted in zip(
        (split.flops.forward, split.flops.input, split.flops.weight), (forward, back, weight), strict=True
    ):
        # What reads the batch alone is made in every pass that reads it.
        assert wanted * 0.9 - 200 <= found <= wanted


def conv(w: Any, x: Any) -> Any:
    images = x.reshape(2, 1, 3, WIDTH)
    return x + jnp.tanh(jax.lax.conv_general_dilated(images, w, (1, 1), "SAME")[:, :1].reshape(x.shape))


def lstm(w: Any, x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        h, c = state
        i, f, o, g = jnp.split(row @ w["in"] + h @ w["hidden"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return x + jax.lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), x)[1]


def carrying(w: Any, x: Any) -> Any:
    """Weights in the carry of a scan, which changes them."""
    return jax.lax.scan(lambda state, _: ((jnp.tanh(state[0] @ state[1]), 0.9 * state[1]), None), (x, w), length=3)[0][
        0
    ]


def moe(w: Any, x: Any) -> Any:
    chosen = jnp.argmax(x @ w["router"], -1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=2)
    out = jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x[order], w["up"], sizes)), w["down"], sizes)
    return x + jnp.zeros_like(x).at[order].set(out)


def lora(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["base"] + x @ w["a"] @ w["b"])


def barrier(w: Any, x: Any) -> Any:
    x, w = jax.lax.optimization_barrier((x, w))
    return jnp.tanh(x @ w)


def printing_outside(w: Any, x: Any) -> Any:
    """The branch prints forward alone."""

    def loud(h: Any) -> Any:
        jax.debug.callback(lambda _: None, h.sum())
        return jnp.tanh(h @ w)

    return jax.lax.cond(x.sum() > 0, loud, lambda h: jnp.sin(h @ w), x)


@jax.custom_vjp
def fused(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def both(kept: Any, dy: Any) -> Any:
    """A kernel that gives both gradients."""
    x, w = kept

    def kernel(x: Any, w: Any, dy: Any, dx: Any, dw: Any) -> None:
        inner = dy[...] * (1 - jnp.tanh(x[...] @ w[...]) ** 2)
        dx[...] = inner @ w[...].T
        dw[...] = x[...].T @ inner

    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype))
    return pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x, w, dy)


fused.defvjp(lambda x, w: (jnp.tanh(x @ w), (x, w)), both)


@jax.custom_vjp
def searched(x: Any, w: Any) -> Any:
    return x @ w


def search(kept: Any, dy: Any) -> Any:
    x, w = kept
    start = (jnp.int32(0), jnp.zeros_like(x), jnp.zeros_like(w))
    step = lambda state: (state[0] + 1, state[1] + dy @ w.T, state[2] + x.T @ dy)  # noqa: E731
    return jax.lax.while_loop(lambda state: state[0] < 1 + jnp.int32(dy[0, 0] > 9), step, start)[1:]


searched.defvjp(lambda x, w: (x @ w, (x, w)), search)


@jax.custom_vjp
def called(x: Any, w: Any) -> Any:
    return x @ w


called.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, dy: jax.pure_callback(
        lambda x, w, dy: (dy @ w.T, x.T @ dy), jax.tree.map(jax.typeof, kept), *kept, dy
    ),
)


@jax.custom_vjp
def loud(x: Any, w: Any) -> Any:
    return x @ w


def speak(kept: Any, dy: Any) -> Any:
    dw = kept[0].T @ dy
    jax.debug.callback(lambda _: None, dw.sum())
    return dy @ kept[1].T, dw


loud.defvjp(lambda x, w: (x @ w, (x, w)), speak)


def in_branch(inner: Any) -> Any:
    return lambda w, x: jax.lax.cond(x.sum() > 0, lambda x: inner(x, w), lambda x: jnp.sin(x @ w), x)


def mapped(inner: Any) -> Any:
    """In a `shard_map` of two devices, which divide the rows."""
    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    each = jax.shard_map(
        inner, mesh=mesh_of(1, 2), in_specs=(rows, whole), out_specs=rows, axis_names={"fsdp"}, check_vma=False
    )
    return lambda w, x: each(x, w)


LAYERS = normal(3, 4, WIDTH, WIDTH)
SPLIT = {
    "convolution": (conv, normal(0, 2, 1, 3, 3)),
    "lstm": (lstm, {"in": normal(0, WIDTH, 4 * WIDTH), "hidden": normal(1, WIDTH, 4 * WIDTH)}),
    "weights in a carry": (carrying, W),
    "moe": (moe, {"router": normal(0, WIDTH, 2), "up": normal(1, 2, WIDTH, WIDTH), "down": normal(2, 2, WIDTH, WIDTH)}),
    "barrier": (barrier, W),
    "effect in the forward pass": (printing_outside, W),
    "remat": (jax.checkpoint(printing_outside), W),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", SPLIT)
def test_blocks_whose_weights_wait_raise_no_alarm(name: str) -> None:
    stage, weights = SPLIT[name]
    found = flops_of(stage, weights)
    assert found.unsplit == ()
    assert 0.6 * found.input < found.weight < 1.3 * found.input or name == "remat"
    split, dy = ArrayPasses(stage, weights, X), jnp.cos(X)
    _, residuals = split.forward(weights, X)
    dx, waiting = split.input(weights, residuals, dy)
    wanted = jax.vjp(stage, weights, X)[1](dy)
    for one, other in zip(
        jax.tree.leaves((split.weight(weights, residuals.for_weight, waiting), dx)),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        assert jnp.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("wrt", ["a", "b", "bias"])
def test_a_weight_pass_that_is_empty_for_good_reasons_raises_none(wrt: str) -> None:
    """Adapters of rank one over a frozen base, and a bias."""
    weights = {"base": W, "a": W[:, :1], "b": W[:1], "bias": W[0]}
    found = flops_of(lambda w, x: lora(w, x) + w["bias"][None], weights, wrt=wrt)
    assert found.unsplit == () and found.weight == (0 if wrt == "bias" else PRODUCT // WIDTH)
    frozen = trace_split(lambda w, x: jnp.tanh(x @ w), None, W, X).flops
    assert frozen.unsplit == () and frozen.weight == 0


WHOLE = {
    "kernel": (lambda w, x: fused(x, w), "pallas_call", 0.9, "separate kernels"),
    "while": (lambda w, x: jnp.tanh(searched(x, w)), "while", 0.8, "lax.scan"),
    "callback": (lambda w, x: jnp.tanh(called(x, w)), "pure_callback", None, "separate kernels"),
    "effect of a gradient": (lambda w, x: jnp.tanh(loud(x, w)), "debug_callback", 0.4, "that the pipeline returns"),
    "branch with an effect": (in_branch(loud), "cond", 0.8, r"move its effect \(.*\) out of it"),
    "kernel in a branch": (in_branch(fused), "pallas_call", 0.7, "separate kernels"),
    "kernel on devices": (mapped(fused), "pallas_call", 0.7, "separate kernels"),
    "jit with shardings": (
        lambda w, x: jax.jit(
            lambda w, x: jnp.tanh(x @ w), in_shardings=(jax.NamedSharding(mesh_of(1, 1), PartitionSpec()),) * 2
        )(w, x),
        "jit", 0.9, "with_sharding_constraint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole_is_named_with_its_line_and_its_share(name: str) -> None:
    stage, primitive, share, hint = WHOLE[name]
    (one,) = flops_of(stage, W).unsplit
    assert one.name == primitive and re.search(hint, one.hint) and "test_work.py:" in one.where
    if share is None:
        assert one.share is None and one.flops is None
    else:
        assert one.share is not None and share <= one.share <= 1


def test_a_loop_counts_each_of_its_iterations() -> None:
    (one,) = flops_of(lambda w, x: jax.lax.scan(lambda h, w: (fused(h, w), None), x, w)[0], LAYERS).unsplit
    assert one.flops is not None and one.flops >= 4 * 3 * PRODUCT


@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_the_report_of_a_pipeline_says_it_where_the_schedule_would_gain(name: str) -> None:
    stack = LayerStack(
        lambda outer, x: x @ outer, lambda w, h, x: fused(h, w), lambda outer, h, x: (jnp.mean((h @ outer.T) ** 2), {})
    )
    pipeline = value_and_grad(stack, schedule(name, num_stages=2, num_microbatches=2), mesh=mesh_of(2, 1))
    report = pipeline.report(W, LAYERS, normal(1, 2 * ROWS, WIDTH))
    assert list(report.flops) == ["first", "blocks", "last"]
    assert report.flops["last"].input >= 3 * PRODUCT and report.flops["last"].weight == 0
    blocks = report.flops["blocks"]
    assert blocks.weight == 0 and blocks.ratio.startswith("1,") and blocks.ratio.endswith(",0")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert re.search(r"blocks of a stage +1\.63 k +\S+ k +0 +1,3", text)
    assert ("not split: pallas_call at tests" in text and "hint: use" in text) == (name == "zb-h1")
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["flops"]["blocks"]["unsplit"][0]["name"] == "pallas_call"
