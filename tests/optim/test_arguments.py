"""What `low_precision` cannot be called with, or would do nothing with: said by name, before anything is made."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import ConfigError, PlacementWarning, SelectionError, StructureError
from lowtide.optim import low_precision

PARAMS = {"w": jnp.ones((24, 200)), "b": jnp.zeros((1, 200))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tx": None}, r"the optimizer must be an optax.GradientTransformation, not None\nhint: pass for instance"),
        ({"format": "3bit"}, r"format must be \"8bit\", .* or \"bfloat16\", not '3bit'\nhint: "),
        ({"match": "("}, r"match='\(' is not a regular expression: .*\nhint: write a regular expression"),
        ({"format": {7: "8bit"}}, r"match must be a regular expression, not 7\nhint: write a regular expression"),
        ({"format": 8}, r"format must be \"8bit\", .*, not 8\n"),
        ({"format": ["8bit"]}, r"format must be .*, not \['8bit'\]\n"),
        ({"format": {r".*": 8}}, r"format must be \"8bit\", .*, not 8\n"),
        ({"match": [r".*/mu/.*"]}, r"match must be a regular expression, not \['\.\*/mu"),
        (
            {"format": {r".*": "8bit"}, "match": r".*"},
            r"match='\.\*' has no effect with a mapping.*\nhint: leave out m",
        ),
        ({"format": None, "weights": "split", "match": r".*"}, r"match='\.\*' has no effect with weights alone"),
        ({"weights": "float32"}, r"weights must be \"split\", .* not 'float32'\nhint: use \"split\""),
        ({"format": None}, r"neither a format nor weights"),
        ({"format": {}}, r"neither a format nor weights"),
        ({"seed": "x"}, r"seed must be an integer from .*, not 'x'\nhint: leave it out to use 0"),
        ({"seed": 1.5}, r"seed must be an integer from .*, not 1\.5"),
        ({"seed": 2**40}, r"seed must be an integer from -2,147,483,648 to 4,294,967,295, not 1099511627776"),
        ({"match": b".*"}, r"match must be a regular expression, not b'\.\*'\nhint: "),
        ({"match": re.compile(b".*")}, r"match must be a regular expression, not b'\.\*'\nhint: "),
        ({"format": np.array(["8bit", "fp8"])}, r"format must be .*, not array"),
        ({"shardings": {"w": "x"}}, r"shardings: w must be a jax\.sharding\.NamedSharding, not 'x'"),
        (
            {"shardings": {"w": jax.P("x")}},
            r"w must be a jax\.sharding\.NamedSharding, not P.*\nhint: pass jax.tree.map",
        ),
        ({"least_size": 0}, r"least_size must be an integer of at least 1, not 0\nhint: leave it out to use 4096"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        low_precision(**{"tx": optax.adam(1e-2), **arguments})


def test_wrapping_twice_and_states_of_others_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)already wrapped by lt\.optim\.low_precision.*hint: wrap it once"):
        low_precision(low_precision(optax.adam(1e-2))).init(PARAMS)
    plain = optax.adam(1e-2)
    with pytest.raises(
        StructureError, match=r"(?s)the state does not belong to this lt\.optim.*hint: .*lt\.optim\.converted"
    ):
        low_precision(plain).update(PARAMS, plain.init(PARAMS), PARAMS)
    other = low_precision(plain, shardings={"w": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
    with pytest.raises(StructureError, match=r"(?s)shardings does not have the structure.*hint: pass jax.tree.map"):
        other.update(PARAMS, other.init(PARAMS), PARAMS)


def test_states_and_gradients_of_other_parameters_are_told_by_path() -> None:
    tx, momentum = low_precision(optax.adam(1e-2)), low_precision(optax.sgd(1e-2, momentum=0.9))
    with pytest.raises(StructureError, match=r"(?s)expected: 0/count, 0/mu/b.*got: 0/trace/b"):
        tx.update(PARAMS, momentum.init(PARAMS), PARAMS)
    chained = optax.chain(optax.clip(1.0), tx)
    with pytest.raises(StructureError, match=r"(?s)expected: 0/count, 0/mu/b.*got: 0/trace/b"):
        chained.update(PARAMS, (optax.EmptyState(), momentum.init(PARAMS)), PARAMS)
    other = {**PARAMS, "w": jnp.ones((25, 200))}
    with pytest.raises(StructureError, match=r"(?s)expected: 0/mu/w: \[24, 200\].*got: \[25, 200\]"):
        tx.update(PARAMS, tx.init(other), PARAMS)
    with pytest.raises(StructureError, match="the gradients do not have the structure of the parameters"):
        tx.update({"w": PARAMS["w"]}, tx.init(PARAMS), PARAMS)


def test_an_error_of_the_optimizer_itself_stays_its_own() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise ValueError("mine")

    mine = optax.GradientTransformation(lambda _: (), update)
    tx = low_precision(optax.chain(optax.scale_by_adam(), mine))
    with pytest.raises(ValueError, match=r"^mine"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    other = low_precision(optax.chain(optax.scale_by_adam(), mine), least_size=10)
    with pytest.raises(ValueError, match=r"^mine"):  # of another least_size, with which updates go on
        other.update(PARAMS, tx.init(PARAMS), PARAMS)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    decaying = low_precision(optax.adamw(1e-2))
    with pytest.raises(ValueError, match=r"requires the current value of parameters"):
        decaying.update(narrow, decaying.init(PARAMS))


def test_a_regular_expression_that_selects_nothing_is_said() -> None:
    formats = {r".*/mu/.*": "8bit", r".*/vu/.*": "4bit"}
    with pytest.warns(PlacementWarning, match=r"(?s)\.\*/vu/\.\* matches nothing.*its paths: 0/count, 0/mu/b"):
        state = low_precision(optax.adam(1e-2), formats).init(PARAMS)
    assert state.inner[0].mu["w"].format == "8bit"
    with pytest.raises(SelectionError, match=r"(?s)selects nothing.*matches \.\*/vu/\.\*.*got: 0/count, 0/mu/b"):
        low_precision(optax.adam(1e-2), match=r".*/vu/.*").init(PARAMS)
    # Of what an earlier one has taken it is told apart.
    low_precision(optax.adam(1e-2), {r".*/mu/.*": "8bit", r".*/(mu|nu)/.*": "4bit"}).init(PARAMS)
    with pytest.warns(PlacementWarning, match=r"(?s)match everything that \.\*/mu/w matches.*specific"):
        low_precision(optax.adam(1e-2), {r".*/mu/.*": "8bit", r".*/mu/w": "fp8"}).init(PARAMS)
    with pytest.warns(PlacementWarning, match=r"(?s)that \.\*/nu/b selects stay unchanged.*hint: choose a smaller"):
        low_precision(optax.adam(1e-2), {r".*/mu/.*": "8bit", r".*/nu/b": "fp8"}).init(PARAMS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("params", "least_size"),
    [
        (PARAMS, 10_000),
        ({"w": jnp.ones((8, 8))}, 4096),
        ({"w": jnp.ones((64, 128), jnp.int32)}, 4096),
        ({"w": jnp.ones((64, 128), jnp.complex64)}, 4096),
    ],
)
def test_that_nothing_is_packed_is_said(params: Any, least_size: int) -> None:
    tx = low_precision(optax.adam(1e-2), least_size=least_size)
    with pytest.warns(PlacementWarning, match=rf"(?s)stay unchanged.*least_size = {least_size} .*hint"):
        state = tx.init(params)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        tx.update(params, state, params)
        jax.jit(tx.update)(params, state, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low_precision(optax.adam(1e-2), least_size=1).init(PARAMS)
