"""Determine the pass of differentiation that makes an operation, from the scopes that JAX records.

A scope nests the transformations of an operation, the outermost first: ``jvp`` for the forward pass of a gradient,
``transpose(jvp)`` for its backward pass. With nested gradients (MAML, a gradient penalty, a PINN) the outermost one
decides: the whole inner gradient belongs to the forward pass of the outer one. A ``jvp`` without a transpose is
forward-mode differentiation (a Hessian-vector product as `jvp` of `grad`); then the next inner gradient decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Literal

Pass = Literal["forward", "recompute", "backward", "update"]

# Transformations that JAX nests in a scope: vmap(transpose(jvp(mlp))).
_TRANSFORMATION = re.compile(r"(jvp|transpose|vmap|pmap|checkpoint|remat|shard_map)\((.*)\)")
# A separate part of the scope or, with `jax_remat3`, inside the transpose: transpose(jvp(rematted_computation)).
_RECOMPUTATION = re.compile(r"(?:^|[/(])rematted_computation[/)]")
_FORWARD, _BACKWARD = "f", "b"


class Passes:
    """The passes of a program; the scopes of all its operations show the forward passes that have a backward pass.

    Examples:
        >>> inner = "jit(step)/jvp(transpose(jvp()))/mul"
        >>> Passes([inner]).phase(inner), Passes([inner, "jit(step)/transpose(jvp(transpose(jvp())))/mul"]).phase(inner)
        ('backward', 'forward')
        >>> scope = "jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/tanh"
        >>> Passes([scope]).phase(scope), Passes(["jit(step)/jvp()/transpose"]).phase("jit(step)/jvp()/transpose")
        ('recompute', 'forward')
        >>> scope = "jit(step)/transpose(jvp(rematted_computation))/checkpoint/eval_jaxpr/jvp(jvp())/tanh"
        >>> Passes([scope]).phase(scope)
        'recompute'
    """

    def __init__(self, scopes: Iterable[str]) -> None:
        self._nestings = {levels for scope in set(scopes) if (levels := _levels(scope))}

    def phase(self, scope: str) -> Pass | None:
        """Return the pass that a scope names; None when it names none."""
        # `levels` has one letter for each differentiation around the operation, the outermost first. The first "b"
        # (backward) decides. If an outer gradient differentiates that backward pass, it belongs to the outer forward
        # pass.
        levels = _levels(scope)
        index = levels.find(_BACKWARD)
        if index < 0:
            return "forward" if levels else None
        if self._is_transposed(levels, index):
            return "forward"
        return "recompute" if _RECOMPUTATION.search(first_scope(scope)) else "backward"

    def is_open(self, scope: str) -> bool:
        """Return whether an inner gradient may belong to an outer forward pass, which scopes alone do not show.

        It is not itself differentiated: first-order MAML, or a curvature that is computed in addition to the gradient.
        """
        levels = _levels(scope)
        index = levels.find(_BACKWARD)
        has_outer = any(
            nesting.startswith(levels[:depth] + _BACKWARD) for nesting in self._nestings for depth in range(index)
        )
        return index > 0 and has_outer and not self._is_transposed(levels, index)

    def _is_transposed(self, levels: str, index: int) -> bool:
        """Return whether an outer gradient differentiates the gradient at this level in reverse mode."""
        prefixes = [levels[:depth] + _BACKWARD + levels[depth + 1 : index + 1] for depth in range(index)]
        return any(nesting.startswith(prefix) for prefix in prefixes for nesting in self._nestings)


@functools.lru_cache(maxsize=4096)
def _levels(scope: str) -> str:
    """Return the differentiations around an operation, the outermost first, as one letter each."""
    levels = ""
    for part in _parts(scope):
        is_transposed = False
        for name in _transformations(part):
            if name == "transpose":
                levels, is_transposed = levels + _BACKWARD, True
            elif name == "jvp":
                levels, is_transposed = levels if is_transposed else levels + _FORWARD, False
    return levels


def first_scope(scope: str) -> str:
    """Return the first of several scopes, which a compiler joins for merged operations: ``a;b`` or ``(a:b)``.

    Examples:
        >>> first_scope("jit(f)/mul;jit(f)/add"), first_scope("(jit(f)/mul:jit(f)/add)"), first_scope("jit(f)/mul")
        ('jit(f)/mul', 'jit(f)/mul', 'jit(f)/mul')
    """
    if scope.startswith("(") and ":" in scope:
        scope = scope[1:].partition(":")[0]
    return scope.partition(";")[0]


def _transformations(part: str) -> Iterator[str]:
    """Yield the transformations around a part of a scope, the outermost first."""
    while match := _TRANSFORMATION.fullmatch(part):
        yield match[1]
        part = match[2]


def _parts(scope: str) -> list[str]:
    """Split a scope at slashes outside brackets, and drop the primitive at the end, if there is one."""
    scope = first_scope(scope)
    parts, depth, start = list[str](), 0, 0
    for index, char in enumerate(scope):
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            parts.append(scope[start:index])
            start = index + 1
    return [*parts, scope[start:]] if _TRANSFORMATION.fullmatch(scope[start:]) else parts
