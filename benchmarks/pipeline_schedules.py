"""Time and memory of every schedule in lockstep, versus a differentiated scan. Simulated; needs no device.

    python benchmarks/pipeline_schedules.py [--ranks 8] [--microbatches 64] [--json FILE] [--picture FILE]

Time is relative to the computation of the busiest rank. It is given for three ratios of F, I and W, the last of which
is that of recomputation, and for transfers of 0 and 0.1 of F. Memory is that of the fullest rank, in microbatches whose
residuals of all its stages are kept. `auto` appears twice: with its default limit (twice as many microbatches as ranks,
less one), and with as many microbatches as ranks, which is what 1F1B keeps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

from lowtide.pipeline import SCHEDULES, Costs, scan_makespan, schedule, simulate

RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0))
TWO_STAGES = {"looped-bfs", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v", "v-half", "v-min"}


def measure(num_ranks: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Simulate every schedule, ratio and transfer."""
    programs = [(name, None) for name in SCHEDULES] + [("auto", float(num_ranks))]
    rows: list[dict[str, Any]] = []
    for ratio in RATIOS:
        for communication in (0.0, 0.1):
            for name, limit in programs:
                chunks = 2 if name in TWO_STAGES else 1
                parts = dict(zip(("forward", "input", "weight"), (part / chunks for part in ratio), strict=True))
                costs = Costs(**parts, communication=communication, weight_residuals=1 / chunks)
                made = schedule(
                    name,
                    num_stages=chunks * num_ranks,
                    num_microbatches=num_microbatches,
                    costs=costs,
                    memory_limit=limit,
                )
                run = simulate(made, costs, lockstep=True)
                row = {"ratio": ratio, "communication": communication}
                label = name if limit is None else f"{name}, within {limit:g}"
                rows.append({**row, "schedule": label, "time": run.makespan / max(run.busy), "kept": max(run.peaks)})
                if name == "1f1b":
                    scan = scan_makespan(made, costs) / max(run.busy)
                    rows.append({**row, "schedule": "scan", "time": scan, "kept": float(num_microbatches)})
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return a table with a row for each schedule, and a column for each ratio and transfer."""
    found = {(row["schedule"], row["ratio"], row["communication"]): row for row in rows}
    cases = list(dict.fromkeys((row["ratio"], row["communication"]) for row in rows))
    made = Table(title=title)
    made.add_column("schedule")
    made.add_column("kept", justify="right")
    for ratio, communication in cases:
        made.add_column(":".join(f"{part:g}" for part in ratio) + f"\nsent {communication:g}", justify="right")
    for name in dict.fromkeys(row["schedule"] for row in rows):
        kept = max(found[name, *case]["kept"] for case in cases)
        made.add_row(name, f"{kept:g}", *(f"{found[name, *case]['time']:.3f}" for case in cases))
    return made


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time over memory, one panel per ratio."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(RATIOS), figsize=(12, 4.6), layout="constrained", sharey=True, sharex=True)
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    markers = dict(zip(names, "ovs^D<>pPXhd*1", strict=False))
    for axis, ratio in zip(axes, RATIOS, strict=True):
        for row in (one for one in rows if one["ratio"] == ratio and not one["communication"]):
            name = row["schedule"]
            color = "#1f7a8c" if name.startswith("auto") else "#c44e52" if name == "scan" else "#7d8894"
            size = 90 if name.startswith("auto") or name == "scan" else 45
            axis.scatter(row["kept"], row["time"], color=color, marker=markers[name], s=size, zorder=3, label=name)
        axis.set(
            xscale="log", title="F : I : W = " + " : ".join(f"{part:g}" for part in ratio), xlabel="microbatches kept"
        )
        axis.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
        axis.minorticks_off()
        axis.axhline(1, color="#c5ccd3", linewidth=1)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    axes[0].set_ylabel("time in lockstep, over the ideal")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Simulate, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="devices along the pipeline's axis")
    parser.add_argument("--microbatches", type=int, default=64, help="parts of a batch")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "pipeline_schedules.json", help="the file")
    parser.add_argument("--picture", type=Path, help="also draw a PNG (needs the report extra)")
    options = parser.parse_args()
    rows = measure(options.ranks, options.microbatches)
    title = f"{options.ranks} ranks, {options.microbatches} microbatches"
    Console(width=150).print(table(rows, f"{title}: time in lockstep over the ideal, and microbatches kept. Simulated"))
    sizes = {"label": "simulated", "num_ranks": options.ranks, "num_microbatches": options.microbatches}
    write(options.json, {**header("python benchmarks/pipeline_schedules.py"), **sizes, "rows": rows})
    if options.picture:
        draw(rows, title, options.picture)


if __name__ == "__main__":
    main()
