"""House rules that a linter does not check: exports, reference pages, imports, examples.

Each test checks the whole tree and lists every offender.
"""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide
from lowtide.core import LowtideError, _errors

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "lowtide"
REFERENCE = ROOT / "docs" / "reference"
OPTIONAL = (
    "equinox flax gguf hypothesis jax_cuda13_plugin keras libtpu matplotlib peft pytest tensorflow torch transformers"
).split()
MAX_ROOT_NAMES = 30


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


SRC_FILES = python_files("src")
INITS = [path for path in SRC_FILES if path.name == "__init__.py"]
INTERNAL = (
    "hlo",
    "jaxprs",
    "report",
    "targets",
    "distributed",
    "advice",
    "checkpoint",
    "layerwise",
    "schedules",
    "split",
    "program",
    "gguf",
)
"""Folders without a reference page: their public names are exported by another package, too."""


# --- exports and reference pages -----------------------------------------------------------------------------------


def exported(init: Path) -> set[str]:
    """Names that an `__init__.py`, or the stub of one that loads lazily, re-exports (``from ._x import f as f``)."""
    stub = init.with_suffix(".pyi")
    names = set[str]()
    for node in parsed(stub if stub.exists() else init).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names |= {alias.asname for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")} | (names & {"__version__"})


def dotted(init: Path) -> str:
    return ".".join(init.parent.relative_to(ROOT / "src").parts)


def listed(init: Path) -> list[str]:
    return getattr(importlib.import_module(dotted(init)), "__all__", [])


def test_all_lists_exactly_what_is_re_exported() -> None:
    wrong = dict[str, list[str]]()
    for init in INITS:
        module = importlib.import_module(dotted(init))
        missing = [name for name in listed(init) if not hasattr(module, name)]
        if difference := sorted(set(listed(init)) ^ exported(init)) + missing:
            wrong[dotted(init)] = difference
    assert wrong == {}


def test_every_public_name_has_a_place_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    names = [f"{dotted(init)}.{name}" for init in INITS if init.parent.name not in INTERNAL for name in listed(init)]
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == [], "add `::: <name>` to a page of docs/reference"


def test_packages_are_attributes_of_the_root() -> None:
    for name in ("core", "ext", "finetune", "quant", "targets", "testing"):
        assert getattr(lowtide, name).__name__ == f"lowtide.{name}"
    assert lowtide.ext.nnx.__name__ == "lowtide.ext.nnx" and lowtide.finetune.data.__name__ == "lowtide.finetune.data"


def test_the_root_stays_small() -> None:
    assert len(lowtide.__all__) <= MAX_ROOT_NAMES


def test_code_and_documentation_list_the_same_error_codes() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    classes = [value for value in vars(_errors).values() if isinstance(value, type) and issubclass(value, LowtideError)]
    documented = re.findall(r"^\| `(LT\d{3})` \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert documented == sorted((cls.code, cls.__name__) for cls in classes)


# --- imports -------------------------------------------------------------------------------------------------------


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Everything that a file imports, at any depth: the module, and the dotted name of what is taken from it."""
    package = path.relative_to(ROOT / "src").parts[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield from ((module, f"{module}.{alias.name}") for alias in node.names)


def imported(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at any depth, relative imports resolved."""
    return {name for pair in imports_of(path) for name in pair}


def test_only_compat_touches_private_or_experimental_jax() -> None:
    wrong = dict[str, set[str]]()
    for path in SRC_FILES:
        if path == SRC / "core" / "_compat.py":
            continue
        used = {ast.unparse(node) for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
        private = re.compile(r"(jax\.(_src|experimental|interpreters)|jaxlib)\b")
        if names := {name for name in used | imported(path) if private.match(name)}:
            wrong[name_of(path)] = names
    assert wrong == {}, "add a function to core/_compat.py, with the version it was checked on"


def test_nothing_imports_bridges_or_the_pytest_plugin() -> None:
    side = ("lowtide.ext.", "lowtide.testing.")
    wrong = {
        name_of(path): names
        for path in SRC_FILES
        if path.name != "lowtide_pytest.py" and path.relative_to(SRC).parts[0] not in ("ext", "testing")
        if (names := [name for name in imported(path) if f"{name}.".startswith(side)])
    }
    assert wrong == {}


def imports() -> dict[str, set[str]]:
    """For every file, by its dotted name, the files of Lowtide that it imports: for types and in functions, too."""
    files = {dotted(path) if path in INITS else f"{dotted(path)}.{path.stem}": path for path in SRC_FILES}
    stubs = {path: path.with_suffix(".pyi") for path in INITS if path.with_suffix(".pyi").exists()}
    read = {name: imports_of(stubs.get(path, path)) for name, path in files.items()}
    taken = {name: {of if of in files else module for module, of in pairs} for name, pairs in read.items()}
    return {name: {other for other in others if other in files} - {name} for name, others in taken.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some files that import each other, the first again at the end."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(imports()) == [], "move what both need below both"


def test_every_import_is_a_declared_dependency() -> None:
    """Also those that another package brings today; what nothing declares is missing one day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[<>= ]", line)[0].lower() for group in groups for line in group}
    declared |= {"jaxlib", "numpy", "scipy"}  # JAX requires them
    brought_by = importlib.metadata.packages_distributions()
    names = {module.split(".")[0] for path in SRC_FILES for module, _ in imports_of(path)}
    missing = {
        name
        for name in names - set(sys.stdlib_module_names) - {"lowtide", "lowtide_pytest"}
        if declared.isdisjoint(re.sub("[_.]", "-", found).lower() for found in brought_by.get(name, [name]))
    }
    assert missing == set(), "declare it in pyproject.toml and in both files of constraints/"


def loaded_by(program: str) -> set[str]:
    program = f"import json, sys\n{program}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.processes
def test_importing_lowtide_imports_no_optional_package() -> None:
    # JAX itself looks for its plugins.
    loaded = loaded_by("import lowtide, lowtide.cli; lowtide.Trainer, lowtide.memory") - loaded_by(
        "import jax, jax.numpy"
    )
    assert "lowtide" in loaded
    assert loaded.isdisjoint(OPTIONAL), f"import these inside the functions that need them: {loaded & set(OPTIONAL)}"


HEAVY = {"orbax", "grain", "scipy", "tensorstore", "pydantic", "transformers", "tokenizers", "safetensors"}
"""Packages that are imported where they are used, and not before."""
COMMANDS = [
    path.stem.removeprefix("_")
    for path in sorted((SRC / "cli").glob("_*.py"))
    if "add_parser(" in path.read_text(encoding="utf-8")
]


@pytest.mark.processes
def test_commands_that_need_no_jax_start_without_it() -> None:
    """An answer about what there is takes a fraction of a second. One process tries all commands in turn."""
    commands = ["--help", "--version", "targets", "schedule gpipe --stages 4 --microbatches 8"]
    commands += [f"{name} --help" for name in COMMANDS]
    heavy = sorted({"jax", "jaxlib", *HEAVY})
    program = f"""
import contextlib, io, json, sys, lowtide.cli
loaded_by = {{}}
for command in {commands!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        lowtide.cli.main(command.split())
    loaded_by[command] = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps(loaded_by))
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert json.loads(output.splitlines()[-1]) == {command: [] for command in commands}


@pytest.mark.processes
def test_a_trainer_loads_what_it_needs_when_it_needs_it() -> None:
    assert loaded_by("import lowtide; lowtide.Trainer, lowtide.memory.analyze").isdisjoint(HEAVY | {"rich", "wcmatch"})


def test_tests_mirror_the_package() -> None:
    rooms = {init.parent.name for init in SRC.glob("*/__init__.py")}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert rooms - folders == set()
    assert folders - rooms <= {"golden", "integration"}


# --- documentation in the code -------------------------------------------------------------------------------------


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path in SRC_FILES if not ast.get_docstring(parsed(path))] == []


def test_sections_have_the_names_that_the_reference_renders() -> None:
    wrong = re.compile(r"^(Example|Arguments|Return|Raise):$", flags=re.MULTILINE)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    assert [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}"
        for path in SRC_FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, documented) and wrong.search(ast.get_docstring(node) or "")
    ] == []


def packages_with_examples() -> dict[str, list[str]]:
    """Modules whose docstrings hold examples, by package."""
    packages = dict[str, list[str]]()
    for path in SRC_FILES:
        if ">>> " in path.read_text(encoding="utf-8") and path.name != "__main__.py":
            name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            packages.setdefault(name.split(".")[1] if "." in name else name, []).append(name)
    return packages


EXAMPLES = packages_with_examples()
SLOW_EXAMPLES = {"adapters", "ext", "models", "ops", "quant"}


@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_EXAMPLES)) for name in EXAMPLES]
)
def test_examples_run(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = list[str]()
    for module in EXAMPLES[package]:
        for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module):
            runner.run(test, out=report.append)
    results = runner.summarize(verbose=False)
    assert results.attempted > 0
    assert results.failed == 0, "".join(report)
