"""Training on several devices and in several processes: sharding rules, checks between processes, fingerprints."""

from ._processes import SHARED as SHARED
from ._processes import Processes as Processes
from ._processes import any_process as any_process
from ._processes import call_on_first as call_on_first
from ._processes import check_equal as check_equal
from ._processes import check_shared_folder as check_shared_folder
from ._processes import fingerprint as fingerprint
from ._processes import placed as placed
from ._sharding import STAGE as STAGE
from ._sharding import ShardingRules as ShardingRules
from ._sharding import abstract as abstract
from ._sharding import make_mesh as make_mesh

__all__ = [
    "Processes",
    "SHARED",
    "STAGE",
    "ShardingRules",
    "abstract",
    "fingerprint",
    "any_process",
    "make_mesh",
    "call_on_first",
    "placed",
    "check_shared_folder",
    "check_equal",
]
