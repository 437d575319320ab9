"""Limits and tolerances: the arguments of the marker, read before the test runs."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from ..core import ConfigError, TargetError, format_bytes, parse_bytes
from ..memory import Target, target

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
