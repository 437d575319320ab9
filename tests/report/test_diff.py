"""diff: owners matched across compilations, and deltas that add up to the difference of the totals."""

from __future__ import annotations

import dataclasses
import io
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lowtide.core import OutputError
from lowtide.memory import MemoryDiff, MemoryReport, SpaceBytes, diff
from lowtide.report._facts import Buffer, versions


def assert_adds_up(difference: MemoryDiff) -> None:
    before, after = difference.before, difference.after
    for space, sides in (
        ("device", (before.device_bytes, after.device_bytes)),
        ("host", (before.host_bytes, after.host_bytes)),
    ):
        rows = [row for row in difference.rows if row.space == space]
        assert sum(row.before_bytes for row in rows) == sides[0]
        assert sum(row.after_bytes for row in rows) == sides[1]
        assert sum(row.delta_bytes for row in rows) == sides[1] - sides[0] == difference.delta_bytes(space=space)
        pairs = difference.by_role(space=space).values()
        assert (sum(b for b, _ in pairs), sum(a for _, a in pairs)) == sides


def buffer(role: str, num_bytes: int, **fields: Any) -> Buffer:
    return Buffer(**{"space": "device", "role": role, "num_bytes": num_bytes, "start": 0, "end": 0, **fields})


def test_a_report_does_not_differ_from_itself(reports: Any) -> None:
    report = reports.llm()
    difference = diff(report, report)
    assert_adds_up(difference)
    assert {row.delta_bytes for row in difference.rows} == {0}
    assert difference.notes == tuple(f"{side}: {note}" for side in ("before", "after") for note in report.notes)


@pytest.mark.parametrize("order", [1, -1])
def test_large_reports_add_up_both_ways(order: int, reports: Any) -> None:
    pair = [reports.llm(), reports.llm(24, 5000, batch=12, name="v5e:2x2")][::order]
    difference = diff(*pair)
    assert_adds_up(difference)
    changes = [abs(row.delta_bytes) for row in difference.rows]
    assert changes == sorted(changes, reverse=True)
    gone = next(row for row in difference.rows if row.owner == "model/layers/30/mlp/up_proj/weight")
    size = 14336 * 4096 * 2
    assert (gone.before_bytes, gone.after_bytes) == (size, 0)[::order]


def test_owners_are_matched_by_what_they_are_for(reports: Any) -> None:
    before = [
        buffer("params", 100, path="w", dtype="f32"),
        buffer("activations", 30, scope="f/tanh", operation="fusion.7", dtype="f32"),
        buffer("activations", 30, scope="f/tanh", operation="fusion.8", dtype="f32"),
        buffer("activations", 9, scope="jvp()/while/body/closed_call/dot", dtype="f32"),
        buffer("temporaries", 7, operation="fusion loop_add_fusion.12", dtype="f32"),
        buffer("code", 3, phase=""),
    ]
    after = [
        buffer("params", 50, path="w", dtype="bf16"),
        buffer("activations", 40, scope="f/tanh", operation="fusion.99", dtype="f32"),
        buffer("activations", 9, scope="jvp()/while/body/eval_jaxpr/dot", dtype="f32"),  # its name in JAX 0.11
        buffer("temporaries", 9, operation="fusion loop_add_fusion", dtype="f32"),
        buffer("code", 3, phase=""),
    ]
    difference = diff(reports.make(before, ["a"]), reports.make(after, ["a"]))
    assert_adds_up(difference)
    rows = [(r.owner, r.dtype, r.before_bytes, r.after_bytes, r.before_count, r.after_count) for r in difference.rows]
    assert rows == [
        ("w", "f32", 100, 0, 1, 0),
        ("w", "bf16", 0, 50, 0, 1),
        ("f/tanh", "f32", 60, 40, 2, 1),
        ("fusion loop_add_fusion", "f32", 7, 9, 1, 1),
        ("jvp()/while/body/closed_call/dot", "f32", 9, 9, 1, 1),
        ("code", "", 3, 3, 1, 1),
    ]
    assert difference.by_role() == {
        "params": (100, 50),
        "activations": (69, 49),
        "temporaries": (7, 9),
        "code": (3, 3),
    }


def test_reports_without_buffers_are_compared_by_role(reports: Any) -> None:
    full = reports.small()
    bare = dataclasses.replace(full, buffers=(), moments=("",), peak_moment=0, host_peak_moment=0)
    for difference in (diff(bare, full), diff(full, bare), diff(bare, bare)):
        assert_adds_up(difference)
        assert {row.delta_bytes for row in difference.rows} == {0}
        assert {row.owner for row in difference.rows} == {
            "params",
            "activations",
            "temporaries",
            "fragmentation",
            "state",
        }


def test_bytes_that_no_buffer_owns_are_unattributed(reports: Any) -> None:
    report = reports.small()
    larger = dataclasses.replace(report, device=dataclasses.replace(report.device, temp_bytes=1000))
    difference = diff(report, larger)
    assert_adds_up(difference)
    assert difference.rows[0].role == "unattributed"


def test_an_empty_report_can_be_compared(reports: Any) -> None:
    empty = reports.make([], [""])
    difference = diff(empty, reports.small())
    assert_adds_up(difference)
    assert "0 B -> 145 B (+145 B)" in repr(difference)
    assert diff(empty, empty).rows == ()


def test_other_targets_and_versions_are_noted(reports: Any) -> None:
    one = reports.small(notes=(), versions={"jax": "0.10.1", "libtpu": None})
    two = reports.small(notes=(), versions={"jax": "0.10.2", "libtpu": "0.0.51"}, name="v5e:1x1")
    assert diff(one, two).notes == (
        "the targets differ: v5p:1x1x1 before, v5e:1x1 after",
        "the versions differ: jax 0.10.1 before, 0.10.2 after; libtpu none before, 0.0.51 after",
    )
    assert diff(one, one).notes == ()


def test_json_holds_the_rows_and_both_reports(reports: Any, tmp_path: Path) -> None:
    difference = diff(reports.small(), reports.small(device=SpaceBytes(argument_bytes=100, temp_bytes=50)))
    difference.to_json(tmp_path / "diff.json")
    data = json.loads((tmp_path / "diff.json").read_text())
    assert data["delta_bytes"] == 5 == sum(row["delta_bytes"] for row in data["rows"] if row["space"] == "device")
    for side in ("before", "after"):
        (tmp_path / "side.json").write_text(json.dumps(data[side]))
        assert MemoryReport.from_json(tmp_path / "side.json") == getattr(difference, side)


@pytest.mark.parametrize("view", ["to_json", "to_html", "to_png"])
def test_a_view_that_cannot_be_written_is_an_output_error(view: str, reports: Any, tmp_path: Path) -> None:
    if view == "to_png":
        pytest.importorskip("matplotlib", reason="needs matplotlib: install the report extra")
    difference = diff(reports.small(), reports.small())
    getattr(difference, view)(tmp_path / "view")
    assert (tmp_path / "view").stat().st_size > 1000
    with pytest.raises(OutputError, match=r"cannot be written[\s\S]*hint: give a file"):
        getattr(difference, view)(tmp_path / "missing" / "view")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_names_what_changed(width: int, reports: Any, tmp_path: Path) -> None:
    from rich.console import Console

    difference = diff(reports.llm(), reports.llm(24, 5000, batch=12))
    with (tmp_path / "out.txt").open("w") as file:
        difference.print(Console(width=width, file=file), top=5)
    text = (tmp_path / "out.txt").read_text()
    assert max(map(len, text.splitlines())) <= width
    assert "+3.91 GiB" in text and "-856.34 MiB" in text and "-10.50 GiB" in text
    assert "8 × " in text and "owners did not change" in text


def test_arguments_without_names_are_listed_by_their_numbers(reports: Any) -> None:
    from rich.console import Console

    paths = ("2", "3", "layers/0/w", "layers/1/w")
    sides = [reports.make([buffer("other", size, path=path) for path in paths], [""]) for size in (2**20, 2**21)]
    for view in (sides[0], diff(*sides)):
        file = io.StringIO()
        view.print(Console(width=120, file=file))
        (row,) = (line for line in file.getvalue().splitlines() if "2, 3" in line)
        assert "×" not in row
        assert "2 × layers/*/w" in file.getvalue()


def test_versions_name_the_cuda_plugin_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"jax": "0.10.2", "jax-cuda13-plugin": "0.10.2"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert versions() == {
        "lowtide": None,
        "jax": "0.10.2",
        "jaxlib": None,
        "libtpu": None,
        "jax-cuda13-plugin": "0.10.2",
    }
