"""``lowtide fits --largest``: the largest value of a parameter that fits, for each target."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, format_bytes
from ._children import job_arguments, measure_targets, run_child
from ._load import load, parse_job, read_settings, spinner, user_code, write_text


def run_largest(
    console: Console, args: argparse.Namespace, settings: Mapping[str, Any], names: Sequence[str], budget: int | None
) -> int:
    """Run ``fits --largest`` and return the exit status; if there are several targets, each runs in a separate process.

    A `budget` of None stands for each target's own limit.
    """
    sizes = _read_sizes(args.sizes)
    if len(names) == 1:
        result = _extrapolate(args, settings, names[0], sizes, budget)
        result.print(console)
        if args.json:
            _write(console, args.json, [result.to_dict()])
        return 0
    rows, are_mistakes = measure_targets(
        names,
        f"enlarging {args.largest} of {args.job} on",
        lambda name: _in_child(args, settings, name),
        lambda name, error: {"target": name, "error": error},
    )
    console.print(_table(args.largest, rows))
    if args.json:
        _write(console, args.json, rows)
    return 2 if are_mistakes else int(any("error" in row for row in rows))


def _read_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError("--sizes needs whole numbers", got=repr(text), hint="for instance --sizes 2,4,8")
    return tuple(map(int, parts))


def _extrapolate(
    args: argparse.Namespace, settings: Mapping[str, Any], name: str, sizes: Sequence[int] | None, budget: int | None
) -> Any:
    from .. import memory

    path, function = parse_job(args.job)
    job_name = f"{path.name}:{function}" if function else path.name
    options: dict[str, Any] = {"sizes": sizes, "maximum": args.maximum, "multiple_of": args.multiple_of}
    if args.largest in settings or any(pair.partition("=")[0].strip() == args.largest for pair in args.set):
        raise ConfigError(f"--largest {args.largest} is set, too", hint=f"leave the value of {args.largest} out")
    with load(path, function, settings) as maker:
        keywords = read_settings(args.set, maker, job_name, variable=args.largest)
        target = memory.target(name)

        # `extrapolate` calls `make` within the `with` block below, which binds `clock`.
        def make(size: int) -> Any:
            clock.set_text(f"compiling {job_name} with {args.largest}={size} for {target.name}")
            return memory.Job.make(maker, target=target, what=job_name, **keywords, **{args.largest: size})

        with spinner(f"compiling {job_name} for {target.name}") as clock, user_code(path):
            return memory.extrapolate(
                make,
                target=target,
                limit=budget,
                variable=args.largest,
                **{key: value for key, value in options.items() if value is not None},
            )


def _in_child(args: argparse.Namespace, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    arguments = ["--target", name, "--largest", args.largest]
    for flag in ("budget", "sizes", "maximum", "multiple_of"):
        if getattr(args, flag) is not None:
            arguments += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        file = Path(folder) / "rows.json"
        run_child(["fits", *job_arguments(args, settings, folder), *arguments, "--json", str(file)])
        return json.loads(file.read_text(encoding="utf-8"))["rows"][0]


def _write(console: Console, file: str, rows: Sequence[dict[str, Any]]) -> None:
    write_text(console, file, json.dumps({"figures": "compiled", "rows": rows}, indent=2) + "\n")


def _table(variable: str, rows: Sequence[dict[str, Any]]) -> Table:
    title = f"Largest {variable} that fits (compiled)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    for column in (variable, "device", "limit", "the next", "programs"):
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
