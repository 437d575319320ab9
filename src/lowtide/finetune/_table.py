"""Memory table of a fine-tuning step, optionally compared with a naive step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ..memory import MemoryReport, versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of a fine-tuning step; all figures are compiled or counted from shapes."""

    ours: MemoryReport
    """Report of the step that runs."""
    trainable_bytes: int
    """Adapters, or the whole model with `full`, without padding."""
    frozen_bytes: int
    """The base of the adapters, without padding."""
    gradient_bytes: int
    """Gradients of our step that are live at the same time: of all adapters; with `full`, of one layer or the largest
    outer leaf, plus a tied embedding."""
    optimizer_bytes: int
    """Optimizer state."""
    naive_gradient_bytes: int | None = None
    """Gradient tree of the naive step; None without a comparison."""
    naive: MemoryReport | None = None
    """Report of AdamW over the whole model, all on the device, with frozen leaves behind stop_gradient.

    None when it does not compile for lack of memory, or without a comparison.
    """

    @property
    def is_compared(self) -> bool:
        """Whether the table has figures of the naive step."""
        return self.naive_gradient_bytes is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `memory.json`; keys that begin with ``naive_`` are present only with a comparison."""
        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "int"}
        naive = {
            "naive_gradient_bytes": self.naive_gradient_bytes,
            "naive_device_bytes": None if self.naive is None else self.naive.device_bytes,
            "naive_by_role": None if self.naive is None else dict(self.naive.by_role),
        }
        return {
            "target": self.ours.target.name,
            **counts,
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
    """Return the peak bytes of JAX's allocator on the first device so far; None where it keeps no count (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")
