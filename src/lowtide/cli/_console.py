"""Where commands print: errors, and tables that want more room than a pipe says it has."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def errors() -> Console:
    """Return the console of what goes wrong."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Print what went wrong."""
    errors().print(Text("error ", style="bold red") + Text(text))


def wide_console(width: int) -> Console:
    """Return the console of results, which are this wide in a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
