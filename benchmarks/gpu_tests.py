"""The tests marked `gpu`, each file in a process of its own.

    python benchmarks/gpu_tests.py [--rehearse]

A rehearsal runs the tests of the same files that a CPU can.
"""

from __future__ import annotations

import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

from _gpu import ROOT, is_marked, main, run_child

TESTS = ROOT.parent / "tests"
FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if is_marked(path)]
FAILURES = 3
"""How many are told of at length."""


def run(path: Path, rehearsal: bool) -> dict[str, Any]:
    """Every test's outcome."""
    marked = "not gpu and not gpu_aot and not tpu_aot and not peers and not slow" if rehearsal else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = [
            "-m",
            marked,
            f"--junitxml={report}",
            f"--basetemp={folder}/tmp",
            "-p",
            "no:cacheprovider",
            "-q",
            "-ra",
        ]
        # A warning of a driver is no reason to lose a day's results.
        command = [sys.executable, "-m", "pytest", str(path), *words, "-W", "default"]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = run_child(command, cwd=ROOT.parent, env=env, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        return outcomes(report)


def outcomes(report: Path) -> dict[str, Any]:
    """A row of a JUnit report: counts, and each test's outcome, seconds and message by module, class and name."""
    tests: dict[str, dict[str, Any]] = {}
    told: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if outcome is None else "failed" if outcome.tag != "skipped" else "skipped"
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        if kind == "failed":
            told.append(f"{name}\n{(outcome.text or '')[-1500:]}")
        if tests.get(name, {}).get("outcome") == "failed":
            continue  # the test itself: what follows is its teardown
        tests[name] = {"outcome": kind, "seconds": float(case.get("time", 0))}
        if outcome is not None:
            tests[name]["message"] = (outcome.get("message") or "")[:500]
    kinds = [test["outcome"] for test in tests.values()]
    counts = {f"num_{kind}": kinds.count(kind) for kind in ("passed", "failed", "skipped")}
    row = {**counts, "tests": tests}
    if counts["num_failed"] or not counts["num_passed"]:
        error = f"{counts['num_failed']} of {len(tests)} tests failed, {counts['num_passed']} passed"
        row |= {"ok": False, "error": "\n\n".join([*told[:FAILURES], error])}
    return row


if __name__ == "__main__":
    main(
        "tests",
        {str(path.relative_to(TESTS)): partial(run, path) for path in FILES},
        __doc__,
        minutes={str(path.relative_to(TESTS)): 5 for path in FILES},
    )
