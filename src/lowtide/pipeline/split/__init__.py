"""Split of a stage's backward pass into an input pass (I) and a weight pass (W)."""

from ._cut import Pass as Pass
from ._graph import Value as Value
from ._replay import Buffers as Buffers
from ._replay import Environment as Environment
from ._replay import Rows as Rows
from ._replay import Slot as Slot
from ._replay import at as at
from ._replay import put as put
from ._split import PassFlops as PassFlops
from ._split import TracedSplit as TracedSplit
from ._split import Unsplit as Unsplit
from ._split import replace_leaves as replace_leaves
from ._split import trace_split as trace_split

__all__ = [
    "Buffers",
    "Environment",
    "Pass",
    "PassFlops",
    "Rows",
    "Slot",
    "TracedSplit",
    "Unsplit",
    "Value",
    "at",
    "put",
    "replace_leaves",
    "trace_split",
]
