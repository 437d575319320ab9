"""Bytes of one LoRA step on Llama shapes, naive beside ours, compiled for chips that are not here. Never run.

    python benchmarks/lora_step.py [--model 1b] [--model 8b] [--target v5p:2x2x1] [--picture docs/images/lora_step.png]

Both steps tune rank-16 adapters on all projections over a bfloat16 base with AdamW, 8 x 2048 tokens (1b) or 1 x 2048
(8b), every block recomputed in the backward pass, and the chunked loss. The naive one differentiates and optimises the
whole model with the base behind `stop_gradient`; ours differentiates the adapters. So the difference is only what
frozen weights cost. Every figure is compiled (XLA's own, for one device).
"""

from __future__ import annotations

import argparse
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


def measure(name: str, target: str) -> dict[str, Any]:
    """Compile both steps of a model for a target; their bytes per role."""
    config, batch_size = MODELS[name]
    dtype = jnp.bfloat16
    base = jax.eval_shape(lambda key: init(config, key=key, dtype=dtype, compute_dtype=dtype), jax.random.key(0))
    adapter = lt.lora.Config(rank=16, targets="layers/**/*_proj")
    model = lt.lora.add(base, adapter, key=jax.random.key(1))
    batch = {leaf: jax.ShapeDtypeStruct((batch_size, 2048), jnp.int32) for leaf in ("tokens", "labels")}
    arguments = (model, partial(loss, remat=True), optax.adamw(1e-4), "**/lora_*", batch)
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
    """A stacked bar for each step."""
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
    parser.add_argument("--picture", type=Path, help="also draw a PNG (needs the report extra)")
    args = parser.parse_args()
    rows = [measure(name, args.target) for name in args.model or MODELS]
    show(rows)
    command = f"python benchmarks/lora_step.py --target {args.target}"
    path = ROOT / "results" / f"lora_step-{args.target.replace(':', '-')}.json"
    write(path, {**header(command), "figures": "compiled", "rows": rows})
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
