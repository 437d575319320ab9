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
_TRANSFORMED = re.compile(r"(jvp|transpose|vmap|pmap|checkpoint|remat|shard_map)\((.*)\)")
# A separate part of the scope or, with `jax_remat3`, inside the transpose: transpose(jvp(rematted_computation)).
_RECOMPUTED = re.compile(r"(?:^|[/(])rematted_computation[/)]")
_FORWARD, _BACKWARD = "f", "b"


class Passes:
    """The passes of a program.

    Args:
        scopes: the scopes of all its operations, which show the forward passes that have a backward pass.

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
        self._found = {levels for scope in set(scopes) if (levels := _levels(scope))}

    def phase(self, scope: str) -> Pass | None:
        """Return the pass that a scope names; None when it names none."""
        # `levels` has one letter for each differentiation around the operation, the outermost first. The first "b"
        # (backward) decides. If an outer gradient differentiates that backward pass, it belongs to the outer forward
        # pass.
        levels = _levels(scope)
        inner = levels.find(_BACKWARD)
        if inner < 0:
            return "forward" if levels else None
        if self._is_transposed(levels, inner):
            return "forward"
        return "recompute" if _RECOMPUTED.search(first_scope(scope)) else "backward"

    def is_open(self, scope: str) -> bool:
        """Return whether an inner gradient may belong to an outer forward pass, which scopes alone do not show.

        Such a gradient is not itself differentiated, for example in first-order MAML, or in a curvature that is
        computed in addition to the gradient.
        """
        levels = _levels(scope)
        inner = levels.find(_BACKWARD)
        outer = any(other.startswith(levels[:at] + _BACKWARD) for other in self._found for at in range(inner))
        return inner > 0 and outer and not self._is_transposed(levels, inner)

    def _is_transposed(self, levels: str, inner: int) -> bool:
        """Return whether an outer gradient differentiates the gradient at this level in reverse mode."""
        transposed = [levels[:at] + _BACKWARD + levels[at + 1 : inner + 1] for at in range(inner)]
        return any(other.startswith(one) for one in transposed for other in self._found)


@functools.lru_cache(maxsize=4096)
def _levels(scope: str) -> str:
    """Return the differentiations around an operation, the outermost first, as one letter each."""
    levels = ""
    for part in _parts(scope):
        transposed = False
        for name in _transformations(part):
            if name == "transpose":
                levels, transposed = levels + _BACKWARD, True
            elif name == "jvp":
                levels, transposed = levels if transposed else levels + _FORWARD, False
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
    while found := _TRANSFORMED.fullmatch(part):
        yield found[1]
        part = found[2]


def _parts(scope: str) -> list[str]:
    """Split a scope at slashes outside brackets, and drop the primitive at the end, if there is one."""
    scope = first_scope(scope)
    parts, depth, begin = list[str](), 0, 0
    for at, char in enumerate(scope):
        depth += (char in "([") - (char in ")]")
        if char == "/" and depth == 0:
            parts.append(scope[begin:at])
            begin = at + 1
    return [*parts, scope[begin:]] if _TRANSFORMED.fullmatch(scope[begin:]) else parts
