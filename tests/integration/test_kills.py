"""Killed at many random moments, some of them inside checkpoint writing, a run ends as it would have.

And over three kills it sees each example once in every epoch, whatever holds its data. ``LOWTIDE_KILLS=100`` kills more
often than the run of all tests does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

NUM_KILLS, SEED = int(os.environ.get("LOWTIDE_KILLS", "15")), 5


@pytest.fixture
def printed(fork: Callable[..., Any]) -> Callable[..., Any]:
    """Run a script beside this file; returns the JSON of its last line."""

    def printed(script: str, *arguments: Any) -> Any:
        process = fork(Path(__file__).with_name(script), *arguments)
        assert process.wait(900) == 0, f"seed {SEED}\n{process.text[-8000:]}"
        return json.loads(process.text.splitlines()[-1])

    return printed


@pytest.mark.slow
def test_many_kills_leave_the_weights_of_an_uninterrupted_run(printed: Callable[..., Any], tmp_path: Path) -> None:
    said = printed("killed.py", tmp_path / "run", NUM_KILLS, SEED)
    kills, last = said["kills"], said["last"]
    reference = {step: digest for step, digest in said["reference"]}
    where = f"seed {SEED}: {[(kill['restored'], kill['steps'][-1:]) for kill in kills]}"

    # The kills came where they should: while a process started, between steps, and while a checkpoint was written.
    assert len(kills) == NUM_KILLS
    assert sum(kill["is_writing"] for kill in kills) >= NUM_KILLS // 10, where
    assert sum(not kill["steps"] for kill in kills) >= NUM_KILLS // 33, where
    assert sum(bool(kill["steps"]) and not kill["is_writing"] for kill in kills) >= NUM_KILLS // 33, where

    # Each resumed from a complete checkpoint, never one older than a resume before it had, with its very weights.
    resumed = [kill["restored"] for kill in kills if kill["restored"] is not None] + [last[0]]
    steps = [step or 0 for step, _ in resumed]
    assert steps == sorted(steps) and steps[-1] >= NUM_KILLS // 10, where
    for step, digest in resumed:
        assert digest == reference[step], f"{where}: other weights at step {step}"
    for kill in kills:
        begun = (kill["restored"] or [0])[0] or 0
        assert kill["steps"] == list(range(begun + 1, begun + 1 + len(kill["steps"]))), where
    assert last[-1][1] == reference[last[-1][0]], f"{where}: other weights at the end"

    # What kills left behind does not pile up.
    assert max(kill["num_unfinished"] for kill in kills) <= 1, where
    assert said["left"] == sorted(str(step) for step in last_saved(last[-1][0])), where


def last_saved(end: int) -> list[int]:
    """The two newest checkpoints of a run to a step: the last multiple of three, and the end."""
    return [(end - 1) // 3 * 3, end]


KINDS = [
    pytest.param("array", marks=[pytest.mark.sentinel, pytest.mark.slow]),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dataset", "loader", "iterable")),
]


@pytest.mark.parametrize("kind", KINDS)
def test_over_three_kills_each_example_is_seen_once_in_every_epoch(
    printed: Callable[..., Any], kind: str, tmp_path: Path
) -> None:
    said = printed("killed_data.py", tmp_path / "run", SEED, kind)
    *killed, last = said["lives"]
    *whole, (end, weights) = said["whole"][1:]
    assert len(killed) == 3
    stream: list[Any] = []
    for (restored, _), *records in [*killed, last]:
        # What counts are the steps up to the checkpoint, and what follows on it.
        assert (not stream) == (restored == 0), f"seed {SEED}: a life began at step {restored}"
        stream = [[step, batch] for step, batch in stream if step <= restored]
        assert len(stream) == restored
        stream += records
    assert stream.pop() == [end, weights], f"seed {SEED}: other weights at the end"
    assert stream == whole
    epochs = [[batch for _, batch in stream[at : at + 12]] for at in range(0, 96, 12)]
    assert len(stream) == 96
    for epoch in epochs:
        assert sorted(example for batch in epoch for example in batch) == list(range(24)), f"seed {SEED}"
