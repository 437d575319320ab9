"""``lowtide plan``: the fastest step that fits a budget, for this machine or for hardware that is absent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core import ConfigError, format_bytes, parse_bytes
from ._load import add_job_arguments, job_settings, load, parse_job, read_settings, user_code
from ._output import check_outputs, progress_bar, write_text


def register(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="find the fastest step that fits a budget",
        description="Choose what a step keeps of each layer, its microbatches, and which data are on the host: the "
        "fastest step, by estimated time, whose compiled bytes fit the budget. For a function, only what its layers "
        "keep is chosen. Exit status: 0; 1 when nothing fits, or your code fails; 2 for a mistake in the arguments.",
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--budget", metavar="SIZE", help='bytes of one device, such as "14 GiB" (default: the usable bytes)'
    )
    _add_allow(parser)
    parser.add_argument("--json", metavar="FILE", help="write the plan, for lowtide.planning.Plan (default: none)")
    parser.add_argument("--png", metavar="FILE", help="draw time against bytes of all compiled choices (default: none)")
    parser.set_defaults(run=run)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that plans before it trains."""
    parser.add_argument(
        "--target", metavar="NAME", help="plan for this hardware, such as v5e or h100 (default: this machine)"
    )
    _add_allow(parser)


def _add_allow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        action="append",
        choices=("nf4_weights", "8bit_state", "exposed_copies"),
        help="for a model: what a plan may use if nothing else fits; exposed_copies are copies to the host that no "
        "computation hides; may be repeated (default: none)",
    )


def read_budget(args: argparse.Namespace) -> int | None:
    """Return the bytes of ``--budget``, or None; raise `ConfigError` unless it is a size above 0."""
    budget = None if args.budget is None else parse_bytes(args.budget)
    if budget is not None and budget < 1:
        problem = f"--budget must be a size above 0, not {args.budget!r}"
        raise ConfigError(problem, hint='use for instance --budget "16 GiB"')
    return budget


def show_on(progress: Any) -> Any:
    """Return an `on_compile` that shows each compilation of a plan on a progress line."""
    task = progress.add_task("planning the step", total=None)
    sizes: list[str] = []
    if not progress.console.is_terminal:
        progress.console.print("planning the step: a few choices are compiled, which may take minutes", soft_wrap=True)

    def show(attempt: Any) -> None:
        sizes.append(format_bytes(attempt.device_bytes))
        progress.update(task, description=f"planning the step; compilations: {len(sizes)}, the last: {sizes[-1]}")

    return show


def run(args: argparse.Namespace) -> int:
    from ..targets import limit_bytes, target

    console = Console(highlight=False)
    path, name = parse_job(args.job)
    check_outputs(args.json, args.png)
    if args.target and len(args.target) > 1:
        raise ConfigError("a plan is for one target", hint="call the command once for each target")
    goal = target(args.target[0] if args.target else "here")
    budget = limit_bytes(goal, read_budget(args))
    plan = _plan(console, args, path, name, job_settings(args, name), goal, budget)
    console.print(plan)
    if args.json:
        write_text(console, args.json, plan.to_json())
    if args.png:
        plan.to_png(Path(args.png))
        console.print(f"The picture is {args.png}", soft_wrap=True)
    return 0


def _plan(
    console: Console, args: argparse.Namespace, path: Path, name: str, settings: Any, target: Any, budget: int
) -> Any:
    from ..finetune import config_from_dict, plan_within
    from ..memory import Job
    from ..planning import plan_job

    if not name:
        if args.set:
            raise ConfigError("--set is for functions", hint="use the flags of the settings, such as --batch-size 8")
        config = config_from_dict({"packing": "best-fit", **settings, "model": str(path)}, "the settings")
        with progress_bar(console) as progress:
            return plan_within(config, budget, target, allow=args.allow or (), on_compile=show_on(progress))
    if args.allow:
        raise ConfigError("--allow is for a model's folder", hint="build these formats into your function")
    with load(path, name, settings) as maker:
        job_name = f"{path.name}:{name}"
        values = read_settings(args.set, maker, job_name)
        with progress_bar(console) as progress, user_code(path):
            job = Job.make(maker, target=target, what=job_name, **values)
            return plan_job(job, target, budget, on_compile=show_on(progress))
