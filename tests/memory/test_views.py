"""Views of reports: what they say adds up to the report, and what is read back equals what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.core import OutputError, ReportError
from lowtide.memory import MemoryReport

# --- JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llm", "small", "empty"])
def test_a_report_is_read_back_as_it_was_written(kind: str, reports: Any, tmp_path: Path) -> None:
    report = reports.make([], [""]) if kind == "empty" else getattr(reports, kind)(versions={"lowtide": "0.0.9"})
    report.to_json(tmp_path / "report.json")
    again = MemoryReport.from_json(tmp_path / "report.json")
    assert again == report
    assert again.versions == report.versions
    assert again.peak == report.peak


def test_json_of_a_large_program_stays_small(reports: Any, tmp_path: Path) -> None:
    report = reports.llm()
    report.to_json(tmp_path / "report.json")
    assert len(report.buffers) > 2_300
    assert (tmp_path / "report.json").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read\n  got: No such file[\s\S]*hint: give a file that"),
        ("not json", r"the file is not JSON\n  got: Expecting value"),
        (b"\xff\xfe{", r"the file is not JSON"),
        ("[1, 2]", r"not a memory report\n  expected: a key \"schema_version\""),
        ('{"loss": 1}', r"not a memory report"),
        ('{"schema_version": 1}', r"another version[\s\S]*expected: schema_version 2\n  got: 1\nhint: make the report"),
        ('{"schema_version": 2}', r"damaged or incomplete\n  got: no key 'device'"),
    ],
)
def test_what_is_no_report_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReportError, match=message):
        MemoryReport.from_json(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peak_moment", 9, "outside of the 4 moments"),
        ("buffers", [{"space": "device", "role": "x", "num_bytes": 1, "start": 0, "end": 4}], "outside of the 4"),
        ("buffers", [{"size": 1}], "damaged"),
        ("device", {"argument_bytes": 1, "total_bytes": 2}, "the parts of device add up to 1, not 2"),
        ("target", {"name": "v9", "wings": 2}, "unknown fields: wings"),
        ("moments", None, "damaged"),
    ],
)
def test_a_damaged_report_is_refused(key: str, value: Any, message: str, reports: Any, tmp_path: Path) -> None:
    data = {**reports.small().to_dict(), key: value}
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ReportError, match=message):
        MemoryReport.from_json(tmp_path / "report.json")


@pytest.mark.parametrize("view", ["to_json"])
@pytest.mark.parametrize("place", ["missing/report", "folder"])
def test_a_view_that_cannot_be_written_is_an_output_error(view: str, place: str, reports: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"report cannot be written\n  got: .*\nhint: give a file"):
        getattr(reports.small(), view)(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
