"""How bytes grow with a size, and how those of two functions compare."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..core import ConfigError, format_bytes, parse_bytes
from ..memory import MemoryReport
from ._limit import beyond_text, tolerated_bytes
from ._owners import difference_text, owners_text, role_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slope:
    """Bytes of a program at several sizes; made by `DeviceMemory.slope`."""

    sizes: tuple[int, ...]
    """The sizes, increasing."""
    reports: tuple[MemoryReport, ...]
    """The report at every size."""
    role: str | None = None
    """The role whose bytes are meant; None for all."""
    space: str = "device"
    """The memory that is meant."""
    variable: str = "unit"
    """What one more is called."""

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """The bytes at every size: at the peak of its program."""
        return tuple(role_bytes(report, self.role, self.space) for report in self.reports)

    @property
    def bytes_per_unit(self) -> int:
        """The slope of the line that fits best."""
        return round(float(np.polyfit(self.sizes, self.num_bytes, 1)[0]))

    def assert_slope_at_most(self, limit: str | int) -> None:
        """Fail when the bytes grow faster.

        Args:
            limit: bytes per unit.

        Raises:
            AssertionError: with the bytes at every size, and the owners that grew most.
        """
        __tracebackhide__ = True
        allowed = parse_bytes(limit)
        if self.bytes_per_unit > allowed:
            raise AssertionError(
                f"{self._what()} was limited to {format_bytes(allowed)} per {self.variable} but grows by "
                f"{beyond_text(self.bytes_per_unit, allowed)}\n{self._text()}"
            )

    def assert_flat(self, tolerance: str | int = 0) -> None:
        """Fail when the bytes depend on the size.

        Args:
            tolerance: how far the largest and the smallest may lie apart: bytes, or a share such as ``"1 %"``.

        Raises:
            AssertionError: with the bytes at every size, and the owners that grew most.
        """
        __tracebackhide__ = True
        low, high = min(self.num_bytes), max(self.num_bytes)
        if high - low > tolerated_bytes(tolerance, low):
            raise AssertionError(
                f"{self._what()} should not depend on the number of {self.variable}s but differs by "
                f"{format_bytes(high - low)}\n{self._text()}"
            )

    def _what(self) -> str:
        where = f"on {self.reports[0].target.name}"
        return f"{self.space} memory{f' of role {self.role!r}' if self.role else ''} {where}"

    def _text(self) -> str:
        sizes = [f"  {format_bytes(size):>11}  at {n}" for n, size in zip(self.sizes, self.num_bytes, strict=True)]
        return "\n".join([*sizes, difference_text(self.reports[0], self.reports[-1])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """Bytes of one program beside those of another; made by `DeviceMemory.ratio`."""

    numerator: MemoryReport
    """The report above."""
    denominator: MemoryReport
    """The report below."""
    role: str | None = None
    """The role whose bytes are meant; None for all."""

    @property
    def value(self) -> float:
        """Bytes of the one divided by bytes of the other.

        Raises:
            ConfigError: when the other has none.
        """
        below = role_bytes(self.denominator, self.role)
        if not below:
            raise ConfigError(
                f"the second program has no bytes{f' of role {self.role!r}' if self.role else ''} to compare with",
                hint="compare another role, or limit the first program by itself",
            )
        return role_bytes(self.numerator, self.role) / below

    def assert_at_most(self, limit: float) -> None:
        """Fail when the first program needs more of the second's bytes.

        Args:
            limit: the largest ratio.

        Raises:
            AssertionError: with both sizes, the owners of the first, and what differs.
        """
        __tracebackhide__ = True
        if self.value > limit:
            above, below = (role_bytes(report, self.role) for report in (self.numerator, self.denominator))
            raise AssertionError(
                f"the ratio{f' of role {self.role!r}' if self.role else ''} was limited to {limit:g} but is "
                f"{self.value:.3g}: {format_bytes(above)} to {format_bytes(below)} on {self.numerator.target.name}\n"
                f"{owners_text(self.numerator, role=self.role)}\n{difference_text(self.denominator, self.numerator)}"
            )
