"""Limits, tolerances and roles of a test, and the text of a failed assertion: the largest owners and the changes.

The arguments of the marker are read before the test runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
from typing import Any

from ..core import ConfigError, TargetError, format_bytes, parse_bytes
from ..memory import MemoryReport, Target, diff, target
from ..report import DERIVED_ROLES

_HINT = '@pytest.mark.device_memory_limit("12 GiB", target="v5e:2x2")'
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """Limit on the device memory of a test's programs.

    Examples:
        >>> str(Limit.of("1536 MiB", target="cpu"))
        '1.50 GiB'
    """

    num_bytes: int
    """Bytes on one device."""
    target: Target | None = None
    """The target that the test compiles for by default."""
    missing: str | None = None
    """Why the target's compiler is not available here; set only for an optional limit."""

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Limit:
        """Read the arguments of the marker: ``(size, *, target=None, optional=False)``.

        Args:
            *args: the size.
            **kwargs: the other arguments.

        Raises:
            ConfigError: for a missing or invalid size, or an argument that the marker does not have.
            TargetError: for an unknown target, or, unless the limit is optional, one whose compiler is not installed.
        """
        arguments = ("size", "target", "optional")
        for key in kwargs:
            if key not in arguments:
                close = difflib.get_close_matches(key, arguments, n=1)
                raise ConfigError(
                    f"the marker has no argument {key!r}",
                    expected=", ".join(arguments),
                    got=key,
                    hint=f"did you mean {close[0]!r}?" if close else _HINT,
                )
        sizes = [*args, *([kwargs["size"]] if "size" in kwargs else [])]
        if len(sizes) != 1:
            raise ConfigError(
                "the marker needs one size", expected='a size such as "12 GiB"', got=sizes or "no size", hint=_HINT
            )
        num_bytes = parse_bytes(sizes[0])
        optional = kwargs.get("optional", False)
        if not isinstance(optional, bool):
            raise ConfigError("optional of the marker must be True or False", got=repr(optional), hint=_HINT)
        goal = kwargs.get("target")
        if goal is not None and not isinstance(goal, str | Target):
            raise ConfigError("target of the marker must be a name or a Target", got=type(goal).__name__, hint=_HINT)
        try:
            # `target` raises for a missing compiler, with a hint how to install it.
            goal = target(goal) if isinstance(goal, str) else goal
        except TargetError as error:
            # An unknown name is a mistake. A compiler that is not installed may be available on another machine, such
            # as CI.
            if not optional or "pip install" not in (error.hint or ""):
                raise
            return cls(num_bytes=num_bytes, missing=error.message)
        return cls(num_bytes=num_bytes, target=goal)

    def __str__(self) -> str:
        return format_bytes(self.num_bytes)


def beyond_text(needed: int, allowed: int) -> str:
    """Return bytes beyond a limit as text, with the excess where both texts would be the same."""
    text = format_bytes(needed)
    return text if text != format_bytes(allowed) else f"{text} ({format_bytes(needed - allowed)} more)"


def tolerated_bytes(tolerance: str | int, total: int) -> int:
    """Return the bytes of a tolerance: a size such as ``"2 MiB"``, or a share of `total` such as ``"1 %"``.

    Raises `ConfigError` for text that is neither.
    """
    share = _PERCENT.fullmatch(tolerance) if isinstance(tolerance, str) else None
    if share is not None:
        return int(float(share[1]) / 100 * total)
    try:
        return parse_bytes(tolerance)
    except ConfigError as error:
        raise ConfigError(
            f"{tolerance!r} is not a tolerance",
            expected='a size such as "2 MiB", or a share such as "1 %"',
            got=repr(tolerance),
            hint="leave it out for no tolerance",
        ) from error


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
