"""The defects that scripts/plant_defects.py plants fit the code as it is, and the script reads what pytest prints."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NUM_DEFECTS = 27
KINDS = {"numbers", "bytes", "failures", "reports"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")  # where it imports ci.py from
        spec = importlib.util.spec_from_file_location("lowtide_defects", ROOT / "scripts" / "plant_defects.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "lowtide_defects", module)
        spec.loader.exec_module(module)
    return module


def test_every_defect_can_be_planted(script: ModuleType) -> None:
    defects = script.read_defects()
    assert len({defect.name for defect in defects}) == len(defects) == NUM_DEFECTS
    assert {defect.kind for defect in defects} == KINDS
    for defect in defects:
        assert defect.file.startswith(f"src/lowtide/{defect.package}/") and defect.notice.endswith("."), defect.name
        source = (ROOT / defect.file).read_text(encoding="utf-8")
        planted = defect.planted(source)  # ends the process unless the old text occurs once
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source)), defect.name


def test_every_package_has_a_defect(script: ModuleType) -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "lowtide").glob("*/__init__.py")}
    assert {defect.package for defect in script.read_defects()} == packages


@pytest.mark.parametrize(("source", "count"), [("x = 2", 0), ("x = 1; x = 1", 2)])
def test_an_old_text_that_is_not_once_in_its_file_is_an_error(script: ModuleType, source: str, count: int) -> None:
    record = {"package": "core", "kind": "numbers", "file": "x.py", "old": "x = 1", "new": "x = -1", "notice": ""}
    with pytest.raises(SystemExit, match=f"(?s)'flipped sign'.*not once in x.py.*got: {count} times"):
        script.Defect(name="flipped sign", **record).planted(source)


def test_failed_tests_are_read_from_what_pytest_prints(script: ModuleType) -> None:
    printed = """
FAILED in the output of a test is no result - and neither is this line
=========================== short test summary info ============================
FAILED tests/core/test_grad.py::test_values[a b] - assert 1 == 2
ERROR tests/core/test_grad.py::test_bytes - RuntimeError: x - y
SKIPPED [1] tests/core/test_compat.py:3: needs a GPU
"""
    assert script.read_failures(printed) == [
        "tests/core/test_grad.py::test_values[a b]",
        "tests/core/test_grad.py::test_bytes",
    ]


def test_tests_of_the_package_run_first_and_every_other_test_once(script: ModuleType) -> None:
    first, second, rest = script.test_paths(ROOT, "train")
    assert first == ["tests/train"]
    assert second == ["tests/integration", "tests/finetune", "tests/cli"]
    assert "tests/core" in rest and "tests/test_project.py" in rest
    assert script.OWN_TESTS == Path(__file__).relative_to(ROOT).as_posix()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert all(
        sum(script._is_below(file, group) for group in (first, second, rest)) == 1
        for file in files - {script.OWN_TESTS}
    )
    assert not script._is_below(script.OWN_TESTS, rest)


def test_make_test_runs_what_the_makefile_says(script: ModuleType) -> None:
    local, fast = script.read_markers((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert fast.startswith(f"{local} and (") and "$" not in fast
    with pytest.raises(SystemExit, match="give --markers"):
        script.read_markers("test:\n\tpytest\n")
