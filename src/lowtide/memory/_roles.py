"""Roles, the categories of memory: callers give arguments their roles, and rules give roles to computed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core import ConfigError, check_type
from ..hlo import ArgumentLeaf, Value
from ..report import DERIVED_ROLES
from ._dataflow import Dataflow

Role = int | str | Sequence[int | str]
"""Arguments that have a role: a position, a keyword, or a sequence of positions and keywords."""
_RESERVED = ("other", *DERIVED_ROLES)
_PASS_ROLES = {"backward": "cotangents", "recompute": "recomputed"}
"""Maps a pass to the role of its values that match no other rule of `computed_role`."""


def argument_roles(
    roles: Mapping[str, Role], leaves: list[ArgumentLeaf], num_args: int, keywords: Sequence[str], static: Sequence[int]
) -> list[str]:
    """Return each leaf's role, or ``other``. Positions in `roles` count static arguments; `leaf.argument` does not."""
    dynamic = {position: index for index, position in enumerate(p for p in range(num_args) if p not in static)}
    keys: dict[int | str, int | str] = {**dynamic, **{p - num_args: index for p, index in dynamic.items()}}
    keys.update({keyword: keyword for keyword in keywords})
    owners: dict[int | str, str] = {}
    check_type("roles", roles, Mapping, 'a mapping such as {"params": 0}', hint="name the position or the keyword")
    for role, arguments in roles.items():
        if role in _RESERVED:
            raise ConfigError(f"the role name {role!r} is reserved", hint=f"reserved: {', '.join(_RESERVED)}")
        for argument in (arguments,) if isinstance(arguments, (int, str)) else arguments:
            if argument not in keys:
                keyword_text = f" or keywords {sorted(keywords)}" if keywords else ""
                raise ConfigError(
                    f"role {role!r} names argument {argument!r}, which is static or does not exist",
                    expected=f"one of the positions {sorted(dynamic)}{keyword_text}",
                    hint="count positions from 0, in the order of the call",
                )
            if keys[argument] in owners:
                both = f"{owners[keys[argument]]!r} and {role!r}"
                raise ConfigError(f"argument {argument!r} has two roles, {both}", hint="give every argument one role")
            owners[keys[argument]] = role
    return [owners.get(leaf.argument, "other") for leaf in leaves]


def named_roles(roles: Mapping[str, str], leaves: Sequence[ArgumentLeaf]) -> list[str]:
    """Return each leaf's role in a dumped program: ``roles[name]`` for an argument `name`, or `name` if it has none."""
    return [roles.get(str(leaf.argument), str(leaf.argument)) for leaf in leaves]


def computed_role(
    flow: Dataflow, leaves: Sequence[ArgumentLeaf], output_paths: Mapping[Value, str], value: Value
) -> tuple[str, str]:
    """Return the role of a `Dataflow.representative`, and the path of its argument or output (empty if none)."""
    # The first rule that applies decides. A value that belongs to no argument and no output has an empty path.
    if flow.graph.shape(value).tuple_shapes:
        return "temporaries", ""
    if (copied_leaf := flow.copy_of(value)) is not None:
        return "copies", leaves[copied_leaf].path
    if (gradient_leaf := flow.gradient_of(value)) is not None:
        return "gradients", leaves[gradient_leaf].path
    if flow.is_activation(value):
        return "activations", ""
    if value in output_paths:
        return "outputs", output_paths[value]
    if not flow.scope_and_source(value)[0]:
        return "unattributed", ""
    if flow.is_scratch(value):
        return "workspaces", ""
    return _PASS_ROLES.get(flow.phase(value), "temporaries"), ""
