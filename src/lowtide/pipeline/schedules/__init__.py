"""Pipeline schedules as data: make, validate, simulate and draw them. This package needs no JAX."""

from ._actions import Action as Action
from ._actions import Kind as Kind
from ._costs import Costs as Costs
from ._make import SCHEDULES as SCHEDULES
from ._make import schedule as schedule
from ._schedule import Schedule as Schedule
from ._simulate import Simulation as Simulation
from ._simulate import scan_makespan as scan_makespan
from ._simulate import simulate as simulate
from ._tables import Tables as Tables
from ._tables import Waiting as Waiting
from ._tables import tables as tables
from ._ticks import ticks as ticks

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "SCHEDULES",
    "Schedule",
    "Simulation",
    "Tables",
    "Waiting",
    "scan_makespan",
    "schedule",
    "simulate",
    "tables",
    "ticks",
]
