"""Consoles for the output of commands: one for errors, and a wide one for tables in files and pipes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def errors() -> Console:
    """Return the console for error messages, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Print an error message."""
    errors().print(Text("error ", style="bold red") + Text(text))


def wide_console(width: int) -> Console:
    """Return the console for results; output to a file or a pipe is `width` characters wide."""
    # rich assumes 80 columns for output that is not a terminal, which is too narrow for these tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
