"""Read jaxprs: what versions of JAX say otherwise, and the arithmetic of operations."""

from ._flops import eqn_flops as eqn_flops
from ._flops import jaxpr_flops as jaxpr_flops
from ._flops import manual_devices as manual_devices
from ._versions import CALLS as CALLS
from ._versions import close as close
from ._versions import is_closed as is_closed
from ._versions import make_jaxpr as make_jaxpr
from ._versions import plain as plain
from ._versions import policy_names as policy_names
from ._versions import saves_name as saves_name
from ._versions import scan_counts as scan_counts
from ._versions import source_line as source_line

__all__ = [
    "CALLS",
    "close",
    "eqn_flops",
    "is_closed",
    "jaxpr_flops",
    "make_jaxpr",
    "manual_devices",
    "plain",
    "policy_names",
    "saves_name",
    "scan_counts",
    "source_line",
]
