"""Plans for reading leaves: a `QuantizedWeight` if it can hold all stored weights exactly, else an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import format_bytes
from ...quant import QuantizedWeight, placed
from .._tensors import DTYPES, Readable, Source, read_leaf, stored_dtype
from ._weights import Packed, Stored


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to read a leaf, as decided from the headers."""

    path: str
    sources: Sequence[Stored]
    like: Any
    """Shape and dtype of the leaf: one `jax.ShapeDtypeStruct`, or a `QuantizedWeight` of them."""
    why: str = ""
    """Reason why quantised weights become an array; empty otherwise."""

    def read(self, place: jax.sharding.Sharding | None) -> Any:
        """Read the leaf into placed arrays.

        Args:
            place: sharding of the weight, or None for JAX's default device.

        Memory:
            As in `read_leaf`; the parts of a `QuantizedWeight` are read one after another.
        """
        if not isinstance(self.like, QuantizedWeight):
            return read_leaf(self.sources, self.like.shape, self.like.dtype, place)
        packed = [source for source in self.sources if isinstance(source, Packed)]
        if place is None or isinstance(place, jax.sharding.NamedSharding):
            places = placed(self.like, place)
        else:
            places = jax.tree.map(lambda _: place, self.like)
        shapes, treedef = jax.tree.flatten(self.like)
        shardings = [None] * len(shapes) if places is None else treedef.flatten_up_to(places)
        leaves: list[Any] = []
        for index, (leaf, leaf_sharding) in enumerate(zip(shapes, shardings, strict=True)):
            parts: list[Readable] = [weight.parts[index] for weight in packed]
            leaves.append(read_leaf(parts, leaf.shape, leaf.dtype, leaf_sharding))
        return treedef.unflatten(leaves)


def plan(path: str, sources: Sequence[Stored], shape: tuple[int, ...], dtype: Any, otherwise: Any) -> Plan:
    """Decide how to read a leaf.

    Args:
        path: path of the leaf.
        sources: stored weights of the leaf, in the order of its stack.
        shape: shape of the leaf.
        dtype: dtype of the leaf; None for the stored dtype, or the dtype before quantisation.
        otherwise: dtype for quantised weights whose file does not record the dtype before quantisation.
    """
    leaf_dtype = dtype
    if dtype is None:
        leaf_dtype = stored_dtype(
            DTYPES[weight.dtype] if isinstance(weight, Source) else weight.weight_dtype or jnp.dtype(otherwise).name
            for weight in sources
        )
    packed = [weight for weight in sources if isinstance(weight, Packed)]
    forms = {(weight.form, len(weight.parts)) for weight in packed if weight.form is not None}
    is_matrix = "experts" not in path.split("/")
    if (
        len(packed) == len(sources)
        and len(forms) == 1
        and all(weight.form is not None for weight in packed)
        and is_matrix
    ):
        return Plan(path, sources, _quantized_shapes(packed[0], shape, leaf_dtype))
    reason = "" if not forms else "their layers are quantised differently" if is_matrix else "they are experts"
    return Plan(path, sources, jax.ShapeDtypeStruct(shape, jnp.dtype(leaf_dtype)), reason)


def dequantization_notes(plans: Sequence[Plan]) -> list[str]:
    """Return messages on quantised weights that become arrays although a node could hold each alone, with reasons."""
    notes: list[str] = []
    for reason in dict.fromkeys(leaf_plan.why for leaf_plan in plans if leaf_plan.why):
        affected = [leaf_plan for leaf_plan in plans if leaf_plan.why == reason]
        size = format_bytes(
            sum(math.prod(leaf_plan.like.shape) * leaf_plan.like.dtype.itemsize for leaf_plan in affected)
        )
        notes.append(
            f"{', '.join(leaf_plan.path for leaf_plan in affected)} are loaded as arrays of {size}, because {reason}"
        )
    return notes


def _quantized_shapes(weight: Packed, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight:
    """Return the `QuantizedWeight` of a stack of weights, with shapes as leaves."""
    assert weight.form is not None
    stack = shape[:-2]
    is_double = len(weight.parts) == 4
    dtypes = (weight.form.codes, jnp.uint8 if is_double else weight.form.scales, jnp.float32, jnp.float32)
    leaves = [
        jax.ShapeDtypeStruct((*stack, *part.shape), jnp.dtype(part_dtype))
        for part, part_dtype in zip(weight.parts, dtypes, strict=False)
    ]
    nested, offset = (leaves[2], leaves[3]) if is_double else (None, None)
    name = jnp.dtype(dtype).name
    return QuantizedWeight(leaves[0], leaves[1], nested, offset, weight.form.name, weight.form.block, name)
