"""``lowtide diff``: changes between two memory reports, listed by owner."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ._output import add_view_arguments, check_outputs, write_views


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two reports",
        description="Compare two reports that `lowtide explain --json` or MemoryReport.to_json wrote: what grew, what "
        "shrank, and who owns it. Exit status: 0, or 2 for a mistake in the arguments.",
    )
    parser.add_argument("before", metavar="BEFORE.json", help="the first report")
    parser.add_argument("after", metavar="AFTER.json", help="the second report")
    add_view_arguments(parser, "difference")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import memory

    console = Console(highlight=False)
    check_outputs(args.html, args.png, args.json)
    before, after = (memory.MemoryReport.from_json(file) for file in (args.before, args.after))
    difference = memory.diff(before, after)
    difference.print(console, top=args.top)
    write_views(console, difference, args)
    return 0
