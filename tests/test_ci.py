"""The choice of tests that `.ci/run` adds to `make test`."""

from __future__ import annotations

import collections
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "ci.py"
spec = importlib.util.spec_from_file_location("lowtide_ci", SCRIPT)
assert spec is not None and spec.loader is not None
ci = importlib.util.module_from_spec(spec)
sys.modules["lowtide_ci"] = ci
spec.loader.exec_module(ci)

LAYERS = ci.read_layers()


@pytest.mark.parametrize(
    ("files", "packages"),
    [
        (["src/lowtide/train/_loop.py"], {"train", "finetune", "cli"}),
        (["src/lowtide/core/_paths.py"], set().union(*LAYERS)),
        (["src/lowtide/optim/_packed.py", "docs/index.md"], {"optim", "train", "finetune", "cli"}),
        (["src/lowtide/memory/advice/_saving.py"], set().union(*LAYERS[4:], {"memory"})),
        (["src/lowtide/__init__.py"], set().union(*LAYERS)),
        (["src/lowtide/ext/_nnx.py"], {"ext"}),
        (["src/lowtide_pytest.py"], {"testing"}),
        (["benchmarks/lora_step.py"], set()),
    ],
)
def test_a_change_affects_its_packages_and_those_of_higher_layers(files, packages):
    change = ci.affected_by(files, LAYERS)
    assert change.packages == packages | {ci.TOP}
    assert not change.is_everything


def test_documentation_and_tests_alone_affect_no_package():
    files = [
        "README.md",
        "tests/train/test_loop.py",
        "tests/golden/schedules/1f1b.txt",
        "tests/golden/peers/models/test_families.safetensors",
        "tests/cli/conftest.py",
        "tests/models/kinds.py",
    ]
    change = ci.affected_by(files, LAYERS)
    assert change.packages == set()
    affected = {
        "tests/train/test_loop.py": True,
        "tests/pipeline/test_order.py": True,
        "tests/models/test_families.py": True,
        "tests/models/test_decoder.py": True,  # imports tests/models/kinds.py
        "tests/models/test_saves.py": False,
        "tests/cli/test_fits.py": True,
        "tests/train/test_best.py": False,
        "tests/adapters/test_peft_kinds.py": True,
        "tests/adapters/test_experts.py": True,  # imports a test module that does
        "tests/adapters/test_lora.py": False,
    }
    assert {path: ci.is_changed(ci.Case(path, frozenset({"slow"})), change) for path in affected} == affected


def test_a_test_is_affected_by_every_package_that_its_file_uses():
    change = ci.affected_by(["src/lowtide/train/_loop.py"], LAYERS)
    using = {
        "tests/distributed/test_sharding.py": True,
        "tests/integration/test_resume.py": True,
        "tests/models/test_load_memory.py": True,  # runs a benchmark
        "tests/report/test_views.py": False,
    }
    assert {path: ci.is_above(ci.Case(path, frozenset({"slow"})), change) for path in using} == using


def test_a_file_that_was_moved_is_changed_under_both_names(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    monkeypatch.setattr(ci, "ROOT", tmp_path)
    git("init", "-q")
    git("config", "user.email", "a@b")
    git("config", "user.name", "a")
    (tmp_path / "old name.py").write_text("text\n" * 9)
    git("add", "-A")
    git("commit", "-qm", "first")
    git("mv", "old name.py", "new.py")
    git("commit", "-qm", "second")
    (tmp_path / "untracked.py").write_text("")
    assert ci.changed_files("HEAD~1") == ["new.py", "old name.py", "untracked.py"]
    assert ci.changed_files("0" * 40) is None


def test_selected_tests_without_a_result_are_an_error(tmp_path):
    selection, log = tmp_path / "selection.txt", tmp_path / "log"
    selection.write_text("a::b\na::c\na::d\n")
    log.write_text("=== 1 passed, 1 skipped in 1s ===\n")
    with pytest.raises(SystemExit, match="not all selected tests ran\n  expected: 3 results"):
        ci.check_ran(selection, [log])
    log.write_text("=== 1 passed, 1 skipped, 1 xfailed in 1s ===\n")
    assert "all 3 selected tests" in ci.check_ran(selection, [log])


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints/oldest.txt", "tests/conftest.py", "scripts/ci.py"])
def test_a_file_that_all_tests_share_affects_everything(file):
    change = ci.affected_by(["src/lowtide/train/_loop.py", file], LAYERS)
    assert change.is_everything
    assert file in change.reason


def test_every_case_is_selected_or_counted_as_left_out():
    slow, fast, aot = frozenset({"slow"}), frozenset({"tpu_aot"}), frozenset({"slow", "tpu_aot"})
    cases = [
        ci.Case("tests/train/test_loop.py::test_fast", fast),
        ci.Case("tests/core/test_grad.py::test_bytes[a]", aot),
        ci.Case("tests/core/test_grad.py::test_bytes[b]", aot),
        ci.Case("tests/core/test_grad.py::test_bytes[c]", frozenset({"slow", "gpu_aot"})),
        ci.Case("tests/core/test_grad.py::test_first_bytes", aot | {"sentinel"}),
        ci.Case("tests/train/test_fit.py::test_slow[a]", slow),
        ci.Case("tests/integration/test_kills.py::test_slow[b]", slow),
        ci.Case("tests/models/test_files.py::test_peers", slow | {"peers"}),
        *(ci.Case(f"tests/{folder}/test_units.py::test_{i}[{case}]", slow)
          for folder in ("core", "cli") for i in range(40) for case in "ab"),
    ]  # fmt: skip
    change = ci.affected_by(["src/lowtide/train/_loop.py"], LAYERS)
    rotations = [ci.select(cases, change, rotation) for rotation in range(ci.NUM_ROTATIONS)]
    always = [case.id for case in (cases[1], cases[3], cases[5], cases[6])]
    for selected, report in rotations:
        assert [case.id for case in selected][:4] == always
        assert sum(int(line.split()[0]) for line in report[1:]) == len(cases)
    rotating = collections.Counter(case.id for selected, _ in rotations for case in selected[4:])
    # Tests below the change run in every fourth rotation, those above it in every third; one case of each.
    assert rotating == {f"tests/{folder}/test_units.py::test_{i}[a]": times
                        for folder, times in (("core", 3), ("cli", 4)) for i in range(40)}  # fmt: skip


def test_all_cases_of_a_changed_package_are_selected():
    cases = [ci.Case(f"tests/cli/test_fits.py::test_values[{index}]", frozenset({"slow"})) for index in range(9)]
    change = ci.affected_by(["src/lowtide/cli/_fits.py"], LAYERS)
    assert ci.select(cases, change, 0)[0] == cases


def test_a_commit_of_another_history_selects_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(ci, "VERIFIED", tmp_path / "verified")
    assert ci.read_change().is_everything
    ci.VERIFIED.write_text(json.dumps({"commit": "0" * 40}))
    change = ci.read_change()
    assert change.is_everything
    assert "not in this history" in change.reason


def test_only_a_complete_run_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(ci, "VERIFIED", tmp_path / "verified")
    log = tmp_path / "all.log"
    answers = {"status": "", "rev-parse": "f" * 40}
    monkeypatch.setattr(ci, "_git", lambda *arguments: answers[arguments[0]])
    log.write_text("==== 2 failed, 5 passed in 3.00s ====\n")
    with pytest.raises(SystemExit, match="not written: expected tests that passed"):
        ci.write_verified([log])
    log.write_text("==== 5 passed, 1 skipped in 3.00s ====\n=== 7 passed in 1s ===\n")
    answers["status"] = " M src/lowtide/core/_paths.py"
    with pytest.raises(SystemExit, match="the working tree differs from the commit: src/lowtide/core/_paths.py"):
        ci.write_verified([log])
    answers["status"] = "?? .ci/verified"
    ci.write_verified([log])
    verified = json.loads(ci.VERIFIED.read_text())
    assert {key: verified[key] for key in ("commit", "passed", "skipped")} == {
        "commit": "f" * 40,
        "passed": 12,
        "skipped": 1,
    }
