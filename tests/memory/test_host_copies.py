"""Copies of host arguments on GPUs that only compile: none of their figures may favour what reads more at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import lowtide as lt
from lowtide.memory import analyze
from lowtide.offload import to_host

MIB = 2**20
DEVICE = jax.memory.Space.Device
pytestmark = pytest.mark.gpu_aot


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def copies(report: Any) -> list[tuple[str, int]]:
    return sorted((b.path, b.num_bytes) for b in report.peak if b.role == "copies" and "host" in b.operation)


def report_of(fn: Any, *args: Any, **options: Any) -> Any:
    report = analyze(fn, *args, target="h100", **options)
    assert sum(buffer.num_bytes for buffer in report.peak) == report.device_bytes
    assert sum(report.by_role.values()) == report.device_bytes
    return report


def test_an_array_that_is_read_as_a_whole_is_copied_as_a_whole() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ jax.device_put(w, DEVICE))

    device = report_of(fn, shape(1024, 1024), shape(8, 1024))
    hosted = report_of(fn, to_host(shape(1024, 1024)), shape(8, 1024))
    assert copies(hosted) == [("w", 4 * MIB)]
    assert (hosted.device_bytes, hosted.host_bytes) == (device.device_bytes, 4 * MIB)


def test_a_loop_copies_the_slice_that_it_reads() -> None:
    def fn(layers: Any, x: Any) -> Any:
        def layer(i: Any, h: Any) -> Any:
            return jnp.tanh(h @ jax.device_put(jax.lax.dynamic_index_in_dim(layers, i, keepdims=False), DEVICE))

        return jax.lax.fori_loop(0, 6, layer, x)

    report = report_of(fn, to_host(shape(6, 1024, 1024)), shape(8, 1024))
    assert copies(report) == [("layers", 4 * MIB)]
    assert report.host_bytes == 24 * MIB


def test_rows_that_are_scattered_into_an_array_are_copied() -> None:
    """Not where they go, which is the operand between the two."""

    def fn(table: Any, rows: Any, at: Any) -> Any:
        return jax.device_put(table, DEVICE).at[at].add(rows)

    rows, at = shape(1024, 512), jax.ShapeDtypeStruct((1024,), jnp.int32)
    report = report_of(fn, to_host(shape(8192, 512)), rows, at, donate_argnums=0)
    assert copies(report) == [("table", 2 * MIB)]


@pytest.mark.sentinel
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optimizer. this compile-only device")
def test_modes_of_an_offloaded_optimizer_compare_as_on_a_tpu() -> None:
    params = {f"w{at}": shape(1024, 1024) for at in range(6)}

    def device_bytes(mode: str) -> int:
        tx = lt.offload.optimizer(optax.adamw(1e-3), mode=mode, chunk_bytes="2 MiB")
        state = to_host(jax.eval_shape(tx.init, params), "**/{mu,nu}/**")

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return report_of(step, params, state, params, donate_argnums=(0, 1)).device.temp_bytes

    streamed, leaf, whole = map(device_bytes, ("streamed", "leaf", "whole"))
    assert streamed < leaf < whole
    assert whole >= 2 * 6 * 4 * MIB
