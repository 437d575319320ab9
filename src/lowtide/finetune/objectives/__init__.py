"""Objectives of a fine-tuning run: the loss, and the records that it reads.

Each module has one objective. `OBJECTIVES` lists them by name; a new objective is a module and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._objective import Objective as Objective
from ._preferences import DPO
from ._supervised import SUPERVISED
from ._supervised import num_targets as num_targets

OBJECTIVES: Mapping[str, Objective] = {"sft": SUPERVISED, "dpo": DPO}
"""Objectives by the name that `FinetuneConfig.objective` has."""

__all__ = ["OBJECTIVES", "Objective", "num_targets"]
