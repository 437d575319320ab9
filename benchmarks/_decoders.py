"""Decoders for the GPU parts: Llama shapes, random weights in one copy, batches, and values for comparisons.

Weights are drawn on the host, one leaf at a time, and placed where they belong. A device never holds more than its
share, so the allocator's peak is that of the step. Every case runs in a separate process, so a case keeps its values in
a scratch folder for the case that is compared with it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import resource
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowtide as lt
from lowtide.core import leaves_with_paths
from lowtide.models import Decoder, DecoderConfig, RopeScaling, init

Tree = Any
SCALING = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)
# meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B, config.json
LLAMA_1B = DecoderConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=500000.0,
    rope_scaling=SCALING,
    tie_embeddings=True,
)
LLAMA_8B = dataclasses.replace(
    LLAMA_1B, hidden_size=4096, intermediate_size=14336, num_layers=32, head_dim=128, tie_embeddings=False
)
SAMPLES = 4096
"""Numbers of each sampled entry that are compared."""


def toy() -> DecoderConfig:
    """Return the decoder of a rehearsal, and make the CPU compile with few optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return dataclasses.replace(LLAMA_1B, **sizes, num_layers=3, num_heads=4, num_kv_heads=2)


def num_parameters(config: DecoderConfig) -> int:
    """Return the number of parameters of a decoder; a tied head counts once."""
    model = jax.eval_shape(lambda: init(config, key=jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


def decoder(config: DecoderConfig, *, seed: int = 0, dtype: Any = "float32", on_host: str | None = None) -> Decoder:
    """Return a decoder with random weights that computes in bfloat16; leaves that match `on_host` are on the host."""
    model = jax.eval_shape(lambda: init(config, key=jax.random.key(0), compute_dtype=jnp.bfloat16))
    paths = [path for path, _ in leaves_with_paths(model)]
    leaves, treedef = jax.tree.flatten(model)
    hosted = lt.core.select(model, on_host) if on_host else [False] * len(leaves)
    made = []
    for path, leaf, on_the_host in zip(paths, leaves, hosted, strict=True):
        values = _drawn(path, leaf.shape, config, seed, jnp.dtype(dtype))
        kind = "pinned_host" if on_the_host else "device"
        made.append(jax.device_put(values, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)))
        made[-1].block_until_ready()  # wait, so that one leaf at a time is on the host
    return treedef.unflatten(made)


def _drawn(path: str, shape: tuple[int, ...], config: DecoderConfig, seed: int, dtype: Any) -> np.ndarray:
    """Draw normal values with the scale of `lowtide.models.init`; norms are one."""
    if "norm" in path:
        return np.ones(shape, dtype)
    std = 0.02 / math.sqrt(2 * config.num_layers) if "o_proj" in path or "down_proj" in path else 0.02
    values, rows = np.empty((math.prod(shape[:-1]), shape[-1]), dtype), 1024

    def draw(begin: int) -> None:
        # Seeded by path and block, so that the values do not depend on the order of the threads.
        generator = np.random.default_rng((seed, zlib.crc32(path.encode()), begin))
        part = values[begin : begin + rows]
        part[...] = np.float32(std) * generator.standard_normal(part.shape, np.float32)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, range(0, len(values), rows)))
    return values.reshape(shape)


def batch_of(config: DecoderConfig, rows: int, length: int, *, seed: int = 0) -> Tree:
    """Return random tokens on the device. The label of a position is the next token; the last position has no label."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((rows, 1), -100, np.int32)], 1)
    return jax.device_put({"tokens": tokens, "labels": labels}, jax.devices()[0])


# --- one case ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_may_run_out(row: dict[str, Any]) -> Iterator[None]:
    """Record in the row whether the block runs out of memory; all other errors propagate."""
    row["out_of_memory"] = False
    try:
        yield
    except Exception as error:
        if not lt.memory.is_out_of_memory(error):
            raise
        row |= {"out_of_memory": True, "error": str(error)[:1000]}


def compiled(row: dict[str, Any], fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compile for the current device, and add the predicted bytes and the compile time to the row."""
    started = time.perf_counter()
    program = jax.jit(fn, **options).lower(*args).compile()
    report = lt.memory.analyze_compiled(program)
    # cuDNN's attention is a custom call whose name contains "fmha".
    text = program.as_text() or ""
    row |= {
        "compile_seconds": round(time.perf_counter() - started, 2),
        "predicted_bytes": report.device_bytes,
        "predicted_argument_bytes": report.device.argument_bytes,
        "predicted_temp_bytes": report.device.temp_bytes,
        "host_bytes": report.host_bytes,
        "attention": "cudnn" if "fmha" in text else "xla",
    }
    return program


def placed(found: lt.offload.Placement) -> dict[str, Any]:
    """Return the counts of `lowtide.offload.verify`."""
    keys = ("num_moves", "host_argument_bytes", "host_temp_bytes")
    return {"placed": {key: getattr(found, key) for key in keys}}


def verified(program: Any, num_bytes: int) -> dict[str, Any]:
    """Return whether at least half of these bytes are on the host, according to `lowtide.offload.verify`."""
    try:
        found = lt.offload.verify(program, {}, host_temp_bytes=num_bytes // 2)
    except lt.LowtideError as error:
        return {"verified": False, "verify_error": str(error)[:2000]}
    return {"verified": True, **placed(found)}


def step_peak_bytes(step: Callable[[], Any]) -> int | None:
    """Return the peak of the allocator during one step, found by polling; the true peak may be higher.

    The allocator's own peak covers the whole process, and placing the state may have needed more than the step. None on
    a CPU.
    """
    device, ended, most = jax.local_devices()[0], threading.Event(), [0]
    if not device.memory_stats():
        return None

    def watch() -> None:
        while not ended.wait(0.0005):
            most[0] = max(most[0], (device.memory_stats() or {})["bytes_in_use"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        jax.block_until_ready(step())
    finally:
        ended.set()
        watcher.join()
    return most[0]


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process on the host."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- values --------------------------------------------------------------------------------------------------------


def scratch(*parts: str) -> Path:
    """Create a folder for values that cases leave for each other; a reboot may empty it."""
    path = Path(tempfile.gettempdir(), f"lowtide-gpu-{os.getuid()}", *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def sampled(tree: Tree) -> list[np.ndarray]:
    """Return some numbers from a few entries of each leaf, spread over the entry. No whole leaf is moved."""

    @jax.jit
    def part(leaf: Any, index: Any) -> Any:
        entry = jax.device_put(jax.lax.dynamic_slice_in_dim(leaf, index, 1), jax.memory.Space.Device).ravel()
        return entry[:: max(1, entry.size // SAMPLES)][:SAMPLES].astype(jnp.float32)

    found = []
    for leaf in jax.tree.leaves(tree):
        places = sorted({int(at) for at in np.linspace(0, leaf.shape[0] - 1, 4)}) if leaf.ndim else []
        found.append(np.concatenate([np.asarray(part(leaf, at)) for at in places]) if places else np.asarray(leaf))
    return found


def keep(part: str, name: str, losses: list[float], leaves: list[np.ndarray]) -> None:
    """Save values for the comparison with another case."""
    np.savez(scratch(part) / f"{name}.npz", np.asarray(losses, np.float64), *leaves)


def compare(part: str, name: str, losses: list[float], leaves: list[np.ndarray]) -> dict[str, Any]:
    """Return the largest differences from the values that another case saved; None if it saved none on this machine."""
    path = scratch(part) / f"{name}.npz"
    if not path.is_file():
        return {"compared_with": None, "loss_difference": None, "max_difference": None}
    with np.load(path) as kept:
        theirs = [kept[key] for key in kept.files]
    if [leaf.shape for leaf in theirs[1:]] != [leaf.shape for leaf in leaves]:
        raise ValueError(f"{path}: values of another program")
    pairs = list(zip(leaves, theirs[1:], strict=True))
    return {
        "compared_with": name,
        "loss_difference": float(np.max(np.abs(np.asarray(losses) - theirs[0]))),
        "max_difference": max(float(np.max(np.abs(a - b))) for a, b in pairs),
        "mean_difference": float(np.mean(np.concatenate([np.abs(a - b).ravel() for a, b in pairs]))),
        "largest_value": max(float(np.max(np.abs(b))) for _, b in pairs),
    }
