"""Ticks of several passes: time in lockstep beside a scan's and the ideal, and ticks that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.core import ScheduleError
from lowtide.pipeline import Action, Costs, Kind, Schedule, schedule, simulate

RATIOS = ((1, 1, 1), (1, 1.2, 0.8), (1, 2, 1))
"""Of F, I and W; the last is what recomputation gives."""


@pytest.mark.parametrize("communication", [0, 0.1])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    "num_ranks", [4, pytest.param(8, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_the_best_is_never_slower_than_differentiating_through_a_scan(
    num_ranks: int, ratio: tuple[float, ...], communication: float
) -> None:
    """A scan over ticks takes m + p - 1 of them each way, and sends what each gives before the next begins."""
    costs = Costs(**dict(zip(("forward", "input", "weight"), ratio, strict=True)), communication=communication)
    for number in (2 * num_ranks, 4 * num_ranks, 8 * num_ranks):
        best = schedule("auto", num_stages=num_ranks, num_microbatches=number, costs=costs)
        run = simulate(best, costs, lockstep=True)
        assert run.makespan <= (number + num_ranks - 1) * (sum(ratio) + 2 * communication)
        assert max(run.peaks) <= 2 * num_ranks - 1


@pytest.mark.parametrize("communication", [0, 0.1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_best_is_near_the_time_without_a_bubble(ratio: tuple[float, ...], communication: float) -> None:
    costs = Costs(**dict(zip(("forward", "input", "weight"), ratio, strict=True)), communication=communication)
    for limit, most in ((None, 1.06), (8, 1.2)):
        best = schedule("auto", num_stages=8, num_microbatches=64, costs=costs, memory_limit=limit)
        run = simulate(best, costs, lockstep=True)
        assert run.makespan <= most * 64 * sum(ratio)
        assert max(run.peaks) <= (limit or 15)


def test_passes_of_one_tick_follow_one_another_while_results_are_sent() -> None:
    one = Schedule.from_text("- - 0F0 - - 0F1 - - - 0I0 0W0 - 0I1 0W1 -\n- - - - - 1F0 1I0 - 1F1 1I1 1W0 - - 1W1 -")
    assert one.ticks == ((0, 1, 3, 3, 4, 4), (1, 2, 2, 3, 3, 4))
    costs = Costs(forward=2, input=3, weight=1, communication=0.5)
    found = simulate(one, costs, lockstep=True)
    # The first F waits for what is sent, as nothing runs meanwhile; the second comes after I.
    assert found.starts == ((0, 2, 9.5, 12.5, 13.5, 16.5), (2.5, 4.5, 7.5, 9.5, 12.5, 13.5))
    assert found.makespan == 17.5 and found.num_ticks == 5


@pytest.mark.parametrize(
    ("order", "ticks", "words"),
    [
        ("FWI", ((0, 2, 1),), "cannot run 0I0 in tick 1"),
        ("FIW", ((0, 0, 0),), "cannot run 0I0 in tick 0"),
        ("FIW", ((0, 1, 0),), "cannot run 0W0 in tick 0"),
        ("FIW", ((0, -1, 1),), "cannot run 0I0 in tick -1"),
        ("FIW", ((0, 1),), "ticks are not those of the orders"),
        ("FIW", ((0, 1, 1), (0,)), "ticks are not those of the orders"),
    ],
)
def test_ticks_in_which_passes_cannot_run_are_refused(order: str, ticks: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Schedule(
            name="mine",
            num_microbatches=1,
            placement=(0,),
            orders=(tuple(Action(0, Kind(kind), 0) for kind in order),),
            ticks=ticks,
        )
