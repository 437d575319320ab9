"""What the pytest plugin does: limits, scaling, placement and snapshots of compiled memory. Nothing imports it."""

from ._limit import Limit as Limit
from ._memory import DeviceMemory as DeviceMemory
from ._scaling import Ratio as Ratio
from ._scaling import Slope as Slope
from ._snapshot import Snapshots as Snapshots

__all__ = ["DeviceMemory", "Limit", "Ratio", "Slope", "Snapshots"]
