"""How many bytes of a step's host copies have kernels to hide under, in schedules that XLA compiles for an H100.

    python benchmarks/host_copies.py [--target h100] [--json FILE]

Steps of LoRA on the shapes of Llama 3.2 1B and Llama 3.1 8B, with layer inputs on the host or with five projections of
each layer on the host. Each is compiled with XLA's own options, and with `lowtide.offload.copy_options`. `_schedule.py`
simulates the schedules with the figures of the target's catalogue. A row has, for each direction, the bytes, the share
that is hidden, and the seconds that the step waits. "By products" is the share that is hidden if kernels take only the
time of their matrix products at the peak rate. A row also has the operations that XLA computes a second time
(`rematerialised`), and the bytes that the link can move during the forward pass at the peak rate (`cap`), by the
planner's function. Attention is computed in blocks, because compiling cuDNN's kernel needs cuDNN. Nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from _common import ROOT, header, write
from _decoders import LLAMA_1B, LLAMA_8B
from _schedule import summary
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.hlo import compile_lowered, lower_program
from lowtide.jaxprs import jaxpr_flops
from lowtide.models import DecoderConfig, init, loss
from lowtide.planning import Remat, planned
from lowtide.planning._cost import Rates

PROJECTIONS = frozenset({"attn_q", "attn_k", "attn_v", "mlp_gate", "mlp_up"})
CASES: dict[str, tuple[DecoderConfig, tuple[int, int], Remat]] = {
    "8B, layer inputs, 2 x 4096": (LLAMA_8B, (2, 4096), Remat(layer_inputs="host")),
    "1B, layer inputs, 4 x 4096": (LLAMA_1B, (4, 4096), Remat(layer_inputs="host")),
    "1B, five projections, 4 x 4096": (LLAMA_1B, (4, 4096), Remat(offload=PROJECTIONS)),
}


def lower(config: DecoderConfig, shape: tuple[int, int], hidden: Remat, target: Any) -> Any:
    """Lower the loss and the gradients of LoRA of a decoder, with its layers as `hidden` says."""

    def build(key: Any) -> Any:
        model = init(config, key=key, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        return lt.lora.add(model, lt.lora.Config(rank=16, targets="layers/**/*_proj/weight"), key=key)

    trainable, frozen = lt.partition(jax.eval_shape(build, jax.random.key(0)), "**/lora_*")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "labels")}

    def loss_fn(trainable: Any, frozen: Any, batch: Any) -> Any:
        return loss(lt.combine(trainable, frozen), batch)[0]

    fn = planned(jax.value_and_grad(loss_fn), hidden)
    return lower_program(fn, (trainable, frozen, batch), {}, target, None)


def measure(name: str, target: Any) -> list[dict[str, Any]]:
    """Compile a case without copies and with both sets of options, and return the rows."""
    config, shape, hidden = CASES[name]
    offloaded = lower(config, shape, hidden, target)
    assert offloaded.options, "the program does not use host memory"
    programs = {
        "on the device": lower(config, shape, Remat(save=hidden.offload), target),
        "XLA's options": dataclasses.replace(offloaded, options={}),
        "copy_options": offloaded,
    }
    link = Rates(target.flops, target.hbm_bandwidth, target.host_link_bandwidth, hides_copies=True)
    # With everything recomputed, forward pass, recomputation and gradients of activations have equal FLOPs.
    forward_flops = jaxpr_flops(lower(config, shape, Remat(), target).jaxpr) / 3
    rows: list[dict[str, Any]] = []
    for options, program in programs.items():
        compiled = compile_lowered(program).compiled
        text = compiled.as_text()
        row = {"step": name, "options": options, **summary(text, target), "cap": link.hidden_bytes(forward_flops)}
        row["rematerialised"] = len(re.findall(r"^ *(?:ROOT )?%[\w.\-]*\.remat", text, re.MULTILINE))
        row["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        rows.append(row)
    return rows


def main() -> None:
    """Print the rows, and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", default="h100")
    parser.add_argument("--json", type=Path, default=ROOT / "results/host_copies.json")
    args = parser.parse_args()
    table = Table(
        "step",
        "options",
        "direction",
        "GiB",
        "hidden",
        "by products",
        "waits, ms",
        "of the step, ms",
        "cap, GiB",
        "remat",
    )
    rows: list[dict[str, Any]] = []
    for name in CASES:
        for row in measure(name, lt.target(args.target)):
            rows.append(row)
            for direction in ("to host", "from host"):
                copies = row[direction]
                if copies["bytes"]:
                    figures = [f"{copies['bytes'] / 2**30:.2f}", f"{copies['hidden_share']:.1%}"]
                    figures.append(f"{copies['hidden_by_products']:.1%}")
                    figures += [f"{1e3 * seconds:.1f}" for seconds in (copies["waiting_seconds"], row["seconds"])]
                    figures += [f"{row['cap'] / 2**30:.2f}", str(row["rematerialised"])]
                    table.add_row(name, row["options"], direction, *figures)
    Console(width=140).print(table)
    write(args.json, {**header(f"host_copies.py --target {args.target}"), "label": "compiled, simulated", "rows": rows})


if __name__ == "__main__":
    main()
