"""Checks of single arguments, for every package."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ._errors import ConfigError, LowtideError


def is_count(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`; booleans do not count as integers."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def check_count(
    problem: str, value: Any, least: int, expected: str, hint: str, error: type[LowtideError] = ConfigError
) -> None:
    """Raise when an argument is not an integer of at least `least`.

    Args:
        problem: message of the error.
        value: the argument.
        least: the smallest valid value.
        expected: description of a valid value.
        hint: the remedy.
        error: class of the error.
    """
    if not is_count(value, least):
        raise error(problem, expected=expected, got=repr(value), hint=hint)


def check_choice(problem: str, value: Any, choices: Sequence[str], hint: str) -> None:
    """Raise when an argument is not one of a few words.

    Args:
        problem: message of the error.
        value: the argument.
        choices: the words, at least two.
        hint: the remedy.

    Raises:
        ConfigError: with the list of words.
    """
    if value not in choices:
        *quoted, last = [f'"{choice}"' for choice in choices]
        raise ConfigError(problem, expected=f"{', '.join(quoted)} or {last}", got=repr(value), hint=hint)
