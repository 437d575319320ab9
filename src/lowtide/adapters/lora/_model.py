"""Put adapters into a model, and fold them into its weights."""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...core import ConfigError, ExternalNames, StructureError, Tree, put
from .._uses import Use
from ._config import Config
from ._found import find_uses
from ._kernel import LoRAKernel, fold, start
from ._sites import Site, adapted_sites, layer_names, replace, select_sites
from ._weight import LoRAWeight


def add(
    model: Tree, config: Config, *, key: Array, fn: Callable[..., Any] | None = None, args: Sequence[Any] = ()
) -> Tree:
    """Give chosen weights a low-rank adapter that starts as no change.

    A is uniform in ±1/sqrt(in), as in PEFT, and B is zero, both float32 whatever the weight's dtype. A module's draw
    depends on `key` and on its path only, not on what else is adapted.

    Args:
        model: any pytree that multiplies by its weights and does nothing else with them: through
            `lowtide.core.linear`, or as ``weight @ x``, ``x @ weight`` or ``x @ weight.T``, as Equinox does. Weights
            have shape [out, in], or [num_layers, out, in] for stacked layers. (One of shape [in, out] trains as well;
            what its files call A is PEFT's B, transposed.) `jax.ShapeDtypeStruct` leaves give abstract adapters.
        config: rank, scale and targets.
        key: a JAX random key.
        fn: a function of the model, such as its loss, where that does other things with weights: with `lowtide.adapted`
            it is what will train. Its program says what each target is: a matrix whatever its axes' order, a kernel of
            attention or of a convolution, a table of embeddings, a stack of such.
        args: the other arguments of `fn`: arrays, or shapes.

    Returns:
        The model with a `LoRAWeight` in place of each target, or a `LoRAKernel` where `fn` uses it as no matrix;
        ``"**/lora_*"`` selects exactly the adapters.

    Raises:
        SelectionError: when a target pattern matches nothing.
        StructureError: for a target that is no floating-point matrix, or has an adapter already; with `fn` for one that
            it does more with, or nothing, without it from `lowtide.value_and_grad` and the trainer.
        ConfigError: when the rank exceeds a target's smaller dimension, and for a model of Keras or NNX.

    Memory:
        ``4 * rank * (out + in)`` bytes for each matrix. The weights are referred to, not copied. Adapters of a weight
        with a `jax.sharding.NamedSharding` are sharded like it along the axes they share.

    Examples:
        >>> model = {"q_proj": {"weight": jnp.ones((8, 8))}}
        >>> model = add(model, Config(rank=2, targets="q_proj"), key=jax.random.key(0))
        >>> model["q_proj"]["weight"].lora_a.shape
        (2, 8)

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
    """
    _refuse_object(model)
    targets = select_sites(model, config.targets)
    of_program = {} if fn is None else find_uses(model, targets, fn, args)
    for site in targets:
        _check_target(model, site, config.rank, of_program.get(site.index))
    return replace(model, {site.index: _start(site, config, key, of_program.get(site.index)) for site in targets})


def merge(model: Tree) -> Tree:
    """Fold every adapter into its weight: W + scaling B A, in float32, rounded once to the dtype of W.

    Args:
        model: a model with adapters.

    Returns:
        The model with plain weights, without any `LoRAWeight`. Rounding to bfloat16 loses the part of a correction
        that is below half a unit in the last place of W.

    Raises:
        StructureError: when there is no adapter, or a base weight is no array.

    Memory:
        A new array for each adapted weight, made one at a time; while one is made, a float32 copy of one layer of it.
        The given model is not changed: drop it to free its weights.

    Examples:
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> merge({"w": node})["w"].tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    adapted = adapted_sites(model)
    if not adapted:
        raise StructureError(
            "the model has no adapter to merge",
            expected="at least one LoRAWeight",
            hint="add one with lt.lora.add or lt.lora.load; a merged model is merged already",
        )
    for site in adapted:
        is_known = site.is_matrix or isinstance(site.node, LoRAKernel)
        if not is_known or not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise StructureError(
                f"{site.path}: cannot merge into a {type(site.weight).__name__}",
                expected="a floating-point array of shape [out, in] or [num_layers, out, in]",
                hint="merge into an unquantised base weight",
            )
    return replace(
        model,
        {site.index: fold(site.node) if isinstance(site.node, LoRAKernel) else _fold(site.node) for site in adapted},
    )


def attach(weight: Any, lora_a: Any, lora_b: Any, alpha: float) -> LoRAWeight:
    """Make the node for a weight and its factors; these are sharded like the weight along the axes they share."""
    sharding = _named_sharding(weight)
    if sharding is not None:
        *layers, out, inner = (*sharding.spec, *(None,) * (len(weight.shape) - len(sharding.spec)))
        lora_a = _place(lora_a, jax.sharding.NamedSharding(sharding.mesh, jax.P(*layers, None, inner)))
        lora_b = _place(lora_b, jax.sharding.NamedSharding(sharding.mesh, jax.P(*layers, out, None)))
    return LoRAWeight(weight, lora_a, lora_b, alpha)


def _refuse_object(model: Any) -> None:
    """Raise for a model of a library that has low-rank layers of its own, and makes arrays of its weights."""
    # Who has such a model has imported its library.
    of_nnx = "nnx.LoRALinear in the layers' place, and lowtide.ext.nnx.Bridge(module, wrt=nnx.LoRAParam)"
    hints = {
        ("keras", "Layer"): "layer.enable_lora(rank), which lowtide.ext.keras.Bridge trains",
        ("flax.nnx", "Module"): of_nnx,
        ("flax.nnx", "State"): of_nnx,
    }
    for (library, kind), hint in hints.items():
        cls = getattr(sys.modules.get(library), kind, None)
        if cls is not None and isinstance(model, cls):
            raise ConfigError(
                f"a {type(model).__name__} takes no adapter of Lowtide: its layers make arrays of their weights",
                expected="a pytree whose weights are multiplied with lowtide.linear or @, such as an Equinox module",
                got=f"{type(model).__module__}.{type(model).__name__}",
                hint=hint,
            )


def _check_target(model: Tree, site: Site, rank: int, use: Use | None) -> None:
    if isinstance(site.node, (LoRAWeight, LoRAKernel)):
        raise StructureError(
            f"{site.path}: already has an adapter of rank {site.node.rank}",
            expected="a weight without one",
            hint="fold the old one in with lt.lora.merge, or leave this target out",
        )
    shape = tuple(site.weight.shape)
    if use is None and not site.is_matrix:
        raise StructureError(
            f"{site.path}: no weight matrix to adapt",
            expected="a floating-point array of shape [out, in] or [num_layers, out, in]",
            got=f"{site.weight.dtype}{list(shape)}",
            hint=f'narrow the targets, for instance with the pattern "!{site.module}"',
        )
    if use is None and isinstance(model, ExternalNames):
        layer_names(model, site)  # refuses vectors of stacked layers, which look like a matrix [num_layers, dim]
    rows = len(shape) - 1 if use is None else use.num_stacked + use.num_rows
    first = len(shape) - 2 if use is None else use.num_stacked
    most = min(math.prod(shape[first:rows]), math.prod(shape[rows:]))
    if rank > most:
        raise ConfigError(
            f"rank: {rank} is more than {site.path} can use",
            expected=f"at most {most}, the smaller side of {list(shape)}",
            got=rank,
            hint="lower the rank, or train the whole weight",
        )


def _start(site: Site, config: Config, key: Array, use: Use | None) -> LoRAWeight | LoRAKernel:
    """Make a fresh adapter: A random, B zero; both abstract when the weight is."""
    key = jax.random.fold_in(key, zlib.crc32(site.path.encode()))
    if use is not None and not (use.is_matrix and site.is_matrix):
        return start(site.weight, use, config.rank, config.alpha, key)
    *layers, out, inner = site.weight.shape
    shape_a, shape_b = (*layers, config.rank, inner), (*layers, out, config.rank)
    if isinstance(site.weight, jax.ShapeDtypeStruct):
        lora_a, lora_b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (shape_a, shape_b))
    else:
        # kaiming_uniform_(a=sqrt(5)), PEFT's choice: gain sqrt(2 / (1 + 5)), bound gain * sqrt(3 / in).
        bound = float(inner) ** -0.5
        lora_a = jax.random.uniform(key, shape_a, jnp.float32, -bound, bound)
        lora_b = jnp.zeros(shape_b, jnp.float32)
    return attach(site.weight, lora_a, lora_b, config.alpha)


def _place(factor: Any, sharding: jax.sharding.NamedSharding) -> Any:
    if isinstance(factor, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(factor.shape, factor.dtype, sharding=sharding)
    return put(factor, sharding)


def _fold(node: LoRAWeight) -> Any:
    if isinstance(node.weight, jax.ShapeDtypeStruct):
        return node.weight
    weight, lora_a, lora_b = (jnp.asarray(leaf) for leaf in (node.weight, node.lora_a, node.lora_b))
    sharding = _named_sharding(weight)
    if weight.ndim == 2:
        merged = _fold_matrix(weight, lora_a, lora_b, node.scaling)
    else:
        # Layer by layer into one buffer. In a `lax.map`, XLA for CPU would hold a bfloat16 stack in float32.
        merged = jnp.zeros(weight.shape, weight.dtype, device=sharding)
        for layer in range(weight.shape[0]):
            merged = _fold_layer(merged, layer, weight, lora_a, lora_b, node.scaling)
    return merged if sharding is None else jax.device_put(merged, sharding)


@jax.jit
def _fold_matrix(
    weight: Float[Array, "out in"], lora_a: Float[Array, "r in"], lora_b: Float[Array, "out r"], scaling: float
) -> Float[Array, "out in"]:
    # Without `precision` a GPU or TPU would multiply float32 in a shorter format.
    a, b = lora_a.astype(jnp.float32), lora_b.astype(jnp.float32)
    delta = jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
    return (weight.astype(jnp.float32) + scaling * delta).astype(weight.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _fold_layer(
    merged: Float[Array, "L out in"],
    layer: int,
    weight: Float[Array, "L out in"],
    lora_a: Float[Array, "L r in"],
    lora_b: Float[Array, "L out r"],
    scaling: float,
) -> Float[Array, "L out in"]:
    one = [jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) for leaf in (weight, lora_a, lora_b)]
    return jax.lax.dynamic_update_index_in_dim(merged, _fold_matrix(*one, scaling), layer, 0)


def _named_sharding(weight: Any) -> jax.sharding.NamedSharding | None:
    sharding = None if isinstance(weight, jax.core.Tracer) else getattr(weight, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
