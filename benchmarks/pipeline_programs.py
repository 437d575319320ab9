"""Gain of one program per stage over one program for all, if stages differ. Simulated; needs no device.

    python benchmarks/pipeline_programs.py [--ranks 8] [--microbatches 64] [--json FILE]

One program runs in lockstep: a tick lasts as long as its slowest rank. Separate programs wait only for each other's
results. Both use the schedule that `auto` finds for their execution mode, and keep at most twice as many microbatches
as ranks, less one. The stages differ in several ways: a longer stage, the head of a large vocabulary, half of them
frozen, chips of two speeds, and two kinds of stages. Kinds are for instance attention and mixtures of experts, or
recomputed and kept blocks. Time is relative to the computation of the busiest rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

from lowtide.pipeline import Costs, scan_makespan, schedule, simulate

RATIOS = ((1.0, 1.2, 0.8), (1.0, 2.0, 1.0))


def stages(ratio: tuple[float, float, float], num_ranks: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return F, I and W of every stage for each case."""
    equal = [ratio] * num_ranks
    forward, by_input, weight = ratio
    total = sum(ratio)

    def scaled(*factors: float) -> list[tuple[float, float, float]]:
        return [(factor * forward, factor * by_input, factor * weight) for factor in factors]

    half = num_ranks // 2
    early, late = (total / 2, total / 4, total / 4), (total / 4, total / 4, total / 2)
    return {
        "equal": equal,
        "one has 5 layers, the others 4": scaled(1.25, *[1.0] * (num_ranks - 1)),
        # For Llama-3-8B in eight stages, the head costs 0.6 of a stage's layers. Its forward and backward pass (3 F)
        # both run in I: 0.6 x 3 = 1.8 F.
        "the last has a head": [*equal[:-1], (forward, by_input + 1.8 * forward, weight)],
        "half of another kind": [*[early] * half, *[late] * half],
        "every other one of another kind": [early, late] * half,
        "half recomputed": [*[(forward, by_input + forward, weight)] * half, *equal[half:]],
        "the first half is frozen": [*[(forward, by_input, 0.01)] * half, *equal[half:]],
        "half on chips of half the speed": scaled(*[2.0] * half, *[1.0] * half),
    }


def measure(num_ranks: int, num_microbatches: int) -> list[dict[str, Any]]:
    """Simulate every ratio and case."""
    rows: list[dict[str, Any]] = []
    sizes: dict[str, Any] = {"num_stages": num_ranks, "num_microbatches": num_microbatches}
    for ratio in RATIOS:
        for case, each in stages(ratio, num_ranks).items():
            costs = Costs(**dict(zip(("forward", "input", "weight"), zip(*each, strict=True), strict=True)))
            row: dict[str, Any] = {"ratio": ratio, "case": case}
            for name, lockstep in (("one", True), ("many", False)):
                made = schedule(**sizes, costs=costs, lockstep=lockstep, memory_limit=2.0 * num_ranks - 1)
                run = simulate(made, costs, lockstep=lockstep)
                row[name] = run.makespan / max(run.busy)
                row[f"{name}_kept"] = max(run.peaks)
                row["scan"] = scan_makespan(made, costs) / max(run.busy)
            rows.append(row | {"gain": 1 - row["many"] / row["one"]})
    return rows


def main() -> None:
    """Simulate, print and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="devices along the pipeline's axis, an even number")
    parser.add_argument("--microbatches", type=int, default=64, help="parts of a batch")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "pipeline_programs.json", help="the file")
    options = parser.parse_args()
    rows = measure(options.ranks, options.microbatches)
    table = Table("F:I:W", "stages", title=f"{options.ranks} ranks, {options.microbatches} microbatches. Simulated")
    for name in ("a scan", "one program", "a program each", "gain"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = ":".join(f"{part:g}" for part in row["ratio"])
        figures = (f"{row[name]:.3f}" for name in ("scan", "one", "many"))
        table.add_row(ratio, row["case"], *figures, f"{row['gain']:.1%}")
    Console(width=120).print(table)
    sizes = {"label": "simulated", "num_ranks": options.ranks, "num_microbatches": options.microbatches}
    write(options.json, {**header("python benchmarks/pipeline_programs.py"), **sizes, "rows": rows})


if __name__ == "__main__":
    main()
