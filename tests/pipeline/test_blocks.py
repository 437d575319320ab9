"""Blocks of kinds that strangers bring, and what is said of those that cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lowtide.core import LayerStack, StructureError
from lowtide.memory import target
from lowtide.pipeline import Pipeline, schedule, value_and_grad

from .test_executor import WIDTH, assert_close, mesh_of, normal, of_plain_jax, parameters


def stack_of(block: Any) -> LayerStack:
    return LayerStack(lambda outer, x: x, block, lambda outer, h, x: (jnp.mean(h**2), {}))


def pipeline_of(block: Any, num_others: int = 2, num_microbatches: int = 2) -> Pipeline:
    made = schedule("zb-h1", num_stages=2, num_microbatches=num_microbatches)
    return value_and_grad(stack_of(block), made, mesh=mesh_of(2, num_others))


@pytest.mark.slow
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

    layers, x = parameters(2)[1], normal(2, 8, WIDTH)
    del layers["scale"]
    assert_close(jax.jit(pipeline_of(block))({}, layers, x), of_plain_jax(stack_of(plain), {}, layers, x))


@pytest.mark.slow
def test_weights_in_eight_bits_have_gradients() -> None:
    def block(w: Any, h: Any, x: Any) -> Any:
        return jnp.tanh(h @ w.astype(jnp.float32))

    layers, x = parameters(2)[1]["up"][..., :WIDTH].astype(jnp.float8_e4m3fn), normal(2, 8, WIDTH)
    pipeline = pipeline_of(block, 1, num_microbatches=1)
    (_, (_, found)), (_, (_, wanted)) = jax.jit(pipeline)({}, layers, x), of_plain_jax(stack_of(block), {}, layers, x)
    assert found.dtype == wanted.dtype and np.array_equal(np.asarray(found), np.asarray(wanted))
    assert pipeline.report({}, layers, x).gradient_bytes == 4 * WIDTH**2


def test_a_callback_beside_other_axes_is_refused_with_its_remedy() -> None:
    def call(h: Any) -> Any:
        return jax.pure_callback(lambda h: np.asarray(h) * 2, jax.ShapeDtypeStruct(h.shape, h.dtype), h)

    def pipeline_with(call: Any, others: Any) -> Pipeline:
        return pipeline_of(lambda w, h, x: jnp.tanh(h @ w) + call(jax.lax.stop_gradient(h)), others)

    given = {}, parameters(2)[1]["up"][..., :WIDTH], jnp.ones((8, WIDTH))
    with pytest.raises(StructureError, match=r"(?s)blocks: jax.pure_callback.*hint: wrap.*jax.shard_map.*'fsdp'"):
        jax.jit(pipeline_with(call, 1))(*given)
    with pytest.raises(StructureError, match="blocks: jax.pure_callback at tests/pipeline/test_blocks.py:"):
        jax.jit(pipeline_with(call, 2).evaluate)(*given)  # without a backward pass
    in_branch = lambda h: jax.lax.cond(h[0, 0] > 0, call, lambda h: h, h)  # noqa: E731
    with pytest.raises(StructureError, match="blocks: jax.pure_callback"):
        jax.jit(pipeline_with(in_branch, 2))(*given)
    rows = PartitionSpec("fsdp")
    wrapped = jax.shard_map(call, in_specs=rows, out_specs=rows, axis_names={"fsdp"}, check_vma=False)
    jax.jit(pipeline_with(wrapped, 2)).lower(*given)


def multiply(x: Any, w: Any, interpret: bool) -> Any:
    def kernel(x: Any, w: Any, y: Any) -> None:
        y[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(x, w)


def kernel_of(interpret: bool, dividing: tuple[str, ...], is_column: bool = False) -> Any:
    """A product by kernels, forward and backward, whose rows, or columns, are divided along axes."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return multiply(x, w, interpret)

    product.defvjp(
        lambda x, w: (multiply(x, w, interpret), (x, w)),
        lambda kept, dy: (multiply(dy, kept[1].T, interpret), multiply(kept[0].T, dy, interpret)),
    )
    if not dividing:
        return product
    of = PartitionSpec
    specs = (of(), of(None, "fsdp"), of(None, "fsdp")) if is_column else (of("fsdp"), of(), of("fsdp"))
    return jax.shard_map(product, in_specs=specs[:2], out_specs=specs[2], axis_names=set(dividing), check_vma=False)


def of_kernels(product: Any, in_last: bool = False) -> LayerStack:
    return LayerStack(
        lambda outer, x: x,
        lambda w, h, x: h + jnp.tanh((jnp.matmul if in_last else product)(h, w)),
        lambda outer, h, x: (jnp.mean((product(h, outer) if in_last else h) ** 2), {}),
    )


@pytest.mark.parametrize(
    ("remat", "dividing", "is_column"),
    [
        (True, (), False),
        (True, ("fsdp",), False),
        (True, ("fsdp",), True),
        pytest.param(False, ("fsdp",), False, marks=pytest.mark.slow),
    ],
)
def test_kernels_beside_another_axis(remat: bool, dividing: Any, is_column: bool) -> None:
    layers, x = 0.3 * parameters(2)[1]["up"][..., :WIDTH], normal(2, 16, WIDTH)
    stack = of_kernels(kernel_of(True, dividing, is_column))
    pipeline = value_and_grad(
        stack, schedule("zb-h1", num_stages=2, num_microbatches=2), mesh=mesh_of(2, 2), remat=remat
    )
    plain = of_kernels(jnp.matmul)
    assert_close(jax.jit(pipeline)({}, layers, x), of_plain_jax(plain, {}, layers, x))


@pytest.mark.slow
@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("shape", "dividing", "in_last", "refused"),
    [
        ((2, 2, 1), ("fsdp", "tensor"), False, None),
        ((2, 2, 1), ("fsdp",), False, r"blocks: pallas_call at tests/pipeline/test_blocks.*over tensor"),
        ((2, 1, 1), (), False, r"blocks: pallas_call at tests.*hint: wrap.*axis_names=\{'fsdp', 'tensor'\}"),
        ((2, 2, 1), (), True, "last: pallas_call at tests"),
    ],
)
def test_kernels_of_a_tpu_are_divided_or_refused(shape: Any, dividing: Any, in_last: bool, refused: Any) -> None:
    devices = np.array(target("v5e:2x2").devices())[: np.prod(shape)].reshape(shape)
    mesh = Mesh(devices, ("stage", "fsdp", "tensor"))

    def given(*shape: int, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    layers, rest = given(2, 128, 128, spec=PartitionSpec("stage")), PartitionSpec()
    stack = of_kernels(kernel_of(False, dividing), in_last)
    pipeline = value_and_grad(stack, schedule("zb-h1", num_stages=2, num_microbatches=2), mesh=mesh)
    arguments = given(128, 128, spec=rest), layers, given(64, 128, spec=rest)
    for run in (jax.jit(pipeline), jax.jit(pipeline.evaluate)):
        if refused is None:
            assert "tpu_custom_call" in run.lower(*arguments).compile().as_text()
            continue
        with pytest.raises(StructureError, match=f"(?s){refused}"):
            run.lower(*arguments)


def deciding(common: bool, check: bool) -> Any:
    """A block that divides rows, and in whose parts a branch is taken by what is in them, or in all of them."""

    def part(h: Any, a: Any, b: Any) -> Any:
        flag = h.sum()
        flag = jax.lax.psum(flag, "fsdp") if common else flag
        return jax.lax.cond(flag > 0, lambda h: jnp.tanh(h @ a), lambda h: jnp.sin(h @ b) @ a, h)

    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    mapped = jax.shard_map(part, in_specs=(rows, whole, whole), out_specs=rows, axis_names={"fsdp"}, check_vma=check)
    return lambda w, h, x: h + mapped(h, w["a"], w["b"])


@pytest.mark.slow
def test_a_branch_is_taken_by_all_devices_of_a_collective_in_it() -> None:
    """With types, the gradient of a weight that is alike on all devices is added up inside of the branch."""
    up = 0.3 * parameters(2)[1]["up"]
    layers, x = {"a": up[..., :WIDTH], "b": up[..., WIDTH:]}, normal(2, 8, WIDTH)
    with pytest.raises(StructureError, match=r"(?s)blocks: cond at tests.*separately.*along fsdp.*hint: decide.*pcast"):
        jax.jit(pipeline_of(deciding(False, True))).lower({}, layers, x)
    jax.jit(pipeline_of(deciding(False, False))).lower({}, layers, x)  # added up outside
    found = jax.jit(pipeline_of(deciding(True, True)))({}, layers, x)
    untyped = jax.jit(pipeline_of(deciding(True, False)))({}, layers, x)
    assert_close(found, untyped)


@pytest.mark.parametrize("run", ["__call__", "evaluate"])
def test_a_collective_along_the_axis_of_the_pipeline_is_refused(run: str) -> None:
    pipeline = pipeline_of(lambda w, h, x: jnp.tanh(h @ w) + jax.lax.psum(h, "stage"), 1)
    layers = parameters(2)[1]["up"][..., :WIDTH]
    with pytest.raises(StructureError, match=r"(?s)blocks: psum.* along 'stage' at tests.*hint: pass values"):
        jax.jit(getattr(pipeline, run)).lower({}, layers, jnp.ones((8, WIDTH)))


@pytest.mark.slow
def test_a_gradient_of_a_pipeline_is_refused_by_name_and_none_is_not() -> None:
    layers, x = parameters(2)[1]["up"][..., :WIDTH], normal(2, 8, WIDTH)
    pipeline = pipeline_of(lambda w, h, x: jnp.tanh(h @ w), 1)
    refused = [
        lambda w: jax.jit(pipeline)({}, w, x)[0][0],
        jax.checkpoint(lambda w: pipeline.evaluate({}, w, x)[0]),
        lambda w: jnp.sum(pipeline({}, w, x)[1][1]),  # a second derivative
    ]
    for loss in refused:
        with pytest.raises(
            StructureError, match=r"(?s)cannot differentiate a pipeline.*hint: use \(loss.*stop_gradient"
        ):
            jax.eval_shape(jax.grad(loss), layers)

    def stopped(w: Any) -> Any:
        loss = jax.lax.stop_gradient(pipeline.evaluate({}, w, x)[0])
        return loss * jnp.sum(w), loss

    found, loss = jax.jit(jax.grad(stopped, has_aux=True))(layers)
    np.testing.assert_allclose(found, np.full(found.shape, loss), rtol=1e-6)
