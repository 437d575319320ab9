"""What is known of the moments of Optax's optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from lowtide.core import ConfigError
from lowtide.optim import PackedArray, low_precision

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
    state = low_precision(tx, "4bit", match=".*").init(PARAMS)
    nodes, _ = jax.tree_util.tree_flatten_with_path(state.inner, is_leaf=lambda node: isinstance(node, PackedArray))
    assert {keys[-2].name for keys, node in nodes if isinstance(node, PackedArray) and node.is_positive} == second


def test_a_difference_of_two_moments_is_refused_with_a_count_too() -> None:
    tx = low_precision(optax.rmsprop(1e-3, centered=True, bias_correction=True))
    with pytest.raises(ConfigError, match="difference of two moments"):
        tx.init(PARAMS)
