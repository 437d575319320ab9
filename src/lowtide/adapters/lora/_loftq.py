"""LoftQ: quantise weights, and start adapters from the quantisation error.

Source: Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models" (arXiv:2310.08659).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import quant
from ...core import ConfigError, LinearWeight, StructureError, Tree, is_count
from ._adapter import shard_adapter
from ._config import Config
from ._model import add
from ._principal import dense_matrix, pissa
from ._sites import adapted_sites, replace
from ._weight import LoRAWeight


def loftq(
    model: Tree, config: Config, format: str = "nf4", *, key: Array, num_steps: int = 1, block: int | None = None
) -> Tree:
    """Quantise weights and give them adapters that begin as an approximation of the quantisation error.

    Two steps alternate: Q becomes the quantised W - s B A, and s B A becomes the best approximation of W - Q of its
    rank.

    Args:
        model: the model, whose targets are matrices of floating-point numbers.
        config: of LoRA, without DoRA; its `init` is "peft".
        format: of the quantised weights, as for `lowtide.quantize`.
        key: a JAX random key.
        num_steps: how often both steps are done. With 1, Q is the quantised W: the base is that of `lowtide.quantize`,
            and the saved adapter fits that base. With more, Q is another base: keep it, or merge.
        block: as for `lowtide.quantize`.

    Returns:
        The model with a `LoRAWeight` on a `lowtide.QuantizedWeight` in place of each target.

    Raises:
        ConfigError: for DoRA, another `init`, a number of steps below 1, and an unknown format.
        StructureError: for a target that is already quantised; and as `add`.
        SelectionError: as `add`.

    Memory:
        The quantised weights and adapters. For one matrix at a time, three copies in float32, and its decomposition.
        The model's own weights stay until it is dropped.

    Examples:
        >>> from lowtide.adapters.lora import Config, loftq
        >>> w = jax.random.normal(jax.random.key(0), (32, 64))
        >>> node = loftq({"w": w}, Config(rank=4, targets="w"), "int4", key=jax.random.key(1))["w"]
        >>> lost = w - node.weight.dense()
        >>> bool(jnp.linalg.norm(lost - node.scaling * node.lora_b @ node.lora_a) < jnp.linalg.norm(lost))
        True

    References:
        Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models" (arXiv:2310.08659).
    """
    if not is_count(num_steps, 1):
        raise ConfigError(
            f"num_steps: {num_steps!r} is not a number of steps",
            expected="at least 1",
            got=repr(num_steps),
            hint="pass 1 to leave the quantised weights as they are without adapters",
        )
    if config.dora or config.init != "peft":
        raise ConfigError(
            "LoftQ computes the initial factors of plain LoRA only",
            expected='dora=False, init="peft"',
            got=f"dora={config.dora}, init={config.init!r}",
            hint="leave both out",
        )
    form = quant.format_named(format, block)
    adapted_before = {site.index for site in adapted_sites(model)}
    added = add(model, config, key=key)
    nodes: dict[int, Any] = {}
    for site in adapted_sites(added):
        node = site.node
        if site.index in adapted_before or not isinstance(node, LoRAWeight):
            continue
        if site.is_experts:
            raise StructureError(
                f"{site.path}: quantised experts do not support adapters",
                expected="matrices, or stacks of them",
                got=f"shape {list(site.weight.shape)}",
                hint=f'leave them out of the targets, for instance with the pattern "!{site.module}"',
            )
        if isinstance(node.weight, LinearWeight):
            raise StructureError(
                f"{site.path}: is already quantised, and its quantisation error is unknown",
                expected="an array of floating-point numbers",
                got=type(node.weight).__name__,
                hint="pass the model as it was before lowtide.quantize",
            )
        nodes[site.index] = _init_loftq(node, form.name, block, num_steps)
    return replace(added, nodes)


def _init_loftq(node: LoRAWeight, form: str, block: int | None, num_steps: int) -> LoRAWeight:
    weight, rank = node.weight, node.rank
    if isinstance(weight, jax.ShapeDtypeStruct):
        quantized = jax.eval_shape(lambda w: quant.quantize({"w": w}, "w", form, block=block)["w"], weight)
        return dataclasses.replace(node, weight=quantized)

    def init_matrix(matrix: Any, is_adapted: bool) -> tuple[Any, Array, Array]:
        target = dense_matrix(matrix)
        lora_a, lora_b = jnp.zeros((rank, target.shape[1])), jnp.zeros((target.shape[0], rank))
        codes: Any = None
        for _ in range(num_steps if is_adapted else 1):
            residual = target - node.scaling * jnp.matmul(lora_b, lora_a, precision=jax.lax.Precision.HIGHEST)
            codes = quant.quantize({"w": residual}, "w", form, block=block)["w"]
            if is_adapted:
                lora_a, lora_b = pissa(target - codes.dense(jnp.float32), rank, node.scaling)
        # `residual` is float32, but the node replaces a weight of the original dtype.
        return dataclasses.replace(codes, weight_dtype=jnp.dtype(weight.dtype).name), lora_a, lora_b

    if weight.ndim == 2:
        codes, lora_a, lora_b = init_matrix(weight, True)
    else:
        mask = [True] * len(weight) if node.layer_scale is None else [bool(scale) for scale in node.layer_scale]
        layers = [init_matrix(weight[index], mask[index]) for index in range(len(weight))]
        codes, lora_a, lora_b = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return shard_adapter(dataclasses.replace(node, weight=codes, lora_a=lora_a, lora_b=lora_b))
