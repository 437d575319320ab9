"""Data of the page about a training run: plain data, independent of the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float | None]]
"""A curve: steps and their values; None is a gap."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes."""

    title: str
    """The quantity, with its unit."""
    curves: Mapping[str, Points]
    """The curves by name, at most three."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The contents of a training run's page."""

    name: str
    """Name of the run."""
    verdict: str
    """The result in one sentence."""
    facts: Sequence[tuple[str, str]]
    """The most important figures: names and values."""
    charts: Sequence[Chart]
    """Charts over the steps; a chart without values shows a note."""
    samples: Mapping[str, tuple[str, str]]
    """Texts by title: a prompt and its continuation."""
    tables: Mapping[str, Sequence[tuple[str, str]]]
    """Tables by title, rows of name and value."""
    notes: Sequence[str] = ()
    """Lines at the end of the page."""
