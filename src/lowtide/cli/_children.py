"""Commands in subprocesses. A process that has compiled for a TPU keeps much of the compiler's memory."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from ._console import print_error
from ._load import spinner

Row = TypeVar("Row")


class ChildError(Exception):
    """A failed command: `text` is the error that it printed, `status` its exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status

    @property
    def line(self) -> str:
        """The error as one line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        coded = [line for line in lines if line.startswith("[LT")]
        return (coded or lines[-1:] or [f"exit status {self.status}"])[0]


def run_child(arguments: Sequence[str]) -> None:
    """Run ``lowtide`` in a subprocess and capture its output; raise `ChildError` when it fails."""
    # PYTHONIOENCODING makes the child write UTF-8 in every locale, because this process decodes UTF-8.
    process = subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if process.returncode == 0:
        return
    if process.returncode < 0:
        text = f"the compiling process was killed by signal {-process.returncode}: its own memory may not have sufficed"
        raise ChildError(text, process.returncode)
    # The user's code may also print lines that begin with "error". After that word, Lowtide's
    # own errors have a code or name the user's file.
    match = re.search(r"^error ((?:\[LT|in the code of ).*)", process.stderr, flags=re.MULTILINE | re.DOTALL)
    raise ChildError(match[1].rstrip() if match else process.stderr.rstrip()[-2000:], process.returncode)


def job_arguments(args: argparse.Namespace, settings: Mapping[str, Any], folder: str) -> list[str]:
    """Return the arguments with which another process runs the same job.

    The `settings` of a model's folder, from `job_settings`, are written to a TOML file in `folder`.
    """
    set_flags = [part for pair in args.set for part in ("--set", pair)]
    if not settings:
        return [args.job, *set_flags]
    file = Path(folder, "settings.toml")
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return [args.job, *set_flags, "--config", str(file)]


def measure_targets(
    names: Sequence[str], action: str, measure: Callable[[str], Row], make_failed_row: Callable[[str, str], Row]
) -> tuple[list[Row], bool]:
    """Measure targets one after the other with `run_child`, and print each distinct error once.

    `action` begins a sentence that ends with a target's name. `make_failed_row` takes the name of a failed target and
    the error as one line. Returns the rows, and whether every target failed because of a mistake in the arguments.
    """
    rows: list[Row] = []
    failures: list[ChildError] = []
    for number, name in enumerate(names, start=1):
        with spinner(f"{action} {name} ({number} of {len(names)})"):
            try:
                rows.append(measure(name))
            except ChildError as error:
                failures.append(error)
                rows.append(make_failed_row(name, error.line))
    # Targets often fail with the same error; print each distinct error once.
    for text in dict.fromkeys(failure.text for failure in failures):
        print_error(text)
    return rows, len(failures) == len(rows) and all(failure.status == 2 for failure in failures)
