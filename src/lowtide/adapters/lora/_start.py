"""The first values of adapters, which leave the outputs of the model unchanged."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...core import (
    ConfigError,
    ExternalNames,
    LinearWeight,
    SelectionError,
    StructureError,
    Tree,
    match_names,
    match_path,
)
from .._uses import Use
from ._config import WEIGHT_INITS, AnyConfig, Config, IA3Config, VeRAConfig
from ._kernel import init_kernel
from ._principal import principal_factors
from ._sites import Site, sites
from ._tables import is_table
from ._vectors import IA3Weight, VeRAWeight
from ._weight import LoRAWeight
from ._wrapper import squared_row_norms

_squared_row_norms = jax.jit(squared_row_norms)


def select_layers(chosen: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Leave out sites of other layers where layers are not stacked, and check that all layers exist."""
    if layers is None:
        return list(chosen)
    selected = [site for site in chosen if len(site.weight.shape) == 3 or _layer_index(site) in layers]
    counts = [site.weight.shape[0] for site in chosen if len(site.weight.shape) == 3]
    existing = {index for count in counts for index in range(count)} | {_layer_index(site) for site in selected}
    if absent := [layer for layer in layers if layer not in existing]:
        raise ConfigError(
            f"layers: {absent[0]} is not a layer of the targets",
            expected=f"indices below {min(counts)}" if counts else "indices in paths such as layers/3/q_proj",
            got=list(layers),
            hint="count layers from 0",
        )
    return selected


def init_adapters(
    model: Tree, chosen: Sequence[Site], config: AnyConfig, key: Array | None, kernels: Mapping[int, Use]
) -> dict[int, Any]:
    """Make the node of every site, by its index; `kernels` holds the uses of the weights that are not matrices."""
    for site in chosen if kernels else ():
        shape = list(site.weight.shape)
        is_plain = isinstance(config, Config) and not config.dora and config.layers is None
        is_plain = is_plain and getattr(config, "init", None) in ("peft", "gaussian")
        if site.index in kernels and (not is_plain or isinstance(site.weight, LinearWeight)):
            raise ConfigError(
                f"{site.path}: this kernel supports only plain LoRA, on an array",
                expected="random A on all layers, and no DoRA, (IA)³, VeRA or quantised weight",
                got=f"a {type(config).__name__} for a weight {shape}",
                hint="leave it out of the targets, or add it with a separate configuration",
            )
    if isinstance(config, Config):
        tables = {site.index for site in chosen if is_table(model, site)}
        return _init_lora(chosen, config, key, kernels, tables)
    if isinstance(config, VeRAConfig):
        return _init_vera(chosen, config, key)
    return _init_ia3(model, chosen, config)


def _layer_index(site: Site) -> int | None:
    """Return the first number in a path, which is the index of a layer."""
    return next((int(part) for part in site.path.split("/") if part.isdecimal()), None)


def _site_names(site: Site) -> tuple[str, str]:
    return site.module, site.path


def _values_by_site(chosen: Sequence[Site], pairs: Any, default: Any) -> dict[int, Any]:
    """Return the value of the first glob that matches each site, and raise for a glob that matches none."""
    for pattern, _ in pairs:
        match_names([name for site in chosen for name in _site_names(site)], pattern)
    return {
        site.index: next(
            (value for pattern, value in pairs if any(match_path(name, pattern) for name in _site_names(site))), default
        )
        for site in chosen
    }


def _layer_scale(site: Site, layers: Sequence[int] | None) -> Any:
    if layers is None or len(site.weight.shape) != 3:
        return None
    return _make_leaf(site, (), lambda shape: jnp.asarray([float(i in layers) for i in range(shape[0])], jnp.float32))


def _make_leaf(site: Site, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Array]) -> Any:
    """Make an array with the weight's leading axes in front, or only its shape where the weight is a shape."""
    full_shape = (*site.weight.shape[:-2], *shape)
    is_abstract = isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(full_shape, jnp.float32) if is_abstract else make(full_shape)


def _init_lora(
    chosen: Sequence[Site], config: Config, key: Any, kernels: Mapping[int, Use], tables: set[int]
) -> dict[int, Any]:
    ranks = _values_by_site(chosen, config.rank_pattern, config.rank)
    alphas = _values_by_site(chosen, config.alpha_pattern, config.alpha)
    nodes: dict[int, Any] = {}
    for site in chosen:
        use, shape = kernels.get(site.index), tuple(site.weight.shape)
        first, split = (-2, -1) if use is None else (use.num_stacked, use.num_stacked + use.num_rows)
        out, inner = math.prod(shape[first:split]), math.prod(shape[split:])
        rank = ranks[site.index]
        if rank > min(out, inner):
            raise ConfigError(
                f"rank: {rank} is more than {site.path} can use",
                expected=f"at most {min(out, inner)}, the smaller side of {list(shape)}",
                got=rank,
                hint="lower the rank, or train the whole weight",
            )
        scale = None if use is not None else _layer_scale(site, config.layers)

        def draw_a(
            shape: tuple[int, ...], site: Site = site, rank: int = rank, scale: Any = scale, inner: int = inner
        ) -> Array:
            site_key = jax.random.fold_in(key, zlib.crc32(site.path.encode()))
            # The key depends on the path only, so that A stays the same when other targets are added. Python's `hash`
            # would not do: it differs between processes.
            if site.index in tables:  # as for PEFT's embeddings, whatever `init` is
                values = jax.random.normal(site_key, shape, jnp.float32)
            elif config.init == "gaussian":
                values = jax.random.normal(site_key, shape, jnp.float32) / rank
            else:
                # kaiming_uniform_(a=sqrt(5)), PEFT's choice: gain sqrt(2 / (1 + 5)), bound gain * sqrt(3 / in).
                bound = float(inner) ** -0.5
                values = jax.random.uniform(site_key, shape, jnp.float32, -bound, bound)
            # In layers without an adapter both factors are zero: neither gets a gradient, and weight decay keeps them
            # at zero.
            return values if scale is None else values * scale[:, None, None]

        if use is not None:
            alpha = float(alphas[site.index]) * (rank**0.5 if config.rslora else 1)
            nodes[site.index] = init_kernel(site.weight, use, rank, alpha, draw_a)
            continue
        nodes[site.index] = _init_matrix(site, config, rank, float(alphas[site.index]), key, draw_a)
    return nodes


def _init_matrix(
    site: Site, config: Config, rank: int, alpha: float, key: Any, draw_a: Callable[..., Array]
) -> LoRAWeight:
    out, inner = site.weight.shape[-2:]
    scale, fields = _layer_scale(site, config.layers), dict[str, Any]()
    if config.init in (*WEIGHT_INITS, "orthogonal"):
        lora_a, lora_b = _init_factors(site, config, rank, alpha, key, scale)
    else:
        lora_a = _make_leaf(site, (rank, inner), draw_a)
        lora_b = _make_leaf(site, (out, rank), lambda shape: jnp.zeros(shape, jnp.float32))
    if config.init in WEIGHT_INITS:
        fields = {"start_a": lora_a, "start_b": lora_b}
        lora_a, lora_b = _copy_leaf(lora_a), _copy_leaf(lora_b)
    if config.dora:
        fields["lora_magnitude"] = _make_leaf(site, (out,), lambda shape: jnp.sqrt(_squared_row_norms(site.weight)))
    return LoRAWeight(site.weight, lora_a, lora_b, alpha, layer_scale=scale, rslora=config.rslora, **fields)


def _copy_leaf(leaf: Any) -> Any:
    """Copy an array, because one array at two paths cannot train at only one of them."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.array(leaf, copy=True)


def _init_factors(site: Site, config: Config, rank: int, alpha: float, key: Any, scale: Any) -> tuple[Any, Any]:
    """Make A and B for an `init` in which neither begins as zero; in layers without an adapter both are zero."""
    *layers, out, inner = site.weight.shape
    site_key = jax.random.fold_in(key, zlib.crc32(site.path.encode()))

    def make_factors(weight: Any) -> tuple[Array, Array]:
        if config.init == "orthogonal":
            factors = _orthogonal_factors(site_key, tuple(layers), out, inner, rank)
        else:
            factors = principal_factors(weight, rank, alpha / (rank**0.5 if config.rslora else rank), config.init)
        return factors if scale is None else (factors[0] * scale[:, None, None], factors[1] * scale[:, None, None])

    if isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct):
        shapes = ((*layers, rank, inner), (*layers, out, rank))
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)  # pyright: ignore[reportReturnType]
    return make_factors(site.weight)


def _orthogonal_factors(key: Array, layers: tuple[int, ...], out: int, inner: int, rank: int) -> tuple[Array, Array]:
    """Draw factors through two halves of an orthogonal matrix, so that B A is zero; the scales are PEFT's."""
    keys = jax.random.split(key, 3)
    q, _ = jnp.linalg.qr(jax.random.normal(keys[0], (*layers, rank, rank), jnp.float32))
    half = rank // 2
    # A and B use the even and the odd rows of q. These are orthogonal, so B A = Y q_odd q_evenᵀ Xᵀ = 0 for any X and Y.
    a = jax.random.normal(keys[1], (*layers, inner, half), jnp.float32) @ q[..., 0::2, :] / 10
    b = jax.random.normal(keys[2], (*layers, out, half), jnp.float32) @ q[..., 1::2, :] / 10
    return a.mT, b


def _init_ia3(model: Tree, chosen: Sequence[Site], config: IA3Config) -> dict[int, Any]:
    names = [name for site in chosen for name in _site_names(site)]
    feedforward_names: set[str] = set()
    if config.feedforward != ():
        try:
            feedforward_names = set(match_names(names, config.feedforward))
        except SelectionError as error:
            raise SelectionError(
                f"feedforward: {error.message}", expected="some of the targets", got=error.got, hint=error.hint
            ) from error
    paths = {site.path for site in sites(model)}
    nodes: dict[int, Any] = {}
    for site in chosen:
        is_feedforward = bool(feedforward_names.intersection(_site_names(site)))
        if not is_feedforward and f"{site.module}/bias" in paths and not isinstance(model, ExternalNames):
            raise StructureError(
                f"{site.path}: its output has a bias, which (IA)³ would also have to scale",
                expected="a model with an external_name that multiplies by lowtide.core.linear(x, weight, bias)",
                got=type(model).__name__,
                hint="name the module in feedforward, which scales its input, or leave it out",
            )
        size = site.weight.shape[-1 if is_feedforward else -2]
        ones = _make_leaf(site, (size,), lambda shape: jnp.ones(shape, jnp.float32))
        nodes[site.index] = IA3Weight(site.weight, ones, _layer_scale(site, config.layers), is_feedforward)
    return nodes


def _init_vera(chosen: Sequence[Site], config: VeRAConfig, key: Any) -> dict[int, Any]:
    # One pair of projections of the largest size serves all sites, as in PEFT.
    max_out, max_in = (max(site.weight.shape[axis] for site in chosen) for axis in (-2, -1))

    def projection(fold: int, shape: tuple[int, int]) -> Array:
        bound = (6.0 / shape[-1]) ** 0.5  # kaiming_uniform_, PEFT's choice
        return jax.random.uniform(jax.random.fold_in(key, fold), shape, jnp.float32, -bound, bound)

    whole_a, whole_b = projection(0, (config.rank, max_in)), projection(1, (max_out, config.rank))
    return {site.index: vera_node(site, whole_a, whole_b, config) for site in chosen}


def vera_node(site: Site, whole_a: Array, whole_b: Array, config: VeRAConfig) -> VeRAWeight:
    """Make the node of a site from the shared projections, of which it takes the first rows and columns."""
    out, inner = site.weight.shape[-2:]
    a = _make_leaf(site, (config.rank, inner), lambda shape: jnp.broadcast_to(whole_a[:, :inner], shape))
    b = _make_leaf(site, (out, config.rank), lambda shape: jnp.broadcast_to(whole_b[:out], shape))
    d = _make_leaf(site, (config.rank,), lambda shape: jnp.full(shape, config.d_initial, jnp.float32))
    zeros = _make_leaf(site, (out,), lambda shape: jnp.zeros(shape, jnp.float32))
    return VeRAWeight(site.weight, a, b, d, zeros, _layer_scale(site, config.layers))
