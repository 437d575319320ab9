"""Processes of a GPU day: each has a time limit, and ends when its parent ends. Imports only the standard library."""

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
    """Run a command with a time limit; return its exit status, or None if it was killed at the limit.

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
    """Run a process of a case; raise an error with its last exception if it fails.

    Its standard error is forwarded line by line, so that the output of a killed process is not lost.
    """
    lines: list[str] = []
    with subprocess.Popen(_tied(command), stderr=subprocess.PIPE, text=True, errors="replace", **options) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        raise RuntimeError(f"{title} ended with {process.returncode}: {reason(''.join(lines))}")


def reason(text: str) -> str:
    """Return the last exception in the output of a process, or else its first line."""
    lines = text.strip().splitlines()
    named = [line for line in lines if re.match(r"((\w+: )?error[: ]|[\w.]*(Error|Exception|Interrupt)\b)", line)]
    return (named[-1:] or lines[:1] or ["?"])[0]


def _tied(command: Sequence[str]) -> list[str]:
    """Return a command whose process is killed when this process ends, even if this process itself is killed.

    The command runs this file as a script, which asks the kernel for the signal and then becomes the command.
    ``preexec_fn`` would run Python between fork and exec, which is not safe in a process with threads, such as one that
    runs JAX.
    """
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


if __name__ == "__main__":
    _, parent, *words = sys.argv
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG persists across exec
    if os.getppid() != int(parent):
        sys.exit(1)  # the parent ended before the call above
    os.execvp(words[0], words)
