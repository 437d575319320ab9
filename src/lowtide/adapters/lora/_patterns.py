"""Regular expressions from a file, matched with the rules of Python's `re` and a time limit.

`re` has no time limit: ``(a+)+$`` takes years on a name of forty letters, and no signal interrupts it. The `regex`
package has the same rules (its version 0 behaviour) and a timeout. A pattern that only one of the two accepts is
refused.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

from ...core import ModelFileError, shown

MOST_SECONDS = 10.0
"""Limit for all matches of one configuration together."""

_REGEX_ONLY = re.compile(r"\[\[:|(?<!\\)\{(?!\d*,?\d*\})")
"""POSIX classes and fuzzy matches of `regex`. `re` takes them as plain characters, which no module's name has."""


class Matcher:
    """Matches the patterns of one file, named `source` in messages; `matches` reduces the time that is left.

    No time limit applies with `is_trusted`, where Lowtide wrote the patterns itself.
    """

    def __init__(self, source: str, *, is_trusted: bool = False) -> None:
        self._source, self._time_left = source, None if is_trusted else MOST_SECONDS
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, is_full: bool = True) -> bool:
        """Return whether a pattern matches a whole name, or with ``is_full=False`` its beginning."""
        start = time.monotonic()
        if pattern not in self._compiled:
            self._compiled[pattern] = self._compile(pattern)
        compiled = self._compiled[pattern]
        try:
            timeout = None if self._time_left is None else max(self._time_left - (time.monotonic() - start), 1e-3)
            match = (compiled.fullmatch if is_full else compiled.match)(name, timeout=timeout)
        except TimeoutError as error:
            raise ModelFileError(
                f"{self._source}: a regular expression takes too long on {shown(name)}",
                expected=f"at most {MOST_SECONDS:g} s for all of them",
                got=shown(pattern),
                hint="list the modules by name, or avoid nested repetitions such as (a+)+",
            ) from error
        if self._time_left is not None:
            self._time_left -= time.monotonic() - start
        return match is not None

    def _compile(self, pattern: str) -> Any:
        import regex

        try:
            if _REGEX_ONLY.search(pattern):
                raise ValueError("a brace that is not a count, or a class in [: :]")
            with warnings.catch_warnings():  # about syntax that a later Python may read differently
                warnings.simplefilter("ignore")
                re.compile(pattern)
                return regex.compile(pattern, flags=regex.VERSION0)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise ModelFileError(
                f"{self._source}: not a LoRA configuration",
                expected="regular expressions in the syntax of Python's re",
                got=f"{shown(pattern)}: {type(error).__name__}: {error}",
                hint="write the adapter again with PEFT's save_pretrained or with lt.lora.save",
            ) from error
