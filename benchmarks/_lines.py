"""What a part left, and the lines that the summary of a GPU day has of it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Rows = Mapping[str, Row]


class Result(NamedTuple):
    """What a part left: a row of a case that failed has `failed`, of one that lacks a module `not_here`."""

    rows: Rows = {}
    complete: bool = True
    cases: Sequence[str] = ()


class Line(NamedTuple):
    """One figure: what it is, what it should be, what it is here, and whether that will do; or that its case failed."""

    figure: str
    aim: str = ""
    found: str = ""
    met: bool | None = None
    failed: bool = False

    @property
    def state(self) -> str:
        if not self.found:
            return "failed" if self.failed else "not measured"
        return {None: "measured", True: "met", False: "missed"}[self.met]
