"""Blocks of kinds that strangers bring, and what is said of those that cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lowtide.core import LayerStack, StructureError
from lowtide.pipeline import schedule, value_and_grad

from .test_executor import WIDTH, assert_close, mesh_of, of_plain_jax, parameters


def test_a_block_may_divide_its_products_over_another_axis_by_itself() -> None:
    of = PartitionSpec

    def block(w: Any, h: Any, x: Any) -> Any:
        inner = jax.shard_map(
            lambda h, up, down: jax.lax.psum(jnp.tanh(h @ up) @ down, "fsdp"),
            in_specs=(of(), of(None, "fsdp"), of("fsdp")),
            out_specs=of(),
            axis_names={"fsdp"},
        )
        return h + inner(h, w["up"], w["down"])

    def plain(w: Any, h: Any, x: Any) -> Any:
        return h + jnp.tanh(h @ w["up"]) @ w["down"]

    layers, x = parameters(2)[1], jax.random.normal(jax.random.key(2), (8, WIDTH))
    del layers["scale"]
    whole, divided = (
        LayerStack(lambda outer, x: x, one, lambda outer, h, x: (jnp.mean(h**2), {})) for one in (plain, block)
    )
    pipeline = value_and_grad(divided, schedule("zb-h1", num_stages=2, num_microbatches=2), mesh=mesh_of(2, 2))
    assert_close(jax.jit(pipeline)({}, layers, x), of_plain_jax(whole, {}, layers, x))


def test_weights_in_eight_bits_have_gradients() -> None:
    def block(w: Any, h: Any, x: Any) -> Any:
        return jnp.tanh(h @ w.astype(jnp.float32))

    stack = LayerStack(lambda outer, x: x, block, lambda outer, h, x: (jnp.mean(h**2), {}))
    layers = parameters(2)[1]["up"][..., :WIDTH].astype(jnp.float8_e4m3fn)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=1), mesh=mesh_of(2, 1))
    x = jax.random.normal(jax.random.key(2), (8, WIDTH))
    (_, (_, found)), (_, (_, wanted)) = jax.jit(pipeline)({}, layers, x), of_plain_jax(stack, {}, layers, x)
    assert found.dtype == wanted.dtype and jnp.array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))
    assert pipeline.report({}, layers, x).gradient_bytes == 4 * WIDTH**2


def test_a_callback_beside_other_axes_is_refused_with_its_remedy() -> None:
    def call(h: Any) -> Any:
        return jax.pure_callback(lambda h: np.asarray(h) * 2, jax.ShapeDtypeStruct(h.shape, h.dtype), h)

    def pipeline_with(call: Any, others: Any) -> Any:
        stack = LayerStack(
            lambda outer, x: x,
            lambda w, h, x: jnp.tanh(h @ w) + call(jax.lax.stop_gradient(h)),
            lambda outer, h, x: (jnp.mean(h**2), {}),
        )
        return value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=2), mesh=mesh_of(2, others))

    given = {}, parameters(2)[1]["up"][..., :WIDTH], jnp.ones((8, WIDTH))
    with pytest.raises(StructureError, match=r"(?s)blocks: jax.pure_callback.*hint: wrap.*jax.shard_map.*'fsdp'"):
        jax.jit(pipeline_with(call, 1))(*given)
    rows = PartitionSpec("fsdp")
    wrapped = jax.shard_map(call, in_specs=rows, out_specs=rows, axis_names={"fsdp"}, check_vma=False)
    jax.jit(pipeline_with(wrapped, 2)).lower(*given)


def test_a_gradient_of_a_pipeline_is_refused_by_name_and_none_is_not() -> None:
    stack = LayerStack(lambda outer, x: x, lambda w, h, x: jnp.tanh(h @ w), lambda outer, h, x: (jnp.mean(h**2), {}))
    layers, x = parameters(2)[1]["up"][..., :WIDTH], jax.random.normal(jax.random.key(2), (8, WIDTH))
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=2), mesh=mesh_of(2, 1))
    refused = [
        lambda w: jax.jit(pipeline)({}, w, x)[0][0],
        jax.checkpoint(lambda w: pipeline.evaluate({}, w, x)[0]),
        lambda w: jnp.sum(pipeline({}, w, x)[1][1]),  # a second derivative
    ]
    for loss in refused:
        with pytest.raises(StructureError, match=r"(?s)cannot differentiate a pipeline.*expected: \(loss.*hint: use"):
            jax.grad(loss)(layers)
    stopped = jax.grad(lambda w: jax.lax.stop_gradient(pipeline.evaluate({}, w, x)[0]) * jnp.sum(w))(layers)
    assert jnp.allclose(stopped, pipeline.evaluate({}, layers, x)[0])
