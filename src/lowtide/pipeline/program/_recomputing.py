"""A block that its backward pass recomputes, from an input that may be kept in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core import OWN_NAMES, StructureError, Tree, check_host_slices, recomputed

Block = Callable[[Tree, Any, Tree], Any]
_INPUT_NAME = f"{OWN_NAMES}block_input"


def recomputing(block: Block, remat: bool | Callable[..., bool], *, inputs_on_host: bool) -> Block:
    """Make a block that recomputes in its backward pass, as `remat` selects (see `LayerStack.hidden`).

    Raises while tracing: `StructureError` if no part of the input can be kept on the host, `PlacementError` for a GPU
    whose XLA reads host memory in the wrong order.
    """
    if remat is False:
        return block
    policy = None if remat is True else remat
    block = recomputed(block) if remat is True else block
    if not inputs_on_host:
        return jax.checkpoint(block, policy=policy, prevent_cse=False)

    def named_block(layer: Tree, h: Any, batch: Tree) -> Any:
        check_host_slices()
        if not any(map(_can_wait_on_host, jax.tree.leaves(h))):
            raise StructureError(
                'inputs="host": no input of a block can be kept in host memory',
                expected="a floating-point array with at least two axes in h",
                got=str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", h)),
                hint='pass inputs="device"',
            )
        h = jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT_NAME) if _can_wait_on_host(leaf) else leaf, h)
        return block(layer, h, batch)

    return jax.checkpoint(named_block, policy=_offload_policy(policy), prevent_cse=False)


def _can_wait_on_host(leaf: Any) -> bool:
    """Return whether it is an array of rows. A TPU cannot slice a single half-precision vector from host memory."""
    return leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _offload_policy(policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a policy that offloads a block's input to the host and delegates everything else to `policy`."""
    offload_input = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def decide(primitive: Any, *args: Any, **params: Any) -> Any:
        if policy is None or params.get("name") == _INPUT_NAME:
            return offload_input(primitive, *args, **params)
        return policy(primitive, *args, **params)

    return decide
