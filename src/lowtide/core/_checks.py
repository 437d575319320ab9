"""Checks of single arguments, for the public functions of every package.

Each check says what an argument must be, and raises one error that names the argument, the requirement and the value.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from ._errors import ConfigError, LowtideError
from ._files import shown

_LONGEST_WORD = 100
"""Only shorter texts get a similar choice as a hint: a value from a file may have megabytes, and the search is slow."""


def is_count(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`; booleans do not count as integers."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def check_integer(
    name: str,
    value: Any,
    least: int = 1,
    most: int | None = None,
    *,
    hint: str | None = None,
    error: type[LowtideError] = ConfigError,
) -> None:
    """Raise `error` unless an argument is an integer from `least` to `most`, both included."""
    if not is_count(value, least) or (most is not None and value > most):
        limits = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        _refuse(name, f"an integer {limits}", value, hint, error)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str | None = None,
    error: type[LowtideError] = ConfigError,
) -> None:
    """Raise `error` unless an argument is a finite number within all given limits, and not a boolean or an array."""
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        with contextlib.suppress(OverflowError):  # an integer above the range of floating-point numbers
            number = float(value)
    is_valid = (
        math.isfinite(number)
        and (least is None or number >= least)
        and (above is None or number > above)
        and (most is None or number <= most)
        and (below is None or number < below)
    )
    if not is_valid:
        limits = {"of at least": least, "above": above, "of at most": most, "below": below}
        texts = [f"{words} {limit:,}" for words, limit in limits.items() if limit is not None]
        _refuse(name, f"a finite number {' and '.join(texts)}".rstrip(), value, hint, error)


def check_choice(
    name: str, value: Any, choices: Sequence[str], *, hint: str | None = None, error: type[LowtideError] = ConfigError
) -> None:
    """Raise `error` unless an argument is one of the choices; the default hint is a similar choice, if any."""
    if not (isinstance(value, str) and value in choices):
        *quoted, last = [f'"{choice}"' for choice in choices]
        is_word = isinstance(value, str) and len(value) < _LONGEST_WORD
        near = difflib.get_close_matches(value.lower(), choices, n=1) if is_word else []
        default = f'did you mean "{near[0]}"?' if near else None
        _refuse(name, f"{', '.join(quoted)} or {last}" if quoted else last, value, hint or default, error)


def check_type(
    name: str,
    value: Any,
    types: type | tuple[type, ...],
    expected: str,
    *,
    hint: str | None = None,
    error: type[LowtideError] = ConfigError,
) -> None:
    """Raise `error` unless an argument has one of the types; `expected` describes them, with an article."""
    if not isinstance(value, types):
        _refuse(name, expected, value, hint, error)


def _refuse(name: str, requirement: str, value: Any, hint: str | None, error: type[LowtideError]) -> None:
    raise error(f"{name} must be {requirement}, not {shown(value)}", hint=hint)
