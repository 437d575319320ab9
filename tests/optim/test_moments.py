"""What is known of the moments of Optax's optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from lowtide.core import ConfigError
from lowtide.memory.advice import _remedies
from lowtide.optim import PackedArray, low_precision
from lowtide.optim._selection import MOMENTS

PARAMS = {"w": jnp.ones((64, 128))}


@pytest.mark.parametrize(
    ("tx", "second"),
    [
        (optax.adan(1e-3), {"n"}),
        (optax.rmsprop(1e-3, bias_correction=True), {"nu"}),
        (contrib.madgrad(1e-3), {"grad_sum_sq"}),
        (contrib.prodigy(1e-3), {"exp_avg_sq"}),
        (contrib.dadapt_adamw(1e-3), {"exp_avg_sq"}),
        (contrib.simplified_ademamix(1e-3), {"n"}),
        (contrib.cocob(), {"scale", "subgradients", "reward"}),
    ],
)
def test_second_moments_of_all_names_have_no_sign(tx: Any, second: set[str]) -> None:
    """With one, small ones beside large ones are 0 in 4 bits, and such optimizers diverge."""
    form = "8bit" if "estim_lr" in getattr(tx.init(PARAMS), "_fields", ()) else "4bit"  # D-Adaptation's bear no 4
    state = low_precision(tx, form, match=rf"(.*/)?(mu|m|v|exp_avg|{'|'.join(second)})/.*").init(PARAMS)
    nodes, _ = jax.tree_util.tree_flatten_with_path(state.inner, is_leaf=lambda node: isinstance(node, PackedArray))
    assert {keys[-2].name for keys, node in nodes if isinstance(node, PackedArray) and node.is_positive} == second


@pytest.mark.parametrize(
    ("tx", "form", "message"),
    [
        (
            optax.rmsprop(1e-3, centered=True),
            "bfloat16",
            r"0/mu/w cannot be stored as bfloat16.*difference of two moments",
        ),
        (optax.rmsprop(1e-3, centered=True, bias_correction=True), "8bit", r"0/mu/w .*float32.*leave out centered"),
        (contrib.momo(1e-2), "8bit", r"exp_avg/w cannot be stored as 8bit.*length of its steps.*bfloat16, or float32"),
        (
            contrib.momo_adam(1e-2),
            "4bit",
            r'exp_avg/w cannot be stored as 4bit.*hint: pass format=\{r"\.\*exp_avg\.\*": "bfloat16"',
        ),
        (contrib.dadapt_adamw(1e-3), "4bit", r"exp_avg/w cannot be stored as 4bit.*expected: 8bit, or float32"),
    ],
)
def test_moments_that_bear_no_rounding_are_refused_by_name(tx: Any, form: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        low_precision(tx, form).init(PARAMS)


@pytest.mark.slow
def test_a_slow_mean_stays_as_it_is_unless_it_is_asked_for() -> None:
    tx = contrib.ademamix(1e-3)
    with pytest.raises(ConfigError, match=r"(?s)m2/w cannot be stored as 8bit.*slow mean.*expected: bfloat16"):
        low_precision(tx, match=".*").init(PARAMS)
    goal = jnp.asarray(np.random.default_rng(0).normal(size=(16, 256)), jnp.float32)

    def distance(tx: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            updates, state = tx.update(params - goal, state, params)
            return (params + updates, state), None

        first = jnp.zeros_like(goal)
        params = jax.lax.scan(step, (first, tx.init(first)), None, 2000)[0][0]
        return jnp.mean((params - goal) ** 2)

    formats = {r".*m2.*": "bfloat16", r".*(m1|nu).*": "8bit"}
    wanted, *found = (jax.jit(distance, static_argnums=0)(each) for each in
                      (tx, low_precision(tx), low_precision(tx, formats)))  # fmt: skip
    assert max(found) < 1.2 * wanted  # in 8 bits as a whole it is 3 times as far


def test_memory_advice_knows_the_same_moments() -> None:
    names = MOMENTS.removeprefix(".*/").removesuffix("/.*")
    assert _remedies._MOMENTS.pattern == f"/{names}(/|$)"
