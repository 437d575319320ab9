"""Several adapters of one base as one, which is folded in and rounded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import ConfigError, StructureError, Tree
from ._kernel import LoRAKernel
from ._model import attach
from ._weight import LoRAWeight

_KINDS = (LoRAWeight, LoRAKernel)


def combine(models: Sequence[Tree], weights: Sequence[float] | None = None) -> Tree:
    """Make one model of several that have different adapters on the same base: the weighted sum of their corrections.

    The factors stand beside each other, so the rank of a weight is the sum of its ranks, and no product is made.

    Args:
        models: of one base, each with its adapters, such as `load` returns for several directories.
        weights: a factor for each model's corrections; None: 1 for each.

    Returns:
        A model with adapters on every weight that has one in any of the models; the base is that of the first.

    Raises:
        ConfigError: when there are no models, or not one weight a model.
        StructureError: when the models are not of one base.

    Memory:
        The adapters once more, in the dtype of their factors; the base is not copied.

    Examples:
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> from lowtide import lora
        >>> lora.merge(combine([{"w": node}, {"w": node}], [1.0, 0.5]))["w"].tolist()
        [[4.5, 4.5], [4.5, 4.5]]
    """
    factors = [1.0] * len(models) if weights is None else [*weights]
    if not models or len(factors) != len(models):
        raise ConfigError(
            "adapters and weights do not fit each other",
            expected="at least one model, and one weight for each",
            got=f"{len(models)} models, {len(factors)} weights",
            hint="leave the weights out to add the adapters up as they are",
        )

    def of_one(*nodes: Any) -> Any:
        base = nodes[0].weight if isinstance(nodes[0], _KINDS) else nodes[0]
        found = [(node, by) for node, by in zip(nodes, factors, strict=True) if isinstance(node, _KINDS)]
        for node in nodes:
            other = node.weight if isinstance(node, _KINDS) else node
            if other.shape != base.shape:
                raise StructureError(
                    "the models are not of one base", expected=base.shape, got=other.shape, hint="load them onto one"
                )
        if not found:
            return base
        first = found[0][0]
        at = first.num_stacked if isinstance(first, LoRAKernel) else -2
        lora_a = jnp.concatenate([jnp.asarray(node.lora_a) for node, _ in found], axis=at)
        lora_b = jnp.concatenate([by * node.scaling * jnp.asarray(node.lora_b) for node, by in found], axis=-1)
        rank = float(lora_b.shape[-1])
        if isinstance(first, LoRAKernel):
            return dataclasses.replace(first, lora_a=lora_a, lora_b=lora_b, alpha=rank)
        return attach(base, lora_a, lora_b, rank)

    try:
        return jax.tree.map(of_one, *models, is_leaf=lambda node: isinstance(node, _KINDS))
    except (ValueError, AttributeError) as error:
        if isinstance(error, StructureError):
            raise
        raise StructureError(
            "the models are not of one base", got=str(error)[:200], hint="load them onto one"
        ) from error
