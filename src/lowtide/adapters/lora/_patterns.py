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
    """Matches the patterns of one file, within the time that is left; `matches` reduces that time.

    Args:
        where: the file, for messages.
        is_trusted: whether Lowtide wrote the patterns itself, so that no time limit applies.
    """

    def __init__(self, where: str, *, is_trusted: bool = False) -> None:
        self._where, self._left = where, None if is_trusted else MOST_SECONDS
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, whole: bool = True) -> bool:
        """Return whether a pattern matches a whole name, or its beginning.

        Raises:
            ModelFileError: when the pattern is not a regular expression, or when all matches take too long.
        """
        began = time.monotonic()
        if pattern not in self._compiled:
            self._compiled[pattern] = self._compile(pattern)
        compiled = self._compiled[pattern]
        try:
            timeout = None if self._left is None else max(self._left - (time.monotonic() - began), 1e-3)
            found = (compiled.fullmatch if whole else compiled.match)(name, timeout=timeout)
        except TimeoutError as error:
            raise ModelFileError(
                f"{self._where}: a regular expression takes too long on {shown(name)}",
                expected=f"at most {MOST_SECONDS:g} s for all of them",
                got=shown(pattern),
                hint="repetitions inside of repetitions, as in (a+)+, need forever; list the modules by name",
            ) from error
        if self._left is not None:
            self._left -= time.monotonic() - began
        return found is not None

    def _compile(self, pattern: str) -> Any:
        import regex

        try:
            if _REGEX_ONLY.search(pattern):
                raise ValueError("a brace that is no count, or a class in [: :]")
            with warnings.catch_warnings():  # about syntax that a later Python may read differently
                warnings.simplefilter("ignore")
                re.compile(pattern)
                return regex.compile(pattern, flags=regex.VERSION0)
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise ModelFileError(
                f"{self._where}: not a LoRA configuration",
                expected="regular expressions as Python's re has them",
                got=f"{shown(pattern)}: {type(error).__name__}: {error}",
                hint="write the adapter again with PEFT's save_pretrained or with lt.lora.save",
            ) from error
