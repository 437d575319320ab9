"""Bytes and recompute costs of named values, against hand counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from lowtide.offload import Name, Names, names, tag

F32 = jnp.float32
X = jax.ShapeDtypeStruct((4, 8), F32)
W = jax.ShapeDtypeStruct((3, 8, 8), F32)
PRODUCT = 2 * 4 * 8 * 8


def block(h: Any, w: Any) -> Any:
    up = checkpoint_name(h @ w, "up")
    return checkpoint_name(jnp.tanh(up) @ w, "down")


def costs(rows: Names) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.count, row.bytes, row.flops) for row in rows}


def test_costs_end_at_arguments_and_at_other_names() -> None:
    rows = names(lambda h, w: jnp.sin(block(jnp.cos(h), w[0])), X, W)
    assert costs(rows) == {"up": (1, 128, 32 + PRODUCT), "down": (1, 128, 32 + PRODUCT)}
    assert (rows["up"].shape, rows["up"].dtype, rows["up"].hidden) == ((4, 8), "float32", "")


def test_a_scan_multiplies() -> None:
    rows = names(lambda h, w: jax.lax.scan(lambda h, w: (block(h, w), None), h, w)[0], X, W)
    assert costs(rows) == {"up": (3, 384, 3 * PRODUCT), "down": (3, 384, 3 * (32 + PRODUCT))}


def test_scans_in_scans_multiply() -> None:
    def twice(h: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (block(h, w), None), h, None, length=5)[0]

    rows = names(lambda h, w: jax.lax.scan(lambda h, w: (twice(h, w), None), h, w)[0], X, W)
    assert rows["up"].count == 15
    with pytest.raises(KeyError, match="unknown"):
        rows["unknown"]


def test_a_loop_on_the_way_counts_whole() -> None:
    def fn(h: Any, w: Any) -> Any:
        return checkpoint_name(jax.lax.scan(lambda h, w: (h @ w, None), h, w)[0], "end")

    assert names(fn, X, W)["end"].flops == 3 * PRODUCT


def with_a_rule(fn: Any) -> Any:
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, with_a_rule])
def test_calls_are_looked_through(wrap: Any) -> None:
    inner = wrap(lambda h, w: jnp.tanh(h @ w))
    rows = names(lambda h, w: checkpoint_name(inner(jnp.sin(h), w[0]), "y"), X, W)
    assert rows["y"].flops == 32 + PRODUCT + 32


def test_what_two_values_share_counts_for_each_and_once_for_one() -> None:
    def fn(h: Any) -> Any:
        y = jnp.sin(h)
        return checkpoint_name(y + y, "a") * checkpoint_name(y * 2, "b")

    assert costs(names(fn, X)) == {"a": (1, 128, 64), "b": (1, 128, 64)}


def test_the_same_name_twice_adds_up_and_another_shape_is_another_row() -> None:
    def fn(h: Any) -> Any:
        return checkpoint_name(h * 2, "a"), checkpoint_name(h * 3, "a"), checkpoint_name(h[0] * 3, "a")

    assert [(row.count, row.shape, row.bytes) for row in names(fn, X)] == [(2, (4, 8), 256), (1, (8,), 32)]


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda x: jax.lax.conv(x, jnp.ones((3, 2, 3, 3)), (1, 1), "SAME"), 2 * (3 * 5 * 5) * (2 * 3 * 3)),
        (lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), 50),
        (lambda x: jax.lax.cond(x[0, 0, 0, 0] > 0, jnp.sin, lambda x: jnp.sin(jnp.cos(x)), x), 1 + 100),
        (lambda x: x.reshape(50).astype(jnp.bfloat16), 0),
        (lambda x: jnp.einsum("abij,abkj->abik", x, x), 2 * 2 * 5 * 5 * 5),
    ],
    ids=["convolution", "reduction", "dearest branch", "moves", "batched product"],
)
def test_flops(fn: Any, flops: int) -> None:
    x = jax.ShapeDtypeStruct((1, 2, 5, 5), F32)
    assert names(lambda x: checkpoint_name(fn(x), "y"), x)["y"].flops == flops


def test_bytes_of_small_dtypes_and_keys() -> None:
    def fn(h: Any) -> Any:
        key = checkpoint_name(jax.random.key(0), "key")
        return checkpoint_name(h.astype(jnp.bfloat16), "half"), checkpoint_name(h > 0, "mask"), key

    assert {row.name: row.bytes for row in names(fn, X)} == {"key": 8, "half": 64, "mask": 32}


def test_names_that_a_policy_does_not_see_say_so() -> None:
    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return checkpoint_name(jnp.sin(x), "inner")

    fn.defvjp(lambda x: (fn(x), x), lambda x, ct: (ct * jnp.cos(x),))
    rows = names(lambda x: fn(x), X)
    assert rows["inner"].hidden == "inside a function with a custom_vjp"
    assert "custom_vjp" in str(rows)


def test_no_names_and_the_table() -> None:
    assert len(names(jnp.sin, X)) == 0
    assert str(names(jnp.sin, X)).startswith("no value has a name; hint: lt.offload.tag(fn)")
    assert dataclasses.is_dataclass(Name) and Name.__dataclass_params__.frozen  # pyright: ignore


def test_nothing_runs_and_nothing_compiles(compilations: Any) -> None:
    with compilations.none():
        names(tag(block), X, jax.ShapeDtypeStruct((8, 8), F32))
