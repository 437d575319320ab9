"""Memory of a QLoRA step of Llama 3.1 8B on one chip, and the arithmetic that dequantisation adds. Never run.

    python benchmarks/qlora.py [--target v5e:1x1] [--case "rank 8"] [--count] ...

Packed rows, AdamW, every block recomputed, compiled: rank 8 on queries, values and the MLP for 2 x 2048 tokens
(torchtune's recipe), and rank 32 on all projections for 1 x 2048. The base is in bfloat16, in nf4, and in nf4 with
embedding and head in 8 bits. The benchmark examines all float buffers on the device whose last two axes have the shape
of a quantised weight or its transpose: how many matrices the largest of them holds, and its bytes.

FLOPs and bytes accessed are XLA's own count, for one layer of these widths with a small head, because XLA counts the
body of a loop once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, write
from _decoders import LLAMA_8B

import lowtide as lt
from lowtide.models import DecoderConfig, init, loss
from lowtide.train import analyze_step

GIB = 2**30
BASES: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "nf4": {"layers/**/*_proj": "nf4"},
    "nf4, embedding and head int8": {"layers/**/*_proj": "nf4", "outer/**": "int8"},
}
CASES: dict[str, tuple[lt.lora.Config, int]] = {
    "rank 8": (lt.lora.Config(rank=8, targets="layers/**/{q,v,gate,up,down}_proj"), 2),
    "rank 32": (lt.lora.Config(rank=32, targets="all-linear"), 1),
}
LENGTH = 2048


def shapes(config: DecoderConfig, base: str, adapters: lt.lora.Config, rows: int) -> tuple[Any, dict[str, Any]]:
    """Return the model and a batch, as shapes."""
    make = partial(init, config, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    model = jax.eval_shape(make, key=jax.random.key(0))
    for glob, form in BASES[base].items():
        model = lt.quantize(model, glob, form)
    model = lt.lora.add(model, adapters, key=jax.random.key(1))
    names = ("tokens", "labels", "segment_ids", "positions")
    return model, {name: jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32) for name in names}


def measure(case: str, base: str, target: str) -> dict[str, Any]:
    """Compile one step and return its row."""
    model, batch = shapes(LLAMA_8B, base, *CASES[case])
    started = time.perf_counter()
    report = analyze_step(model, partial(loss, remat=True), optax.adamw(1e-4), "**/lora_*", batch, target=target)
    seconds = time.perf_counter() - started
    matrices = {leaf.shape[-2:] for path, leaf in lt.core.leaves_with_paths(model) if path.endswith("/codes")}
    made = [
        buffer
        for buffer in report.buffers
        if buffer.shape[-2:] in matrices | {shape[::-1] for shape in matrices} and buffer.dtype in ("bf16", "f32")
    ]
    largest = max((math.prod(buffer.shape[:-2]) for buffer in made), default=0)
    device = report.device
    return {
        "case": case,
        "base": base,
        "device_bytes": report.device_bytes,
        "argument_bytes": device.argument_bytes,
        "temp_bytes": device.temp_bytes,
        "most_matrices_in_a_float_buffer": largest,
        "largest_float_buffer_of_a_weight": max((buffer.num_bytes for buffer in made), default=0),
        "compile_seconds": seconds,
        **counted(case, base, target),
    }


def counted(case: str, base: str, target: str) -> dict[str, float]:
    """Return the FLOPs and bytes accessed of a step of one layer."""
    adapters, rows = CASES[case]
    config = dataclasses.replace(LLAMA_8B, num_layers=1, vocab_size=256)
    model, batch = shapes(config, base, adapters, rows)
    goal = lt.memory.target(target)
    place = jax.sharding.SingleDeviceSharding(goal.devices()[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        (*lt.partition(model, "**/lora_*"), batch),
    )

    def step(trainable: Any, frozen: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda part: loss(lt.combine(part, frozen), batch, remat=True)[0])(trainable)

    with jax.default_device(goal.devices()[0]):
        compiled = jax.jit(step).trace(*arguments).lower(lowering_platforms=(goal.platform,)).compile()
    cost = compiled.cost_analysis()
    return {"layer_flops": cost["flops"], "layer_bytes_accessed": cost["bytes accessed"]}


def main() -> None:
    """Compile, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:1x1", help="of lowtide.memory.target")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--base", action="append", choices=BASES, help="default: all")
    parser.add_argument(
        "--count", action="store_true", help="count FLOPs and bytes accessed, and compile no whole step"
    )
    parser.add_argument("--json", type=Path, help="where the raw result goes (default: benchmarks/results)")
    options = parser.parse_args()
    name = "qlora-count" if options.count else "qlora"
    path = options.json or ROOT / "results" / f"{name}-{options.target.replace(':', '-')}.json"
    rows = list[dict[str, Any]]()
    for case in options.case or CASES:
        for base in options.base or BASES:
            if options.count:
                rows.append({"case": case, "base": base, **counted(case, base, options.target)})
                print(*rows[-1].values(), sep=", ", flush=True)
            else:
                rows.append(measure(case, base, options.target))
                show(rows[-1])
            write(
                path,
                {**header("python benchmarks/qlora.py"), "label": "compiled", "target": options.target, "rows": rows},
            )


def show(row: dict[str, Any]) -> None:
    """Print a row as a line."""
    sizes = [f"{row[name] / GIB:.2f}" for name in ("device_bytes", "argument_bytes", "temp_bytes")]
    print(
        f"{row['case']}, {row['base']}: {sizes[0]} GiB (arguments {sizes[1]}, temporaries {sizes[2]}); "
        f"a layer {row['layer_flops'] / 1e12:.3f} TFLOP, {row['layer_bytes_accessed'] / 1e9:.2f} GB accessed; of a "
        f"weight's shape at most {row['most_matrices_in_a_float_buffer']} matrices in a buffer of floats, "
        f"{row['largest_float_buffer_of_a_weight'] / 2**20:.0f} MiB; {row['compile_seconds']:.0f} s to compile",
        flush=True,
    )


if __name__ == "__main__":
    main()
