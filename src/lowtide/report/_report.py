"""The report of one compiled program, and the methods that show it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ._facts import SCHEMA_VERSION, ReportFacts
from ._viewed import Viewed
from .views import _json as views_json
from .views._html import notebook, report_page
from .views._png import report_png
from .views._terminal import print_report
from .views._verdict import summary

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MemoryReport(ReportFacts, Viewed):
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
            A report equal to the one that was written, with the versions it was made with.

        Raises:
            ReportError: when the file is missing, is not a report, or has another version of the format.

        Memory:
            None on any device.
        """
        return cls(**views_json.read_fields(path, schema_version=SCHEMA_VERSION))

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

    def _page(self) -> bytes:
        return report_page(self)

    def _picture(self) -> bytes:
        return report_png(self)

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return notebook(self)
