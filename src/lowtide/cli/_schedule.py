"""``lowtide schedule``: simulated cost of a pipeline schedule, and its drawing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..core import ConfigError
from ._output import wide_console

_WIDTH = 120
"""Width in characters of output to a file or a pipe."""
_PICTURES = {".png": "to_png", ".svg": "to_svg", ".json": "to_trace"}


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "schedule",
        help="simulate and draw a pipeline schedule",
        description="Simulate a pipeline schedule without a device: time, bubble and memory of each rank, for "
        "asynchronous ranks and for ranks in lockstep, as in one compiled program.",
    )
    add = parser.add_argument
    add(
        "name",
        metavar="NAME",
        nargs="?",
        default="auto",
        help="name of a schedule, such as 1f1b, zb-h1 or v-min, or a CSV file of PyTorch (default: auto, the best for "
        "these costs)",
    )
    add("--stages", type=int, metavar="S", help="number of stages of the model")
    add("--microbatches", type=int, metavar="M", help="number of microbatches of a batch")
    add(
        "--stages-per-rank",
        type=int,
        metavar="V",
        help="stages on each rank (default: 1, or 2 if the schedule needs it)",
    )
    add(
        "--costs",
        metavar="F,I,W[,C]",
        help="time of a stage's forward, input and weight pass, and of a transfer (default: 1,1,1,0)",
    )
    add("--memory-limit", type=float, metavar="N", help="limit of a rank, in residuals of one stage for one microbatch")
    add(
        "--lockstep",
        action=argparse.BooleanOptionalAction,
        help="draw ranks in lockstep (or asynchronous ranks), and let auto choose for them (default: draw asynchronous "
        "ranks, choose for lockstep, as value_and_grad runs them)",
    )
    add("--draw", metavar="FILE", help="write a picture (.png, .svg) or a Chrome trace (.json)")
    add("--csv", metavar="FILE", help="write the table of actions in PyTorch's format")
    add("--json", action="store_true", help="print the figures as JSON (default: a table and a drawing)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..pipeline import scan_makespan, simulate

    suffix = None if args.draw is None else Path(args.draw).suffix
    if suffix is not None and suffix not in _PICTURES:
        endings = ", ".join(_PICTURES)
        raise ConfigError(f"--draw {args.draw}: unknown picture format", hint=f"use a name that ends in {endings}")
    costs = _costs(args.costs)
    schedule = _make_schedule(args, costs)
    simulations = {"asynchronous": simulate(schedule, costs), "in lockstep": simulate(schedule, costs, lockstep=True)}
    simulation = simulations["in lockstep" if args.lockstep else "asynchronous"]
    if args.csv is not None:
        schedule.to_csv(args.csv)
    if suffix is not None:
        getattr(simulation, _PICTURES[suffix])(args.draw)
    if args.json:
        figures: dict[str, Any] = {mode: _figures(result) for mode, result in simulations.items()}
        scan = {"makespan": scan_makespan(schedule, simulation.costs), "peaks": _scan_peaks(simulation)}
        sys.stdout.write(json.dumps({**figures, "differentiated scan": scan}, indent=2) + "\n")
        return 0
    console = wide_console(_WIDTH)
    console.print(_table(simulations, scan_makespan(schedule, simulation.costs)))
    console.print(simulation)
    for path in (args.draw, args.csv):
        if path is not None:
            console.print(Text(f"written: {path}", style="dim"))
    return 0


def _make_schedule(args: argparse.Namespace, costs: Any) -> Any:
    from ..pipeline import SCHEDULES, Schedule, schedule

    model_flags = {"--stages": args.stages, "--microbatches": args.microbatches}
    if args.name not in SCHEDULES and Path(args.name).suffix == ".csv":
        rank_flags = {"--stages-per-rank": args.stages_per_rank, "--memory-limit": args.memory_limit}
        for flag, value in {**model_flags, **rank_flags}.items():
            if value is not None:
                raise ConfigError(f"{args.name} already defines {flag}", hint=f"leave {flag} out")
        return Schedule.from_csv(args.name)
    if args.name in SCHEDULES:  # otherwise the name is wrong, and `schedule` reports it
        for flag, value in model_flags.items():
            if value is None:
                example = f"lowtide schedule {args.name} --stages 4 --microbatches 8"
                raise ConfigError(f"{flag} is missing", hint=f"run {example}")
    # Without the flag, `auto` chooses for lockstep, because that is how `value_and_grad` runs a schedule.
    return schedule(
        args.name,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        stages_per_rank=args.stages_per_rank,
        costs=costs,
        memory_limit=args.memory_limit,
        lockstep=args.lockstep is not False,
    )


def _costs(text: str | None) -> Any:
    from ..pipeline import Costs

    try:
        numbers = [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0.0]
    if len(numbers) not in (0, 3, 4):
        raise ConfigError(f"--costs needs the numbers F,I,W or F,I,W,C, not {text!r}", hint="use --costs 1,1.1,0.9")
    return Costs(**dict(zip(("forward", "input", "weight", "communication"), numbers, strict=False)))


def _figures(simulation: Any) -> dict[str, Any]:
    schedule = simulation.schedule
    sizes = {name: getattr(schedule, name) for name in ("num_ranks", "num_stages", "num_microbatches")}
    names = ("makespan", "bubble", "steady_bubble", "utilization", "peaks", "num_transfers", "num_ticks")
    return {"schedule": schedule.name, **sizes, **{name: getattr(simulation, name) for name in names}}


def _scan_peaks(simulation: Any) -> list[float]:
    return simulation.costs.by_rank(simulation.schedule.placement, simulation.schedule.num_microbatches)


def _table(simulations: dict[str, Any], scan: float) -> Table:
    schedule = next(iter(simulations.values())).schedule
    title = (
        f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} microbatches"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("ranks")
    for name in ("time", "time / ideal", "bubble", "steady bubble", "utilization", "peak by rank"):
        table.add_column(name, justify="right")
    results = simulations.items()
    rows = {mode: (r.makespan, r.busy, r.bubble, r.steady_bubble, r.utilization, r.peaks) for mode, r in results}
    # A differentiated scan has no simulation. Its bubble is its time minus the work of the busiest rank. The steady
    # bubble is the same, because the loop of a batch ends before that of the next batch starts.
    lockstep = simulations["in lockstep"]
    scan_bubble, share = scan - max(lockstep.busy), sum(lockstep.busy) / (len(lockstep.busy) * scan)
    rows["differentiated scan"] = (scan, lockstep.busy, scan_bubble, scan_bubble, share, _scan_peaks(lockstep))
    for mode, (time, busy, bubble, steady_bubble, utilization, peaks) in rows.items():
        figures = (f"{time:g}", f"{time / max(busy):.2f}", f"{bubble:g}", f"{steady_bubble:g}")
        texts = [f"{peak:g}" for peak in peaks]
        peak_text = ", ".join(texts) if len(set(texts)) > 1 else f"{texts[0]} each"
        style = None if mode in simulations else "dim"
        table.add_row(mode, *figures, f"{100 * utilization:.1f} %", peak_text, style=style)
    return table
