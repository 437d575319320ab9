"""``lowtide explain``: where the bytes of a user's step go, on this machine or on hardware that is absent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ._load import add_job_arguments, job_settings, load, parse_job, read_settings, user_code
from ._output import VIEWS, add_view_arguments, check_outputs, spinner, write_views


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show where the bytes of a step go",
        description="Compile the step that your function returns, for present or absent hardware, and print the owners "
        "of all bytes at the peak. Nothing runs on the target. Exit status: 0, also for a program that does not fit; 1 "
        "when your code fails; 2 for a mistake in the arguments.",
    )
    add_job_arguments(parser)
    add_view_arguments(parser, "report", "; with several targets, each file name contains its target")
    parser.add_argument(
        "--remedies",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print changes that would save memory, with estimates (default: --remedies)",
    )
    # Not for users: `lowtide fits` reads the compile time of its subprocess from this file.
    parser.add_argument("--seconds", metavar="FILE", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import memory

    console = Console(highlight=False)
    path, name = parse_job(args.job)
    check_outputs(*(getattr(args, kind) for kind in VIEWS), args.seconds)
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
                console.print("\nChanges that would save memory")
            for remedy in remedies:
                console.print(f"  {remedy}", markup=False, soft_wrap=True)
            write_views(console, report, args, target_name if len(targets) > 1 else None)
            if args.seconds:
                Path(args.seconds).write_text(f"{clock.seconds}\n")
    return 0
