"""Directories that other software quantised, read as quantised weights in Lowtide's layout."""

from ._scheme import Scheme as Scheme
from ._scheme import scheme_of as scheme_of
from ._weights import Packed as Packed
from ._weights import Stored as Stored
from ._weights import group_tensors as group_tensors

__all__ = ["Packed", "Scheme", "Stored", "group_tensors", "scheme_of"]
