"""What to adapt, and how strongly."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from ...core import ConfigError, is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A LoRA configuration.

    Raises:
        ConfigError: for a rank below 1, an alpha that is not positive and finite, or targets that are no patterns.

    Examples:
        >>> Config(rank=8, targets="**/{q,k,v,o}_proj").scaling
        4.0
    """

    rank: int = 16
    """Inner dimension of the correction B A; its parameters are ``rank * (out + in)`` for each matrix."""
    alpha: float = 32.0
    """The correction is scaled by ``alpha / rank``, so that a change of rank needs no new learning rate."""
    targets: str | Sequence[str] = "**/{q,v}_proj"
    """Globs on the paths of modules (whatever holds a leaf named ``weight``) or on the paths of the weights
    themselves; patterns that start with ``!`` exclude. They have to be weights that the model multiplies through
    `lowtide.core.linear`."""

    def __post_init__(self) -> None:
        """Check the fields; a list of targets becomes a tuple."""
        if not is_count(self.rank, 1):
            raise ConfigError(
                f"rank: {self.rank!r} is no rank",
                expected="an integer of at least 1",
                got=repr(self.rank),
                hint="common ranks are 8, 16 and 64; to train no adapter, do not add one",
            )
        alpha: Any = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 < float(alpha) < math.inf:
            raise ConfigError(
                f"alpha: {self.alpha!r} cannot scale a correction",
                expected="a finite number above 0 (with 0 the adapter would have no effect and no gradient)",
                got=repr(self.alpha),
                hint="a common choice is twice the rank",
            )
        targets: Any = self.targets if isinstance(self.targets, str) else tuple(self.targets)
        if not targets or not all(isinstance(pattern, str) and pattern for pattern in targets):
            raise ConfigError(
                f"targets: {self.targets!r} names nothing to adapt",
                expected="a glob, or several",
                got=repr(self.targets),
                hint='for instance "**/{q,v}_proj", or "**/*_proj" for every projection',
            )
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "alpha", float(self.alpha))
        object.__setattr__(self, "targets", targets)

    @property
    def scaling(self) -> float:
        """The factor of B A: ``alpha / rank``."""
        return self.alpha / self.rank
