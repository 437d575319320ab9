"""``lowtide fits``: whether a step fits each target; with ``--largest KEY``, the largest KEY that fits."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, format_bytes, require_extra
from ._arguments import positive
from ._load import add_job_arguments, job_settings, load, parse_job, read_settings, user_code
from ._output import check_outputs, print_error, spinner, write_text
from ._plan import read_budget

_SIZES = ("device_bytes", "usable_bytes", "host_bytes", "host_usable_bytes")
_FIELDS = ("target", *_SIZES, "compile_seconds", "error", "margin_bytes", "host_fits", "fits", "plan")
"""Keys of a row of the JSON file, in order; an unknown value becomes null."""


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "fits",
        help="show which targets a step fits, or how large it may get",
        description="Compile the step that your function returns for several targets, one after another in separate "
        "processes, and show where it fits. With --largest, find the largest value of a parameter that fits. Exit "
        "status: 0; 1 when it does not fit a target, or your code fails; 2 for a mistake in the arguments.",
    )
    add = parser.add_argument
    add_job_arguments(parser)
    add("--budget", metavar="SIZE", help='limit in bytes on one device, such as "14 GiB" (default: the usable bytes)')
    add("--json", metavar="FILE", help="write the table as JSON (default: not written)")
    add("--plan", action="store_true", help="also plan the fastest step that fits, as `lowtide plan` (default: off)")
    add("--largest", metavar="KEY", help="find the largest value that fits for KEY, a parameter of NAME (default: off)")
    add("--sizes", metavar="N,N,...", help="with --largest: values to compile first (default: 2,3,4)")
    add("--maximum", type=positive, metavar="N", help="with --largest: the largest value to try (default: none)")
    add("--multiple-of", type=positive, metavar="N", help="with --largest: try only multiples of N (default: 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    settings = job_settings(args, parse_job(args.job)[1])
    check_outputs(args.json)
    budget = read_budget(args)
    names = list(dict.fromkeys(args.target or ["here"]))
    if args.plan and args.largest is not None:
        raise ConfigError("--plan and --largest exclude each other", hint="plan with --set KEY=VALUE for one value")
    if args.largest is not None:
        return _run_largest(console, args, settings, names, budget)
    for flag in ("sizes", "maximum", "multiple_of"):
        if getattr(args, flag) is not None:
            flag = flag.replace("_", "-")
            raise ConfigError(f"--{flag} needs --largest", hint="name the parameter to enlarge with --largest KEY")
    rows, are_mistakes = _measure_targets(
        names, f"compiling {args.job} for", lambda name: _measure(args, settings, name, budget)
    )
    measured = [row for row in rows if "error" not in row]
    if measured:
        console.print(_table(rows, budget))
        if any(row["fits"] is None for row in measured):
            console.print(Text("note: a capacity is unknown; set a limit with --budget", style="dim"))
    _write_rows(console, args.json, [dict.fromkeys(_FIELDS) | row for row in rows])
    is_small = any(row["fits"] is False or "[LT010]" in (row.get("plan") or {}).get("error", "") for row in measured)
    return 2 if are_mistakes else int(len(measured) < len(rows) or is_small)


def _measure(args: argparse.Namespace, settings: Mapping[str, Any], name: str, budget: int | None) -> dict[str, Any]:
    from .. import memory

    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        report_file, seconds_file = (f"{folder}/{file}" for file in ("report.json", "seconds"))
        arguments = ["explain", "--no-remedies", *_job_arguments(args, settings, folder), "--target", name]
        _run_child([*arguments, "--json", report_file, "--seconds", seconds_file])
        report = memory.MemoryReport.from_json(report_file)
        seconds = float(Path(seconds_file).read_text())
        plan = _plan(args, settings, name, budget, folder) if args.plan else None
    usable_bytes = report.target.budget_bytes if budget is None else budget
    margin_bytes = None if usable_bytes is None else usable_bytes - report.device_bytes
    device_fits = None if margin_bytes is None else margin_bytes >= 0
    host_usable_bytes = report.target.host_bytes
    host_fits = None if host_usable_bytes is None else report.host_bytes <= host_usable_bytes
    return {
        "target": name,
        "device_bytes": report.device_bytes,
        "usable_bytes": usable_bytes,
        "host_bytes": report.host_bytes,
        "host_usable_bytes": host_usable_bytes,
        "compile_seconds": seconds,
        "margin_bytes": margin_bytes,
        "host_fits": host_fits,
        "fits": False if host_fits is False else device_fits,
        "plan": plan,
    }


def _plan(
    args: argparse.Namespace, settings: Mapping[str, Any], name: str, budget: int | None, folder: str
) -> dict[str, Any]:
    """Return the choice of `lowtide plan`, its device bytes and the share of FLOPs that it saves, or its error."""
    from ..planning import Plan

    file = Path(folder, "plan.json")
    limit = [] if budget is None else ["--budget", f"{budget} B"]
    arguments = ["plan", *_job_arguments(args, settings, folder), "--target", name, *limit, "--json", str(file)]
    try:
        _run_child(arguments)
    except _ChildError as error:
        return {"error": error.text.partition("\n")[0]}
    plan = Plan.from_json(file.read_text(encoding="utf-8"))
    saved = sum(item.flops for item in plan.decisions if item.action != "recompute")
    share = saved / (saved + plan.flops) if plan.flops else 0.0
    return {"choice": plan.choice, "device_bytes": plan.device_bytes, "saved_flops_share": share}


def _table(rows: Sequence[dict[str, Any]], budget: int | None) -> Table:
    table = Table(title="Compiled bytes on one device", title_justify="left", box=None, pad_edge=False)
    has_host = any(row.get("host_bytes") for row in rows)
    host_columns = ("host", "host usable") if has_host else ()
    for name in ("target", "device", "usable" if budget is None else "budget", "fits", "margin", *host_columns):
        table.add_column(name, justify="left" if name in ("target", "fits") else "right", no_wrap=True)
    table.add_column("compile time")
    if has_plan := any(row.get("plan") for row in rows):
        table.add_column("planned step")
    for row in rows:
        if "error" in row:
            empty = [""] * (3 if has_host else 1)
            table.add_row(Text(row["target"]), "", "", Text("failed", style="red"), *empty, Text(row["error"]))
            continue
        device, usable, host, host_usable = (_size(row[name]) for name in _SIZES)
        host_cells = [host, host_usable] if has_host else []
        seconds = f"{row['compile_seconds']:.1f} s"
        margin = _margin(row["margin_bytes"])
        planned = [Text(_describe_plan(row["plan"]))] if has_plan else []
        table.add_row(Text(row["target"]), device, usable, _verdict(row), margin, *host_cells, seconds, *planned)
    return table


def _describe_plan(plan: Mapping[str, Any]) -> str:
    if "error" in plan:
        return plan["error"]
    return f"{format_bytes(plan['device_bytes'])}, {plan['saved_flops_share']:.0%} fewer FLOPs: {plan['choice']}"


def _verdict(row: dict[str, Any]) -> Text:
    if row["fits"] is None:
        return Text("unknown", style="dim")
    if row["fits"]:
        return Text("yes", style="green")
    return Text("no" if row["host_fits"] is not False else "not on the host", style="bold red")


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _margin(num_bytes: int | None) -> str:
    """Format a margin; a negative margin becomes "SIZE over". `parse_bytes` can read SIZE, because it has no sign."""
    return f"{format_bytes(-num_bytes)} over" if num_bytes is not None and num_bytes < 0 else _size(num_bytes)


# --- the largest value -----------------------------------------------------------------------------------------------


def _run_largest(
    console: Console, args: argparse.Namespace, settings: Mapping[str, Any], names: Sequence[str], budget: int | None
) -> int:
    """Run ``fits --largest`` and return the exit status; if there are several targets, each has its own process."""
    sizes = None
    if args.sizes is not None:
        parts = [part.strip() for part in args.sizes.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            problem = f"--sizes needs whole numbers, not {args.sizes!r}"
            raise ConfigError(problem, hint="use, for instance, --sizes 2,4,8")
        sizes = tuple(map(int, parts))
    if len(names) == 1:
        result = _extrapolate(args, settings, names[0], sizes, budget)
        result.print(console)
        _write_rows(console, args.json, [result.to_dict()])
        return 0
    rows, are_mistakes = _measure_targets(
        names, f"finding the largest {args.largest} of {args.job} on", lambda name: _in_child(args, settings, name)
    )
    console.print(_largest_table(args.largest, rows))
    _write_rows(console, args.json, rows)
    return 2 if are_mistakes else int(any("error" in row for row in rows))


def _extrapolate(
    args: argparse.Namespace, settings: Mapping[str, Any], name: str, sizes: Sequence[int] | None, budget: int | None
) -> Any:
    from .. import memory

    path, function = parse_job(args.job)
    job_name = f"{path.name}:{function}" if function else path.name
    limits: dict[str, Any] = {"sizes": sizes, "maximum": args.maximum, "multiple_of": args.multiple_of}
    options = {key: value for key, value in limits.items() if value is not None}
    if args.largest in settings or any(pair.partition("=")[0].strip() == args.largest for pair in args.set):
        raise ConfigError(f"{args.largest} is set, but --largest searches its value", hint="leave that value out")
    with load(path, function, settings) as maker:
        keywords = read_settings(args.set, maker, job_name, variable=args.largest)
        target = memory.target(name)

        # `extrapolate` calls `make` within the `with` block below, which binds `clock`.
        def make(size: int) -> Any:
            clock.set_text(f"compiling {job_name} with {args.largest}={size} for {target.name}")
            return memory.Job.make(maker, target=target, what=job_name, **keywords, **{args.largest: size})

        with spinner(f"compiling {job_name} for {target.name}") as clock, user_code(path):
            return memory.extrapolate(make, target=target, limit=budget, variable=args.largest, **options)


def _in_child(args: argparse.Namespace, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    arguments = ["--target", name, "--largest", args.largest]
    for flag in ("budget", "sizes", "maximum", "multiple_of"):
        if getattr(args, flag) is not None:
            arguments += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        file = Path(folder) / "rows.json"
        _run_child(["fits", *_job_arguments(args, settings, folder), *arguments, "--json", str(file)])
        return json.loads(file.read_text(encoding="utf-8"))["rows"][0]


def _write_rows(console: Console, file: str | None, rows: Sequence[dict[str, Any]]) -> None:
    if file:
        write_text(console, file, json.dumps({"figures": "compiled", "rows": rows}, indent=2) + "\n")


def _largest_table(variable: str, rows: Sequence[dict[str, Any]]) -> Table:
    title = f"Largest {variable} that fits (compiled)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    for column in (variable, "device", "limit", "next size", "programs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        if "error" in row:
            table.add_row(Text(row["target"]), Text("failed", style="red"), *[""] * 4, Text(row["error"]))
            continue
        following = row["next"]
        table.add_row(
            Text(row["target"]),
            f"{row['answer']:,}",
            format_bytes(row["device_bytes"]),
            format_bytes(row["limit_bytes"]),
            "at the maximum" if following is None else format_bytes(following["device_bytes"]),
            str(len(row["points"])),
        )
    return table


# --- subprocesses ----------------------------------------------------------------------------------------------------


class _ChildError(Exception):
    """A failed command: `text` is the error that it printed, `status` its exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status


def _run_child(arguments: Sequence[str]) -> None:
    """Run ``lowtide`` in a subprocess and capture its output; raise `_ChildError` when it fails."""
    # PYTHONIOENCODING makes the child write UTF-8 in every locale, because this process decodes UTF-8.
    process = subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if process.returncode == 0:
        return
    if process.returncode < 0:
        text = f"signal {-process.returncode} killed the compiling process; the host may have run out of memory"
        raise _ChildError(text, process.returncode)
    # The user's code may also print lines that begin with "error". Lowtide continues them with a code or the user's
    # file.
    match = re.search(r"^error ((?:\[LT|in the code of ).*)", process.stderr, flags=re.MULTILINE | re.DOTALL)
    raise _ChildError(match[1].rstrip() if match else process.stderr.rstrip()[-2000:], process.returncode)


def _job_arguments(args: argparse.Namespace, settings: Mapping[str, Any], folder: str) -> list[str]:
    """Return the arguments with which another process runs the same job; write its settings to a file in `folder`."""
    arguments = [args.job, *(part for pair in args.set for part in ("--set", pair))]
    if settings:
        require_extra("finetune")
        import tomli_w

        file = Path(folder, "settings.toml")
        file.write_text(tomli_w.dumps(settings), encoding="utf-8")
        arguments += ["--config", str(file)]
    return arguments


def _measure_targets(
    names: Sequence[str], action: str, measure: Callable[[str], dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Measure targets in turn; return rows, and whether all targets failed because of mistakes in the arguments."""
    # The spinner shows `action` and a target's name. The row of a failed target has only the name and the error.
    rows: list[dict[str, Any]] = []
    failures: list[_ChildError] = []
    for number, name in enumerate(names, start=1):
        with spinner(f"{action} {name} ({number} of {len(names)})"):
            try:
                rows.append(measure(name))
            except _ChildError as error:
                failures.append(error)
                lines = [line.strip() for line in error.text.splitlines() if line.strip()]
                coded = [line for line in lines if line.startswith("[LT")]
                line = (coded or lines[-1:] or [f"exit status {error.status}"])[0]
                rows.append({"target": name, "error": line})
    # Targets often fail with the same error; print each distinct error once.
    for text in dict.fromkeys(failure.text for failure in failures):
        print_error(text)
    return rows, len(failures) == len(rows) and all(failure.status == 2 for failure in failures)
