"""``lowtide explain``: where the bytes of a user's step go, on this machine or on hardware that is absent."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from ._load import add_job_arguments, check_outputs, job_settings, load, parse_job, read_settings, spinner, user_code

_VIEWS = {"html": "to_html", "png": "to_png", "json": "to_json"}


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say where the bytes of a step go",
        description="Compile what a function of yours returns, for hardware that is here or not, and print who owns "
        "every byte at the peak. Nothing runs on the target. Exit status: 0, also for a program that does not fit; 1 "
        "when your code fails; 2 for a mistake in the arguments.",
    )
    add_job_arguments(parser)
    add_view_arguments(parser, "report", "; with several targets their names are put before the suffix")
    parser.add_argument(
        "--remedies",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print what would make the step smaller, estimated (default: --remedies)",
    )
    # Not for users: `lowtide fits` reads the compile time of its subprocess from this file.
    parser.add_argument("--seconds", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def add_view_arguments(parser: argparse.ArgumentParser, noun: str, suffix: str = "") -> None:
    """Add the flags that select the output formats of a report or a difference."""
    for kind, text in (("html", "one interactive page"), ("png", "a picture"), ("json", "data for other tools")):
        parser.add_argument(
            f"--{kind}", metavar="FILE", help=f"write the {noun} as {text}{suffix} (default: not written)"
        )
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="owners to list (default: 20)")


def positive(text: str) -> int:
    """Parse an argument that is a positive whole number."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def write_views(console: Console, view: Any, args: argparse.Namespace, label: str | None = None) -> None:
    """Write the requested files and print their paths; the label is inserted before the suffix of every file name."""
    for kind, method in _VIEWS.items():
        if file := getattr(args, kind):
            path = labelled(file, label)
            getattr(view, method)(path)
            console.print(f"wrote {path}", markup=False, soft_wrap=True)


def labelled(file: str, label: str | None) -> Path:
    """Insert a label before a file's suffix: ``report.json`` and ``v5e:2x2`` make ``report-v5e-2x2.json``."""
    path = Path(file)
    return (
        path if label is None else path.with_name(f"{path.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', label)}{path.suffix}")
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from .. import memory

    console = Console(highlight=False)
    path, name = parse_job(args.job)
    check_outputs(*(getattr(args, kind) for kind in _VIEWS), args.seconds)
    with load(path, name, job_settings(args, name)) as maker:
        job_name = f"{path.name}:{name}" if name else path.name
        settings = read_settings(args.set, maker, job_name)
        # Resolve all targets first: a mistake in the last name must not waste the compilation of the others. Two names
        # of the same target are compiled once.
        targets: dict[str, tuple[str, Any]] = {}
        for target_name in args.target or ["here"]:
            target = memory.target(target_name)
            targets.setdefault(target.name, (target_name, target))
        for number, (target_name, target) in enumerate(targets.values()):
            with spinner(f"compiling {job_name} for {target.name}") as clock, user_code(path):
                job = memory.Job.make(maker, target=target, what=job_name, **settings)
                report, remedies = memory.advise(job, target) if args.remedies else (job.analyze(target), ())
            if number:
                console.rule()
            report.print(console, top=args.top)
            if remedies:
                console.print("\nWhat would make it smaller")
            for remedy in remedies:
                console.print(f"  {remedy}", markup=False, soft_wrap=True)
            write_views(console, report, args, target_name if len(targets) > 1 else None)
            if args.seconds:
                Path(args.seconds).write_text(f"{clock.seconds}\n")
    return 0
