"""EVA: adapters that begin as the directions in which the inputs of their weights vary most.

A node replaces each target and multiplies as before. Its backward pass returns XᵀX Ω of its inputs X, as the gradient
of a leaf that has no effect on values. So the inputs are recorded wherever gradients flow: in scans, under
rematerialisation, in `jax.vmap`, sharded among devices. Nothing of shape [in, in] is materialised. The singular vectors
come from that product as those of a Nyström approximation.

Sources: Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained Variance Adaptation"
(arXiv:2410.07170); Tropp et al., "Fixed-Rank Approximation of a Positive-Semidefinite Matrix from Streaming Data"
(arXiv:1706.05736). Deviations from PEFT: it updates a decomposition with every batch until it settles, and moves ranks
to the weights whose inputs vary most. Here the number of passes over the batches is fixed, and every weight keeps its
configured rank, because a stack has one rank. Rows on which the loss does not depend, such as padding, are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import (
    ConfigError,
    NonFiniteError,
    StructureError,
    Tree,
    combine,
    is_array_like,
    is_count,
    linear,
    partition,
    value_and_grad,
)
from ._adapter import shard_adapter
from ._config import Config
from ._model import add
from ._sites import Site, adapted_sites, replace, sites
from ._tables import is_table
from ._weight import LoRAWeight
from ._wrapper import ScaledWeight

_OVERSAMPLING = 8
"""Columns of Ω in addition to twice the rank."""


def eva(
    model: Tree,
    config: Config,
    fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    key: Array,
    has_aux: bool = False,
    num_passes: int = 2,
) -> Tree:
    """Give chosen weights adapters whose A begins as the first right-singular vectors of their inputs.

    B is zero, so nothing changes at first.

    Args:
        model: as for `add`, with targets that are matrices [out, in], or stacks of them; they may be quantised.
        config: of LoRA; its `init` is "peft".
        fn: the loss, a differentiable function of the model and a batch that returns one number. For a model that uses
            weights in other ways than through `lowtide.core.linear` or ``@``, give ``lt.adapted(fn)``.
        batches: a handful of batches of the training data. They are held while this runs.
        key: a JAX random key.
        has_aux: whether `fn` also returns auxiliary values, which are dropped.
        num_passes: number of passes over the batches. More passes come closer to the exact vectors. One pass is exact
            where ``2 * rank + 8`` is no less than the number of inputs.

    Returns:
        The model with a `LoRAWeight` in place of each target.

    Raises:
        ConfigError: for another `init`, a number of passes below 1, and no batch.
        StructureError: for a target that is not a matrix, or that `fn` does not multiply by; and as `add`.
        SelectionError: as `add`.
        NonFiniteError: when inputs are not finite numbers.

    Memory:
        While it runs: four arrays [in, 2 * rank + 8] in float32 for each target, and the residuals of `fn`. For one
        target at a time also its inputs in float32. Its time is that of `num_passes` gradients of each batch with
        respect to all activations.

    Examples:
        >>> from lowtide.adapters.lora import Config, eva
        >>> x = jnp.array([[3.0, 0.0, 4.0], [6.0, 0.0, 8.0]])
        >>> def loss(model, x):
        ...     return jnp.sum((x @ model["w"].T) ** 2)
        >>> config = Config(rank=1, targets="w")
        >>> node = eva({"w": jnp.ones((2, 3))}, config, loss, [x], key=jax.random.key(0))["w"]
        >>> jnp.abs(node.lora_a).round(3).tolist()
        [[0.6000000238418579, 0.0, 0.800000011920929]]
    """
    if config.init != "peft":
        raise ConfigError(
            "EVA computes the initial A, which contradicts init",
            expected='init="peft"',
            got=f"init={config.init!r}",
            hint="leave init out",
        )
    if not is_count(num_passes, 1):
        raise ConfigError(
            f"num_passes: {num_passes!r} is not a number of passes",
            expected="at least 1",
            got=repr(num_passes),
            hint="pass 2, which is enough for most inputs",
        )
    added = add(model, config, key=key)
    chosen = _added_sites(model, added)
    check_eva(model, added)
    batch_list = list(batches)
    if not batch_list:
        raise ConfigError("batches is empty", expected="at least one batch", got="0", hint="pass training batches")
    arrays, static = partition(model, lambda _, leaf: is_array_like(leaf))

    def sketch_loss(sketches: dict[int, Array], seeds: dict[int, Array], arrays: Tree, batch: Any) -> Any:
        full_model = combine(arrays, static)
        weights = {site.index: site.weight for site in sites(full_model) if site.index in sketches}
        nodes = {index: _SketchedWeight(weights[index], seeds[index], sketches[index]) for index in sketches}
        loss = fn(replace(full_model, nodes), batch)
        return loss[0] if has_aux else loss

    gradients = jax.jit(value_and_grad(sketch_loss))
    seeds = {site.index: _draw_seed(site, key) for site in chosen}
    zeros = jax.tree.map(jnp.zeros_like, seeds)
    sketches = zeros
    for pass_index in range(num_passes):
        if pass_index:
            # One step of subspace iteration: an orthonormal basis of XᵀX Ω is closer to the first eigenvectors than Ω.
            seeds = jax.tree.map(_orthonormal, sketches)
        sketches = zeros
        for batch in batch_list:
            sketches = jax.tree.map(jnp.add, sketches, gradients(zeros, seeds, arrays, batch)[1])
        for site in chosen:
            _check_sketch(site, sketches[site.index])
    nodes = {site.index: _init_from_sketch(site.node, seeds[site.index], sketches[site.index]) for site in chosen}
    return replace(added, nodes)


def check_eva(model: Tree, added: Tree) -> None:
    """Check, before there is a batch, that `eva` supports the targets.

    Args:
        model: the model; shapes are enough.
        added: the same model with adapters, from `add`.

    Raises:
        StructureError: for an adapter of an embedding, or of a weight that is not a matrix or a stack of matrices.

    Memory:
        None.
    """
    for site in _added_sites(model, added):
        is_embedding = is_table(model, site)
        if is_embedding or not site.is_matrix:
            raise StructureError(
                f"{site.path}: EVA supports only matrices and stacks of matrices",
                expected="a weight [out, in] or [num_layers, out, in] that multiplies activations",
                got="an embedding" if is_embedding else f"shape {list(site.weight.shape)}",
                hint=f'leave it out of the targets, for instance with the pattern "!{site.module}"',
            )


def _added_sites(model: Tree, added: Tree) -> list[Site]:
    previous = {site.index for site in adapted_sites(model)}
    return [site for site in adapted_sites(added) if site.index not in previous and isinstance(site.node, LoRAWeight)]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "seed", "sketch"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _SketchedWeight(ScaledWeight):
    """A weight that records its inputs X: the gradient of its sketch is XᵀX times the seed."""

    weight: Any
    seed: Any
    """Ω, [in, k] or stacked [L, in, k], float32."""
    sketch: Any
    """The leaf whose gradient is XᵀX Ω, of the same shape."""

    __array_ufunc__ = None

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ."""
        return linear(_record_inputs(x, self.seed, self.sketch), self.weight)

    def __rmatmul__(self, x: Array) -> Array:
        """Refuse x W, because A reads the inputs of x Wᵀ."""
        raise StructureError(
            f"EVA does not support a weight {list(self.shape)} that is multiplied as [in, out]",
            expected="products with the transposed weight, whose inputs A reads",
            got="x @ weight",
            hint="start from random values with lt.lora.add, or leave it out of the targets",
        )


@jax.custom_vjp
def _record_inputs(x: Float[Array, "*batch in"], seed: Float[Array, "in k"], sketch: Float[Array, "in k"]) -> Array:
    return x


def _record_inputs_fwd(x: Array, seed: Array, sketch: Array) -> tuple[Array, tuple[Array, Array]]:
    return x, (x, seed)


def _record_inputs_bwd(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, Array]:
    x, seed = residuals
    # Rows without a cotangent, such as padding, do not affect the loss.
    has_cotangent = jnp.any(cotangent != 0, axis=-1, keepdims=True)
    rows = jnp.where(has_cotangent, x.astype(jnp.float32), 0).reshape(-1, x.shape[-1])
    product = _matmul(rows.T, _matmul(rows, seed))
    return cotangent, jnp.zeros_like(seed), product


_record_inputs.defvjp(_record_inputs_fwd, _record_inputs_bwd)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _draw_seed(site: Site, key: Array) -> Float[Array, "*L in k"]:
    """Draw Ω with orthonormal columns; where it is square, any basis gives the exact result."""
    *layers, _, inner = site.weight.shape
    width = min(inner, 2 * site.node.rank + _OVERSAMPLING)
    site_key = jax.random.fold_in(key, zlib.crc32(site.path.encode()))
    return _orthonormal(jax.random.normal(site_key, (*layers, inner, width), jnp.float32))


def _orthonormal(matrix: Float[Array, "*L in k"]) -> Float[Array, "*L in k"]:
    return jnp.linalg.qr(matrix)[0]


def _check_sketch(site: Site, sketch: Array) -> None:
    if not jnp.isfinite(sketch).all():
        raise NonFiniteError(
            f"{site.path}: its inputs are not finite",
            got="infinity or NaN",
            hint="look for NaN in the model's weights, or in the batches",
        )
    scale, has_inputs = site.node.layer_scale, jnp.any(sketch != 0, axis=(-2, -1))
    if not (has_inputs if scale is None else has_inputs | (scale == 0)).all():
        raise StructureError(
            f"{site.path}: the loss of these batches does not depend on the inputs of this weight",
            expected="inputs with a gradient",
            got="none",
            hint="leave it out of the targets, or pass batches that use it",
        )


def _init_from_sketch(node: LoRAWeight, seed: Array, sketch: Array) -> LoRAWeight:
    lora_a = _first_vectors(seed, sketch, node.rank)
    if node.layer_scale is not None:
        lora_a = lora_a * node.layer_scale[:, None, None]
    return shard_adapter(dataclasses.replace(node, lora_a=lora_a))


@functools.partial(jax.jit, static_argnums=2)
def _first_vectors(seed: Float[Array, "*L in k"], sketch: Float[Array, "*L in k"], rank: int) -> Array:
    """Return the first eigenvectors of XᵀX as rows, [*L, rank, in], from the seed Ω and the sketch XᵀX Ω."""
    # Nyström: XᵀX ≈ S (ΩᵀS)⁺ Sᵀ = F Fᵀ with the sketch S and F = S V λ^(-1/2), where V and λ are the eigenvectors and
    # eigenvalues of ΩᵀS. The left singular vectors of F are the eigenvectors. Eigenvalues within rounding of zero are
    # dropped.
    inner = _matmul(seed.mT, sketch)
    values, vectors = jnp.linalg.eigh((inner + inner.mT) / 2)
    threshold = jnp.finfo(jnp.float32).eps * values[..., -1:] * values.shape[-1]
    scale = jnp.where(values > threshold, jnp.abs(values) ** -0.5, 0)
    singular_vectors, _, _ = jnp.linalg.svd(_matmul(sketch, vectors * scale[..., None, :]), full_matrices=False)
    return singular_vectors[..., :rank].mT
