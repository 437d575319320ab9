"""The pytest plugin of Lowtide: marker, fixture and option, which `lowtide.testing` implements.

pytest imports this module in every run of its environment. A module inside `lowtide` would import JAX before a conftest
can set the environment variables that JAX reads at its import. So this module is outside the package and imports only
pytest. The first test that uses the marker or the fixture imports `lowtide.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowtide.testing import DeviceMemory

MARKER = "device_memory_limit"
SNAPSHOT = "memory_snapshot"
_METER = pytest.StashKey[Any]()
_LIMIT = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that updates snapshots."""
    group = parser.getgroup("lowtide", "memory of compiled programs")
    group.addoption(
        "--memory-snapshot-update",
        action="store_true",
        default=False,
        help="write the memory snapshots that are missing or differ (default: they fail)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the summary that lists written snapshots."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(size, *, target=None, optional=False): every program that the test compiles through the fixture "
        'device_memory takes at most this much of a device, such as "12 GiB"; target is the fixture\'s default; '
        "optional skips the test where the target's compiler is not installed",
    )
    config.pluginmanager.register(_Summary(), "lowtide-snapshots")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the marker; fail the test for invalid arguments, and skip it if an optional target has no compiler.

    This hook runs after pytest's own skipping, so a skipped test needs no compiler, and before fixtures read the limit.
    """
    marker = _marker(item)
    if marker is None:
        return
    from lowtide.core import LowtideError
    from lowtide.testing import Limit

    try:
        limit = Limit.of(*marker.args, **marker.kwargs)
    except LowtideError as error:
        pytest.fail(f"{item.nodeid}: bad marker @pytest.mark.{MARKER}\n{error}", pytrace=False)
    if limit.missing is not None:
        pytest.skip(f"@pytest.mark.{MARKER}(optional=True): {limit.missing}")
    item.stash[_LIMIT] = limit


def _marker(item: pytest.Item) -> Any:
    """Return the test's marker or None; unlike `get_closest_marker`, prefer one of ``pytest.param(..., marks=...)``."""
    marks: list[Any] = [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == MARKER]
    return marks[-1] if marks else item.get_closest_marker(MARKER)


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a marked test that measured nothing, because its limit had no effect; this runs after the test itself."""
    if _LIMIT not in item.stash:
        return
    meter = item.stash.get(_METER, None)
    if meter is None or not meter.reports:
        uses = "never called" if meter is not None else "does not have"
        pytest.fail(
            f"the test is limited to {item.stash[_LIMIT]} but measured nothing: it {uses} the fixture device_memory\n"
            "hint: report = device_memory(step, *args), with device_memory among the test's arguments",
            pytrace=False,
        )


@pytest.fixture
def device_memory(request: pytest.FixtureRequest) -> DeviceMemory:
    """Compile functions, and compare their memory with limits and snapshots: ``device_memory(fn, *args)``."""
    from lowtide.testing import DeviceMemory, Snapshots

    item: Any = request.node
    update = bool(request.config.getoption("--memory-snapshot-update"))

    def written(file: str, verb: str) -> None:
        item.user_properties.append((SNAPSHOT, f"{verb} {file}"))

    snapshots = Snapshots.of_test(item.path, item.nodeid, update=update, on_write=written)
    meter = DeviceMemory(limit=item.stash.get(_LIMIT, None), snapshots=snapshots)
    item.stash[_METER] = meter
    return meter


class _Summary:
    """Summary of the snapshots that tests wrote, also in worker processes; mutable: test reports add entries."""

    def __init__(self) -> None:
        self.written = list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.written += [str(value) for name, value in report.user_properties if name == SNAPSHOT]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.written:
            return
        verbs = [text.partition(" ")[0] for text in self.written]
        counts = ", ".join(f"{verbs.count(verb)} {verb}" for verb in dict.fromkeys(sorted(verbs)))
        terminalreporter.section("memory snapshots")
        for text in sorted(self.written):
            terminalreporter.line(text)
        terminalreporter.line(f"memory snapshots: {counts}")
