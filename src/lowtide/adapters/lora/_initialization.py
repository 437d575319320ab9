"""Initial values of LoRA that depend on the data (EVA) or on the quantisation error (LoftQ).

Values that `add` computes from a key or from the weight are in `_lora.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import quant
from ...core import (
    ConfigError,
    LinearWeight,
    NonFiniteError,
    StructureError,
    Tree,
    check_integer,
    check_type,
    combine,
    is_array_like,
    linear,
    partition,
    value_and_grad,
)
from ._lora import VARIANTS, Config, LoRAWeight, dense_matrix, pissa
from ._model import add
from ._node import ScaledWeight, shard_adapter
from ._sites import Site, adapted_sites, is_table, replace, sites

# EVA: A begins as the directions in which the inputs X of the weight vary most. To measure them, a node replaces each
# target and multiplies as before. Its backward pass returns XᵀX Ω, for a matrix Ω of orthonormal columns, as the
# gradient of a leaf that has no effect on values. So inputs are recorded wherever gradients flow: in scans, under
# rematerialisation, in `jax.vmap`, sharded among devices. Nothing of shape [in, in] is materialised. The singular
# vectors are those of a Nyström approximation, which is computed from XᵀX Ω.
#
# Sources: Paischer et al., "One Initialization to Rule them All: Fine-tuning via Explained Variance Adaptation"
# (arXiv:2410.07170); Tropp et al., "Fixed-Rank Approximation of a Positive-Semidefinite Matrix from Streaming Data"
# (arXiv:1706.05736). Deviations from PEFT: PEFT updates a decomposition with every batch until it converges, and gives
# higher ranks to weights whose inputs vary more. Here the number of passes over the batches is fixed. Every weight
# keeps its configured rank, because a stack has one rank. Rows that do not affect the loss, as of padding, are ignored.

_OVERSAMPLING = 8
"""Number of columns of the matrix Ω (`_SketchedWeight.seed`) in addition to twice the rank."""


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

    B is zero, so the outputs of the model do not change at first.

    Args:
        model: as for `add`, with targets that are matrices [out, in], or stacks of them; they may be quantised.
        config: a LoRA configuration with `init` "peft".
        fn: the loss, a differentiable function of the model and a batch that returns one number. For a model that uses
            weights in other ways than through `lowtide.core.linear` or ``@``, pass ``lt.adapted(fn)``.
        batches: a handful of batches of the training data. All of them stay in memory during the call.
        key: a JAX random key.
        has_aux: whether `fn` also returns auxiliary values, which are dropped.
        num_passes: number of passes over the batches. More passes come closer to the exact vectors. One pass is exact
            if ``2 * rank + 8`` is at least the number of inputs.

    Returns:
        The model with a `LoRAWeight` in place of each target.

    Raises:
        ConfigError: for another `init`, a number of passes below 1, and empty `batches`; and as `add`.
        StructureError: for a target that is an embedding, or neither a matrix nor a stack of matrices. Also for a
            target that `fn` multiplies as [in, out], or whose inputs do not affect the loss; and as `add`.
        SelectionError: as `add`.
        NonFiniteError: when inputs are not finite numbers.

    Memory:
        During the call: four arrays [in, 2 * rank + 8] in float32 for each target, and the residuals of `fn`. For one
        target at a time also its inputs in float32. The call takes the time of `num_passes` gradients of each batch
        with respect to all activations.

    Examples:
        >>> from lowtide.adapters.lora import Config, eva
        >>> x = jnp.array([[3.0, 0.0, 4.0], [6.0, 0.0, 8.0]])
        >>> def loss(model, x):
        ...     return jnp.sum((x @ model["w"].T) ** 2)
        >>> config = Config(rank=1, targets="w")
        >>> node = eva({"w": jnp.ones((2, 3))}, config, loss, [x], key=jax.random.key(0))["w"]
        >>> jnp.abs(node.lora_a).round(3).tolist()
        [[0.6000000238418579, 0.0, 0.800000011920929]]

    References:
        Paischer et al., "One Initialization to Rule them All" (arXiv:2410.07170).
    """
    check_type("config", config, Config, "a lt.lora.Config")
    if config.init != "peft":
        raise ConfigError(f'EVA computes the initial A, and needs init="peft", not {config.init!r}')
    check_integer("num_passes", num_passes, hint="pass 2, which is enough for most inputs")
    added = add(model, config, key=key)
    chosen = _added_sites(model, added)
    check_eva(model, added)
    if not (batch_list := list(batches)):
        raise ConfigError("batches is empty", hint="pass training batches")
    arrays, static = partition(model, lambda _, leaf: is_array_like(leaf))

    def sketch_loss(sketches: dict[int, Array], seeds: dict[int, Array], arrays: Tree, batch: Any) -> Any:
        full_model = combine(arrays, static)
        weights = {site.index: site.weight for site in sites(full_model) if site.index in sketches}
        nodes = {index: _SketchedWeight(weights[index], seeds[index], sketches[index]) for index in sketches}
        loss = fn(replace(full_model, nodes), batch)
        return loss[0] if has_aux else loss

    gradients = jax.jit(value_and_grad(sketch_loss))
    seeds = {site.index: _draw_seed(site, key) for site in chosen}
    sketches = zeros = jax.tree.map(jnp.zeros_like, seeds)
    for pass_index in range(num_passes):
        if pass_index:
            # One step of subspace iteration: an orthonormal basis of XᵀX Ω is closer to the first eigenvectors than Ω.
            seeds = {index: jnp.linalg.qr(sketch)[0] for index, sketch in sketches.items()}
        sketches = zeros
        for batch in batch_list:
            sketches = jax.tree.map(jnp.add, sketches, gradients(zeros, seeds, arrays, batch)[1])
        for site in chosen:
            _check_sketch(site, sketches[site.index])
    nodes: dict[int, Any] = {}
    for site in chosen:
        lora_a = _first_vectors(seeds[site.index], sketches[site.index], site.node.rank)
        if site.node.layer_scale is not None:
            lora_a = lora_a * site.node.layer_scale[:, None, None]
        nodes[site.index] = shard_adapter(dataclasses.replace(site.node, lora_a=lora_a))
    return replace(added, nodes)


def check_eva(model: Tree, added: Tree) -> None:
    """Check, without a batch, that `eva` supports the targets.

    Args:
        model: the model; its leaves may be shapes.
        added: the same model with adapters, from `add`.

    Raises:
        StructureError: for an adapter of an embedding, or of a weight that is not a matrix or a stack of matrices.
    """
    for site in _added_sites(model, added):
        is_embedding = is_table(model, site)
        if is_embedding or not site.is_matrix:
            actual = "an embedding" if is_embedding else f"shape {list(site.weight.shape)}"
            message = f"{site.path}: EVA supports only matrices and stacks of matrices"
            raise StructureError(message, got=actual, hint=site.exclusion_hint)


def _added_sites(model: Tree, added: Tree) -> list[Site]:
    previous = {site.index for site in adapted_sites(model)}
    return [site for site in adapted_sites(added) if site.index not in previous and isinstance(site.node, LoRAWeight)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _SketchedWeight(ScaledWeight):
    """A weight that records its inputs X: the gradient of `sketch` is XᵀX times `seed`."""

    weight: Any
    seed: Any
    """Ω, [in, k] or stacked [L, in, k], float32."""
    sketch: Any
    """The leaf whose gradient is XᵀX Ω, of the shape of `seed`."""

    __array_ufunc__ = None

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return linear(_record_inputs(x, self.seed, self.sketch), self.weight)

    def __rmatmul__(self, x: Array) -> Array:
        """Raise for x W: EVA needs the inputs of products x Wᵀ."""
        message = f"EVA does not support a weight {list(self.shape)} that is multiplied as [in, out]"
        raise StructureError(message, hint="start from random values with lt.lora.add, or leave it out of the targets")


@jax.custom_vjp
def _record_inputs(x: Float[Array, "*batch in"], seed: Float[Array, "in k"], sketch: Float[Array, "in k"]) -> Array:
    return x


def _record_inputs_fwd(x: Array, seed: Array, sketch: Array) -> tuple[Array, tuple[Array, Array]]:
    return x, (x, seed)


def _record_inputs_bwd(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, Array]:
    x, seed = residuals
    # Rows whose cotangent is zero, such as padding, do not affect the loss.
    has_cotangent = jnp.any(cotangent != 0, axis=-1, keepdims=True)
    rows = jnp.where(has_cotangent, x.astype(jnp.float32), 0).reshape(-1, x.shape[-1])
    return cotangent, jnp.zeros_like(seed), _matmul(rows.T, _matmul(rows, seed))


_record_inputs.defvjp(_record_inputs_fwd, _record_inputs_bwd)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _draw_seed(site: Site, key: Array) -> Float[Array, "*L in k"]:
    """Draw Ω with orthonormal columns; if it is square, one pass gives the exact result."""
    *layers, _, inner = site.weight.shape
    width = min(inner, 2 * site.node.rank + _OVERSAMPLING)
    return jnp.linalg.qr(jax.random.normal(site.random_key(key), (*layers, inner, width), jnp.float32))[0]


def _check_sketch(site: Site, sketch: Array) -> None:
    if not jnp.isfinite(sketch).all():
        hint = "look for NaN in the model's weights, or in the batches"
        raise NonFiniteError(f"{site.path}: its inputs are not finite", hint=hint)
    scale, has_inputs = site.node.layer_scale, jnp.any(sketch != 0, axis=(-2, -1))
    if not (has_inputs if scale is None else has_inputs | (scale == 0)).all():
        message = f"{site.path}: the loss of these batches does not depend on the inputs of this weight"
        raise StructureError(message, hint="leave it out of the targets, or pass batches that use it")


@functools.partial(jax.jit, static_argnums=2)
def _first_vectors(seed: Float[Array, "*L in k"], sketch: Float[Array, "*L in k"], rank: int) -> Array:
    """Return the first eigenvectors of XᵀX as rows, [*L, rank, in], from the seed Ω and the sketch XᵀX Ω."""
    # Nyström: XᵀX ≈ S (ΩᵀS)⁺ Sᵀ = F Fᵀ with the sketch S and F = S V λ^(-1/2), where V and λ are the eigenvectors and
    # eigenvalues of ΩᵀS. The left singular vectors of F approximate the eigenvectors of XᵀX. Eigenvalues of ΩᵀS that
    # are zero up to rounding are dropped.
    inner = _matmul(seed.mT, sketch)
    values, vectors = jnp.linalg.eigh((inner + inner.mT) / 2)
    threshold = jnp.finfo(jnp.float32).eps * values[..., -1:] * values.shape[-1]
    scale = jnp.where(values > threshold, jnp.abs(values) ** -0.5, 0)
    singular_vectors, _, _ = jnp.linalg.svd(_matmul(sketch, vectors * scale[..., None, :]), full_matrices=False)
    return singular_vectors[..., :rank].mT


def loftq(
    model: Tree, config: Config, format: str = "nf4", *, key: Array, num_steps: int = 1, block: int | None = None
) -> Tree:
    """Quantise weights and give them adapters that begin as an approximation of the quantisation error.

    Two steps alternate: Q becomes the quantised W - s B A, and s B A becomes the best approximation of W - Q with the
    adapter's rank.

    Args:
        model: the model, whose targets are matrices of floating-point numbers.
        config: a LoRA configuration with `init` "peft", without DoRA.
        format: format of the quantised weights, as for `lowtide.quantize`.
        key: a JAX random key.
        num_steps: number of times that both steps run. With 1, Q is the quantised W, as from `lowtide.quantize`, and a
            saved adapter fits that base. With more, Q is another base: store Q with the adapter, or merge both.
        block: as for `lowtide.quantize`.

    Returns:
        The model with a `LoRAWeight` on a `lowtide.QuantizedWeight` in place of each target.

    Raises:
        ConfigError: for DoRA, another `init`, a number of steps below 1, and an unknown format or block; and as `add`.
        StructureError: for a target that is already quantised, and for experts; and as `add`.
        SelectionError: as `add`.

    Memory:
        The quantised weights and adapters. For one matrix at a time, three copies in float32, and its decomposition.
        The original weights stay until the caller drops `model`.

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
    check_type("config", config, Config, "a lt.lora.Config")
    check_integer("num_steps", num_steps)
    fields = [variant.field for variant in VARIANTS if not variant.is_sum]
    if config.init != "peft" or any(getattr(config, field) for field in fields):
        needed = ", ".join(f"{field}=False" for field in fields)
        options = ", ".join(f"{field}={getattr(config, field)!r}" for field in (*fields, "init"))
        raise ConfigError(f'LoftQ computes the initial factors, and needs {needed}, init="peft", not {options}')
    form = quant.format_named(format, block)
    added = add(model, config, key=key)
    nodes: dict[int, Any] = {}
    for site in _added_sites(model, added):
        if site.is_experts:
            raise StructureError(f"{site.path}: quantised experts do not support adapters", hint=site.exclusion_hint)
        if isinstance(site.weight, LinearWeight):
            message = f"{site.path}: is already quantised, and its quantisation error is unknown"
            raise StructureError(message, hint="pass the model as it was before lowtide.quantize")
        nodes[site.index] = _init_loftq(site.node, form.name, block, num_steps)
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
