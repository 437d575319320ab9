"""Chips as data, and compile targets made of them. JAX is not needed before a target's devices are requested."""

from ._catalogue import busy_rows as busy_rows
from ._targets import Target as Target
from ._targets import catalogue_targets as catalogue_targets
from ._targets import resolve_target as resolve_target
from ._targets import target as target
from ._targets import targets as targets
