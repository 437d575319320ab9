"""One SPMD program that runs a schedule."""

from ._pipeline import Pipeline as Pipeline
from ._pipeline import value_and_grad as value_and_grad
from ._stages import RankBytes as RankBytes
from ._stages import StageReport as StageReport

__all__ = ["Pipeline", "RankBytes", "StageReport", "value_and_grad"]
