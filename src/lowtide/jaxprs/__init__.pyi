"""Read jaxprs: operations that hold jaxprs, traversals, FLOP counts, differences between JAX versions."""

from ._operations import PRIMITIVES as PRIMITIVES
from ._operations import Body as Body
from ._operations import Kind as Kind
from ._operations import bodies as bodies
from ._operations import called as called
from ._operations import eqn_flops as eqn_flops
from ._operations import equations as equations
from ._operations import evaluate as evaluate
from ._operations import fold as fold
from ._operations import jaxpr_flops as jaxpr_flops
from ._operations import kind_of as kind_of
from ._operations import manual_devices as manual_devices
from ._operations import runner as runner
from ._operations import variables_read as variables_read
from ._operations import walk as walk
from ._operations import with_bodies as with_bodies
from ._versions import close as close
from ._versions import consts_of as consts_of
from ._versions import is_closed as is_closed
from ._versions import make_jaxpr as make_jaxpr
from ._versions import opened as opened
from ._versions import plain as plain
from ._versions import policy_names as policy_names
from ._versions import saves_name as saves_name
from ._versions import scan_counts as scan_counts
from ._versions import source_line as source_line
