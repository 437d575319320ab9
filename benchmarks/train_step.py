"""Predicted against measured bytes, and tokens per second, of LoRA steps that really run on the device at hand.

    python benchmarks/train_step.py [--model 1b] [--steps 20] [--json FILE]

Random bfloat16 weights at Llama shapes, rank-16 adapters on all projections, AdamW, 8 x 2048 tokens (1b), 1 x 2048
(8b) or 8 x 128 (tiny, for a machine without an accelerator). `predicted` is the compiled step's device bytes;
`measured` is the most that JAX's allocator held, weights' initialisation included, or nothing where the backend keeps
no count (a CPU). Tokens per second are the median over the steps after the first two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import ROOT, header, write
from lora_step import MODELS
from rich.console import Console

import lowtide as lt
from lowtide.core import format_bytes
from lowtide.models import LlamaConfig, init, loss

TINY = LlamaConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    tie_embeddings=True,
)
CASES = {"tiny": (TINY, 8, 128), **{name: (config, size, 2048) for name, (config, size) in MODELS.items()}}


def run(name: str, num_steps: int) -> dict[str, Any]:
    """Train on random tokens; what was predicted and what was seen."""
    config, batch_size, seq_len = CASES[name]
    make = jax.jit(partial(init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16))
    model = make(key=jax.random.key(0))
    model = lt.lora.add(model, lt.lora.Config(rank=16, targets="layers/**/*_proj"), key=jax.random.key(1))
    trainer = lt.Trainer(model, partial(loss, remat=True), optax.adamw(1e-4), wrt="**/lora_*")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, seq_len + 1), np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    report = trainer.memory(batch)
    seconds: list[float] = []
    for step in range(1, num_steps + 1):
        started = time.perf_counter()
        trainer.fit([batch] * step, num_steps=step)  # reads the loss, so the step has ended
        seconds.append(time.perf_counter() - started)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "model": name,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "device_kind": jax.devices()[0].device_kind,
        "predicted_device_bytes": report.device_bytes,
        "predicted_by_role": dict(report.by_role),
        "measured_peak_bytes": stats.get("peak_bytes_in_use"),
        "seconds_per_step": seconds,
        "tokens_per_second": batch_size * seq_len / statistics.median(seconds[2:] or seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CASES), default="1b")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--json", type=Path, help="raw result (default: results/train_step-MODEL-DEVICE.json)")
    args = parser.parse_args()
    row = run(args.model, args.steps)
    device = row["device_kind"].lower().replace(" ", "-")
    path = args.json or ROOT / "results" / f"train_step-{args.model}-{device}.json"
    write(path, {**header(f"python benchmarks/train_step.py --model {args.model}"), "figures": "measured", **row})
    measured = row["measured_peak_bytes"]
    Console().print(
        f"{args.model} on {row['device_kind']}: predicted {format_bytes(row['predicted_device_bytes'])}, "
        f"measured {'not counted here' if measured is None else format_bytes(measured)}, "
        f"{row['tokens_per_second']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
