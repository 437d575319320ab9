"""Out of memory, explained: who owns the bytes at the peak of the program that failed, and what would help.

The block remembers the programs that JAX compiles inside it. When memory runs out, the failing one (at run time the
largest) is compiled once more with a dump, and its owners are read from that. So nothing is paid until it fails, and a
TPU's refusal to compile is explained as well as a GPU's failure to allocate.
"""

from __future__ import annotations

import collections
import contextlib
import io
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax

from ...core import OutOfMemoryError, format_bytes, on_host
from ...core._compat import Compilation, watch_compilations
from ...hlo import CompiledProgram, is_out_of_memory, read_dump
from ...report import MemoryReport
from ...targets import Target, resolve_target
from .._analyze import examine, examine_dump
from .._owners import Owners
from ._lint import lint_owners
from ._remedies import Remedy, ranked, suggest

_HINT = "lowtide.memory.remedies(step, *args) compiles the remedies that only change how the step is called"


@contextlib.contextmanager
def explain_oom(
    *,
    target: Target | str | None = None,
    roles: Mapping[str, str] | None = None,
    top: int = 12,
    html: str | Path | None = None,
) -> Generator[None]:
    """Turn an out-of-memory error inside the block into one that names the owners of the bytes.

    Put it around everything that may fail, first calls included: programs that were compiled before are not known.

    Args:
        target: the hardware, for its capacity; None for the hardware at hand. Give it for programs that are compiled
            ahead of time.
        roles: the role of arguments, by the names that the failing function gives them (``{"params": "weights"}``);
            by default each argument is a role of its own.
        top: how many owners and remedies the message lists.
        html: where to write the report's page, if anywhere.

    Yields:
        Nothing.

    Raises:
        OutOfMemoryError: instead of JAX's error, which is its cause. Its `report` and `remedies` are for programs. When
            the explanation itself fails, JAX's error is raised with a note.

    Memory:
        Programs compiled inside are kept alive until the end of the block. After a failure one of them is compiled
        again, on the host.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> with explain_oom():
        ...     total = jax.jit(jnp.sum)(jnp.ones(8))
    """
    with watch_compilations() as seen:
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            explained = _explain(error, seen, target, roles or {}, top, html)
            if explained is None:
                raise
            raise explained from error


def _explain(
    error: Exception,
    seen: list[Compilation],
    target: Target | str | None,
    roles: Mapping[str, str],
    top: int,
    html: str | Path | None,
) -> OutOfMemoryError | None:
    try:
        culprit = _culprit(error, seen)
        if culprit is None:
            error.add_note(
                "lowtide: no program was compiled inside explain_oom(), so nothing is known about this one; "
                "put the block around the first call of the step"
            )
            return None
        with tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True) as folder:
            culprit.dump(folder)
            hlo = read_dump(folder)
        if hlo is None:
            raise LookupError("the compiler dumped no buffer assignment")
        report, owners = examine_dump(hlo, resolve_target(target), culprit.stats(), roles)
        found, ran = _remedies(report, owners), culprit.error is None
        if html is not None:
            report.to_html(html)
        return _explained("while it ran" if ran else "while it was compiled", report, found, top, live=ran)
    except Exception as failure:  # the user's error must never be hidden by ours
        error.add_note(f"lowtide: explaining it failed: {type(failure).__name__}: {failure}")
        return None


def _culprit(error: Exception, seen: list[Compilation]) -> Compilation | None:
    """Find the program that the compiler refused; of programs that compiled, the one that needs most."""
    refused = [c for c in seen if c.error is error]
    if refused:
        return refused[-1]

    def needs(compilation: Compilation) -> int:
        stats = compilation.stats()
        sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
        return sum(sizes) - stats.alias_size_in_bytes

    return max((c for c in seen if c.executable is not None), key=needs, default=None)


def _remedies(report: MemoryReport, owners: Owners) -> tuple[Remedy, ...]:
    return ranked(suggest(report, owners, lint_owners(owners, report)), report)


def shortage(
    program: CompiledProgram,
    *,
    when: str = "before it ran",
    roles: Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    top: int = 12,
    hint: str = _HINT,
) -> OutOfMemoryError:
    """Make the error that says who owns the bytes of a program that is too large, and what would help.

    Args:
        program: what `lowtide.memory.compile` made.
        when: when the memory ran out.
        roles: what to call which arguments, as in `lowtide.memory.analyze`.
        budget_bytes: the bytes that it may have; by default those of its target.
        top: how many owners and remedies the message lists.
        hint: what the reader can do.

    Returns:
        The error, for the caller to raise; its `report` and `remedies` are for programs.

    Memory:
        Reads what the compiler dumped; allocates nothing on the device.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import compile
        >>> error = shortage(compile(lambda x: x @ x, jnp.ones((8, 8))), budget_bytes=100)
        >>> str(error).splitlines()[0]
        '[LT010] out of memory before it ran: the program needs 512 B on one device of this machine (100 B usable)'
    """
    report, owners = examine(program, roles)
    found = () if owners is None else _remedies(report, owners)
    return _explained(when, report, found, top, budget_bytes, live=program.error is None, hint=hint)


def _explained(
    when: str,
    report: MemoryReport,
    remedies: tuple[Remedy, ...],
    top: int,
    budget_bytes: int | None = None,
    *,
    live: bool,
    hint: str = _HINT,
) -> OutOfMemoryError:
    usable = report.target.device_bytes if budget_bytes is None else budget_bytes
    room = f"{format_bytes(usable)} usable" if usable is not None else "capacity unknown"
    listed = "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(remedies[:top], start=1))
    message = (
        f"out of memory {when}: the program needs {format_bytes(report.device_bytes)} on one device of "
        f"{'this machine' if report.target.name == 'here' else report.target.name} ({room})\n{_text(report, top)}"
        + (f"\nremedies, each by itself:\n{listed}" if listed else "")
        + (f"\n{_live_arrays(report)}" if live else "")
    )
    explained = OutOfMemoryError(message, hint=hint)
    explained.report, explained.remedies = report, remedies
    return explained


def _text(report: MemoryReport, top: int) -> str:
    from rich.console import Console

    text = io.StringIO()
    report.print(Console(file=text, width=120, no_color=True), top=top)
    return text.getvalue().rstrip()


def _live_arrays(report: MemoryReport) -> str:
    """Say what else was on the device: arrays that live outside of the program."""
    of_device = collections.defaultdict[Any, collections.Counter[str]](collections.Counter)
    for array in jax.live_arrays():
        if array.is_deleted() or on_host(array.sharding):
            continue
        for shard in array.addressable_shards:
            of_device[shard.device][f"{array.dtype}{list(array.shape)}"] += shard.data.nbytes
    sizes = max(of_device.values(), key=lambda found: found.total(), default=collections.Counter[str]())
    listed = ", ".join(f"{shape} {format_bytes(size)}" for shape, size in sizes.most_common(5))
    arguments = report.device.argument_bytes
    return (
        f"arrays alive in the process when it failed: {format_bytes(sizes.total())} on the fullest device "
        f"(the program's arguments are {format_bytes(arguments)} of what it needs)" + (f": {listed}" if listed else "")
    )
