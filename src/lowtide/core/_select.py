"""Leaf selection by glob patterns or regular expressions on tree paths, or by predicates.

Globs follow the shell's rules on ``/``-separated paths (`*` within a segment, `**` any number of segments, `{a,b}`
alternatives, `?`, `[...]`). wcmatch matches them against the whole path. A leading ``!`` excludes. A pattern that
matches no leaf is an error that lists near misses. So is a single alternative in braces that matches no leaf.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import bracex

from ._errors import SelectionError
from ._paths import Tree, is_array_like, leaves_with_paths

Pattern = str | re.Pattern[str]
"""A glob, or a compiled regular expression that matches a path from start to end."""
Selector = Pattern | Sequence[Pattern] | Callable[[str, Any], bool]
"""A pattern, a sequence of patterns, or a predicate ``(path, leaf) -> bool``."""

_TOKENS = re.compile(r"\\.|\$?\{|[,}]", re.DOTALL)
"""Characters that may split a pattern; escaped characters are matched first, so that they do not."""


def match_path(path: str, pattern: str) -> bool:
    """Return whether a glob matches a whole path.

    Args:
        path: a tree path such as ``layers/attn/q_proj/weight``.
        pattern: a glob.

    Returns:
        True when the pattern covers the path from start to end.

    Examples:
        >>> match_path("layers/attn/q_proj/weight", "**/{q,v}_proj/*")
        True
    """
    from wcmatch import glob  # imported late: it takes a tenth of the import time of `lowtide.Trainer`

    return glob.globmatch(path, pattern, flags=glob.GLOBSTAR | glob.BRACE | glob.DOTGLOB | glob.CASE | glob.FORCEUNIX)


def among(paths: Container[str]) -> Callable[[str, Any], bool]:
    """Return a predicate that selects leaves by exact path, in which glob characters have no meaning.

    Args:
        paths: the paths to select.

    Returns:
        The predicate, for any argument of type `Selector`.
    """
    return lambda path, leaf: path in paths


def select(tree: Tree, selector: Selector) -> list[bool]:
    """Return for every leaf, in flattening order, whether `selector` selects it.

    Args:
        tree: any pytree. A pattern never selects leaves that hold no numbers (functions, text).
        selector: a glob on tree paths, a compiled regular expression, several of these, or a predicate
            ``(path, leaf) -> bool``. A leaf is selected when any pattern matches it and no glob with a leading ``!``
            does.

    Returns:
        One boolean per leaf.

    Raises:
        SelectionError: when a pattern, or an alternative in its braces, matches no leaf, or nothing is selected.

    Examples:
        >>> select({"a": 1.0, "b": {"lora_a": 2.0}}, "**/lora_*")
        [False, True]
    """
    leaves = leaves_with_paths(tree)
    if callable(selector):
        mask = [bool(selector(path, leaf)) for path, leaf in leaves]
        if not any(mask):
            raise SelectionError(
                f"the predicate {getattr(selector, '__name__', selector)!r} selects no leaf",
                got=f"{len(leaves)} leaves: {_sample(path for path, _ in leaves)}",
                hint="check the predicate: it receives (path, leaf), with a path such as 'layers/attn/q_proj/weight'",
            )
        return mask
    names = [path for path, leaf in leaves if is_array_like(leaf)]
    matched = set(match_names(names, selector))
    return [is_array_like(leaf) and path in matched for path, leaf in leaves]


def match_names(names: Sequence[str], selector: Pattern | Sequence[Pattern]) -> list[str]:
    """Return the names that patterns select; every pattern must match at least one.

    Args:
        names: the candidates (tree paths of leaves or of modules).
        selector: a glob, a compiled regular expression, or several; globs that start with ``!`` exclude.

    Returns:
        The selected names, in their given order.

    Raises:
        SelectionError: when `selector` is empty, a pattern or an alternative in its braces matches nothing, or the
            exclusions leave nothing.
    """
    value: Any = selector
    patterns: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not all(is_pattern(pattern) for pattern in patterns):
        raise SelectionError(
            "a selection must be globs, regular expressions or a predicate",
            expected="a glob, re.compile(...), a sequence of these, or a function (path, leaf) -> bool",
            got=repr(selector),
            hint='pass a glob, for instance "**/lora_*"',
        )
    excludes = [pattern for pattern in patterns if isinstance(pattern, str) and pattern.startswith("!")]
    includes = [pattern for pattern in patterns if pattern not in excludes]
    if not includes:
        raise SelectionError(
            "the selection has no pattern without a leading '!'",
            got=repr(selector),
            hint='give at least one glob; "**" selects every leaf',
        )
    hits = {pattern: _match_pattern(pattern, names) for pattern in patterns}
    selected = (
        set[str]().union(*(hits[pattern] for pattern in includes)).difference(*(hits[pattern] for pattern in excludes))
    )
    if not selected:
        raise SelectionError(
            "the exclusions leave nothing selected", got=repr(selector), hint="narrow the patterns that start with '!'"
        )
    return [name for name in names if name in selected]


def is_pattern(value: Any) -> bool:
    """Return whether the argument is a glob or a compiled regular expression on text."""
    return isinstance(value, str) or (isinstance(value, re.Pattern) and isinstance(value.pattern, str))


def _match_pattern(pattern: Pattern, names: Sequence[str]) -> set[str]:
    """Return the names that a pattern matches; every alternative in a glob's braces must match at least one."""
    if isinstance(pattern, re.Pattern):
        hits = {name for name in names if pattern.fullmatch(name)}
        if not hits:
            raise SelectionError(
                f"the regular expression {pattern.pattern!r} matches nothing",
                expected="a regular expression that matches a path from start to end",
                got=f"{len(names)} candidates: {_sample(names)}",
                hint="begin with .* to allow any text before the match",
            )
        return hits
    glob_only = pattern.removeprefix("!")
    try:
        bracex.expand(glob_only)
    except (bracex.ExpansionLimitException, ValueError) as error:
        raise SelectionError(
            f"pattern {pattern!r} expands to too many patterns",
            got=str(error),
            hint="write ** or [0-9]* in place of the numbers",
        ) from error
    hits = {name for name in names if match_path(name, glob_only)}
    # A pattern without any match is reported as a whole, any other by its first alternative without a match.
    candidates = [(glob_only, "")] if not hits else [(variant, part) for part, variant in alternatives(glob_only)]
    for variant, part in candidates:
        if not any(match_path(name, variant) for name in names):
            raise SelectionError(
                f"the alternative {part!r} of pattern {pattern!r} matches nothing"
                if hits
                else f"pattern {pattern!r} matches nothing",
                expected="a glob on whole paths, segments separated by '/'",
                got=f"{len(names)} candidates: {_sample(names)}",
                hint=_near_misses(variant, names),
            )
    return hits


def _near_misses(pattern: str, names: Sequence[str]) -> str:
    """Suggest a variant of the pattern that matches, else the closest spellings, else some of the paths."""
    for variant in (f"{pattern}/**", f"**/{pattern}", f"**/{pattern}/**"):
        if any(match_path(name, variant) for name in names):
            return f"did you mean {variant!r}?"
    if ".*" in pattern:
        return f"write ** for any path, or pass re.compile(...) for a regular expression; paths: {_sample(names)}"
    segments = sorted({segment for name in names for segment in name.split("/")})
    parts = [segment for segment in pattern.split("/") if segment.strip("*") and segment not in segments]
    close = [miss for part in parts for miss in difflib.get_close_matches(part, segments, n=2, cutoff=0.6)]
    close += difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.5)
    if close:
        return f"near misses: {', '.join(dict.fromkeys(close))}"
    return f"paths look like: {_sample(names)}"


def _sample(names: Iterable[str], limit: int = 6) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", … ({len(listed) - limit} more)" if len(listed) > limit else "")


def alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each alternative of each brace (``{a,b}``, ``{0..3}``, also nested), and the pattern with it in its place.

    ``**/{attn,mlp}/{q,up}_proj`` has four alternatives, but not all four combinations need to occur: each alternative
    has to match in at least one of them. So an alternative is tried alone in its brace, and all other braces stay.

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
