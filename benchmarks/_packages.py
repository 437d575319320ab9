"""Which wheels a Python lacks for a GPU day, and what would not fit together: for machines without a network.

Standard library, and `packaging` where it is, or the copy in pip, which is there wherever wheels are installed. Without
either what is installed is taken as it is.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import InvalidRequirement, Requirement
except ImportError:
    try:
        from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        Requirement = None

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
EXTRAS = ("nnx", "equinox", "peers")
"""What the parts import beside Lowtide's own dependencies, where it is there."""
NOT_CARRIED = ("jax", "numpy", "scipy")
"""What the machine itself has to have."""


def wanted(text: str, python: tuple[int, int]) -> list[str]:
    """The ``name==version`` of a list that a Python needs, markers on ``python_version`` honoured."""
    found: list[str] = []
    for line in text.splitlines():
        words = line.split("#")[0].strip()
        if not words:
            continue
        requirement, _, marker = (word.strip() for word in words.partition(";"))
        if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", requirement):
            raise ValueError(f"{words!r} is not name==version")
        if marker:
            match = re.fullmatch(r"python_version\s*(<|>=)\s*[\"'](\d+)\.(\d+)[\"']", marker)
            if match is None:
                raise ValueError(f'{marker!r} is not python_version < "3.x" or python_version >= "3.x"')
            below = python < (int(match[2]), int(match[3]))
            if below != (match[1] == "<"):
                continue
        found.append(requirement)
    return found


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(lines: Iterable[str]) -> dict[str, str]:
    """Versions by normal name."""
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def lacking(text: str) -> list[str]:
    """Of a list what this Python does not have, or not in a version that Lowtide and the rest take.

    What is replaced takes its partners along: those that it names as required and that are older than the list's, or
    that it pins to one version. Wheels tell of what they require once they are installed, so a second call may name
    more.
    """
    lines = wanted(text, sys.version_info[:2])
    listed, here, bounds = pinned(lines), installed(), project_bounds()
    replaced = {
        name
        for name in listed
        if name not in here or not all(_takes(need, here[name].version) for need in bounds.get(name, ()))
    }

    def is_due(need: Any, by: str) -> bool:
        """Whether what is required is to be replaced, for one that is or for one that stays."""
        name = normal(need.name)
        if name not in listed or name in replaced or name not in here:
            return False
        old, new = here[name].version, listed[name]
        if by not in replaced:
            return not _takes(need, old) and _takes(need, new)
        is_pinned = any(one.operator in ("==", "===") for one in need.specifier)
        return old != new and (is_pinned or (name not in bounds and _is_older(old, new)))

    before = -1
    while before != len(replaced):
        before = len(replaced)
        for name in here.keys() & {*listed, *bounds}:
            replaced |= {normal(need.name) for need in _needs(here[name]) if is_due(need, name)}
    return [line for line in lines if normal(line.partition("==")[0]) in replaced]


def conflicts(text: str) -> list[str]:
    """What does not fit together here, or would not after `lacking` is installed, in sentences."""
    here, bounds = installed(), project_bounds()
    new = pinned(lacking(text))
    versions = {name: found.version for name, found in here.items()} | new
    known = {*pinned(wanted(text, sys.version_info[:2])), *bounds}
    told = [f"{name} is not here: the list does not have it" for name in NOT_CARRIED if bounds and name not in here]
    for name, needs in bounds.items():
        wrong = [need for need in needs if name in versions and not _takes(need, versions[name])]
        told += [f"lowtide needs {need}, here is {versions[name]}" for need in wrong]
    for name, found in here.items():
        for need in () if name in new else _needs(found):
            other = normal(need.name)
            is_ours = other in new or {name, other} <= known
            if is_ours and other in versions and not _takes(need, versions[other]):
                verb = "would be" if other in new else "is"
                told.append(f"{name} {found.version} here needs {need}, which {verb} {versions[other]}")
    return told


def installed() -> dict[str, metadata.Distribution]:
    """Distributions by normal name, the first of each on the path."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        if one.metadata["Name"]:  # a folder that a broken installation left has none
            found.setdefault(normal(one.metadata["Name"]), one)
    return found


def project_bounds() -> dict[str, list[Any]]:
    """What `pyproject.toml` requires, by normal name."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    found: dict[str, list[Any]] = {}
    for need in _parsed(line for group in groups for line in group):
        found.setdefault(normal(need.name), []).append(need)
    return found


def oldest_python() -> str:
    """The least that `pyproject.toml` takes, for instance ``3.11``."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return project["requires-python"].removeprefix(">=")


def _needs(distribution: metadata.Distribution) -> Iterator[Any]:
    """What an installed distribution requires on this machine, its extras aside."""
    return _parsed(distribution.requires or ())


def _parsed(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines if Requirement is not None else ():
        try:
            need = Requirement(line)
        except InvalidRequirement:  # of an old package
            continue
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need


def _takes(need: Any, version: str) -> bool:
    return need.specifier.contains(version, prereleases=True)


def _is_older(version: str, other: str) -> bool:
    return Requirement(f"x<{other}").specifier.contains(version, prereleases=True)
