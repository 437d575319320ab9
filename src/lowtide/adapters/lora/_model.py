"""Models with adapters: add adapters, merge or remove them, apply dropout, and report what they cost."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...core import (
    ConfigError,
    ExternalNames,
    LinearWeight,
    NonFiniteError,
    StructureError,
    Tree,
    check_number,
    format_bytes,
    leaf_bytes,
    leaves_with_paths,
    match_path,
)
from .._adapted import Use, probe
from .._adapted import uses as uses_of_weights
from ._experts import check_experts
from ._kernel import LoRAKernel, merge_kernel
from ._kinds import AnyConfig, kind_of_config
from ._lora import SUM_NAMES, VARIANTS, LoRAWeight, non_sum_kind
from ._node import TRAINABLE, is_adapter, named_sharding, shard_adapter
from ._saved import SavedWeight, exclude_saved, make_saved, saved_sites
from ._sites import (
    TIED_HINT,
    TIED_MESSAGE,
    Site,
    adapted_sites,
    external_name,
    is_table,
    layer_names,
    replace,
    require_adapters,
    select_layers,
    select_sites,
    sites,
    tied_names,
)


def add(
    model: Tree,
    config: AnyConfig,
    *,
    key: Array | None = None,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
) -> Tree:
    """Add an adapter to each chosen weight; the new adapters do not change the outputs of the model.

    For LoRA, A is random, as in PEFT, and B is zero. For (IA)³ the vector is ones. For VeRA the projections are random,
    and one of the vectors is zero. Arrays that `modules_to_save` and `bias` select also train, as a copy in a
    `SavedWeight`. New arrays are float32 for any weight dtype. The random values of a LoRA module depend only on `key`
    and on its path, not on other targets.

    Args:
        model: any pytree whose targets are used only in products: through `lowtide.core.linear`, or as ``weight @ x``,
            ``x @ weight`` or ``x @ weight.T``, as in Equinox. Weights have shape [out, in], or [num_layers, out, in]
            for stacked layers. Plain LoRA also supports a weight [in, out] that is used as ``x @ weight``; its files
            hold PEFT's Bᵀ as A, and Aᵀ as B. Each expert of Lowtide's MoE models, [num_layers, num_experts, out, in],
            gets a pair of factors. For `jax.ShapeDtypeStruct` leaves, adapters are shapes, too.
        config: a `Config`, `IA3Config` or `VeRAConfig`.
        key: a JAX random key; (IA)³ needs none.
        fn: a function of the model, such as its loss, if the model uses targets in other ways; train it as
            ``lt.adapted(fn)``. Its traced program shows how it uses each target. A target is a matrix with axes in any
            order, a kernel of attention or of a convolution, an embedding table, or a stack of these.
        args: the other arguments of `fn`: arrays, or shapes.

    Returns:
        The model with a `LoRAWeight`, `IA3Weight` or `VeRAWeight` in place of each target, or a `LoRAKernel` where `fn`
        does not use it as a matrix. `TRAINABLE`, the glob ``"**/lora_*"``, selects exactly the trainable leaves.

    Raises:
        SelectionError: when a pattern matches nothing, or `exclude` or `modules_to_save` leave no target.
        StructureError: for a target that is not a floating-point matrix, already has an adapter, or is an embedding and
            also the head. For (IA)³ on outputs to which the model adds a bias itself. For an array of `modules_to_save`
            or `bias` that cannot train. For a target that `fn` does not use, or uses in several or unsupported ways.
            Without `fn`, `add` checks no use: `lowtide.value_and_grad` and the trainer raise if it is not a product.
        ConfigError: when the rank exceeds a target's smaller dimension, when `layers` names a layer that does not
            exist, or when `key` is missing. Also for configurations that kernels, experts and embeddings do not support
            (such as DoRA, `layers`, (IA)³, VeRA). Also when `model` is a Keras or NNX object: pass its arrays.

    Memory:
        LoRA: ``4 * rank * (out + in)`` bytes for each matrix, with DoRA ``4 * out`` more. (IA)³: ``4 * out`` or
        ``4 * in``. VeRA: ``4 * (rank + out)`` that train, and the projections, once per layer. The weights are shared
        with `model`; arrays that train as a whole are copied in float32. With an `init` from the weight (such as
        "pissa"), adapters hold their factors twice, and `add` decomposes one matrix at a time in float32. Adapters of a
        weight with a `jax.sharding.NamedSharding` are sharded like it along the axes they share.

    Examples:
        >>> from lowtide.adapters.lora import Config
        >>> model = {"q_proj": {"weight": jnp.ones((8, 8))}}
        >>> model = add(model, Config(rank=2, targets="q_proj"), key=jax.random.key(0))
        >>> model["q_proj"]["weight"].lora_a.shape
        (2, 8)

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
    """
    _refuse_library_object(model)
    kind = kind_of_config(config)
    if key is None and kind.needs_key:
        hint = "pass for instance key=jax.random.key(0)"
        raise ConfigError("key is missing: the initial values are random", hint=hint)
    targets = exclude_saved(model, config, select_sites(model, config.targets, config.exclude))
    uses = {} if fn is None else _find_uses(model, targets, fn, args)
    uses = {site.index: uses[site.index] for site in targets if site.index in uses and not is_table(model, site)}
    uses_of_targets = [(site, uses[site.index]) for site in targets if site.index in uses]
    kernels = {site.index: use for site, use in uses_of_targets if not (site.is_matrix and use.is_matrix)}
    for site in targets:
        if site.index in uses or not isinstance(model, ExternalNames):
            continue
        if site.is_experts:
            check_experts(site, config)
        _check_table(model, site, config)
    targets = select_layers(targets, config.layers)
    for site in targets:
        _check_target(model, site, uses.get(site.index), config)
    extra_sites = saved_sites(model, config, targets)
    is_plain = (non_sum_kind(config) or getattr(config, "init", None)) in ("peft", "gaussian") and config.layers is None
    for site in targets:
        if site.index in kernels and (not is_plain or isinstance(site.weight, LinearWeight)):
            message = f"{site.path}: this kernel supports only plain LoRA with random A on all layers, on an array"
            raise ConfigError(message, hint="leave it out of the targets, or add it with a separate configuration")
    nodes = kind.init(model, targets, config, key, kernels)
    nodes = {index: shard_adapter(node) for index, node in nodes.items()}
    return replace(model, nodes | {site.index: make_saved(site.weight) for site in extra_sites})


def merge(model: Tree) -> Tree:
    """Fold every adapter into its weight (for LoRA, W + scaling B A), in float32, rounded once to the dtype of W.

    The given model stays unchanged; drop it to free its weights. `unmerge` removes an adapter from merged weights.

    Args:
        model: a model with adapters.

    Returns:
        The model with plain weights, without any adapter. (IA)³ on outputs also scales the module's bias. Rounding to
        bfloat16 loses the part of a correction that is below half a unit in the last place of W.

    Raises:
        StructureError: when there is no adapter, or an adapter lacks a leaf or has a base that is not an array.
        NonFiniteError: when a merged weight has a value that is not finite (not detected under `jax.jit`).

    Memory:
        A new array for each adapted weight, made one at a time, and temporarily a float32 copy of one of its layers.

    Examples:
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> merge({"w": node})["w"].tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    adapted = adapted_sites(model)
    require_adapters(adapted, "merge", "add one with lt.lora.add or lt.lora.load, unless the model is already merged")
    for site in adapted:
        is_supported = site.is_matrix or site.is_experts or isinstance(site.node, (LoRAKernel, SavedWeight))
        if not is_supported or not isinstance(site.weight, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise StructureError(
                f"{site.path}: cannot merge into a {type(site.weight).__name__}",
                expected="a floating-point array of shape [out, in] or [num_layers, out, in]",
                hint="dequantise it first: lt.lora.merge(lt.dequantize(model))",
            )
    by_path = {site.path: site for site in sites(model)}
    nodes: dict[int, Any] = {}
    # Arrays that train as a whole come first, so that (IA)³ below scales a merged bias.
    for site in sorted(adapted, key=lambda site: not isinstance(site.node, SavedWeight)):
        merged = nodes[site.index] = _merge_node(site.node)
        if isinstance(merged, jax.Array) and not isinstance(merged, jax.core.Tracer) and not _is_finite(merged):
            hint = "check the adapter and its base: one is damaged, has diverged, or exceeds the range of the dtype"
            raise NonFiniteError(f"{site.path}: the merged weight has values that are not finite", hint=hint)
        bias = by_path.get(f"{site.module}/bias")
        if bias is not None and not isinstance(bias.node, jax.ShapeDtypeStruct):
            nodes[bias.index] = site.node.folded_bias(nodes.get(bias.index, bias.node))
    return replace(model, nodes)


def disable(model: Tree) -> Tree:
    """Return the model without its adapters: the unchanged base.

    Args:
        model: a model with adapters.

    Raises:
        StructureError: when there is no adapter, or an adapter lacks a leaf, as after `lowtide.partition`.

    Memory:
        No copy.

    Examples:
        >>> from lowtide.adapters.lora import LoRAWeight
        >>> node = LoRAWeight(jnp.zeros((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), alpha=3.0)
        >>> disable({"w": node})["w"] is node.weight
        True
    """
    adapted = adapted_sites(model)
    require_adapters(adapted, "remove", "use the model as the base")
    return replace(model, {site.index: site.weight for site in adapted})


def dropout(model: Tree, rate: float, *, key: Array) -> Tree:
    """Return the model with dropout on the inputs of its adapters, for one training step.

    Call it in a loss function, with a new key for every step; without this call a model has no dropout. A
    `lowtide.Trainer` passes such a key to a loss function with a parameter ``key``, as in
    ``def loss(model, batch, *, key, training)``. A resumed run gets the same keys. The keys are leaves of the nodes,
    one per layer. So each layer of a `jax.lax.scan` has its own key, and recomputation in the backward pass draws the
    same mask. With `lowtide.adapted`, call `dropout` outside the function, which sees arrays:
    ``lt.adapted(fn)(lt.lora.dropout(model, 0.1, key=key), batch)``.

    Each product draws one mask of the shape of its inputs. So all examples of a `jax.vmap`, and all steps of a scan
    over time, share one mask. For different masks, call `dropout` inside of the vmap or scan, with a key for each: from
    ``jax.random.split(key, len(x))`` for a vmap, or ``jax.random.fold_in(key, step)`` for a scan.

    Args:
        model: a model with adapters of LoRA, in any variant, or of VeRA.
        rate: the fraction of each correction's inputs that is set to zero, at least 0 and less than 1.
        key: a JAX random key.

    Returns:
        The model with a `dropout_key` in its adapters. With a rate of 0, the model is unchanged.

    Raises:
        ConfigError: for a rate out of range.
        StructureError: when there is no adapter, or an adapter lacks a leaf. Also for (IA)³, kernels and experts.

    Memory:
        The backward pass keeps the inputs of each correction, after dropout, in addition to the inputs of the weight.

    Examples:
        >>> from lowtide.adapters.lora import Config, add
        >>> model = add({"w": jnp.ones((4, 4))}, Config(rank=2, targets="w"), key=jax.random.key(0))
        >>> dropout(model, 0.1, key=jax.random.key(1))["w"].dropout
        0.1
    """
    check_number("rate", rate, least=0, below=1)
    adapted = [site for site in adapted_sites(model) if not isinstance(site.node, SavedWeight)]
    hint = "add one with lt.lora.add; call dropout outside of lt.adapted's function, which gets arrays"
    require_adapters(adapted, "apply dropout to", hint)
    nodes: dict[int, Any] = {}
    for site in adapted:
        if not hasattr(site.node, "dropout_key") or site.is_experts:
            kind = "an adapter of experts" if isinstance(site.node, LoRAWeight) else site.node.kind
            hint = "leave the dropout out, or this weight out of the targets"
            raise StructureError(f"{site.path}: {kind} does not support dropout", hint=hint)
        layers, site_key = site.weight.shape[:-2], site.random_key(key)
        keys = jax.random.split(site_key, layers) if layers else site_key
        nodes[site.index] = dataclasses.replace(site.node, dropout_key=keys, dropout=float(rate))
    return replace(model, nodes if rate else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedWeight:
    """A weight with an adapter, and the size of the adapter."""

    path: str
    """Tree path of the weight."""
    kind: str
    """Kind of the adapter, such as "LoRA" or "DoRA"."""
    rank: int | None
    """Rank of the adapter; None for (IA)³, and for an array that trains as a whole."""
    shape: tuple[int, ...]
    """Shape of the weight."""
    num_parameters: int
    """Number of trainable parameters, in all layers."""
    trainable_bytes: int
    """Bytes of the trainable parameters."""
    frozen_bytes: int
    """Bytes of the frozen leaves of the adapter, without the weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All weights of a model that have an adapter."""

    matched: tuple[MatchedWeight, ...]
    """One entry per weight, in the order of the tree."""

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(row.num_parameters for row in self.matched)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the trainable parameters."""
        return sum(row.trainable_bytes for row in self.matched)

    def __str__(self) -> str:
        rows = [
            f"{row.path}: {row.kind}{'' if row.rank is None else f' of rank {row.rank}'} on {list(row.shape)}, "
            f"{row.num_parameters:,} parameters, {format_bytes(row.trainable_bytes)}"
            for row in self.matched
        ]
        total = f"{len(rows)} weights, {self.num_parameters:,} parameters, {format_bytes(self.trainable_bytes)}"
        return "\n".join([*rows, total])


def report(model: Tree) -> Report:
    """Report which weights of a model have an adapter, and what the adapters cost.

    Args:
        model: a model, with or without adapters; its leaves may be shapes.

    Returns:
        The weights with adapters, with parameters and bytes; ``str`` gives a line for each.

    Raises:
        StructureError: when an adapter lacks a leaf, as after `lowtide.partition`.

    Examples:
        >>> from lowtide.adapters.lora import Config, add
        >>> model = add({"w": jnp.ones((4, 4))}, Config(rank=2, targets="w"), key=jax.random.key(0))
        >>> print(report(model))
        w: LoRA of rank 2 on [4, 4], 16 parameters, 64 B
        1 weights, 16 parameters, 64 B
    """
    rows: list[MatchedWeight] = []
    for site in adapted_sites(model):
        leaves = [(path, leaf) for path, leaf in leaves_with_paths(site.node) if path.split("/")[0] != "weight"]
        trainable = [leaf for path, leaf in leaves if match_path(path, TRAINABLE)]
        size = sum(leaf_bytes(leaf) for leaf in trainable)
        row = MatchedWeight(
            path=site.path,
            kind=site.node.kind,
            rank=site.node.rank,
            shape=tuple(site.weight.shape),
            num_parameters=sum(int(np.prod(leaf.shape)) for leaf in trainable),
            trainable_bytes=size,
            frozen_bytes=sum(leaf_bytes(leaf) for _, leaf in leaves) - size,
        )
        rows.append(row)
    return Report(matched=tuple(rows))


def _refuse_library_object(model: Any) -> None:
    """Raise for a Keras or NNX object: its layers convert weights to arrays, so only its arrays support adapters."""
    # A caller with such a model has imported its library, so `sys.modules` has it and nothing is imported here.
    nnx_hint = "pass its arrays, {}, and train with lt.adapted(fn), whose fn merges them into the module; or use "
    nnx_hint += "nnx.LoRALinear in place of the layers, and lowtide.ext.nnx.Bridge(module, wrt=nnx.LoRAParam)"
    hints = {
        ("keras", "Layer"): "pass its arrays, {each.path: each.value for each in model.trainable_variables}, and train "
        "with lt.adapted(fn), whose fn calls model.stateless_call; or use layer.enable_lora(rank), which "
        "lowtide.ext.keras.Bridge trains",
        ("flax.nnx", "Module"): nnx_hint.format("nnx.to_pure_dict(nnx.state(module))"),
        ("flax.nnx", "State"): nnx_hint.format("nnx.to_pure_dict(state)"),
    }
    for (library, kind), hint in hints.items():
        if isinstance(model, getattr(sys.modules.get(library), kind, ())):
            message = f"a {type(model).__name__} supports no adapter of Lowtide: its layers convert weights to arrays"
            raise ConfigError(message, hint=hint)


def _find_uses(model: Tree, targets: Sequence[Site], fn: Callable[..., Any], args: Sequence[Any]) -> dict[int, Use]:
    """Return how a function uses each target weight, by `Site.index`, except targets that `_check_target` refuses."""
    probed = [site for site in targets if site.is_floating and site.node is site.weight and len(site.weight.shape) > 1]
    probes: dict[int, Any] = {}
    for site in probed:  # a probe has the weight's shape, and its sharding in device memory
        if (sharding := named_sharding(site.weight)) is not None:
            sharding = sharding.with_memory_kind("device")
        probes[site.index] = probe(jax.ShapeDtypeStruct(site.weight.shape, site.weight.dtype, sharding=sharding))
    use_sets = uses_of_weights(fn, replace(model, probes), *args)
    return {site.index: _common_use(site, site_uses) for site, site_uses in zip(probed, use_sets, strict=True)}


def _common_use(site: Site, site_uses: set[Use]) -> Use:
    groups = {use[:3] for use in site_uses}
    if len(groups) == 1:
        common = min(site_uses, key=lambda use: use.is_product)  # a node for lookups also supports products
        return common._replace(over_rows=any(use.over_rows for use in site_uses))
    shape = list(site.weight.shape)
    if not groups:
        raise StructureError(f"{site.path}: the function does not multiply by this weight", hint=site.exclusion_hint)
    groupings = ", ".join(f"{list(shape[s : s + m])} by {list(shape[s + m :])}" for s, m, _ in sorted(groups))
    message = f"{site.path}: the function uses this weight in several ways: its axes as {groupings}"
    raise StructureError(message, hint=site.exclusion_hint)


def _check_target(model: Tree, site: Site, use: Use | None, config: AnyConfig) -> None:
    if is_adapter(site.node):
        rank = "" if site.node.rank is None else f" of rank {site.node.rank}"
        hint = "merge the old adapter with lt.lora.merge, or leave this target out"
        raise StructureError(f"{site.path}: already has an adapter{rank}", hint=hint)
    shape = tuple(site.weight.shape)
    is_named = use is None and isinstance(model, ExternalNames)
    if is_named and site.is_experts:
        return
    is_bias = is_named and "/experts/" in site.path and site.path.endswith("/bias")  # it has three axes
    if use is None and (is_bias or not site.is_matrix):
        raise StructureError(
            f"{site.path}: is not a weight matrix that supports adapters",
            expected="a floating-point array of shape [out, in] or [num_layers, out, in]",
            got=f"{site.weight.dtype}{list(shape)}",
            hint=site.exclusion_hint
            + (", or pass fn and args, whose program shows how it is used" if len(shape) > 3 else ""),
        )
    if is_named:
        layer_names(model, site)  # refuses a vector of stacked layers, which looks like a matrix [num_layers, dim]
    # Adapters that do not compute W + s B A scale the inputs or outputs of x Wᵀ, so they do not support x W.
    if use is not None and use.is_matrix and use.over_rows and non_sum_kind(config):
        others = ", ".join(variant.name for variant in VARIANTS if not variant.is_sum)
        hint = f"store it as [out, in], which {others}, (IA)³ and VeRA need, or use plain LoRA"
        raise ConfigError(f"{site.path}: the function multiplies by this weight as [in, out]", hint=hint)


def _check_table(model: Tree, site: Site, config: AnyConfig) -> None:
    """Check an embedding: it is not also the head, and its adapter is LoRA with random initial values."""
    if not is_table(model, site):
        return
    kind = non_sum_kind(config) or getattr(config, "init", None)
    if kind not in ("peft", "gaussian"):
        message = f'{site.path}: an embedding supports only {SUM_NAMES} with init = "peft" or "gaussian"'
        raise ConfigError(message, got=kind, hint=site.exclusion_hint)
    if external_name(model, site) in tied_names(model):
        raise StructureError(f"{site.path} {TIED_MESSAGE}", hint=TIED_HINT)


def _merge_node(node: Any) -> Any:
    if isinstance(node, LoRAKernel):
        return merge_kernel(node)
    if isinstance(node.weight, jax.ShapeDtypeStruct):
        return node.weight
    if isinstance(node, SavedWeight):
        return node.folded()
    node = jax.tree.map(jnp.asarray, node)
    weight, sharding = node.weight, named_sharding(node.weight)
    if weight.ndim == 2:
        merged = _fold_matrix(node)
    else:
        # Merge matrix by matrix into one buffer. In a `lax.map`, XLA for CPU would hold a bfloat16 stack in float32.
        merged = jnp.zeros(weight.shape, weight.dtype, device=sharding)
        for index in np.ndindex(weight.shape[:-2]):
            merged = _fold_layer(merged, index, node)
    return merged if sharding is None else jax.device_put(merged, sharding)


@jax.jit
def _is_finite(weight: Array) -> Array:
    return jnp.isfinite(weight).all()


@jax.jit
def _fold_matrix(node: Any) -> Float[Array, "out in"]:
    return node.folded().astype(node.weight.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _fold_layer(merged: Float[Array, "*L out in"], index: tuple[int, ...], node: Any) -> Float[Array, "*L out in"]:
    take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    layer = jax.tree.map(lambda leaf: functools.reduce(take, index, leaf), node)
    matrix = jnp.expand_dims(_fold_matrix(layer), tuple(range(len(index))))
    return jax.lax.dynamic_update_slice(merged, matrix, (*index, 0, 0))
