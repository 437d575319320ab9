"""``lowtide targets``: the hardware that Lowtide compiles for, with the source of every figure."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich.table import Table
from rich.text import Text

from ..core import format_bytes
from ._output import wide_console

_COLUMNS = {
    "usable": "device_bytes",
    "memory": "hbm_bytes",
    "bandwidth": "hbm_bandwidth",
    "bf16": "flops",
    "host link": "host_link_bandwidth",
    "host": "host_bytes",
}

_WIDTH = 160
"""Minimum width of a terminal, in characters, for all columns."""


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "targets",
        help="list the hardware that Lowtide compiles for",
        description="List the catalogue of targets, per JAX device, with the source of each figure. The compilers "
        "need not be installed.",
    )
    parser.add_argument("--json", action="store_true", help="print the catalogue as JSON (default: a table)")
    parser.add_argument("--here", action="store_true", help="also ask JAX for this machine and its CPU")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..targets import catalogue_targets, targets

    catalogue = targets() if args.here else catalogue_targets()
    if args.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(target) for target in catalogue], indent=2) + "\n")
        return 0
    console = wide_console(_WIDTH)
    origins: dict[str, int] = {}
    table = Table(title="Targets, per JAX device", title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("name", no_wrap=True)
    is_wide = console.width >= _WIDTH
    columns = _COLUMNS if is_wide else {title: _COLUMNS[title] for title in ("usable", "memory", "host")}
    for title in ("devices", *columns):
        table.add_column(title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("host machine", no_wrap=True)
    for target in catalogue:
        marks: dict[str, int] = {}
        """Number of the source of each figure."""
        for source in target.sources:
            field, _, origin = source.partition(": ")
            marks[field] = origins.setdefault(origin, len(origins) + 1)
        cells = [_figure(field, getattr(target, field), marks) for field in columns.values()]
        machine = [target.machine or ""] if is_wide else []
        table.add_row(Text(target.name), str(target.num_devices), *cells, *machine)
    console.print(table)
    if not is_wide:
        console.print(f"a terminal that is {_WIDTH} characters wide shows more columns", style="dim")
    console.print("\nSources of the figures", style="bold")
    for origin, number in origins.items():
        console.print(Text(f"{number:>3}  {origin}", style="dim"), soft_wrap=True)
    return 0


def _figure(field: str, value: int | None, marks: dict[str, int]) -> Text:
    if value is None:
        return Text("-", style="dim")
    if field == "flops":
        text = f"{value / 1e12:,.0f} TFLOP/s"
    else:
        text = format_bytes(value) + ("/s" if field.endswith("bandwidth") else "")
    return Text(text).append(f" {marks[field]:>2}" if field in marks else "   ", style="dim")
