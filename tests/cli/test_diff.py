"""`lowtide diff`: two files in, one difference out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_it_prints_the_difference_and_writes_its_views(lowtide: Any, folder: Path) -> None:
    for batch in (4, 8):
        flags = ("--target", "cpu", "--set", f"batch={batch}", "--json", f"{batch}.json")
        assert lowtide("explain", "train.py:make_step", *flags)[0] == 0
    files = [f"--{kind}=diff.{kind}" for kind in ("html", "png", "json")]
    status, printed, _ = lowtide("diff", "4.json", "8.json", *files, "--top", "3")
    assert status == 0
    assert "Owners that changed most" in printed
    data = json.loads((folder / "diff.json").read_text())
    assert data["by_role"]["device"]["batch"] == [4 * 128 * 4, 8 * 128 * 4]
    assert (folder / "diff.png").stat().st_size > 1000
    assert "<html" in (folder / "diff.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.json", "b.json"], "a.json: the report cannot be read"),
        (["train.py", "train.py"], "the file is not JSON"),
        (["a.json", "b.json", "--html", "nowhere/d.html"], "nowhere/d.html: cannot be written"),
    ],
)
def test_what_is_no_report_is_an_error(arguments: list[str], message: str, lowtide: Any) -> None:
    status, _, errors = lowtide("diff", *arguments)
    assert status == 2
    assert message in errors
