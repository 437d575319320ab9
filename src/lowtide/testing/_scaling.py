"""How bytes grow with a size, and how the bytes of two programs compare."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..core import ConfigError, format_bytes, parse_bytes
from ..memory import MemoryReport
from ._limit import beyond_text, tolerated_bytes
from ._owners import difference_text, owners_text, role_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slope:
    """Bytes of a program at several sizes; returned by `DeviceMemory.slope`."""

    sizes: tuple[int, ...]
    """The sizes, increasing."""
    reports: tuple[MemoryReport, ...]
    """The report at every size."""
    role: str | None = None
    """The role whose bytes are counted; None for all."""
    space: str = "device"
    """The memory space whose bytes are counted."""
    variable: str = "unit"
    """Name of one unit of the size, such as ``layer``."""

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes at the peak of the program, for every size."""
        return tuple(role_bytes(report, self.role, self.space) for report in self.reports)

    @property
    def bytes_per_unit(self) -> int:
        """Slope of the linear least-squares fit."""
        return round(float(np.polyfit(self.sizes, self.num_bytes, 1)[0]))

    def assert_slope_at_most(self, limit: str | int) -> None:
        """Fail when the bytes per unit exceed a limit.

        Args:
            limit: bytes per unit.

        Raises:
            AssertionError: with the bytes at every size, and the owners that grew most.
        """
        __tracebackhide__ = True
        allowed = parse_bytes(limit)
        if self.bytes_per_unit > allowed:
            raise AssertionError(
                f"{self._subject()} was limited to {format_bytes(allowed)} per {self.variable} but grows by "
                f"{beyond_text(self.bytes_per_unit, allowed)}\n{self._text()}"
            )

    def assert_flat(self, tolerance: str | int = 0) -> None:
        """Fail when the bytes depend on the size.

        Args:
            tolerance: allowed difference between the largest and the smallest: bytes, or a share of the smallest such
                as ``"1 %"``.

        Raises:
            AssertionError: with the bytes at every size, and the owners that grew most.
        """
        __tracebackhide__ = True
        low, high = min(self.num_bytes), max(self.num_bytes)
        if high - low > tolerated_bytes(tolerance, low):
            raise AssertionError(
                f"{self._subject()} should not depend on the number of {self.variable}s but differs by "
                f"{format_bytes(high - low)}\n{self._text()}"
            )

    def _subject(self) -> str:
        location = f"on {self.reports[0].target.name}"
        return f"{self.space} memory{f' of role {self.role!r}' if self.role else ''} {location}"

    def _text(self) -> str:
        sizes = [f"  {format_bytes(size):>11}  at {n}" for n, size in zip(self.sizes, self.num_bytes, strict=True)]
        return "\n".join([*sizes, difference_text(self.reports[0], self.reports[-1])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """Bytes of one program divided by those of another; returned by `DeviceMemory.ratio`."""

    numerator: MemoryReport
    """Report of the first program."""
    denominator: MemoryReport
    """Report of the second program."""
    role: str | None = None
    """The role whose bytes are counted; None for all."""

    @property
    def value(self) -> float:
        """Bytes of the first program divided by bytes of the second.

        Raises:
            ConfigError: when the second program has no bytes of the role.
        """
        below = role_bytes(self.denominator, self.role)
        if not below:
            raise ConfigError(
                f"the second program has no bytes{f' of role {self.role!r}' if self.role else ''} to compare with",
                hint="compare another role, or limit the first program separately",
            )
        return role_bytes(self.numerator, self.role) / below

    def assert_at_most(self, limit: float) -> None:
        """Fail when the ratio exceeds a limit.

        Args:
            limit: the largest ratio.

        Raises:
            AssertionError: with both sizes, the owners of the first program, and the difference.
        """
        __tracebackhide__ = True
        if self.value > limit:
            above, below = (role_bytes(report, self.role) for report in (self.numerator, self.denominator))
            raise AssertionError(
                f"the ratio{f' of role {self.role!r}' if self.role else ''} was limited to {limit:g} but is "
                f"{self.value:.3g}: {format_bytes(above)} to {format_bytes(below)} on {self.numerator.target.name}\n"
                f"{owners_text(self.numerator, role=self.role)}\n{difference_text(self.denominator, self.numerator)}"
            )
