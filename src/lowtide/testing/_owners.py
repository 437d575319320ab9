"""Text of a failing test: the largest owners at the peak, and the changes between two reports."""

from __future__ import annotations

import difflib
import io
from typing import Any

from ..core import ConfigError, format_bytes
from ..memory import MemoryReport, diff
from ..report import DERIVED_ROLES


def owners_text(report: MemoryReport, *, role: str | None = None, space: str = "device", top: int = 8) -> str:
    """List the largest owners at the peak, one per line: bytes, role, phase, name, array, source."""
    peak = report.host_peak if space == "host" else report.peak
    # Equal buffers of one source line, such as those of unrolled layers, share a line.
    equal: dict[tuple[Any, ...], list[Any]] = {}
    for b in peak:
        if role is None or b.role == role:
            equal.setdefault((b.role, b.phase, b.shape, b.dtype, b.num_bytes, b.source), []).append(b)
    groups = sorted(equal.values(), key=lambda group: -sum(b.num_bytes for b in group))
    location = "on the host" if space == "host" else "at the peak"
    lines = [f"largest owners {location}" + (f" of role {role!r}:" if role else ":")]
    for group in groups[:top]:
        b, count = group[0], len(group)
        array = f"{b.dtype}[{','.join(map(str, b.shape))}]" if b.dtype else ""
        name = b.label + (f" and {count - 1} equal ones" if count > 1 else "")
        parts = [b.role, b.phase, name, array, b.source]
        lines.append(f"  {format_bytes(sum(o.num_bytes for o in group)):>11}  " + "  ".join(p for p in parts if p))
    if len(groups) > top:
        other_bytes = sum(b.num_bytes for group in groups[top:] for b in group)
        lines.append(f"  {format_bytes(other_bytes):>11}  {len(groups) - top} more")
    return "\n".join(lines if groups else [*lines, "  nothing"])


def difference_text(before: MemoryReport, after: MemoryReport, *, top: int = 8) -> str:
    """Format the changes between two reports, owner by owner."""
    from rich.console import Console

    file = io.StringIO()
    diff(before, after).print(Console(file=file, width=110, no_color=True, highlight=False), top=top)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def role_bytes(report: MemoryReport, role: str | None, space: str = "device") -> int:
    """Return the bytes at the peak of one role, or of all.

    Raises `ConfigError` for a role that the report does not have, so that a mistyped role does not pass as 0 bytes.
    """
    check_role(report, role)
    peak = report.host_peak if space == "host" else report.peak
    return sum(b.num_bytes for b in peak if role is None or b.role == role)


def check_role(report: MemoryReport, role: str | None) -> None:
    """Check that a report has a role."""
    # Derived roles are always valid: a program may have no bytes of them, and then the report does not list them.
    roles = dict.fromkeys([*report.by_role, *report.host_by_role, *(b.role for b in report.buffers), *DERIVED_ROLES])
    if role is not None and role not in roles:
        close = difflib.get_close_matches(role, roles, n=3)
        raise ConfigError(
            f"the report has no role {role!r}",
            expected=", ".join(roles),
            got=repr(role),
            hint=f"near misses: {', '.join(close)}"
            if close
            else 'name the role: device_memory(fn, ..., roles={"params": 0})',
        )
