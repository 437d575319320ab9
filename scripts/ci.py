"""Choose what continuous integration runs after `make test`, and record what `make test-all` verified.

    python scripts/ci.py select --output FILE    print the selection and why; write the test ids, one a line
    python scripts/ci.py ran FILE LOG ...        fail unless the logs hold a result for each selected test
    python scripts/ci.py sixth                   print the sixth of the pages that the commit chooses, 0 to 5
    python scripts/ci.py begin FILE              fail where the working tree differs from the commit; write its id
    python scripts/ci.py verified FILE LOG ...   write .ci/verified from the logs of a complete run that passed

The selection has four parts, all taken from the slow tests that `make test` leaves out:

1. every slow case of each package that changed since the commit in `.ci/verified`;
2. one slow case of every test that compiles for a TPU or GPU ahead of time;
3. one slow case of a third of the tests of the packages in layers above a changed one. The layers come from the
   import-linter contract in `pyproject.toml`, so a change cannot affect other packages. A test belongs to the package
   of its folder and to each package that its file or one of its helpers uses;
4. one slow case of a quarter of the other tests.

The hash of the commit chooses the third, the quarter and the case, so later commits run other tests and cases. A test
has one case on each kind of device in parts 2 to 4. `make test-all` runs all cases of all tests.

A change to a file that all tests share (`tests/conftest.py`, `pyproject.toml`, `constraints/`) selects every slow test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import datetime
import fnmatch
import functools
import hashlib
import io
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERIFIED = ROOT / ".ci" / "verified"
LIVE = {"peers", "gpu", "rehearsal"}
"""Markers of tests that need other software, a GPU or half an hour; `make test-all` runs all except GPU tests."""
AHEAD_OF_TIME = {"tpu_aot", "gpu_aot"}
SHARED = (
    "pyproject.toml",
    "constraints/*",
    "tests/conftest.py",
    "tests/peers.py",
    "Makefile",
    ".ci/run",
    "scripts/ci.py",
)
"""Patterns of files that can change the result of any test."""
TOP = "above all layers"
PACKAGES = {
    "tests/integration/test_kills.py": {"train", "distributed"},
    "tests/integration/test_resume.py": {"train", "finetune", "cli"},
    "tests/integration/test_distributed.py": {"distributed", "train", "cli"},
    "tests/integration/test_damaged_files.py": {"train"},
}
"""Packages that an integration test exercises. Other tests outside the packages' folders rank above all layers."""
SIDE_PACKAGES = {"ext", "testing"}
"""Packages outside the layers. Their tests run when they change, and otherwise like tests above all layers."""
FOLDERS_ABOVE = ("benchmarks", "docs", "examples", "scripts")
"""Folders that can use every package; a test that names one ranks above all layers."""
MAY_SKIP = r"wandb|unshare"
"""Pattern of the reasons to skip tests in a complete run: a library that needs an account, and rights of root."""
NUM_ROTATIONS = 12
"""Number of different selections of thirds and quarters."""
EXAMPLES = "tests/test_project.py::test_examples_run"
"""Test of the examples in docstrings; its parameter is a package."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A collected test: its id and the names of its markers."""

    id: str
    markers: frozenset[str]

    @property
    def path(self) -> str:
        return self.id.partition("::")[0]

    @property
    def function(self) -> str:
        """Id without parameters."""
        return self.id.partition("[")[0]


@dataclasses.dataclass(frozen=True)
class Change:
    """Changed packages, the packages and test files that they can affect, and the reason as text."""

    changed: frozenset[str]
    packages: frozenset[str]
    test_files: frozenset[str]
    reason: str
    is_everything: bool = False


# --- what changed ----------------------------------------------------------------------------------------------------


def read_layers(pyproject: Path = ROOT / "pyproject.toml") -> list[frozenset[str]]:
    """Return the packages by layer, lowest first, from the import-linter contract."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [frozenset(re.findall(r"\w+", layer)) for layer in reversed(contract["layers"])]


def packages_above(package: str, layers: Sequence[frozenset[str]]) -> set[str]:
    """Return the package and all packages of higher layers; a package outside the layers ranks above them."""
    level = next((index for index, layer in enumerate(layers) if package in layer), None)
    higher = layers[level + 1 :] if level is not None else []
    return {package, TOP}.union(*higher)


def affected_by(files: Iterable[str], layers: Sequence[frozenset[str]]) -> Change:
    """Return the packages and test files that these changed files can affect."""
    packages, test_files, changed = set[str](), set[str](), set[str]()
    for file in files:
        if any(fnmatch.fnmatch(file, pattern) for pattern in SHARED):
            return _everything(f"{file}, which all tests share")
        parts = file.split("/")
        if parts[:2] == ["src", "lowtide"] and len(parts) > 3:
            changed.add(parts[2])
        elif parts[0] == "src":  # every test uses the root module
            changed.add({"lowtide_pytest.py": "testing", "__main__.py": "cli"}.get(parts[-1], "core"))
        elif parts[0] == "tests":
            test_files.add(_tests_of(parts))
        elif parts[0] in FOLDERS_ABOVE or file == "README.md":
            test_files |= tests_that_name(file)
            if parts[0] in ("benchmarks", "examples", "scripts"):
                changed.add(TOP)
    for package in changed:
        packages |= packages_above(package, layers)
    names = ", ".join(sorted(changed)) or "no package"
    return Change(frozenset(changed), frozenset(packages), frozenset(test_files), f"packages {names}")


def tests_that_name(file: str) -> set[str]:
    """Return the test files that name or import a file outside of `src/` and `tests/`."""
    pattern = rf"\b{re.escape(Path(file).name)}\b"
    if file.endswith(".py"):
        stem = re.escape(Path(file).stem)
        pattern += rf"|\bimport {stem}\b|[\"']{stem}[\"']"
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if re.search(pattern, path.read_text("utf-8")))
    return {path.relative_to(ROOT).as_posix() for path in tests}


def _everything(reason: str) -> Change:
    return Change(frozenset(), frozenset(), frozenset(), reason, is_everything=True)


def _tests_of(parts: list[str]) -> str:
    """Return the pattern of the tests' source files that a changed file below `tests/` can affect; see `sources_of`."""
    if parts[1:3] == ["golden", "peers"]:  # a recording has the same path as its test file
        return f"tests/{'/'.join(parts[3:-1])}/{parts[-1].partition('.')[0]}.py"
    if parts[1] == "golden":  # golden schedule orders
        return "tests/pipeline/*"
    # Any test of the folder may read a data file.
    return "/".join(parts) if parts[-1].endswith(".py") else "/".join([*parts[:-1], "*"])


def changed_files(commit: str) -> list[str] | None:
    """Return the files that differ between a commit and the working tree; None if the commit is not in this history."""
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    # Without rename detection, git lists both names of a moved file.
    difference = _git("diff", "--name-only", "--no-renames", "-z", commit)
    untracked = _git("ls-files", "--others", "--exclude-standard", "-z")
    if difference is None or untracked is None:
        return None
    return [file for file in f"{difference}\0{untracked}".split("\0") if file and file != ".ci/verified"]


def read_change() -> Change:
    """Return the change since the commit in `.ci/verified`."""
    layers = read_layers()
    if not VERIFIED.exists():
        return _everything(".ci/verified does not exist")
    commit = json.loads(VERIFIED.read_text(encoding="utf-8"))["commit"]
    files = changed_files(commit)
    if files is None:
        return _everything(f"the verified commit {commit[:10]} is not in this history")
    change = affected_by(files, layers)
    return dataclasses.replace(change, reason=f"changed since {commit[:10]}: {change.reason}")


# --- the selection ---------------------------------------------------------------------------------------------------


def packages_of(path: str) -> set[str]:
    """Return the packages that the tests of a file exercise."""
    folder = path.split("/")[1]
    return PACKAGES.get(path, {TOP if folder.endswith(".py") or folder == "integration" else folder})


@functools.cache
def sources_of(path: str) -> frozenset[str]:
    """Return the test file, the files below `tests/` that it imports or runs at any depth, and its `conftest.py`."""
    sources = set[str]()
    waiting = {path, f"{path.rpartition('/')[0]}/conftest.py"}
    while waiting:
        source = waiting.pop()
        # `tests/conftest.py` is skipped: every test uses it, and it is in SHARED.
        if source in sources or source == "tests/conftest.py" or not (ROOT / source).is_file():
            continue
        sources.add(source)
        waiting |= _imported_by(source)
    return frozenset(sources)


def _imported_by(source: str) -> set[str]:
    """Return the files below `tests/` that a Python file may import or run as a script; some do not exist."""
    files = set[str]()
    for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            folder = source.split("/")[: -node.level] if node.level else []
            module = [*folder, *(node.module or "").split(".")]
            if module[0] == "tests":
                names = [[], *([alias.name] for alias in node.names)]
                files |= {"/".join(filter(None, [*module, *name])) + ".py" for name in names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+\.py", node.value):
            files |= {f"{folder}/{node.value}" for folder in (source.rpartition("/")[0], "tests")}
    return files


@functools.cache
def packages_used(path: str) -> frozenset[str]:
    """Return the packages named in the text of a test file and its helpers."""
    names = set[str]()
    for source in sources_of(path):
        text = (ROOT / source).read_text(encoding="utf-8")
        names |= set(re.findall(r"\b(?:lowtide|lt)\.(\w+)", text))
        for group in re.findall(r"^\s*from lowtide import (\([^)]*\)|.*)$", text, flags=re.MULTILINE):
            names |= set(re.findall(r"\w+", group))
        if re.search(rf"[\"'/]({'|'.join(FOLDERS_ABOVE)})[\"'/]", text):
            names.add(TOP)
    return frozenset(root_names().get(name, name) for name in names)


@functools.cache
def root_names() -> dict[str, str]:
    """Return the packages of the attributes of `lowtide`, from its stub file."""
    stub = (ROOT / "src" / "lowtide" / "__init__.pyi").read_text(encoding="utf-8")
    return {name: package for package, name in re.findall(r"^from \.(\w+) import (\w+)", stub, flags=re.MULTILINE)}


def number_of(text: str) -> int:
    """Return a number that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def is_changed(case: Case, change: Change) -> bool:
    """Return whether the case tests a changed package, or its file or one of its helpers changed."""
    if change.is_everything or packages_of(case.path) & change.changed:
        return True
    if case.function == EXAMPLES and case.id.removeprefix(f"{EXAMPLES}[").removesuffix("]") in change.changed:
        return True
    return any(fnmatch.fnmatch(source, pattern) for source in sources_of(case.path) for pattern in change.test_files)


def is_above(case: Case, change: Change) -> bool:
    """Return whether the case tests or uses a package that the change can affect."""
    packages = {TOP if package in SIDE_PACKAGES else package for package in packages_of(case.path)}
    return bool((packages | packages_used(case.path)) & change.packages)


def select(cases: Sequence[Case], change: Change, seed: int) -> tuple[list[Case], list[str]]:
    """Return the selected cases in their order, and report lines that explain the selection.

    `seed` chooses the third, the quarter, and the case of a test that has several.
    """
    selected = list[Case]()
    counts = dict.fromkeys(("make test", "changed", "ahead of time", "above", "quarter", "cases", "tests"), 0)
    chosen = {test: tests[seed // NUM_ROTATIONS % len(tests)] for test, tests in slow_cases(cases).items()}
    for case in cases:
        if case.markers & LIVE:
            continue
        rotation = number_of(case.function) + seed
        if not is_slow(case):
            part = "make test"
        elif is_changed(case, change):
            part = "changed"
        elif chosen[test_of(case)] is not case:
            part = "cases"
        elif case.markers & AHEAD_OF_TIME:
            part = "ahead of time"
        elif is_above(case, change):
            part = "above" if rotation % 3 == 0 else "tests"
        else:
            part = "quarter" if rotation % 4 == 0 else "tests"
        counts[part] += 1
        if part in ("changed", "ahead of time", "above", "quarter"):
            selected.append(case)
    num_live = sum(bool(case.markers & LIVE) for case in cases)
    changed = "every slow test" if change.is_everything else f"slow tests of {_listed(change.changed)}"
    above = _listed(change.packages - change.changed)
    lines = [
        f"selection: {change.reason}",
        f"  {counts['make test']:5} run in `make test`",
        f"  {counts['changed']:5} selected: {changed}, and of changed test files",
        f"  {counts['ahead of time']:5} selected: a case of every test that compiles for absent TPUs and GPUs",
        f"  {counts['above']:5} selected: a case of a third of the tests above them: {above}",
        f"  {counts['quarter']:5} selected: a case of a quarter of the other tests",
        f"  {counts['tests']:5} left out by the rotation",
        f"  {counts['cases']:5} left out: further cases of tests whose package did not change",
        f"  {num_live:5} left out: they need other libraries, a GPU or the rehearsal",
    ]
    return selected, lines


def is_slow(case: Case) -> bool:
    return "slow" in case.markers and "sentinel" not in case.markers


def test_of(case: Case) -> tuple[str, frozenset[str]]:
    """Return the test function of a case, and its kind of device: one case runs on CPUs, one on TPUs, one on GPUs."""
    return case.function, case.markers & AHEAD_OF_TIME


def slow_cases(cases: Iterable[Case]) -> dict[tuple[str, frozenset[str]], list[Case]]:
    """Return the slow cases of each test."""
    tests = dict[tuple[str, frozenset[str]], list[Case]]()
    for case in cases:
        if is_slow(case) and not case.markers & LIVE:
            tests.setdefault(test_of(case), []).append(case)
    return tests


def _listed(packages: Iterable[str]) -> str:
    return ", ".join(sorted(packages)) or "no package"


def collect() -> list[Case]:
    """Return all test cases of the project."""

    class Collector:
        cases: list[Case] = []

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.cases = [
                Case(item.nodeid, frozenset(marker.name for marker in item.iter_markers())) for item in session.items
            ]

    collector, printed = Collector(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")]
        status = pytest.main(arguments, plugins=[collector])
    if status != pytest.ExitCode.OK:
        sys.exit(f"{printed.getvalue()}\nerror: collecting the tests failed with status {int(status)}")
    return collector.cases


def seed_of(commit: str | None) -> int:
    """Return the number that chooses the rotation; 0 without a commit."""
    return int((commit or "0")[:8], 16)


# --- what was verified -----------------------------------------------------------------------------------------------


def read_counts(logs: Iterable[str]) -> dict[str, int]:
    """Return the sums of the counts in the closing lines of pytest runs."""
    counts: dict[str, int] = {}
    for log in logs:
        for line in re.findall(r"^=+ (.*\d+ (?:passed|skipped|failed).*) =+$", log, flags=re.MULTILINE):
            for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)\b", line):
                counts[word] = counts.get(word, 0) + int(number)
    return counts


def check_ran(selection: Path, logs: Sequence[Path]) -> str:
    """Compare the number of results in the logs with the number of selected tests.

    xdist ends with "no tests ran" when a test id does not exist, and when its workers die during import.
    """
    selected = len(selection.read_text(encoding="utf-8").splitlines())
    counts = read_counts(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    if sum(counts.values()) < selected:
        sys.exit(f"error: not all selected tests ran\n  expected: {selected} results\n  got: {counts}")
    return f"all {selected} selected tests have a result: {counts}"


def check_clean() -> str:
    """Return the commit; exit with an error if the working tree differs from it, except for `.ci/verified`."""
    status, commit = _git("status", "--porcelain"), _git("rev-parse", "HEAD")
    if status is None or commit is None:
        sys.exit("error: git cannot read this repository\nhint: run `git status` here")
    if changed := [line[3:] for line in status.splitlines() if line[3:] != ".ci/verified"]:
        sys.exit(f"error: the working tree differs from the commit: {changed[0]}\nhint: commit, then run it again")
    return commit


def write_verified(begun: Path, logs: Sequence[Path]) -> str:
    """Write the commit, the date and the counts; return a message.

    Args:
        begun: file with the commit at which the run began.
        logs: logs of all runs of pytest.
    """
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
    counts = read_counts(texts)
    if not counts.get("passed") or counts.keys() & {"failed", "error", "errors"}:
        sys.exit(f"error: .ci/verified is not written: expected tests that passed and none that failed, got {counts}")
    num_results, num_cases = sum(counts.values()), num_complete(collect())
    if num_results < num_cases:
        sys.exit(f"error: .ci/verified is not written: expected {num_cases} results, got {num_results}")
    reasons = {
        reason for text in texts for reason in re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", text, flags=re.MULTILINE)
    }
    if unexpected := sorted(reason for reason in reasons if not re.search(MAY_SKIP, reason)):
        sys.exit(f"error: .ci/verified is not written: tests were skipped: {unexpected[0]}")
    commit = check_clean()
    if commit != (first := begun.read_text(encoding="utf-8").strip()):
        sys.exit(f"error: .ci/verified is not written: the run began at {first}, and the commit is now {commit}")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    VERIFIED.write_text(json.dumps({"commit": commit, "date": date, **counts}, indent=2) + "\n", encoding="utf-8")
    return f"wrote .ci/verified: {commit} with {counts}; commit that file"


def num_complete(cases: Iterable[Case]) -> int:
    """Return the number of results of a complete run. `make peers` runs tests with recordings a second time."""
    num_results = 0
    for case in cases:
        if "gpu" not in case.markers:
            num_results += 1 + ("recorded" in case.markers and "peers" not in case.markers)
    return num_results


def _git(*arguments: str) -> str | None:
    """Return the output of a git command without its last newline, or None if the command fails."""
    completed = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return completed.stdout.rstrip("\n") if completed.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("select", help="choose the tests of continuous integration")
    command.add_argument("--output", type=Path, required=True, help="file for the ids of the selected tests")
    command = commands.add_parser("ran", help="check that all selected tests have a result")
    command.add_argument("selection", type=Path, help="file of `select`")
    command.add_argument("logs", type=Path, nargs="+", help="output of the pytest runs")
    commands.add_parser("sixth", help="print the sixth of the pages that the commit chooses")
    command = commands.add_parser("begin", help="check that the working tree is that of the commit")
    command.add_argument("begun", type=Path, help="file for the id of the commit")
    command = commands.add_parser("verified", help="write .ci/verified")
    command.add_argument("begun", type=Path, help="file of `begin`")
    command.add_argument("logs", type=Path, nargs="+", help="output of the pytest runs")
    options = parser.parse_args(arguments)
    paths = [*getattr(options, "logs", []), *(getattr(options, name, None) for name in ("selection", "begun"))]
    if missing := [path for path in paths if path and not path.exists() and options.command != "begin"]:
        sys.exit(f"error: no such file: {missing[0]}")
    if options.command == "verified":
        print(write_verified(options.begun, options.logs))
    elif options.command == "ran":
        print(check_ran(options.selection, options.logs))
    elif options.command == "sixth":
        print(seed_of(_git("rev-parse", "HEAD")) % 6)
    elif options.command == "begin":
        options.begun.parent.mkdir(parents=True, exist_ok=True)
        options.begun.write_text(check_clean(), encoding="utf-8")
    else:
        write_selection(options.output)


def write_selection(output: Path) -> None:
    print("collecting all tests; this takes up to a minute", flush=True)
    selected, report = select(collect(), read_change(), seed_of(_git("rev-parse", "HEAD")))
    print("\n".join(report))
    output.write_text("".join(f"{case.id}\n" for case in selected), encoding="utf-8")


if __name__ == "__main__":
    main()
