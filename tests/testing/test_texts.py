"""Limits, tolerances and every size that a tool prints: each can be given back to the tools."""

from __future__ import annotations

import argparse
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lowtide.cli import _fits
from lowtide.core import ConfigError, format_bytes, parse_bytes
from lowtide.memory import MemoryReport, SpaceBytes, Target, extrapolate, target
from lowtide.testing import DeviceMemory, Limit
from lowtide.testing._memory import _tolerated_bytes

SIZES = st.one_of(st.integers(0, 2**20), st.integers(0, 2**50))


def printed_step(num_bytes: int) -> float:
    """Half of the last digit that is printed for a size."""
    unit = next((1024**power for power in (4, 3, 2, 1) if num_bytes >= 1024**power * 0.999), 1)
    return unit * 0.005 + 1 if unit > 1 else 0


def close(given_back: int, num_bytes: int) -> bool:
    return abs(given_back - num_bytes) <= printed_step(max(num_bytes, given_back))


@given(SIZES)
def test_every_printed_size_can_be_given_back_to_every_tool(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert close(parse_bytes(text), num_bytes)
    again = parse_bytes(text)
    limit = Limit.of(text)
    assert limit.num_bytes == again
    assert str(limit) == format_bytes(again)
    assert _tolerated_bytes(text, 10) == again
    if again:
        goal = target("cpu", device_bytes=text)
        assert goal.budget_bytes == again
        # What is printed of what was read is stable from then on.
        assert format_bytes(parse_bytes(format_bytes(again))) == format_bytes(again)


@given(SIZES)
@settings(max_examples=20)
def test_the_sizes_that_fits_prints_are_budgets(num_bytes: int) -> None:
    row = {"target": "cpu", "device_bytes": num_bytes, "usable_bytes": num_bytes, "host_bytes": 0}
    row |= {"host_usable_bytes": None, "fits": True, "host_fits": None, "margin_bytes": 0, "compile_seconds": 1.0}
    console = Console(file=io.StringIO(), width=160)
    console.print(_fits._table([row], None))
    line = console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]
    number, unit = line.split()[1:3]
    parser = argparse.ArgumentParser()
    _fits.register(parser.add_subparsers())
    args = parser.parse_args(["fits", "a.py:b", "--budget", f"{number} {unit}"])
    assert close(parse_bytes(args.budget), num_bytes)


@given(st.integers(1, 2**40))
@settings(max_examples=30)
def test_the_limit_that_a_failure_prints_is_a_limit_again(num_bytes: int) -> None:
    goal = Target(name="cpu", platform="cpu", chip="cpu", num_devices=1, device_bytes=None)
    space = SpaceBytes(argument_bytes=num_bytes)
    report = MemoryReport(target=goal, device=space, host=SpaceBytes(), by_role={"x": num_bytes}, host_by_role={})
    assert close(Limit.of(format_bytes(report.device_bytes)).num_bytes, num_bytes)


def test_a_limit_of_extrapolate_reads_the_same_text() -> None:
    with pytest.raises(ConfigError, match="'1 GiBi' is not a size"):
        extrapolate(lambda n: None, limit="1 GiBi", target="cpu")


@pytest.mark.parametrize(
    ("text", "whole", "num_bytes"),
    [("1 %", 200, 2), ("0.5%", 1000, 5), ("2 KiB", 10, 2048), (7, 10, 7), ("0", 10, 0), (" 100 % ", 3, 3)],
)
def test_tolerances_are_shares_or_sizes(text: str | int, whole: int, num_bytes: int) -> None:
    assert _tolerated_bytes(text, whole) == num_bytes


@pytest.mark.parametrize("text", ["-1 %", "%", "one", "1 % 2"])
def test_what_is_no_tolerance_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a tolerance"):
        _tolerated_bytes(text, 100)


def test_outside_of_a_test_there_are_no_snapshots() -> None:
    meter = DeviceMemory()
    report = meter(lambda x: x * 2, 1.0, target="cpu")
    with pytest.raises(ConfigError, match="snapshots exist only inside a test"):
        meter.snapshot(report)
    with pytest.raises(ConfigError, match="sizes is empty"):
        meter.limits(report, {})
