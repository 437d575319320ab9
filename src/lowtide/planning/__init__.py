"""Choose how a training step uses memory: the fastest step that a compiler confirms to fit a budget."""

from ._decisions import Decision as Decision
from ._decisions import Remat as Remat
from ._decisions import planned as planned
from ._plan import Attempt as Attempt
from ._plan import Plan as Plan
from ._search import Problem as Problem
from ._search import search as search

__all__ = ["Attempt", "Decision", "Plan", "Problem", "Remat", "planned", "search"]
