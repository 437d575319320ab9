"""Checks of single arguments: accepted values, and the text of each error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowtide.core import ConfigError, DataError, check_choice, check_integer, check_number, check_type, is_count


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1, True), (np.int64(3), True), (np.uint8(1), True), (0, False), (-1, False), (True, False), (np.True_, False)]
    + [(1.0, False), ("1", False), (None, False), (np.ones(1, int), False), (10**30, True)],
    ids=repr,
)
def test_a_count_is_an_integer_of_at_least_so_much(value: Any, is_one: bool) -> None:
    assert is_count(value, 1) is is_one


def test_values_in_their_range_are_accepted() -> None:
    check_integer("rank", 1)
    check_integer("rank", np.int32(0), 0)
    check_integer("seed", 2**32 - 1, -(2**31), 2**32 - 1)
    check_number("rate", 0, least=0, below=1)
    check_number("alpha", np.float32(16))
    check_choice("mode", "max", ("min", "max"))
    check_type("path", "run", (str,), "a path")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_integer("rank", False, 0), "rank must be an integer of at least 0, not False"),
        (lambda: check_integer("rank", 1.0), "rank must be an integer of at least 1, not 1.0"),
        (lambda: check_integer("seed", 5000, 0, 4999), "seed must be an integer from 0 to 4,999, not 5000"),
        (lambda: check_number("alpha", 0.0, above=0), "alpha must be a finite number above 0, not 0.0"),
        (
            lambda: check_number("rate", 1.0, least=0, below=1),
            "rate must be a finite number of at least 0 and below 1, not 1.0",
        ),
        (lambda: check_number("alpha", float("inf")), "alpha must be a finite number, not inf"),
        (
            lambda: check_number("alpha", 10**400),
            f"alpha must be a finite number, not {str(10**400)[:200]}… (401 characters)",
        ),
        (lambda: check_number("alpha", True, most=2), "alpha must be a finite number of at most 2, not True"),
        (lambda: check_choice("mode", [], ("a", "b", "c")), 'mode must be "a", "b" or "c", not []'),
        (
            lambda: check_choice("mode", "mx", ("min", "max")),
            'mode must be "min" or "max", not \'mx\'\nhint: did you mean "max"?',
        ),
        (
            lambda: check_type("path", 3, (str,), "a path", hint="pass one"),
            "path must be a path, not 3\nhint: pass one",
        ),
    ],
)
def test_a_refusal_names_argument_requirement_and_value(check: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == f"[LT003] {message}"


def test_the_class_of_the_error_is_chosen() -> None:
    with pytest.raises(DataError, match="batch_size must be an integer of at least 1, not 0"):
        check_integer("batch_size", 0, error=DataError)
