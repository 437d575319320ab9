"""The alternatives of a glob's braces, one at a time.

``**/{attn,mlp}/{q,up}_proj`` has four alternatives, but not all four combinations need to occur: each alternative has
to match in at least one of them. So an alternative is tried alone in its brace, and all other braces stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import bracex

_TOKENS = re.compile(r"\\.|\$?\{|[,}]", re.DOTALL)
"""Characters that may split a pattern; escaped characters are matched first, so that they do not."""


def alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each alternative of each brace (``{a,b}``, ``{0..3}``, also nested), and the pattern with it in its place.

    Examples:
        >>> list(alternatives("{q,v}_proj"))
        [('q', 'q_proj'), ('v', 'v_proj')]
        >>> [alone for _, alone in alternatives("{a,b}{0..1}")]
        ['a{0..1}', 'b{0..1}', '{a,b}0', '{a,b}1']
    """
    position = 0
    while (start := _find_brace(pattern, position)) is not None:
        parts, end = _split_brace(pattern, start)
        # A brace that is never closed is plain text.
        if end is None:
            return
        before, after, position = pattern[:start], pattern[end + 1 :], end + 1
        if len(parts) == 1:
            parts = bracex.expand(pattern[start : end + 1], keep_escapes=True)
            if len(parts) == 1:  # not a brace expansion but plain characters, which may contain one
                position = start + 1
                continue
        for part in parts:
            yield part, before + part + after
            for alternative, variant in alternatives(part):
                yield alternative, before + variant + after


def _find_brace(pattern: str, position: int) -> int | None:
    """Return the position of the next brace that is not escaped."""
    return next((token.start() for token in _TOKENS.finditer(pattern, position) if token[0] == "{"), None)


def _split_brace(pattern: str, start: int) -> tuple[list[str], int | None]:
    """Return the comma-separated parts of the brace at `start`, and the position where it closes, or None."""
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
