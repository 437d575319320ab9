"""Where the bytes of a fine-tuning step go: the step that runs, and when it is asked for the naive one beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ..memory import MemoryReport, versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of a fine-tuning step; all figures compiled or counted from shapes."""

    ours: MemoryReport
    """The step that runs."""
    trainable_bytes: int
    """Adapters, or with `full` the whole model, without padding."""
    frozen_bytes: int
    """The base of adapters, without padding."""
    gradient_bytes: int
    """The gradients of our step that live together: of all adapters; with `full` of a layer or of the largest outer
    leaf, and of a tied embedding."""
    optimizer_bytes: int
    """The optimizer's state."""
    naive_gradient_bytes: int | None = None
    """The gradient tree of the naive step; None when nothing is compared."""
    naive: MemoryReport | None = None
    """AdamW over the whole model, everything on the device, with what is frozen behind stop_gradient; None when it does
    not compile for lack of memory, or nothing is compared."""

    @property
    def is_compared(self) -> bool:
        """Whether there are figures of the naive step."""
        return self.naive_gradient_bytes is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `memory.json`; what begins with ``naive_`` is there when it was compared."""
        counted = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "int"}
        naive = {
            "naive_gradient_bytes": self.naive_gradient_bytes,
            "naive_device_bytes": None if self.naive is None else self.naive.device_bytes,
            "naive_by_role": None if self.naive is None else dict(self.naive.by_role),
        }
        return {
            "target": self.ours.target.name,
            **counted,
            "device_bytes": self.ours.device_bytes,
            "host_bytes": self.ours.host_bytes,
            "by_role": dict(self.ours.by_role),
            "host_by_role": dict(self.ours.host_by_role),
            **(naive if self.is_compared else {}),
            "measured_peak_bytes": measured_peak_bytes(),
            "chip": self.ours.target.chip,
            "versions": versions(),
        }


def measured_peak_bytes() -> int | None:
    """Return the most bytes JAX's allocator has held on the first device so far; None where it keeps no count (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
