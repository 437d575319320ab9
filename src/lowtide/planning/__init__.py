"""Choose how a training step uses memory: the fastest step that a compiler confirms to fit a budget."""

from ._decisions import Decision as Decision
from ._decisions import Memory as Memory
from ._decisions import Remat as Remat
from ._decisions import planned as planned
from ._decisions import runs_stack as runs_stack
from ._plan import Attempt as Attempt
from ._plan import Plan as Plan
from ._search import Placement as Placement
from ._search import Problem as Problem
from ._search import all_placements as all_placements
from ._search import plan_job as plan_job
from ._search import search as search
from ._search import search_formats as search_formats

__all__ = [
    "Attempt",
    "Decision",
    "Memory",
    "Placement",
    "Plan",
    "Problem",
    "Remat",
    "all_placements",
    "plan_job",
    "planned",
    "runs_stack",
    "search",
    "search_formats",
]
