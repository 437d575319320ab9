"""Processes of a GPU day: each has a time limit and ends when its parent ends. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any


def run(command: Sequence[str], env: Mapping[str, str], seconds: float, stderr: IO[bytes] | None = None) -> int | None:
    """Run a command for at most some seconds; its exit status, or None if it was killed at the limit.

    The command leads a process group, which is killed as a whole.
    """
    process = subprocess.Popen(_tied(command), env=dict(env), stderr=stderr, start_new_session=True)
    try:
        return process.wait(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Call `subprocess.run` for a process that ends when this one ends."""
    return subprocess.run(_tied(command), **options)


def check_child(title: str, command: Sequence[str], **options: Any) -> None:
    """Run a process of a case; raise its own error if it fails.

    Its standard error is passed on line by line, so that a process that is killed leaves what it wrote.
    """
    lines: list[str] = []
    with subprocess.Popen(_tied(command), stderr=subprocess.PIPE, text=True, errors="replace", **options) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        raise RuntimeError(f"{title} ended with {process.returncode}: {reason(''.join(lines))}")


def reason(text: str) -> str:
    """The last exception in the output of a process, or else its first line."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"((\w+: )?error[: ]|[\w.]*(Error|Exception|Interrupt)\b)", line)]
    return (named[-1:] or lines[:1] or ["?"])[0]


def _tied(command: Sequence[str]) -> list[str]:
    """A command whose process is killed when this process ends, even if this one is killed.

    This file, run as a script, asks the kernel for it and becomes the command. ``preexec_fn`` would run Python between
    fork and exec, which is not safe in a process with threads, such as one that runs JAX.
    """
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


if __name__ == "__main__":
    _, parent, *words = sys.argv
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which exec keeps
    if os.getppid() != int(parent):
        sys.exit(1)  # the parent ended before the call above
    os.execvp(words[0], words)
