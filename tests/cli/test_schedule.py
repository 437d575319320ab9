"""`lowtide schedule`: figures, drawings and files; what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.pipeline import Costs, Schedule, schedule, simulate


def test_figures_are_those_of_the_simulation(lowtide: Any) -> None:
    arguments = ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--costs", "1,1.5,0.5,0.25"]
    status, printed, _ = lowtide(*arguments, "--json")
    assert status == 0
    said = json.loads(printed)
    costs = Costs(forward=1, input=1.5, weight=0.5, communication=0.25)
    made = schedule("1f1b", num_stages=4, num_microbatches=8, costs=costs)
    for how, lockstep in (("asynchronous", False), ("in lockstep", True)):
        found = simulate(made, costs, lockstep=lockstep)
        assert said[how]["makespan"] == found.makespan and said[how]["bubble"] == found.bubble
        assert said[how]["peaks"] == list(found.peaks) == [4, 3, 2, 1]
    status, printed, _ = lowtide(*arguments)
    assert (
        status == 0
        and "1f1b: 4 stages on 4 ranks, 8 microbatches" in printed
        and "4, 3, 2, 1" in printed
        and "rank 3" in printed
    )


def test_files_are_written_and_read(tmp_path: Path, lowtide: Any) -> None:
    table, trace = tmp_path / "v.csv", tmp_path / "v.json"
    name = ["schedule", "v-half", "--stages", "8", "--microbatches", "6"]
    status, printed, _ = lowtide(*name, "--csv", str(table), "--draw", str(trace), "--lockstep")
    assert status == 0 and f"written: {table}" in printed.replace("\n", "")
    made = schedule("v-half", num_stages=8, num_microbatches=6, costs=Costs())
    assert Schedule.from_csv(table).orders == made.orders
    assert len(json.loads(trace.read_text())["traceEvents"]) > sum(map(len, made.orders))
    status, printed, _ = lowtide("schedule", str(table), "--json")
    assert status == 0 and json.loads(printed)["asynchronous"]["num_microbatches"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zb-h9", "--stages", "4", "--microbatches", "8"], "not 'zb-h9'"),
        (["zb-h1", "--microbatches", "8"], "--stages is missing"),
        (["zb-h1", "--stages", "4"], "--microbatches is missing"),
        (["none.csv"], "none.csv: cannot be read"),
        (["none.csv", "--stages", "4"], "none.csv already defines --stages"),
        (["zb-v", "--stages", "4", "--microbatches", "4", "--draw", "x.gif"], "unknown picture format"),
        (["zb-v", "--stages", "4", "--microbatches", "4", "--costs", "a"], "F,I,W,C, not 'a'"),
        (
            ["zb-v", "--stages", "4", "--microbatches", "4", "--costs", "1,0,1"],
            "input must be a finite number above 0, not 0.0",
        ),
        (["zb-v", "--stages", "5", "--microbatches", "4"], "a multiple of 2"),
        (["gpipe", "--stages", "2", "--microbatches", "8", "--memory-limit", "3"], "needs more than its memory_limit"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, lowtide: Any) -> None:
    status, _, said = lowtide("schedule", *arguments)
    assert status == 2 and message in said and "hint:" in said
