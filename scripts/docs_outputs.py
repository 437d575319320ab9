"""Run the code of documentation pages and write what it prints into the pages: a command, and a hook of MkDocs.

The header of a fenced block says, after the language, what the command does with it:

    ```python file="train.py"         write the code to the page's working folder
    ```python run                     run the code in the page's session; a block `text output` follows
    ```console run                    run every line that starts with `$ `; the other lines are their output
    ```yaml include="examples/x.yaml" copy this file of the repository into the block; `file` or `run` may follow

Further words of a header:

    raises="ValueError"  the block has to raise this error; its message is the output
    status="1"           commands have to end with this exit status
    first="12"           keep only the first 12 lines of the output
    hide                 the site does not show the code

The command runs stale pages and rewrites their outputs and included files. A page is stale if its code changed, or if a
Lowtide module changed that the page or one of its commands imported. `docs/outputs.json` holds digests of both. The
hook runs no code; it renders the pages as they are.

A notebook of `examples/` counts as a page: its code cells are blocks that run. The command runs a stale notebook, which
asserts what it shows, and never rewrites it, because its outputs are Jupyter's.

Each page runs in one process and one empty folder, on a CPU that shows eight devices, with a terminal of 100 columns. A
page may link to a file that its code writes, as in `![...](PAGE/report.png)`. The command copies such files next to the
page.

Known gaps: the renderer of chat templates runs in Python's isolated mode, so a change to its script is not detected.
Changes of JAX's version, of data in `src/` and of `docs_session.py` are not detected either; `--all` runs every page.
Figures in a notebook's outputs are not compared with those of its run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
WIDTH = 100
"""Terminal width in columns for the programs."""
COMPILE_OPTIONS = ("XLA_FLAGS", "JAX_OPTIMIZATION_LEVEL")
"""Variables that change the figures; they are only passed on in dry runs."""
_MOST_SECONDS = 1800
"""Time limit of one page; on two slow cores the longest takes about four minutes."""
_ONE_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""Makes CPU devices start collectives in one fixed order; see "On a CPU" in docs/internals/pipelines.md."""
_FENCE = re.compile(r"^```(?P<language>\w+)(?P<words>[^\n`]*)\n(?P<code>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"\s*^```text output\n(?P<output>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_WORD = re.compile(r'(\w+)(?:="([^"]*)")?')


# --- pages ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block whose header contains one of the words above."""

    language: str
    header: str
    words: dict[str, str]
    code: str
    """The text between the fences; for a console block, commands and outputs."""
    output: str
    """The output block that follows; for a console block, the text between the fences."""
    line: int
    span: tuple[int, int]
    """Start and end of the block and its output in the page."""

    @property
    def is_console(self) -> bool:
        return self.language == "console" and "run" in self.words

    @property
    def is_executed(self) -> bool:
        return bool({"run", "file"} & self.words.keys())

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.code.splitlines() if line.startswith("$ ")] if self.is_console else []

    @property
    def request(self) -> dict[str, Any]:
        """Fields that the page's process needs."""
        fields = {"language": self.language, "words": self.words, "commands": self.commands, "line": self.line}
        return {**fields, "code": "" if self.is_console else self.code}


def blocks_of(markdown: str) -> Iterator[Block]:
    """Yield the blocks of a page that run, are written to a file, or include one."""
    for match in _FENCE.finditer(markdown):
        words = dict(_WORD.findall(match["words"]))
        if not {"run", "file", "include"} & words.keys():
            continue
        following = _OUTPUT.match(markdown, match.end()) if "run" in words and match["language"] != "console" else None
        yield Block(
            language=match["language"],
            header=match["language"] + match["words"].rstrip(),
            words=words,
            code=match["code"],
            output=following["output"] if following else match["code"] if match["language"] == "console" else "",
            line=markdown.count("\n", 0, match.start()) + 1,
            span=(match.start(), following.end() if following else match.end()),
        )


def page_of_notebook(notebook: str) -> str:
    """Return a page with the code cells of a notebook as blocks, each followed by the text of its outputs."""
    parts = list[str]()
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            parts.append(f"```python run\n{''.join(cell['source'])}\n```\n")
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
            if text := "\n".join("".join(lines) for lines in texts):
                parts.append(f"```text output\n{text}\n```\n")
    return "\n".join(parts)


def rewritten(markdown: str, blocks: Iterable[Block], texts: Iterable[str]) -> str:
    """Return the page with new texts in place of these blocks and their outputs."""
    parts, end = list[str](), 0
    for block, text in zip(blocks, texts, strict=True):
        parts += [markdown[end : block.span[0]], text]
        end = block.span[1]
    return "".join([*parts, markdown[end:]])


def with_includes(markdown: str, root: Path = ROOT) -> str:
    """Return the page with the current text of the files that it includes."""

    def refreshed(match: re.Match[str]) -> str:
        words = dict(_WORD.findall(match["words"]))
        if "include" not in words:
            return match[0]
        code = (root / words["include"]).read_text(encoding="utf-8").rstrip("\n")
        if "\n```" in code:
            raise ValueError(f"{words['include']} cannot be included, it holds a fence of its own")
        return f"```{match['language']}{match['words']}\n{code}\n```"

    return _FENCE.sub(refreshed, markdown)


def with_outputs(markdown: str, outputs: Iterable[list[str]]) -> str:
    """Return the page with new outputs; `outputs` has one list per block, with one text per command."""
    blocks = [block for block in blocks_of(markdown) if block.is_executed]
    return rewritten(markdown, blocks, [_source(block, out) for block, out in zip(blocks, outputs, strict=True)])


def _source(block: Block, outputs: list[str]) -> str:
    if block.is_console:
        pairs = zip(block.commands, outputs, strict=True)
        code = "\n\n".join(f"$ {command}\n{output}".rstrip() for command, output in pairs)
        return f"```{block.header}\n{code}\n```"
    output = "".join(f"\n\n```text output\n{text}\n```" for text in outputs if text)
    return f"```{block.header}\n{block.code}```{output}"


# --- what makes a page stale ----------------------------------------------------------------------------------------


def is_notebook(name: str) -> bool:
    """Return whether a page is a notebook."""
    return name.endswith(".ipynb")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def code_digest(markdown: str) -> str:
    """Return a digest of everything that a page executes."""
    requests = [block.request for block in blocks_of(markdown) if block.is_executed]
    return _digest([{key: value for key, value in request.items() if key != "line"} for request in requests])


def output_digest(markdown: str) -> str:
    """Return a digest of the outputs in a page. It includes their number, so that a stray output is detected."""
    outputs = [block.output for block in blocks_of(markdown) if block.is_executed]
    return _digest([outputs, markdown.count("\n```text output\n")])


@functools.cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def module_files(name: str, root: Path = ROOT) -> list[Path]:
    """Return the source of a module and its stub; nothing for a module that does not exist."""
    path = root / "src" / name.replace(".", "/")
    files = [path / "__init__.py", path / "__init__.pyi", path.with_suffix(".py")]
    return [file for file in files if file.is_file()]


def modules_digest(names: Iterable[str], root: Path = ROOT) -> str:
    """Return a digest of the sources of these modules."""
    return _digest([[name, [_file_digest(file) for file in module_files(name, root)]] for name in sorted(names)])


def _grouped(names: Iterable[str]) -> dict[str, str]:
    """Group module names by package, to keep the cache small."""
    groups = dict[str, list[str]]()
    for name in sorted(names):
        package, _, last = name.rpartition(".")
        groups.setdefault(package, []).append(last)
    return {package: " ".join(group) for package, group in groups.items()}


def _ungrouped(groups: dict[str, str]) -> list[str]:
    return [f"{package}.{name}".lstrip(".") for package, names in groups.items() for name in names.split()]


@dataclasses.dataclass(frozen=True)
class Docs:
    """A folder of pages, and the cache of their last runs."""

    folder: Path = ROOT / "docs"
    root: Path = ROOT
    """The root of the repository."""

    @property
    def cache_file(self) -> Path:
        return self.folder / "outputs.json"

    def pages(self) -> dict[str, str]:
        """Return the text of each page with such blocks, by path from the folder, notebooks included."""
        names = [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.rglob("*.md"))]
        names += [f"../examples/{path.name}" for path in sorted((self.root / "examples").glob("*.ipynb"))]
        texts = {name: self.read(name) for name in names}
        return {name: text for name, text in texts.items() if any(blocks_of(text))}

    def read(self, name: str) -> str:
        """Return the text of a page; that of a notebook is `page_of_notebook`."""
        text = (self.folder / name).read_text(encoding="utf-8")
        return page_of_notebook(text) if is_notebook(name) else text

    def cache(self) -> dict[str, Any]:
        """Return the digests and imports of each page's last run, by path."""
        return json.loads(self.cache_file.read_text()) if self.cache_file.is_file() else {}

    def write_cache(self, cache: dict[str, Any]) -> None:
        """Write one line per page in sorted order; deleted pages are left out."""
        pages = self.pages()
        lines = [f"{json.dumps(name)}: {json.dumps(cache[name])}" for name in sorted(cache) if name in pages]
        self.cache_file.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def code_changes(self, name: str, text: str, cache: dict[str, Any]) -> str | None:
        """Return why the outputs in a page may be wrong, apart from changed modules, or None."""
        if with_includes(text, self.root) != text:
            return "an included file changed"
        if not any(block.is_executed for block in blocks_of(text)):
            return None
        if name not in cache:
            return "never ran"
        if cache[name]["code"] != code_digest(text):
            return "code changed"
        return "outputs were edited" if cache[name]["outputs"] != output_digest(text) else None

    def did_modules_change(self, name: str, cache: dict[str, Any]) -> bool:
        """Return whether the source of a module changed since the page imported it."""
        if name not in cache:
            return False
        return cache[name]["modules"] != modules_digest(_ungrouped(cache[name]["imports"]), self.root)


# --- running --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """Results of the process that ran a page."""

    outputs: list[list[str]]
    """One list per block, with one text per command."""
    imports: list[str]
    """Modules of Lowtide that the page and its commands imported."""


def run_page(name: str, text: str, folder: Path, compile_options: dict[str, str] | None = None) -> Run:
    """Run the blocks of one page in a new process, in this folder.

    Args:
        name: the path of the page below the documentation folder.
        text: the page.
        folder: an empty folder.
        compile_options: values for `COMPILE_OPTIONS`; by default pages compile as for users.

    Raises:
        RuntimeError: when a block fails; the message contains its line in the page and the traceback.
    """
    request = json.dumps([block.request for block in blocks_of(text) if block.is_executed])
    compile_options = compile_options or {}
    flags = f"{compile_options.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {_ONE_ORDER}"
    with tempfile.TemporaryDirectory(prefix="docs-own-") as own:
        answer, imports = Path(own) / "answer.json", Path(own) / "imports.txt"
        imports.touch()
        environment = {
            **{key: value for key, value in os.environ.items() if key not in COMPILE_OPTIONS},
            **compile_options,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "COLUMNS": str(WIDTH),
            "NO_COLOR": "1",
            "TERM": "dumb",
            "KERAS_BACKEND": "jax",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(SCRIPTS / "docs_imports"),
            "DOCS_IMPORTS": str(imports),
            "LOWTIDE_CACHE": str(Path(own) / "cache"),
        }
        child = subprocess.run(
            [sys.executable, str(SCRIPTS / "docs_session.py"), str(answer)],
            input=request,
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            check=False,
            timeout=_MOST_SECONDS,
        )
        if child.returncode:
            failed = re.search(r"the block at line (\d+) failed\s*$", child.stderr)
            raise RuntimeError(f"{name}:{failed[1] if failed else '?'}: a block failed\n{child.stderr[-6000:]}")
        names = sorted({line for line in imports.read_text().split() if module_files(line)})
        return Run(json.loads(answer.read_text()), names)


def linked_files(name: str, text: str) -> list[str]:
    """Return the files that the page links to in the folder of its name; its code writes them."""
    return sorted(set(re.findall(rf"\]\({re.escape(Path(name).stem)}/([\w.-]+)\)", text)))


def copy_linked_files(docs: Path, name: str, text: str, source: Path) -> None:
    """Copy the files that the page links to into the folder next to it."""
    target = (docs / name).with_suffix("")
    for file in linked_files(name, text):
        if not (source / file).is_file():
            raise RuntimeError(f"{name}: its code does not make {file}, which it links to")
        target.mkdir(exist_ok=True)
        if file.endswith(".png"):
            _write_small_png(source / file, target / file)
        else:
            shutil.copyfile(source / file, target / file)


def _write_small_png(source: Path, target: Path) -> None:
    from PIL import Image

    # Charts have few colours: a palette needs a third of the bytes and looks the same.
    with Image.open(source) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)


def refresh(docs: Docs, name: str, text: str, run: Run, folder: Path) -> None:
    """Write a page with its outputs, its linked files and its entry in the cache; for a notebook, only the entry."""
    if not is_notebook(name):
        copy_linked_files(docs.folder, name, text, folder)
        text = with_outputs(text, run.outputs)
    cache = docs.cache()
    entry = {
        "code": code_digest(text),
        "outputs": output_digest(text),
        "modules": modules_digest(run.imports, docs.root),
        "imports": _grouped(run.imports),
    }
    if not is_notebook(name):
        (docs.folder / name).write_text(text, encoding="utf-8")
    elif name in cache and cache[name]["code"] != entry["code"] and cache[name]["outputs"] == entry["outputs"]:
        hint = "execute it with Jupyter; if its outputs stay the same, delete its line in docs/outputs.json"
        raise RuntimeError(f"{name}: the code changed, but not the outputs: {hint}")
    docs.write_cache({**cache, name: entry})


def execute(docs: Docs, names: list[str], jobs: int, is_dry: bool) -> int:
    """Run several pages at a time, and write each page when it has run. Return the number of failed pages."""
    pages, lock = docs.pages(), threading.Lock()
    compile_options = {key: os.environ[key] for key in COMPILE_OPTIONS if is_dry and key in os.environ}

    def update(name: str) -> None:
        text = with_includes(pages[name], docs.root)
        if not any(block.is_executed for block in blocks_of(text)):
            if not is_dry:
                (docs.folder / name).write_text(text, encoding="utf-8")
            return
        with tempfile.TemporaryDirectory(prefix="docs-", ignore_cleanup_errors=True) as folder:
            run = run_page(name, text, Path(folder), compile_options)
            with lock:
                if docs.read(name) != pages[name]:
                    raise RuntimeError(f"{name}: the page was edited while it ran")
                if not is_dry:
                    refresh(docs, name, text, run, Path(folder))

    def timed(name: str) -> tuple[str, float]:
        started = time.monotonic()
        try:
            update(name)
        except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            return f"{name}: {error}" if name not in str(error) else str(error), 0
        return "", time.monotonic() - started

    num_failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(timed, name): name for name in names}
        for number, future in enumerate(as_completed(runs), 1):
            error, seconds = future.result()
            num_failed += bool(error)
            print(f"[{number}/{len(names)}] {error or f'{runs[future]}: {seconds:.0f} s'}", flush=True)
    return num_failed


# --- the command ----------------------------------------------------------------------------------------------------


def is_in_sixth(name: str, sixth: int) -> bool:
    """Return whether a page belongs to a sixth of the pages; the answer is the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 6 == sixth


def _chosen(pages: dict[str, str], names: list[str]) -> dict[str, str]:
    keys = [
        f"../{name}" if is_notebook(name) else f"{name.removeprefix('docs/').removesuffix('.md')}.md" for name in names
    ]
    if unknown := [key for key in keys if key not in pages]:
        sys.exit(f"no page with something to run: {', '.join(unknown)}\nexpected: one of {', '.join(pages)}")
    return {name: text for name, text in pages.items() if not keys or name in keys}


def main(arguments: list[str] | None = None, docs: Docs | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Run the code of documentation pages, and rewrite their outputs.")
    parser.add_argument("pages", nargs="*", help="pages to look at, such as guides/data (default: all)")
    parser.add_argument("--all", action="store_true", help="run every page, not only stale ones")
    parser.add_argument("--check", action="store_true", help="run nothing; exit with 1 where code changed")
    parser.add_argument("--strict", action="store_true", help="with --check: exit with 1 for changed modules, too")
    parser.add_argument("--sixth", type=int, choices=range(6), help="of pages whose modules changed, run one sixth")
    parser.add_argument("--dry-run", action="store_true", help="run, but write nothing; only here XLA_FLAGS count")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="pages at a time (default: one a core)")
    options = parser.parse_args(arguments)
    if options.strict and not options.check:
        parser.error("--strict needs --check")
    if options.check and (options.all or options.dry_run):
        parser.error("--check runs nothing: leave --all and --dry-run out")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    docs = docs or Docs()
    pages, cache = _chosen(docs.pages(), options.pages), docs.cache()
    changes = {name: docs.code_changes(name, text, cache) for name, text in pages.items()}
    code = [name for name in pages if changes[name]]
    modules = [name for name in pages if not changes[name] and docs.did_modules_change(name, cache)]
    if modules:
        print(f"modules changed: {', '.join(modules)}")
    for name in code:
        print(f"{name}: {changes[name]}")
    if options.check:
        print(f"{len(pages)} pages, {len(code)} with changed code, {len(modules)} with changed modules")
        if code:
            print("hint: run `make docs`, and commit the pages with docs/outputs.json")
        return int(bool(code or (options.strict and modules)))
    if options.sixth is not None:
        modules = [name for name in modules if is_in_sixth(name, options.sixth)]
    names = list(pages) if options.all else [*code, *modules]
    num_failed = execute(docs, names, options.jobs, options.dry_run)
    print(f"{len(names)} pages ran, {num_failed} failed")
    return int(num_failed > 0)


# --- the hook of MkDocs ---------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Render blocks and outputs without the header words that only the command reads."""
    blocks = list(blocks_of(markdown))
    return rewritten(markdown, blocks, [_shown(block) for block in blocks])


def _shown(block: Block) -> str:
    if block.is_console:
        return f"```{{.console .output}}\n{block.code}```"
    if "file" in block.words:
        return f'```{block.language} title="{block.words["file"]}"\n{block.code}```'
    code = "" if "hide" in block.words else f"```{block.language}\n{block.code}```\n\n"
    return code + (f"```{{.text .output}}\n{block.output}```" if block.output else "")


if __name__ == "__main__":
    sys.exit(main())
