"""Pictures of schedules: what is in them is what was simulated."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowtide.core import ConfigError, OutputError
from lowtide.pipeline import Costs, schedule, simulate


def simulated(name: str = "zb-v", **options: Any) -> Any:
    return simulate(schedule(name, num_stages=8, num_microbatches=4), **options)


def printed(found: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(found)
    return console.file.getvalue().splitlines()  # pyright: ignore


def test_a_terminal_shows_every_pass_where_it_begins() -> None:
    found = simulate(schedule("1f1b", num_stages=2, num_microbatches=2))
    # Nine units in 36 columns: two F, two B of twice the length on each rank.
    rows = printed(found, 7 + 36)
    assert rows[0].rstrip() == "rank 0 F0  F1  ········B0      ····B1"
    assert rows[1].rstrip() == "rank 1 ····F0  B0      F1  B1      ········"
    assert "backward" in rows[2] and "weight" not in rows[2]


def test_passes_are_told_apart_with_and_without_colours() -> None:
    found = simulate(schedule("zb-h1", num_stages=2, num_microbatches=2))
    narrow = printed(simulate(schedule("zb-h1", num_stages=2, num_microbatches=12)), 40)  # 33 columns, 37 passes
    assert narrow[0][7:9] == "FF" and set(narrow[0][7:].strip()) == set("FIW·")
    coloured = Console(width=7 + 36, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False)
    coloured.print(found)
    text = coloured.file.getvalue()  # pyright: ignore
    assert "\x1b[" in text and "F0" not in text.splitlines()[0]


@pytest.mark.parametrize("width", [10, 60, 200])
def test_rows_are_as_wide_as_the_terminal(width: int) -> None:
    rows = printed(simulated(), max(width, 40))
    assert len(rows[0].rstrip()) <= max(width, 40)


def test_a_trace_has_every_action_at_its_time() -> None:
    found = simulated()
    events = json.loads(found.to_trace())["traceEvents"]
    passes = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(passes) == sum(map(len, found.schedule.orders))
    for rank, order in enumerate(found.schedule.orders):
        for action, start, end in zip(order, found.starts[rank], found.ends[rank], strict=True):
            event = passes[str(action)]
            assert (event["tid"], event["ts"], event["dur"]) == (rank, 1e3 * start, 1e3 * (end - start))
    kept = [event["args"]["kept"] for event in events if event["ph"] == "C"]
    assert max(kept) == max(found.peaks) and min(kept) == 0


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe-v", "v-min"])
def test_memory_over_time_reaches_the_peak_and_ends_at_nothing(name: str) -> None:
    costs = Costs(forward=1.0, input=1.3, weight=0.7, input_residuals=0.5, weight_residuals=0.25)
    found = simulate(schedule(name, num_stages=8, num_microbatches=16, costs=costs), costs)
    for rank, peak in enumerate(found.peaks):
        times, values = found.memory(rank)
        assert times == sorted(times) and values[-1] == pytest.approx(0)
        assert max(values) == pytest.approx(peak)


@pytest.mark.slow
def test_pictures_are_written_and_labelled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    found = simulated(lockstep=True)
    assert found.to_png(tmp_path / "a.png")[:8] == b"\x89PNG\r\n\x1a\n" == (tmp_path / "a.png").read_bytes()[:8]
    svg = found.to_svg(tmp_path / "a.svg").decode()
    assert "<svg" in svg and f"in lockstep, {found.num_ticks} ticks" in svg and "rank 3" in svg
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(?s)hint:"):
        found.to_png(tmp_path / "file" / "a.png")


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"(?s)pictures need matplotlib.*hint: pip install \"lowtide\[report\]\""):
        simulated().to_png()
