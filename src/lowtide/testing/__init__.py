"""Implementation of the pytest plugin, imported only by it: limits, scaling, placement and snapshots of memory."""

from ._memory import DeviceMemory as DeviceMemory
from ._memory import Limit as Limit
from ._memory import Ratio as Ratio
from ._memory import Slope as Slope
from ._memory import Snapshots as Snapshots

__all__ = ["DeviceMemory", "Limit", "Ratio", "Slope", "Snapshots"]
