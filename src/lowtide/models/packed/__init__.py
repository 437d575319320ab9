"""Directories that other software quantised, read as quantised weights in Lowtide's layout."""

from ._fold import folded as folded
from ._leaf import Plan as Plan
from ._leaf import dequantization_notes as dequantization_notes
from ._leaf import plan as plan
from ._scheme import Scheme as Scheme
from ._scheme import scheme_of as scheme_of
from ._weights import Packed as Packed
from ._weights import Stored as Stored

__all__ = ["Packed", "Plan", "Scheme", "Stored", "dequantization_notes", "folded", "plan", "scheme_of"]
