"""Pages of the documentation hold the outputs of their code; `scripts/docs_outputs.py` says which are stale."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_outputs", ROOT / "scripts/docs_outputs.py")
    assert spec and spec.loader
    module = sys.modules["docs_outputs"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


tool = load_tool()
PAGES = tool.Docs().pages()
PAGE = """# Page

```python file="part.py"
VALUE = 2
```

```python run
from part import VALUE

print(VALUE + 1)
```

Text.

```python run hide raises="ValueError"
raise ValueError("wrong")
```

```console run first="1"
$ echo one && echo two
$ python -c 'import lowtide'
```

```sh include="examples/start.sh"
```
"""


@pytest.fixture
def docs(tmp_path):
    """A repository with one page, one module and one example."""
    for path, text in {
        "docs/page.md": PAGE,
        "examples/start.sh": "echo start\n",
        "src/lowtide/__init__.py": "",
        "src/lowtide/core/__init__.py": "",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tool.Docs(folder=tmp_path / "docs", root=tmp_path)


def check(docs, *arguments: str) -> int:
    tool._file_digest.cache_clear()
    return tool.main(["--check", *arguments], docs)


def write_outputs(docs) -> str:
    assert tool.main(["--jobs", "1"], docs) == 0
    return (docs.folder / "page.md").read_text()


@pytest.mark.processes
def test_outputs_are_written_once(docs, capsys):
    assert check(docs) == 1
    assert tool.main(["--dry-run", "--jobs", "1"], docs) == 0
    assert (docs.folder / "page.md").read_text() == PAGE
    text = write_outputs(docs)
    assert "print(VALUE + 1)\n```\n\n```text output\n3\n```\n\nText." in text
    assert 'raise ValueError("wrong")\n```\n\n```text output\nValueError: wrong\n```' in text
    assert "$ echo one && echo two\none\n…\n\n$ python -c 'import lowtide'\n```" in text
    assert '```sh include="examples/start.sh"\necho start\n```\n' in text
    assert check(docs, "--strict") == 0
    assert tool.main(["--all", "--jobs", "1"], docs) == 0
    assert (docs.folder / "page.md").read_text() == text
    assert "1 pages ran, 0 failed" in capsys.readouterr().out


@pytest.mark.processes
def test_a_page_is_stale_when_code_or_an_included_file_or_a_module_changed(docs, capsys):
    text = write_outputs(docs)
    page = docs.folder / "page.md"
    page.write_text(text.replace("Text.", "Other text."))
    assert check(docs, "--strict") == 0
    for old, new, reason in (
        ("VALUE + 1", "VALUE + 2", "code changed"),
        ("VALUE = 2", "VALUE = 3", "code changed"),
        ("echo two", "echo 2", "code changed"),
        ("output\n3\n", "output\n4\n", "outputs were edited"),
        ("Text.", "```text output\n3\n```", "outputs were edited"),
        ("one\n…", "1\n…", "outputs were edited"),
        ("echo start", "echo stop", "an included file changed"),
    ):
        page.write_text(text.replace(old, new))
        assert check(docs) == 1
        assert f"page.md: {reason}" in capsys.readouterr().out
    page.write_text(text)
    (docs.root / "examples/start.sh").write_text("echo stop\n")
    assert check(docs) == 1
    (docs.root / "examples/start.sh").write_text("echo start\n")

    assert check(docs, "--strict") == 0
    (docs.root / "src/lowtide/core/__init__.py").write_text("# no block imports it\n")
    assert check(docs, "--strict") == 0
    (docs.root / "src/lowtide/__init__.py").write_text("# the command imports it\n")
    assert check(docs) == 0
    assert "modules changed: page.md" in capsys.readouterr().out
    assert check(docs, "--strict") == 1
    capsys.readouterr()
    for sixth in range(6):
        assert tool.main(["--dry-run", "--sixth", str(sixth)], docs) == 0
    assert capsys.readouterr().out.count("1 pages ran, 0 failed") == 1


@pytest.mark.processes
def test_a_block_that_fails_is_named_and_the_page_is_left(docs, capsys):
    page = docs.folder / "page.md"
    page.write_text(PAGE.replace('raise ValueError("wrong")', "1 / 0"))
    before = page.read_text()
    assert tool.main([], docs) == 1
    assert "page.md:15: a block failed" in (printed := capsys.readouterr().out)
    assert "ZeroDivisionError" in printed
    assert page.read_text() == before
    assert not docs.cache_file.exists()


def test_six_sixths_are_all_pages():
    for name in PAGES:
        assert [tool.is_in_sixth(name, sixth) for sixth in range(6)].count(True) == 1


def test_outputs_of_the_pages_belong_to_their_code():
    docs = tool.Docs()
    cache = docs.cache()
    changes = {name: docs.code_changes(name, text, cache) for name, text in PAGES.items()}
    assert {name: change for name, change in changes.items() if change} == {}, "run: python scripts/docs_outputs.py"


def test_every_block_that_prints_has_an_output():
    def lacks_output(block) -> bool:
        if block.is_console:
            return not set(block.code.splitlines()) > {f"$ {command}" for command in block.commands}
        return ("raises" in block.words or "\nprint(" in f"\n{block.code}") and not block.output

    blocks = [(name, block) for name, text in PAGES.items() for block in tool.blocks_of(text) if "run" in block.words]
    assert len(blocks) > 80
    assert [f"{name}:{block.line}" for name, block in blocks if lacks_output(block)] == []


def test_files_that_pages_link_to_are_beside_them_and_small():
    made = [
        (ROOT / "docs" / name).with_suffix("") / file for name in PAGES for file in tool.linked_files(name, PAGES[name])
    ]
    assert [file for file in made if not file.is_file()] == []
    assert sum(file.stat().st_size for file in made) < 1_500_000


def test_no_output_shows_the_machine_that_made_it():
    outputs = [block.output for text in PAGES.values() for block in tool.blocks_of(text)]
    assert [name for name in (str(ROOT), sys.prefix, "/tmp/tmp", "/tmp/docs-") for out in outputs if name in out] == []


def test_the_site_shows_blocks_without_the_words_of_the_command():
    shown = tool.on_page_markdown(PAGES["guides/out-of-memory.md"])
    assert '```python title="train.py"\nimport jax' in shown
    assert "```{.console .output}\n$ lowtide fits" in shown
    assert "```{.text .output}\n" in shown
    assert not [word for word in ("```python run", "```console run", "```text output") if word in shown]


@pytest.mark.sentinel
@pytest.mark.slow
@pytest.mark.processes
def test_a_page_runs(tmp_path):
    name = "guides/data.md"
    run = tool.run_page(name, PAGES[name], tmp_path, {"XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]})
    assert tool.with_outputs(PAGES[name], run.outputs) == PAGES[name]
    assert "lowtide.finetune.data._pack" in run.imports
