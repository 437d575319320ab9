"""Findings of the lint, and the decorator that registers its rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...core import format_bytes
from ...hlo import ArgumentLeaf
from ...report import MemoryReport
from .._owners import Owners


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """An unnecessary use of memory in a step.

    Examples:
        >>> print(Finding(rule="undonated-state", path="state/w", num_bytes=2**20, remedy="donate argument 0"))
        undonated-state: state/w, 1.00 MiB: the step replaces an argument that is not donated, so two copies of it exist
          hint: donate argument 0
    """

    rule: str
    """Name of the lint rule."""
    path: str
    """Tree path of the argument or output, or the checkpoint name."""
    num_bytes: int
    """Unnecessary bytes on one device."""
    remedy: str
    """How to avoid the unnecessary use."""
    detail: str = ""
    """Further details of this finding."""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        text = f"{self.rule}: {self.path}, {format_bytes(self.num_bytes)}: {RULES[self.rule]}{detail}"
        return f"{text}\n  hint: {self.remedy}"


def leaf_finding(rule: str, leaf: ArgumentLeaf, *, detail: str = "", remedy: str) -> Finding:
    """Build a finding with the path and bytes of an argument leaf."""
    return Finding(rule=rule, path=leaf.path, num_bytes=leaf.num_bytes, detail=detail, remedy=remedy)


class Step(NamedTuple):
    """A compiled step, the input of every rule; a part (`owners`, `jaxpr`) that is not available has the value None."""

    report: MemoryReport
    owners: Owners
    jaxpr: Any


Part = Literal["owners", "jaxpr"]
RuleFunction = Callable[[Step], Iterator[Finding]]
RULES: dict[str, str] = {}
"""Maps names of rules to their meaning."""
RULE_FUNCTIONS: list[tuple[RuleFunction, frozenset[Part]]] = []
"""Functions of the rules, each with the parts of a step that it needs."""


def rule(meanings: Mapping[str, str], *, needs: Sequence[Part] = ("owners",)) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that yields findings of one or several rules; `meanings` maps the rules to their meaning."""
    assert not RULES.keys() & meanings.keys()
    RULES.update(meanings)

    def register(function: RuleFunction) -> RuleFunction:
        RULE_FUNCTIONS.append((function, frozenset(needs)))
        return function

    return register
