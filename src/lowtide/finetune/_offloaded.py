"""Host memory in fine-tuning, and the loss of a model that is partly in host memory.

This module translates the words of ``FinetuneConfig.offload`` to arguments of `lowtide.offload`: the leaves to load
onto the host, the wrapper of the optimizer, the place of residuals, and the layerwise step of ``full``.

Known limits: text is sampled without a cache, so a model whose layers are on the host is streamed once for each token.
To evaluate and to sample, the whole embedding and head of a fully tuned model move to the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from .. import offload
from ..adapters import lora
from ..core import LayerStack, Tree, hidden_in_groups, memory_space, recomputed
from ..models import Decoder
from ..optim import low_precision
from ._config import FinetuneConfig
from ._recipe import adamw

_INPUT = "block_input"


def is_hosted(config: FinetuneConfig) -> Callable[[str, Any], bool] | None:
    """Return a predicate for `lowtide.models.load` that selects the leaves for host memory, or None for no leaf."""
    memories = places(config) if config.full else {"layers": "host"} if "parameters" in (config.offload or ()) else {}
    # Vectors stay on the device: they are small, and a TPU cannot slice a single half-precision row in host memory.
    # Leaves of `layers` have one more axis than a weight, the layer, so a stacked vector has two.
    min_ndim = {name: 3 if name == "layers" else 2 for name in ("layers", "outer") if memories.get(name) == "host"}
    return (lambda path, leaf: leaf.ndim >= min_ndim.get(path.partition("/")[0], math.inf)) if min_ndim else None


def is_weight(path: str, leaf: Any) -> bool:
    """Return whether a leaf is a parameter; integer leaves, such as the attention window of each layer, are data."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def places(config: FinetuneConfig) -> dict[str, str]:
    """Return the `place` argument of `lowtide.offload.layerwise_step` for ``full``."""
    words = config.offload
    on_host = {
        "layers": words is None or "parameters" in words,
        "outer": words is not None and "parameters" in words,
        "opt_state": words is None or "optimizer" in words,
        "inputs": words is None or "activations" in words,
    }
    return {name: "host" if is_on_host else "device" for name, is_on_host in on_host.items()}


def inputs_place(config: FinetuneConfig) -> Literal["device", "host"]:
    """Return the memory that holds the input of each block until the backward pass of adapters."""
    return "host" if "activations" in (config.offload or ()) else "device"


def optimizer(config: FinetuneConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Build AdamW with clipping, with the moments in the configured memory and dtype."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    loraplus = [lora.plus(config.loraplus_ratio)] if config.loraplus_ratio != 1 else []
    tx = _with_state_format(config, optax.chain(clip, adamw(config, schedule), *loraplus))
    return offload.optimizer(tx) if "optimizer" in (config.offload or ()) else tx


def _with_state_format(config: FinetuneConfig, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Store an optimizer's state in `state_dtype`; bfloat16 parameters of `full` also get 8-bit residuals."""
    state_format = None if config.state_dtype == "float32" else config.state_dtype
    weights = "split" if config.full and config.param_dtype == "bfloat16" else None
    return tx if state_format is weights is None else low_precision(tx, state_format, weights=weights)


def full_step(
    config: FinetuneConfig, stack: LayerStack, schedule: optax.Schedule, weight: Callable[[Tree], Any]
) -> offload.LayerwiseStep:
    """Build the step that applies AdamW to every parameter inside the backward pass."""
    mode: Any = config.clip_mode
    return offload.layerwise_step(
        stack,
        _with_state_format(config, adamw(config, schedule)),
        wrt=is_weight,
        place=places(config),
        clip=offload.Clip(max_norm=config.max_grad_norm, mode=mode) if config.max_grad_norm else None,
        num_microbatches=config.num_microbatches,
        weight=weight,
    )


def loss(
    model: Decoder, batch: Tree, *, remat: bool = True, layers_per_remat: int = 1, inputs: str = "device"
) -> tuple[Any, Tree]:
    """Compute `lowtide.models.loss` for a model whose leaves may be in host memory.

    Layers on the host are streamed one at a time and always recomputed, each from its own kept input. So the device
    holds two layers, and the activations of one. Outer leaves on the host move as a whole. With ``inputs="host"`` the
    kept inputs of blocks are on the host until the backward pass.
    """
    outer = _on_device(model.outer)
    if inputs == "host" and not _on_host(model.layers) and layers_per_remat == 1:
        return _offload_inputs(model.stack).apply(outer, model.layers, batch)
    h = _hidden(model, outer, batch, remat=remat, layers_per_remat=layers_per_remat, inputs=inputs)
    return model.stack.last(outer, h, batch)


def hidden(model: Decoder, batch: Tree) -> Any:
    """Compute the last block's output [B, T, D] for a model whose leaves may be in host memory."""
    return _hidden(model, _on_device(model.outer), batch, remat=False, inputs="device")


def _hidden(model: Decoder, outer: Tree, batch: Tree, *, remat: bool, layers_per_remat: int = 1, inputs: Any) -> Any:
    stack = model.stack
    if not _on_host(model.layers):
        if inputs == "host":
            moves = _to_host, offload.to_device
            return hidden_in_groups(stack, outer, model.layers, batch, layers_per_remat, moves)
        return stack.hidden(outer, model.layers, batch, remat=remat, layers_per_remat=layers_per_remat)

    def body(h: Any, layer: Tree) -> tuple[Any, None]:
        return recomputed(stack.block)(layer, h, batch), None

    return offload.scan(body, stack.first(outer, batch), model.layers, inputs=inputs)[0]


def _offload_inputs(stack: LayerStack) -> LayerStack:
    """Return the stack with blocks that offload their input to the host and recompute everything else."""

    def block(layer: Tree, h: Any, batch: Tree) -> Any:
        return recomputed(stack.block)(layer, checkpoint_name(h, _INPUT), batch)

    # The stack scans over its blocks. XLA does not merge recomputation with the forward pass across two loops, so the
    # barriers of `prevent_cse` would have no use.
    return dataclasses.replace(stack, block=offload.checkpoint(block, offload=[_INPUT], prevent_cse=False))


def _to_host(h: Tree) -> Tree:
    """Move the inputs of a group of blocks to the host, except integers and vectors.

    A TPU cannot slice a single half-precision vector in host memory.
    """
    return offload.to_host(h, lambda path, leaf: leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _on_host(tree: Tree) -> bool:
    return any(memory_space(leaf) == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def _on_device(tree: Tree) -> Tree:
    return offload.to_device(tree) if _on_host(tree) else tree
