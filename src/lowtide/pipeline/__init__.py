"""Pipelines: schedules as data, the split of a backward pass, and the one program that runs a schedule."""

from ._actions import Action as Action
from ._actions import Kind as Kind
from ._costs import Costs as Costs
from ._make import SCHEDULES as SCHEDULES
from ._make import schedule as schedule
from ._pipeline import Pipeline as Pipeline
from ._pipeline import value_and_grad as value_and_grad
from ._schedule import Schedule as Schedule
from ._simulate import Simulation as Simulation
from ._simulate import simulate as simulate
from ._simulate import ticks as ticks
from ._split import Residuals as Residuals
from ._split import StageSplit as StageSplit
from ._split import TracedSplit as TracedSplit
from ._split import split_backward as split_backward
from ._stages import RankBytes as RankBytes
from ._stages import StageReport as StageReport
from ._work import PassFlops as PassFlops
from ._work import Unsplit as Unsplit

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "PassFlops",
    "Pipeline",
    "RankBytes",
    "Residuals",
    "Schedule",
    "Simulation",
    "StageReport",
    "StageSplit",
    "TracedSplit",
    "Unsplit",
    "schedule",
    "simulate",
    "split_backward",
    "ticks",
    "value_and_grad",
]
