"""Tables that PyTorch's own generators make are read, are valid, and come back as they were."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lowtide.pipeline import Kind, Schedule, schedule, simulate

pytestmark = pytest.mark.peers

GENERATORS = {
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
    "ScheduleGPipe": 1,
}
"""Generators, and how many stages a rank has."""


def dump(name: str, num_ranks: int, num_microbatches: int, path: Path) -> None:
    """What PyTorch writes, without the devices that its constructors ask for."""
    from torch.distributed.pipelining import schedules

    cls: Any = getattr(schedules, name)
    chunks = GENERATORS[name]

    class Bare(cls):
        num_stages = chunks * num_ranks

        def __init__(self) -> None:
            self.pp_group_size, self._n_microbatches, self.n_local_stages = num_ranks, num_microbatches, chunks
            self._num_stages, self._stages = chunks * num_ranks, [None] * chunks
            self.number_of_rounds = max(1, num_microbatches // num_ranks)
            self.microbatches_per_round = num_microbatches // self.number_of_rounds

    bare: Any = Bare()
    if hasattr(cls, "_calculate_single_rank_operations"):
        orders = {rank: bare._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    else:
        orders = bare._get_pipeline_order()
    with path.open("w", newline="") as file:  # as its `_dump_csv`
        csv.writer(file).writerows(orders[rank] for rank in range(num_ranks))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("name", GENERATORS)
def test_the_tables_of_pytorch_are_read_and_written(
    name: str, num_ranks: int, num_microbatches: int, tmp_path: Path
) -> None:
    dump(name, num_ranks, num_microbatches, tmp_path / "pytorch.csv")
    found = Schedule.from_csv(tmp_path / "pytorch.csv")  # raises when it is not valid
    assert (found.num_ranks, found.stages_per_rank) == (num_ranks, GENERATORS[name])
    assert found.num_microbatches == num_microbatches
    found.to_csv(tmp_path / "ours.csv")
    again = Schedule.from_csv(tmp_path / "ours.csv")
    assert (again.orders, again.placement) == (found.orders, found.placement)
    with (tmp_path / "pytorch.csv").open(newline="") as file:
        cells = [[cell for cell in row if cell and not cell.endswith("REDUCE_GRAD")] for row in csv.reader(file)]
    if not any("OVERLAP" in cell for row in cells for cell in row):  # two actions in a cell
        assert [[str(action) for action in order] for order in found.orders] == cells


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleLoopedBFS", "looped-bfs"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
def test_orders_are_those_of_pytorch(theirs: str, ours: str, tmp_path: Path) -> None:
    dump(theirs, 4, 8, tmp_path / "pytorch.csv")
    found = Schedule.from_csv(tmp_path / "pytorch.csv")
    made = schedule(ours, num_stages=4 * GENERATORS[theirs], num_microbatches=8)
    assert found.placement == made.placement
    kinds = {Kind.FORWARD} if theirs == "ScheduleLoopedBFS" else set(Kind)  # its backward passes go last in, first out
    for one, other in zip(found.orders, made.orders, strict=True):
        assert [a for a in one if a.kind in kinds] == [a for a in other if a.kind in kinds]


def test_a_zero_bubble_v_of_pytorch_has_the_bubble_of_ours(tmp_path: Path) -> None:
    from lowtide.pipeline import Costs

    costs = Costs(forward=0.5, input=0.5, weight=0.5, weight_residuals=0.5)
    dump("ScheduleZBVZeroBubble", 4, 8, tmp_path / "pytorch.csv")
    theirs = simulate(Schedule.from_csv(tmp_path / "pytorch.csv"), costs)
    ours = simulate(schedule("zb-v", num_stages=8, num_microbatches=8, costs=costs), costs)
    assert ours.bubble <= theirs.bubble and max(ours.peaks) <= max(theirs.peaks)
