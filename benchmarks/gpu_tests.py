"""The tests marked `gpu`, each file in its own process.

    python benchmarks/gpu_tests.py [--rehearse]

A rehearsal runs the tests of the same files that a CPU can run.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

from _gpu import ROOT, main, run_child

TESTS = ROOT.parent / "tests"
FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if re.search(r"mark\.gpu\b", path.read_text("utf-8"))]


def run(path: Path, rehearsal: bool) -> dict[str, Any]:
    """Return the outcome of every test of a file."""
    marked = "not gpu and not gpu_aot and not tpu_aot and not peers" if rehearsal else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = f"-q -ra -p no:cacheprovider --junitxml={report} --basetemp={folder}/tmp".split()
        # Driver warnings must not turn a day's results into failures.
        command = [sys.executable, "-m", "pytest", str(path), "-m", marked, "-W", "default", *words]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = run_child(command, cwd=ROOT.parent, env=env, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        return outcomes(report)


def outcomes(report: Path) -> dict[str, Any]:
    """Return the row of a JUnit report: counts, and the outcome, seconds and message of each test."""
    tests: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if outcome is None else "skipped" if outcome.tag == "skipped" else "failed"
        name = f"{case.get('classname')}.{case.get('name')}"
        if tests.get(name, {}).get("outcome") != "failed":  # otherwise this is the teardown of a failed test
            tests[name] = {"outcome": kind, "seconds": float(case.get("time", 0))}
            tests[name] |= {} if outcome is None else {"message": (outcome.get("message") or "")[:500]}
    kinds = [test["outcome"] for test in tests.values()]
    row: dict[str, Any] = {f"num_{kind}": kinds.count(kind) for kind in ("passed", "failed", "skipped")}
    row["tests"] = tests
    if row["num_failed"] or not row["num_passed"]:
        row |= {"ok": False, "error": f"{row['num_failed']} of {len(tests)} tests failed, {row['num_passed']} passed"}
    return row


if __name__ == "__main__":
    names = [str(path.relative_to(TESTS)) for path in FILES]
    main("tests", {name: partial(run, path) for name, path in zip(names, FILES, strict=True)}, __doc__)
