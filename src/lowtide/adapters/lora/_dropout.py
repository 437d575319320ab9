"""Dropout of adapters, with a random key from the caller and no stored state."""

from __future__ import annotations

import dataclasses
import numbers
import zlib
from typing import Any

import jax
from jaxtyping import Array

from ...core import ConfigError, StructureError, Tree
from ._adapter import kind_of
from ._kernel import LoRAKernel
from ._saved import SavedWeight
from ._sites import adapted_sites, replace
from ._vectors import IA3Weight
from ._weight import LoRAWeight


def dropout(model: Tree, rate: float, *, key: Array) -> Tree:
    """Return the model for one training step, with dropout on the inputs of the corrections.

    Call it in a loss function, with a new key for every step. `lowtide.Trainer` passes such a key to a loss function
    that takes ``key``, and the same key when a run is resumed: ``def loss(model, batch, *, key, training)``. The keys
    are leaves of the nodes, one per layer. So they are right under `jax.lax.scan`, and a block that is recomputed in
    the backward pass draws the same numbers. Without this call a model has no dropout. With `lowtide.adapted`, call it
    outside the function, which sees arrays: ``lt.adapted(fn)(lt.lora.dropout(model, 0.1, key=key), batch)``.

    Each product draws one mask of the shape of its inputs. So all examples of a `jax.vmap` have the same mask, and so
    have all steps of a scan over time. For different masks, call it inside, with a key for each: ``jax.vmap(lambda x,
    key: fn(lt.lora.dropout(model, 0.1, key=key), x))(x, jax.random.split(key,
    len(x)))``, and in a scan with ``jax.random.fold_in(key, step)``.

    Args:
        model: a model with LoRA, DoRA or VeRA adapters.
        rate: the fraction of each correction's inputs that is set to zero, at least 0 and less than 1.
        key: a JAX random key.

    Returns:
        The model, its adapters with a `dropout_key`.

    Raises:
        ConfigError: for a rate out of range.
        StructureError: when there is no adapter, or one of (IA)³, which has no correction, of a kernel or of experts.

    Memory:
        The backward pass keeps the inputs of each correction, after dropout, in addition to those of the weight.

    Examples:
        >>> import jax.numpy as jnp
        >>> from lowtide.adapters.lora import Config, add
        >>> model = add({"w": jnp.ones((4, 4))}, Config(rank=2, targets="w"), key=jax.random.key(0))
        >>> dropout(model, 0.1, key=jax.random.key(1))["w"].dropout
        0.1
    """
    value: Any = rate
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < 1:
        raise ConfigError(
            f"rate: {rate!r} is not a dropout rate",
            expected="a number of at least 0 and less than 1",
            got=repr(rate),
            hint="pass for instance 0.05",
        )
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    if not adapted:
        hint = "add one with lt.lora.add; call dropout outside of lt.adapted's function, which gets arrays"
        raise StructureError("the model has no adapter to apply dropout to", hint=hint)
    nodes: dict[int, Any] = {}
    for site in adapted:
        if isinstance(site.node, (IA3Weight, LoRAKernel)) or site.is_experts:
            kind = "an adapter of experts" if isinstance(site.node, LoRAWeight) else kind_of(site.node)
            hint = "leave the dropout out, or this weight out of the targets"
            raise StructureError(
                f"{site.path}: {kind} does not support dropout", got=type(site.node).__name__, hint=hint
            )
        site_key = jax.random.fold_in(key, zlib.crc32(site.path.encode()))
        layers = site.weight.shape[:-2]
        keys = jax.random.split(site_key, layers) if layers else site_key
        nodes[site.index] = dataclasses.replace(site.node, dropout_key=keys, dropout=float(value))
    return replace(model, nodes if value else {})
