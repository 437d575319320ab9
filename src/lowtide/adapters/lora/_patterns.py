"""Regular expressions that a file brings, matched as Python's `re` does but not for longer than a time.

`re` knows no end: ``(a+)+$`` takes years on a name of forty letters, and no signal reaches it. The `regex` package has
the same rules (its version 0 behaviour) and a timeout. What only one of the two understands is refused.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

from ...core import ModelFileError, shown

MOST_SECONDS = 10.0
"""For all matches of one configuration together."""

_REGEX_ONLY = re.compile(r"\[\[:|(?<!\\)\{(?!\d*,?\d*\})")
"""POSIX classes and fuzzy matches, which `re` takes as plain characters that no module's name has."""


class Matcher:
    """Matches the patterns of one file.

    Args:
        where: the file, for messages.
        is_trusted: whether Lowtide itself wrote the patterns, which then may take their time.
    """

    def __init__(self, where: str, *, is_trusted: bool = False) -> None:
        self._where, self._left = where, None if is_trusted else MOST_SECONDS
        self._compiled: dict[str, Any] = {}

    def matches(self, pattern: str, name: str, *, whole: bool = True) -> bool:
        """Whether a pattern covers a whole name, or its beginning.

        Raises:
            ModelFileError: when it is no regular expression, or when all matches take too long.
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
            with warnings.catch_warnings():  # of what a later Python may read otherwise
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
