"""Families of decoders: what their Hugging Face files say, and what they call the parameters.

A family is a table, `Family`, in a file of its own; `FAMILIES` lists them.
"""

from ._family import Family as Family
from ._known import FAMILIES as FAMILIES
from ._known import family_of as family_of

__all__ = ["FAMILIES", "Family", "family_of"]
