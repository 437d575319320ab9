"""Run the code of documentation pages while they are built, and insert what it prints: a hook of MkDocs.

A fenced block takes part when its header says so, after the language:

    ```python file="train.py"     is written to the page's working folder, and shown under its name
    ```python run                 runs in the page's session; what it prints follows as a block of its own
    ```console run                runs every line that starts with `$ `; its output follows the line

More words of a header: `raises="Name"` (the block has to raise that, and the message is its output), `status="1"` (the
exit status that a command has to end with), `first="12"` (the output is cut after so many lines), `hide` (the code is
not shown). A block that fails otherwise, or a page whose folder lacks a file it links to, fails the build.

Each page is one process and one empty folder, on the CPU as eight devices and 100 columns wide, so pages cannot see
each other. Files that the code leaves in the folder and the page links to, as `![...](PAGE/report.png)`, become part of
the site.

Why not markdown-exec: it runs code inside MkDocs' own process, captures `print` but not what rich writes, cannot show
an error that is meant, and names no source files, which reports of memory list. Known inefficiency: nothing is cached
between builds; within `mkdocs serve` a page runs again only when its code changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
"""Columns of the terminal that programs see."""
WIDEST = 120
"""Columns after which a line of an output is broken."""
LANGUAGES = ("python", "console")
_ONE_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""Of collectives, on all devices: see the limits of the guide to pipelines."""
_FENCE = re.compile(r"^```(?P<language>\w+)(?P<words>[^\n`]*)\n(?P<code>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r'(\w+)(?:="([^"]*)")?')


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block that takes part."""

    language: str
    words: dict[str, str]
    code: str
    line: int

    @property
    def does_run(self) -> bool:
        return "run" in self.words


@dataclasses.dataclass(frozen=True)
class Done:
    """A page that ran."""

    outputs: list[list[str]]
    """One text a block, or one a command."""
    folder: tempfile.TemporaryDirectory[str]


def blocks_of(markdown: str) -> Iterator[tuple[re.Match[str], Block]]:
    """The blocks of a page that take part."""
    for match in _FENCE.finditer(markdown):
        words = dict(_WORD.findall(match["words"]))
        if match["language"] in LANGUAGES and ({"run", "file"} & words.keys()):
            line = markdown.count("\n", 0, match.start()) + 1
            yield match, Block(match["language"], words, match["code"], line)


def run_page(name: str, blocks: list[Block]) -> Done:
    """Run the blocks of one page in a process and a folder of their own.

    Raises:
        RuntimeError: when a block fails, with its line in the page and the traceback.
    """
    folder = tempfile.TemporaryDirectory(prefix="docs-")
    request = json.dumps([dataclasses.asdict(block) for block in blocks])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {_ONE_ORDER}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "KERAS_BACKEND": "jax",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, str(Path(__file__).resolve()), answer.name]
        child = subprocess.run(
            command, input=request, cwd=folder.name, env=environment, text=True, capture_output=True, check=False
        )
        if child.returncode:
            raise RuntimeError(f"{name}: {child.stderr[-6000:]}")
        return Done(json.load(answer), folder)


# --- inside the page's process --------------------------------------------------------------------------------------


def main(answer: str) -> None:
    """Run the blocks that standard input holds as JSON, and write their outputs to a file."""
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    session: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[list[str]] = []
    for block in (Block(**row) for row in json.load(sys.stdin)):
        try:
            outputs.append([_tidy(text, block.words) for text in _run(block, session)])
        except Exception:
            traceback.print_exc()
            sys.exit(f"the block at line {block.line} failed")
    Path(answer).write_text(json.dumps(outputs))


def _run(block: Block, session: dict[str, Any]) -> list[str]:
    if "file" in block.words:
        Path(block.words["file"]).write_text(block.code)
        return []
    if block.language == "python":
        return [_run_python(block, session)]
    return [_run_command(line, int(block.words.get("status", "0"))) for line in commands_of(block.code)]


def _run_python(block: Block, session: dict[str, Any]) -> str:
    printed = io.StringIO()
    error = None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile("\n" * block.line + block.code, "session.py", "exec"), session)
        except Exception as failure:
            if type(failure).__name__ != block.words.get("raises"):
                raise
            error = failure
    if "raises" in block.words:
        if error is None:
            raise AssertionError(f"nothing raised {block.words['raises']}")
        printed.write("".join(traceback.format_exception_only(error)))
    return printed.getvalue()


def _run_command(line: str, status: int) -> str:
    done = subprocess.run(line, shell=True, text=True, capture_output=True, check=False)
    if done.returncode != status:
        raise RuntimeError(f"$ {line}\nended with {done.returncode}, not {status}\n{done.stdout}{done.stderr}")
    return done.stdout


def commands_of(code: str) -> list[str]:
    """The commands of a console block."""
    return [line[2:] for line in code.splitlines() if line.startswith("$ ")]


def _tidy(text: str, words: dict[str, str]) -> str:
    # An editable install is not below site-packages, where lines of installed packages are cut.
    text = text.replace(f"{ROOT}{os.sep}src{os.sep}", "").replace(os.getcwd() + os.sep, "")
    lines = [part for line in text.rstrip().splitlines() for part in _wrapped(line.rstrip())]
    if len(lines) > (limit := int(words.get("first", len(lines)))):
        lines = [*lines[:limit], "…"]
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    long_words = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, WIDEST, subsequent_indent=indent, drop_whitespace=True, **long_words) or [""]


# --- inside MkDocs ---------------------------------------------------------------------------------------------------

_done: dict[str, tuple[list[Block], Done]] = {}


def _timed_page(name: str, blocks: list[Block]) -> Done:
    started = time.monotonic()
    done = run_page(name, blocks)
    logging.getLogger(f"mkdocs.hooks.{__name__}").info("%s ran in %.0f s", name, time.monotonic() - started)
    return done


def on_files(files: Any, config: Any) -> Any:
    """Run every page that has something to run, one on each core at a time, and add the files they link to."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    text = {page.src_uri: page.content_string for page in files.documentation_pages()}
    blocks = {uri: found for uri in text if (found := [block for _, block in blocks_of(text[uri])])}
    changed = [uri for uri in blocks if uri not in _done or _done[uri][0] != blocks[uri]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {uri: pool.submit(_timed_page, uri, blocks[uri]) for uri in changed}
    for uri, run in runs.items():
        try:
            _done[uri] = blocks[uri], run.result()
        except RuntimeError as error:
            raise PluginError(str(error)) from error
    for uri in blocks:
        stem = Path(uri).with_suffix("")
        for name in sorted(set(re.findall(rf"\]\({re.escape(stem.name)}/([\w.-]+)\)", text[uri]))):
            made = Path(_done[uri][1].folder.name) / name
            if made.is_file():  # else MkDocs reports the link
                files.append(File.generated(config, f"{stem.as_posix()}/{name}", abs_src_path=str(made)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the outputs after their blocks."""
    if page.file.src_uri not in _done:
        return markdown
    outputs = iter(_done[page.file.src_uri][1].outputs)
    parts, end = list[str](), 0
    for match, block in blocks_of(markdown):
        parts += [markdown[end : match.start()], _shown(block, next(outputs))]
        end = match.end()
    return "".join([*parts, markdown[end:]])


def _shown(block: Block, outputs: list[str]) -> str:
    if not block.does_run:
        return f'```{block.language} title="{block.words["file"]}"\n{block.code}```'
    if block.language == "console":
        pairs = zip(commands_of(block.code), outputs, strict=True)
        text = "\n\n".join(f"$ {command}\n{output}".rstrip() for command, output in pairs)
        return f"```{{.console .output}}\n{text}\n```"
    code = "" if "hide" in block.words else f"```python\n{block.code}```\n\n"
    return code + "".join(f"```{{.text .output}}\n{output}\n```" for output in outputs if output)


if __name__ == "__main__":
    main(sys.argv[1])
