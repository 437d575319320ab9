from __future__ import annotations

import re

import bracex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.adapters import lora
from lowtide.core import (
    SelectionError,
    StateError,
    StructureError,
    combine,
    match_names,
    match_path,
    partition,
    refuse_consumed,
    select,
    shared_leaves,
    value_and_grad,
)
from lowtide.core._selection import alternatives

# --- Selection --------------------------------------------------------------------------------------------------------


TREE = {
    "embed": {"weight": 1.0},
    "layers": {
        "attn": {"q_proj": {"weight": 2.0, "lora_a": 3.0}, "v_proj": {"weight": 4.0, "lora_a": 5.0}},
        "mlp": {"up_proj": {"weight": 6.0}},
    },
}
PATHS = [
    "embed/weight",
    "layers/attn/q_proj/lora_a",
    "layers/attn/q_proj/weight",
    "layers/attn/v_proj/lora_a",
    "layers/attn/v_proj/weight",
    "layers/mlp/up_proj/weight",
]


def selected(where: object) -> list[str]:
    return [path for path, chosen in zip(PATHS, select(TREE, where), strict=True) if chosen]


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("a/b/c", "a/b/c", True),
        ("a/b/c", "a/*/c", True),
        ("a/b/c", "a/*", False),
        ("a/b/c", "a/**", True),
        ("a/b/c", "**/c", True),
        ("c", "**/c", True),
        ("a/b/c", "**", True),
        ("", "**", True),
        ("a/b/c", "c", False),
        ("a/bb", "a/b?", True),
        ("a/b1", "a/b[0-9]", True),
        ("a/b", "A/b", False),
        ("a/.hidden", "a/*", True),
        ("a/q_proj/w", "a/{q,v}_proj/w", True),
        ("a/k_proj/w", "a/{q,v}_proj/w", False),
        ("layers/10/w", "layers/{8..11}/w", True),
    ],
)
def test_globs_cover_whole_paths(path: str, pattern: str, matches: bool) -> None:
    assert match_path(path, pattern) is matches


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("**", PATHS),
        ("**/lora_*", [PATHS[1], PATHS[3]]),
        ("layers/attn/q_proj/*", [PATHS[1], PATHS[2]]),
        (["embed/*", "**/lora_a"], [PATHS[0], PATHS[1], PATHS[3]]),
        (["**", "!layers/**"], [PATHS[0]]),
        (["!**/weight", "layers/attn/**"], [PATHS[1], PATHS[3]]),
        (lambda path, leaf: leaf > 4.0, [PATHS[3], PATHS[5]]),
        (lambda path, leaf: path.endswith("lora_a"), [PATHS[1], PATHS[3]]),
    ],
)
def test_what_is_selected(where: object, paths: list[str]) -> None:
    assert selected(where) == paths


def test_a_pattern_never_selects_what_holds_no_numbers() -> None:
    assert select({"act": jnp.tanh, "name": "mlp", "w": 1.0}, "**") == [False, False, True]


def test_brackets_of_a_path_are_escaped_in_the_hint() -> None:
    with pytest.raises(SelectionError, match=re.escape("did you mean 'w[[]0]'?")):
        select({"w[0]": 1.0, "z": 2.0}, "w[0]")
    assert select({"w[0]": 1.0, "z": 2.0}, "w[[]0]") == [True, False]


def test_names_keep_their_order() -> None:
    assert match_names(["b", "a", "c"], ["c", "b"]) == ["b", "c"]


def test_a_gap_is_no_leaf() -> None:
    assert select({"a": 1.0, "b": [2.0, None]}, "b/*") == [False, True]


@pytest.mark.parametrize(
    ("where", "text", "hint"),
    [
        ("attn/q_proj/*", "pattern 'attn/q_proj/*' matches nothing", "did you mean '**/attn/q_proj/*'?"),
        ("layers/attn", "pattern 'layers/attn' matches nothing", "did you mean 'layers/attn/**'?"),
        ("q_proj", "pattern 'q_proj' matches nothing", "did you mean '**/q_proj/**'?"),
        ("**/lora_x", "pattern '**/lora_x' matches nothing", "near misses: lora_a"),
        ("layers/*/q_prj/weight", "pattern 'layers/*/q_prj/weight' matches nothing", "near misses: q_proj"),
        ("zzz", "pattern 'zzz' matches nothing", "paths look like: embed/weight, layers/attn/q_proj/lora_a"),
        (["**", "!**/bias"], "pattern '!**/bias' matches nothing", "paths look like: embed/weight"),
        (["embed/*", "!**"], "the exclusions leave nothing selected", "narrow the patterns that start with '!'"),
        ([], "no pattern without a leading '!'", 'give at least one glob; "**" selects every leaf'),
        ("!embed/*", "no pattern without a leading '!'", 'give at least one glob; "**" selects every leaf'),
        (lambda path, leaf: False, "selects no leaf", "check the predicate: it receives (path, leaf)"),
    ],
)
def test_a_selection_of_nothing_says_what_there_is(where: object, text: str, hint: str) -> None:
    with pytest.raises(SelectionError, match=re.escape(text)) as error:
        select(TREE, where)
    assert f"hint: {hint}" in str(error.value)


@pytest.mark.parametrize(
    ("where", "part", "near"),
    [
        ("**/{q,z}_proj/*", "z", "q_proj"),
        ("{embed,layer}/**", "layer", "layers"),
        (["**", "!**/{up,dwn}_proj/*"], "dwn", "_proj"),
        ("layers/{attn/{q,k}_proj,mlp/*}/weight", "k", "q_proj"),
        ("layers/{attn,mlp}/{q,v,up,gate}_proj/*", "gate", "layers/attn"),
        ("{embed,layers/{attn,mpl}/*}/weight", "mpl", "mlp"),
        ("**/{q,v,}_proj/*", "", "q_proj"),
    ],
)
def test_an_alternative_that_matches_nothing_is_named(where: object, part: str, near: str) -> None:
    with pytest.raises(SelectionError, match=rf"the alternative '{part}' of pattern(.|\n)*hint:.*{near}"):
        select(TREE, where)


@pytest.mark.parametrize(
    "where",
    [
        "layers/{attn,mlp}/{q,v,up}_proj/weight",  # in no more than one combination each
        "{embed,layers/{attn,mlp}/*}/weight",
        "**/{q,v}_proj/{weight,lora_a}",
        "**/{weight,lora_{a..a},lora_a}",
    ],
)
def test_alternatives_may_match_in_any_combination(where: object) -> None:
    assert selected(where)


@pytest.mark.parametrize("where", ["{0..99999}", "{a,b}" * 12])
def test_a_pattern_that_stands_for_too_many_is_refused(where: str) -> None:
    with pytest.raises(SelectionError, match=r"expands to too many patterns(.|\n)*hint:"):
        match_names(["a", "b"], where)


@pytest.mark.slow
@given(st.text(alphabet="ab{},.1${\\", max_size=14))
@settings(derandomize=True)
def test_alternatives_stand_for_what_the_whole_pattern_stands_for(pattern: str) -> None:
    for part, alone in alternatives(pattern):
        assert set(bracex.expand(alone)) <= set(bracex.expand(pattern)), (part, alone)


def test_a_predicate_is_named() -> None:
    def is_bias(path: str, leaf: object) -> bool:
        return "bias" in path

    with pytest.raises(SelectionError, match="the predicate 'is_bias' selects no leaf"):
        select(TREE, is_bias)


def test_long_lists_are_cut() -> None:
    with pytest.raises(SelectionError, match=re.escape("40 candidates: w0, w1, w2, w3, w4, w5, … (34 more)")):
        match_names([f"w{i}" for i in range(40)], "zzz")


def test_an_empty_tree_has_nothing_to_select() -> None:
    with pytest.raises(SelectionError, match="0 candidates"):
        select({}, "**")


def test_what_is_neither_glob_nor_predicate_is_refused() -> None:
    with pytest.raises(SelectionError, match=r"must be globs, regular expressions or a predicate, not 3(.|\n)*hint:"):
        select({"a": 1.0}, 3)  # pyright: ignore


def test_a_regular_expression_matches_a_path_from_start_to_end() -> None:
    tree = {"a": {"q_proj": 1.0, "v_proj": 2.0}, "b": {"q_proj": 3.0}}
    assert select(tree, re.compile(r".*/[qv]_proj")) == [True, True, True]
    assert select(tree, [re.compile(r"a/.*"), "!**/v_proj"]) == [True, False, False]
    with pytest.raises(SelectionError, match=r"expression '_proj' matches nothing(.|\n)*hint: begin with"):
        select(tree, re.compile("_proj"))
    with pytest.raises(SelectionError, match=r"must be globs, regular expressions or a predicate"):
        select(tree, re.compile(b"a"))
    config = lora.Config(rank=2, targets=re.compile(r".*/[qv]_proj"), exclude=re.compile("b/.*"))
    arrays = {name: {leaf: {"weight": jnp.ones((4, 4))} for leaf in of} for name, of in tree.items()}
    model = lora.add(arrays, config, key=jax.random.key(0))
    found = [isinstance(model[of][name]["weight"], lora.LoRAWeight) for of, name in (("a", "q_proj"), ("b", "q_proj"))]
    assert found == [True, False]


# --- Partition --------------------------------------------------------------------------------------------------------


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
