"""Shared code of the benchmarks: the header of a raw result, and shapes placed for a target."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from lowtide.memory import versions

ROOT = Path(__file__).resolve().parent
MIB = 2**20
MEASURED = ("src/lowtide", "benchmarks/*.py")
"""Paths whose uncommitted changes affect the figures, as Git path specifications."""


def header(command: str) -> dict[str, Any]:
    """Return versions, commit and date, which later comparisons of a figure need."""
    return {
        "command": command,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *MEASURED)),
        "python": platform.python_version(),
        "versions": {**versions(), "optax": metadata.version("optax")},
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a raw result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def mib(num_bytes: int | None) -> str:
    """Format bytes in MiB with two decimals, the unit of the published figures."""
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.2f}"


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
