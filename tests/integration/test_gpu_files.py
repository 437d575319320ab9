"""What commands, files and tests of a GPU day say, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import gpu  # noqa: E402
import gpu_tests  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """`benchmarks/gpu.py` with these words."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_a_case_lacked_and_is_here_now_is_due() -> None:
    rows: dict[str, Any] = {"a": {"ok": True}, "b": {"ok": False, "not_here": ["no_such_module"]}}
    content = {"complete": True, "cases": ["a", "b"], "cases_of": _gpu.cases_of(), "rows": rows}
    assert _gpu.is_complete(content)
    rows["b"]["not_here"] = ["json"]
    assert not _gpu.is_complete(content)


@pytest.mark.parametrize(
    "fields",
    [
        {"complete": "yes"},
        {"rows": {}},
        {"cases": []},
        {"cases": ["a", "b"]},
        {"cases_of": "of an earlier day"},
        {"rows": {"a": {"ok": "yes"}}},
        {"rows": {"a": {"ok": False, "not_here": None}}},
    ],
)
def test_a_part_is_complete_by_its_cases(fields: dict[str, Any]) -> None:
    content = {"complete": True, "cases": ["a"], "cases_of": _gpu.cases_of(), "rows": {"a": {"ok": True}}}
    assert _gpu.is_complete(content) and not _gpu.is_complete(content | fields)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--wheels x --python 3", "'3' is not a version such as 3.12"),
        ("--wheels x --python 2.7", "Lowtide needs Python 3.11 or newer, not 2.7"),
        ("--list --summary", "not allowed with argument"),
        ("--rehearse --summary", "not allowed with argument"),
        ("--summary --part smoke", "--part says nothing of what is asked for"),
        ("--list --out x", "--out says nothing of what is asked for"),
        ("--python 3.12", "--python says nothing of what is asked for"),
        ("--summary --out no/such/folder", "no/such/folder is not there"),
        ("--rehearse --out README.md", "README.md is no folder"),
        ("--minutes x", "x is not a positive number of minutes"),
    ],
)
def test_a_command_line_that_says_nothing_is_refused(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert said in capsys.readouterr().err


def test_a_child_that_fails_says_why_in_its_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"^the child ended with 1: ValueError: no such luck$"):
        _gpu.check_child("the child", [sys.executable, "-c", "raise ValueError('no such luck')\n" + "#" * 5000])
    assert "ValueError: no such luck" in capfd.readouterr().err
    _gpu.check_child("the child", [sys.executable, "-c", "print()"], stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Traceback\nValueError: a\n\nhint: b", "ValueError: a"),
        ("usage: x\nlowtide: error: no such flag", "lowtide: error: no such flag"),
        ("log\nerror [LT003] num_steps is out of range\n  got: -1", "error [LT003] num_steps is out of range"),
        ("killed at its limit\nsome log", "killed at its limit"),
        ("", "?"),
    ],
)
def test_the_reason_is_the_error_itself(text: str, said: str) -> None:
    assert _gpu.reason(text) == said


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one" time="1"/>
<testcase classname="tests.a.TestX" name="test_one" time="2"><failure message="no">text</failure></testcase>
<testcase classname="tests.a.TestX" name="test_one" time="2"><error message="teardown">text</error></testcase>
<testcase classname="tests.b" name="test_one" time="3"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_of_tests_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    row = gpu_tests.outcomes(tmp_path / "junit.xml")
    assert (row["num_passed"], row["num_failed"], row["num_skipped"]) == (1, 1, 1)
    assert row["tests"]["tests.a.TestX.test_one"]["message"] == "no"


def test_reading_commands_move_nothing_and_look_at_their_own_files_alone(tmp_path: Path) -> None:
    files = {"package.json": "{}", "web/tsconfig.json": "[", "peak.json": '{"rows"', "h200/tests.json": '{"part": "x"}'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "smoke.json").mkdir()
    done = call("--summary", "--out", str(tmp_path))
    assert done.returncode == 0 and "package" not in done.stderr
    assert "peak.json is no result of peak, and left out" in done.stderr
    assert {name: (tmp_path / name).read_text() for name in files} == files
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == len(files)
