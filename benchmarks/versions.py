"""Compiled bytes of the same programs with different versions of JAX and XLA.

    python benchmarks/versions.py [--target cpu] [--target v5e] [--target h100] [--reports DIR] [--json FILE]
    python benchmarks/versions.py --compare OLD.json NEW.json [--threshold 2]

The first command compiles every program of `measured_peak.py` with the JAX of this environment, each target in a
separate process. It writes `results/versions-jax-VERSION.json` after each target; nothing runs. With `--target`, the
other targets stay in the file, with their own commit and date in `made`. Targets compiled with other versions are
dropped, with a message. `--reports` also writes the full reports, and
`lowtide diff OLD/v5e-lora_8b.json NEW/v5e-lora_8b.json` then names the arrays behind a difference.

The second command lists the programs whose device bytes differ by more than the threshold, and the parts that differ.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from _common import ROOT, header, mib
from _gpu import write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.core import PlacementWarning

TARGETS = ("cpu", "v5e", "h100")
PARTS = ("argument", "output", "alias", "temp", "code")
NOT_COMPILED = {"attention_8192": TARGETS, **dict.fromkeys(("attention_2048", "fourier", "factorisation"), ("v5e",))}
"""Programs that take minutes to compile. The first is `attention_2048` with other sizes; a TPU's compiler needs two to
more than ten minutes for each of the others.
"""


def measure(name: str, reports: Path | None) -> dict[str, dict[str, Any]]:
    """Return the bytes of every program on one target, or the error of a program that does not compile."""
    from measured_peak import STEPS

    target, rows = lt.target(name), dict[str, dict[str, Any]]()
    for program, make in STEPS.items():
        if name in NOT_COMPILED.get(program, ()):
            continue
        try:
            job = make(target) if "target" in inspect.signature(make).parameters else make()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PlacementWarning)  # the figures show what this target cannot place
                report = lt.memory.analyze(
                    job["fn"],
                    *job["args"],
                    target=target,
                    roles=job["roles"],
                    donate_argnums=job.get("donate_argnums", ()),
                )
        except Exception as error:  # kept as the result, because another version may compile it
            rows[program] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        else:
            parts = {part: getattr(report.device, f"{part}_bytes") for part in PARTS}
            rows[program] = {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes, **parts}
            if reports is not None:
                reports.mkdir(parents=True, exist_ok=True)
                report.to_json(reports / f"{name}-{program}.json")
        print(f"{name}: {program}: {rows[program]}", file=sys.stderr, flush=True)
    return rows


def in_child(name: str, reports: Path | None) -> dict[str, dict[str, Any]]:
    """Return the same from a separate process, because compilers keep memory."""
    command = [sys.executable, __file__, "--child", name, *(["--reports", str(reports)] if reports else [])]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def result(path: Path) -> dict[str, Any]:
    """Return the content of a file that this script wrote; exit with one sentence if it is not such a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}") from error
    targets, versions = (content.get(key) if isinstance(content, dict) else None for key in ("targets", "versions"))
    made = content.get("made", {}) if isinstance(content, dict) else None
    rows = [*targets.values()] if isinstance(targets, dict) else [None]
    rows += [row for program in rows if isinstance(program, dict) for row in program.values()]
    headers = [*made.values()] if isinstance(made, dict) else [None]
    versions = [versions, *(header.get("versions") if isinstance(header, dict) else None for header in headers)]
    are_complete = all(isinstance(each, dict) and "jax" in each for each in versions)
    if not are_complete or not all(isinstance(row, dict) for row in rows):
        raise SystemExit(f"{path} is no result of benchmarks/versions.py")
    return content


def kept(path: Path, own: dict[str, Any], anew: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's targets with the same versions, and how each was made; targets in `anew` are compiled again."""
    before = result(path) if path.exists() else {"targets": {}}
    targets = dict(before["targets"])
    made = {name: before.get("made", {}).get(name) or {key: before.get(key) for key in own} for name in targets}
    for name in [name for name in targets if made[name]["versions"] != own["versions"]]:
        if name not in anew:
            print(f"{path}: {name} is dropped: it was compiled with {_said(made[name]['versions'])}", file=sys.stderr)
        del targets[name], made[name]
    return targets, made


def _said(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def compare(old: Path, new: Path, threshold: float) -> None:
    """Print the programs that differ by more than the threshold in percent."""
    before, after = result(old), result(new)
    one, two = (content["versions"]["jax"] for content in (before, after))
    table = Table(title=f"Device bytes that differ by more than {threshold:g} %: JAX {one} and {two}, MiB, compiled")
    for column in ("target", "program"):
        table.add_column(column)
    for column in (one, two, "difference", *PARTS, "host"):
        table.add_column(column, justify="right")
    count = 0
    absent = {"error": "not compiled"}
    for target in sorted({*before["targets"]} & {*after["targets"]}):
        olds, news = (content["targets"][target] for content in (before, after))
        for program in sorted({*olds, *news}):
            was, row = olds.get(program, absent), news.get(program, absent)
            count += 1
            if "error" in row or "error" in was:
                if row != was:
                    table.add_row(target, program, was.get("error", "compiles")[:40], row.get("error", "compiles")[:40])
                continue
            change = (row["device_bytes"] - was["device_bytes"]) / was["device_bytes"]
            host = row["host_bytes"] - was["host_bytes"]
            if 100 * abs(change) > threshold or 100 * abs(host) > threshold * max(was["host_bytes"], 1):
                totals = (mib(was["device_bytes"]), mib(row["device_bytes"]), f"{change:+.1%}")
                parts = (f"{(row[part] - was[part]) / 2**20:+,.2f}" if row[part] != was[part] else "" for part in PARTS)
                table.add_row(target, program, *totals, *parts, f"{host / 2**20:+,.2f}" if host else "")
    console = Console(width=150)
    console.print(table)
    console.print(f"{table.row_count} of {count} programs and targets.")
    if alone := sorted({*before["targets"]} ^ {*after["targets"]}):
        console.print(f"In one of the two alone: {', '.join(alone)}.")


def percent(text: str) -> float:
    """Parse a threshold of zero or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of percent from 0 on")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; repeatable")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="keep the full reports here")
    parser.add_argument("--json", type=Path, help="raw result (default: results/versions-jax-VERSION.json)")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two raw results")
    parser.add_argument("--threshold", type=percent, metavar="PERCENT", help="for --compare (default: 2)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    others = [f"--{name}" for name in ("target", "reports", "json") if getattr(options, name)]
    if options.compare and others:
        parser.error(f"--compare reads two files, and does nothing with {', '.join(others)}")
    if options.threshold is not None and not options.compare:
        parser.error("--threshold is for --compare")
    if options.compare:
        compare(*options.compare, 2.0 if options.threshold is None else options.threshold)
    elif options.child:
        print(json.dumps(measure(options.child, options.reports)))
    else:
        path = options.json or ROOT / "results" / f"versions-jax-{jax.__version__}.json"
        own = header("python benchmarks/versions.py")
        chosen = options.target or TARGETS
        targets, made = kept(path, own, chosen)  # exits if the file is not a result of this script
        for name in dict.fromkeys(chosen):
            targets[name], made[name] = in_child(name, options.reports), own
            write(path, {**own, "label": "compiled", "made": made, "targets": targets})


if __name__ == "__main__":
    main()
