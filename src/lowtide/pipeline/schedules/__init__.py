"""Pipeline schedules as data: make, validate, simulate and draw them. This package needs no JAX."""

from ._schedule import Action as Action
from ._schedule import Costs as Costs
from ._schedule import Kind as Kind
from ._schedule import Schedule as Schedule
from ._search import SCHEDULES as SCHEDULES
from ._search import schedule as schedule
from ._simulation import Simulation as Simulation
from ._simulation import scan_makespan as scan_makespan
from ._simulation import simulate as simulate
from ._ticks import Tables as Tables
from ._ticks import Waiting as Waiting
from ._ticks import tables as tables
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
