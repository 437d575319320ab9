"""Check donation: a donated buffer that the program does not reuse means two copies of its data.

JAX at most warns about donated buffers that it cannot reuse. This module reads the executable: ``input_output_alias``
lists the leaves whose buffers an output reuses. XLA may write any output of the same size and layout into a buffer. So
if several leaves are equal in size and layout, the reported path may be wrong; the bytes are correct.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..core import DonationError, format_bytes
from ..hlo import ArgumentLeaf, aliased, argument_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class UndonatedLeaf:
    """A donated leaf whose buffer no output reuses."""

    path: str
    """The argument's number, name or keyword, then the tree path: ``0/params/w``."""
    num_bytes: int
    """Padded bytes on one device; if the program does not read the leaf, unpadded bytes of the whole leaf."""
    is_read: bool
    """Whether the program reads the leaf. `jax.jit` drops an unread leaf, and the caller keeps its buffer."""


def undonated(compiled: Any, *, arg_names: Sequence[str] | None = None) -> tuple[UndonatedLeaf, ...]:
    """List the donated leaves that a compiled program did not reuse for an output.

    Args:
        compiled: a `jax.stages.Compiled` of a function jitted with `donate_argnums` or `donate_argnames`. With
            ``keep_unused=True``, JAX also donates leaves that the program does not read.
        arg_names: names of the positional arguments, which replace their numbers in paths.

    Returns:
        The leaves in flattening order, except leaves of zero bytes. Empty when every donated buffer is reused, or when
        nothing was donated.

    Memory:
        Reads the executable's text; allocates nothing on a device.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> step = jax.jit(lambda state, x: jax.tree.map(lambda s: s + x, state), donate_argnums=0)
        >>> undonated(step.lower({"w": jnp.ones(3)}, 1.0).compile())
        ()
    """
    leaves = argument_leaves(compiled)
    pairs = zip(leaves, aliased(compiled, leaves), strict=True)
    return tuple(
        UndonatedLeaf(
            path=_named_path(leaf, arg_names), num_bytes=leaf.num_bytes or leaf.logical_bytes, is_read=leaf.kept
        )
        for leaf, is_aliased in pairs
        if leaf.donated and not is_aliased and leaf.logical_bytes
    )


def check_donation(compiled: Any, *, arg_names: Sequence[str] | None = None) -> None:
    """Raise unless a compiled program reuses every donated buffer for an output.

    Args:
        compiled: as in `undonated`.
        arg_names: as in `undonated`.

    Raises:
        DonationError: when nothing is donated, or a donated buffer is not reused; the error lists paths and bytes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> check_donation(jax.jit(lambda w: w * 2, donate_argnums=0).lower(jnp.ones(3)).compile())
    """
    donated = [info.donated for info in jax.tree.leaves(compiled.args_info)]
    if not any(donated):
        raise DonationError(
            f"the compiled program has no donated argument: {len(donated)} argument leaves, none donated",
            hint="jit the function with donate_argnums, and donate an argument that holds arrays",
        )
    undonated_leaves = undonated(compiled, arg_names=arg_names)
    if not undonated_leaves:
        return
    total = sum(leaf.num_bytes for leaf in undonated_leaves)
    largest = sorted(undonated_leaves, key=lambda leaf: -leaf.num_bytes)[:8]
    text = ", ".join(
        f"{leaf.path} ({format_bytes(leaf.num_bytes)}{'' if leaf.is_read else ', not read'})" for leaf in largest
    )
    tail = f", and {len(undonated_leaves) - len(largest)} more" if len(undonated_leaves) > len(largest) else ""
    raise DonationError(
        f"{largest[0].path}: donated, but no output reuses its buffer",
        got=f"{len(undonated_leaves)} donated leaves ({format_bytes(total)}) that would be held twice: {text}{tail}",
        hint="return an updated value of the same shape, dtype, sharding and memory kind for each, or do not donate it",
    )


def _named_path(leaf: ArgumentLeaf, arg_names: Sequence[str] | None) -> str:
    if arg_names is None or not isinstance(leaf.argument, int) or leaf.argument >= len(arg_names):
        return leaf.path
    return "/".join([arg_names[leaf.argument], *leaf.path.split("/")[1:]])
