"""Explain out-of-memory errors: which arrays use the memory at the peak of the failed program, and remedies.

The `explain_oom` block records the programs that JAX compiles inside it. Memory may run out in the compiler (as on a
TPU) or at run time (as on a GPU), where the largest recorded program counts as the failed program. The failed program
is compiled again with a dump, which shows the owners of the bytes. So the block costs no time until a failure.
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
from .._analysis import examine, examine_dump
from .._owners import Owners
from ._lint import run_rules
from ._remedies import ranked, suggest

_HINT = "call lowtide.memory.remedies(step, *args), which compiles remedies that only change the call of the step"


@contextlib.contextmanager
def explain_oom(
    *,
    target: Target | str | None = None,
    roles: Mapping[str, str] | None = None,
    top: int = 12,
    html: str | Path | None = None,
) -> Generator[None]:
    """Replace an out-of-memory error inside the block with an error that lists which arrays use the memory.

    Put the block around everything that may fail, including first calls: it does not record earlier compilations.

    Args:
        target: the hardware, for its capacity; None for the attached hardware. Set it for ahead-of-time compilation.
        roles: roles of arguments by their parameter names in the failing function (``{"params": "weights"}``); by
            default each argument is a separate role.
        top: number of owners and remedies in the message.
        html: path of an HTML page to write with the report; None writes no page.

    Raises:
        OutOfMemoryError: instead of JAX's error, which is its ``__cause__``; has attributes `report` and `remedies`.
        Exception: JAX's error, with a note, if no program was compiled in the block or the explanation fails.
        TargetError: for an unknown target.

    Memory:
        Programs compiled inside the block are kept until its end. After a failure one program is compiled again, on
        the host.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> with explain_oom():
        ...     total = jax.jit(jnp.sum)(jnp.ones(8))
    """
    if target is not None:
        target = resolve_target(target)
    with watch_compilations() as compilations:
        try:
            yield
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            explanation = _explain(error, compilations, target, roles or {}, top, html)
            if explanation is None:
                raise
            raise explanation from error


def _explain(
    error: Exception,
    compilations: list[Compilation],
    target: Target | str | None,
    roles: Mapping[str, str],
    top: int,
    html: str | Path | None,
) -> OutOfMemoryError | None:
    try:
        compilation = _failed_compilation(error, compilations)
        if compilation is None:
            error.add_note(
                "lowtide: no program was compiled inside explain_oom(), so the failed program is unknown; "
                "put the block around the first call of the step"
            )
            return None
        with tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True) as folder:
            compilation.dump(folder)
            hlo = read_dump(folder)
        if hlo is None:
            raise LookupError("the compiler dumped no buffer assignment")
        report, owners = examine_dump(hlo, resolve_target(target), compilation.stats(), roles)
        if html is not None:
            report.to_html(html)
        is_compiled = compilation.error is None
        when = "at run time" if is_compiled else "during compilation"
        return _out_of_memory_error(when, report, owners, top, is_compiled=is_compiled)
    except Exception as failure:  # an error in the explanation must not hide the user's error
        error.add_note(f"lowtide: the explanation failed: {type(failure).__name__}: {failure}")
        return None


def _failed_compilation(error: Exception, compilations: list[Compilation]) -> Compilation | None:
    """Return the compilation that raised `error`, or else the compiled program that needs the most bytes, or None."""
    rejected = [c for c in compilations if c.error is error]
    if rejected:
        return rejected[-1]

    def required_bytes(compilation: Compilation) -> int:
        stats = compilation.stats()
        sizes = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
        return sum(sizes) - stats.alias_size_in_bytes

    return max((c for c in compilations if c.executable is not None), key=required_bytes, default=None)


def shortage(
    program: CompiledProgram,
    *,
    when: str = "before it ran",
    roles: Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    top: int = 12,
    hint: str = _HINT,
) -> OutOfMemoryError:
    """Build the error for a program that is too large; the message lists the largest arrays, and remedies.

    Args:
        program: a program from `lowtide.memory.compile`.
        when: text that states when memory ran out.
        roles: role names and their arguments, as in `lowtide.memory.analyze`.
        budget_bytes: the limit in bytes; None means `budget_bytes` of the program's target.
        top: number of owners and remedies in the message.
        hint: the hint of the error.

    Returns:
        The error, for the caller to raise. It has the attributes `report` and `remedies`.

    Raises:
        ConfigError: for invalid `roles`, as in `lowtide.memory.analyze`.

    Memory:
        Reads the compiler's dump; allocates nothing on the device.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import compile
        >>> error = shortage(compile(lambda x: x @ x, jnp.ones((8, 8))), budget_bytes=100)
        >>> str(error).splitlines()[0]
        '[LT010] out of memory before it ran: the program needs 512 B on one device of this machine (100 B usable)'
    """
    report, owners = examine(program, roles)
    return _out_of_memory_error(when, report, owners, top, budget_bytes, is_compiled=program.error is None, hint=hint)


def _out_of_memory_error(
    when: str,
    report: MemoryReport,
    owners: Owners | None,
    top: int,
    budget_bytes: int | None = None,
    *,
    is_compiled: bool,
    hint: str = _HINT,
) -> OutOfMemoryError:
    from rich.console import Console

    remedies = () if owners is None else ranked(suggest(report, owners, run_rules(owners, report)), report)
    text = io.StringIO()
    report.print(Console(file=text, width=120, no_color=True), top=top)
    usable = report.target.budget_bytes if budget_bytes is None else budget_bytes
    capacity = f"{format_bytes(usable)} usable" if usable is not None else "capacity unknown"
    listing = "\n".join(f"  {number}. {remedy}" for number, remedy in enumerate(remedies[:top], start=1))
    message = (
        f"out of memory {when}: the program needs {format_bytes(report.device_bytes)} on one device of "
        f"{'this machine' if report.target.name == 'here' else report.target.name} ({capacity})\n"
        f"{text.getvalue().rstrip()}"
        + (f"\nremedies, each applied separately:\n{listing}" if listing else "")
        + (f"\n{_live_arrays(report)}" if is_compiled else "")
    )
    error = OutOfMemoryError(message, hint=hint)
    error.report, error.remedies = report, remedies
    return error


def _live_arrays(report: MemoryReport) -> str:
    """Return text that lists the largest live arrays of the process, including arrays outside the program."""
    bytes_by_device = collections.defaultdict[Any, collections.Counter[str]](collections.Counter)
    for array in jax.live_arrays():
        if array.is_deleted() or on_host(array.sharding):
            continue
        for shard in array.addressable_shards:
            bytes_by_device[shard.device][f"{array.dtype}{list(array.shape)}"] += shard.data.nbytes
    sizes = max(bytes_by_device.values(), key=lambda counter: counter.total(), default=collections.Counter[str]())
    listing = ", ".join(f"{shape} {format_bytes(size)}" for shape, size in sizes.most_common(5))
    arguments = report.device.argument_bytes
    return (
        f"live arrays of the process at the failure: {format_bytes(sizes.total())} on the fullest device "
        f"(the program needs {format_bytes(arguments)} for its arguments)" + (f": {listing}" if listing else "")
    )
