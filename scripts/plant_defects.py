"""Measure how well the tests protect the code: plant one-line defects one at a time, and report which tests catch them.

    python scripts/plant_defects.py --suite fast --output build/fast.json    what `make test` catches
    python scripts/plant_defects.py --suite ci --output build/ci.json        what `.ci/run` catches
    python scripts/plant_defects.py --commit HEAD~1 --markers "not peers and not gpu and not slow"
    python scripts/plant_defects.py --only last-token-lost --tests tests/losses/test_cross_entropy.py

scripts/defects.toml lists the defects. The script plants each one in a temporary worktree of a commit, never in the
user's files. For each defect it runs the tests of the package first, then the integration tests and the packages above,
then the rest, up to the first failure. A failing test counts as a catch if it fails again when it runs alone, and
passes without the defect; running out of time counts as failing. The script writes the output file after each defect; a
second call skips the defects in it.

`.ci/run` does not select the same tests for every commit. So the result of `--suite ci` also has the share of commits
for which the test that caught the defect runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ci

DEFECTS = Path(__file__).with_name("defects.toml")
OWN_TESTS = "tests/test_defects.py"
"""This file searches for the old texts, so it would fail with every defect. It is never run here."""
CONFIRM_SECONDS = 300
"""Time limit of a single test that runs again."""
COLLECT = """
import sys, json, dataclasses
sys.path.insert(0, sys.argv[1])
import ci
print(json.dumps([[case.id, sorted(case.markers)] for case in ci.collect()]))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """A record of scripts/defects.toml."""

    name: str
    package: str
    kind: str
    file: str
    old: str
    new: str
    notice: str
    """Effect that a user would notice, in one sentence."""

    def planted(self, source: str) -> str:
        """Return the source of the file with the defect."""
        if (count := source.count(self.old)) != 1:
            sys.exit(
                f"error: defect {self.name!r}: its old text is not once in {self.file}\n"
                f"expected: once\ngot: {count} times\nhint: change the record in scripts/defects.toml"
            )
        return source.replace(self.old, self.new)


def read_defects() -> list[Defect]:
    return [Defect(**record) for record in tomllib.loads(DEFECTS.read_text(encoding="utf-8"))["defect"]]


# --- a worktree with a defect ----------------------------------------------------------------------------------------


class Checkout:
    """A temporary worktree of a commit. Tests run in it with the current virtual environment.

    It is mutable: `with_defect` changes a file of the worktree and restores it.
    """

    def __init__(self, root: Path, commit: str) -> None:
        self.root, self.commit = root, commit
        self.env = {**os.environ, "PYTHONPATH": str(root / "src")}
        self._seconds = int(time.time())

    def check_imports(self) -> None:
        """Exit unless the Python interpreter and the console script both import the worktree's code."""
        script = Path(sys.executable).with_name("lowtide")
        for command in ([sys.executable, "-c", "import lowtide.cli"], [str(script), "--version"]):
            env = {**self.env, "PYTHONVERBOSE": "1"}
            done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
            files = set(re.findall(r"(?:code object from|matches) '?([^'\s]*/lowtide/cli/__init__\.py)", done.stderr))
            if files != {str(self.root / "src/lowtide/cli/__init__.py")}:
                sys.exit(f"error: {command[0]} does not import the worktree {self.root}\ngot: {files or done.stderr}")

    @contextlib.contextmanager
    def with_defect(self, defect: Defect) -> Iterator[None]:
        """Plant a defect for the duration of the block."""
        path = self.root / defect.file
        source = path.read_text(encoding="utf-8")
        self._write(path, defect.planted(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Python matches bytecode to source by modification time in whole seconds and by size, and two versions may
        # share both.
        self._seconds += 2
        os.utime(path, (self._seconds, self._seconds))

    def failing(self, arguments: Sequence[str], seconds: float) -> list[str] | None:
        """Return the ids of failing tests, up to the first; None when the time is over."""
        command = [sys.executable, "-m", "pytest", "-x", "--dist", "worksteal", *arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(max(seconds, 1))
            except subprocess.TimeoutExpired:
                return None
            finally:  # also ends the workers of xdist and the processes that tests started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            printed = log.read()
        failed = read_failures(printed)
        # Status 5 means that no test was selected; xdist also ends with it when its workers die during import.
        is_empty = status == 5 and "crashed" not in printed
        if not failed and status and not is_empty:
            sys.exit(f"error: pytest ended with status {status} and no test failed\n{printed[-3000:]}")
        return failed

    def collect(self) -> list[ci.Case]:
        """Return all test cases of the commit."""
        command = [sys.executable, "-c", COLLECT, str(self.root / "scripts")]
        done = subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: the tests cannot be collected\n{done.stdout[-3000:]}{done.stderr}")
        return [ci.Case(id, frozenset(markers)) for id, markers in json.loads(done.stdout.splitlines()[-1])]


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Checkout]:
    """Create a worktree of a commit for the duration of the block."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="lowtide-defects-") as folder:
        root = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(root), full)
        try:
            yield Checkout(root, full)
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ci.ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: git {arguments[0]} failed\ngot: {done.stderr.strip()}")
    return done.stdout.strip()


def read_failures(printed: str) -> list[str]:
    """Return the ids of failed tests, or files that could not be collected, from pytest's closing summary."""
    _, title, summary = printed.rpartition("short test summary info")
    summary = summary if title else ""
    return [line.split(" - ")[0] for line in re.findall(r"^(?:FAILED|ERROR) (\S.*)$", summary, flags=re.MULTILINE)]


# --- what runs, and in which order -----------------------------------------------------------------------------------


def read_markers(makefile: str) -> tuple[str, str]:
    """Return the marker expressions of all tests that run locally, and of `make test`."""
    found = dict(re.findall(r"^(LOCAL|FAST) := (.*)$", makefile, flags=re.MULTILINE))
    if len(found) != 2:
        sys.exit("error: the Makefile of this commit has no LOCAL and FAST\nhint: give --markers EXPR")
    return found["LOCAL"], found["FAST"].replace("$(LOCAL)", found["LOCAL"])


def test_paths(root: Path, package: str) -> list[list[str]]:
    """Return folders and files of tests in three groups: the package; integration and higher packages; the rest."""
    paths = {
        path.relative_to(root).as_posix()
        for path in (root / "tests").iterdir()
        if (any(path.rglob("test_*.py")) if path.is_dir() else path.match("test_*.py"))
    } - {OWN_TESTS}
    layers = ci.read_layers(root / "pyproject.toml")
    level = {name: index for index, layer in enumerate(layers) for name in layer}
    above = ci.packages_above(package, layers) - {package, ci.TOP}
    second = ["integration", *sorted(above, key=lambda name: (level[name], name))]
    groups = [[f"tests/{package}"], [f"tests/{name}" for name in second]]
    groups = [[path for path in group if path in paths] for group in groups]
    return [*groups, sorted(paths.difference(*groups))]


class Plan:
    """Arguments of the pytest runs that try to catch a defect."""

    def __init__(self, checkout: Checkout, options: argparse.Namespace, folder: Path) -> None:
        self.checkout, self.options, self.folder = checkout, options, folder
        self.local = self.markers = options.markers
        if options.markers is None and not options.tests:
            self.local, self.markers = read_markers((checkout.root / "Makefile").read_text(encoding="utf-8"))
        is_selecting = options.suite == "ci" and not options.tests
        self.cases = checkout.collect() if is_selecting else []
        ci.ROOT = checkout.root  # `ci.select` reads the test files

    def runs(self, defect: Defect) -> Iterator[list[str]]:
        """Yield, for each group of paths, the fast tests, then the tests that `ci.select` chooses for the change."""
        if self.options.tests:
            yield ["-n", "0", *(["-m", self.markers] if self.markers else []), *self.options.tests]
            return
        selected, _ = ci.select(self.cases, self._change(defect), ci.seed_of(self.checkout.commit))
        for number, paths in enumerate(test_paths(self.checkout.root, defect.package)):
            if not paths:
                continue
            yield ["-n", "2", "-m", self.markers, *paths]
            ids = [case.id for case in selected if case.path != OWN_TESTS and _is_below(case.path, paths)]
            if ids:
                file = self.folder / f"{defect.name}-{number}.txt"
                file.write_text("".join(f"{id}\n" for id in ids), encoding="utf-8")
                yield ["-n", "2", "-m", self.local, f"@{file}"]

    def selected_share(self, defect: Defect, test: str) -> float:
        """Return the share of commits with this defect for which `.ci/run` runs the test."""
        case = next((case for case in self.cases if case.id == test), None)
        if case is None or not ci.is_slow(case):
            return 1.0
        tests = ci.slow_cases(self.cases)[ci.test_of(case)]
        seeds = range(ci.NUM_ROTATIONS * len(tests))  # each rotation with each case
        return sum(case in ci.select(tests, self._change(defect), seed)[0] for seed in seeds) / len(seeds)

    def _change(self, defect: Defect) -> ci.Change:
        return ci.affected_by([defect.file], ci.read_layers(self.checkout.root / "pyproject.toml"))


def _is_below(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


# --- the measurement -------------------------------------------------------------------------------------------------


def measure(plan: Plan, defect: Defect, unreliable: set[str]) -> dict[str, Any]:
    """Find the test that catches a defect. Tests that also fail without the defect are added to `unreliable`."""
    checkout, start = plan.checkout, time.monotonic()

    def result(outcome: str, test: str | None = None) -> dict[str, Any]:
        share = {"share": plan.selected_share(defect, test)} if test and plan.cases else {}
        return {"result": outcome, "test": test, "seconds": round(time.monotonic() - start, 1), **share}

    for arguments in plan.runs(defect):
        while True:
            seconds = 60 * plan.options.minutes - (time.monotonic() - start)
            with checkout.with_defect(defect):
                failed = checkout.failing([*arguments, *(f"--deselect={id}" for id in sorted(unreliable))], seconds)
            if failed is None:
                return result("out of time")
            for test in failed:
                if is_caught(checkout, defect, test):
                    return result("caught", test)
            if not failed:
                break
            unreliable.update(failed)
    return result("missed")


def is_caught(checkout: Checkout, defect: Defect, test: str) -> bool:
    """Return whether a test, run alone, fails with the defect and passes without it."""
    with checkout.with_defect(defect):
        is_failing = checkout.failing(["-n", "0", test], CONFIRM_SECONDS) != []
    return is_failing and checkout.failing(["-n", "0", test], CONFIRM_SECONDS) == []


def table(defects: Sequence[Defect], results: dict[str, Any]) -> str:
    """Return a Markdown table of all results."""
    lines = ["| defect | package | kind | what a user would notice | result | seconds |", "|---|---|---|---|---|---|"]
    for defect in defects:
        result = results.get(defect.name)
        if result is not None:
            outcome = f"{result['result']}: `{result['test']}`" if result["test"] else result["result"]
            if (share := result.get("share", 1.0)) < 1:
                outcome += f" (for {share:.0%} of commits)"
            cells = (defect.name, defect.package, defect.kind, defect.notice, outcome, f"{result['seconds']:g}")
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD", help="commit to plant in (default: %(default)s)")
    parser.add_argument("--suite", choices=("fast", "ci"), default="fast", help="tests to run (default: %(default)s)")
    parser.add_argument("--markers", metavar="EXPR", help="marker expression (default: FAST of the Makefile)")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=[], help="run these tests alone, in one process")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="plant these defects alone")
    parser.add_argument("--list", action="store_true", help="list the defects, plant nothing")
    parser.add_argument("--minutes", type=float, default=15, help="at most for one defect (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep results here, and skip those in it")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="exit with 1 if fewer are caught")
    options = parser.parse_args(arguments)
    if options.suite == "ci" and options.markers:
        sys.exit("error: --markers is for --suite fast: it would leave out tests that .ci/run selects")
    if options.minutes <= 0:
        sys.exit(f"error: --minutes must be above 0, not {options.minutes:g}")
    if missing := [path for path in options.tests if not (ci.ROOT / path.partition("::")[0]).exists()]:
        sys.exit(f"error: no such test file: {missing[0]}\nhint: paths begin at the folder of the repository")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options, defects = read_options(arguments), read_defects()
    if unknown := set(options.only) - {defect.name for defect in defects}:
        sys.exit(f"error: no defect is called {', '.join(sorted(unknown))}\nhint: --list shows their names")
    defects = [defect for defect in defects if not options.only or defect.name in options.only]
    if options.list:
        print("\n".join(f"{defect.name:32} {defect.package:12} {defect.kind:9} {defect.notice}" for defect in defects))
        return 0
    with checked_out(options.commit) as checkout:
        checkout.check_imports()
        for defect in defects:  # a wrong record ends the script now, and not after hours
            defect.planted((checkout.root / defect.file).read_text(encoding="utf-8"))
        plan = Plan(checkout, options, checkout.root.parent)
        run = {"commit": checkout.commit, "suite": options.suite, "markers": plan.markers, "tests": options.tests}
        results: dict[str, Any] = {}
        if options.output and options.output.exists():
            earlier = json.loads(options.output.read_text(encoding="utf-8"))
            results = earlier.pop("results")
            if earlier != run:
                sys.exit(f"error: {options.output} is of another measurement\nexpected: {run}\ngot: {earlier}")
        unreliable: set[str] = set()
        for defect in defects:
            if defect.name not in results:
                results[defect.name] = result = measure(plan, defect, unreliable)
                print(f"{defect.name}: {result['result']} {result['test'] or ''} ({result['seconds']:g} s)", flush=True)
                if options.output:
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(json.dumps({**run, "results": results}, indent=2) + "\n")
    num_caught = sum(results.get(defect.name, {}).get("result") == "caught" for defect in defects)
    print(f"\n{table(defects, results)}\n\n{num_caught} of {len(defects)} defects caught")
    if unreliable:
        print("failed, but not because of a defect: " + ", ".join(sorted(unreliable)))
    return int(num_caught < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
