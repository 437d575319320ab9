"""Model families: their Hugging Face config fields and parameter names, as one table for each family (`Family`)."""

from ._family import Family as Family
from ._registry import FAMILIES as FAMILIES
from ._registry import family_of as family_of

__all__ = ["FAMILIES", "Family", "family_of"]
