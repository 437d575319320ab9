"""Bytes that packing, windows and soft caps cost: one LoRA step of 1 x 4096 tokens, compiled for a chip. Never run.

    python benchmarks/switches.py [--target v5e:1x1] [--case llama] ...

Rank-16 adapters on all projections over a bfloat16 base, AdamW, every block recomputed. The first model has Llama 3.2
1B's shapes, with and without ``segment_ids`` and ``positions``. The second has Gemma 2 2B's: soft caps, and a window of
4096 tokens in every second layer, as data. It is compared with the same model with a window of 2048, without windows,
without caps, and without both.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, mib, write
from _decoders import LLAMA_1B

import lowtide as lt
from lowtide.models import DecoderConfig, init, loss
from lowtide.train import analyze_step

LENGTH = 4096
# google/gemma-2-2b, config.json
GEMMA_2B = DecoderConfig(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    family="gemma2",
    activation="gelu_tanh",
    post_norm=True,
    norm_offset=1.0,
    scale_embedding=True,
    attention_scale=256**-0.5,
    sliding_window=4096,
    sliding_layers=(True, False) * 13,
    attention_soft_cap=50.0,
    final_soft_cap=30.0,
)
_NO_CAPS: dict[str, Any] = {"attention_soft_cap": None, "final_soft_cap": None}
_NO_WINDOWS: dict[str, Any] = {"sliding_window": None, "sliding_layers": None}
CASES: dict[str, tuple[DecoderConfig, bool]] = {
    "llama": (LLAMA_1B, False),
    "llama, packed": (LLAMA_1B, True),
    "gemma": (GEMMA_2B, False),
    "gemma without caps and windows": (dataclasses.replace(GEMMA_2B, **_NO_CAPS, **_NO_WINDOWS), False),
    "gemma without caps": (dataclasses.replace(GEMMA_2B, **_NO_CAPS), False),
    "gemma without windows": (dataclasses.replace(GEMMA_2B, **_NO_WINDOWS), False),
    "gemma, packed": (GEMMA_2B, True),
}


def measure(name: str, target: str) -> dict[str, Any]:
    """Compile one step and return its row."""
    config, is_packed = CASES[name]
    base = jax.eval_shape(
        lambda key: init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16), jax.random.key(0)
    )
    model = lt.lora.add(base, lt.lora.Config(rank=16, targets="layers/**/*_proj"), key=jax.random.key(1))
    names = ("tokens", "labels", *("segment_ids", "positions") * is_packed)
    batch = {leaf: jax.ShapeDtypeStruct((1, LENGTH), jnp.int32) for leaf in names}
    started = time.perf_counter()
    report = analyze_step(model, partial(loss, remat=True), optax.adamw(1e-4), "**/lora_*", batch, target=target)
    return {
        "case": name,
        "device_bytes": report.device_bytes,
        "argument_bytes": report.device.argument_bytes,
        "temp_bytes": report.device.temp_bytes,
        "compile_seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Compile all cases, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:1x1", help="what to compile for")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    options = parser.parse_args()
    path = ROOT / "results" / f"switches-{options.target.replace(':', '-')}.json"
    rows: list[dict[str, Any]] = []
    for name in options.case or CASES:
        rows.append(measure(name, options.target))
        row = rows[-1]
        print(f"{name:32} {mib(row['device_bytes']):>10} MiB, {mib(row['temp_bytes']):>10} temporaries", flush=True)
        command = f"python benchmarks/switches.py --target {options.target}"
        write(path, {**header(command), "figures": "compiled", "seq_len": LENGTH, "rows": rows})


if __name__ == "__main__":
    main()
