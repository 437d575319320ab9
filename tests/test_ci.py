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
        (["src/lowtide/__main__.py"], {"cli"}),
        (["benchmarks/lora_step.py"], set()),
    ],
)
def test_a_change_affects_its_packages_and_those_of_higher_layers(files, packages):
    change = ci.affected_by(files, LAYERS)
    assert change.packages == packages | {ci.TOP}
    assert not change.is_everything


def test_documentation_and_tests_alone_affect_no_package():
    files = [
        "docs/index.md",
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


def test_every_slow_case_of_a_changed_package_is_selected():
    packages = {path.parent.name for path in SCRIPT.parents[1].glob("src/lowtide/*/__init__.py")}
    assert packages >= {"core", "ext", "testing"}
    for package in packages:
        change = ci.affected_by([f"src/lowtide/{package}/_x.py"], LAYERS)
        ids = [f"tests/{package}/test_x.py::test_y[{case}]" for case in "ab"]
        cases = [ci.Case(id, frozenset({"slow"})) for id in [*ids, f"{ci.EXAMPLES}[{package}]"]]
        assert ci.select(cases, change, 0)[0] == cases


def test_a_script_or_page_changes_the_tests_that_run_it():
    users = {
        "tests/forked.py": "tests/integration/test_kills.py",
        "tests/integration/killed.py": "tests/integration/test_kills.py",
        "tests/integration/distributed_worker.py": "tests/integration/test_distributed.py",
        "tests/models/killed_saves.py": "tests/models/test_saves.py",
        "README.md": "tests/integration/test_readme.py",
        "benchmarks/load_memory.py": "tests/models/test_load_memory.py",
        "examples/out_of_memory.py": "tests/integration/test_examples.py",
    }
    for file, test in users.items():
        assert ci.is_changed(ci.Case(test, frozenset({"slow"})), ci.affected_by([file], LAYERS)), file


def test_every_helper_of_tests_belongs_to_a_test():
    root = SCRIPT.parents[1]
    files = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("*.py")}
    tests = {file for file in files if Path(file).name.startswith("test_")}
    used = {source for test in tests for source in ci.sources_of(test)}
    helpers = {file for file in files - tests if not file.endswith("__init__.py")}
    assert helpers - used <= {file for file in helpers if file in ci.SHARED}


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
    seeds = range(2 * ci.NUM_ROTATIONS)
    aot, always = {cases[1].id, cases[2].id}, {cases[3].id, cases[5].id, cases[6].id}
    rotating = collections.Counter[str]()
    for seed in seeds:
        selected, report = ci.select(cases, change, seed)
        assert sum(int(line.split()[0]) for line in report[1:]) == len(cases)
        ids = {case.id for case in selected}
        assert always <= ids and len(ids & aot) == 1
        rotating.update(ids - always)
    # Tests below the change run in every fourth rotation, those above it in every third; each time one of their cases.
    expected = {f"tests/{folder}/test_units.py::test_{i}[{case}]": times
                for folder, times in (("core", 3), ("cli", 4)) for i in range(40) for case in "ab"}  # fmt: skip
    assert rotating == expected | dict.fromkeys(aot, ci.NUM_ROTATIONS)


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
    recorded = [ci.Case(f"tests/a.py::test_{index}", frozenset({"recorded"})) for index in range(6)]
    monkeypatch.setattr(ci, "collect", lambda: [*recorded, ci.Case("b", frozenset({"gpu"}))])
    log, begun = tmp_path / "all.log", tmp_path / "commit"
    answers: dict[str, str | None] = {"status": "", "rev-parse": "f" * 40}
    monkeypatch.setattr(ci, "_git", lambda *arguments: answers[arguments[0]])
    begun.write_text(ci.check_clean())

    def refuse(text, problem):
        log.write_text(text)
        with pytest.raises(SystemExit, match=problem):
            ci.write_verified(begun, [log])

    refuse("==== 2 failed, 12 passed in 3.00s ====\n", "not written: expected tests that passed")
    refuse("==== 11 passed in 3.00s ====\n", "not written: expected 12 results, got 11")
    passed = "==== 5 passed, 1 skipped in 3.00s ====\n=== 7 passed in 1s ===\n"
    refuse(f"SKIPPED [1] tests/a.py:3: needs ptxas\n{passed}", "tests were skipped: needs ptxas")
    answers["status"] = " M src/lowtide/core/_paths.py"
    refuse(passed, "the working tree differs from the commit: src/lowtide/core/_paths.py")
    answers["status"] = None
    refuse(passed, "git cannot read this repository")
    answers |= {"status": "?? .ci/verified", "rev-parse": "e" * 40}
    refuse(passed, "the run began at f+, and the commit is now e+")
    begun.write_text("e" * 40)
    ci.write_verified(begun, [log])
    verified = json.loads(ci.VERIFIED.read_text())
    assert {key: verified[key] for key in ("commit", "passed", "skipped")} == {
        "commit": "e" * 40,
        "passed": 12,
        "skipped": 1,
    }
