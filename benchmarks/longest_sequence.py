"""One long sequence through QLoRA of Llama 3.1 8B's shapes on 80 GB: lengths that fit, their speed and their bytes.

    python benchmarks/longest_sequence.py [--case 131072] [--rehearse]
    LOWTIDE_LENGTHS=196608,400000 python benchmarks/longest_sequence.py

Projections in nf4, embedding and head in bfloat16, LoRA of rank 32 on all linear layers, AdamW. Every block is
recomputed, and its input is on the host until then. Weights are random, drawn and quantised on the device one matrix at
a time. On a larger card the allocator takes 80 GB (10^9 bytes each). The lengths, or those of `LOWTIDE_LENGTHS`, run in
increasing order; a length above one that did not fit is not tried. If the first step takes long, it is the only one and
counts; then it includes the time to pin the host's memory.

Unsloth's documentation of long contexts reports 342,733 tokens for this model, rank and card. A step of T tokens has
about 1.2e6 T^2 FLOPs of attention and 4.6e10 T of matrix products. At 400 TFLOP/s these take 20 s for 65,536 tokens, 67
s for 131,072, four minutes for 262,144 and seven for 342,733. A case that is cut short runs again in the next call.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _decoders import (
    LLAMA_8B,
    batch_of,
    compiled,
    host_peak_bytes,
    memory_may_run_out,
    scratch,
    toy,
    verified,
)
from _gpu import gpu, main, peak_bytes
from _losses import offloaded_loss
from layerwise_time import host_bytes

import lowtide as lt

Tree = Any
PART = "longest"
RANK, ALPHA, LEARNING_RATE = 32, 64.0, 1e-4
CAP_BYTES = 80_000_000_000
LENGTHS = sorted({int(word) for word in os.environ.get("LOWTIDE_LENGTHS", "65536,131072,342733").split(",")})
SECOND_STEP_SECONDS = 60.0
"""A second step is taken if the first took at most this long."""
HOST_GIB = 4
"""Limit of pinned memory in addition to the layer inputs. JAX pins pieces that double in size, up to the limit."""
REST_GIB = 8
"""Host memory for everything else."""


# --- the model -----------------------------------------------------------------------------------------------------


def model_of(config: Any, *, seed: int = 0) -> Any:
    """Return a decoder in nf4 with adapters; while it is quantised, one matrix at a time is on the device in floats."""
    make = functools.partial(lt.models.init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    shapes = jax.eval_shape(make, key=jax.random.key(0))
    named = lt.core.leaves_with_paths(shapes)
    keys = jax.random.split(jax.random.key(seed), len(named))
    made = [_drawn(path, leaf, config.num_layers, key) for (path, leaf), key in zip(named, keys, strict=True)]
    model = jax.tree.structure(shapes).unflatten(made)
    adapters = lt.lora.Config(rank=RANK, alpha=ALPHA, targets="all-linear")
    return lt.lora.add(model, adapters, key=jax.random.key(seed + 1))


def _drawn(path: str, leaf: Any, num_layers: int, key: Any) -> Any:
    """Draw normal values with the scale of `lowtide.models.init`; norms are one."""
    if "norm" in path:
        return jnp.ones(leaf.shape, leaf.dtype)
    std = 0.02 / math.sqrt(2 * num_layers) if "o_proj" in path or "down_proj" in path else 0.02
    if path.startswith("layers/"):
        return jax.block_until_ready(_quantized(key, leaf.shape, leaf.dtype, std))
    return jax.block_until_ready(_normal(key, leaf.shape, leaf.dtype, std))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Any, shape: tuple[int, ...], dtype: Any, std: Any) -> Any:
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(key: Any, shape: tuple[int, ...], dtype: Any, std: Any) -> Any:
    """Draw a stack in nf4, with one matrix at a time in floats."""

    def one(key: Any) -> Any:
        return lt.quantize({"weight": _normal(key, shape[1:], dtype, std)}, "weight", "nf4")["weight"]

    return jax.lax.map(one, jax.random.split(key, shape[0]))


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Return one step of the adapters."""

    def step(trainable: Tree, state: Tree, frozen: Tree, batch: Tree) -> Any:
        def loss(trainable: Tree) -> Any:
            return offloaded_loss(lt.combine(trainable, frozen), batch, inputs="host")[0]

        value, grads = jax.value_and_grad(loss)(trainable)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    return step


def inputs_bytes(config: Any, length: int) -> int:
    """Return the bytes of all layer inputs in bfloat16."""
    return 2 * config.num_layers * config.hidden_size * length


# --- one length ----------------------------------------------------------------------------------------------------


def run(length: int, rehearsal: bool) -> dict[str, Any]:
    """Measure one length; if a shorter one did not fit, return only that."""
    if rehearsal and length != LENGTHS[0]:
        return {"rehearsed_as": str(LENGTHS[0])}
    place = scratch(PART, f"{'toy' if rehearsal else gpu().get('name', 'cpu')}-{fingerprint()}".replace(" ", "-"))
    if (shorter := shortest_failed(place)) and shorter < length:
        return {"length": length, "not_tried": True, "did_not_fit": shorter}
    config, tokens = (toy(), 64) if rehearsal else (LLAMA_8B, length)
    row: dict[str, Any] = {
        "length": length,
        "tokens": tokens,
        "model": "toy" if rehearsal else "8b",
        "method": "qlora",
        "rank": RANK,
        "base": "nf4",
        "inputs_bytes": inputs_bytes(config, tokens),
        "cap_bytes": CAP_BYTES,
        "limit_bytes": (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
    }
    needed = row["inputs_bytes"] + (HOST_GIB + REST_GIB) * 2**30
    if not rehearsal and needed > host_bytes():
        row |= {"out_of_memory": True, "error": f"needs {needed} bytes of the host, which has {host_bytes()}"}
    else:
        with memory_may_run_out(row):
            measure(row, config, tokens)
    note(place, length, fits=not row["out_of_memory"])
    first = {key: row.pop(key) for key in ("tokens_per_second", "predicted_bytes", "host_bytes") if key in row}
    return {**first, "peak_bytes": peak_bytes(), **row, "host_peak_bytes": host_peak_bytes()}


def measure(row: dict[str, Any], config: Any, length: int) -> None:
    """Draw, compile, and take one or two steps."""
    started = time.perf_counter()
    trainable, frozen = lt.partition(model_of(config), "**/lora_*")
    row["draw_seconds"] = round(time.perf_counter() - started, 2)
    row["num_trained"] = sum(leaf.size for leaf in jax.tree.leaves(trainable))
    batch, tx = batch_of(config, 1, length), optax.adamw(LEARNING_RATE)
    held = [trainable, jax.jit(tx.init)(trainable)]
    program = compiled(row, step_of(tx), *held, frozen, batch, donate_argnums=(0, 1))
    row |= {**verified(program, row["inputs_bytes"]), "peak_before_bytes": peak_bytes()}
    del trainable
    losses: list[float] = []
    seconds: list[float] = []
    while not seconds or (len(seconds) < 2 and seconds[0] <= SECOND_STEP_SECONDS):
        started = time.perf_counter()
        held[0], held[1], loss = program(*held, frozen, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    row |= {"losses": losses, "step_seconds": seconds, "seconds_per_step": seconds[-1]}
    row["tokens_per_second"] = length / seconds[-1]


# --- what did not fit ----------------------------------------------------------------------------------------------


def fingerprint() -> str:
    """Return a digest of the library and this file, because a length that did not fit may fit after a change."""
    paths = [Path(__file__), *sorted(Path(lt.__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def note(place: Path, length: int, *, fits: bool) -> None:
    """Record for the other lengths whether this one fits."""
    (place / f"{length}.json").write_text(json.dumps(fits), encoding="utf-8")


def shortest_failed(place: Path) -> int | None:
    """Return the shortest length that did not fit."""
    failed = [int(path.stem) for path in place.glob("*.json") if json.loads(path.read_text(encoding="utf-8")) is False]
    return min(failed, default=None)


# --- all lengths ---------------------------------------------------------------------------------------------------


def minutes(length: int) -> float:
    """Return the time limit of a case: 1.5 times the estimate for its steps, and two minutes for the rest."""
    seconds = (1.2e6 * length**2 + 4.6e10 * length) / 4e14
    return 2 + 1.5 * seconds * (2 if seconds <= SECOND_STEP_SECONDS else 1) / 60


def environment(length: int) -> dict[str, str]:
    """Return variables that limit a case to 80 GB of the device, and to the layer inputs on the host."""
    total = int(gpu().get("memory.total", "0").split()[0]) * 2**20
    share = min(0.95, CAP_BYTES / total) if total else 0.95
    host = math.ceil(inputs_bytes(LLAMA_8B, length) / 2**30) + HOST_GIB
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(host)}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {str(length): functools.partial(run, length) for length in LENGTHS}

if __name__ == "__main__":
    limits = {str(length): minutes(length) for length in LENGTHS}
    # A rehearsal pins nothing, and its cases share a process.
    places = {} if "--rehearse" in sys.argv else {str(length): environment(length) for length in LENGTHS}
    main(PART, CASES, __doc__, minutes=limits, env=places)
