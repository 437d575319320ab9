"""Seconds of full tuning with the update inside the backward pass: all 8 B parameters of a Llama on one GPU.

    python benchmarks/layerwise_time.py [--case 16k-opt_state] [--rehearse]

The benchmark runs `lowtide.offload.layerwise_step` on Llama 3 8B's shapes: float32 parameters and AdamW moments,
bfloat16 compute, microbatches of one sequence of 4,096 tokens. Steps have 4,096 and 16,384 tokens; `opt_state` also
65,536:

    device     everything on the device
    opt_state  AdamW's moments on the host
    host       parameters, moments and layer inputs on the host
    plain      for comparison: all gradients, then one update, layers recomputed (`jax.value_and_grad`, `optax`)

Every case trains on the same batch from the same weights, so losses must fall, and equal those of `device`. Weights are
drawn one leaf at a time where they belong. The host variants pin 60 and 90 GiB. Pinning takes part of the time that a
case needs before its first step, and on a machine with 128 GiB the `host` variant leaves little.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from _decoders import (
    LLAMA_8B,
    batch_of,
    compare,
    compiled,
    decoder,
    host_peak_bytes,
    keep,
    memory_may_run_out,
    num_parameters,
    placed,
    sampled,
    step_peak_bytes,
    toy,
)
from _gpu import main, overlap, peak_bytes, timed

import lowtide as lt

Tree = Any
PART = "layerwise"
TOKENS = {"4k": 4096, "16k": 16384, "64k": 65536}
REHEARSED = "16k"
PLACES = {
    "device": dict.fromkeys(("layers", "outer", "opt_state", "inputs"), "device"),
    "opt_state": {"layers": "device", "outer": "device", "opt_state": "host", "inputs": "device"},
    "host": dict.fromkeys(("layers", "outer", "opt_state", "inputs"), "host"),
}
STEPS = 3
"""Steps whose losses are compared; the timed steps follow."""
HOST_GIB = {"opt_state": 76, "host": 104}
"""Limits of pinned memory. JAX pins pieces that double in size, up to this limit, regardless of the need. A higher
limit would take memory from the rest of a host of 128 GiB.
"""


def optimizer() -> optax.GradientTransformation:
    """Return the optimizer, the same for all variants."""
    return optax.adamw(1e-5, weight_decay=0.01)


Stepper = tuple[Callable[[], Any], Callable[[], Tree]]
"""A function that takes a step and returns its loss, and one that returns the parameters."""


def layerwise(row: dict[str, Any], kind: str, model: Any, batch: Tree, num_microbatches: int) -> Stepper:
    """Place and compile a layerwise step, and hold its state."""
    step = lt.offload.layerwise_step(model.stack, optimizer(), place=PLACES[kind], num_microbatches=num_microbatches)
    started = time.perf_counter()
    state, frozen = step.init(model.outer, model.layers)
    jax.block_until_ready(state)
    row["init_seconds"] = round(time.perf_counter() - started, 2)
    program = compiled(row, step, state, frozen, batch, donate_argnums=0)
    row |= verified(kind, program)
    held = [state]
    del state, model

    def one() -> Any:
        held[0], metrics = program(held[0], frozen, batch)
        return metrics["loss"]

    return one, lambda: step.parameters(held[0], frozen)


def plain(row: dict[str, Any], model: Any, batch: Tree) -> Stepper:
    """Compile the gradients of the whole batch and the update; an accumulator would be a second gradient copy."""
    stack, tx = model.stack, optimizer()
    grad_fn = jax.value_and_grad(lambda params, batch: stack.apply(*params, batch, remat=True)[0])

    def step(params: Tree, state: Tree, batch: Tree) -> Any:
        loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = (model.outer, model.layers)
    state = jax.jit(tx.init)(params)
    program = compiled(row, step, params, state, batch, donate_argnums=(0, 1))
    held = [params, state]
    del params, state, model

    def one() -> Any:
        held[0], held[1], loss = program(*held, batch)
        return loss

    return one, lambda: held[0]


def verified(kind: str, program: Any) -> dict[str, Any]:
    """Return the result of `lowtide.offload.verify` for the compiled step."""
    places = {
        "device": {},
        "opt_state": {"0/layers_opt/**/{mu,nu}/layers/*/*_proj/**": "host"},
        "host": {"0/layers/*/*_proj/**": "host", "0/layers_opt/**/{mu,nu}/layers/*/*_proj/**": "host"},
    }
    try:
        found = lt.offload.verify(program, places[kind])
    except lt.LowtideError as error:
        return {"verified": False, "verify_error": str(error)[:2000]}
    return {"verified": True, **placed(found)}


def run(word: str, kind: str, rehearsal: bool) -> dict[str, Any]:
    """Train, compare, time and profile one case."""
    if rehearsal and word != REHEARSED:
        return {"rehearsed_as": f"{REHEARSED}-{kind}"}
    if not rehearsal:
        check_host(kind, host_bytes())
    config, length, count = (toy(), 32, 4) if rehearsal else (LLAMA_8B, 4096, TOKENS[word] // 4096)
    row: dict[str, Any] = {
        "model": "toy" if rehearsal else "8b",
        "kind": kind,
        "place": PLACES.get(kind, {}),
        "tokens": count * length,
        "seq_len": length,
        "num_microbatches": count,
        "num_parameters": num_parameters(config),
        "dtype": "float32",
        "compute_dtype": "bfloat16",
        "optimizer": "adamw",
    }
    with memory_may_run_out(row):
        measure(row, f"{word}{'-toy' * rehearsal}", kind, config, batch_of(config, count, length), rehearsal)
    return {**row, "peak_bytes": peak_bytes(), "host_peak_bytes": host_peak_bytes()}


def measure(row: dict[str, Any], name: str, kind: str, config: Any, batch: Tree, rehearsal: bool) -> None:
    """Measure a case and fill its row."""
    started = time.perf_counter()
    model = decoder(config, on_host="**" if kind == "host" else None)
    row["draw_seconds"] = round(time.perf_counter() - started, 2)
    step, params = (
        plain(row, model, batch) if kind == "plain" else layerwise(row, kind, model, batch, row["num_microbatches"])
    )
    row["peak_before_bytes"] = peak_bytes()
    del model
    gc.collect()
    started = time.perf_counter()
    losses = [float(step()) for _ in range(STEPS)]
    row |= {"losses": losses, "first_steps_seconds": round(time.perf_counter() - started, 2)}
    values = sampled(params())
    if kind == "device":
        keep(PART, f"{name}-device", losses, values)
    else:
        row |= compare(PART, f"{name}-device", losses, values)
    seconds = timed(step, warmup=0, repeats=2 if rehearsal else 4)
    row |= {"seconds_per_step": statistics.median(seconds), "step_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds_per_step"]
    row["step_peak_bytes"] = step_peak_bytes(step)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            timed(step, warmup=0, repeats=1)
        row |= {"overlap": overlap(folder), "profiled_steps": 1}
    row["loss_fell"] = float(step()) < losses[0]


def host_bytes() -> int:
    """Return the memory of this machine, or of the container of this process."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            found = min(found, int(Path(path).read_text(encoding="utf-8")))
    return found


def check_host(kind: str, num_bytes: int) -> None:
    """Raise if a case may pin more than the host has, because that would kill more than this process."""
    if (needed := HOST_GIB.get(kind, 0)) * 2**30 > num_bytes:
        raise MemoryError(f"{kind} pins up to {needed} GiB of the host's memory, which has {num_bytes / 2**30:.0f} GiB")


def environment(kind: str) -> dict[str, str]:
    """Return variables that give a case nearly the whole device, and pinned memory on the host."""
    return {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(HOST_GIB.get(kind, 16)),
    }


ORDER = (
    *(("16k", kind) for kind in ("device", "opt_state", "host", "plain")),
    *(("4k", kind) for kind in ("device", "opt_state", "host")),
    ("64k", "opt_state"),
)
CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{word}-{kind}": functools.partial(run, word, kind) for word, kind in ORDER
}

if __name__ == "__main__":
    limits = {f"{word}-{kind}": 7.0 if kind == "host" else 5.0 for word, kind in ORDER}
    # A rehearsal pins nothing, and cases with one environment share its process.
    places = {} if "--rehearse" in sys.argv else {f"{word}-{kind}": environment(kind) for word, kind in ORDER}
    main(PART, CASES, __doc__, minutes=limits, env=places)
