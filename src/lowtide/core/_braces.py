"""The alternatives of a glob's braces, one at a time.

``**/{attn,mlp}/{q,up}_proj`` has four alternatives, which need not occur in all four combinations: each has to match
something in any one of them. So an alternative is tried in its own place, and all other braces stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import bracex

_TOKENS = re.compile(r"\\.|\$?\{|[,}]", re.DOTALL)
"""What may divide a pattern, and escaped characters, which do not."""


def alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """Every alternative of every brace, with the pattern that has it alone in the brace's place.

    Args:
        pattern: a glob with braces as Bash has them: ``{a,b}``, ``{0..3}``, one inside of another.

    Examples:
        >>> list(alternatives("{q,v}_proj"))
        [('q', 'q_proj'), ('v', 'v_proj')]
        >>> [alone for _, alone in alternatives("{a,b}{0..1}")]
        ['a{0..1}', 'b{0..1}', '{a,b}0', '{a,b}1']
    """
    at = 0
    while (start := _opening(pattern, at)) is not None:
        parts, end = _parts(pattern, start)
        if end is None:
            return
        before, after, at = pattern[:start], pattern[end + 1 :], end + 1
        if len(parts) == 1:
            parts = bracex.expand(pattern[start : end + 1], keep_escapes=True)
            if len(parts) == 1:  # no alternatives: the braces are plain characters, but there may be some inside
                at = start + 1
                continue
        for part in parts:
            yield part, before + part + after
            for inner, alone in alternatives(part):
                yield inner, before + alone + after


def _opening(pattern: str, at: int) -> int | None:
    """Where the next brace opens that is no plain character."""
    return next((token.start() for token in _TOKENS.finditer(pattern, at) if token[0] == "{"), None)


def _parts(pattern: str, start: int) -> tuple[list[str], int | None]:
    """Return what the commas of the brace at `start` divide, and where it closes, if it does."""
    parts, depth, begin = list[str](), 0, start + 1
    for token in _TOKENS.finditer(pattern, start):
        if token[0] in ("{", "${"):
            depth += 1
        elif token[0] == "," and depth == 1:
            parts.append(pattern[begin : token.start()])
            begin = token.end()
        elif token[0] == "}":
            depth -= 1
            if not depth:
                return [*parts, pattern[begin : token.start()]], token.start()
    return parts, None
