"""FLOPs of operations that are more than one for each element of their result, or none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lowtide.jaxprs import jaxpr_flops


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def flops_of(fn: Any, *args: Any) -> int:
    return jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


f8, scale = functools.partial(shape, dtype=jnp.float8_e4m3fn), functools.partial(shape, dtype=jnp.float8_e8m0fnu)


def test_products_of_scaled_blocks_are_products() -> None:
    def scaled(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
        return jax.lax.scaled_dot(a, b, lhs_scale=a_scale, rhs_scale=b_scale)

    assert flops_of(scaled, f8(64, 128), f8(128, 32), scale(64, 4), scale(4, 32)) == 2 * 64 * 128 * 32
    blocks = f8(3, 64, 128), f8(3, 32, 128), scale(3, 64, 4), scale(3, 32, 4)
    assert flops_of(jax.nn.scaled_matmul, *blocks) == 3 * 2 * 64 * 128 * 32


def test_attention_of_cudnn_counts_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda *_: True)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    query, key = shape(2, 128, 4, 64, dtype=jnp.bfloat16), shape(2, 256, 2, 64, dtype=jnp.bfloat16)
    product = 2 * 2 * 4 * 128 * 256 * 64
    assert flops_of(attend, query, key, key) == 2 * product
    both = flops_of(lambda *args: jax.vjp(attend, *args)[1](args[0]), query, key, key)
    assert both == pytest.approx((2 + 5) * product, rel=0.01)


def test_products_with_nothing_are_nothing() -> None:
    """No features that come out of a convolution, no experts: shapes divide by them."""
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    assert flops_of(conv, shape(2, 3, 8, 8), shape(0, 3, 3, 3)) == 0
    groups = jax.ShapeDtypeStruct((0,), jnp.int32)
    back = jax.value_and_grad(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).sum(), 1)
    product = 2 * 64 * 32 * 16
    assert flops_of(back, shape(64, 32), shape(0, 32, 16), groups) == pytest.approx(product, rel=0.1)


def test_what_only_moves_data_among_devices_counts_nothing() -> None:
    def part(x: Any, w: Any) -> Any:
        x = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return jax.lax.all_gather(x @ jax.lax.pcast(w, "data", to="varying"), "data")

    spec = PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    fn = jax.shard_map(part, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    assert flops_of(fn, shape(8, 512), shape(512, 512)) == 2 * 8 * 512 * 512


def test_what_nothing_reads_counts_nothing() -> None:
    def fn(x: Any, w: Any) -> Any:
        unread = jnp.tanh(x @ w) @ w
        del unread
        return x @ w

    assert flops_of(fn, shape(8, 16), shape(16, 16)) == 2 * 8 * 16 * 16


def test_a_branch_counts_as_the_most_expensive_one() -> None:
    def either(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    x = jnp.ones((8, 8))
    whole = jaxpr_flops(jax.make_jaxpr(either)(x).jaxpr)
    product = jaxpr_flops(jax.make_jaxpr(lambda x: x @ x)(x).jaxpr)
    assert product <= whole < product + 20
