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
    copies_by_name = {b.operation: b for b in report.buffers if b.role == "copies"}
    largest: dict[int, Buffer] = {}
    for value in flow.phases:
        index, buffer = flow.copy_of(value), copies_by_name.get(flow.graph.name(value))
        if index is None or buffer is None or flow.phase(value) != "forward" or not flow.is_read_backward(value):
            continue
        # The compiler makes copies of equal type and size for another layout; a user cannot avoid them.
        if buffer.path != owners.leaves[index].path or _is_layout_copy(owners, value, index):
            continue
        if index not in largest or buffer.num_bytes > largest[index].num_bytes:
            largest[index] = buffer
    for index, buffer in largest.items():
        leaf = owners.leaves[index]
        detail = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source or buffer.scope}"
        if _is_cast_of_frozen(owners, buffer, index):
            yield Finding(
                rule="frozen-cast",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=f"{detail}, beside {format_bytes(leaf.num_bytes)}",
                # Neither a barrier nor jax.checkpoint keeps a compiler from casting all layers before the loop.
                remedy=f"pass it in {buffer.dtype}, as it does not train",
            )
        elif buffer.source:  # without a source line the compiler made it, such as the bfloat16 inputs of TPU products
            yield Finding(
                rule="residual-copy",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=detail,
                remedy="recompute it: jax.checkpoint around the cast or gather and the product that reads it; or make "
                "it once, outside of the loop",
            )


def dequantized_residuals(owners: Owners, report: MemoryReport) -> Iterator[Finding]:
    """Find frozen weights that the forward pass dequantises and keeps as floats for the backward pass."""
    flow = owners.dataflow
    float_buffers = {b.operation: b for b in report.buffers if b.role == "activations" and b.source}
    for value in flow.phases:
        buffer = float_buffers.get(flow.graph.name(value))
        if buffer is None or flow.phase(value) != "forward" or not flow.graph.is_floating(value):
            continue
        ancestors = reachable([value], lambda node: [source for source, _ in flow.sources(node)])
        arguments = {owners.parameters[node]: node for node in ancestors if node in owners.parameters}
        if not arguments or arguments.keys() & set(owners.replaced.values()):
            continue
        size, graph = flow.graph.num_elements(value), flow.graph
        integers = {index: graph.num_elements(node) for index, node in arguments.items() if not graph.is_floating(node)}
        narrow = {index for index, node in arguments.items() if graph.item_type(node)[1] <= 8}
        # Codes are integers of at most 8 bits, one for each weight, or 4-bit codes packed in pairs.
        codes = [index for index, count in integers.items() if index in narrow and size in (count, 2 * count)]
        has_scales = len(arguments) > 1  # scales may be integers, too
        if codes and has_scales:
            leaf = owners.leaves[codes[0]]
            detail = f"{buffer.dtype}{list(buffer.shape)} from {buffer.source}"
            yield Finding(
                rule="dequantized-residual",
                path=leaf.path,
                num_bytes=buffer.num_bytes,
                detail=f"{detail}, beside {format_bytes(leaf.num_bytes)}",
                remedy="make it anew for each product: jax.checkpoint around dequantisation and product, as in the "
                "weights of lowtide.quantize",
            )


def _is_cast_of_frozen(owners: Owners, copy: Buffer, leaf: int) -> bool:
    """Return whether a copy holds a whole frozen leaf, which no output replaces, in fewer bytes."""
    is_whole = math.prod(copy.shape) == owners.dataflow.graph.num_elements(owners.parameter_of[leaf])
    is_narrower = copy.num_bytes < owners.leaves[leaf].num_bytes
    is_frozen = owners.dataflow.is_differentiated(leaf) and leaf not in owners.replaced.values()
    return is_whole and is_narrower and is_frozen


def _is_layout_copy(owners: Owners, value: Value, leaf: int) -> bool:
    graph = owners.dataflow.graph
    parameter = owners.parameter_of[leaf]
    is_same_type = graph.shape(value).element_type == graph.shape(parameter).element_type
    return is_same_type and graph.num_elements(value) <= graph.num_elements(parameter)
