"""Memory reports as plain data, their differences, and their views; this package needs no JAX."""

from ._buffers import DERIVED_ROLES as DERIVED_ROLES
from ._buffers import Buffer as Buffer
from ._buffers import Space as Space
from ._buffers import live_bytes as live_bytes
from ._diff import MemoryDiff as MemoryDiff
from ._diff import diff as diff
from ._facts import DiffRow as DiffRow
from ._facts import SpaceBytes as SpaceBytes
from ._facts import versions as versions
from ._report import MemoryReport as MemoryReport
from ._run_facts import Chart as Chart
from ._run_facts import RunFacts as RunFacts
from .views._run import run_page as run_page

__all__ = [
    "Buffer",
    "Chart",
    "DERIVED_ROLES",
    "DiffRow",
    "MemoryDiff",
    "MemoryReport",
    "RunFacts",
    "Space",
    "SpaceBytes",
    "diff",
    "live_bytes",
    "run_page",
    "versions",
]
