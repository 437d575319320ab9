"""What the GPU parts share about decoders: Llama shapes, random weights that exist once, batches, values to compare.

Weights are drawn on the host, a leaf at a time, and put where they belong: a device never holds more than it is to
hold, so that its allocator's peak is the step's own. Values of one case are kept in a scratch folder for the case that
is compared with it, since every case is a process of its own.
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
from lowtide.models import Llama, LlamaConfig, RopeScaling, init

Tree = Any
SCALING = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)
# meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B, config.json
LLAMA_1B = LlamaConfig(
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
"""Numbers of each entry that are compared."""


def toy() -> LlamaConfig:
    """The decoder of a rehearsal, whose programs a CPU compiles in haste."""
    jax.config.update("jax_disable_most_optimizations", True)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return dataclasses.replace(LLAMA_1B, **sizes, num_layers=3, num_heads=4, num_kv_heads=2)


def num_parameters(config: LlamaConfig) -> int:
    """Parameters of a decoder; a tied head counts once."""
    model = jax.eval_shape(lambda: init(config, key=jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


def decoder(config: LlamaConfig, *, seed: int = 0, dtype: Any = "float32", on_host: str | None = None) -> Llama:
    """A decoder with random weights that computes in bfloat16; leaves that the glob `on_host` matches are there."""
    model = jax.eval_shape(lambda: init(config, key=jax.random.key(0), compute_dtype=jnp.bfloat16))
    paths = [path for path, _ in leaves_with_paths(model)]
    leaves, treedef = jax.tree.flatten(model)
    hosted = lt.core.select(model, on_host) if on_host else [False] * len(leaves)
    made = []
    for path, leaf, on_the_host in zip(paths, leaves, hosted, strict=True):
        values = _drawn(path, leaf.shape, config, seed, jnp.dtype(dtype))
        kind = "pinned_host" if on_the_host else "device"
        made.append(jax.device_put(values, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)))
        made[-1].block_until_ready()  # before the next leaf is drawn
    return treedef.unflatten(made)


def _drawn(path: str, shape: tuple[int, ...], config: LlamaConfig, seed: int, dtype: Any) -> np.ndarray:
    """Normal, as `lowtide.models.init` has it; norms are one."""
    if "norm" in path:
        return np.ones(shape, dtype)
    std = 0.02 / math.sqrt(2 * config.num_layers) if "o_proj" in path or "down_proj" in path else 0.02
    values, rows = np.empty((math.prod(shape[:-1]), shape[-1]), dtype), 1024

    def draw(begin: int) -> None:
        generator = np.random.default_rng((seed, zlib.crc32(path.encode()), begin))
        part = values[begin : begin + rows]
        part[...] = np.float32(std) * generator.standard_normal(part.shape, np.float32)

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(draw, range(0, len(values), rows)))
    return values.reshape(shape)


def batch_of(config: LlamaConfig, rows: int, length: int, *, seed: int = 0) -> Tree:
    """Random tokens on the device; the label of a position is the next token, and that of the last none."""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((rows, 1), -100, np.int32)], 1)
    return jax.device_put({"tokens": tokens, "labels": labels}, jax.devices()[0])


# --- one case ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_may_run_out(row: dict[str, Any]) -> Iterator[None]:
    """A lack of memory inside the block is a result, which is written into the row; all else is an error."""
    row["out_of_memory"] = False
    try:
        yield
    except Exception as error:
        if not lt.memory.is_out_of_memory(error):
            raise
        row |= {"out_of_memory": True, "error": str(error)[:1000]}


def compiled(row: dict[str, Any], fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compile for the device at hand; the row gets what was predicted, and how long it took."""
    started = time.perf_counter()
    program = jax.jit(fn, **options).lower(*args).compile()
    report = lt.memory.analyze_compiled(program)
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
    """What `lowtide.offload.verify` counted."""
    keys = ("num_moves", "host_argument_bytes", "host_temp_bytes")
    return {"placed": {key: getattr(found, key) for key in keys}}


def verified(program: Any, num_bytes: int) -> dict[str, Any]:
    """Whether so much, or half of it, is on the host, as `lowtide.offload.verify` says."""
    try:
        found = lt.offload.verify(program, {}, host_temp_bytes=num_bytes // 2)
    except lt.LowtideError as error:
        return {"verified": False, "verify_error": str(error)[:2000]}
    return {"verified": True, **placed(found)}


def step_peak_bytes(step: Callable[[], Any]) -> int | None:
    """The most that the allocator held while a step was taken, by asking it all the time: at least so much.

    The allocator's own peak is that of the process, in which placing the state may have needed more. None on a CPU.
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
    """The most memory of this process that was in the host's at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- values --------------------------------------------------------------------------------------------------------


def scratch(*parts: str) -> Path:
    """A folder for what cases leave for each other, which a reboot may empty."""
    path = Path(tempfile.gettempdir(), f"lowtide-gpu-{os.getuid()}", *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def sampled(tree: Tree) -> list[np.ndarray]:
    """Some numbers of a few entries of each leaf, spread over the entry; no leaf moves as a whole."""

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
    """Leave values for another case."""
    np.savez(scratch(part) / f"{name}.npz", np.asarray(losses, np.float64), *leaves)


def compare(part: str, name: str, losses: list[float], leaves: list[np.ndarray]) -> dict[str, Any]:
    """The largest differences from the values that a case left; None where it left none on this machine."""
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
