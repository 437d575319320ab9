"""The scripts and notebooks in `examples/` run as they stand; each asserts what it shows.

A page of the documentation that includes and runs an example proves it, so only the others run here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_docs import PAGES, tool

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")])


def runs_on_a_page(example: Path) -> bool:
    """Whether a page runs it in its session, or as a file that one of its commands names."""
    for text in PAGES.values():
        blocks = list(tool.blocks_of(text))
        words = {word for block in blocks for command in block.commands for word in command.split()}
        for block in blocks:
            is_included = block.words.get("include") == f"examples/{example.name}"
            if is_included and ("run" in block.words or block.words.get("file") in words):
                return True
    return False


ON_PAGES = [path for path in EXAMPLES if runs_on_a_page(path)]


def script_of(example: Path, folder: Path) -> Path:
    """The script itself; of a notebook, its cells of code in their order."""
    if example.suffix == ".py":
        return example
    cells = json.loads(example.read_text(encoding="utf-8"))["cells"]
    script = folder / f"{example.stem}.py"
    script.write_text("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), encoding="utf-8")
    return script


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path not in ON_PAGES], ids=lambda path: path.stem)
@pytest.mark.usefixtures("little_optimized")
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script_of(example, tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_pages_run_the_examples_that_they_include():
    pages = "".join(PAGES.values())
    included = [path for path in EXAMPLES if f'include="examples/{path.name}"' in pages]
    assert included and included == ON_PAGES


def test_the_page_of_the_folder_names_every_example() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"`{path.name}`" not in page] == []


@pytest.mark.parametrize("notebook", [path for path in EXAMPLES if path.suffix == ".ipynb"], ids=lambda path: path.stem)
def test_a_notebook_was_run_whole_and_shows_no_machine(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and [output for output in outputs if output["output_type"] == "error"] == []
    assert not re.search(r"ipykernel_\d|/tmp/|/home/|/root/", text)
