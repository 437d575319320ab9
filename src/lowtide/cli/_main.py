"""The entry point: one subcommand a file, errors without tracebacks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console
from rich.text import Text

from ..core import LowtideError
from . import _diff, _explain, _finetune, _fits, _targets
from ._load import UserCodeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit status: 0; 1 when a step does not fit or the user's own code fails; 2 for a user's mistake; 130 when
        interrupted.
    """
    parser = argparse.ArgumentParser(prog="lowtide", description="Memory-efficient training for JAX.")
    parser.add_argument("--version", action="version", version=f"lowtide {version('lowtide')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (_finetune, _explain, _fits, _diff, _targets):
        module.register(commands)
    args = parser.parse_args(argv)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return args.run(args)
    except LowtideError as error:
        errors.print(Text("error ", style="bold red") + Text(str(error)))
        return 2
    except UserCodeError as error:
        errors.print(Text("error ", style="bold red") + Text(str(error)))
        return 1
    except KeyboardInterrupt:
        errors.print(Text("interrupted", style="bold red"))
        return 130
