"""Shared code of the parts of a GPU day: one process per case, results that survive a kill, and the clock.

A part is a script that declares its cases and calls `main`:

    def step(rehearsal: bool) -> dict[str, Any]:  # one JSON row
        ...

    if __name__ == "__main__":
        main("lora", {"1b": step}, __doc__, minutes={"1b": 3}, needs={"peft": ["torch", "peft"]})

The parent never starts a JAX backend, because that would take the device's memory from its cases. Every case starts
with a clean allocator. The result file is replaced as a whole after every case. This file imports only the standard
library.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from _overlap import overlap as overlap
from _processes import check_child as check_child
from _processes import run as run
from _processes import run_child as run_child

ROOT = Path(__file__).resolve().parent
SRC = ROOT.parent / "src"
RESULTS = ROOT / "results" / "gpu"
MINUTES = 5.0
"""Default limit of a case."""
ENOUGH = 0.25
"""A case only starts while at least this share of its time limit is left."""
TAIL_LINES = 30
"""Number of lines of standard error that the row of a failed case keeps."""
MEASURED = ("src/lowtide", "benchmarks/*.py")
DISTRIBUTIONS = (
    *("lowtide", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("numpy", "optax", "flax", "equinox", "orbax-checkpoint", "torch", "transformers", "peft"),
)

if importlib.util.find_spec("lowtide") is None:
    sys.path.insert(0, str(SRC))

Row = dict[str, Any]
Case = Callable[[bool], Row]


# --- result files --------------------------------------------------------------------------------------------------


def write(path: Path, content: Row) -> None:
    """Write JSON atomically, with a temporary file that replaces the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read_result(path: Path) -> Row:
    """Return the content of a part's file, or nothing without a file. Exit if the file is not the result of a part."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict) or (content and not {"device_kind", "rehearsal", "rows"} <= content.keys()):
        raise SystemExit(f"{path} is not the result of a part: move it away, and call again")
    return content


def home_of(device_kind: str, rehearsal: bool) -> Path:
    """Return the folder for the results of a kind of device; for a rehearsal, a new temporary folder."""
    if rehearsal:
        return Path(tempfile.mkdtemp(prefix="lowtide-rehearsal-"))
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")


# --- what a result needs to be compared later ----------------------------------------------------------------------


def gpu() -> dict[str, Any]:
    """Return name, driver and memory of the first GPU, as `nvidia-smi` prints them; empty without a GPU."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    words = [word.strip() for word in lines[0].split(",")] if lines else []
    return {**dict(zip(fields, words, strict=False)), "count": len(lines)} if words else {}


def header(part: str, command: str, rehearsal: bool) -> Row:
    """Return hardware, versions, commit and date."""
    card = {} if rehearsal else gpu()
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        **{"part": part, "command": command, "rehearsal": rehearsal, "complete": False, **moment()},
        "python": platform.python_version(),
        "versions": versions,
        **{"device_kind": card.get("name", "cpu"), "num_devices": card.get("count", 1), "gpu": card},
        "host": {
            "num_cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "machine": platform.machine(),
        },
    }


def moment() -> Row:
    """Return the date, the commit, the last commit of the measured code, and whether that code has uncommitted changes.

    None means unknown. A copy without Git names its commit in ``LOWTIDE_COMMIT``. If the copy lies in another
    repository, that repository's commit is ignored.
    """
    now, named = datetime.datetime.now(tz=datetime.UTC), os.environ.get("LOWTIDE_COMMIT")
    top = _git("rev-parse", "--show-toplevel")
    is_own = not named and top is not None and Path(top).resolve() == ROOT.parent
    changes = _git("status", "--porcelain", "--", *MEASURED) if is_own else None
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": named or (_git("rev-parse", "HEAD") if is_own else None),
        "code_commit": (_git("log", "-1", "--format=%H", "--", *MEASURED) or None) if is_own else None,
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def code_of(row: Mapping[str, Any]) -> str | None:
    """Return the last commit of the measured code; None if it is unknown or has uncommitted changes."""
    return None if row.get("uncommitted_changes") else row.get("code_commit") or row.get("commit")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def environment(rehearsal: bool, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a part's process: this checkout's library, and the GPU unless this is a rehearsal."""
    paths = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = os.environ.get("JAX_PLATFORMS", "")
    platforms = "cpu" if rehearsal else inherited if {"cuda", "gpu"} & {*inherited.split(",")} else "cuda,cpu"
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": platforms, "PYTHONUNBUFFERED": "1", **(extra or {})}


# --- the command line of a part ------------------------------------------------------------------------------------


def main(
    part: str,
    cases: Mapping[str, Case],
    doc: str | None,
    *,
    minutes: Mapping[str, float] | None = None,
    needs: Mapping[str, Sequence[str]] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Run the cases of a part, each in its own process, and keep the rows that they return.

    A rehearsal runs all cases in this process, because a CPU has no allocator to keep clean.

    Args:
        part: Name of the part; the file is ``results/gpu/<device>/<part>.json``.
        cases: Cases by name, the most important first. A case receives whether this is a rehearsal, and returns a JSON
            row.
        doc: Docstring of the script.
        minutes: Time limits of cases for which `MINUTES` is not right.
        needs: Modules that a case needs. If one is missing, the case does not run, and its row names the module.
        env: Environment variables of a case, such as ``XLA_PYTHON_CLIENT_PREALLOCATE``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(cases), metavar="NAME", help="only this; repeatable")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of the raw result")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="limit of all cases together")
    parser.add_argument("--again", action="store_true", help="measure finished cases again")
    parser.add_argument("--stale", action="store_true", help="measure cases of other code again")
    parser.add_argument("--child", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        write(options.child, attempt(cases[options.case[0]], rehearsal=False))
        return
    script, deadline = Path(sys.argv[0]).resolve(), time.monotonic() + 60 * options.minutes
    head = header(part, f"python benchmarks/{script.name}{' --rehearse' * options.rehearse}", options.rehearse)
    path: Path = options.json or home_of(head["device_kind"], options.rehearse) / f"{part}.json"
    before = read_result(path)
    _check_call(part, options, head, before, path)
    rows: dict[str, Row] = {name: row for name, row in before.get("rows", {}).items() if name in cases}
    source = {"versions": head["versions"], "driver": head["gpu"].get("driver_version")}
    failed = False
    for name in options.case or cases:
        is_measured, left = rows.get(name, {}).get("ok") is True, deadline - time.monotonic()
        is_stale = options.stale and code_of(rows.get(name, {})) != code_of(head)
        limit = 60 * (minutes or {}).get(name, MINUTES)
        absent = [module for module in (needs or {}).get(name, ()) if importlib.util.find_spec(module) is None]
        if is_measured and not options.again and not is_stale:
            outcome, row = "there already", None
        elif absent:
            outcome, row = f"not here: {', '.join(absent)}", {"ok": False, "not_here": absent}
        elif left < ENOUGH * limit:
            outcome, row, failed = f"not started, {max(left, 0):.0f} s left of {limit:.0f}", None, True
        else:
            print(f"{part}/{name}: started (at most {min(limit, left):.0f} s)", flush=True)
            if options.rehearse:
                row = attempt(cases[name], rehearsal=True)
            else:
                row = run_case(script, name, environment(False, (env or {}).get(name)), limit, left)
            outcome = f"ok after {row['seconds']:.0f} s" if row and row["ok"] else "cut: no time left"
            if row and not row["ok"]:
                outcome = "\n    ".join(["FAILED", *row["error"].splitlines()[-8:]])
            failed |= not (row and row["ok"])
            row = {**moment(), **source, **row} if row else None
        print(f"{part}/{name}: {outcome}", flush=True)
        if row and (row["ok"] or not is_measured):  # a failure does not replace a measurement
            rows[name] = row
        ordered = {case: rows[case] for case in cases if case in rows}
        if ordered != before.get("rows") or [*cases] != before.get("cases"):
            complete = all(rows.get(case, {}).get("ok") or rows.get(case, {}).get("not_here") for case in cases)
            before = {**head, "complete": complete, "cases": [*cases], "rows": ordered}
            write(path, before)
    sys.exit(int(failed))


def _check_call(part: str, options: argparse.Namespace, head: Row, before: Row, path: Path) -> None:
    """Exit with a message if the part cannot run here, or would replace results of another kind."""
    if not options.rehearse and not head["gpu"]:
        sys.exit(f"{part}: no GPU here (nvidia-smi finds none); --rehearse runs toy sizes on the CPU")
    if before and (before["rehearsal"], before["device_kind"]) != (options.rehearse, head["device_kind"]):
        sys.exit(f"{part}: {path} holds results of {before['device_kind']}, and stays as it is")
    if options.stale and not code_of(head):
        sys.exit(
            f"{part}: --stale needs code without uncommitted changes, in a Git repository or named by LOWTIDE_COMMIT"
        )


def attempt(case: Case, rehearsal: bool) -> Row:
    """Run a case in this process; return its row, or a row with its error."""
    started = time.monotonic()
    if rehearsal and "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    try:
        row = case(rehearsal)
        if "jax" in sys.modules:
            device = sys.modules["jax"].devices()[0]
            if device.platform == "cpu" and not rehearsal:
                raise RuntimeError("the case ran on the CPU: a measurement needs a GPU; hint: --rehearse")
            row = {"device_kind": device.device_kind, **row}
    except Exception:
        traceback.print_exc()
        row = {"ok": False, "error": traceback.format_exc()}
    return {"ok": True, "seconds": round(time.monotonic() - started, 2), **row}


def run_case(script: Path, name: str, env: Mapping[str, str], limit: float, left: float) -> Row | None:
    """Run a case in a separate process; return None if only the end of the total time limit stops it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        path, errors = Path(text) / "row.json", Path(text) / "stderr"
        command = [sys.executable, str(script), "--case", name, "--child", str(path)]
        with errors.open("wb") as stderr:
            status = run(command, env, min(limit, left), stderr)
        seconds = {"seconds": round(time.monotonic() - started, 2)}
        if path.exists():
            return {**json.loads(path.read_text(encoding="utf-8")), **seconds}
        # The total time ended before the case's own limit. It gets no row, so that the next call runs it again.
        if status is None and left < limit:
            return None
        why = f"killed at its limit of {limit:.0f} s" if status is None else f"exit status {status}"
        tail = errors.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return {"ok": False, **seconds, "error": "\n".join([why, *tail])}


# --- inside a case -------------------------------------------------------------------------------------------------


def peak_bytes() -> int | None:
    """Return the peak of JAX's allocator on the first device in this process; None on a CPU, which does not count."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def timed(step: Callable[[], Any], *, warmup: int, repeats: int) -> list[float]:
    """Return the seconds of each call after the warm-up calls, each measured until its result is ready."""
    import jax

    seconds: list[float] = []
    for index in range(warmup + repeats):
        started = time.perf_counter()
        jax.block_until_ready(step())
        if index >= warmup:
            seconds.append(time.perf_counter() - started)
    return seconds
