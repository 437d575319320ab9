"""Processes of a GPU day: with a limit, killed as a group, and none that outlives what started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        process = subprocess.Popen(
            list(command), env=dict(env), stderr=stderr, start_new_session=True, preexec_fn=dying_with_parent()
        )
        stack.callback(_end, process, patience)
        try:
            return process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` for what a case starts itself, which dies with the case."""
    return subprocess.run(list(command), preexec_fn=dying_with_parent(), **options)


def dying_with_parent() -> Callable[[], None]:
    """What a child calls first: it is killed when this process ends, also by a kill, and had it ended before."""
    parent = os.getpid()

    def ask() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask first, so that a part ends its own case, then kill the whole group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
