"""The scripts in `examples/` run as they stand; each asserts what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
LONG = ("memory_before_the_run.py", "trainer_that_survives.py")


def cases():
    for path in sorted(FOLDER.glob("*.py")):
        marks = [pytest.mark.slow] if path.name in LONG else []
        yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("script", list(cases()))
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_page_of_the_folder_names_every_example() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(FOLDER.glob("*.py")) if f"`{path.name}`" not in page] == []
