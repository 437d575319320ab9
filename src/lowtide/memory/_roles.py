"""Role of a computed value in a report, and the argument or result that it belongs to.

The first rule that applies decides. This module does not handle arguments, whose roles come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..hlo import Value
from ._dataflow import Dataflow

_OF_PASS = {"backward": "cotangents", "recompute": "recomputed"}
"""Roles of values to which no other rule applies, by the pass that makes them."""


def role_of(value: Value, flow: Dataflow, leaves: Sequence[str], written_first: Mapping[Value, str]) -> tuple[str, str]:
    """Return the role of a value, and the path of the argument or result that it belongs to.

    Args:
        value: a value from `Dataflow.standing_for`.
        flow: the dataflow of the program.
        leaves: the paths of the argument leaves.
        written_first: paths of results, by the values that are later moved into the result's buffer.

    Returns:
        The role and the path; the path is empty if the value belongs to no argument or result.
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
