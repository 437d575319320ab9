"""The role of a value that a program computes: what a report calls it, and whose it is.

The first rule that holds decides. Arguments have the roles that the caller gives them, and are not asked about here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..hlo import Value
from ._dataflow import Dataflow

_OF_PASS = {"backward": "cotangents", "recompute": "recomputed"}
"""Of values that are nothing else, by the pass that makes them."""


def role_of(value: Value, flow: Dataflow, leaves: Sequence[str], written_first: Mapping[Value, str]) -> tuple[str, str]:
    """Say what a value is for.

    Args:
        value: as `Dataflow.standing_for` gives it.
        flow: what is known of how the program makes and uses values.
        leaves: the paths of the argument's leaves.
        written_first: the path of the result that a value is, before it is moved into the result's buffer.

    Returns:
        The role, and the path of the argument or result that the value belongs to, or nothing.
    """
    if flow.graph.shape(value).tuple_shapes:
        return "temporaries", ""
    if (copied := flow.copy_of(value)) is not None:
        return "copies", leaves[copied]
    if (gradient := flow.gradient_of(value)) is not None:
        return "gradients", leaves[gradient]
    if flow.is_activation(value):
        return "activations", ""
    if value in written_first:
        return "outputs", written_first[value]
    if not flow.described(value)[0]:
        return "unattributed", ""
    if flow.is_scratch(value):
        return "workspaces", ""
    return _OF_PASS.get(flow.phase(value), "temporaries"), ""
