"""The fixture `device_memory`: compile functions, keep their reports, and compare bytes with a test's limits.

`Slope` says how bytes grow with a size, and `Ratio` how the bytes of two programs compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..core import ConfigError, format_bytes, parse_bytes
from ..memory import Job, MemoryReport, Target
from ..targets import resolve_target
from ._limit import Limit, beyond_text, check_role, difference_text, owners_text, role_bytes, tolerated_bytes
from ._snapshot import Snapshots


class DeviceMemory:
    """Compile functions for a test and assert their bytes; every failure lists the owners.

    The object is mutable: it collects the reports in `reports`.

    Args:
        limit: limit of every program, from the marker `device_memory_limit`.
        snapshots: the test's snapshots; None outside a test.

    Examples:
        >>> import jax.numpy as jnp
        >>> device_memory = DeviceMemory()
        >>> report = device_memory(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((4, 8)), target="cpu",
        ...                        roles={"params": 0})
        >>> device_memory.limit(report, "256 B", role="params")
        >>> device_memory.limit(report, "255 B", role="params")
        Traceback (most recent call last):
        AssertionError: role 'params' was limited to 255 B but needs 256 B at the peak on cpu
        largest owners at the peak of role 'params':
                256 B  params  argument  w  f32[8,8]
    """

    def __init__(self, *, limit: Limit | None = None, snapshots: Snapshots | None = None) -> None:
        self.reports = list[MemoryReport]()
        self._limit, self._snapshots = limit, snapshots

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        target: Target | str | None = None,
        roles: Mapping[str, Any] | None = None,
        donate_argnums: int | Sequence[int] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> MemoryReport:
        """Compile a function and report its bytes, as `lowtide.memory.analyze` does.

        Args:
            fn: the function.
            *args: its arguments; shapes are enough.
            target: the target to compile for; None for the marker's target, or otherwise the local hardware.
            roles: names of the roles, and the arguments that have them.
            donate_argnums: as in `jax.jit`.
            static_argnums: as in `jax.jit`.
            **kwargs: keyword arguments of `fn`.

        Returns:
            The report.

        Raises:
            AssertionError: when the bytes exceed the test's marker, with the largest owners at the peak.

        Memory:
            None on the target.
        """
        __tracebackhide__ = True
        job = Job(
            fn=fn, args=args, kwargs=kwargs, roles=roles, donate_argnums=donate_argnums, static_argnums=static_argnums
        )
        return self._analyze(job, self._goal(target))

    def _goal(self, target: Target | str | None) -> Target:
        if target is None and self._limit is not None and self._limit.target is not None:
            return self._limit.target
        return resolve_target(target)

    def _analyze(self, job: Job, goal: Target) -> MemoryReport:
        __tracebackhide__ = True
        report = job.analyze(goal)
        self.reports.append(report)
        if self._limit is not None and report.device_bytes > self._limit.num_bytes:
            raise AssertionError(
                f"test was limited to {self._limit} but needs "
                f"{beyond_text(report.device_bytes, self._limit.num_bytes)} on {goal.name}\n"
                f"{owners_text(report)}"
            )
        return report

    def limit(self, report: MemoryReport, size: str | int, *, role: str | None = None) -> None:
        """Fail when a role exceeds a size at the peak.

        Args:
            report: the report.
            size: bytes, or text such as ``"1 GiB"``.
            role: the role; None for everything on the device.

        Raises:
            AssertionError: with the largest owners.
            ConfigError: for a role that the report does not have.
        """
        __tracebackhide__ = True
        allowed, needed = parse_bytes(size), role_bytes(report, role)
        if needed > allowed:
            label = f"role {role!r}" if role else "the program"
            raise AssertionError(
                f"{label} was limited to {format_bytes(allowed)} but needs {beyond_text(needed, allowed)} at the peak "
                f"on {report.target.name}\n{owners_text(report, role=role)}"
            )

    def limits(self, report: MemoryReport, sizes: Mapping[str, str | int]) -> None:
        """Fail when any of several roles exceeds its size at the peak.

        Args:
            report: the report.
            sizes: the largest allowed size of every role.

        Raises:
            AssertionError: with the largest owners of every role that is too large.
            ConfigError: for a role that the report does not have, or when no role is given.
        """
        __tracebackhide__ = True
        if not sizes:
            raise ConfigError("sizes is empty", hint='limit at least one role, such as {"opt_state": "1 GiB"}')
        failures: list[str] = []
        for role, size in sizes.items():
            try:
                self.limit(report, size, role=role)
            except AssertionError as error:
                failures.append(str(error))
        if failures:
            raise AssertionError("\n".join(failures))

    def slope(
        self,
        make: Callable[..., Any],
        sizes: Sequence[int],
        *,
        target: Target | str | None = None,
        role: str | None = None,
        space: Literal["device", "host"] = "device",
        variable: str = "unit",
    ) -> Slope:
        """Compile a program at several sizes, to assert how its bytes grow.

        Args:
            make: takes a size and returns ``(fn, args)``, ``(fn, args, roles)``, a dict or a `Job`, as for
                `lowtide.memory.extrapolate`.
            sizes: two or more, increasing: numbers of layers, batch sizes, or sequence lengths.
            target: as for a call.
            role: the role whose bytes at the peak are counted; None for all.
            space: the memory space.
            variable: name of one unit of the size, such as ``"layer"``.

        Returns:
            The slope, with `assert_slope_at_most` and `assert_flat`.

        Raises:
            AssertionError: when one of the programs exceeds the test's marker.
            ConfigError: for sizes that do not increase, or a role that a report does not have.
        """
        __tracebackhide__ = True
        all_sizes = tuple(sizes)
        if len(all_sizes) < 2 or any(b <= a for a, b in zip(all_sizes, all_sizes[1:], strict=False)):
            raise ConfigError(
                "sizes must be two or more increasing numbers", got=all_sizes, hint="pass for instance [2, 4, 8]"
            )
        goal = self._goal(target)
        reports = tuple(self._analyze(Job.make(make, size, target=goal), goal) for size in all_sizes)
        for report in reports:
            check_role(report, role)
        return Slope(sizes=all_sizes, reports=reports, role=role, space=space, variable=variable)

    def ratio(
        self,
        numerator: Any,
        denominator: Any,
        *args: Any,
        target: Target | str | None = None,
        role: str | None = None,
        **options: Any,
    ) -> Ratio:
        """Compile two functions, to assert the ratio of their bytes.

        Args:
            numerator: a function of `args`, a report, or anything that `slope` accepts from `make`.
            denominator: the same.
            *args: the arguments of both.
            target: as for a call.
            role: the role whose bytes at the peak are counted; None for all.
            **options: other arguments of a call: `roles`, `donate_argnums`, keyword arguments.

        Returns:
            The ratio, with `value` and `assert_at_most`.

        Raises:
            AssertionError: when one of the programs exceeds the test's marker.
            ConfigError: for a role that a report does not have, or arguments when neither side is a function.
        """
        __tracebackhide__ = True
        if (args or options) and not (callable(numerator) or callable(denominator)):
            raise ConfigError(
                "the ratio has arguments, but neither side is a function",
                got=", ".join([*(type(a).__name__ for a in args), *options]),
                hint="leave out the arguments; a job or a report has its own",
            )
        reports: list[MemoryReport] = []
        for side in (numerator, denominator):
            if isinstance(side, MemoryReport):
                reports.append(side)
            elif callable(side):
                reports.append(self(side, *args, target=target, **options))
            else:
                reports.append(self._analyze(Job.of(side, "one side of the ratio"), self._goal(target)))
        for report in reports:
            check_role(report, role)
        return Ratio(numerator=reports[0], denominator=reports[1], role=role)

    def assert_offloaded(
        self,
        report: MemoryReport,
        role: str,
        *,
        at_least: str | int | None = None,
        copies_at_most: str | int | None = None,
    ) -> None:
        """Fail unless a role's arguments are in host memory and not on the device.

        Args:
            report: a report for a TPU, or for a GPU of this machine. Other targets are refused. The CPU's compiler has
                one memory. Compile-only GPUs have no host memory for arguments, so a report for them only moves the
                bytes that were declared for the host.
            role: the role.
            at_least: the fewest bytes of it on the host; None for any number.
            copies_at_most: the most bytes on the device, at the peak, of copies of its arrays, which are streamed; None
                for any number.

        Raises:
            AssertionError: with the owners.
            ConfigError: for a target whose reports do not prove placement, or a role that the report does not have.
        """
        __tracebackhide__ = True
        goal = report.target
        if goal.platform == "cpu" or (goal.platform == "gpu" and goal.is_ahead_of_time):
            raise ConfigError(
                f"a report for {goal.name!r} does not prove placement in host memory",
                expected='a TPU such as "v5e:2x2", or a GPU of this machine',
                got="a compiler without host memory for arguments, whose report only shows the declared placement",
                hint='compile for a TPU: target="v5e:2x2" (pip install "lowtide[tpu-aot]")',
            )
        check_role(report, role)
        on_device, on_host = report.by_role.get(role, 0), report.host_by_role.get(role, 0)
        # A copy has the path of the argument whose data it holds.
        paths = {b.path for b in report.buffers if b.role == role}
        copies = [b for b in report.peak if b.role == "copies" and b.path in paths]
        allowed = None if copies_at_most is None else parse_bytes(copies_at_most)
        num_copied = sum(b.num_bytes for b in copies)
        failure = None
        if on_device:
            failure = f"{format_bytes(on_device)} of it are on the device, {format_bytes(on_host)} on the host"
        elif not on_host:
            failure = "it has no bytes on the host"
        elif at_least is not None and on_host < parse_bytes(at_least):
            failure = f"{format_bytes(on_host)} are on the host, not {format_bytes(parse_bytes(at_least))}"
        elif allowed is not None and num_copied > allowed:
            failure = f"copies of it take {beyond_text(num_copied, allowed)} at the peak, not {format_bytes(allowed)}"
        if failure is not None:
            shown = "copies" if failure.startswith("copies") else role
            raise AssertionError(
                f"role {role!r} is not offloaded on {goal.name}: {failure}\n{owners_text(report, role=shown)}\n"
                f"{owners_text(report, role=role, space='host')}"
            )

    def snapshot(self, report: MemoryReport, name: str | None = None, *, tolerance: str | int = 0) -> None:
        """Compare a report with the snapshot next to the test; ``pytest --memory-snapshot-update`` writes it.

        Args:
            report: the report.
            name: of this snapshot, where a test takes several.
            tolerance: allowed difference of device and host bytes, up or down: bytes, or a share such as ``"1 %"``.

        Raises:
            AssertionError: when there is no snapshot for the target and the versions of JAX and its compilers, or the
                bytes differ; with the difference by owner.
            ConfigError: outside a test, or for a name that was already used.
            ReportError: when the file is damaged.
        """
        __tracebackhide__ = True
        if self._snapshots is None:
            raise ConfigError("snapshots exist only inside a test", hint="use the fixture device_memory")
        self._snapshots.check(report, name, tolerance)


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
