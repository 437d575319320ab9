"""What each of several devices has of arrays that they divide."""

from __future__ import annotations

from ..core import BATCH_AXES, divided_mesh


def divided_sizes(batch: int, heads: int) -> tuple[int, int]:
    """Return how many rows and heads one device has of all, where a mesh is known that divides them."""
    mesh = divided_mesh()
    sizes = {} if mesh is None else mesh.shape
    for name in (*BATCH_AXES, "tensor"):
        size = 1 if name in getattr(mesh, "manual_axes", ()) else sizes.get(name, 1)
        batch, heads = (batch, _part(heads, size)) if name == "tensor" else (_part(batch, size), heads)
    return batch, heads


def _part(whole: int, size: int) -> int:
    """Return what a device has of an axis, which is divided evenly or not at all."""
    return whole if whole % size else whole // size
