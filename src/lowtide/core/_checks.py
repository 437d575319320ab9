"""Checks of single arguments, for every room."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ._errors import ConfigError, LowtideError


def is_count(value: Any, least: int) -> bool:
    """Whether it is an integer of at least so much; truth values are none."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def check_count(
    problem: str, given: Any, least: int, expected: str, hint: str, error: type[LowtideError] = ConfigError
) -> None:
    """Raise when an argument is no integer of at least so much.

    Args:
        problem: what is wrong then.
        given: the argument.
        least: the smallest that is right.
        expected: what would have been right, in words.
        hint: what to do.
        error: what is raised.
    """
    if not is_count(given, least):
        raise error(problem, expected=expected, got=repr(given), hint=hint)


def check_choice(problem: str, given: Any, choices: Sequence[str], hint: str) -> None:
    """Raise when an argument is none of a few words.

    Args:
        problem: what is wrong then.
        given: the argument.
        choices: the words, at least two.
        hint: what to do.

    Raises:
        ConfigError: with the words.
    """
    if given not in choices:
        *most, last = [f'"{choice}"' for choice in choices]
        raise ConfigError(problem, expected=f"{', '.join(most)} or {last}", got=repr(given), hint=hint)
