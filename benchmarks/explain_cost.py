"""Cost of `lowtide explain` in addition to the compilation: seconds and host memory, for a step on 8B shapes.

    python benchmarks/explain_cost.py [--program lora_8b] [--target v5e:2x4]... [--repeats 3]

Each repeat runs two fresh processes for every target, one after the other, and the tables show the median:

- compile: a Python process that imports the file, creates the job and calls `lowtide.memory.compile`, nothing more;
- explain: the command with `--html`, `--png` and `--json`, from its start to its end.

Both start Python and import JAX, so the difference is the cost of the explanation: owners, terminal report and views.
Memory is the largest resident set of the process, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

from lowtide.core import format_bytes

LIMIT_SECONDS, LIMIT_BYTES = 60.0, 2 * 2**30
_COMPILE = """
import sys
import lowtide as lt
sys.path.insert(0, sys.argv[1])
import _programs
target = lt.memory.target(sys.argv[3])
job = lt.memory.Job.make(_programs.PROGRAMS[sys.argv[2]], target=target)
lt.memory.compile(
    job.fn, *job.args, target=target, donate_argnums=job.donate_argnums, static_argnums=job.static_argnums, **job.kwargs
)
"""


def compile_command(program: str, target: str, folder: Path) -> list[str]:
    """Return the command that only compiles."""
    return [sys.executable, "-c", _COMPILE, str(ROOT), program, target]


def explain_command(program: str, target: str, folder: Path) -> list[str]:
    """Return the command with every view."""
    views = [f"--{kind}={folder / f'report.{kind}'}" for kind in ("html", "png", "json")]
    return [
        sys.executable,
        "-m",
        "lowtide",
        "explain",
        f"{ROOT / '_programs.py'}:{program}",
        "--target",
        target,
        *views,
    ]


def measure(command: list[str]) -> tuple[float, int]:
    """Return the seconds and the largest resident bytes of a command.

    A separate process waits for the command, because the kernel keeps one maximum for all children of a process.
    """
    # `RUSAGE_CHILDREN` is the maximum over all children, so the waiting process may have only one.
    script = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script, *command], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def run(program: str, target: str, repeats: int) -> dict[str, Any]:
    """Return the medians of both commands, and the sizes of the views."""
    found: dict[str, list[tuple[float, int]]] = {"compile": [], "explain": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(repeats):
            for what, command in (("compile", compile_command), ("explain", explain_command)):
                found[what].append(measure(command(program, target, folder)))
        views = {f"{file.suffix[1:]}_bytes": file.stat().st_size for file in sorted(folder.glob("report.*"))}
    seconds = {what: statistics.median(s for s, _ in rows) for what, rows in found.items()}
    peaks = {what: int(statistics.median(b for _, b in rows)) for what, rows in found.items()}
    return {
        "program": program,
        "target": target,
        "compile": {"seconds": round(seconds["compile"], 2), "peak_rss_bytes": peaks["compile"]},
        "explain": {"seconds": round(seconds["explain"], 2), "peak_rss_bytes": peaks["explain"]},
        "added_seconds": round(seconds["explain"] - seconds["compile"], 2),
        "added_bytes": peaks["explain"] - peaks["compile"],
        "views": views,
        "repeats": {what: [[round(s, 2), b] for s, b in rows] for what, rows in found.items()},
    }


def main() -> None:
    """Measure, print and write the raw result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--program", default="lora_8b", help="a name of _programs.py (default: lora_8b)")
    parser.add_argument("--target", action="append", help="may be repeated (default: v5e:2x4 and h100)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind (default: 3)")
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "explain_cost.json", help="the raw result")
    args = parser.parse_args()
    rows = [run(args.program, target, args.repeats) for target in args.target or ["v5e:2x4", "h100"]]
    table = Table(title=f"What explaining {args.program} adds to compiling it, median of {args.repeats}")
    for column in ("target", "compile", "explain", "added", "compile RSS", "explain RSS", "added RSS", "page"):
        table.add_column(column, justify="left" if column == "target" else "right", no_wrap=True)
    for row in rows:
        seconds = (f"{row[key]['seconds']:.1f} s" for key in ("compile", "explain"))
        peaks = (format_bytes(row[key]["peak_rss_bytes"]) for key in ("compile", "explain"))
        added = f"{row['added_seconds']:.1f} s", format_bytes(row["added_bytes"])
        table.add_row(row["target"], *seconds, added[0], *peaks, added[1], format_bytes(row["views"]["html_bytes"]))
    Console(width=140).print(table)
    within = all(row["added_seconds"] <= LIMIT_SECONDS and row["added_bytes"] <= LIMIT_BYTES for row in rows)
    machine = {"cpus": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 2)}
    limits = {"added_seconds": LIMIT_SECONDS, "added_bytes": LIMIT_BYTES, "held": within}
    write(
        args.json,
        {
            **header(" ".join(["python benchmarks/explain_cost.py", *sys.argv[1:]])),
            "machine": machine,
            "limits": limits,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
