"""Compile for hardware that is here or not, and say where every byte of the program goes."""

from ._analyze import analyze as analyze
from ._analyze import analyze_compiled as analyze_compiled
from ._donation import UndonatedLeaf as UndonatedLeaf
from ._donation import check_donation as check_donation
from ._donation import undonated as undonated
from ._report import MemoryReport as MemoryReport
from ._report import SpaceBytes as SpaceBytes
from ._report import versions as versions
from ._targets import Target as Target
from ._targets import target as target

__all__ = [
    "MemoryReport",
    "SpaceBytes",
    "Target",
    "UndonatedLeaf",
    "analyze",
    "analyze_compiled",
    "check_donation",
    "target",
    "undonated",
    "versions",
]
