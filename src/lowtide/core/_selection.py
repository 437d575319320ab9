"""Selection of leaves by path, and the split of a tree into trainable and frozen leaves.

Globs follow the shell's rules on ``/``-separated paths (`*` within a segment, `**` any number of segments, `{a,b}`
alternatives, `?`, `[...]`). wcmatch matches them against the whole path. A leading ``!`` excludes. A pattern that
matches no leaf is an error that lists near misses. The same holds for each alternative in braces.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import bracex
import jax
import numpy as np

from ._errors import SelectionError, StateError, StructureError
from ._files import shown
from ._paths import Tree, is_array_like, leaves_with_paths, path_str

Pattern = str | re.Pattern[str]
"""A glob, or a compiled regular expression that matches a path from start to end."""
Selector = Pattern | Sequence[Pattern] | Callable[[str, Any], bool]
"""A pattern, a sequence of patterns, or a predicate ``(path, leaf) -> bool``."""

_TOKENS = re.compile(r"\\.|\$?\{|[,}]", re.DOTALL)
"""Tokens of a pattern: braces, commas and escaped characters. An escaped brace or comma is thus no delimiter."""
_HALVES = "combine the two halves that partition returned, without changing their structure"
_HOLD_ONCE = "hold the array at one path and use it twice in the model, or untie it with jnp.array(leaf, copy=True)"


def match_path(path: str, pattern: str) -> bool:
    """Return whether a glob matches a whole path.

    Examples:
        >>> match_path("layers/attn/q_proj/weight", "**/{q,v}_proj/*")
        True
    """
    from wcmatch import glob  # imported late: it takes a tenth of the import time of `lowtide.Trainer`

    return glob.globmatch(path, pattern, flags=glob.GLOBSTAR | glob.BRACE | glob.DOTGLOB | glob.CASE | glob.FORCEUNIX)


def among(paths: Container[str]) -> Callable[[str, Any], bool]:
    """Return a predicate that selects the leaves at exactly these paths; glob characters have no meaning."""
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
        SelectionError: when a pattern, an alternative in braces or a predicate matches no leaf; or as in `match_names`.

    Examples:
        >>> select({"a": 1.0, "b": {"lora_a": 2.0}}, "**/lora_*")
        [False, True]
    """
    leaves = leaves_with_paths(tree)
    if callable(selector):
        mask = [bool(selector(path, leaf)) for path, leaf in leaves]
        if not any(mask):
            problem = f"the predicate {getattr(selector, '__name__', selector)!r} selects no leaf"
            got = f"{len(leaves)} leaves: {sample(path for path, _ in leaves)}"
            hint = "check the predicate: it receives (path, leaf), with a path such as 'layers/attn/q_proj/weight'"
            raise SelectionError(problem, got=got, hint=hint)
        return mask
    names = [path for path, leaf in leaves if is_array_like(leaf)]
    matched = set(match_names(names, selector))
    return [is_array_like(leaf) and path in matched for path, leaf in leaves]


def match_names(names: Sequence[str], selector: Pattern | Sequence[Pattern]) -> list[str]:
    """Return the names that patterns select; every pattern must match at least one.

    Args:
        names: the candidates (tree paths of leaves or of modules), whose order the result keeps.
        selector: a glob, a compiled regular expression, or several; globs that start with ``!`` exclude.

    Raises:
        SelectionError: when `selector` has only exclusions, or an item of another type; when a pattern or an
            alternative in braces matches nothing; when braces expand to too many patterns; or when the exclusions leave
            nothing.
    """
    value: Any = selector
    patterns: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not all(is_pattern(pattern) for pattern in patterns):
        problem = f"a selection must be globs, regular expressions or a predicate, not {shown(selector)}"
        raise SelectionError(problem, hint='pass "**/lora_*", re.compile(...), or a function (path, leaf) -> bool')
    excludes = [pattern for pattern in patterns if isinstance(pattern, str) and pattern.startswith("!")]
    includes = [pattern for pattern in patterns if pattern not in excludes]
    if not includes:
        problem = f"the selection {shown(selector)} has no pattern without a leading '!'"
        raise SelectionError(problem, hint='give at least one glob; "**" selects every leaf')
    hits = {pattern: _match_pattern(pattern, names) for pattern in patterns}
    selected = set[str]().union(*(hits[pattern] for pattern in includes))
    selected.difference_update(*(hits[pattern] for pattern in excludes))
    if not selected:
        hint = "narrow the patterns that start with '!'"
        raise SelectionError("the exclusions leave nothing selected", got=shown(selector), hint=hint)
    return [name for name in names if name in selected]


def is_pattern(value: Any) -> bool:
    """Return whether the argument is a glob or a compiled regular expression on text."""
    return isinstance(value, str) or (isinstance(value, re.Pattern) and isinstance(value.pattern, str))


def _match_pattern(pattern: Pattern, names: Sequence[str]) -> set[str]:
    """Return the names that a pattern matches; every alternative in a glob's braces must match at least one."""
    if isinstance(pattern, re.Pattern):
        hits = {name for name in names if pattern.fullmatch(name)}
        if not hits:
            hint = "begin with .* to allow any text before the match"
            raise _no_match(f"the regular expression {pattern.pattern!r}", names, hint)
        return hits
    glob_only = pattern.removeprefix("!")
    try:
        bracex.expand(glob_only)
    except (bracex.ExpansionLimitException, ValueError) as error:
        hint = "write ** or [0-9]* in place of the numbers"
        raise SelectionError(f"pattern {pattern!r} expands to too many patterns", got=str(error), hint=hint) from error
    hits = {name for name in names if match_path(name, glob_only)}
    # A pattern without any match is reported as a whole, any other by its first alternative without a match.
    candidates = [(glob_only, "")] if not hits else [(variant, part) for part, variant in alternatives(glob_only)]
    for variant, part in candidates:
        if not any(match_path(name, variant) for name in names):
            subject = f"the alternative {part!r} of pattern {pattern!r}" if hits else f"pattern {pattern!r}"
            expected = "a glob on whole paths, segments separated by '/'"
            raise _no_match(subject, names, _near_misses(variant, names), expected)
    return hits


def _no_match(subject: str, names: Sequence[str], hint: str, expected: str | None = None) -> SelectionError:
    got = f"{len(names)} candidates: {sample(names)}"
    return SelectionError(f"{subject} matches nothing", expected=expected, got=got, hint=hint)


def _near_misses(pattern: str, names: Sequence[str]) -> str:
    """Suggest a variant of the pattern that matches, else the closest spellings, else some of the paths."""
    # The escaped pattern matches paths that contain brackets, which are no character class there.
    for variant in (glob.escape(pattern), f"{pattern}/**", f"**/{pattern}", f"**/{pattern}/**"):
        if any(match_path(name, variant) for name in names):
            return f"did you mean {variant!r}?"
    if ".*" in pattern:
        return f"write ** for any path, or pass re.compile(...) for a regular expression; paths: {sample(names)}"
    segments = sorted({segment for name in names for segment in name.split("/")})
    parts = [segment for segment in pattern.split("/") if segment.strip("*") and segment not in segments]
    close = [miss for part in parts for miss in difflib.get_close_matches(part, segments, n=2, cutoff=0.6)]
    close += difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.5)
    if close:
        return f"near misses: {', '.join(dict.fromkeys(close))}"
    return f"paths look like: {sample(names)}"


def sample(names: Iterable[str]) -> str:
    """List the first six names for a message, and the number of further names."""
    listed = list(names)
    return ", ".join(listed[:6]) + (f", … ({len(listed) - 6} more)" if len(listed) > 6 else "")


def alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each alternative of each brace, and the pattern with the alternative in place of the brace.

    Braces are ``{a,b}`` and ``{0..3}``, also nested. Braces around an alternative are replaced too; all others stay.
    ``**/{attn,mlp}/{q,k,up}_proj`` gives 5 patterns, one per alternative; its 6 combinations need not all match.

    Examples:
        >>> list(alternatives("{q,v}_proj"))
        [('q', 'q_proj'), ('v', 'v_proj')]
        >>> [variant for _, variant in alternatives("{a,b}{0..1}")]
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
            if len(parts) == 1:  # plain characters, which may contain braces that expand
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
    """Return the comma-separated parts of the brace at `start`, and the position where it closes (None: nowhere)."""
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


# --- Partition --------------------------------------------------------------------------------------------------------
#
# Both halves keep the structure of the tree, with `None` (an empty subtree in JAX) wherever the other half holds the
# leaf. Each half therefore has only its own leaves, and mapping over one half costs nothing for the other half. The
# idea is Equinox's `partition`/`combine`. Deviations: leaves are selected by path, and ambiguous input (a pattern
# without a match, an array shared by both halves) is an error.


def partition(tree: Tree, selector: Selector) -> tuple[Tree, Tree]:
    """Split a tree into the selected leaves and the rest.

    Args:
        tree: any pytree (a dictionary, an Equinox module, NNX state, ...).
        selector: globs or compiled regular expressions on tree paths, or a predicate ``(path, leaf) -> bool``.

    Returns:
        ``(selected, unselected)``, both with the structure of `tree` and `None` where the other half holds the leaf.

    Raises:
        SelectionError: as in `select`, or when one array is at both a selected and an unselected path. Training would
            silently untie the two paths, and donating one half would delete the array of the other.

    Memory:
        No copy: both trees refer to the arrays of `tree`.

    Examples:
        >>> partition({"base": 1.0, "lora_a": 2.0}, "lora_*")
        ({'base': None, 'lora_a': 2.0}, {'base': 1.0, 'lora_a': None})
    """
    mask = select(tree, selector)
    leaves, treedef = jax.tree.flatten(tree)
    _refuse_split_sharing(tree, mask)
    selected = treedef.unflatten([leaf if chosen else None for leaf, chosen in zip(leaves, mask, strict=True)])
    unselected = treedef.unflatten([None if chosen else leaf for leaf, chosen in zip(leaves, mask, strict=True)])
    return selected, unselected


def combine(*trees: Tree) -> Tree:
    """Combine the halves of `partition`, or any trees with disjoint leaves.

    Args:
        *trees: trees of the same structure, with `None` where a tree lacks a leaf.

    Raises:
        StructureError: when the structures differ, or two trees hold a leaf at the same path.

    Memory:
        No copy.

    Examples:
        >>> combine({"a": None, "b": 2.0}, {"a": 1.0, "b": None})
        {'a': 1.0, 'b': 2.0}
    """

    def pick(path: Any, *leaves: Any) -> Any:
        present = [leaf for leaf in leaves if leaf is not None]
        if len(present) > 1:
            raise StructureError(f"{path_str(path)}: {len(present)} trees hold this leaf", hint=_HALVES)
        return present[0] if present else None

    try:
        # `None` is an empty subtree to JAX: without `is_leaf` two complementary halves would differ in structure.
        return jax.tree_util.tree_map_with_path(pick, *trees, is_leaf=lambda leaf: leaf is None)
    except StructureError:
        raise
    except ValueError as error:
        got = str(error).splitlines()[0]
        raise StructureError("the trees to combine have different structures", got=got, hint=_HALVES) from error


def shared_leaves(tree: Tree) -> list[list[str]]:
    """Group the paths that hold the same array object (tied weights)."""
    by_identity: dict[int, list[str]] = {}
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            by_identity.setdefault(id(leaf), []).append(path)
    return [paths for paths in by_identity.values() if len(paths) > 1]


def refuse_shared(*parts: Tree) -> None:
    """Raise when two trainable paths hold the same array, since each path would get only a part of its gradient.

    Raises:
        SelectionError: with both paths. Inside `jit` the paths hold different tracers, so sharing is not detected.
    """
    for paths in shared_leaves(parts):
        first, second = (path.partition("/")[2] for path in paths[:2])
        raise SelectionError(f"{first} and {second} are the same array, and both are trainable", hint=_HOLD_ONCE)


def refuse_consumed(*trees: Tree) -> None:
    """Raise when a trainer or another donating function has consumed arrays of a tree.

    Raises:
        StateError: with the path of the first such array.
    """
    leaves = [pair for tree in trees for pair in leaves_with_paths(tree)]
    deleted = [path for path, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if deleted:
        problem = f"{deleted[0]} was consumed by another trainer or a donating function"
        hint = "use the trainer's arrays, trainer.model, or give each trainer a copy: jax.tree.map(jnp.array, model)"
        raise StateError(problem, got=f"{len(deleted)} deleted arrays", hint=hint)


def _refuse_split_sharing(tree: Tree, mask: list[bool]) -> None:
    groups = shared_leaves(tree)
    if not groups:
        return
    chosen = {path for (path, _), is_selected in zip(leaves_with_paths(tree), mask, strict=True) if is_selected}
    for paths in groups:
        selected = [path for path in paths if path in chosen]
        unselected = [path for path in paths if path not in chosen]
        if selected and unselected:
            problem = f"{selected[0]} is selected but the same array at {unselected[0]} is not"
            raise SelectionError(problem, hint=_HOLD_ONCE)


def split_static(model: Tree) -> tuple[Tree, Tree]:
    """Split a model into its numeric leaves and its other leaves, such as an Equinox module's activation function."""
    arrays = jax.tree.map(lambda leaf: leaf if is_array_like(leaf) else None, model)
    return arrays, jax.tree.map(lambda leaf: None if is_array_like(leaf) else leaf, model)
