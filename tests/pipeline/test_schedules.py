"""Schedules: the published figures, every size, random costs, ticks, pictures; what is wrong with one is said."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lowtide.core import ConfigError, LayerStack, OutputError, ScheduleError
from lowtide.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    Schedule,
    scan_makespan,
    schedule,
    simulate,
    ticks,
    value_and_grad,
)

from .test_executor import TWO_STAGES, assert_close, mesh_of, of_plain_jax

V = {"zb-v", "dualpipe-v", "v-half", "v-min"}
LIMITS = {
    "zb-h1": lambda p: p,
    "zb-h2": lambda p: 2 * p - 1,
    "interleaved-zb": lambda p: p,
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
}


def per_microbatch(chunks: int, **costs: Any) -> Costs:
    """Costs of a stage when those of a rank are 1."""
    return Costs(
        **{"forward": 1 / chunks, "input": 1 / chunks, "weight": 1 / chunks} | costs, weight_residuals=1 / chunks
    )


def made(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    chunks = 2 if name in TWO_STAGES else 1
    options = {"costs": per_microbatch(chunks)} | options
    return schedule(name, num_stages=chunks * num_ranks, num_microbatches=num_microbatches, **options)


# --- published figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_microbatches", "bubble", "peaks"),
    [
        ("gpipe", 8, 9, [8, 8, 8, 8]),
        ("1f1b", 8, 9, [4, 3, 2, 1]),
        ("interleaved", 8, 4.5, [5.5, 4.5, 3.5, 2.5]),
        ("zb-h1", 8, 3, [4] * 4),
        ("interleaved-zb", 8, 1.5, [4] * 4),
        ("zb-v", 8, 1.5, [4] * 4),
        ("dualpipe-v", 10, 1.5, [4.5] * 4),
        ("v-half", 8, 2.5, [3] * 4),
        ("v-min", 8, 5.5, [2] * 4),
    ],
)
def test_bubbles_and_peaks_on_four_ranks(name: str, num_microbatches: int, bubble: float, peaks: list[float]) -> None:
    one = made(name, 4, num_microbatches)
    found = simulate(one, per_microbatch(one.stages_per_rank))
    assert found.bubble == pytest.approx(bubble)
    assert found.peaks == pytest.approx(peaks)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "forward", "back", "weight"),
    [(4, 8, 1, 1, 1), (4, 16, 1, 1.2, 0.8), (8, 32, 1, 1, 1), (3, 9, 2, 1.5, 1), (6, 20, 1, 2, 0.5)],
)
def test_bubbles_are_the_analytic_ones(
    num_ranks: int, num_microbatches: int, forward: float, back: float, weight: float
) -> None:
    costs = Costs(forward=forward, input=back, weight=weight)
    for name, unit in [
        ("1f1b", forward + back + weight),
        ("zb-h1", forward + back - weight),
        ("zb-h2", forward + back - 2 * weight),
    ]:
        one = made(name, num_ranks, num_microbatches, costs=costs)
        assert simulate(one, costs).steady_bubble == pytest.approx((num_ranks - 1) * unit), name


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_peaks_are_those_of_the_formulas(num_ranks: int) -> None:
    for name in ("zb-v", "v-half", "v-min"):
        one = made(name, num_ranks, 4 * num_ranks)
        assert max(simulate(one, per_microbatch(2)).peaks) == LIMITS[name](num_ranks), name


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "lockstep", "free"), [(4, 8, 40, 33), (8, 32, 148, 117)])
def test_whole_backward_passes_cost_more_in_lockstep(
    num_ranks: int, num_microbatches: int, lockstep: float, free: float
) -> None:
    one = made("1f1b", num_ranks, num_microbatches)
    assert simulate(one, lockstep=True).makespan == lockstep
    assert simulate(one).makespan == free
    split = made("zb-h1", num_ranks, num_microbatches)
    assert simulate(split, lockstep=True).makespan == simulate(split).makespan < lockstep


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_orders_are_those_in_the_file(name: str) -> None:
    golden = Path(__file__).parents[1] / "golden" / "schedules" / f"{name}.txt"
    assert made(name, 4, 8).to_text() + "\n" == golden.read_text(encoding="utf-8")


# --- all sizes -----------------------------------------------------------------------------------------------------

times = st.floats(min_value=0.1, max_value=5.0)
EXAMPLES = settings().max_examples
"""Of the profile."""


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(
    name=st.sampled_from(SCHEDULES),
    num_ranks=st.integers(1, 8),
    num_microbatches=st.integers(1, 32),
    chunks=st.integers(1, 3),
    data=st.data(),
)
def test_every_size_and_cost_gives_a_valid_schedule_within_its_memory(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, data: Any
) -> None:
    chunks = chunks if name in {"interleaved", "interleaved-zb", "looped-bfs", "auto"} else 2 if name in V else 1
    num_stages = chunks * num_ranks
    each = st.lists(times, min_size=num_stages, max_size=num_stages)
    costs = Costs(
        forward=data.draw(each),
        input=data.draw(each),
        weight=data.draw(each),
        communication=data.draw(st.floats(0, 2)),
        weight_residuals=1 / chunks,
    )
    one = schedule(name, num_stages=num_stages, num_microbatches=num_microbatches, stages_per_rank=chunks, costs=costs)
    # Valid, and nobody waits for ever: said by the constructor, and seen in both simulations.
    assert Schedule.from_text(one.to_text(), name=name) == one
    free, locked = simulate(one, costs), simulate(one, costs, lockstep=True)
    assert free.makespan <= locked.makespan * (1 + 1e-9)
    assert (
        free.num_transfers
        == locked.num_transfers
        == 2 * num_microbatches * sum(a != b for a, b in zip(one.placement, one.placement[1:], strict=False))
    )
    assert len(ticks(one)) == locked.num_ticks
    if name in LIMITS:
        assert max(free.peaks) <= LIMITS[name](num_ranks) * (1 + 1e-9)
    _assert_in_time(one, free.starts, free.ends, costs)


@settings(max_examples=EXAMPLES // 5)
@given(
    name=st.sampled_from(SCHEDULES), num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 16), data=st.data()
)
def test_stages_may_keep_different_amounts(name: str, num_ranks: int, num_microbatches: int, data: Any) -> None:
    chunks = 2 if name in V or name in {"interleaved", "interleaved-zb", "looped-bfs"} else 1
    sizes = {"num_stages": chunks * num_ranks, "num_microbatches": num_microbatches}
    each = st.lists(times, min_size=sizes["num_stages"], max_size=sizes["num_stages"])
    costs = Costs(input_residuals=data.draw(each), weight_residuals=data.draw(each))
    one = schedule(name, **sizes, costs=costs)
    assert Schedule.from_text(one.to_text(), name=name) == one
    limit = data.draw(st.floats(0.3, 1.0)) * max(simulate(one, costs).peaks)
    try:
        less = schedule(name, **sizes, costs=costs, memory_limit=limit)
    except ScheduleError:
        return
    assert max(simulate(less, costs).peaks) <= limit * (1 + 1e-9)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in {"gpipe", "looped-bfs"}])
def test_what_is_kept_does_not_grow_with_microbatches(name: str) -> None:
    costs = Costs(communication=0.5, input_residuals=0.5)

    def peaks(num_microbatches: int) -> Any:
        one = schedule(name, num_stages=8, num_microbatches=num_microbatches, costs=costs, lockstep=name == "auto")
        return simulate(one, costs).peaks

    assert peaks(64) == pytest.approx(peaks(32))


def test_numbers_of_numpy_are_numbers() -> None:
    costs = Costs(forward=np.float32(1.5), weight=np.array([1.0, 2.0]))
    assert costs == Costs(forward=1.5, weight=[1.0, 2.0])
    sizes: Any = {"num_stages": np.int64(2), "num_microbatches": np.int32(4)}
    assert schedule("zb-h1", **sizes, costs=costs).num_microbatches == 4
    with pytest.raises(ConfigError, match=r"(?s)memory_limit must be a number above 0.*, not nan.*hint:"):
        schedule("zb-h1", num_stages=2, num_microbatches=4, memory_limit=math.nan)


def _assert_in_time(one: Schedule, starts: Any, ends: Any, costs: Costs) -> None:
    """Written anew: nothing begins before what it needs has ended and come."""
    begun, ended = (
        {a: t for o, ts in zip(one.orders, all_, strict=True) for a, t in zip(o, ts, strict=True)}
        for all_ in (starts, ends)
    )

    def end(stage: int, kinds: str, microbatch: int, to: int) -> float:
        found = [ended[a] for k in kinds if (a := Action(stage, Kind(k), microbatch)) in ended]
        assert len(found) == 1
        return found[0] + (costs.communication if one.placement[stage] != one.placement[to] else 0)

    for action, begin in begun.items():
        stage, kind, microbatch = action
        if kind is Kind.FORWARD and stage:
            assert begin >= end(stage - 1, "F", microbatch, stage)
        if kind in (Kind.INPUT, Kind.BACKWARD):
            assert begin >= end(stage, "F", microbatch, stage)
            if stage + 1 < one.num_stages:
                assert begin >= end(stage + 1, "IB", microbatch, stage)
        if kind is Kind.WEIGHT:
            assert begin >= end(stage, "I", microbatch, stage)
        assert ended[action] == pytest.approx(begin + costs.of(action))
    for rank in range(one.num_ranks):
        pairs = list(zip(starts[rank], ends[rank], strict=True))
        assert all(later[0] >= earlier[1] for earlier, later in zip(pairs, pairs[1:], strict=False))


@pytest.mark.slow
@settings(max_examples=max(4, EXAMPLES // 15))
@given(
    num_ranks=st.integers(1, 6),
    num_microbatches=st.integers(1, 16),
    chunks=st.integers(1, 2),
    lockstep=st.booleans(),
    data=st.data(),
)
def test_auto_is_at_least_as_good_as_each_named_schedule(
    num_ranks: int, num_microbatches: int, chunks: int, lockstep: bool, data: Any
) -> None:
    num_stages = chunks * num_ranks
    each = st.lists(times, min_size=num_stages, max_size=num_stages)
    costs = Costs(
        forward=data.draw(each),
        input=data.draw(each),
        weight=data.draw(each),
        communication=data.draw(st.floats(0, 2)),
        weight_residuals=1 / chunks,
    )
    limit = data.draw(st.one_of(st.none(), st.floats(1, 2 * num_ranks)))
    sizes: Any = {"num_stages": num_stages, "num_microbatches": num_microbatches, "stages_per_rank": chunks}
    found = schedule("auto", **sizes, costs=costs, memory_limit=limit, lockstep=lockstep)
    assert found.name == "auto"
    run = simulate(found, costs, lockstep=lockstep)
    assert max(run.peaks) <= (limit or float("inf")) * (1 + 1e-9)
    for name in SCHEDULES:
        try:
            other = schedule(name, **sizes, costs=costs, memory_limit=limit)
        except (ConfigError, ScheduleError):  # another number of stages a rank, or more memory
            continue
        if limit is None and name in {"gpipe", "looped-bfs"}:  # all microbatches are more than auto's own limit
            continue
        assert run.makespan <= simulate(other, costs, lockstep=lockstep).makespan * (1 + 1e-6), name


def test_auto_is_better_than_all_where_stages_differ() -> None:
    each = [2, 1, 1, 1]
    costs = Costs(forward=each, input=each, weight=[0.8 * one for one in each], communication=0.3)
    sizes: Any = {"num_stages": 4, "num_microbatches": 8, "costs": costs, "memory_limit": 5, "lockstep": False}
    best = simulate(schedule("auto", **sizes), costs).makespan
    named = [simulate(schedule(name, **sizes), costs).makespan for name in ("1f1b", "zb-h1", "zb-h2")]
    assert best == pytest.approx(46.6) and min(named) == pytest.approx(48.4)
    with pytest.raises(ScheduleError, match=r"(?s)no schedule stays within the memory_limit of 0.5.*hint: raise"):
        schedule("auto", num_stages=4, num_microbatches=8, memory_limit=0.5)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_auto_needs_no_more_than_one_microbatch(chunks: int) -> None:
    sizes: Any = {"num_stages": 3 * chunks, "stages_per_rank": chunks, "num_microbatches": 5}
    found = schedule("auto", **sizes, memory_limit=chunks)
    assert simulate(found).peaks == (chunks,) * 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    one = made(name, 3, 7)
    one.to_csv(tmp_path / f"{name}.csv")
    assert Schedule.from_csv(tmp_path / f"{name}.csv") == one
    rows = list(csv.reader(io.StringIO(one.to_csv())))
    assert [len(row) for row in rows] == [len(order) for order in one.orders]


def test_a_limit_of_memory_is_kept_or_refused() -> None:
    tight = made("zb-h2", 4, 12, memory_limit=5.0)
    assert max(simulate(tight).peaks) <= 5
    assert simulate(tight).steady_bubble > simulate(made("zb-h2", 4, 12)).steady_bubble
    each = made("zb-h1", 4, 12, memory_limit=np.array([4, 4, 4, 2]))  # measured ones
    assert simulate(each).peaks[3] <= 2
    with pytest.raises(ScheduleError, match=r"(?s)gpipe: rank 0 needs more.*8 instead of 6.*hint:"):
        made("gpipe", 4, 8, memory_limit=6.0)
    with pytest.raises(
        ScheduleError, match=r"(?s)rank \d cannot continue within its memory.*of 0.5 is in use.*hint: raise"
    ):
        made("zb-h1", 4, 8, memory_limit=0.5)
    with pytest.raises(ConfigError, match=r"(?s)memory_limit must be .*list of 4 such numbers.*, not \[4, 4\].*hint:"):
        made("zb-h1", 4, 8, memory_limit=[4, 4])


def test_weight_passes_fill_what_slow_stages_leave() -> None:
    costs = Costs(forward=[1, 3, 1, 1], input=[1, 3, 1, 1], weight=[1, 3, 1, 1])
    whole, split = made("1f1b", 4, 12, costs=costs), made("zb-h1", 4, 12, costs=costs)
    assert simulate(split, costs).bubble < simulate(whole, costs).bubble


def test_residuals_of_the_input_pass_are_freed_by_it() -> None:
    costs = Costs(input_residuals=0.75, weight_residuals=0.25)
    one = made("zb-h1", 4, 8, costs=costs)
    found = simulate(one, costs)
    held, most = 0.0, 0.0
    for action in one.orders[3]:
        held += {"F": 1.0, "I": -0.75, "W": -0.25}[action.kind]
        most = max(most, held)
    assert found.peaks[3] == most < 4


# --- what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F0 0B0", r"stage 0 runs B F F for microbatch 0(?=.*F once)"),
        ("0F0", r"stage 0 runs F for microbatch 0"),
        ("0F0 0I0", r"stage 0 runs F I for microbatch 0(?=.*I and W once)"),
        ("0F0 0F1 0B0", r"stage 0 runs F for microbatch 1"),
        ("0F0 0B0\n2F0 2B0", r"only the stages 0, 2 have a rank"),
        ("0F0 0B0 1F0\n1B0", r"rank 0 cannot run 1F0: stage 1 is on rank 1"),
        ("0B0 0F0", r"rank 0 waits forever before 0B0, which needs 0F0"),
        ("0F0 0W0 0I0", r"rank 0 waits forever before 0W0, which needs 0I0"),
        ("0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", ""),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", r"waits forever.*rank 0 waits before 0B0; rank 1 waits before 1F1"),
        ("", "no action"),
    ],
)
def test_a_schedule_that_is_not_valid_is_refused(text: str, message: str) -> None:
    if not message:  # an unusual order that works
        assert Schedule.from_text(text).num_microbatches == 2
        return
    with pytest.raises(ScheduleError, match=f"(?s){message}.*hint:"):
        Schedule.from_text(text)


def test_cells_that_are_no_actions_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'0X0' is not an action.*hint: write .*for instance 2F0"):
        Schedule.from_text("0X0")
    with pytest.raises(ConfigError, match=r"(?s)none.csv: cannot be read.*hint:"):
        Schedule.from_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConfigError, match=r"(?s)bytes.csv: cannot be read.*hint:"):
        Schedule.from_csv(tmp_path / "bytes.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(?s)hint:"):
        made("1f1b", 2, 2).to_csv(tmp_path / "file" / "x.csv")


def test_the_text_of_pytorch_is_read() -> None:
    found = Schedule.from_csv(Path(__file__).with_name("pytorch.csv"))
    assert (found.num_stages, found.num_microbatches, found.is_split) == (2, 2, True)
    assert found.to_text() == "0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "zb-h3"}, r"name must be \"gpipe\", .*, not 'zb-h3'.*hint: did you mean \"zb-h\d"),
        ({"num_stages": 0}, r"num_stages must be an integer of at least 1, not 0"),
        ({"num_microbatches": 0}, r"num_microbatches must be an integer of at least 1, not 0"),
        ({"stages_per_rank": 2}, r"zb-h1: stages_per_rank must be 1, not 2.*hint: choose interleaved"),
        (
            {"name": "zb-v", "stages_per_rank": 2.0},
            r"zb-v: stages_per_rank must be 2, not 2.0",
        ),
        ({"name": "interleaved", "stages_per_rank": "2"}, r"stages_per_rank must be an integer of at least 1, not '2'"),
        ({"memory_limit": ["4"] * 4}, r"memory_limit must be .*a list of 4 such numbers, one per.*, not \['4'"),
        ({"memory_limit": "4 GiB"}, r"memory_limit is the text '4 GiB'.*hint: pass bytes to .*value_and_grad"),
        ({"name": "auto", "memory_limit": "4 GiB"}, r"memory_limit is the text '4 GiB'.*value_and_grad"),
        ({"name": "zb-v", "num_stages": 5}, r"num_stages must be a multiple of 2, the stages per rank of zb-v, not 5"),
        ({"costs": Costs(forward=[1, 1])}, r"forward must be one number, or 4 numbers, not 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    given = {"name": "zb-h1", "num_stages": 4, "num_microbatches": 8} | options
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        schedule(given.pop("name"), **given)


@pytest.mark.parametrize(
    "wrong",
    [{"forward": 0}, {"weight": [1, -1]}, {"communication": -1}, {"communication": [1, 2]}, {"input": float("nan")}],
)
def test_costs_are_positive_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){next(iter(wrong))} must be a finite number .*hint: use any unit"):
        Costs(**wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("1f1b", num_stages="4", num_microbatches=4), "num_stages must be an integer of"),
        (lambda: schedule("1f1b", num_stages=True, num_microbatches=4), "num_stages must be an integer of"),
        (lambda: schedule("1f1b", num_stages=4, num_microbatches=4.0), "num_microbatches must be an integer"),
        (lambda: schedule(None, num_stages=4, num_microbatches=4), "name must be .*, not None"),
        (lambda: schedule("1F1B", num_stages=4, num_microbatches=4), "name must be .*, not '1F1B'"),
        (lambda: schedule("auto", num_stages=4, num_microbatches=4, costs=(1, 1, 1)), "costs must be a lowtide"),
        (lambda: simulate("1f1b"), "schedule must be a lowtide.pipeline.Schedule, not '1f1b'"),
        (lambda: scan_makespan(schedule("1f1b", num_stages=4, num_microbatches=4), Costs(forward=[1] * 5)), "not 5"),
    ],
)  # fmt: skip
def test_arguments_of_other_types_are_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_schedule_is_shown_in_one_line_and_may_be_renamed(tmp_path: Path) -> None:
    made = schedule("zb-h1", num_stages=4, num_microbatches=8)
    assert repr(made) == "<Schedule zb-h1: 4 stages on 4 ranks, 8 microbatches>"
    made.to_csv(tmp_path / "mine.csv")
    assert Schedule.from_csv(tmp_path / "mine.csv", name="zb-h1") == made


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("name", "num_ranks", "authors"),
    [
        *[("v-half", *one) for one in ((2, 0.5), (3, 2.5), (4, 2.5), (5, 5.5), (6, 5.5), (8, 8.5), (12, 14.5))],
        *[("v-min", *one) for one in ((2, 1.5), (3, 2.5), (4, 5.5), (5, 7.5), (6, 8.5), (8, 13.5), (12, 20.5))],
    ],
)
def test_v_schedules_are_as_short_as_those_of_their_authors(name: str, num_ranks: int, authors: float) -> None:
    """Bubble of the longest stage for F = B = W, and for others, as the authors' public generator makes them."""
    costs = per_microbatch(2)
    one = simulate(made(name, num_ranks, 2 * num_ranks), costs)
    assert max(one.steady_bubble, one.bubble) <= authors + 1e-9
    assert max(one.peaks) <= LIMITS[name](num_ranks)


@pytest.mark.slow
def test_in_lockstep_a_v_is_chosen_by_the_time_of_ticks() -> None:
    costs = per_microbatch(2, input=0.6, weight=0.4)
    for name, authors, in_lockstep in (("v-half", 11.5, 18.0), ("v-min", 23.7, 24.0)):
        assert simulate(made(name, 8, 16, costs=costs, lockstep=False), costs).bubble <= authors + 1e-9
        assert simulate(made(name, 8, 16, costs=costs), costs, lockstep=True).bubble <= in_lockstep + 1e-9


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_would_never_be_made_are_refused(name: str) -> None:
    for sizes in ((8, 10**6), (8, 10**12), (10**6, 8)):
        with pytest.raises(ConfigError, match=r"(?s)more than one schedule can hold.*at most 131,072.*hint: use fewer"):
            schedule(name, num_stages=sizes[0], num_microbatches=sizes[1])


# --- ticks -----------------------------------------------------------------------------------------------------------

RATIOS = ((1, 1, 1), (1, 1.2, 0.8), (1, 2, 1))
"""Of F, I and W; the last is what recomputation gives."""


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("num_ranks", "ratio", "communication"),
    [
        *((4, ratio, communication) for ratio in RATIOS for communication in (0, 0.1)),
        *(pytest.param(8, ratio, 0.1, marks=pytest.mark.slow) for ratio in RATIOS),
    ],
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("ratio", "communication"), [(RATIOS[0], 0), (RATIOS[1], 0.1), (RATIOS[2], 0.1)])
def test_the_best_is_near_the_time_without_a_bubble(ratio: tuple[float, ...], communication: float) -> None:
    costs = Costs(**dict(zip(("forward", "input", "weight"), ratio, strict=True)), communication=communication)
    for limit, most in ((None, 1.06), (8, 1.2)):
        best = schedule("auto", num_stages=8, num_microbatches=64, costs=costs, memory_limit=limit)
        run = simulate(best, costs, lockstep=True)
        assert run.makespan <= most * 64 * sum(ratio)
        assert max(run.peaks) <= (limit or 15)


@pytest.mark.parametrize("number", [8, 32])
def test_the_best_is_never_slower_than_a_scan_where_the_last_stage_has_the_loss_and_weight_passes_cost_memory(
    number: int,
) -> None:
    costs = Costs(
        forward=1,
        input=[1.2, 1.2, 1.2, 1.5],
        weight=0.8,
        input_residuals=0.8,
        weight_residuals=0.2,
        cotangents=0.3,
    )
    best = schedule(num_stages=4, num_microbatches=number, costs=costs)
    run = simulate(best, costs, lockstep=True)
    assert run.makespan <= scan_makespan(best, costs) == (number + 3) * 3.3
    assert max(run.peaks) <= 7
    if number == 32:
        assert run.makespan <= 0.97 * scan_makespan(best, costs)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(num_ranks=st.integers(1, 6), number=st.integers(1, 16), data=st.data())
def test_the_best_of_one_stage_a_rank_is_never_slower_than_a_scan_whatever_it_costs(
    num_ranks: int, number: int, data: st.DataObject
) -> None:
    each = st.lists(st.floats(0.2, 3), min_size=num_ranks, max_size=num_ranks)
    share = data.draw(st.floats(0, 1))
    costs = Costs(
        forward=data.draw(each),
        input=data.draw(each),
        weight=data.draw(each),
        communication=data.draw(st.floats(0, 1)),
        input_residuals=share,
        weight_residuals=1 - share,
        cotangents=data.draw(st.floats(0, 5)),
    )
    best = schedule(num_stages=num_ranks, num_microbatches=number, costs=costs)
    assert simulate(best, costs, lockstep=True).makespan <= scan_makespan(best, costs) * (1 + 1e-9)


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
        ("FIW", ((0, -1, 1),), "ticks are not consecutive numbers from 0"),
        ("FIW", ((0.0, 1.5, 2),), "ticks are not consecutive numbers from 0"),
        ("FIW", (("0", "1", "2"),), "ticks are not consecutive numbers from 0"),
        ("FIW", ((0, 1, 10**9),), "ticks are not consecutive numbers from 0"),
        ("FIW", ((0, 1),), "ticks do not match the orders"),
        ("FIW", ((0, 1, 1), (0,)), "ticks do not match the orders"),
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("remat", [False, True])
def test_what_is_fitted_to_the_costs_of_the_stack_runs_its_stages_in_order(remat: bool) -> None:
    """Made for no costs, two stages a rank are in a loop; for real ones a V is better at times."""
    stack = LayerStack(
        first=lambda outer, batch: batch["x"],
        block=lambda layer, h, batch: jnp.tanh(h @ layer["w"]),
        last=lambda outer, h, batch: (jnp.mean((h @ outer["head"]) ** 2), {}),
    )
    two = schedule(num_stages=4, num_microbatches=8, stages_per_rank=2)
    pipeline = value_and_grad(stack, two, mesh=mesh_of(2, 1), remat=remat)
    draw = np.random.default_rng(0).normal
    head, layers, x = (jnp.asarray(draw(size=shape), jnp.float32) for shape in ((4, 64), (8, 4, 4), (16, 4)))
    args = ({"head": head}, {"w": layers}, {"x": x})
    assert_close(jax.jit(pipeline)(*args), of_plain_jax(stack, *args))


# --- pictures --------------------------------------------------------------------------------------------------------


def simulated(name: str = "zb-v", **options: Any) -> Any:
    return simulate(schedule(name, num_stages=8, num_microbatches=4), **options)


def printed(found: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(found)
    return console.file.getvalue().splitlines()  # pyright: ignore


def test_a_terminal_shows_every_pass_where_it_begins() -> None:
    found = simulate(schedule("1f1b", num_stages=2, num_microbatches=2))
    # Nine units in 36 columns: two F, two B of twice the length on each rank.
    rows = printed(found, 7 + 36)
    assert rows[0].rstrip() == "rank 0 F0  F1  ········B0      ····B1"
    assert rows[1].rstrip() == "rank 1 ····F0  B0      F1  B1      ········"
    assert "backward" in rows[2] and "weight" not in rows[2]


def test_passes_are_told_apart_with_and_without_colours() -> None:
    found = simulate(schedule("zb-h1", num_stages=2, num_microbatches=2))
    narrow = printed(simulate(schedule("zb-h1", num_stages=2, num_microbatches=12)), 40)  # 33 columns, 37 passes
    assert narrow[0][7:9] == "FF" and set(narrow[0][7:].strip()) == set("FIW·")
    coloured = Console(width=7 + 36, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False)
    coloured.print(found)
    text = coloured.file.getvalue()  # pyright: ignore
    assert "\x1b[" in text and "F0" not in text.splitlines()[0]


@pytest.mark.parametrize("width", [10, 60, 200])
def test_rows_are_as_wide_as_the_terminal(width: int) -> None:
    rows = printed(simulated(), max(width, 40))
    assert len(rows[0].rstrip()) <= max(width, 40)


def test_a_trace_has_every_action_at_its_time() -> None:
    found = simulated()
    events = json.loads(found.to_trace())["traceEvents"]
    passes = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(passes) == sum(map(len, found.schedule.orders))
    for rank, order in enumerate(found.schedule.orders):
        for action, start, end in zip(order, found.starts[rank], found.ends[rank], strict=True):
            event = passes[str(action)]
            assert (event["tid"], event["ts"], event["dur"]) == (rank, 1e3 * start, 1e3 * (end - start))
    kept = [event["args"]["kept"] for event in events if event["ph"] == "C"]
    assert max(kept) == max(found.peaks) and min(kept) == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe-v", "v-min"])
def test_memory_over_time_reaches_the_peak_and_ends_at_nothing(name: str) -> None:
    costs = Costs(forward=1.0, input=1.3, weight=0.7, input_residuals=0.5, weight_residuals=0.25)
    found = simulate(schedule(name, num_stages=8, num_microbatches=16, costs=costs), costs)
    for rank, peak in enumerate(found.peaks):
        times, values = found.memory(rank)
        assert times == sorted(times) and values[-1] == pytest.approx(0)
        assert max(values) == pytest.approx(peak)


@pytest.mark.slow
def test_pictures_are_written_and_labelled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    found = simulated(lockstep=True)
    assert found.to_png(tmp_path / "a.png")[:8] == b"\x89PNG\r\n\x1a\n" == (tmp_path / "a.png").read_bytes()[:8]
    svg = found.to_svg(tmp_path / "a.svg").decode()
    assert "<svg" in svg and f"in lockstep, {found.num_ticks} ticks" in svg and "rank 3" in svg
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(?s)hint:"):
        found.to_png(tmp_path / "file" / "a.png")


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"(?s)pictures need matplotlib.*hint: pip install \"lowtide\[report\]\""):
        simulated().to_png()
