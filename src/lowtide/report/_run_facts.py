"""What a page about a training run says: plain data, whoever trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float | None]]
"""A curve: steps, and values there; None is a hole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """What is drawn, with its unit."""
    curves: Mapping[str, Points]
    """The curves by name, at most three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A training run, as its page shows it."""

    name: str
    """What the run is called."""
    verdict: str
    """The result in one sentence."""
    facts: Sequence[tuple[str, str]]
    """Figures to see first: names and values."""
    charts: Sequence[Chart]
    """What is drawn over the steps; a chart without a value says so."""
    samples: Mapping[str, tuple[str, str]]
    """Texts by title: a prompt and its continuation."""
    tables: Mapping[str, Sequence[tuple[str, str]]]
    """Tables by title, rows of name and value."""
    notes: Sequence[str] = ()
    """Lines at the page's end."""
