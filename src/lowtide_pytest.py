"""The pytest plugin of Lowtide: marker, fixture and option; what they do is in `lowtide.testing`.

It stands beside the package because pytest imports it in every run of its environment, and a module inside of `lowtide`
would import JAX, before a conftest can set what JAX reads at its import. Here nothing is imported but pytest; the rest
comes with the first test that uses the marker or the fixture.
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
    """Add the flag that writes snapshots."""
    group = parser.getgroup("lowtide", "memory of compiled programs")
    group.addoption(
        "--memory-snapshot-update",
        action="store_true",
        default=False,
        help="write the memory snapshots that are missing or differ (default: they fail)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the summary of written snapshots."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(size, *, target=None, optional=False): every program that the test compiles through the fixture "
        'device_memory takes at most this much of a device, such as "12 GiB"; target is the fixture\'s default; '
        "optional skips the test where the target's compiler is not installed",
    )
    config.pluginmanager.register(_Summary(), "lowtide-snapshots")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the marker, and refuse one that says nothing or nonsense.

    This comes after pytest's own skipping, so a test that is skipped needs no compiler, and before the fixtures, which
    ask for the limit.
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
    """Return the limit that is nearest to a test: that of its parameters, else as pytest finds it.

    To pytest a function's own marker is nearer than what ``pytest.param(..., marks=...)`` gives to one of its cases.
    """
    marks: list[Any] = [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == MARKER]
    return marks[-1] if marks else item.get_closest_marker(MARKER)


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """After a marked test: fail when it measured nothing, for then its limit meant nothing."""
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
    """Compiles functions, and holds their memory against limits and snapshots: ``device_memory(fn, *args)``."""
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
    """Counts snapshots that tests wrote, in other processes, too: test reports carry them."""

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
