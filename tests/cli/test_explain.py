"""`lowtide explain` on a user's file, and every way to call it wrongly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.memory import MemoryReport, analyze


def test_it_prints_the_report_and_writes_its_views(lowtide: Any, folder: Path) -> None:
    files = [f"--{kind}={folder / f'report.{kind}'}" for kind in ("html", "png", "json")]
    status, printed, _ = lowtide("explain", "train.py:make_step", "--target", "cpu", "--set", "batch=8", *files)
    assert status == 0
    assert "Compiled bytes on one device of cpu" in printed
    assert "layers.loss" not in printed
    report = MemoryReport.from_json(folder / "report.json")
    assert report.by_role["params"] == 2 * 128 * 128 * 4
    assert report.by_role["batch"] == 8 * 128 * 4
    assert report.device.alias_bytes == 2 * 128 * 128 * 4, "the donation was not passed on"
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (folder / "report.html").read_text()
    assert printed.count("wrote ") == 3
    assert re.search(r"Changes that would save memory\n  [a-z-]+: .*, saves about .* \(estimated\)", printed)
    _, printed, _ = lowtide("explain", "train.py:make_step", "--target", "cpu", "--no-remedies")
    assert "Changes that would save memory" not in printed


def test_it_says_what_analyze_says(lowtide: Any, folder: Path) -> None:
    assert lowtide("explain", "train.py:pair", "--target", "cpu", "--json", "report.json")[0] == 0
    sys.path.insert(0, str(folder))
    try:
        import train

        job = train.pair()
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("train")
    same = analyze(job[0], *job[1], target="cpu")
    assert MemoryReport.from_json(folder / "report.json").device == same.device


@pytest.mark.tpu_aot
def test_several_targets_get_a_report_and_a_file_each(lowtide: Any, folder: Path) -> None:
    flags = ("--set", "batch=8", "--target", "cpu", "--target", "v5e:2x2", "--json", "report.json", "--top", "2")
    status, printed, _ = lowtide("explain", "train.py:on_mesh", *flags)
    assert status == 0
    assert "one device of cpu" in printed
    assert "one device of v5e:2x2" in printed
    reports = [MemoryReport.from_json(folder / name) for name in ("report-cpu.json", "report-v5e-2x2.json")]
    assert [report.target.name for report in reports] == ["cpu", "v5e:2x2"]
    # The function made its mesh of the target's devices: 8 rows are 2 on each of four chips.
    batch = next(b for b in reports[1].peak if b.role == "batch")
    assert batch.shape == (2, 128)
    assert not (folder / "report.json").exists()


@pytest.mark.parametrize("job", ["make_step", "pair", "anything", "needs"])
def test_every_form_of_a_job_works(job: str, lowtide: Any) -> None:
    assert lowtide("explain", f"train.py:{job}", "--target", "cpu", "--set", "batch=2")[0] == 0


def test_what_is_no_literal_is_text(lowtide: Any) -> None:
    assert lowtide("explain", "train.py:text", "--target", "cpu", "--set", "kind=b c")[0] == 0


def test_neither_the_path_nor_the_modules_stay_changed(lowtide: Any) -> None:
    before = list(sys.path), list(sys.argv)
    assert lowtide("explain", "train.py:pair", "--target", "cpu")[0] == 0
    assert (list(sys.path), list(sys.argv)) == before
    assert "train" not in sys.modules


def test_a_file_may_be_called_like_a_module_that_is_loaded(lowtide: Any, folder: Path) -> None:
    (folder / "json.py").write_text((folder / "train.py").read_text())
    assert lowtide("explain", f"{folder}/json.py:pair", "--target", "cpu")[0] == 0
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], r"'train.py' does not name a function in a file"),
        (["train.py:"], r"does not name a function in a file"),
        (["train.py:a.b"], r"hint: use FILE.py:NAME"),
        (["trian.py:make_step"], "near misses: train.py"),
        (["nowhere/train.py:make_step"], "there is no such file"),
        (["train.py:mak_step"], "near misses: make_step"),
        (["train.py:NUMBER"], "train.py:NUMBER is not a function"),
        (["train.py:nothing"], "the return value of train.py:nothing is not a job"),
        (["train.py:one"], "got: a tuple of 1: function"),
        (["train.py:not_callable"], "must be a function, not"),
        (["train.py:typo"], "did you mean 'args'?"),
        (["train.py:make_step", "--set", "bath=3"], "did you mean 'batch'?"),
        (["train.py:make_step", "--set", "batch"], "--set needs KEY=VALUE"),
        (["train.py:make_step", "--set", "batch=1", "--set", "batch=2"], "--set batch is given twice"),
        (["train.py:on_mesh", "--set", "target=cpu"], "name the target with --target"),
        (["train.py:needs"], "train.py:needs needs a value for batch"),
        (["train.py:make_step", "--target", "v9"], "unknown target 'v9'"),
        (["train.py:make_step", "--json", "nowhere/report.json"], "nowhere/report.json: cannot be written"),
        (["train.py:make_step", "--top", "0"], "'0' is not a positive whole number"),
    ],
)
def test_mistakes_in_arguments_are_errors_without_tracebacks(arguments: Any, message: str, lowtide: Any) -> None:
    status, _, errors = lowtide("explain", *arguments)
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("job", "lines"),
    [
        (
            "broken",
            ["layers.py", "KeyError: 'key'", "and then:", "layers.fails()", "ValueError: a value of mine"],
        ),
        ("bad_shapes", ["layers.py", "return x @ jnp.ones((3, 3))", "TypeError: dot_general"]),
        ("leaves", ["train.py", "SystemExit: good bye"]),
        ("text", ["AssertionError: a"]),
    ],
)
def test_what_the_users_code_raises_is_shown_with_their_frames(job: str, lines: list[str], lowtide: Any) -> None:
    status, _, errors = lowtide("explain", f"train.py:{job}", "--target", "cpu")
    assert status == 1
    assert errors.lstrip("\n").startswith("error in the code of train.py\n")  # Rich 14 leaves a line empty above
    assert [line for line in lines if line not in errors] == []
    assert "site-packages" not in errors
    assert "lowtide/" not in errors
    assert "JAX has removed" not in errors


def test_a_file_that_cannot_be_imported_is_shown_like_python_does(lowtide: Any, folder: Path) -> None:
    (folder / "syntax.py").write_text("def f(:\n")
    status, _, errors = lowtide("explain", "syntax.py:f")
    assert status == 1
    assert "SyntaxError" in errors
    assert "def f(:" in errors
    (folder / "missing.py").write_text("import no_such_module\n")
    status, _, errors = lowtide("explain", "missing.py:f")
    assert status == 1
    assert "import no_such_module" in errors
    assert "frozen" not in errors


def test_a_mistake_in_the_last_target_costs_no_compilation(lowtide: Any, folder: Path) -> None:
    status, printed, errors = lowtide("explain", "train.py:pair", "--target", "cpu", "--target", "h1000")
    assert (status, printed) == (2, "")
    assert "near misses: h100" in errors


def test_a_target_under_two_names_is_compiled_once(lowtide: Any, folder: Path) -> None:
    flags = ("--target", "cpu", "--target", "cpu", "--json", "report.json")
    status, printed, _ = lowtide("explain", "train.py:pair", *flags)
    assert (status, printed.count("one device of cpu")) == (0, 1)
    assert (folder / "report.json").exists()


def test_a_folder_is_called_a_folder(lowtide: Any, folder: Path) -> None:
    (folder / "steps.py").mkdir()
    status, _, errors = lowtide("explain", "steps.py:pair", "--target", "cpu")
    assert (status, "steps.py is a folder" in errors) == (2, True)


def test_two_views_do_not_share_a_file(lowtide: Any, folder: Path) -> None:
    status, printed, errors = lowtide("explain", "train.py:pair", "--html", "one", "--json", f"{folder}/./one")
    assert (status, printed) == (2, "")
    assert "two outputs cannot share a file" in errors


BOTH_JOBS = """
import sys
from lowtide.cli import main

print([main([sys.argv[1], f"train.py:{job}", "--target", "cpu"]) for job in ("pair", "fails")])
"""


@pytest.mark.processes
@pytest.mark.parametrize("command", ["explain", pytest.param("fits", marks=pytest.mark.slow)])
def test_a_terminal_without_unicode_gets_the_report(command: str, folder: Path) -> None:
    source = (folder / "train.py").read_text() + "\n\ndef fails():\n    raise ValueError('größer ✓')\n"
    (folder / "train.py").write_text(source)
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1" if command == "fits" else "ascii"}
    words = [sys.executable, "-c", BOTH_JOBS, command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == b"[0, 1]", done.stderr
    assert b"UnicodeEncodeError" not in done.stderr
    assert b"UnicodeDecodeError" not in done.stderr
    assert b"ValueError: gr" in done.stderr
