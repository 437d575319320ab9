"""What the parts of a GPU day share: cases in processes of their own, results that survive a kill, and the clock.

A part is a script that declares its cases and calls `main`:

    def step(rehearsal: bool) -> dict[str, Any]:  # one JSON row
        ...

    if __name__ == "__main__":
        main("lora", {"1b": step}, __doc__, minutes={"1b": 3}, needs={"peft": ["torch", "peft"]})

The parent never starts a JAX backend, which would take the device's memory from its cases. Each case has a clean
allocator and a time limit; the file is written again, as a whole, after each; a second call goes on where the first
ended. What a parent started dies with it, and what a case starts with `run_child`. This file imports the standard
library alone.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
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
from _processes import Stopped as Stopped
from _processes import check_child as check_child
from _processes import reason as reason
from _processes import run as run
from _processes import run_child as run_child
from _processes import stoppable as stoppable
from _results import ROOT as ROOT
from _results import cases_of, check_writable, is_settled, missing, read
from _results import is_complete as is_complete
from _results import is_marked as is_marked
from _results import read_result as read_result
from _results import write as write

SRC = ROOT.parent / "src"
RESULTS = ROOT / "results" / "gpu"
MINUTES = 5.0
"""The limit of a case that names none."""
REHEARSAL_MINUTES = 2.0
ENOUGH = 0.5
"""A case starts while this share of its limit is left of the budget."""
TIRED = 2
"""A case that failed so often is left for the end."""
TAIL_LINES = 30
PROBE_SECONDS = 120
MEASURED = ("src/lowtide", "benchmarks/*.py")
DISTRIBUTIONS = (
    *("lowtide", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("numpy", "optax", "flax", "equinox", "orbax-checkpoint", "torch", "transformers", "peft"),
)

if importlib.util.find_spec("lowtide") is None:
    sys.path.insert(0, str(SRC))

Case = Callable[[bool], dict[str, Any]]


# --- what a result needs to be compared later ----------------------------------------------------------------------


def gpu() -> dict[str, Any]:
    """Name, driver and memory of the first GPU as `nvidia-smi` has them; empty where there is none."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    if not lines:
        return {}
    return {**dict(zip(fields, (word.strip() for word in lines[0].split(",")), strict=False)), "count": len(lines)}


def header(part: str, command: str, rehearsal: bool) -> dict[str, Any]:
    """Hardware, versions, commit and date."""
    found = {} if rehearsal else gpu()
    pages = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}
    return {
        "part": part,
        "command": command,
        "rehearsal": rehearsal,
        "complete": False,
        **_moment(),
        "python": platform.python_version(),
        "versions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "device_kind": found.get("name", "cpu"),
        "num_devices": found.get("count", 1),
        "gpu": found,
        "host": {
            "num_cpus": os.cpu_count(),
            "memory_bytes": pages["SC_PAGE_SIZE"] * pages["SC_PHYS_PAGES"],
            "machine": platform.machine(),
        },
    }


def folder(device_kind: str) -> Path:
    """Where the measurements of a kind of device lie."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")


def positive(text: str) -> float:
    """A number of minutes on a command line."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of minutes")
    return number


def why_not_usable() -> str:
    """Why JAX does not use the GPU that is here, in its own words; nothing where it does.

    Beside a driver that is too old, or a plugin of another version or none, it goes on with the CPU.
    """
    program = "import jax; print(jax.devices()[0].platform)"
    env = environment(False, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    try:
        done = run_child(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"JAX did not find its devices within {PROBE_SECONDS} s"
    platform_name = (done.stdout.split() or [""])[-1]
    if done.returncode == 0 and platform_name != "cpu":
        return ""
    told = reason(done.stderr) if done.stderr.strip() else "it has no plugin for a GPU, such as jax[cuda13] brings"
    return f"JAX does not use the GPU here: {told}"


def _moment() -> dict[str, Any]:
    """Date, commit, the last commit that changed what is measured, and whether there is more; None is unknown.

    A copy without Git takes its commit from ``LOWTIDE_COMMIT``; a repository around it says nothing of it.
    """
    now, given = datetime.datetime.now(tz=datetime.UTC), os.environ.get("LOWTIDE_COMMIT")
    top = _git("rev-parse", "--show-toplevel")
    is_own = not given and top is not None and Path(top).resolve() == ROOT.parent
    changes = _git("status", "--porcelain", "--", *MEASURED) if is_own else None
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": given or (_git("rev-parse", "HEAD") if is_own else None),
        "code_commit": (_git("log", "-1", "--format=%H", "--", *MEASURED) or None) if is_own else None,
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(rehearsal: bool, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process that runs a part: this checkout's library, and the device that is meant."""
    paths = [str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = os.environ.get("JAX_PLATFORMS", "")
    platforms = "cpu" if rehearsal else inherited if {"cuda", "gpu"} & {*inherited.split(",")} else "cuda,cpu"
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": platforms, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, **(extra or {})}


# --- the command line of a part ------------------------------------------------------------------------------------


def main(
    part: str,
    cases: Mapping[str, Case],
    doc: str | None,
    *,
    minutes: Mapping[str, float] | None = None,
    needs: Mapping[str, Sequence[str]] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
    together: bool = False,
) -> None:
    """Run the cases of a part, each in a process of its own, and keep what they return.

    Args:
        part: Its name; the file is ``results/gpu/<device>/<part>.json``.
        cases: By name, in the order of worth. Each takes whether this is a rehearsal and returns one JSON row.
        doc: The script's docstring.
        minutes: Limits of single cases.
        needs: Modules (peers) that a case needs; where they are missing its row says so and the part is complete.
        env: What a case wants in its environment, such as ``XLA_PYTHON_CLIENT_PREALLOCATE``.
        together: Whether a rehearsal runs all cases in one process, since a CPU has no allocator to keep clean.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(cases), metavar="NAME", help="only this; repeatable")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the raw result")
    parser.add_argument("--minutes", type=positive, metavar="N", help="start no case of which less than half would fit")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--usable", action="store_true", help=argparse.SUPPRESS)  # JAX was asked for its GPU before
    parser.add_argument("--leave", action="append", default=[], choices=list(cases), help=argparse.SUPPRESS)
    parser.add_argument("--child", action="append", choices=list(cases), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sys.exit(_child({name: cases[name] for name in options.child}, options.rehearse, options.rows))
    with stoppable():
        try:
            sys.exit(_Part(part, cases, minutes or {}, needs or {}, env or {}, together, options).all())
        except Stopped:
            print(f"{part}: stopped, and a second call goes on from here", flush=True)
            raise


def _child(cases: Mapping[str, Case], rehearsal: bool, directory: Path) -> int:
    """Run cases in this process, and leave a file for each: its row, or its error."""
    failed = 0
    for name, case in cases.items():
        started = time.monotonic()
        try:
            row = case(rehearsal)
            if "jax" in sys.modules:
                device = sys.modules["jax"].devices()[0]
                if device.platform == "cpu" and not rehearsal:
                    raise RuntimeError("this ran on the CPU: a measurement needs a GPU, --rehearse does without")
                row = {"device_kind": device.device_kind, **row}
            write(directory / _file(name, "json"), {"seconds": round(time.monotonic() - started, 2), **row})
        except Exception:
            failed = 1
            traceback.print_exc()
            (directory / _file(name, "error")).write_text(traceback.format_exc(), encoding="utf-8")
    return failed


class _Part:
    """One call of a part's script: which cases, what is there, how long there is."""

    def __init__(
        self,
        part: str,
        cases: Mapping[str, Case],
        minutes: Mapping[str, float],
        needs: Mapping[str, Sequence[str]],
        env: Mapping[str, Mapping[str, str]],
        together: bool,
        options: argparse.Namespace,
    ) -> None:
        self.part, self.cases, self.minutes, self.needs, self.env = part, cases, minutes, needs, env
        self.rehearsal: bool = options.rehearse
        self.together = together and options.rehearse
        self.chosen: list[str] = [name for name in cases if not options.case or name in options.case]
        self.deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.script = str(Path(sys.argv[0]).resolve())
        name = f"benchmarks/{Path(self.script).name}"
        self.content = header(part, f"python {name}" + (" --rehearse" if self.rehearsal else ""), self.rehearsal)
        temporary = Path(tempfile.gettempdir()) / f"lowtide-rehearsal-{os.getuid()}"
        home = temporary if self.rehearsal else folder(self.content["device_kind"])
        self.is_usable: bool = options.usable or options.rehearse
        self.path: Path = options.json or home / f"{part}.json"
        self.before = before = read_result(self.path)
        same = all(before.get(key) == self.content[key] for key in ("rehearsal", "device_kind"))
        self.is_precious = not same and before.get("rehearsal") is False
        kept = before.get("rows", {}) if same and not (self.rehearsal and not options.json) else {}
        self.anew: set[str] = {*self.chosen} if options.again else set()
        self.leave: list[str] = [name for name in self.chosen if name in options.leave]
        self.rows = {name: row for name, row in kept.items() if name in cases}
        self.spent: float = before.get("spent_seconds", 0.0) if kept and not options.again else 0.0
        self.ran = not kept

    def all(self) -> int:
        """Run what is not there; the exit status."""
        if not self.rehearsal and not self.content["gpu"]:
            print(f"{self.part}: no GPU here (nvidia-smi finds none); --rehearse runs toy sizes on the CPU")
            return 2
        if self.is_precious:
            print(f"{self.part}: {self.path} is a measurement of another device, and stays as it is")
            return 2
        check_writable(self.path)
        due = [name for name in self.chosen if self._is_due(name)]
        if due and not self.is_usable and (why := why_not_usable()):
            print(f"{self.part}: {why}")
            return 2
        self.late: list[str] = [name for name in due if name in self.leave]
        self._save()
        due = sorted((name for name in due if name not in self.leave), key=self._is_tired)
        for names in self._groups(due):
            left = self.deadline - time.monotonic()
            if left < ENOUGH * self._limit(names):
                self.late += names
                print(f"{self._label(names)}: not started, {max(left, 0):.0f} s left of {self._limit(names):.0f}")
            else:
                self._run(names, left)
            self._save()
        self._save()
        self._show()
        failed = [name for name in self.chosen if name in self.rows and not is_settled(self.rows[name])]
        failed += [name for name in self.chosen if "again" in self.rows.get(name, {})]
        return int(bool(failed or self.late))

    def _is_due(self, name: str) -> bool:
        """Whether a case is to be run: not where it is there, or cannot be."""
        if self.rows.get(name, {}).get("ok") and name not in self.anew:
            print(f"{self.part}/{name}: there already")
            return False
        if absent := missing(self.needs.get(name, ())):
            if not self.rows.get(name, {}).get("ok"):
                self.rows[name] = {"ok": False, "not_here": absent}
            print(f"{self.part}/{name}: not here: {', '.join(absent)}")
            return False
        return True

    def _is_tired(self, name: str) -> bool:
        return self.rows.get(name, {}).get("failures", 0) >= TIRED

    def _groups(self, due: Sequence[str]) -> list[list[str]]:
        """What shares a process: a case with nothing, or in a rehearsal with those of its environment."""
        groups: dict[Any, list[str]] = {}
        for name in due:
            groups.setdefault(str(self.env.get(name)) if self.together else name, []).append(name)
        return list(groups.values())

    def _label(self, names: Sequence[str]) -> str:
        return f"{self.part}/{names[0]}" if len(names) == 1 else f"{self.part}: {len(names)} cases"

    def _limit(self, names: Sequence[str]) -> float:
        minutes = sum(self.minutes.get(name, MINUTES) for name in names)
        return 60 * (min(minutes, REHEARSAL_MINUTES * min(len(names), 4)) if self.rehearsal else minutes)

    def _run(self, names: Sequence[str], left: float) -> None:
        limit, started = min(self._limit(names), left), time.monotonic()
        shown = "" if left == float("inf") else f", {left:.0f} s left"
        print(f"{self._label(names)}: started (at most {limit:.0f} s{shown})", flush=True)
        with tempfile.TemporaryDirectory() as text:
            directory, errors = Path(text), Path(text) / "stderr"
            words = [sys.executable, self.script, *(word for name in names for word in ("--child", name))]
            words += ["--rows", str(directory), *["--rehearse"] * self.rehearsal]
            status = run(words, environment(self.rehearsal, self.env.get(names[0])), limit, errors=errors)
            seconds = round(time.monotonic() - started, 2)
            self.ran, self.spent = True, self.spent + seconds
            why = f"killed at its limit of {limit:.0f} s" if status is None else f"exit status {status}"
            for name in names:
                found = read(directory / _file(name, "json"))
                own = {"seconds": seconds} if len(names) == 1 else {}
                if found:
                    self._keep(name, {"ok": True, **self._made(), **found, **own})
                elif status is None and limit < self._limit(names):
                    self.late.append(name)
                    print(f"{self.part}/{name}: cut after {seconds:.0f} s of {self._limit(names):.0f}: no time left")
                else:
                    error = directory / _file(name, "error")  # of one of several; of one alone all that it said
                    tail = _tail(error if len(names) > 1 and error.exists() else errors)
                    self._keep(name, {"ok": False, **self._made(), **own, "error": "\n".join([why, *tail])})
                    print("\n".join([f"{self.part}/{name}: FAILED, {why}", *(f"    {line}" for line in tail[-8:])]))
        rows = [self.rows.get(name, {}) for name in names]
        alike = sum("rehearsed_as" in row for row in rows)
        done = f"{sum(row.get('ok') is True for row in rows) - alike} of {len(names) - alike} ok"
        also = f", {alike} rehearsed as others" * bool(alike)
        print(f"{self._label(names)}: {done}{also} after {seconds:.0f} s", flush=True)

    def _made(self) -> dict[str, Any]:
        """With what and when a row was measured, which may be others than the file's latest."""
        driver = self.content["gpu"].get("driver_version")
        return {**_moment(), "versions": self.content["versions"], "driver": driver}

    def _keep(self, name: str, row: dict[str, Any]) -> None:
        """Take a new row; one that failed beside a measurement is noted in it."""
        before = self.rows.get(name, {})
        if not row["ok"] and before.get("ok"):
            self.rows[name] = {**before, "again": row}
            return
        failures = 0 if row["ok"] else before.get("failures", 0) + 1
        self.rows[name] = {**row, "failures": failures} if failures else row

    def _save(self) -> None:
        """Write the file, with its own header where nothing ran since."""
        rows = {name: self.rows[name] for name in self.cases if name in self.rows}
        complete = all(is_settled(rows.get(name)) for name in self.cases)
        own = {"complete": complete, "not_started": self.late, "spent_seconds": round(self.spent, 2)}
        own |= {"cases_of": cases_of(), "cases": list(self.cases), "rows": rows}
        self.content |= own
        kept = self.content if self.ran else {**self.before, **own}
        if kept != self.before:
            write(self.path, kept)

    def _show(self) -> None:
        width = max(map(len, self.cases))
        for name, row in self.content["rows"].items():
            if "rehearsed_as" in row:
                print(f"  {name:{width}}  as {row['rehearsed_as']}")
                continue
            state = "ok" if row.get("ok") else "not here" if row.get("not_here") else "failed"
            print(f"  {name:{width}}  {state:8}  {row.get('seconds', 0):7.1f} s  {_figures(row)}")
        print(f"{self.part}: {'complete' if self.content['complete'] else 'not complete'}, {self.path}", flush=True)


def _file(name: str, ending: str) -> str:
    return f"{name.replace('/', '.')}.{ending}"


def _tail(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]


def _figures(row: Mapping[str, Any]) -> str:
    """The first few numbers of a row."""
    plain = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "seconds"}
    return ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in list(plain.items())[:4])


# --- inside a case -------------------------------------------------------------------------------------------------


def peak_bytes() -> int | None:
    """The most that JAX's allocator held on the first device in this process; None on a CPU, which keeps no count."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def timed(step: Callable[[], Any], *, warmup: int, repeats: int) -> list[float]:
    """Seconds by the clock of each call after the first few, each until its result is there."""
    import jax

    seconds: list[float] = []
    for index in range(warmup + repeats):
        started = time.perf_counter()
        jax.block_until_ready(step())
        if index >= warmup:
            seconds.append(time.perf_counter() - started)
    return seconds
