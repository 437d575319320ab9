"""The bytes of one compiled program: per memory space, and per role.

Every figure is compiled: it is XLA's own, or derived from the executable's layouts so that the parts add up to XLA's
total exactly. `peak_memory_in_bytes` is not used; on a TPU it mixes host into device bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.core import format_bytes

from ._buffers import Buffer, Space, live_bytes, sum_by_role, to_rows
from ._targets import Target
from .views import _json as views_json
from .views._files import write_view
from .views._terminal import print_report
from .views._verdict import summary

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 2
"""Version of the JSON that `MemoryReport.to_json` writes; it changes when a key changes its meaning or goes."""


def versions() -> dict[str, str | None]:
    """Versions of what decides a compiled figure; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("lowtide", "jax", "jaxlib", "libtpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceBytes:
    """What one program needs in one memory space of one device.

    Examples:
        >>> SpaceBytes(argument_bytes=10, output_bytes=6, alias_bytes=4, temp_bytes=3, code_bytes=1).total_bytes
        16
    """

    argument_bytes: int = 0
    """Arguments, padded as they are stored."""
    output_bytes: int = 0
    """Outputs, those written into donated arguments included."""
    alias_bytes: int = 0
    """Outputs that are written into donated arguments, and so take no bytes of their own."""
    temp_bytes: int = 0
    """What the program allocates while it runs, fragmentation included."""
    code_bytes: int = 0
    """The program itself and its constants."""

    @property
    def total_bytes(self) -> int:
        """Bytes in this space while the program runs: argument + output - alias + temp + code."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MemoryReport:
    """Where a compiled program's bytes go, on one device of a target; made by `analyze`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.memory import analyze
        >>> report = analyze(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)), roles={"params": 0})
        >>> report.by_role["params"], report.device_bytes == sum(report.by_role.values())
        (64, True)
    """

    target: Target
    """The hardware the program was compiled for."""
    device: SpaceBytes
    """The device's own memory (HBM on an accelerator)."""
    host: SpaceBytes
    """Memory of the machine that holds the device, where arrays are offloaded to."""
    by_role: Mapping[str, int]
    """Device bytes per role; the values add up to `device_bytes`. Arguments stand under the roles that `analyze` was
    given and under ``other``; ``unattributed`` is what XLA counts beside the leaves (tables of pointers);
    ``outputs`` are those not written into arguments; ``temporaries``; ``code``."""
    host_by_role: Mapping[str, int]
    """The same for host memory; the values add up to `host_bytes`."""
    buffers: tuple[Buffer, ...] = ()
    """Every piece of memory the program uses, with its owner and the positions between which it is alive."""
    moments: tuple[str, ...] = ("",)
    """The operation at every position of the program, in the order of execution, loop bodies once."""
    peak_moment: int = 0
    """The position at which most device bytes are alive."""
    host_peak_moment: int = 0
    """The position at which most host bytes are alive."""
    notes: tuple[str, ...] = ()
    """What a reader has to know to trust the figures."""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=versions)
    """Versions of what decided the figures, when the report was made."""

    @property
    def peak(self) -> tuple[Buffer, ...]:
        """What the device holds at the peak, largest first; the bytes add up to `device_bytes`."""
        return self.alive_at(self.peak_moment)

    @property
    def host_peak(self) -> tuple[Buffer, ...]:
        """What the host holds at its peak, largest first; the bytes add up to `host_bytes`."""
        return self.alive_at(self.host_peak_moment, space="host")

    @property
    def peak_by_role(self) -> dict[str, int]:
        """Bytes of `peak` per role, largest first."""
        return sum_by_role(self.peak)

    def alive_at(self, moment: int, *, space: Space = "device") -> tuple[Buffer, ...]:
        """The buffers alive at a position of the program, largest first.

        Args:
            moment: a position in `moments`.
            space: which memory.
        """
        alive = [b for b in self.buffers if b.space == space and b.alive_at(moment)]
        return tuple(sorted(alive, key=lambda b: -b.num_bytes))

    def live_bytes(self, *, space: Space = "device") -> list[int]:
        """Bytes alive at every position of the program, fragmentation left out."""
        return live_bytes([b for b in self.buffers if b.space == space], len(self.moments))

    @property
    def device_bytes(self) -> int:
        """Bytes on one device while the program runs."""
        return self.device.total_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, for one device, while the program runs."""
        return self.host.total_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Usable bytes of the device less the target's reserve that are left; negative when it does not fit."""
        budget = self.target.budget_bytes
        return None if budget is None else budget - self.device_bytes

    @property
    def host_margin_bytes(self) -> int | None:
        """Bytes of the host, of this device's share, that are left; None when the machine is unknown."""
        return None if self.target.host_bytes is None else self.target.host_bytes - self.host_bytes

    @property
    def fits(self) -> bool | None:
        """Whether one device can hold it and keep the target's reserve, and the host its part of it.

        None when the device's capacity is unknown; a host whose capacity is unknown is taken to suffice.
        """
        if self.host_bytes and self.host_margin_bytes is not None and self.host_margin_bytes < 0:
            return False
        return None if self.margin_bytes is None else self.margin_bytes >= 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, the content of `to_json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "figures": "compiled",
            "target": dataclasses.asdict(self.target),
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "margin_bytes": self.margin_bytes,
            "host_margin_bytes": self.host_margin_bytes,
            "device": {**dataclasses.asdict(self.device), "total_bytes": self.device_bytes},
            "host": {**dataclasses.asdict(self.host), "total_bytes": self.host_bytes},
            "by_role": dict(self.by_role),
            "host_by_role": dict(self.host_by_role),
            "buffers": to_rows(self.buffers),
            "moments": list(self.moments),
            "peak_moment": self.peak_moment,
            "host_peak_moment": self.host_peak_moment,
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON, integer bytes throughout.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
        """
        write_view(path, f"{views_json.dump(self.to_dict())}\n".encode())

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryReport:
        """Read a report that `to_json` wrote.

        Args:
            path: the file.

        Returns:
            A report equal to the one that was written, with the versions it was made with.

        Raises:
            ReportError: when there is no such file, or it holds something else, or another version of the format.

        Memory:
            None on any device.
        """
        return views_json.read_report(path, schema_version=SCHEMA_VERSION)

    def print(self, console: Console | None = None, *, top: int = 20) -> None:
        """Print the report to a terminal: verdict, bytes by role, live bytes over the program, largest owners.

        Args:
            console: a `rich.console.Console`; None for one on standard output.
            top: how many owners to list per memory space; equal buffers of numbered layers count as one.

        Examples:
            >>> import jax.numpy as jnp
            >>> from lowtide.memory import analyze
            >>> analyze(lambda x: x * 2, jnp.ones(256), target="cpu").print()
            Compiled bytes on one device of cpu
            2.00 KiB; the capacity is unknown
            ...
        """
        print_report(self, console, top=top)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one HTML file that needs nothing else: timeline, treemap and table of the buffers.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.

        Memory:
            None on any device. The file stays below 10 MB; beyond that the smallest buffers become one row a role,
            and the page says so.
        """
        from .views._html import report_page

        write_view(path, report_page(self))

    def to_png(self, path: str | Path) -> None:
        """Draw the timeline by role and the largest owners at the peak, 1600×900.

        Args:
            path: the file; it is replaced when it exists.

        Raises:
            OutputError: when the file cannot be written.
            ConfigError: when matplotlib (extra ``report``) is not installed.
        """
        from .views._png import report_png

        write_view(path, report_png(self))

    def __repr__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        from .views._html import notebook

        return notebook(self)

    def table(self) -> Any:
        """The report as a table for a terminal.

        Returns:
            A `rich.table.Table`; roles without bytes are left out.
        """
        from rich.table import Table

        table = Table(title=f"Compiled bytes on one device of {self.target.name}", show_footer=True)
        capacity = self.target.device_bytes
        limit = f" of {format_bytes(capacity)}" if capacity is not None else ""
        table.add_column("role", footer="total")
        table.add_column("device", justify="right", footer=f"{format_bytes(self.device_bytes)}{limit}")
        table.add_column("host", justify="right", footer=format_bytes(self.host_bytes))
        for role, num_bytes in self.by_role.items():
            host_bytes = self.host_by_role.get(role, 0)
            if num_bytes or host_bytes:
                table.add_row(role, format_bytes(num_bytes), format_bytes(host_bytes))
        if self.notes:
            table.caption = "\n".join(self.notes)
        return table
