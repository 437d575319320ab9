"""Bytes of one step over one sequence, from 4,096 to 131,072 tokens, and the effect of each technique. Never run.

    python benchmarks/long_context.py [--part lengths] [--part reach] [--part ladder] [--part groups] [--part kernel]
        [--picture FILE]

`lengths`: Llama 3.1 8B's shapes in nf4 with embedding and head in 8 bits, rank 32 on all linear layers, layer inputs on
the host, compiled for one v5e. Each row also has the bytes per additional token relative to the previous length, and an
estimate from the arrays of one layer. In attention's backward pass these are the layer's input, the incoming cotangent,
the queries, the cotangent of attention's result, keys and values, and their gradients in float32. The gradient of the
queries reuses their memory. The layer inputs are on the host, in addition to these.

`reach`: Llama 3.1 8B's shapes, one row. One step is the QLoRA step of `longest_sequence.py` (embedding and head in
bfloat16), 400,000 tokens on one H100. The input of every layer, or only of every fourth layer, is on the host. The
other is AdamW on all parameters in float32, updated inside the backward pass, 262,144 tokens on one v5e, with
everything on the host; it needs more host memory than a v5e has.

`ladder`: one LoRA step of Llama 3.2 1B's shapes, 4 x 4096 tokens, compiled for one v5p. It starts with all scores, all
logits and everything kept, and each row adds a technique. FLOPs are counted on the traced program and bytes accessed on
the compiled one; the body of a loop counts as often as it runs.

`groups`: saving and cost of `layers_per_remat`. One case is LoRA on Llama 3 8B's shapes, 1 x 2048 tokens, on an H100
and a v5p. The other is a long row of the QLoRA of `lengths` on one v5e, with the inputs of the groups on the host.

`kernel`: attention alone, forward and backward, one row of 32 query heads and 8 key/value heads of 128, compiled for
one v5e: by the kernel for TPUs, the default there, and by blocks of XLA operations. The bytes that the kernel reads
repeatedly are counted from the blocks that it visits: keys and values in the forward pass, and either these or the
arrays of the queries in the backward pass.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
import qlora
from _common import ROOT, header, write
from _decoders import LLAMA_1B, LLAMA_8B
from _ladder import RUNGS, Rung
from _losses import offloaded_loss

import lowtide as lt
from lowtide.core import format_bytes
from lowtide.jaxprs import jaxpr_flops
from lowtide.models import init
from lowtide.train import analyze_step

Tree = Any
LENGTHS = (4096, 8192, 16384, 32768, 65536, 100352, 131072)
BASE = "nf4, embedding and head int8"
ROWS, LENGTH = 4, 4096


# --- lengths -------------------------------------------------------------------------------------------------------


def arithmetic_bytes() -> int:
    """Return the bytes per token that a layer of the 8 B needs in attention's backward pass, its input included."""
    wide, narrow = LLAMA_8B.hidden_size, LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim
    return 2 * (4 * wide + 2 * narrow) + 4 * 2 * narrow


def lengths(target: str) -> list[dict[str, Any]]:
    """Compile one row for each length."""
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        model, _ = qlora.shapes(LLAMA_8B, BASE, lt.lora.Config(rank=32, targets="all-linear"), 1)
        names = ("tokens", "labels", "segment_ids", "positions")
        batch = {name: jax.ShapeDtypeStruct((1, length), jnp.int32) for name in names}
        begin = time.perf_counter()
        fn = partial(offloaded_loss, remat=True, inputs="host")
        report = analyze_step(model, fn, optax.adamw(1e-4), "**/lora_*", batch, target=target)
        row: dict[str, Any] = {
            "tokens": length,
            "device_bytes": report.device_bytes,
            "host_bytes": report.host_bytes,
            "temp_bytes": report.device.temp_bytes,
            "fits": report.fits,
            "compile_seconds": time.perf_counter() - begin,
        }
        if rows:
            row["bytes_a_token_more"] = (row["temp_bytes"] - rows[-1]["temp_bytes"]) / (length - rows[-1]["tokens"])
            row["of_arithmetic"] = row["bytes_a_token_more"] / arithmetic_bytes()
        rows.append(row)
        print(
            f"{length:>8,} tokens: {format_bytes(row['device_bytes'])} on the device, "
            f"{format_bytes(row['host_bytes'])} on the host, {row.get('bytes_a_token_more', 0) / 1024:.1f} KiB a token "
            f"more ({row.get('of_arithmetic', 0):.0%} of the arithmetic)",
            flush=True,
        )
    return rows


# --- reach ---------------------------------------------------------------------------------------------------------


def reach(_: str) -> list[dict[str, Any]]:
    """Compile one row for each step over a long sequence."""
    rows: list[dict[str, Any]] = []
    model, _ = qlora.shapes(LLAMA_8B, "nf4", lt.lora.Config(rank=32, targets="all-linear"), 1)
    for size in (1, 4):
        fn = partial(offloaded_loss, remat=True, layers_per_remat=size, inputs="host")
        report = analyze_step(model, fn, optax.adamw(1e-4), "**/lora_*", _long(400_000), target="h100")
        rows.append(_reached("QLoRA, rank 32", 400_000, report, layers_per_remat=size))
    model = jax.eval_shape(partial(init, LLAMA_8B, compute_dtype=jnp.bfloat16), key=jax.random.key(0))
    place: dict[Any, Any] = dict.fromkeys(("layers", "outer", "opt_state", "inputs"), "host")
    step = lt.offload.layerwise_step(model.stack, optax.adamw(1e-5), place=place)
    state, frozen = step.init(model.outer, model.layers)
    report = lt.memory.analyze(step, state, frozen, _long(262_144), target="v5e:1x1", donate_argnums=0)
    return [*rows, _reached("all parameters, float32", 262_144, report)]


def _long(length: int) -> Tree:
    return {leaf: jax.ShapeDtypeStruct((1, length), jnp.int32) for leaf in ("tokens", "labels")}


def _reached(trains: str, length: int, report: Any, **about: Any) -> dict[str, Any]:
    row = {"trains": trains, "target": report.target.name, "tokens": length, **about}
    row |= {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes, "fits": report.fits}
    print(
        f"{', '.join(f'{name} {value}' for name, value in row.items() if not name.endswith('bytes'))}: "
        f"{format_bytes(report.device_bytes)} on the device, {format_bytes(report.host_bytes)} on the host",
        flush=True,
    )
    return row


# --- ladder --------------------------------------------------------------------------------------------------------


def ladder(target: str) -> list[dict[str, Any]]:
    """Compile one row for each technique, in addition to the earlier ones."""
    rows = [_rung(rung, target) for rung in RUNGS.values()]
    for row in rows:
        print(
            f"{row['step']:32} {format_bytes(row['device_bytes']):>10} on the device, "
            f"{format_bytes(row['host_bytes']):>8} on the host, {row['flops'] / 1e12:.1f} TFLOP "
            f"({row['flops'] / rows[0]['flops']:.2f} x), {row['bytes_accessed'] / 1e9:.0f} GB moved "
            f"({row['bytes_accessed'] / rows[0]['bytes_accessed']:.2f} x)",
            flush=True,
        )
    return rows


def _rung(rung: Rung, target: str) -> dict[str, Any]:
    make = partial(init, LLAMA_1B, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    model = jax.eval_shape(lambda: rung.adapted(make(key=jax.random.key(0)), jax.random.key(1)))
    batch = {leaf: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for leaf in ("tokens", "labels")}
    return {"step": rung.said, **_measured(model, rung.loss, batch, target, rung.around)}


def _measured(
    model: Any, fn: Callable[..., Any], batch: Tree, target: str, around: Callable[[], Any] = contextlib.nullcontext
) -> dict[str, Any]:
    """Compile an adapter step, and count its FLOPs and bytes."""
    trainable, frozen = lt.partition(model, "**/lora_*")

    def gradients(trainable: Tree, frozen: Tree, batch: Tree) -> Tree:
        return jax.value_and_grad(lambda part: fn(lt.combine(part, frozen), batch)[0])(trainable)

    goal = lt.target(target)
    with around():
        begin = time.perf_counter()
        report = analyze_step(model, fn, optax.adamw(1e-4), "**/lora_*", batch, target=target)
        seconds = time.perf_counter() - begin
        program = lt.memory.compile(gradients, trainable, frozen, batch, target=goal)
        with jax.default_device(goal.devices()[0]):
            flops = jaxpr_flops(jax.make_jaxpr(gradients)(trainable, frozen, batch))
    return {
        "device_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
        "temp_bytes": report.device.temp_bytes,
        "flops": flops,
        "bytes_accessed": program.bytes_accessed,
        "compile_seconds": seconds,
    }


# --- groups --------------------------------------------------------------------------------------------------------


def groups(_: str) -> list[dict[str, Any]]:
    """Compile one row for each number of layers that are recomputed together."""
    rows: list[dict[str, Any]] = []
    cases = (
        ("bfloat16", "h100", 2048, "device", (1, 2, 4, 8)),
        ("bfloat16", "v5p:1x1x1", 2048, "device", (1, 4)),
        (BASE, "v5e:1x1", 100352, "host", (1, 4)),
    )
    for base, target, length, place, sizes in cases:
        if base == BASE:
            model, _ = qlora.shapes(LLAMA_8B, BASE, lt.lora.Config(rank=32, targets="all-linear"), 1)
        else:
            make = partial(init, LLAMA_8B, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
            adapter = lt.lora.Config(rank=16, targets="layers/**/*_proj")
            model = lt.lora.add(jax.eval_shape(make, key=jax.random.key(0)), adapter, key=jax.random.key(1))
        batch = {leaf: jax.ShapeDtypeStruct((1, length), jnp.int32) for leaf in ("tokens", "labels")}
        for size in sizes:
            fn = partial(offloaded_loss, remat=True, layers_per_remat=size, inputs=place)
            row = {"base": base, "target": target, "tokens": length, "inputs": place, "layers_per_remat": size}
            rows.append({**row, **_measured(model, fn, batch, target)})
            sizes_of = {side: format_bytes(rows[-1][f"{side}_bytes"]) for side in ("device", "host")}
            print(
                f"{base}, {target}, {length:,} tokens, inputs on the {place}, groups of {size}: "
                f"{sizes_of['device']} on the device, {sizes_of['host']} on the host, "
                f"{rows[-1]['flops'] / 1e12:.1f} TFLOP, {rows[-1]['bytes_accessed'] / 1e9:.0f} GB moved",
                flush=True,
            )
    return rows


# --- kernel --------------------------------------------------------------------------------------------------------


def kernel(target: str) -> list[dict[str, Any]]:
    """Compile one row for each length, with the bytes that kernel and blocks move."""
    heads, shared, dim = 32, 8, 128
    rows: list[dict[str, Any]] = []
    for length in (2048, 8192, 32768):
        shapes = [jax.ShapeDtypeStruct((1, length, n, dim), jnp.bfloat16) for n in (heads, shared, shared, heads)]
        row: dict[str, Any] = {"tokens": length}
        for name in ("splash", "blocks"):

            def both(q: Any, k: Any, v: Any, dout: Any, name: Any = name) -> Any:
                out, pullback = jax.vjp(partial(lt.ops.attention, implementation=name), q, k, v)
                return out, pullback(dout)

            program = lt.memory.compile(both, *shapes, target=target)
            row[f"{name}_bytes_accessed"] = program.bytes_accessed
            row[f"{name}_temp_bytes"] = program.report().device.temp_bytes
        block = 512 if length < 4096 else 1024
        visited = (length // block) * (length // block + 1) // 2
        row["splash_read_again_bytes"] = 3 * heads * visited * 2 * block * dim * 2
        rows.append(row)
        total = row["splash_bytes_accessed"] + row["splash_read_again_bytes"]
        print(
            f"{length:>8,} tokens: kernel {total / 1e9:.2f} GB, blocks {row['blocks_bytes_accessed'] / 1e9:.2f}",
            flush=True,
        )
    return rows


# --- picture and files ---------------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]], path: Path, target: str) -> None:
    """Draw device and host bytes over the length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens = [row["tokens"] / 1024 for row in rows]
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for side, label, color in (("device", "device", "#2a9d8f"), ("host", "host (what enters each layer)", "#e9c46a")):
        axes.plot(tokens, [row[f"{side}_bytes"] / 2**30 for row in rows], "o-", color=color, label=label)
    usable = lt.target(target).device_bytes
    if usable is not None:
        axes.axhline(usable / 2**30, color="#e76f51", linewidth=1)
        axes.text(tokens[0], usable / 2**30, f"usable memory of a {target.partition(':')[0]}", va="bottom")
    axes.set_xlabel("tokens of one sequence, in 1,024")
    axes.set_ylabel("GiB, compiled ahead of time")
    axes.set_ylim(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


PARTS: dict[str, tuple[Callable[[str], list[dict[str, Any]]], str]] = {
    "lengths": (lengths, "v5e:1x1"),
    "reach": (reach, "h100, v5e:1x1"),
    "ladder": (ladder, "v5p:1x1x1"),
    "groups": (groups, "v5e:1x1"),
    "kernel": (kernel, "v5e:1x1"),
}


def main() -> None:
    """Compile, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: all")
    parser.add_argument("--picture", type=Path, help="also draw the lengths (needs the report extra)")
    options = parser.parse_args()
    for part in options.part or PARTS:
        measure, target = PARTS[part]
        rows = measure(target)
        content = {"figures": "compiled", "target": target, "rows": rows}
        if part == "lengths":
            content["arithmetic_bytes_a_token"] = arithmetic_bytes()
        write(
            ROOT / "results" / f"long_context-{part}.json",
            {**header(f"python benchmarks/long_context.py --part {part}"), **content},
        )
        if part == "lengths" and options.picture:
            draw(rows, options.picture, target)


if __name__ == "__main__":
    main()
