"""Host offload of activations, parameters and optimizer state, and optimizer updates inside the backward pass."""

from ..hlo import copy_options as copy_options
from ._host_memory import memory_kinds as memory_kinds
from ._host_memory import to_device as to_device
from ._host_memory import to_host as to_host
from ._names import Name as Name
from ._names import Names as Names
from ._names import checkpoint as checkpoint
from ._names import named_residuals as named_residuals
from ._names import names as names
from ._names import tag as tag
from ._optimizer import check_shardings as check_shardings
from ._optimizer import check_transformation as check_transformation
from ._optimizer import explicit_shardings as explicit_shardings
from ._optimizer import num_devices as num_devices
from ._optimizer import optimizer as optimizer
from ._optimizer import state_shardings as state_shardings
from ._optimizer import without_explicit_axes as without_explicit_axes
from ._scan import scan as scan
from ._streaming import is_part as is_part
from ._streaming import is_taken_apart as is_taken_apart
from ._streaming import plan as plan
from ._streaming import stream as stream
from ._streaming import traced_program as traced_program
from ._verify import Placement as Placement
from ._verify import verify as verify
from .layerwise import Clip as Clip
from .layerwise import LayerwiseState as LayerwiseState
from .layerwise import LayerwiseStep as LayerwiseStep
from .layerwise import layerwise_step as layerwise_step

__all__ = [
    "Clip",
    "LayerwiseState",
    "LayerwiseStep",
    "Name",
    "Names",
    "Placement",
    "check_shardings",
    "check_transformation",
    "checkpoint",
    "copy_options",
    "explicit_shardings",
    "is_part",
    "is_taken_apart",
    "layerwise_step",
    "memory_kinds",
    "named_residuals",
    "names",
    "num_devices",
    "optimizer",
    "plan",
    "scan",
    "state_shardings",
    "stream",
    "tag",
    "to_device",
    "to_host",
    "traced_program",
    "verify",
    "without_explicit_axes",
]
