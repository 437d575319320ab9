from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lowtide.core import leaf_bytes, leaves_with_paths, path_str, tree_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    weight: float
    inner: dict[str, float]


def test_one_spelling_for_every_container() -> None:
    tree = {"layers": [Block(1.0, {"b": 2.0}), (3.0,)], "skip": None}
    assert leaves_with_paths(tree) == [("layers/0/weight", 1.0), ("layers/0/inner/b", 2.0), ("layers/1/0", 3.0)]


def test_the_root_is_the_empty_path() -> None:
    assert leaves_with_paths(1.0) == [("", 1.0)]
    assert path_str(()) == ""


def test_is_leaf_stops_the_descent() -> None:
    assert leaves_with_paths({"a": None}, is_leaf=lambda leaf: leaf is None) == [("a", None)]


@pytest.mark.parametrize(
    ("leaf", "num_bytes"),
    [
        (np.zeros((3, 5), np.float64), 120),
        (jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), 30),
        (jax.ShapeDtypeStruct((1 << 40,), jnp.float32), 1 << 42),
        (jax.ShapeDtypeStruct((5,), ml_dtypes.int4), 3),
        (jax.ShapeDtypeStruct((8,), ml_dtypes.int2), 2),
        (jax.ShapeDtypeStruct((5,), ml_dtypes.float4_e2m1fn), 3),
        (jax.ShapeDtypeStruct((4,), ml_dtypes.float8_e4m3fn), 4),
        (jax.ShapeDtypeStruct((4,), np.bool_), 4),
        (np.zeros((0, 7), np.float32), 0),
        (np.float32(1), 4),
        (1.0, 4),
        (True, 1),
        (jax.nn.relu, 0),
        ("text", 0),
    ],
)
def test_logical_bytes(leaf: object, num_bytes: int) -> None:
    assert leaf_bytes(leaf) == num_bytes


def test_random_keys_count_their_words() -> None:
    assert leaf_bytes(jax.random.split(jax.random.key(0), 3)) == 24
    assert leaf_bytes(jax.eval_shape(jax.random.key, 0)) == 8


def test_a_tree_is_the_sum_of_its_leaves() -> None:
    assert tree_bytes({"a": np.zeros(3, np.float32), "b": [np.zeros(2, np.int8), None, "text"]}) == 14
