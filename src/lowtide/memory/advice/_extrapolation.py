"""Find the largest size, such as a batch size, at which a program fits into memory.

A polynomial fitted to the bytes of a few small programs only directs the search. The answer and the next size, which
does not fit, are both compiled. For all other sizes the search assumes that bytes never decrease with the size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core import ConfigError, check_integer, format_bytes, parse_bytes
from ...report import MemoryReport
from ...targets import Target, resolve_target
from .._job import Job

if TYPE_CHECKING:
    from rich.console import Console

_GOOD_RESIDUAL = 0.05
"""Largest `ByteFit.residual` of a good fit."""
_LINEAR_RESIDUAL = 0.002
"""Largest `ByteFit.residual` of a line that counts as exact, so that it needs no parabola and no fourth size."""
_MAX_DOUBLINGS = 3
"""Most doublings of the largest size to improve a poor or flat fit: the bytes of small sizes may be only padding."""
_MAX_SIZE = 2**40
"""Largest size of the search."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteFit:
    """Bytes as a polynomial of a size.

    Examples:
        >>> ByteFit(coefficients=(100.0, 3.0), residual=None).predict(10)
        130
    """

    coefficients: tuple[float, ...]
    """Constant, bytes per unit, and for a quadratic fit bytes per squared unit."""
    residual: float | None
    """Error of the bytes that the other sizes predict for the largest size, as a share of the growth of the bytes from
    the smallest to the largest size. None if there are too few sizes to hold one out."""

    @property
    def is_good(self) -> bool:
        """Whether `residual` is at most 5 %; False if it is None."""
        return self.residual is not None and self.residual <= _GOOD_RESIDUAL

    def predict(self, size: int) -> int:
        """Return the bytes at a size."""
        return round(sum(c * size**power for power, c in enumerate(self.coefficients)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizePoint:
    """A size whose program was compiled, with its bytes.

    Examples:
        >>> SizePoint(size=2, device_bytes=64, host_bytes=0, fits=True, predicted_bytes=None).size
        2
    """

    size: int
    """The size."""
    device_bytes: int
    """Compiled bytes on one device."""
    host_bytes: int
    """Compiled bytes in host memory."""
    fits: bool
    """Whether the bytes are within the limits of device and host."""
    predicted_bytes: int | None
    """Device bytes that the fit predicted; None for a size from which the fit was made."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Extrapolation:
    """The largest size that fits, with the search behind it; made by `extrapolate`."""

    variable: str
    """Name of the size."""
    target: Target
    """Target of the compilations."""
    limit_bytes: int
    """Limit in bytes on one device."""
    points: tuple[SizePoint, ...]
    """All compiled sizes, in order of compilation."""
    fit: ByteFit
    """Fit of the device bytes to the size."""
    host_fit: ByteFit
    """Fit of the host bytes to the size."""
    by_role: Mapping[str, ByteFit]
    """Linear fit of the device bytes at the peak for each role; the fastest-growing role first."""
    answer: int
    """The largest size that fits."""
    report: MemoryReport
    """The compiled report at the answer."""
    following: SizePoint | None
    """The next compiled size, which does not fit, at most `multiple_of` above `answer`; None at the maximum."""

    @property
    def predicted_bytes(self) -> int:
        """Device bytes that the fit predicts for the answer."""
        return self.fit.predict(self.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data with integer bytes, without `host_fit`, `by_role` and most of `report`."""
        return {
            "variable": self.variable,
            "target": self.target.name,
            "limit_bytes": self.limit_bytes,
            "answer": self.answer,
            "device_bytes": self.report.device_bytes,
            "host_bytes": self.report.host_bytes,
            "predicted_bytes": self.predicted_bytes,
            "next": None if self.following is None else vars(self.following),
            "points": [vars(point) for point in self.points],
            "fit": {**vars(self.fit), "is_good": self.fit.is_good},
        }

    def print(self, console: Console | None = None) -> None:
        """Print the answer, the fit and the compiled sizes.

        Args:
            console: a `rich.console.Console`; None for one on standard output.
        """
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        out = console or Console(highlight=False)
        out.print(Text(repr(self), style="bold"))
        out.print(Text(self._fit_text()))
        table = Table(box=None, pad_edge=False, header_style="dim")
        has_host = any(point.host_bytes for point in self.points)
        for name in (self.variable, "compiled", "predicted", *(("host",) if has_host else ()), "fits"):
            table.add_column(Text(name), justify="right", no_wrap=True)
        for point in sorted(self.points, key=lambda p: p.size):
            predicted = "" if point.predicted_bytes is None else format_bytes(point.predicted_bytes)
            host_cells = [format_bytes(point.host_bytes)] if has_host else []
            sizes = [format_bytes(point.device_bytes), predicted, *host_cells]
            mark = " <-" if point.size == self.answer else ""
            table.add_row(f"{point.size:,}", *sizes, ("yes" if point.fits else "no") + mark)
        out.print(table)
        growing = {role: fit for role, fit in self.by_role.items() if round(fit.coefficients[1]) > 0}
        for role, fit in list(growing.items())[:6]:
            out.print(Text(f"{role}: {format_bytes(round(fit.coefficients[1]))} per {self.variable}", style="dim"))

    def _fit_text(self) -> str:
        names = ("", f" × {self.variable}", f" × {self.variable}²")
        terms = [
            f"{format_bytes(round(c))}{name}" for c, name in zip(self.fit.coefficients, names, strict=False) if round(c)
        ]
        text = f"predicted bytes: {' + '.join(terms).replace('+ -', '- ') or format_bytes(0)}"
        if self.fit.residual is None:
            return f"{text} (two sizes: the fit was not checked)"
        verdict = "" if self.fit.is_good else ", a poor fit: the search relied on compilation"
        error = abs(self.predicted_bytes - self.report.device_bytes) / self.report.device_bytes
        held_out = f"{100 * self.fit.residual:.1f} % of the growth at the held-out size"
        return f"{text} (error: {held_out}{verdict}; {100 * error:.1f} % at the answer)"

    def __repr__(self) -> str:
        fits = f"{self.variable} {self.answer:,} fits {self.target.name}: {format_bytes(self.report.device_bytes)} of "
        limit = f"{format_bytes(self.limit_bytes)} (compiled)"
        if self.following is None:
            return f"{fits}{limit}; it is the maximum"
        point = self.following
        excess = point.device_bytes - self.limit_bytes
        reason = f", {format_bytes(excess)} too much" if excess > 0 else ", and its host bytes do not fit"
        return f"{fits}{limit}; {point.size:,} needs {format_bytes(point.device_bytes)}{reason}"


def extrapolate(
    make: Callable[[int], Any],
    sizes: Sequence[int] = (2, 3, 4),
    *,
    limit: int | str | None = None,
    target: Target | str | None = None,
    maximum: int | None = None,
    multiple_of: int = 1,
    variable: str = "n",
) -> Extrapolation:
    """Find the largest size of a program that fits, such as a batch size, number of layers or sequence length.

    Args:
        make: a function from a size to a `Job`, ``(fn, args)``, ``(fn, args, roles)``, or a dict with fields of `Job`
            as keys. If it has a parameter ``target``, it receives the `Target`.
        sizes: small sizes to compile first, increasing. With three or more sizes, the largest checks the fit.
        limit: limit in bytes on one device (``"14 GiB"``); None for the usable bytes of the target.
        target: as in `analyze`.
        maximum: the largest size to consider.
        multiple_of: the answer is a multiple of this number.
        variable: name of the size in printed results.

    Returns:
        The answer with its compiled report. The next size was also compiled and does not fit, unless the answer is the
        maximum. If the target's host memory is known, it also limits the size.

    Raises:
        ConfigError: for sizes that are not two or more increasing numbers; for an invalid `limit`, `maximum` or
            `multiple_of`; without `limit`, when the target's usable bytes are unknown. Also when no size fits, or when
            the bytes do not grow with the size and there is no maximum.
        TargetError: for an unknown target.
        Exception: any exception of `make` or the compiler, unchanged.

    Memory:
        Nothing is allocated on the target. A few programs are compiled in this process, one after the other.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def make(n):
        ...     return jnp.negative, (jax.ShapeDtypeStruct((n, 256), jnp.float32),)
        >>> result = extrapolate(make, limit="1 MiB", target="cpu")
        >>> result.answer, result.report.device_bytes
        (512, 1048576)
    """
    resolved_target = resolve_target(target)
    check_integer("multiple_of", multiple_of)
    if maximum is not None:
        check_integer("maximum", maximum, multiple_of, hint="the least maximum is multiple_of")
    sizes = tuple(sizes)
    if len(sizes) < 2 or sizes[0] < 1 or any(b <= a for a, b in itertools.pairwise(sizes)):
        problem = f"sizes must be two or more positive whole numbers that increase, not {sizes}"
        raise ConfigError(problem, hint="use, for instance, (2, 3, 4)")
    limit_bytes = resolved_target.budget_bytes if limit is None else parse_bytes(limit)
    if limit_bytes is None:
        problem = f"the capacity of {resolved_target.name!r} is unknown"
        raise ConfigError(problem, hint='set the limit: limit="14 GiB" (--budget on the command line)')
    maximum_step = None if maximum is None else maximum // multiple_of
    search = _Search(make, resolved_target, limit_bytes, multiple_of, maximum_step)
    fit, host_fit = search.fit(sizes)
    answer = search.run(fit, host_fit)
    return Extrapolation(
        variable=variable,
        target=resolved_target,
        limit_bytes=limit_bytes,
        points=tuple(search.points.values()),
        fit=fit,
        host_fit=host_fit,
        by_role=search.role_fits(),
        answer=answer,
        report=search.reports[answer],
        following=search.following(answer),
    )


def fit_bytes(points: Sequence[tuple[int, int]]) -> ByteFit:
    """Fit points (size, bytes), in increasing order, with a line, or with a parabola if it is much better."""
    (last_size, last_bytes), other_points = points[-1], points[:-1]
    best: tuple[float, int] | None = None
    for degree in range(1, min(2, len(other_points) - 1) + 1):
        guess = ByteFit(coefficients=_polynomial(other_points, degree), residual=None).predict(last_size)
        residual = abs(guess - last_bytes) / max(abs(last_bytes - other_points[0][1]), 1)
        bends_down = degree == 2 and _polynomial(points, 2)[2] < 0
        # A parabola also fits points on a line. So take it only if the line has a notable error, the parabola less than
        # half of it, and no downward bend.
        if best is None or (best[0] > _LINEAR_RESIDUAL and residual < best[0] / 2 and not bends_down):
            best = residual, degree
    residual, degree = best or (None, 1)
    return ByteFit(coefficients=_polynomial(points, degree), residual=residual)


def _polynomial(points: Sequence[tuple[int, int]], degree: int) -> tuple[float, ...]:
    sizes, values = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    scale = float(sizes.max())  # sizes scaled to at most 1 keep the least-squares problem well conditioned
    coefficients = np.linalg.lstsq(np.vander(sizes / scale, degree + 1, increasing=True), values, rcond=None)[0]
    return tuple(float(c) / scale**power for power, c in enumerate(coefficients))


def _midpoint(low: int, high: int | None) -> int:
    """Return the mean of two steps of a `_Search` (geometric if they are far apart); without a `high`, twice `low`."""
    if high is None:
        return 2 * low
    return math.isqrt(low * high) if high > 4 * low > 0 else (low + high) // 2


class _Search:
    """Mutable search for the largest size that fits; a step is a size divided by `multiple_of`."""

    def __init__(
        self, make: Callable[[int], Any], target: Target, limit_bytes: int, multiple_of: int, maximum_step: int | None
    ) -> None:
        self.make, self.target, self.limit_bytes = make, target, limit_bytes
        self.multiple_of, self.maximum_step = multiple_of, maximum_step
        self.farthest_step = _MAX_SIZE // multiple_of if maximum_step is None else maximum_step
        self.points = dict[int, SizePoint]()
        self.reports = dict[int, MemoryReport]()

    def fit(self, sizes: Sequence[int]) -> tuple[ByteFit, ByteFit]:
        for size in sizes:
            self.measure(size)
        smallest = self.points[sizes[0]]
        if not smallest.fits:
            host_text = f", and {format_bytes(smallest.host_bytes)} on the host" if smallest.host_bytes else ""
            raise ConfigError(
                f"the program does not fit, even at size {sizes[0]}",
                expected=f"at most {format_bytes(self.limit_bytes)} on one device of {self.target.name}",
                got=format_bytes(smallest.device_bytes) + host_text,
                hint="start with smaller sizes (sizes=(1, 2, 3) or --sizes 1,2,3), or choose a larger target",
            )
        fits = self._fits_by_space()
        largest = sizes[-1]
        for _ in range(_MAX_DOUBLINGS if len(sizes) >= 3 else 0):
            is_too_large = self.maximum_step is not None and 2 * largest > self.maximum_step * self.multiple_of
            is_growing = self.points[largest].device_bytes > smallest.device_bytes
            # Three sizes cannot distinguish a line from a parabola.
            is_certain = fits[0].is_good and ((fits[0].residual or 0) <= _LINEAR_RESIDUAL or len(self.points) > 3)
            if (is_certain and is_growing) or is_too_large or not self.points[largest].fits:
                break
            largest *= 2
            self.measure(largest)
            fits = self._fits_by_space()
        return fits

    def _sorted_points(self) -> list[SizePoint]:
        return sorted(self.points.values(), key=lambda p: p.size)

    def _fits_by_space(self) -> tuple[ByteFit, ByteFit]:
        # Use at most the four largest sizes, since padding dominates the bytes of small ones.
        points = self._sorted_points()[-4:]
        return (
            fit_bytes([(p.size, p.device_bytes) for p in points]),
            fit_bytes([(p.size, p.host_bytes) for p in points]),
        )

    def role_fits(self) -> dict[str, ByteFit]:
        sizes = sorted(self.reports)[:4]  # larger sizes are close together, near the answer
        peaks = {size: self.reports[size].peak_by_role for size in sizes}
        roles = dict.fromkeys(role for peak in peaks.values() for role in peak)
        lines = {role: _polynomial([(size, peak.get(role, 0)) for size, peak in peaks.items()], 1) for role in roles}
        fits = {role: ByteFit(coefficients=line, residual=None) for role, line in lines.items()}
        return dict(sorted(fits.items(), key=lambda item: -item[1].coefficients[1]))

    def measure(self, size: int, predicted: int | None = None) -> bool:
        if size not in self.points:
            report = Job.make(self.make, size, target=self.target).analyze(self.target)
            sizes = {"device_bytes": report.device_bytes, "host_bytes": report.host_bytes}
            self.points[size] = SizePoint(size=size, fits=self._fits(**sizes), predicted_bytes=predicted, **sizes)
            self.reports[size] = report
        return self.points[size].fits

    def _fits(self, device_bytes: int, host_bytes: int) -> bool:
        host_limit = self.target.host_bytes
        return device_bytes <= self.limit_bytes and (host_limit is None or host_bytes <= host_limit)

    def run(self, fit: ByteFit, host_fit: ByteFit) -> int:
        """Find the largest size that fits, and compile it and the next size."""
        # `low` fits, or is assumed to fit if it is not compiled; `high` does not fit.
        fitting_size = max(size for size, point in self.points.items() if point.fits)
        failed = [size for size, point in self.points.items() if not point.fits and size > fitting_size]
        low = fitting_size // self.multiple_of
        high = None if not failed else -(-min(failed) // self.multiple_of)
        if self.maximum_step is not None and low >= self.maximum_step:
            low, high = self.maximum_step, self.maximum_step + 1
        num_probes = 0
        step = self._predict_step(fit, host_fit, low)
        while high is None or high - low > 1 or not self._is_measured(low):
            if self.maximum_step is not None and low == self.maximum_step and self._is_measured(low):
                break
            min_step = low if low and not self._is_measured(low) else low + 1
            step = min(max(step, min_step), self.farthest_step if high is None else high - 1)
            if self.maximum_step is None and low == self.farthest_step:
                raise self._unbounded_error()
            assert not self._is_measured(step), f"size {step * self.multiple_of} measured twice"
            if high is not None and low == 0 and high == 1:
                got = f"{format_bytes(self.points[min(failed)].device_bytes)} at {min(failed)}" if failed else None
                problem = f"no multiple of {self.multiple_of} fits {format_bytes(self.limit_bytes)}"
                raise ConfigError(problem, got=got, hint="use a smaller multiple_of")
            size = step * self.multiple_of
            if self.measure(size, fit.predict(size)):
                low = max(low, step)
            else:
                high = step if high is None else min(high, step)
                low = low if low < step else 0  # the step that was only assumed to fit does not fit
                failed.append(size)
            num_probes += 1
            step = self._next_step(low, high, num_probes)
        return low * self.multiple_of

    def following(self, answer: int) -> SizePoint | None:
        """Return the next compiled size that does not fit, at most `multiple_of` above `answer`, or None."""
        above = [p for p in self.points.values() if answer < p.size <= answer + self.multiple_of and not p.fits]
        return min(above, key=lambda p: p.size, default=None)

    def _is_measured(self, step: int) -> bool:
        return step * self.multiple_of in self.points

    def _predict_step(self, fit: ByteFit, host_fit: ByteFit, low: int) -> int:
        """Return the largest step that is predicted to fit; `ConfigError` if all steps fit and there is no maximum."""

        def fits(step: int) -> bool:
            size = step * self.multiple_of
            return self._fits(fit.predict(size), host_fit.predict(size))

        if fits(self.farthest_step):
            if self.maximum_step is not None:
                return self.maximum_step
            raise self._unbounded_error()
        below, above = low, self.farthest_step
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if fits(middle) else (below, middle)
        return below

    def _unbounded_error(self) -> ConfigError:
        points = self._sorted_points()
        shown_points = [*points[:4], *points[4:][-1:]]
        return ConfigError(
            "the bytes do not grow with the size in the compiled programs",
            got=", ".join(f"{format_bytes(p.device_bytes)} at {p.size}" for p in shown_points),
            hint="set a maximum, or use sizes that are farther apart",
        )

    def _next_step(self, low: int, high: int | None, num_probes: int) -> int:
        """Return the next step to compile: where the line through the sizes nearest to the limit meets the limit."""
        # Every third time, return the middle of the range, so that a bad slope cannot slow the search down for long.
        if num_probes % 3 == 0:
            return _midpoint(low, high)
        below = [p for p in self._sorted_points() if p.fits]
        above = [p for p in self._sorted_points() if not p.fits]
        lower_point, upper_point = (
            (below[-1], above[0]) if above and below[-1].size < above[0].size else (below[-2:] + below[-1:])[:2]
        )
        slope = (upper_point.device_bytes - lower_point.device_bytes) / max(1, upper_point.size - lower_point.size)
        if slope <= 0:
            return _midpoint(low, high)
        return math.floor((lower_point.size + (self.limit_bytes - lower_point.device_bytes) / slope) / self.multiple_of)
