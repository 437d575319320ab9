"""The fixture `device_memory` of the pytest plugin: compile functions, and check the memory in their reports.

A *role* is a name for arguments, such as params. An *owner* is the argument, output or operation of a buffer. `Slope`
has the bytes of a program at several sizes, and `Ratio` compares two programs. `Limit` has the arguments of the marker
`device_memory_limit`, which are read before the test. Failed assertions list the largest owners and the changes.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core import (
    ConfigError,
    ReportError,
    TargetError,
    check_choice,
    check_type,
    format_bytes,
    parse_bytes,
    write_files,
)
from ..memory import Job, MemoryReport, Target, diff, target
from ..report import DERIVED_ROLES, dump_json, parse_fields
from ..targets import resolve_target

_MARKER_HINT = '@pytest.mark.device_memory_limit("12 GiB", target="v5e:2x2")'
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SNAPSHOT_VERSION = 1
"""Version of the format of snapshot files."""
_UPDATE_FLAG = "--memory-snapshot-update"


class DeviceMemory:
    """Compile functions in a test and check their bytes. Every failure lists the largest owners of memory.

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
            *args: arguments of the function, or `jax.ShapeDtypeStruct`s.
            target: the target to compile for; None for the marker's target, if it has one, else the local hardware.
            roles: role names and their arguments, as in `lowtide.memory.analyze`.
            donate_argnums: as in `jax.jit`.
            static_argnums: as in `jax.jit`.
            **kwargs: keyword arguments of `fn`.

        Returns:
            The report.

        Raises:
            AssertionError: when the bytes exceed the limit of the test's marker; the message lists the largest owners.
            Exception: any exception of `lowtide.memory.analyze`.
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
            text = _need_text("test", report.device_bytes, self._limit.num_bytes)
            raise AssertionError(f"{text} on {goal.name}\n{_owners_text(report)}")
        return report

    def limit(self, report: MemoryReport, size: str | int, *, role: str | None = None) -> None:
        """Fail when a role exceeds a size at the peak.

        Args:
            report: the report.
            size: bytes, or text such as ``"1 GiB"``.
            role: the role; None for everything on the device.

        Raises:
            AssertionError: when the role exceeds the size; the message lists the largest owners.
            ConfigError: for an invalid size, or a role that the report does not have.
        """
        __tracebackhide__ = True
        allowed, needed = parse_bytes(size), _role_bytes(report, role)
        if needed > allowed:
            text = _need_text(f"role {role!r}" if role else "the program", needed, allowed)
            raise AssertionError(f"{text} at the peak on {report.target.name}\n{_owners_text(report, role=role)}")

    def limits(self, report: MemoryReport, sizes: Mapping[str, str | int]) -> None:
        """Fail when any of several roles exceeds its size at the peak.

        Args:
            report: the report.
            sizes: the largest allowed size of every role.

        Raises:
            AssertionError: when a role exceeds its size; the message lists the largest owners of every such role.
            ConfigError: for an invalid size, for a role that the report does not have, or when `sizes` is empty.
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
            make: function of a size that returns ``(fn, args)``, ``(fn, args, roles)``, a dict or a `Job`, as in
                `lowtide.memory.extrapolate`.
            sizes: two or more, increasing: numbers of layers, batch sizes, or sequence lengths.
            target: as for a call of this object.
            role: the role whose bytes at the peak are counted; None for all roles.
            space: the memory space.
            variable: name of one unit of the size, such as ``"layer"``.

        Returns:
            The slope, with `assert_slope_at_most` and `assert_flat`.

        Raises:
            AssertionError: when a program exceeds the limit of the test's marker.
            ConfigError: for sizes that do not increase, or for a role that a report does not have.
            Exception: any exception of `make` or of `lowtide.memory.analyze`.
        """
        __tracebackhide__ = True
        all_sizes = tuple(sizes)
        if len(all_sizes) < 2 or any(b <= a for a, b in zip(all_sizes, all_sizes[1:], strict=False)):
            hint = "pass for instance [2, 4, 8]"
            raise ConfigError(f"sizes must be two or more increasing numbers, not {all_sizes}", hint=hint)
        goal = self._goal(target)
        reports = tuple(self._analyze(Job.make(make, size, target=goal), goal) for size in all_sizes)
        for report in reports:
            _check_role(report, role)
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
            numerator: a function of `args`, a report, or any value that `make` of `slope` may return.
            denominator: as `numerator`.
            *args: the arguments of both functions.
            target: as for a call of this object.
            role: the role whose bytes at the peak are counted; None for all roles.
            **options: further arguments of a call of this object: `roles`, `donate_argnums`, keyword arguments.

        Returns:
            The ratio, with `value` and `assert_at_most`.

        Raises:
            AssertionError: when a program exceeds the limit of the test's marker.
            ConfigError: for a numerator or denominator of another type; for a role that a report does not have; or for
                arguments if neither side is a function.
        """
        __tracebackhide__ = True
        if (args or options) and not (callable(numerator) or callable(denominator)):
            hint = "leave out the arguments; a job or a report has its own"
            got = ", ".join([*(type(a).__name__ for a in args), *options])
            raise ConfigError("the ratio has arguments, but neither side is a function", got=got, hint=hint)
        reports: list[MemoryReport] = []
        for side in (numerator, denominator):
            if isinstance(side, MemoryReport):
                reports.append(side)
            elif callable(side):
                reports.append(self(side, *args, target=target, **options))
            else:
                reports.append(self._analyze(Job.of(side, "one side of the ratio"), self._goal(target)))
            _check_role(reports[-1], role)
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
            report: a report for a TPU, or for a GPU of this machine. Other targets are refused: a CPU has only one
                memory. Compilers for absent GPUs have no host memory for arguments, so their reports only show the
                placement that was declared.
            role: the role.
            at_least: least bytes of the role on the host; None allows any number above 0.
            copies_at_most: most bytes at the peak in device copies of the role's arrays, which streaming makes; None
                allows any number.

        Raises:
            AssertionError: when the role is not offloaded, or misses a limit; the message lists the largest owners.
            ConfigError: for a target whose reports do not prove placement, an unknown role, or an invalid size.
        """
        __tracebackhide__ = True
        goal = report.target
        if goal.platform == "cpu" or (goal.platform == "gpu" and goal.is_ahead_of_time):
            problem = f"a report for {goal.name!r} does not prove placement in host memory"
            got = "a compiler without host memory for arguments, whose report only shows the declared placement"
            hint = 'compile for a TPU, target="v5e:2x2" (pip install "lowtide[tpu-aot]"), or for a GPU of this machine'
            raise ConfigError(problem, got=got, hint=hint)
        _check_role(report, role)
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
            failure = f"copies of it take {_beyond_text(num_copied, allowed)} at the peak, not {format_bytes(allowed)}"
        if failure is not None:
            on_device_text = _owners_text(report, role="copies" if failure.startswith("copies") else role)
            owners = f"{on_device_text}\n{_owners_text(report, role=role, space='host')}"
            raise AssertionError(f"role {role!r} is not offloaded on {goal.name}: {failure}\n{owners}")

    def snapshot(self, report: MemoryReport, name: str | None = None, *, tolerance: str | int = 0) -> None:
        """Compare a report with the snapshot next to the test; ``pytest --memory-snapshot-update`` writes the snapshot.

        Args:
            report: the report.
            name: name of this snapshot, for a test with several snapshots.
            tolerance: allowed difference of device and host bytes, up or down: bytes, or a share such as ``"1 %"``.

        Raises:
            AssertionError: when no snapshot exists for the target and the versions of JAX and its compilers; or when
                the bytes differ by more than `tolerance`, with the differences by owner.
            ConfigError: outside a test, for a name that was already used, or for an invalid tolerance.
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
    """The role whose bytes are counted; None for all roles."""
    space: str = "device"
    """The memory space whose bytes are counted."""
    variable: str = "unit"
    """Name of one unit of the size, such as ``layer``."""

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes at the peak, for every size."""
        return tuple(_role_bytes(report, self.role, self.space) for report in self.reports)

    @property
    def bytes_per_unit(self) -> int:
        """Slope of a linear least-squares fit of the bytes to the sizes."""
        return round(float(np.polyfit(self.sizes, self.num_bytes, 1)[0]))

    def assert_slope_at_most(self, limit: str | int) -> None:
        """Fail when the bytes per unit exceed a limit.

        Args:
            limit: bytes per unit, or text such as ``"1 MiB"``.

        Raises:
            AssertionError: when the slope exceeds the limit. The message lists the bytes at every size, and the owners
                that grew most.
        """
        __tracebackhide__ = True
        allowed = parse_bytes(limit)
        if self.bytes_per_unit > allowed:
            problem = f"{self._subject()} was limited to {format_bytes(allowed)} per {self.variable}"
            growth = _beyond_text(self.bytes_per_unit, allowed)
            raise AssertionError(f"{problem} but grows by {growth}\n{self._text()}")

    def assert_flat(self, tolerance: str | int = 0) -> None:
        """Fail when the bytes depend on the size.

        Args:
            tolerance: allowed difference between the largest and the smallest number of bytes: bytes, or a share of the
                smallest number such as ``"1 %"``.

        Raises:
            AssertionError: when the bytes differ by more than `tolerance`. The message lists the bytes at every size,
                and the owners that grew most.
        """
        __tracebackhide__ = True
        low, high = min(self.num_bytes), max(self.num_bytes)
        if high - low > _tolerated_bytes(tolerance, low):
            problem = f"{self._subject()} should not depend on the number of {self.variable}s"
            raise AssertionError(f"{problem} but differs by {format_bytes(high - low)}\n{self._text()}")

    def _subject(self) -> str:
        location = f"on {self.reports[0].target.name}"
        return f"{self.space} memory{f' of role {self.role!r}' if self.role else ''} {location}"

    def _text(self) -> str:
        sizes = [f"  {format_bytes(size):>11}  at {n}" for n, size in zip(self.sizes, self.num_bytes, strict=True)]
        return "\n".join([*sizes, _difference_text(self.reports[0], self.reports[-1])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """Bytes of one program divided by the bytes of another program; returned by `DeviceMemory.ratio`."""

    numerator: MemoryReport
    """Report of the first program."""
    denominator: MemoryReport
    """Report of the second program."""
    role: str | None = None
    """The role whose bytes are counted; None for all roles."""

    @property
    def value(self) -> float:
        """Bytes of the first program divided by bytes of the second.

        Raises:
            ConfigError: when the second program has no bytes of the role.
        """
        below = _role_bytes(self.denominator, self.role)
        if not below:
            problem = f"the second program has no bytes{self._role_text()} to compare with"
            raise ConfigError(problem, hint="compare another role, or limit the first program separately")
        return _role_bytes(self.numerator, self.role) / below

    def assert_at_most(self, limit: float) -> None:
        """Fail when the ratio exceeds a limit.

        Args:
            limit: the largest ratio.

        Raises:
            AssertionError: when the ratio exceeds the limit. The message lists both sizes, the owners of the first
                program, and the differences.
            ConfigError: when the second program has no bytes of the role.
        """
        __tracebackhide__ = True
        if self.value > limit:
            above, below = (_role_bytes(report, self.role) for report in (self.numerator, self.denominator))
            problem = f"the ratio{self._role_text()} was limited to {limit:g} but is {self.value:.3g}"
            sizes = f"{format_bytes(above)} to {format_bytes(below)} on {self.numerator.target.name}"
            owners = _owners_text(self.numerator, role=self.role)
            raise AssertionError(f"{problem}: {sizes}\n{owners}\n{_difference_text(self.denominator, self.numerator)}")

    def _role_text(self) -> str:
        return f" of role {self.role!r}" if self.role else ""


# --- limits of the marker, and the text of failures -------------------------------------------------------------------


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
    """Reason why the target's compiler is not available, for an optional limit; None if it is available."""

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> Limit:
        """Read the arguments of the marker: ``(size, *, target=None, optional=False)``.

        Args:
            *args: the size.
            **kwargs: `target` and `optional`, or the size by keyword.

        Raises:
            ConfigError: for a missing or invalid size, and for an argument of another name or type.
            TargetError: for an unknown target; or for a missing compiler of the target, if the limit is not optional.
        """
        arguments = ("size", "target", "optional")
        for key in kwargs:
            check_choice("an argument of the marker", key, arguments)
        sizes = [*args, *([kwargs["size"]] if "size" in kwargs else [])]
        if len(sizes) != 1:
            raise ConfigError("the marker needs one size", got=sizes or "no size", hint=_MARKER_HINT)
        num_bytes = parse_bytes(sizes[0])
        optional = kwargs.get("optional", False)
        check_type("optional of the marker", optional, bool, "True or False", hint=_MARKER_HINT)
        goal = kwargs.get("target")
        check_type("target of the marker", goal, (str, Target, type(None)), "a name or a Target", hint=_MARKER_HINT)
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


def _need_text(subject: str, needed: int, allowed: int) -> str:
    """Return the first words of the message for a failed limit."""
    return f"{subject} was limited to {format_bytes(allowed)} but needs {_beyond_text(needed, allowed)}"


def _beyond_text(needed: int, allowed: int) -> str:
    """Format bytes above a limit; append the excess if rounding gives both numbers the same text."""
    text = format_bytes(needed)
    return text if text != format_bytes(allowed) else f"{text} ({format_bytes(needed - allowed)} more)"


def _tolerated_bytes(tolerance: str | int, total: int) -> int:
    """Return a tolerance in bytes: a size, or a share of `total` such as ``"1 %"``; `ConfigError` for other text."""
    share = _PERCENT.fullmatch(tolerance) if isinstance(tolerance, str) else None
    if share is not None:
        return int(float(share[1]) / 100 * total)
    try:
        return parse_bytes(tolerance)
    except ConfigError as error:
        hint = 'pass a size such as "2 MiB", or a share such as "1 %"'
        raise ConfigError(f"{tolerance!r} is not a tolerance", hint=hint) from error


def _owners_text(report: MemoryReport, *, role: str | None = None, space: str = "device", top: int = 8) -> str:
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


def _difference_text(before: MemoryReport, after: MemoryReport, *, top: int = 8) -> str:
    """Format the changes between two reports, owner by owner."""
    from rich.console import Console

    file = io.StringIO()
    diff(before, after).print(Console(file=file, width=110, no_color=True, highlight=False), top=top)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _role_bytes(report: MemoryReport, role: str | None, space: str = "device") -> int:
    """Return the bytes at the peak of one role (None: all roles); `ConfigError` for a role that the report lacks."""
    _check_role(report, role)
    peak = report.host_peak if space == "host" else report.peak
    return sum(b.num_bytes for b in peak if role is None or b.role == role)


def _check_role(report: MemoryReport, role: str | None) -> None:
    # Derived roles are always valid: a program may have no bytes of them, and then the report does not list them.
    roles = dict.fromkeys([*report.by_role, *report.host_by_role, *(b.role for b in report.buffers), *DERIVED_ROLES])
    if role is not None and role not in roles:
        close = difflib.get_close_matches(role, roles, n=3)
        naming = 'name the role: device_memory(fn, ..., roles={"params": 0})'
        hint = f"near misses: {', '.join(close)}" if close else naming
        raise ConfigError(f"the report has no role {role!r}", expected=", ".join(roles), hint=hint)


# --- snapshots -------------------------------------------------------------------------------------------------------
# A file next to the test holds one report per target and set of versions, reduced to the buffers that are alive at the
# peak. Compiled bytes are exact for given versions, so the default tolerance is zero.


class Snapshots:
    """The snapshots of one test; mutable: the object records which snapshots the test has taken.

    Args:
        folder: the folder of the snapshots.
        test: the name of the test, a part of file names.
        update: whether to write snapshots that are missing or differ.
        on_write: function that is called after a write, with the file's path and ``made`` or ``updated``.
    """

    def __init__(self, folder: Path, test: str, *, update: bool, on_write: Callable[[str, str], None]) -> None:
        self.folder, self.test, self.update, self._on_write = folder, test, update, on_write
        self._seen = set[tuple[Path, str]]()

    @classmethod
    def of_test(cls, path: Path, nodeid: str, *, update: bool, on_write: Callable[[str, str], None]) -> Snapshots:
        """Return the snapshots of a pytest test.

        Args:
            path: the test's file.
            nodeid: pytest's name of the test.
            update: as in the class.
            on_write: as in the class.
        """
        folder = path.parent / "__memory_snapshots__" / path.stem
        # Replace "::" only before the bracket: a parameter's text may contain it, and two tests could get one file
        # name.
        name, bracket, parameters = nodeid.partition("::")[2].partition("[")
        return cls(folder, name.replace("::", ".") + bracket + parameters, update=update, on_write=on_write)

    def check(self, report: MemoryReport, name: str | None, tolerance: str | int) -> None:
        """Compare a report with its snapshot, or write the snapshot.

        Raises:
            AssertionError: when there is no snapshot, or the bytes differ by more than the tolerance.
            ConfigError: for a name that was already used, or an invalid tolerance.
            ReportError: when the file is damaged.
        """
        __tracebackhide__ = True
        file, key = self.folder / f"{_file_name(self.test, name)}.json", _key(report)
        if (file, key) in self._seen:
            problem = f"the test takes two snapshots{f' {name!r}' if name else ''} for {key}"
            raise ConfigError(problem, hint="give each snapshot a name")
        self._seen.add((file, key))
        now = _at_peak(report)
        stored = _read(file)
        before = stored.get(key)
        changes = [] if before is None else _changes(before, now, tolerance)
        if self.update:
            # A file is not rewritten if no owner's bytes changed, so an update leaves it unmodified in version control.
            if before is None or any(row.delta_bytes for row in diff(before, now).rows):
                _write(file, {**stored, key: now})
                self._on_write(str(file), "made" if before is None else "updated")
            return
        if before is None:
            problem = f"there is no memory snapshot for {key}\n  file: {file}"
            keys = f"\n  stored: {'; '.join(stored)}" if stored else ""
            raise AssertionError(f"{problem}{keys}\nhint: run pytest {_UPDATE_FLAG}, and commit the file")
        if changes:
            problem = f"the memory differs from the snapshot for {key}: {'; '.join(changes)}\n  file: {file}"
            hint = f"hint: if the change is intended, run pytest {_UPDATE_FLAG}, and commit the file"
            raise AssertionError(f"{problem}\n{_difference_text(before, now)}\n{hint}")


def _changes(before: MemoryReport, now: MemoryReport, tolerance: str | int) -> list[str]:
    pairs = {"device": (before.device_bytes, now.device_bytes), "host": (before.host_bytes, now.host_bytes)}
    return [
        f"{format_bytes(old)} -> {_after_text(old, new)} on the {space}"
        for space, (old, new) in pairs.items()
        if abs(new - old) > _tolerated_bytes(tolerance, old)
    ]


def _after_text(old: int, new: int) -> str:
    """Format the new size; append the difference if rounding gives both sizes the same text."""
    text = format_bytes(new)
    return text if text != format_bytes(old) else f"{text} ({new - old:+,} B)"


def _key(report: MemoryReport) -> str:
    """Return the key of a snapshot: the target, and the package versions that determine its figures."""
    goal = report.target
    needed = ["jax", "jaxlib", *(["libtpu"] if goal.platform == "tpu" else [])]
    if goal.platform == "gpu":
        needed += [name for name in report.versions if "cuda" in name]
    name = f"{goal.name} ({goal.chip})" if goal.name == "here" else goal.name
    return ", ".join([name, *(f"{package} {report.versions.get(package) or 'none'}" for package in needed)])


def _file_name(test: str, name: str | None) -> str:
    text = test if name is None else f"{test}.{name}"
    plain = re.sub(r"[^\w.,=\[\]-]", "_", text, flags=re.ASCII)
    # A name that was changed or cut gets a checksum of the original, so that two tests cannot share a file.
    if plain == text and len(text) < 150:
        return plain
    return f"{plain[:150]}-{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


def _at_peak(report: MemoryReport) -> MemoryReport:
    """Reduce a report to the buffers that are alive at the peaks."""
    # The reduced report has one moment, at which all of its buffers are alive. It stands for the peaks of both spaces.
    alive = (*report.peak, *report.host_peak)
    return dataclasses.replace(
        report,
        buffers=tuple(dataclasses.replace(b, start=0, end=0) for b in alive),
        moments=(report.moments[report.peak_moment],),
        peak_moment=0,
        host_peak_moment=0,
    )


def _read(file: Path) -> dict[str, MemoryReport]:
    if not file.is_file():
        return {}
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        version, snapshots = data["memory_snapshot_version"], dict(data["snapshots"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged_file_error(file, error) from error
    if version != _SNAPSHOT_VERSION:
        raise _damaged_file_error(file, f"version {version}, expected {_SNAPSHOT_VERSION}")
    reports: dict[str, MemoryReport] = {}
    for key, value in snapshots.items():
        try:
            reports[key] = MemoryReport(**parse_fields(value, file))
        except ReportError as error:
            raise _damaged_file_error(file, f"{key}: {error.got or error.message}") from error
    return reports


def _damaged_file_error(file: Path, got: object) -> ReportError:
    hint = f"delete it and run pytest {_UPDATE_FLAG}"
    return ReportError(f"{file}: the memory snapshot cannot be read", got=got, hint=hint)


def _write(file: Path, reports: dict[str, MemoryReport]) -> None:
    snapshots = ",\n".join(f"{json.dumps(key)}: {dump_json(reports[key].to_dict())}" for key in sorted(reports))
    text = f'{{"memory_snapshot_version": {_SNAPSHOT_VERSION}, "snapshots": {{\n{snapshots}\n}}}}\n'
    write_files(file.parent, {file.name: text.encode()})
