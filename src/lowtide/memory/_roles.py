"""Role of a computed value in a report, and the argument or result that it belongs to.

The first rule that applies decides. This module does not handle arguments, whose roles come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..hlo import Value
from ._dataflow import Dataflow

_PASS_ROLES = {"backward": "cotangents", "recompute": "recomputed"}
"""Roles of values to which no other rule applies, by the pass that makes them."""


def role_of(
    value: Value, flow: Dataflow, leaf_paths: Sequence[str], output_paths: Mapping[Value, str]
) -> tuple[str, str]:
    """Return the role of a value from `Dataflow.representative`, and the path of the argument or result it belongs to.

    A value that belongs to neither has an empty path. `output_paths` has the paths of results, by the values that are
    later moved into the result's buffer.
    """
    if flow.graph.shape(value).tuple_shapes:
        return "temporaries", ""
    if (copied_leaf := flow.copy_of(value)) is not None:
        return "copies", leaf_paths[copied_leaf]
    if (gradient_leaf := flow.gradient_of(value)) is not None:
        return "gradients", leaf_paths[gradient_leaf]
    if flow.is_activation(value):
        return "activations", ""
    if value in output_paths:
        return "outputs", output_paths[value]
    if not flow.scope_and_source(value)[0]:
        return "unattributed", ""
    if flow.is_scratch(value):
        return "workspaces", ""
    return _PASS_ROLES.get(flow.phase(value), "temporaries"), ""
