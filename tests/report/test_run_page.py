"""The page of a run: what it draws, and that nothing of the data is markup in it."""

from __future__ import annotations

import html.parser
import math
import re
from typing import Any

import numpy as np
import pytest

from lowtide.memory import MemoryReport
from lowtide.report import Chart, RunFacts, run_page
from lowtide.report.views._run import _columns, _runs, _ticks

EVIL = "</style></title><script>alert('x')</script><img src=x onerror=\"alert(1)\">&lt;{{style}}"
DEFAULTS: dict[str, Any] = {"name": "mine", "verdict": "good", "facts": [], "charts": [], "samples": {}, "tables": {}}


class Tags(html.parser.HTMLParser):
    """Which elements and attributes a page has, and its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def page(memory: MemoryReport | None = None, **values: Any) -> str:
    return run_page(RunFacts(**{**DEFAULTS, **values}), memory).decode()


def chart(*values: float | None, name: str = "loss") -> Chart:
    return Chart(title="Loss", curves={name: [*enumerate(values)]})


def curves(found: str) -> list[str]:
    return re.findall(r'<path class="curve[^"]*" d="([^"]*)"', found)


def test_nothing_of_the_data_is_markup() -> None:
    found = run_page(
        RunFacts(
            name=EVIL,
            verdict=EVIL,
            facts=[(EVIL, EVIL)],
            charts=[Chart(title=EVIL, curves={EVIL: [(0, 1.0)], EVIL + "2": [(1, 2.0)]})],
            samples={EVIL: (EVIL, EVIL)},
            tables={EVIL: [(EVIL, EVIL)]},
            notes=[EVIL],
        )
    )
    tags = Tags(found)
    assert not tags.tags & {"script", "img", "iframe", "object", "base", "form"}
    assert not [name for name in tags.attributes if name.startswith("on")] and "src" not in tags.attributes
    assert tags.text.count("<script>alert('x')</script>") >= 9 and tags.text.count("{{style}}") >= 9
    assert b"default-src 'none'" in found and b"http" not in found.replace(b"http-equiv", b"")


def test_a_hole_breaks_a_curve_and_is_no_number() -> None:
    found = page(charts=[chart(3.0, 2.0, None, math.nan, 1.5, math.inf, 1.0)])
    (path,) = curves(found)
    assert path.count("M") == 3 and "nan" not in found.lower() and "inf" not in path
    (single,) = curves(page(charts=[chart(3.0)]))
    assert single.count("M") == 1


@pytest.mark.parametrize("values", [(), (None, math.nan)])
def test_a_chart_without_a_value_says_so(values: Any) -> None:
    assert "no values" in page(charts=[chart(*values)])


def test_many_records_are_a_mean_and_a_band_of_bounded_size() -> None:
    noise = np.random.default_rng(0).normal(size=20_000)
    noise[700] = 40.0
    found = page(charts=[chart(*noise)])
    assert len(found) < 80_000 and found.count('class="band') == 1
    steps, means, least, most = _columns(np.arange(20_000.0), noise)
    assert (steps[0], steps[-1], most.max()) == (0, 19_999, 40.0) and least.min() == noise.min()
    np.testing.assert_allclose(means.mean(), noise.mean(), atol=1e-6)


def test_a_stretch_without_records_stays_a_hole_where_there_are_many() -> None:
    steps = np.array([step for step in range(10_000) if not 4_000 < step < 5_000], float)
    _, means, _, _ = _columns(steps, np.ones(len(steps)))
    first, second = _runs(means)
    assert len(first) + len(second) < len(means) and len(first) > 100 < len(second)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1e-5, 2e-4), (2.1, 2.1), (0, 0), (-3, 7), (1e9, 1e9 + 3), (-1e-9, 0)]
)
def test_ticks_are_few_and_hold_the_values(low: float, high: float) -> None:
    ticks = _ticks(low, high, 5)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len({f"{tick:.10g}" for tick in ticks}) == len(ticks) <= 8


def test_memory_is_drawn_over_the_program_and_adds_up(reports: Any) -> None:
    small_report = reports.small()
    found = page(small_report)
    assert "Memory of a step, on the device" in found and "Bytes of a step by role" in found
    for role in small_report.by_role:
        assert role in found
    assert "Memory of a step" not in page()
