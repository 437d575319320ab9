"""Training on several devices and in several processes: sharding rules, checks between processes, fingerprints."""

from ._processes import SHARED as SHARED
from ._processes import Processes as Processes
from ._processes import fingerprint as fingerprint
from ._processes import in_any as in_any
from ._processes import of_first as of_first
from ._processes import placed as placed
from ._processes import refuse_other_folders as refuse_other_folders
from ._processes import same_in_all as same_in_all
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
    "in_any",
    "make_mesh",
    "of_first",
    "placed",
    "refuse_other_folders",
    "same_in_all",
]
