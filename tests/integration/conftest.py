"""Fixtures that start processes."""

from ..forks import fork as fork
from ..forks import fork_anywhere as fork_anywhere
