"""Pipelines: schedules as data, the split of a backward pass, and the one program that runs a schedule."""

from .program import Pipeline as Pipeline
from .program import RankBytes as RankBytes
from .program import StageReport as StageReport
from .program import value_and_grad as value_and_grad
from .schedules import SCHEDULES as SCHEDULES
from .schedules import Action as Action
from .schedules import Costs as Costs
from .schedules import Kind as Kind
from .schedules import Schedule as Schedule
from .schedules import Simulation as Simulation
from .schedules import scan_makespan as scan_makespan
from .schedules import schedule as schedule
from .schedules import simulate as simulate
from .schedules import ticks as ticks
from .split import PassFlops as PassFlops
from .split import Unsplit as Unsplit
