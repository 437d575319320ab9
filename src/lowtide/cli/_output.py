"""Output of commands: consoles, errors, progress on a terminal, and files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ..core import ConfigError, OutputError
from ._arguments import positive

VIEWS = {"html": "to_html", "png": "to_png", "json": "to_json"}


def errors() -> Console:
    """Return the console for error messages, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_labelled(console: Console, label: str, text: str, style: str = "bold yellow") -> None:
    """Print a text after a coloured label, such as note or warning."""
    console.print(Text(f"{label} ", style=style) + Text(text), soft_wrap=True)


def print_error(text: str) -> None:
    print_labelled(errors(), "error", text, "bold red")


def progress_bar(console: Console, *, has_counts: bool = True) -> Progress:
    """Make a progress bar that disappears when it ends."""
    counts = (MofNCompleteColumn(),) if has_counts else ()
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), BarColumn(), *counts, *times, console=console, transient=True)


def wide_console(width: int) -> Console:
    """Return the console for results; output to a file or a pipe is `width` characters wide."""
    # rich assumes 80 columns for output that is not a terminal, which is too narrow for these tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


@dataclasses.dataclass
class Clock:
    """Value of `spinner`: a function that updates the text, and the seconds that the block took. Mutable."""

    set_text: Callable[[str], None]
    seconds: float = 0.0


@contextlib.contextmanager
def spinner(text: str) -> Generator[Clock]:
    """Show a text and the elapsed time on a terminal; show nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        clock = Clock(lambda description: progress.update(task, description=description))
        try:
            yield clock
        finally:
            clock.seconds = time.perf_counter() - start


def check_outputs(*files: str | None) -> None:
    """Raise `ConfigError` for an output file that cannot be written or is given twice, before a long compilation."""
    outputs = set[Path]()
    for file in filter(None, files):
        path = Path(file)
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{file}: cannot be written", hint="give a file in an existing folder")
        is_device = path.exists() and not path.is_file()
        if path.resolve() in outputs and not is_device:
            raise ConfigError(f"{file}: two outputs cannot share a file", hint="give each output its own file")
        outputs.add(path.resolve())


def write_text(console: Console, file: str, text: str) -> None:
    """Write a file, and print its path; raise `OutputError` when it cannot be written."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written ({error})", hint="give a file in an existing folder") from error
    console.print(f"wrote {file}", markup=False, soft_wrap=True)


def add_view_arguments(parser: argparse.ArgumentParser, noun: str, suffix: str = "") -> None:
    """Add the flags that select the output formats of a report or a difference."""
    for kind, text in (("html", "an interactive page"), ("png", "a picture"), ("json", "data for other tools")):
        parser.add_argument(
            f"--{kind}", metavar="FILE", help=f"write the {noun} as {text}{suffix} (default: not written)"
        )
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="number of owners to list (default: 20)")


def write_views(console: Console, view: Any, args: argparse.Namespace, label: str | None = None) -> None:
    """Write the requested files and print their paths; with a label, ``report.json`` becomes ``report-label.json``."""
    for kind, method in VIEWS.items():
        if file := getattr(args, kind):
            path = Path(file)
            if label is not None:
                path = path.with_stem(f"{path.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', label)}")
            getattr(view, method)(path)
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
