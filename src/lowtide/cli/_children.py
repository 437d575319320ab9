"""Commands in processes of their own: a process that compiled for a TPU keeps much of the compiler's memory."""

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
    """A command that failed; `text` is what it printed about it, `status` its exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text, self.status = text, status

    @property
    def line(self) -> str:
        """The error in one line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        coded = [line for line in lines if line.startswith("[LT")]
        return (coded or lines[-1:] or [f"exit status {self.status}"])[0]


def run_child(arguments: Sequence[str]) -> None:
    """Run ``lowtide`` with these arguments in a process of its own; its output is kept.

    Args:
        arguments: what stands behind ``lowtide``.

    Raises:
        ChildError: when it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if done.returncode == 0:
        return
    if done.returncode < 0:
        text = f"the compiling process was killed by signal {-done.returncode}: its own memory may not have sufficed"
        raise ChildError(text, done.returncode)
    # The user's code may print lines that begin with "error", too.
    found = re.search(r"^error ((?:\[LT|in the code of ).*)", done.stderr, flags=re.MULTILINE | re.DOTALL)
    raise ChildError(found[1].rstrip() if found else done.stderr.rstrip()[-2000:], done.returncode)


def job_arguments(args: argparse.Namespace, settings: Mapping[str, Any], folder: str) -> list[str]:
    """Return the arguments that name the same job in another process.

    Args:
        args: the arguments of this one.
        settings: of a model's folder, as `job_settings` returns them.
        folder: where to write the settings.
    """
    sets = [part for pair in args.set for part in ("--set", pair)]
    if not settings:
        return [args.job, *sets]
    file = Path(folder, "settings.toml")
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return [args.job, *sets, "--config", str(file)]


def one_by_one(
    names: Sequence[str], doing: str, measure: Callable[[str], Row], failed: Callable[[str, str], Row]
) -> tuple[list[Row], bool]:
    """Measure targets one after the other, and print what went wrong.

    Args:
        names: the targets.
        doing: what is done, as the beginning of a sentence that ends with a target's name.
        measure: gives a target's row, by `run_child`.
        failed: gives the row of one that failed, of its name and the error in one line.

    Returns:
        The rows, and whether each of them failed for a mistake in the arguments.
    """
    rows: list[Row] = []
    failures: list[ChildError] = []
    for number, name in enumerate(names, start=1):
        with spinner(f"{doing} {name} ({number} of {len(names)})"):
            try:
                rows.append(measure(name))
            except ChildError as error:
                failures.append(error)
                rows.append(failed(name, error.line))
    for text in dict.fromkeys(failure.text for failure in failures):
        print_error(text)
    return rows, len(failures) == len(rows) and all(failure.status == 2 for failure in failures)
