"""Which marker counts, and inputs that must not be passed over, in separate runs of pytest."""

from __future__ import annotations

from typing import Any

import pytest

pytest_plugins = "pytester"

pytestmark = pytest.mark.processes


PARAMETERS = """
TIGHT = pytest.mark.device_memory_limit("1 B", target="cpu")


@pytest.mark.device_memory_limit("1 GiB", target="cpu")
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=TIGHT)])
def test_limits_of_parameters(device_memory, size):
    device_memory(step, PARAMS, X)
"""


SKIPPED = """
@pytest.mark.skip(reason="not today")
@pytest.mark.device_memory_limit("1 GiB", target="no-such-chip")
def test_skipped(device_memory): ...


@pytest.mark.device_memory_limit("1 GiB", target="no-such-chip")
@pytest.mark.xfail(run=False, reason="not yet")
def test_not_run(device_memory): ...
"""


@pytest.mark.slow
def test_the_limit_of_a_parameter_is_the_nearest_and_a_skipped_test_needs_no_target(run: Any) -> None:
    result = run(PARAMETERS + SKIPPED)
    result.assert_outcomes(passed=1, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*test was limited to 1 B but needs *"])


TEXTS = """
def test_an_empty_target_is_not_the_default(device_memory):
    with pytest.raises(ValueError, match="name is empty"):
        device_memory(step, PARAMS, X, target="")


@pytest.mark.device_memory_limit("640 KiB", target="cpu")
def test_a_limit_that_reads_like_the_need(device_memory):
    report = device_memory(step, PARAMS, X)
    device_memory.limit(report, report.device_bytes - 1)


def test_arguments_that_nobody_takes(device_memory):
    with pytest.raises(ValueError, match="neither side is a function"):
        device_memory.ratio((step, (PARAMS, X)), (step, (PARAMS, X)), roles={"params": 0}, target="cpu")


@pytest.mark.parametrize("size", ["a::b", "a.b", "a/b", "\u00e4" * 140, "x" * 300], ids=str)
def test_names(device_memory, size):
    device_memory.snapshot(device_memory(step, PARAMS, X, target="cpu"), "../../x")
"""


@pytest.mark.slow
def test_inputs_are_not_passed_over(run: Any, pytester: pytest.Pytester) -> None:
    result = run(TEXTS, "--memory-snapshot-update")
    result.assert_outcomes(passed=7, failed=1)
    result.stdout.fnmatch_lines(["*was limited to *KiB but needs *KiB (1 B more) at the peak on cpu*"])
    files = [file.name for file in pytester.path.rglob("*.json")]
    assert len(files) == 5, files
    assert {file.parent.name for file in pytester.path.rglob("*.json")} == {"test_user"}
    run(TEXTS).assert_outcomes(passed=7, failed=1)
