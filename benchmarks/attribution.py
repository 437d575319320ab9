"""Share of a program's memory that has an owner: steps in many styles, compiled for four kinds of hardware.

    python benchmarks/attribution.py [--program NAME] [--target NAME] [--out FILE]

For each program the owners at the peak must add up exactly to XLA's total. `device_bytes` must equal argument + output
- alias + temp (+ code). The table shows how much is unattributed, how much is only known to be a temporary, and how
much of the heap is fragmentation. `_nested_programs.py` adds nested gradients, pooling, graphs, adjoints, scans and
caches. Every target runs in a separate process, because a process that compiled for a TPU keeps much memory. Every
figure is compiled; nothing runs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from _common import ROOT, header, write
from _nested_programs import NESTED
from _programs import PROGRAMS as STEPS
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import format_bytes

PROGRAMS = {**STEPS, **NESTED}
TARGETS = ("cpu", "v5e:2x2", "v5p:2x2x1", "h100")
EIGHT_DEVICES = {"v5e:2x2": "v5e:2x4", "v5p:2x2x1": "v5p:2x2x2", "h100": "h100:8"}
"""Targets for which the sharded step is compiled instead."""
MAX_UNATTRIBUTED = 0.02
MAX_TEMPORARIES = 0.25
"""Largest share of a nested program's peak that may be unattributed or a temporary."""
MAX_DIFFERENCE = 0.001
HOST_COPY = "copy from host memory"
"""A real GPU holds these copies, and XLA's total for a compile-only GPU leaves them out. The two totals may differ by
them.
"""


def measure(name: str, target_name: str) -> dict[str, Any]:
    """Compile one program for one target and compare its owners with XLA's figures."""
    make = PROGRAMS[name]
    goal = lt.target(EIGHT_DEVICES.get(target_name, target_name) if name == "fsdp" else target_name)
    job = make(**({"target": goal} if "target" in inspect.signature(make).parameters else {}))
    fn, args, roles = job.pop("fn"), job.pop("args"), job.pop("roles")
    started, before = time.perf_counter(), _max_rss()
    program = lt.memory.compile(fn, *args, target=goal, **job)
    compiled, peak_compile = time.perf_counter(), _max_rss()
    report = program.report(roles)
    stats = program.compiled.memory_analysis() if program.error is None else None
    device = report.device
    expected = device.argument_bytes + device.output_bytes - device.alias_bytes + device.temp_bytes
    roles_at_peak = report.peak_by_role
    return {
        "program": name,
        "target": goal.name,
        "fits": report.fits,
        "device_bytes": report.device_bytes,
        "code_bytes": device.code_bytes,
        "host_bytes": report.host_bytes,
        "sum_of_owners_bytes": sum(b.num_bytes for b in report.peak),
        "sum_of_host_owners_bytes": sum(b.num_bytes for b in report.host_peak),
        "xla_total_bytes": None if stats is None else _total(stats),
        "host_copies_bytes": sum(b.num_bytes for b in report.peak if b.operation == HOST_COPY),
        "difference": abs(report.device_bytes - device.code_bytes - expected) / report.device_bytes,
        "unattributed": roles_at_peak.get("unattributed", 0) / report.device_bytes,
        "temporaries": roles_at_peak.get("temporaries", 0) / report.device_bytes,
        "fragmentation": roles_at_peak.get("fragmentation", 0) / report.device_bytes,
        "by_role": roles_at_peak,
        "num_buffers": len(report.buffers),
        "compile_seconds": round(compiled - started, 2),
        "owners_seconds": round(time.perf_counter() - compiled, 2),
        "compile_rss_bytes": peak_compile - before,
        "owners_rss_bytes": _max_rss() - peak_compile,
        "notes": list(report.notes),
    }


def _total(stats: Any) -> int:
    """Return XLA's total for device and host together, because owners may move between the two but never vanish."""
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "generated_code_size_in_bytes")
    both = sum(getattr(stats, prefix + name) for prefix in ("", "host_") for name in names)
    return both - stats.alias_size_in_bytes - stats.host_alias_size_in_bytes


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def problems(row: dict[str, Any]) -> list[str]:
    """Return the promises that a row breaks; empty if it breaks none."""
    found: list[str] = []
    if row["sum_of_owners_bytes"] != row["device_bytes"] or row["sum_of_host_owners_bytes"] != row["host_bytes"]:
        found.append("owners do not add up")
    both = row["device_bytes"] + row["host_bytes"]
    if row["xla_total_bytes"] is not None and not 0 <= both - row["xla_total_bytes"] <= row["host_copies_bytes"]:
        found.append("not XLA's total")
    if row["difference"] > MAX_DIFFERENCE:
        found.append("not argument + output - alias + temp")
    if row["unattributed"] > MAX_UNATTRIBUTED:
        found.append("too much unattributed")
    if row["program"] in NESTED and row["unattributed"] + row["temporaries"] > MAX_TEMPORARIES:
        found.append("too many temporaries")
    return found


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Owners of the bytes at the peak (compiled)")
    columns = (
        "program",
        "target",
        "device",
        "host",
        "unattributed",
        "temporaries",
        "fragmentation",
        "compile",
        "owners",
        "holds",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("program", "target", "holds") else "right")
    for row in rows:
        table.add_row(
            row["program"],
            row["target"],
            format_bytes(row["device_bytes"]) + ("" if row["fits"] is not False else " (too much)"),
            format_bytes(row["host_bytes"]),
            f"{row['unattributed']:.3%}",
            f"{row['temporaries']:.1%}",
            f"{row['fragmentation']:.2%}",
            f"{row['compile_seconds']:.1f} s",
            f"{row['owners_seconds']:.1f} s",
            ", ".join(problems(row)) or "yes",
        )
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="append", choices=list(PROGRAMS), help="only this one; repeatable")
    parser.add_argument("--target", action="append", help=f"only this one; repeatable; default {' '.join(TARGETS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "attribution.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    programs, targets = options.program or list(PROGRAMS), options.target or list(TARGETS)
    if options.child:
        for name in programs:
            rows = json.loads(options.child.read_text()) if options.child.exists() else []
            options.child.write_text(json.dumps([*rows, measure(name, targets[0])]))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            child = Path(folder) / f"{target.replace(':', '_')}.json"
            chosen = [word for name in programs for word in ("--program", name)]
            command = [sys.executable, __file__, "--target", target, "--child", str(child), *chosen]
            subprocess.run(command, check=True)
            rows += json.loads(child.read_text())
    show(rows)
    write(options.out, {**header("python benchmarks/attribution.py"), "rows": rows})
    return int(any(problems(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
