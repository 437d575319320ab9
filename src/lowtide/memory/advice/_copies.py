"""Lint rules for copies of arguments that are kept for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core import format_bytes
from ...hlo import Value, reachable
from ...report import Buffer, MemoryReport
from .._owners import Owners
from ._finding import Finding


def residual_copies(owners: Owners, report: MemoryReport) -> Iterator[Finding]:
    """Find copies of arguments that are kept for the backward pass, and casts of whole frozen arguments."""
    flow = owners.dataflow
    written = {b.operation: b for b in report.buffers if b.role == "copies"}
    largest: dict[int, Buffer] = {}
    for value in flow.phases:
        at, buffer = flow.copy_of(value), written.get(flow.graph.name(value))
        if at is None or buffer is None or flow.phase(value) != "forward" or not flow.is_read_backward(value):
            continue
        # The compiler makes copies of equal type and size for another layout; a user cannot avoid them.
        if buffer.path != owners.leaves[at].path or _same_items(owners, value, at):
            continue
        if at not in largest or buffer.num_bytes > largest[at].num_bytes:
            largest[at] = buffer
    for at, buffer in largest.items():
        leaf = owners.leaves[at]
        where = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source or buffer.scope}"
        if _is_cast_of_frozen(owners, buffer, at):
            yield Finding(
                rule="frozen-cast",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=f"{where}, beside {format_bytes(leaf.num_bytes)}",
                # Neither a barrier nor jax.checkpoint keeps a compiler from casting all layers before the loop.
                remedy=f"pass it in {buffer.dtype}, as it does not train",
            )
        elif buffer.source:  # without a source line the compiler made it, such as the bfloat16 inputs of TPU products
            yield Finding(
                rule="residual-copy",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=where,
                remedy="recompute it: jax.checkpoint around the cast or gather and the product that reads it; or make "
                "it once, outside of the loop",
            )


def dequantized(owners: Owners, report: MemoryReport) -> Iterator[Finding]:
    """Find frozen weights that the forward pass dequantises and keeps as floats for the backward pass."""
    flow = owners.dataflow
    floats = {b.operation: b for b in report.buffers if b.role == "activations" and b.source}
    for value in flow.phases:
        buffer = floats.get(flow.graph.name(value))
        if buffer is None or flow.phase(value) != "forward" or not flow.graph.is_floating(value):
            continue
        made_of = reachable([value], lambda one: [source for source, _ in flow.sources(one)])
        arguments = {owners.parameters[one]: one for one in made_of if one in owners.parameters}
        if not arguments or arguments.keys() & set(owners.replaced.values()):
            continue
        items, graph = flow.graph.num_elements(value), flow.graph
        integers = {at: graph.num_elements(one) for at, one in arguments.items() if not graph.is_floating(one)}
        narrow = {at for at, one in arguments.items() if graph.item_type(one)[1] <= 8}
        # Codes are integers of at most 8 bits, one for each weight, or 4-bit codes packed in pairs.
        codes = [at for at, number in integers.items() if at in narrow and items in (number, 2 * number)]
        has_scales = len(arguments) > 1  # scales may be integers, too
        if codes and has_scales:
            leaf = owners.leaves[codes[0]]
            where = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source}"
            yield Finding(
                rule="dequantized-residual",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=f"{where}, beside {format_bytes(leaf.num_bytes)}",
                remedy="make it anew for each product: jax.checkpoint around dequantisation and product, as in the "
                "weights of lowtide.quantize",
            )


def _is_cast_of_frozen(owners: Owners, copy: Buffer, leaf: int) -> bool:
    """Return whether a copy holds a whole frozen leaf, which no output replaces, in fewer bytes."""
    is_whole = math.prod(copy.shape) == owners.dataflow.graph.num_elements(owners.parameter_of[leaf])
    is_narrower = copy.num_bytes < owners.leaves[leaf].num_bytes
    is_frozen = owners.dataflow.is_differentiated(leaf) and leaf not in owners.replaced.values()
    return is_whole and is_narrower and is_frozen


def _same_items(owners: Owners, value: Value, leaf: int) -> bool:
    graph = owners.dataflow.graph
    parameter = owners.parameter_of[leaf]
    same_type = graph.shape(value).element_type == graph.shape(parameter).element_type
    return same_type and graph.num_elements(value) <= graph.num_elements(parameter)
