"""The report of a compiled program, the difference of two reports, and the methods that show them.

Buffers have no identity across compilations, so `diff` matches the buffers of two reports by owner: memory space,
role, path (or scope, or operation without its number) and dtype. Several buffers of one owner are added up.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import format_bytes
from ._facts import SPACES, Buffer, DiffFacts, DiffRow, ReportFacts, Space, signed, space_total
from .views._content import at_peak, owner_name, summary
from .views._files import dump_json, read_fields, write_view
from .views._html import diff_page, notebook, report_page
from .views._png import diff_png, report_png
from .views._terminal import print_diff, print_report

if TYPE_CHECKING:
    from rich.console import Console


class _Viewed(ABC):
    """Base of objects that can be written as JSON, as an HTML page and as a picture."""

    def to_json(self, path: str | Path) -> None:
        """Write the object as JSON, with all sizes as integer bytes.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
        """
        write_view(path, f"{dump_json(self.to_dict())}\n".encode())

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained HTML file: timelines, and a table of buffers (a report) or owners (a difference).

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.

        Memory:
            None on any device. The smallest buffers of a large report become one row per role, so that the file stays
            below 10 MB; the page then has a note.
        """
        write_view(path, self._page())

    def to_png(self, path: str | Path) -> None:
        """Write a PNG of 1600×900 pixels: timelines by role, and the largest (in a difference: most changed) owners.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
            ConfigError: when matplotlib (extra ``report``) is not installed.
        """
        write_view(path, self._picture())

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the object as plain data, the content of `to_json`."""

    @abstractmethod
    def _page(self) -> bytes: ...

    @abstractmethod
    def _picture(self) -> bytes: ...


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MemoryReport(ReportFacts, _Viewed):
    """Bytes of a compiled program and their owners, on one device of a target; returned by `analyze`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import analyze
        >>> report = analyze(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)), roles={"params": 0})
        >>> report.by_role["params"], report.device_bytes == sum(report.by_role.values())
        (64, True)
    """

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryReport:
        """Read a report that `to_json` wrote.

        Args:
            path: the file.

        Returns:
            A report that equals the written one, including its versions.

        Raises:
            ReportError: when the file is missing, is not a report, or has another version of the format.
        """
        return cls(**read_fields(path))

    def print(self, console: Console | None = None, *, top: int = 20) -> None:
        """Print the report to a terminal: verdict, bytes by role, live bytes over the program, largest owners.

        Args:
            console: a `rich.console.Console`; None for one on standard output.
            top: number of owners to list per memory space; equal buffers of numbered layers count as one.

        Examples:
            >>> import jax.numpy as jnp
            >>> from lowtide.memory import analyze
            >>> analyze(lambda x: x * 2, jnp.ones(256), target="cpu").print()
            Compiled bytes on one device of cpu
            2.00 KiB; the capacity is unknown
            ...
        """
        print_report(self, console, top=top)

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return notebook(self)

    def _page(self) -> bytes:
        return report_page(self)

    def _picture(self) -> bytes:
        return report_png(self)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MemoryDiff(DiffFacts, _Viewed):
    """The difference of two reports; returned by `diff`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import analyze
        >>> small, large = (analyze(lambda x: x * 2, jnp.ones(n), roles={"x": 0}) for n in (16, 32))
        >>> difference = diff(small, large)
        >>> difference.by_role()["x"], difference.delta_bytes()
        ((64, 128), 128)
    """

    def print(self, console: Console | None = None, *, top: int = 20) -> None:
        """Print the difference to a terminal.

        Args:
            console: a `rich.console.Console`; None for one on standard output.
            top: number of owners to list.
        """
        print_diff(self, console, top=top)

    def _page(self) -> bytes:
        return diff_page(self)

    def _picture(self) -> bytes:
        return diff_png(self)

    def __repr__(self) -> str:
        sizes = f"{format_bytes(self.before.device_bytes)} -> {format_bytes(self.after.device_bytes)}"
        return (
            f"MemoryDiff: {sizes} ({signed(self.delta_bytes())}) on {self.after.target.name}, {len(self.rows)} owners"
        )


def diff(before: MemoryReport, after: MemoryReport) -> MemoryDiff:
    """Compare two reports owner by owner.

    Args:
        before: the first report.
        after: the second report.

    Returns:
        The bytes of every owner at the peak of each report, per memory space.

    Memory:
        None on any device; host memory in proportion to the buffers at the peaks.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import analyze
        >>> report = analyze(lambda x: x * 2, jnp.ones(16))
        >>> diff(report, report).delta_bytes()
        0
    """
    rows = [row for space in SPACES for row in _rows(space, before, after)]
    rows.sort(key=lambda row: (-abs(row.delta_bytes), -row.after_bytes, row.role, row.owner))
    return MemoryDiff(before=before, after=after, rows=tuple(rows), notes=_notes(before, after))


# Scopes name the body of a loop `eval_jaxpr` in JAX 0.11 and newer, and `closed_call` in older versions. Both names
# become one, so that reports of different versions match.
_LOOP_BODY = re.compile(r"\beval_jaxpr\b")


def _rows(space: Space, before: MemoryReport, after: MemoryReport) -> list[DiffRow]:
    # If a report has no buffers, its owners are unknown, so both reports are compared by role.
    by_role = not all(any(b.space == space for b in r.buffers) or not space_total(r, space) for r in (before, after))
    sides = [_by_owner(at_peak(r, space), by_role, space_total(r, space)) for r in (before, after)]
    rows: list[DiffRow] = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        (before_bytes, before_count), (after_bytes, after_count) = (side.get(key, (0, 0)) for side in sides)
        sizes = {"before_bytes": before_bytes, "after_bytes": after_bytes}
        counts = {"before_count": before_count, "after_count": after_count}
        role, owner, dtype = key
        rows.append(DiffRow(space=space, role=role, owner=owner, dtype=dtype, **sizes, **counts))
    return rows


def _by_owner(buffers: Iterable[Buffer], by_role: bool, total: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    owners: dict[tuple[str, str, str], tuple[int, int]] = {}
    for buffer in buffers:
        owner = owner_name(buffer) if buffer.path else _LOOP_BODY.sub("closed_call", owner_name(buffer))
        key = (buffer.role, buffer.role, "") if by_role else (buffer.role, owner, buffer.dtype)
        num_bytes, count = owners.get(key, (0, 0))
        owners[key] = (num_bytes + buffer.num_bytes, count + 1)
    # Bytes that no buffer accounts for get their own row, so that the rows add up to the total.
    unattributed = total - sum(num_bytes for num_bytes, _ in owners.values())
    if unattributed:
        key = ("unattributed", "unattributed", "")
        num_bytes, count = owners.get(key, (0, 0))
        owners[key] = (num_bytes + unattributed, count)
    return owners


def _notes(before: MemoryReport, after: MemoryReport) -> tuple[str, ...]:
    notes: list[str] = []
    if before.target != after.target:
        names = (before.target.name, after.target.name)
        description = f"{names[0]} before, {names[1]} after" if names[0] != names[1] else f"both are called {names[0]}"
        notes.append(f"the targets differ: {description}")
    changed = [
        f"{name} {before.versions.get(name) or 'none'} before, {after.versions.get(name) or 'none'} after"
        for name in dict.fromkeys([*before.versions, *after.versions])
        if before.versions.get(name) != after.versions.get(name)
    ]
    if changed:
        notes.append(f"the versions differ: {'; '.join(changed)}")
    return (*notes, *(f"before: {note}" for note in before.notes), *(f"after: {note}" for note in after.notes))
