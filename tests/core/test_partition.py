from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtide.core import (
    SelectionError,
    StateError,
    StructureError,
    combine,
    partition,
    refuse_consumed,
    shared_leaves,
    value_and_grad,
)


def test_halves_keep_the_structure_and_share_the_arrays() -> None:
    tree = {"base": jnp.ones(3), "blocks": [{"lora_a": jnp.zeros(2)}, None], "act": jnp.tanh}
    trainable, frozen = partition(tree, "**/lora_*")
    assert jax.tree.structure(trainable, is_leaf=lambda x: x is None) == jax.tree.structure(
        frozen, is_leaf=lambda x: x is None
    )
    assert trainable["base"] is None and trainable["act"] is None
    assert trainable["blocks"][0]["lora_a"] is tree["blocks"][0]["lora_a"]
    assert frozen["base"] is tree["base"] and frozen["act"] is jnp.tanh
    assert frozen["blocks"][0]["lora_a"] is None


def test_combine_is_the_inverse() -> None:
    model = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    again = combine(*partition(model, "layers/1/**"))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True))


def test_shapes_partition_like_arrays() -> None:
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros(3), "b": jnp.zeros(2)})
    trainable, frozen = partition(shapes, "a")
    assert trainable == {"a": shapes["a"], "b": None}
    assert combine(trainable, frozen) == shapes


def test_three_trees_combine() -> None:
    assert combine({"a": 1, "b": None, "c": None}, {"a": None, "b": 2, "c": None}, {"a": None, "b": None, "c": 3}) == {
        "a": 1,
        "b": 2,
        "c": 3,
    }


def test_a_leaf_in_two_trees_is_named() -> None:
    with pytest.raises(StructureError, match="layers/w: 2 trees hold this leaf") as error:
        combine({"layers": {"w": 1.0}}, {"layers": {"w": 2.0}})
    assert "hint: combine the two halves that partition returned" in str(error.value)


@pytest.mark.parametrize("other", [{"b": 1.0}, {"a": None, "b": 1.0}, [1.0], None])
def test_trees_that_differ_are_refused(other: object) -> None:
    with pytest.raises(StructureError, match="have different structures") as error:
        combine({"a": None}, other)
    assert "hint: combine the two halves" in str(error.value)


def test_shared_leaves_are_grouped() -> None:
    tied, alone = jnp.ones(3), np.ones(3)
    assert shared_leaves({"embed": tied, "head": tied, "norm": alone, "same_value": jnp.ones(3)}) == [["embed", "head"]]
    assert shared_leaves({"a": 1.0, "b": 1.0}) == []


def test_half_of_a_shared_array_is_refused() -> None:
    tied = jnp.ones(3)
    with pytest.raises(SelectionError, match=re.escape("head is selected but the same array at embed is not")) as error:
        partition({"embed": tied, "head": tied, "norm": jnp.ones(1)}, "head")
    assert "hint: hold the array at one path and use it twice in the model, or untie it" in str(error.value)


@pytest.mark.parametrize("where", ["{embed,head}", "norm"])
def test_a_shared_array_may_stay_on_one_side(where: str) -> None:
    tied = jnp.ones(3)
    tree = {"embed": tied, "head": tied, "norm": jnp.ones(1)}
    again = combine(*partition(tree, where))
    assert again["embed"] is again["head"] is tied


def test_one_array_at_two_selected_paths_is_refused() -> None:
    tied = jnp.ones((2, 2))
    model = {"embed": tied, "head": tied}
    loss = lambda model, x: jnp.sum((x @ model["embed"]) @ model["head"])  # noqa: E731
    for wrt in ("**", "{embed,head}"):
        with pytest.raises(
            SelectionError, match=r"embed and head are the same array, and both are trainable(.|\n)*hold the array"
        ):
            value_and_grad(loss, wrt)(model, tied)
    untied = {"embed": tied, "head": jnp.array(tied, copy=True)}
    assert jax.tree.structure(value_and_grad(loss)(untied, tied)[1]) == jax.tree.structure(untied)


def test_arrays_that_were_donated_are_named() -> None:
    model = {"a": jnp.ones(3), "b": jnp.ones(3)}
    jax.jit(lambda x: x + 1, donate_argnums=0)(model["b"])
    refuse_consumed({"a": model["a"]}, 1.0)
    with pytest.raises(StateError, match=r"b was consumed(.|\n)*got: 1 deleted(.|\n)*hint: .*trainer.model"):
        refuse_consumed(model)
