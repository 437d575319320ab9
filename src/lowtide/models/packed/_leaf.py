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
        wanted, treedef = jax.tree.flatten(self.like)
        where = [None] * len(wanted) if places is None else treedef.flatten_up_to(places)
        leaves: list[Any] = []
        for number, (leaf, at) in enumerate(zip(wanted, where, strict=True)):
            parts: list[Readable] = [each.parts[number] for each in packed]
            leaves.append(read_leaf(parts, leaf.shape, leaf.dtype, at))
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
    kind = dtype
    if dtype is None:
        kind = stored_dtype(
            DTYPES[each.dtype] if isinstance(each, Source) else each.weight_dtype or jnp.dtype(otherwise).name
            for each in sources
        )
    packed = [each for each in sources if isinstance(each, Packed)]
    forms = {(each.form, len(each.parts)) for each in packed if each.form is not None}
    is_matrix = "experts" not in path.split("/")
    if len(packed) == len(sources) and len(forms) == 1 and all(each.form is not None for each in packed) and is_matrix:
        return Plan(path, sources, _node(packed[0], shape, kind))
    why = "" if not forms else "not all their layers are quantised alike" if is_matrix else "they are experts"
    return Plan(path, sources, jax.ShapeDtypeStruct(shape, jnp.dtype(kind)), why)


def told(plans: Sequence[Plan]) -> list[str]:
    """Return messages on quantised weights that become arrays although a node could hold each alone, with reasons."""
    notes: list[str] = []
    for why in dict.fromkeys(each.why for each in plans if each.why):
        some = [each for each in plans if each.why == why]
        size = format_bytes(sum(math.prod(each.like.shape) * each.like.dtype.itemsize for each in some))
        notes.append(f"{', '.join(each.path for each in some)} become arrays of {size}, since {why}")
    return notes


def _node(one: Packed, shape: tuple[int, ...], dtype: Any) -> QuantizedWeight:
    """Return the `QuantizedWeight` of a stack of weights, with shapes as leaves."""
    assert one.form is not None
    stack = shape[:-2]
    is_double = len(one.parts) == 4
    dtypes = (one.form.codes, jnp.uint8 if is_double else one.form.scales, jnp.float32, jnp.float32)
    leaves = [
        jax.ShapeDtypeStruct((*stack, *part.shape), jnp.dtype(kind))
        for part, kind in zip(one.parts, dtypes, strict=False)
    ]
    nested, offset = (leaves[2], leaves[3]) if is_double else (None, None)
    name = jnp.dtype(dtype).name
    return QuantizedWeight(leaves[0], leaves[1], nested, offset, one.form.name, one.form.block, name)
