"""Pipelines: schedules as data, simulated without a device."""

from ._actions import Action as Action
from ._actions import Kind as Kind
from ._costs import Costs as Costs
from ._make import SCHEDULES as SCHEDULES
from ._make import schedule as schedule
from ._schedule import Schedule as Schedule
from ._simulate import Simulation as Simulation
from ._simulate import simulate as simulate
from ._simulate import ticks as ticks

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Simulation",
    "schedule",
    "simulate",
    "ticks",
]
