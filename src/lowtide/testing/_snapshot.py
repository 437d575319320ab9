"""Snapshots: the owners at the peak of a test's programs, stored next to the test, per target and version.

A file holds one report per target and set of versions, reduced to the buffers that are alive at the peak. Compiled
bytes are exact for given versions, so the default tolerance is zero. Other versions have separate snapshots.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import ConfigError, ReportError, format_bytes, write_files
from ..memory import MemoryReport, diff
from ._limit import difference_text, tolerated_bytes

FORMAT = 1
"""Version of the file format."""
_FLAG = "--memory-snapshot-update"


class Snapshots:
    """The snapshots of one test; mutable: it records which ones the test has taken.

    Args:
        folder: the folder of the snapshots.
        test: the name of the test, a part of file names.
        update: whether to write snapshots that are missing or differ.
        on_write: called with the file and ``made`` or ``updated``.
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
            AssertionError: when there is no snapshot, or it differs by more than the tolerance.
            ConfigError: for a name that was already used, or an invalid tolerance.
            ReportError: when the file is damaged.
        """
        __tracebackhide__ = True
        file, key = self.folder / f"{_file_name(self.test, name)}.json", _key(report)
        if (file, key) in self._seen:
            raise ConfigError(
                f"the test takes two snapshots{f' {name!r}' if name else ''} for {key}",
                hint="give each snapshot a name",
            )
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
            keys = f"\n  stored: {'; '.join(stored)}" if stored else ""
            raise AssertionError(
                f"there is no memory snapshot for {key}\n  file: {file}{keys}\n"
                f"hint: run pytest {_FLAG}, and commit the file"
            )
        if changes:
            raise AssertionError(
                f"the memory differs from the snapshot for {key}: {'; '.join(changes)}\n  file: {file}\n"
                f"{difference_text(before, now)}\n"
                f"hint: if the change is intended, run pytest {_FLAG}, and commit the file"
            )


def _changes(before: MemoryReport, now: MemoryReport, tolerance: str | int) -> list[str]:
    pairs = {
        "device": (before.device_bytes, now.device_bytes),
        "host": (before.host_bytes, now.host_bytes),
    }
    return [
        f"{format_bytes(old)} -> {_after_text(old, new)} on the {space}"
        for space, (old, new) in pairs.items()
        if abs(new - old) > tolerated_bytes(tolerance, old)
    ]


def _after_text(old: int, new: int) -> str:
    """Format a size, with the difference where the text would equal that of the other size."""
    text = format_bytes(new)
    return text if text != format_bytes(old) else f"{text} ({new - old:+,} B)"


def _key(report: MemoryReport) -> str:
    """Return the target, and the versions that determine its figures."""
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
    # The reduced report has one moment, the peak of both spaces, at which all of its buffers are alive.
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
    if version != FORMAT:
        raise _damaged_file_error(file, f"version {version}, expected {FORMAT}")
    reports: dict[str, MemoryReport] = {}
    with tempfile.TemporaryDirectory() as folder:  # `from_json` reads only files
        for key, value in snapshots.items():
            path = Path(folder) / "report.json"
            path.write_text(json.dumps(value), encoding="utf-8")
            try:
                reports[key] = MemoryReport.from_json(path)
            except ReportError as error:
                raise _damaged_file_error(file, f"{key}: {error.got or error.message}") from error
    return reports


def _damaged_file_error(file: Path, got: object) -> ReportError:
    return ReportError(f"{file}: the memory snapshot cannot be read", got=got, hint=f"delete it and run pytest {_FLAG}")


def _write(file: Path, reports: dict[str, MemoryReport]) -> None:
    parts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for key, report in sorted(reports.items()):
            path = Path(folder) / "report.json"
            report.to_json(path)
            parts.append(f"{json.dumps(key)}: {path.read_text(encoding='utf-8').strip()}")
    snapshots = ",\n".join(parts)
    text = f'{{"memory_snapshot_version": {FORMAT}, "snapshots": {{\n{snapshots}\n}}}}\n'
    write_files(file.parent, {file.name: text.encode()})
