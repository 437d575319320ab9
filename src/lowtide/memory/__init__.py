"""Compile for hardware that is here or not, and say where every byte of the program goes."""

from ._analyze import analyze as analyze
from ._analyze import analyze_compiled as analyze_compiled
from ._buffers import Buffer as Buffer
from ._compile import Program as Program
from ._compile import compile as compile
from ._compile import crossed_donations as crossed_donations
from ._compile import is_out_of_memory as is_out_of_memory
from ._diff import DiffRow as DiffRow
from ._diff import MemoryDiff as MemoryDiff
from ._diff import diff as diff
from ._donation import UndonatedLeaf as UndonatedLeaf
from ._donation import check_donation as check_donation
from ._donation import undonated as undonated
from ._extrapolate import ByteFit as ByteFit
from ._extrapolate import Extrapolation as Extrapolation
from ._extrapolate import SizePoint as SizePoint
from ._extrapolate import extrapolate as extrapolate
from ._job import Job as Job
from ._lint import Finding as Finding
from ._lint import lint as lint
from ._oom import explain_oom as explain_oom
from ._oom import shortage as shortage
from ._remedies import Remedy as Remedy
from ._remedies import remedies as remedies
from ._report import MemoryReport as MemoryReport
from ._report import SpaceBytes as SpaceBytes
from ._report import versions as versions
from ._targets import Target as Target
from ._targets import target as target
from ._targets import targets as targets

__all__ = [
    "Buffer",
    "ByteFit",
    "DiffRow",
    "Extrapolation",
    "Finding",
    "Job",
    "MemoryDiff",
    "MemoryReport",
    "Program",
    "Remedy",
    "SizePoint",
    "SpaceBytes",
    "Target",
    "UndonatedLeaf",
    "analyze",
    "analyze_compiled",
    "check_donation",
    "compile",
    "crossed_donations",
    "diff",
    "explain_oom",
    "extrapolate",
    "is_out_of_memory",
    "lint",
    "remedies",
    "shortage",
    "target",
    "targets",
    "undonated",
    "versions",
]
