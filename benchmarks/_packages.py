"""Wheels for a GPU machine without a network: which ones are missing, and how to download them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

LIST = Path(__file__).resolve().parent / "gpu-wheels.txt"
PROJECT = LIST.parent.parent / "pyproject.toml"
EXTRAS = ("train", "finetune", "nnx", "equinox", "peers")
"""Extras that the parts use if they are installed."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def requirement(line: str) -> Any:
    """Parse a requirement with `packaging` or, on a machine without it, with pip's copy."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    return Requirement(line)


def wheels(python: str) -> Iterator[str]:
    """Yield the pins of the list, ``name==version``, for a Python version such as ``3.12``."""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            need = requirement(text)
            if need.marker is None or need.marker.evaluate({"python_version": python}):
                yield f"{need.name}{need.specifier}"


def normal(name: str) -> str:
    """Return the normalised name of a distribution, as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking() -> list[str]:
    """Return pins that are not installed, or whose installed version Lowtide or a listed package does not accept.

    The requirements of a new wheel are only known after its installation, so a second call may return more.
    """
    pins = {normal(pin.partition("==")[0]): pin for pin in wheels(f"{sys.version_info[0]}.{sys.version_info[1]}")}
    named = [(found.metadata["Name"], found) for found in metadata.distributions()]
    here = {normal(name): found for name, found in reversed(named) if name}  # the first one on the path counts
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    lines += [line for name in pins if name in here for line in here[name].requires or ()]
    needs = [need for need in map(requirement, lines) if need.marker is None or need.marker.evaluate({"extra": ""})]
    versions = {name: found.version for name, found in here.items()}
    refused = {
        name
        for need in needs
        if (name := normal(need.name)) in here and not need.specifier.contains(versions[name], prereleases=True)
    }
    return [pin for name, pin in pins.items() if name not in here or name in refused]


def download(directory: Path, python: str) -> None:
    """Download the wheels of the list for Linux on x86_64."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--implementation", "cp", "--python-version", python, "--dest", str(directory)]
    words += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    subprocess.run([*words, *wheels(python)], check=True)
    sizes = [path.stat().st_size for path in directory.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 2**20:.1f} MiB, in {directory}")
