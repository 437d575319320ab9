"""Advice on memory: lint findings, remedies, explained out-of-memory errors, and the largest size that fits."""

from ._extrapolation import ByteFit as ByteFit
from ._extrapolation import Extrapolation as Extrapolation
from ._extrapolation import SizePoint as SizePoint
from ._extrapolation import extrapolate as extrapolate
from ._finding import Finding as Finding
from ._lint import lint as lint
from ._oom import explain_oom as explain_oom
from ._oom import shortage as shortage
from ._remedies import Remedy as Remedy
from ._remedies import advise as advise
from ._remedies import remedies as remedies

__all__ = [
    "ByteFit",
    "Extrapolation",
    "Finding",
    "Remedy",
    "SizePoint",
    "advise",
    "explain_oom",
    "extrapolate",
    "lint",
    "remedies",
    "shortage",
]
