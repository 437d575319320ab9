"""Ticks of several passes: time in lockstep beside a scan's and the ideal, and ticks that cannot be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from lowtide.core import LayerStack, ScheduleError
from lowtide.pipeline import Action, Costs, Kind, Schedule, scan_makespan, schedule, simulate, value_and_grad

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
    made = schedule(num_stages=4, num_microbatches=8, stages_per_rank=2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    pipeline = value_and_grad(stack, made, mesh=mesh, remat=remat)
    draw = np.random.default_rng(0).normal
    head, layers, x = (jnp.asarray(draw(size=shape), jnp.float32) for shape in ((4, 64), (8, 4, 4), (16, 4)))
    args = ({"head": head}, {"w": layers}, {"x": x})
    (loss, _), grads = jax.jit(pipeline)(*args)
    wanted, of_plain = jax.jit(jax.value_and_grad(lambda *args: stack.apply(*args)[0], argnums=(0, 1)))(*args)
    assert loss == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), grads, of_plain)
