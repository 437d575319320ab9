"""Bytes of one LoRA step on Llama shapes, naive versus ours, compiled for absent chips. Never run.

    python benchmarks/lora_step.py [--model 1b] [--model 8b] [--target v5p:2x2x1] [--further]
        [--picture docs/images/lora_step.png]

Both steps tune rank-16 adapters on all projections over a bfloat16 base with AdamW, for 8 x 2048 tokens (1b) or 1 x
2048 (8b). Both recompute every block in the backward pass and chunk the loss. The naive step differentiates and
optimises the whole model with the base behind `stop_gradient`; ours differentiates only the adapters. So the difference
is exactly the cost of the frozen weights. Every figure is compiled (XLA's own, for one device).

`--further`: ours with optional techniques that save more: smaller tiles (`tile_tokens` of a decoder), groups of layers
that are recomputed together (`layers_per_remat`), layer inputs on the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from _common import ROOT, header, write
from _decoders import LLAMA_1B, LLAMA_8B
from _losses import offloaded_loss
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import format_bytes
from lowtide.models import init, loss
from lowtide.train import analyze_naive, analyze_step

MODELS = {"1b": (LLAMA_1B, 8), "8b": (LLAMA_8B, 1)}
ROLES = {
    "frozen": "frozen weights",
    "trainable": "adapters",
    "optimizer": "optimizer state",
    "temporaries": "activations, gradients",
    "rest": "everything else",
}
COLORS = {
    "frozen": "#5b7c99",
    "trainable": "#2a9d8f",
    "optimizer": "#e76f51",
    "temporaries": "#e9c46a",
    "rest": "#b0b0b0",
}
FURTHER: dict[str, tuple[int | None, dict[str, Any]]] = {
    "tiles of 2,048 tokens": (2048, {}),
    "groups of 4 layers": (None, {"layers_per_remat": 4}),
    "both": (2048, {"layers_per_remat": 4}),
    "layers' inputs on the host": (None, {"inputs": "host"}),
    "that, tiles of 2,048 tokens": (2048, {"inputs": "host"}),
}
"""Tokens per tile, and the options of the loss."""


def step(name: str) -> tuple[Any, Any, str, Any, dict[str, Any]]:
    """Return the arguments of a step: model with adapters, loss, optimizer, trainable pattern and batch."""
    config, batch_size = MODELS[name]
    dtype = jnp.bfloat16
    base = jax.eval_shape(lambda key: init(config, key=key, dtype=dtype, compute_dtype=dtype), jax.random.key(0))
    model = lt.lora.add(base, lt.lora.Config(rank=16, targets="layers/**/*_proj"), key=jax.random.key(1))
    batch = {leaf: jax.ShapeDtypeStruct((batch_size, 2048), jnp.int32) for leaf in ("tokens", "labels")}
    return model, partial(loss, remat=True), optax.adamw(1e-4), "**/lora_*", batch


def measure(name: str, target: str) -> dict[str, Any]:
    """Compile both steps of a model for a target; return their bytes per role."""
    arguments, batch_size = step(name), MODELS[name][1]
    reports = {
        "naive": analyze_naive(*arguments, target=target),
        "ours": analyze_step(*arguments, target=target),
    }
    row: dict[str, Any] = {"model": name, "target": target, "batch_size": batch_size, "seq_len": 2048}
    for side, report in reports.items():
        roles = {role: report.by_role[role] for role in ROLES if role != "rest"}
        row[side] = {
            **roles,
            "rest": report.device_bytes - sum(roles.values()),
            "device_bytes": report.device_bytes,
            "fits": report.fits,
        }
    return row


def further(name: str, target: str) -> dict[str, dict[str, Any]]:
    """Compile ours with further techniques; return the bytes of device and host."""
    model, _, *rest = step(name)
    found: dict[str, dict[str, Any]] = {}
    for said, (tile_tokens, options) in FURTHER.items():
        fn = partial(offloaded_loss, **{"remat": True, "inputs": "device", **options})
        report = analyze_step(dataclasses.replace(model, tile_tokens=tile_tokens), fn, *rest, target=target)
        found[said] = {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes}
    return found


def show_further(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "target", "with", "device", "host", title="Ours, and what takes off more")
    for row in rows:
        table.add_row(row["model"], row["target"], "", format_bytes(row["ours"]["device_bytes"]), "0 B")
        for said, sizes in row["further"].items():
            table.add_row("", "", said, *(format_bytes(sizes[f"{place}_bytes"]) for place in ("device", "host")))
        table.add_section()
    Console().print(table)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="One LoRA step, compiled bytes on one device")
    for column in ("model", "target", "role", "naive", "ours"):
        table.add_column(column, justify="right" if column in ("naive", "ours") else "left")
    for row in rows:
        for role, label in ROLES.items():
            table.add_row("", "", label, *(format_bytes(row[side][role]) for side in ("naive", "ours")))
        totals = (f"[bold]{format_bytes(row[side]['device_bytes'])}" for side in ("naive", "ours"))
        table.add_row(row["model"], row["target"], "total", *totals, end_section=True)
    Console().print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a stacked bar for each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.6 + 1.15 * len(rows)), layout="constrained")
    labels: list[str] = []
    for number, row in enumerate(rows):
        for offset, side in enumerate(("naive", "ours")):
            left, y = 0.0, -(number * 2.5 + offset)
            for role, label in ROLES.items():
                width = row[side][role] / 2**30
                axes.barh(y, width, 0.82, left, color=COLORS[role], label=label if not labels else None)
                left += width
            axes.text(left, y, f"  {format_bytes(row[side]['device_bytes'])}", va="center")
            name = f"Llama {row['model'].upper()}, {row['batch_size']} × {row['seq_len']}"
            axes.text(
                -0.6, y, f"{name}  {'AdamW + stop_gradient' if side == 'naive' else 'Lowtide'}", va="center", ha="right"
            )
            labels.append(side)
    axes.set_yticks([])
    axes.set_xlabel(f"GiB on one device ({rows[0]['target']}, compiled ahead of time)")
    axes.set_xlim(0, max(row["naive"]["device_bytes"] for row in rows) / 2**30 * 1.12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: both")
    parser.add_argument("--target", default="v5p:2x2x1", help="what to compile for")
    parser.add_argument("--further", action="store_true", help="also with what takes off more")
    parser.add_argument("--picture", type=Path, help="also draw a PNG (needs the report extra)")
    args = parser.parse_args()
    rows = [measure(name, args.target) for name in args.model or MODELS]
    show(rows)
    if args.further:
        rows = [{**row, "further": further(row["model"], args.target)} for row in rows]
        show_further(rows)
    chosen = "".join(f" --model {name}" for name in args.model or ())
    command = f"python benchmarks/lora_step.py{chosen} --target {args.target}{' --further' * args.further}"
    path = ROOT / "results" / f"lora_step-{args.target.replace(':', '-')}{'-further' * args.further}.json"
    write(path, {**header(command), "figures": "compiled", "rows": rows})
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
