"""Seconds and peak of AdamW updates with low-precision state, on the device and streamed from the host.

    python benchmarks/optimizer_time.py [--case 8bit] [--rehearse]

1.07 B parameters in four leaves. Parameters and state are donated; gradients are arguments. ``float32`` and the formats
of `lowtide.optim.low_precision` have float32 parameters and gradients; ``split`` is 8 bits with both in bfloat16.
``host-…`` keeps the state in host memory (`lowtide.offload.optimizer`). Each row has the seconds of an update, the
predicted bytes, the allocator's peak, and the distance of sampled parameters from float32's after three updates.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _decoders import compare, compiled, host_peak_bytes, keep, memory_may_run_out, sampled, step_peak_bytes
from _gpu import main, peak_bytes, timed

import lowtide as lt
from lowtide.core._compat import called

Tree = Any
PART = "optimizer"
FORMATS = ("8bit", "split", "4bit", "companded", "bfloat16", "host-8bit", "host-float32")
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".93", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "64"}


def optimizer(form: str, is_on_host: bool) -> optax.GradientTransformation:
    """Return AdamW with its state in a format, on the device or on the host."""
    tx: Any = optax.adamw(1e-3, weight_decay=0.01)
    if form == "split":
        tx = lt.optim.low_precision(tx, "8bit", weights="split")
    elif form != "float32":
        tx = lt.optim.low_precision(tx, form)
    return lt.offload.optimizer(tx, match=r".*/(mu|nu)/.*") if is_on_host else tx


def run(name: str, rehearsal: bool) -> dict[str, Any]:
    """Compile, update, compare and time one case."""
    form = name.removeprefix("host-")
    shape = (2, 256, 512) if rehearsal else (8, 4096, 8192)
    row: dict[str, Any] = {
        "format": form,
        "on_host": name.startswith("host-"),
        "num_parameters": 4 * shape[0] * shape[1] * shape[2],
    }
    with memory_may_run_out(row):
        measure(row, f"{name}{'-toy' * rehearsal}", shape, rehearsal)
    return {**row, "peak_bytes": peak_bytes(), "host_peak_bytes": host_peak_bytes()}


def measure(row: dict[str, Any], name: str, shape: tuple[int, ...], rehearsal: bool) -> None:
    """Measure a case and fill its row."""
    dtype, tx = jnp.bfloat16 if row["format"] == "split" else jnp.float32, optimizer(row["format"], row["on_host"])

    @functools.partial(jax.jit, static_argnums=1)
    def drawn(seed: Any, scale: float) -> Tree:
        keys = jax.random.split(jax.random.key(seed), 4)
        return {f"w{at}": (jax.random.normal(key, shape) * scale).astype(dtype) for at, key in enumerate(keys)}

    params, grads = drawn(0, 0.02), drawn(1, 0.001)
    places = lt.offload.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=places)(params)

    def update(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = jax.tree.map(lambda leaf: leaf.sharding, params)
    program = compiled(row, update, params, state, grads, donate_argnums=(0, 1), out_shardings=(sharded, places))
    held = [params, state]  # in this order; otherwise a donated host array would be matched to the parameters
    del state, params

    def step() -> Any:
        held[:] = called(program, *held, grads)  # JAX 0.10 rejects int4 arrays on a device
        return held[0]

    for _ in range(3):
        step()
    values = sampled(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), held[0]))
    if name.startswith("float32"):
        keep(PART, name, [0.0], values)
    else:
        row |= compare(PART, f"float32{'-toy' * rehearsal}", [0.0], values)
    seconds = timed(step, warmup=2, repeats=2 if rehearsal else 10)
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["step_peak_bytes"] = step_peak_bytes(step)


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    name: functools.partial(run, name) for name in ("float32", *FORMATS)
}

if __name__ == "__main__":
    main(PART, CASES, __doc__, minutes=dict.fromkeys(CASES, 2.0), env=dict.fromkeys(CASES, ENVIRONMENT))
