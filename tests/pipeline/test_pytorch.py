"""Tables of PyTorch's own generators are valid schedules, come back as they were, and have the orders of ours."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from lowtide.pipeline import Costs, Kind, Schedule, schedule, simulate
from tests.peers import Peer

GENERATORS = {
    "ScheduleLoopedBFS": (2, "looped-bfs"),
    "ScheduleInterleaved1F1B": (2, "interleaved"),
    "ScheduleInterleavedZeroBubble": (2, None),
    "ScheduleZBVZeroBubble": (2, "zb-v"),
    "ScheduleDualPipeV": (2, "dualpipe-v"),
    "ScheduleGPipe": (1, "gpipe"),
}
"""Stages of a rank, and the name of our generator, by the names of PyTorch's."""
SIZES = [(2, 4), (4, 8), (4, 12), (8, 16)]
"""Ranks and microbatches."""


def table(name: str, num_ranks: int, num_microbatches: int) -> str:
    """Return the text that PyTorch writes, without the devices that its constructors ask for."""
    from torch.distributed.pipelining import schedules

    cls: Any = getattr(schedules, name)
    chunks, _ = GENERATORS[name]

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
    text = io.StringIO(newline="")
    csv.writer(text).writerows(orders[rank] for rank in range(num_ranks))  # as its `_dump_csv`
    return text.getvalue()


@pytest.mark.parametrize("name", GENERATORS)
def test_the_tables_of_pytorch_are_read_written_and_generated(name: str, peer: Peer, tmp_path: Path) -> None:
    def compute() -> dict[str, str]:
        return {"tables": [table(name, *sizes) for sizes in SIZES]}

    chunks, our_name = GENERATORS[name]
    tables = peer.answer("tables", compute, {"name": name, "sizes": SIZES})["tables"]
    read = []
    for (num_ranks, num_microbatches), text in zip(SIZES, tables, strict=True):
        (tmp_path / "pytorch.csv").write_text(text, newline="")
        theirs = Schedule.from_csv(tmp_path / "pytorch.csv")  # raises when it is not valid
        assert (theirs.num_ranks, theirs.stages_per_rank) == (num_ranks, chunks)
        assert theirs.num_microbatches == num_microbatches
        theirs.to_csv(tmp_path / "ours.csv")
        again = Schedule.from_csv(tmp_path / "ours.csv")
        assert (again.orders, again.placement) == (theirs.orders, theirs.placement)
        rows = csv.reader(io.StringIO(text, newline=""))
        cells = [[cell for cell in row if cell and not cell.endswith("REDUCE_GRAD")] for row in rows]
        if not any("OVERLAP" in cell for row in cells for cell in row):  # two actions in a cell
            assert [[str(action) for action in order] for order in theirs.orders] == cells
        read.append(theirs)
    if our_name is not None:
        assert_generated(our_name, chunks, read[SIZES.index((4, 8))])


def assert_generated(name: str, chunks: int, theirs: Schedule) -> None:
    """Check our schedule of 4 ranks and 8 microbatches against PyTorch's."""
    if name == "zb-v":  # has another order, with no larger a bubble
        costs = Costs(forward=0.5, input=0.5, weight=0.5, weight_residuals=0.5)
        peer = simulate(theirs, costs)
        ours = simulate(schedule(name, num_stages=4 * chunks, num_microbatches=8, costs=costs), costs)
        assert ours.bubble <= peer.bubble and max(ours.peaks) <= max(peer.peaks)
        return
    made = schedule(name, num_stages=4 * chunks, num_microbatches=8)
    assert theirs.placement == made.placement
    kinds = {Kind.FORWARD} if name == "looped-bfs" else set(Kind)  # its backward passes go last in, first out
    for order, other in zip(theirs.orders, made.orders, strict=True):
        assert [action for action in order if action.kind in kinds] == [a for a in other if a.kind in kinds]
