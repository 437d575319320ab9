"""Memory reports as plain data, their differences, and their views; this package needs no JAX."""

from ._facts import COMPUTED_ROLES as COMPUTED_ROLES
from ._facts import DERIVED_ROLES as DERIVED_ROLES
from ._facts import Buffer as Buffer
from ._facts import DiffRow as DiffRow
from ._facts import Space as Space
from ._facts import SpaceBytes as SpaceBytes
from ._facts import live_bytes as live_bytes
from ._facts import versions as versions
from ._report import MemoryDiff as MemoryDiff
from ._report import MemoryReport as MemoryReport
from ._report import diff as diff
from .views._files import dump_json as dump_json
from .views._files import parse_fields as parse_fields
from .views._run import Chart as Chart
from .views._run import RunFacts as RunFacts
from .views._run import run_page as run_page
