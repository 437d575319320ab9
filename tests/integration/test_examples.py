"""The scripts and notebooks in `examples/` run unchanged; each asserts what it shows.

A page of the documentation that includes and runs an example proves it, and `scripts/docs_outputs.py` runs notebooks
like pages. So only the other scripts run here.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtide

from .test_docs import PAGES, tool

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")])
NOTEBOOKS = [path for path in EXAMPLES if path.suffix == ".ipynb"]


def runs_on_a_page(example: Path) -> bool:
    """Whether a page runs it in its session, or as a file that one of its commands names; a notebook is a page."""
    if example.suffix == ".ipynb":
        return f"../examples/{example.name}" in PAGES
    for text in PAGES.values():
        blocks = list(tool.blocks_of(text))
        words = {word for block in blocks for command in block.commands for word in command.split()}
        for block in blocks:
            is_included = block.words.get("include") == f"examples/{example.name}"
            if is_included and ("run" in block.words or block.words.get("file") in words):
                return True
    return False


ON_PAGES = [path for path in EXAMPLES if runs_on_a_page(path)]


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def code_of(example: Path) -> str:
    """Return the script, or the code cells of a notebook in their order."""
    if example.suffix == ".py":
        return example.read_text(encoding="utf-8")
    return "\n".join("".join(cell["source"]) for cell in cells_of(example) if cell["cell_type"] == "code")


def lowtide_names(code: str) -> set[str]:
    """Return the dotted names of Lowtide that the code imports, or uses as attributes of a module."""
    tree = ast.parse(code)
    modules, names = dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "lowtide":
                    modules[alias.asname or "lowtide"] = alias.name if alias.asname else "lowtide"
                    names.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lowtide":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in modules and re.fullmatch(r"\w+(\.\w+)*", rest):
                names.add(f"{modules[root]}.{rest}")
    return names


def exists(name: str) -> bool:
    """Return whether a dotted name of Lowtide is there."""
    value: Any = lowtide
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path not in ON_PAGES], ids=lambda path: path.stem)
@pytest.mark.usefixtures("little_optimized")
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, example],
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
    assert included and sorted([*included, *NOTEBOOKS]) == ON_PAGES


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_cells_of_a_notebook_are_the_blocks_of_its_page(notebook: Path) -> None:
    blocks = list(tool.blocks_of(PAGES[f"../examples/{notebook.name}"]))
    cells = [cell for cell in cells_of(notebook) if cell["cell_type"] == "code"]
    assert [block.code for block in blocks] == ["".join(cell["source"]) + "\n" for cell in cells]
    assert [bool(block.output) for block in blocks] == [bool(cell["outputs"]) for cell in cells]
    assert all("run" in block.words for block in blocks)


@pytest.mark.processes
def test_a_notebook_runs_like_a_page_and_is_not_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs, notebook = tool.Docs(folder=tmp_path / "docs", root=tmp_path), tmp_path / "examples/small.ipynb"
    docs.folder.mkdir()
    notebook.parent.mkdir()

    def write(code: str, output: str) -> str:
        stream = {"output_type": "stream", "name": "stdout", "text": [output]}
        text = json.dumps({"cells": [{"cell_type": "code", "source": [code], "outputs": [stream]}]})
        notebook.write_text(text, encoding="utf-8")
        return text

    text = write("print(1 + 1)", "2\n")
    assert tool.main(["--check"], docs) == 1
    assert tool.main(["examples/small.ipynb", "--jobs", "1"], docs) == 0
    assert tool.main(["--check", "--strict"], docs) == 0
    assert notebook.read_text(encoding="utf-8") == text

    write("print(1 + 2)", "2\n")
    assert tool.main(["--jobs", "1"], docs) == 1
    assert "the code changed, but not the outputs: execute it with Jupyter" in capsys.readouterr().out
    write("print(1 + 2)", "3\n")
    assert tool.main(["--jobs", "1"], docs) == 0
    write("assert 1 > 2", "")
    assert tool.main(["--jobs", "1"], docs) == 1
    assert "AssertionError" in capsys.readouterr().out


def test_the_page_of_the_folder_names_every_example() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"`{path.name}`" not in page] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_name_of_lowtide_in_an_example_exists(example: Path) -> None:
    names = lowtide_names(code_of(example))
    assert names
    assert sorted(name for name in names if not exists(name)) == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid(notebook: Path) -> None:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    assert set(document) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in document["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in document["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
            ast.parse("".join(cell["source"]), filename=f"{notebook.name}, {cell['id']}")
        else:
            assert cell["cell_type"] == "markdown"
        assert set(cell) == keys
        assert all(line.endswith("\n") for line in cell["source"][:-1])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_whole_and_shows_no_machine(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    cells = [cell for cell in cells_of(notebook) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and [output for output in outputs if output["output_type"] == "error"] == []
    assert not re.search(r"ipykernel_\d|/tmp/|/home/|/root/", text)
