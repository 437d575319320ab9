"""``lowtide fits``: whether a step fits, for each target."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import ConfigError, format_bytes, parse_bytes
from ._children import job_arguments, measure_targets, run_child
from ._explain import positive
from ._largest import run_largest
from ._load import add_job_arguments, check_outputs, job_settings, parse_job, write_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Result for one target."""

    target: str
    device_bytes: int | None = None
    usable_bytes: int | None = None
    host_bytes: int | None = None
    host_usable_bytes: int | None = None
    compile_seconds: float | None = None
    error: str | None = None

    @property
    def margin_bytes(self) -> int | None:
        """Usable bytes that remain; negative when the step does not fit."""
        if self.device_bytes is None or self.usable_bytes is None:
            return None
        return self.usable_bytes - self.device_bytes

    @property
    def host_fits(self) -> bool | None:
        """Whether the bytes on the host fit; None when the host's memory is unknown."""
        if self.host_bytes is None or self.host_usable_bytes is None:
            return None
        return self.host_bytes <= self.host_usable_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the step fits device and host; None when that is unknown."""
        if self.host_fits is False:
            return False
        return None if self.margin_bytes is None else self.margin_bytes >= 0


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fits",
        help="say on which targets a step fits, or how large it may get",
        description="Compile what a function of yours returns for several targets, one after another in processes of "
        "their own, and say where it fits. With --largest, find the largest value of a parameter that fits. Exit "
        "status: 0; 1 when it does not fit somewhere, or your code fails; 2 for a mistake in the arguments.",
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--budget", metavar="SIZE", help='bytes it may take of a device, such as "14 GiB" (default: what is usable)'
    )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON (default: not written)")
    parser.add_argument(
        "--largest", metavar="KEY", help="find the largest KEY=N that fits, KEY a parameter of NAME (default: off)"
    )
    parser.add_argument("--sizes", metavar="N,N,...", help="with --largest: values to compile first (default: 2,3,4)")
    parser.add_argument(
        "--maximum", type=positive, metavar="N", help="with --largest: the largest value to try (default: none)"
    )
    parser.add_argument(
        "--multiple-of", type=positive, metavar="N", help="with --largest: try only multiples of N (default: 1)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    console = Console(highlight=False)
    settings = job_settings(args, parse_job(args.job)[1])
    check_outputs(args.json)
    budget = None if args.budget is None else parse_bytes(args.budget)
    names = list(dict.fromkeys(args.target or ["here"]))
    if args.largest is not None:
        return run_largest(console, args, settings, names, budget)
    for flag in ("sizes", "maximum", "multiple_of"):
        if getattr(args, flag) is not None:
            flag = flag.replace("_", "-")
            raise ConfigError(f"--{flag} is for --largest", hint="name the parameter to enlarge with --largest KEY")
    rows, are_mistakes = measure_targets(
        names,
        f"compiling {args.job} for",
        lambda name: _measure(args, settings, name, budget),
        lambda name, error: Row(target=name, error=error),
    )
    if any(row.error is None for row in rows):
        console.print(_table(rows, budget))
        if any(row.fits is None and row.error is None for row in rows):
            console.print(Text("note: a capacity is unknown; give one with --budget", style="dim"))
    if args.json:
        write_text(console, args.json, json.dumps(_data(rows), indent=2) + "\n")
    return 2 if are_mistakes else int(any(row.fits is False or row.error for row in rows))


def _measure(args: argparse.Namespace, settings: Mapping[str, Any], name: str, budget: int | None) -> Row:
    from .. import memory

    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        report_file, seconds_file = (f"{folder}/{file}" for file in ("report.json", "seconds"))
        arguments = ["explain", "--no-remedies", *job_arguments(args, settings, folder), "--target", name]
        run_child([*arguments, "--json", report_file, "--seconds", seconds_file])
        report = memory.MemoryReport.from_json(report_file)
        seconds = float(Path(seconds_file).read_text())
    return Row(
        target=name,
        device_bytes=report.device_bytes,
        usable_bytes=report.target.budget_bytes if budget is None else budget,
        host_bytes=report.host_bytes,
        host_usable_bytes=report.target.host_bytes,
        compile_seconds=seconds,
    )


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    derived = ("margin_bytes", "host_fits", "fits")
    return {
        "figures": "compiled",
        "rows": [{**vars(row), **{name: getattr(row, name) for name in derived}} for row in rows],
    }


def _table(rows: Sequence[Row], budget: int | None) -> Table:
    table = Table(title="Compiled bytes on one device", title_justify="left", box=None, pad_edge=False)
    table.add_column("target", no_wrap=True)
    table.add_column("device", justify="right", no_wrap=True)
    table.add_column("usable" if budget is None else "budget", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("margin", justify="right", no_wrap=True)
    has_host = any(row.host_bytes for row in rows)
    for name in ("host", "of host") if has_host else ():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compiled in")
    for row in rows:
        if row.error is not None:
            empty = [""] * (3 if has_host else 1)
            table.add_row(Text(row.target), "", "", Text("failed", style="red"), *empty, Text(row.error))
            continue
        seconds = "" if row.compile_seconds is None else f"{row.compile_seconds:.1f} s"
        sizes = [_size(row.device_bytes), _size(row.usable_bytes)]
        host_cells = [_size(row.host_bytes), _size(row.host_usable_bytes)] if has_host else []
        table.add_row(Text(row.target), *sizes, _verdict(row), _margin(row.margin_bytes), *host_cells, seconds)
    return table


def _verdict(row: Row) -> Text:
    if row.fits is None:
        return Text("unknown", style="dim")
    if row.fits:
        return Text("yes", style="green")
    return Text("no" if row.host_fits is not False else "not on the host", style="bold red")


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def _margin(num_bytes: int | None) -> str:
    """Format the remaining bytes, or the excess. Sizes carry no sign, so that they can be passed back to --budget."""
    return f"{format_bytes(-num_bytes)} over" if num_bytes is not None and num_bytes < 0 else _size(num_bytes)
