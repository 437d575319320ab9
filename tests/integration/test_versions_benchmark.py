"""`benchmarks/versions.py` keeps what it can vouch for, and refuses what it cannot read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import versions  # noqa: E402

sys.path.remove(str(BENCHMARKS))

OLD = {"jax": "0.10.2", "optax": "0.2.8"}
TODAY = {"commit": "a", "date": "2026-11-23", "versions": OLD, "label": "compiled", "targets": {"cpu": {}, "h100": {}}}


def run(monkeypatch: pytest.MonkeyPatch, path: Path, commit: str, jax: str, *words: str) -> dict[str, Any]:
    """Compile nothing, and write the file."""
    made = {"commit": commit, "date": "2026-12-01", "versions": {**OLD, "jax": jax}}
    monkeypatch.setattr(versions, "header", lambda command: made)
    monkeypatch.setattr(versions, "in_child", lambda name, reports: {"program": {"device_bytes": 1}})
    monkeypatch.setattr(sys, "argv", ["versions.py", "--json", str(path), *words])
    versions.main()
    return json.loads(path.read_text())


def test_other_targets_stay_with_what_they_were_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "versions.json"
    path.write_text(json.dumps(TODAY))
    for commit in ("b", "c"):  # from the format without `made`, and from the one with it
        content = run(monkeypatch, path, commit, "0.10.2", "--target", "cpu")
        assert content["targets"] == {"h100": {}, "cpu": {"program": {"device_bytes": 1}}}
        assert {name: made["commit"] for name, made in content["made"].items()} == {"h100": "a", "cpu": commit}
        assert content["made"]["h100"]["versions"] == OLD


def test_targets_of_other_versions_are_dropped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "versions.json"
    path.write_text(json.dumps(TODAY))
    content = run(monkeypatch, path, "b", "0.12", "--target", "cpu")
    assert [*content["targets"]] == [*content["made"]] == ["cpu"] and content["versions"]["jax"] == "0.12"
    assert "h100 is dropped: it was compiled with jax 0.10.2, optax 0.2.8" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("results/versions-jax-*.json")), ids=lambda path: path.stem)
def test_committed_results_can_be_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = versions.result(path)
    targets, made = versions.kept(path, {"commit": "x", "versions": content["versions"]}, ["cpu"])
    assert {*targets} == {*content["targets"]} == {*made}  # also what is compiled again, until it is
    assert {*versions.kept(path, {"commit": "x", "versions": {"jax": "0"}}, ["cpu"])[0]} == set()
    assert "cpu is dropped" not in capsys.readouterr().err
    versions.compare(path, path, 2.0)
    assert "0 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ('{"targets', "is no JSON"),
        ("[]", "is no result of"),
        ('{"targets": {"cpu": 1}, "versions": {"jax": "1"}}', "is no result of"),
        ('{"name": "x"}', "is no result of"),
        ('{"targets": {"cpu": {"p": 1}}, "versions": {"jax": "1"}}', "is no result of"),
        ('{"targets": {}, "versions": {"jax": "1"}, "made": {"cpu": null}}', "is no result of"),
        ('{"targets": {}, "versions": {"jax": "1"}, "made": null}', "is no result of"),
    ],
)
def test_a_file_that_is_no_result_is_refused(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "package.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=said):
        versions.compare(path, path, 2.0)
    if text is not None:
        with pytest.raises(SystemExit, match=said):
            run(monkeypatch, path, "b", "0.12")
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--compare a b --threshold nan", "nan is not a number of percent"),
        ("--compare a b --threshold -1", "-1 is not a number of percent"),
        ("--compare a b --target v5e", "does nothing with --target"),
        ("--threshold 3", "--threshold is for --compare"),
    ],
)
def test_a_command_line_that_says_nothing_is_refused(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        versions.main()
    assert said in capsys.readouterr().err
