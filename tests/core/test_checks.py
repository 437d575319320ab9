"""Counts and words that arguments may be, and what is said of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowtide.core import ConfigError, StructureError, check_choice, check_count, is_count


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1, True), (np.int64(3), True), (np.uint8(1), True), (0, False), (-1, False), (True, False), (np.True_, False)]
    + [(1.0, False), ("1", False), (None, False), (np.ones(1, int), False), (10**30, True)],
    ids=repr,
)
def test_a_count_is_an_integer_of_at_least_so_much(value: Any, is_one: bool) -> None:
    assert is_count(value, 1) is is_one


def test_what_is_no_count_is_told_with_the_error_that_was_asked_for() -> None:
    check_count("no parts", 2, 1, "an integer", "1 is the least")
    with pytest.raises(StructureError, match=r"no parts\n  expected: an integer\n  got: False\nhint: 1 is the least"):
        check_count("no parts", False, 0, "an integer", "1 is the least", StructureError)


def test_words_are_listed() -> None:
    check_choice("unknown place", "host", ("device", "host"), "device is faster")
    with pytest.raises(ConfigError, match=r'unknown place\n  expected: "a", "b" or "c"\n  got: \[\]\nhint: try a'):
        check_choice("unknown place", [], ("a", "b", "c"), "try a")
