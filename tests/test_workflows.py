"""The workflows of GitHub run commands that exist, with pinned actions and time limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
VERSION = re.compile(r"[\w.-]+/[\w./-]+@(v\d+(\.\d+)*|[0-9a-f]{40})")
"""An action with a version tag or a commit; a branch such as `main` or `release/v1` can change at any time."""


def jobs_of(workflow: Path) -> dict[str, Any]:
    return yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs_of(workflow).values() for step in job["steps"]]


def targets_in(command: str) -> set[str]:
    """Return the targets of all calls of `make`; other words are flags, their values, or variables."""
    calls = re.findall(r"(?<![\w./-])make[ \t]+([^\n;&|]*)", command)
    return {word for call in calls for word in call.split() if re.fullmatch(r"[a-z][a-z-]*", word)}


def files_in(command: str) -> set[str]:
    """Return the files of the repository that a command names."""
    return set(re.findall(r"(?<!\S)(?:\./)?((?:\.ci|scripts|benchmarks|examples)/[\w./-]+)", command))


def test_there_are_workflows_and_targets() -> None:
    assert WORKFLOWS and {"test", "dist", "docs", "pytest-all"} <= TARGETS


@pytest.mark.parametrize(
    ("command", "targets", "files"),
    [
        ("make docs CACHED=1", {"docs"}, set[str]()),
        ("make --jobs 2 test lint && make dist", {"test", "lint", "dist"}, set[str]()),
        ("cmake build\npython scripts/ci.py sixth; ./.ci/run", set[str](), {"scripts/ci.py", ".ci/run"}),
    ],
)
def test_commands_are_read(command: str, targets: set[str], files: set[str]) -> None:
    assert (targets_in(command), files_in(command)) == (targets, files)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_a_workflow_exist(workflow: Path) -> None:
    commands = [step["run"] for step in steps_of(workflow) if "run" in step]
    assert commands
    for command in commands:
        assert targets_in(command) <= TARGETS, command
        assert [name for name in files_in(command) if not (ROOT / name).is_file()] == [], command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_of_a_workflow_are_pinned(workflow: Path) -> None:
    actions = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert actions
    assert [action for action in actions if not VERSION.fullmatch(action)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_of_a_workflow_have_a_time_limit(workflow: Path) -> None:
    assert [name for name, job in jobs_of(workflow).items() if not isinstance(job.get("timeout-minutes"), int)] == []
