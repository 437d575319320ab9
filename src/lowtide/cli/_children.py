"""Commands in processes of their own: a process that compiled for a TPU keeps much of the compiler's memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence


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


def run_child(arguments: Sequence[str], *, success: Sequence[int] = (0,)) -> None:
    """Run ``lowtide`` with these arguments in a process of its own; its output is kept.

    Args:
        arguments: what stands behind ``lowtide``.
        success: exit statuses that are no failure.

    Raises:
        ChildError: when it ends with another status.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    if done.returncode in success:
        return
    if done.returncode < 0:
        text = f"the compiling process was killed by signal {-done.returncode}: its own memory may not have sufficed"
        raise ChildError(text, done.returncode)
    # The user's code may print lines that begin with "error", too.
    found = re.search(r"^error ((?:\[LT|in the code of ).*)", done.stderr, flags=re.MULTILINE | re.DOTALL)
    raise ChildError(found[1].rstrip() if found else done.stderr.rstrip()[-2000:], done.returncode)
