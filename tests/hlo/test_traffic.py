"""Bytes that compiled programs move, beside what their operations have to read and write."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import lowtide as lt
from lowtide.core import StructureError

LAYERS, TOKENS, WIDTH = 12, 64, 256
WEIGHT, ROWS = WIDTH * WIDTH * 4, TOKENS * WIDTH * 4


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def moved(fn: Any, *args: Any, target: str = "cpu") -> int:
    return lt.memory.compile(fn, *args, target=target).bytes_accessed


def layers(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]


def test_operands_and_results_count_once() -> None:
    assert moved(lambda x, w: x @ w, shape(TOKENS, WIDTH), shape(WIDTH, WIDTH)) == 2 * ROWS + WEIGHT
    assert moved(lambda x: jnp.sin(x) * 2 + 1, shape(TOKENS, WIDTH)) == 2 * ROWS


def test_a_loop_counts_as_often_as_it_runs_and_reads_what_it_slices() -> None:
    one, all_of_them = (moved(layers, shape(n, WIDTH, WIDTH), shape(TOKENS, WIDTH)) for n in (LAYERS, 2 * LAYERS))
    more = (all_of_them - one) / LAYERS
    assert WEIGHT + 2 * ROWS <= more <= 3 * WEIGHT + 5 * ROWS  # a CPU copies the slice, and the carry


def test_an_update_in_place_counts_with_what_it_writes() -> None:
    def filled(x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(x, jnp.full((1, WIDTH), i, jnp.float32), i, axis=0)

        return jax.lax.fori_loop(0, 1000, body, x)

    assert moved(filled, shape(1000, WIDTH)) < 4 * 1000 * WIDTH * 4


def test_of_branches_the_dearest_counts() -> None:
    def either(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ x) @ x, lambda x: x, x)

    assert moved(either, shape(WIDTH, WIDTH)) >= 6 * WEIGHT


@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e:1x1", marks=pytest.mark.tpu_aot)])
def test_a_loop_that_the_data_end_is_refused(target: str) -> None:
    counted = jax.ShapeDtypeStruct((), jnp.int32)
    loops: list[Any] = [
        (lambda x: jax.lax.while_loop(lambda x: jnp.all(x < x[::-1]), lambda x: x * 2, x), shape(8)),
        (lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 100000, lambda x: x * 2, x), shape(8)),
        (lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) % 7 != 3, lambda x: x + 1, x), shape(8)),
        (lambda n, x: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x), counted, shape(8)),
    ]
    for fn, *args in loops:
        with pytest.raises(StructureError, match=r"iterations of the loop(.|\n)*hint:"):
            moved(fn, *args, target=target)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e:1x1", marks=pytest.mark.tpu_aot)])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (990, 1), (0, 100)])
def test_a_loop_runs_from_its_first_number_in_its_steps(first: int, step: int, target: str) -> None:
    def run(x: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + step, jnp.sin(state[1])

        return jax.lax.while_loop(lambda state: state[0] < 1000, body, (jnp.int32(first), x))[1]

    trips, rows = len(range(first, 1000, step)), 4096 * 8192 * 4  # more than a chip has room for
    assert trips * 2 * rows <= moved(run, shape(4096, 8192), target=target) <= (trips + 2) * 2 * rows


def test_a_cast_alone_reads_its_operand() -> None:
    assert moved(lambda x: x.astype(jnp.bfloat16), shape(TOKENS, WIDTH)) == ROWS + ROWS // 2


@pytest.mark.tpu_aot
def test_what_a_tpu_keeps_on_the_chip_is_not_counted() -> None:
    found = moved(layers, shape(LAYERS, WIDTH, WIDTH), shape(TOKENS, WIDTH), target="v5e:1x1")
    assert LAYERS * WEIGHT <= found < LAYERS * (WEIGHT + 2 * ROWS)


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_a_tpu_reads_the_operands_of_a_product() -> None:
    size = 8192  # more than the chip has room for
    found = moved(lambda x, w: (x @ w).astype(jnp.bfloat16), shape(size, size), shape(size, size), target="v5e:1x1")
    assert found == pytest.approx((4 + 4 + 2) * size**2, rel=0.01)


@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e:1x1", marks=pytest.mark.tpu_aot)])
def test_slices_of_what_is_converted_count_as_slices(target: str) -> None:
    def total(codes: Any) -> Any:
        def body(i: Any, sum: Any) -> Any:
            return sum + jax.lax.dynamic_index_in_dim(codes, i, keepdims=False).astype(jnp.float32)

        return jax.lax.fori_loop(0, 500, body, jnp.zeros(WIDTH))

    codes = jax.ShapeDtypeStruct((500, WIDTH), jnp.int8)
    assert 500 * WIDTH <= moved(total, codes, target=target) < 500 * WIDTH * 16


def test_a_bound_that_a_loop_carries_is_found() -> None:
    def hidden(x: Any) -> Any:
        count = jax.lax.optimization_barrier(jnp.int32(100))
        return jax.lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, jnp.sin(c[1])), (jnp.int32(0), x))[1]

    assert moved(hidden, shape(TOKENS, WIDTH)) >= 100 * 2 * ROWS
