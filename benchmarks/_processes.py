"""Processes of a GPU day: with a limit, killed as a group, and none that outlives what started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Stopped(SystemExit):
    """SIGINT or SIGTERM came: processes are ended on the way out, and the exit status says which."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Stopped`, so that `finally` runs."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    seconds: float,
    *,
    errors: Path | None = None,
    patience: float = 3.0,
) -> int | None:
    """Run to the end or the limit; the exit status, None for a process that was killed at its limit.

    The process leads a group that is killed as a whole, and dies when this one does.
    """
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(errors.open("wb")) if errors else None
        process = subprocess.Popen(_dying_with_parent(command), env=dict(env), stderr=stderr, start_new_session=True)
        stack.callback(_end, process, patience)
        try:
            return process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` for what a case starts itself, which dies with the case."""
    return subprocess.run(_dying_with_parent(command), **options)


def check_child(what: str, command: Sequence[str], **options: Any) -> None:
    """Run what a case starts itself, which must end well; an error that says why it did not, in its own words.

    What it writes to standard error goes on to this process's as it comes: of a process that is killed it is left.
    """
    words = _dying_with_parent(command)
    told: list[str] = []
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace", **options) as process:
        for line in process.stderr or ():
            sys.stderr.write(line)
            told = [*told[-999:], line]
    if process.returncode:
        raise RuntimeError(f"{what} ended with {process.returncode}: {reason(''.join(told))}")


def reason(text: str) -> str:
    """The exception that a process ended with, which notes and hints may follow; else the first line that it told."""
    told = text.strip().splitlines()
    named = [line for line in told if re.match(r"((\w+: )?error[: ]|[\w.]*(Error|Exception|Interrupt)\b)", line)]
    return (named[-1:] or told[:1] or ["?"])[0]


def _dying_with_parent(command: Sequence[str]) -> list[str]:
    """A command that is killed when this process ends, also by a kill, and does not begin had it ended before.

    This file, run as a script, asks for it and becomes the command: ``preexec_fn`` would run Python between fork and
    exec, which is not safe in a process with threads, such as one that runs JAX.
    """
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask first, so that a part ends its own case, then kill the whole group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    _, parent, *words = sys.argv
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which exec keeps
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(words[0], words)
