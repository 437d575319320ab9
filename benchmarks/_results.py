"""Files of a GPU day: written whole, never lost, and complete by their cases. Standard library only."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is absent or no result."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_result(path: Path) -> dict[str, Any]:
    """What a part left; nothing where there is no file, or one that is no result."""
    content = read(path)
    return content if _is_result(content) else {}


def set_aside(path: Path) -> None:
    """Give a file that is no result another name, which is free, before a result takes its place."""
    if not path.exists() or read_result(path):
        return
    path.read_bytes()  # an error where nobody knows what it holds
    names = [f"{path.name}.damaged", *(f"{path.name}.damaged-{count}" for count in range(2, 1000))]
    aside = next(place for name in names if not (place := path.with_name(name)).exists())
    path.replace(aside)
    print(f"{path} is damaged, and moved to {aside.name}", file=sys.stderr)


def check_writable(path: Path) -> None:
    """Say in one sentence why a file cannot be written at a path, if so."""
    if os.path.isdir(path):
        raise SystemExit(f"{path} is a folder, and should be a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        set_aside(path)
    except OSError as error:
        raise SystemExit(f"{error.filename or path} cannot be read and written: {error.strerror}") from error


def _is_result(content: Mapping[str, Any]) -> bool:
    texts = isinstance(content.get("part"), str) and isinstance(content.get("device_kind"), str)
    rows = content.get("rows", {})
    return texts and isinstance(rows, dict) and all(isinstance(row, dict) for row in rows.values())


def is_complete(content: Mapping[str, Any]) -> bool:
    """Whether a part has nothing left to do: what a case lacked and is here now, it has, and what was added since."""
    rows, cases = content.get("rows", {}), content.get("cases")
    if content.get("complete") is not True or content.get("cases_of") != cases_of() or not isinstance(cases, list):
        return False
    lacked = [row.get("not_here") or () for row in rows.values() if not row.get("ok")]
    return bool(cases) and all(is_settled(rows.get(name)) for name in cases) and all(map(missing, lacked))


@functools.cache
def cases_of() -> str:
    """A fingerprint of all that declares cases: the parts, the programs and the tests marked `gpu`.

    Where it is another one, only the part itself, with all that it imports, knows whether it has new cases.
    """
    tests = [path for path in sorted((ROOT.parent / "tests").rglob("test_*.py")) if is_marked(path)]
    names = [str(path.relative_to(ROOT.parent)).encode() for path in tests]
    scripts = [path.read_bytes() for path in sorted(ROOT.glob("*.py"))]
    return hashlib.sha256(b"\0".join([*names, *scripts])).hexdigest()[:16]


def is_marked(path: Path) -> bool:
    """Whether a file has tests that are marked `gpu`."""
    return re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8")) is not None


def is_settled(row: Mapping[str, Any] | None) -> bool:
    """Measured, or known to be impossible here."""
    return row is not None and (row.get("ok") is True or bool(row.get("not_here")))


def missing(modules: Iterable[str]) -> list[str]:
    """Those that cannot be imported here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]
