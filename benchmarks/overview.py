"""Draw the picture of the README from recorded results.

    python benchmarks/overview.py [--output docs/images/overview.png]

Left and middle: tokens per second and peak memory of LoRA and QLoRA, measured for PEFT and Lowtide by `sft_peft.py`
and `qlora_peft.py`. Right: bytes of one LoRA step, compiled for plain JAX and Lowtide by `lora_step.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU = "nvidia-h200"
CASES = {"LoRA, 8B": ("sft", "8b-4x2048-remat"), "QLoRA, 8B": ("qlora", "8b-qlora-4x2048-remat")}
LORA_STEP = "lora_step-v5p-2x2x1.json"
COLORS = ("#9aa5b1", "#0f8b8d")
Pair = tuple[float, float]


def measured(figure: str) -> dict[str, Pair]:
    """Return a figure of PEFT and of Lowtide for each case."""
    pairs: dict[str, Pair] = {}
    for label, (part, case) in CASES.items():
        rows = json.loads((RESULTS / "gpu" / GPU / f"{part}.json").read_text())["rows"]
        pairs[label] = (rows[f"{case}-peft"][figure], rows[f"{case}-lowtide"][figure])
    return pairs


def compiled() -> dict[str, Pair]:
    """Return the bytes of a LoRA step in plain JAX and in Lowtide for each model."""
    rows = json.loads((RESULTS / LORA_STEP).read_text())["rows"]
    return {
        f"LoRA, {row['model'].upper()}": (row["naive"]["device_bytes"], row["ours"]["device_bytes"]) for row in rows
    }


def draw_pairs(axes: Any, pairs: dict[str, Pair], other: str, form: str, title: str) -> None:
    """Draw two bars for each pair, the other tool first."""
    for number, (label, pair) in enumerate(pairs.items()):
        for offset, figure in enumerate(pair):
            position = number * 2.6 + offset
            name = ("Lowtide" if offset else other) if not number else None
            axes.bar(position, figure, 0.92, color=COLORS[offset], label=name)
            axes.text(position, figure, form.format(figure), ha="center", va="bottom", fontsize=9)
        axes.text(number * 2.6 + 0.5, 0, f"\n{label}", ha="center", va="center_baseline", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(y=0.12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def draw(path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def gib(pairs: dict[str, Pair]) -> dict[str, Pair]:
        return {label: (pair[0] / 2**30, pair[1] / 2**30) for label, pair in pairs.items()}

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    title = "Tokens per second, H200\n(measured, higher is better)"
    draw_pairs(axes[0], measured("tokens_per_second"), "PEFT", "{:,.0f}", title)
    title = "Peak memory, H200\n(measured, lower is better)"
    draw_pairs(axes[1], gib(measured("peak_bytes")), "PEFT", "{:.1f} GiB", title)
    title = "Bytes of a step, TPU v5p\n(compiled, lower is better)"
    draw_pairs(axes[2], gib(compiled()), "AdamW + stop_gradient", "{:.1f} GiB", title)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/overview.png", help="default: %(default)s")
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
