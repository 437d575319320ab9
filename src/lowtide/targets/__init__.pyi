"""Catalogue of chips, and compile targets. Only `target`, `targets` and `Target.devices` import JAX."""

from ._catalogue import busy_rows as busy_rows
from ._targets import Target as Target
from ._targets import catalogue_targets as catalogue_targets
from ._targets import limit_bytes as limit_bytes
from ._targets import resolve_target as resolve_target
from ._targets import target as target
from ._targets import targets as targets
