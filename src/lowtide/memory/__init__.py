"""Compile a function for attached or absent hardware, and report which arrays and operations own its bytes."""

from ..hlo import crossed_donations as crossed_donations
from ..hlo import is_out_of_memory as is_out_of_memory
from ..report import Buffer as Buffer
from ..report import DiffRow as DiffRow
from ..report import MemoryDiff as MemoryDiff
from ..report import MemoryReport as MemoryReport
from ..report import SpaceBytes as SpaceBytes
from ..report import diff as diff
from ..report import versions as versions
from ..targets import Target as Target
from ..targets import target as target
from ..targets import targets as targets
from ._analysis import Program as Program
from ._analysis import analyze as analyze
from ._analysis import analyze_compiled as analyze_compiled
from ._analysis import compile as compile
from ._donation import UndonatedLeaf as UndonatedLeaf
from ._donation import check_donation as check_donation
from ._donation import undonated as undonated
from ._job import Job as Job
from .advice._extrapolation import ByteFit as ByteFit
from .advice._extrapolation import Extrapolation as Extrapolation
from .advice._extrapolation import SizePoint as SizePoint
from .advice._extrapolation import extrapolate as extrapolate
from .advice._findings import Finding as Finding
from .advice._lint import lint as lint
from .advice._oom import explain_oom as explain_oom
from .advice._oom import shortage as shortage
from .advice._remedies import Remedy as Remedy
from .advice._remedies import advise as advise
from .advice._remedies import remedies as remedies

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
    "advise",
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
