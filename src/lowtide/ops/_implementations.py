"""Names and descriptions of the implementations of attention, for code that must not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Implementation = Literal["cudnn", "splash", "blocks", "xla"]
"""Name of an implementation of attention."""

IMPLEMENTATIONS: Mapping[Implementation, str] = {
    "cudnn": "cuDNN's kernel",
    "splash": "JAX's splash attention kernel",
    "blocks": "blocks of queries and keys",
    "xla": "all scores at once",
}
"""Description of each implementation of attention."""
