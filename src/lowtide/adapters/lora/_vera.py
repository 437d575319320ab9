"""VeRA, two trainable vectors that scale frozen random projections: configuration, node, and PEFT's files.

Source: Kopiczko et al., "VeRA: Vector-based Random Matrix Adaptation" (arXiv:2310.11454). Known inefficiency: all
modules use the same projections, but each node holds its own slice of them. A stacked node holds its slice once per
layer, because `jax.lax.scan` passes only slices of leaves to a layer. The projections are frozen, so they have no
gradient and no optimizer state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...core import ConfigError, ModelFileError, Pattern, StructureError, Tree, check_number, linear
from .._adapted import Use
from ._node import AdapterWeight, ScaledWeight, Variant, apply_dropout, expand_like
from ._peft import MODEL_HINT, AdapterKind, PeftConfig, TensorFile, host_leaves, mask_scale, stack_layers
from ._sites import Site, check_rank, layer_scale, make_leaf, normalize_fields

_PROJECTIONS = ("base_model.vera_A", "base_model.vera_B")
"""Tensors of the projections, which all modules share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VeRAConfig:
    """A VeRA configuration: random projections that all targets share, and two trainable vectors per target.

    Raises:
        ConfigError: for a rank below 1, a `d_initial` that is zero or not finite, or invalid patterns or layers.

    Examples:
        >>> VeRAConfig(rank=64).d_initial
        0.1
    """

    rank: int = 256
    """Rank r of the projections A [r, in] and B [out, r]."""
    d_initial: float = 0.1
    """Initial value of the vector d (`lora_lambda_d`); the vector b (`lora_lambda_b`) starts at zero."""
    targets: Pattern | Sequence[Pattern] = "**/{q,v}_proj"
    """Patterns, as in `Config.targets`."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.exclude`."""
    layers: Sequence[int] | None = None
    """Indices of layers, as in `Config.layers`."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns, as in `Config.modules_to_save`."""

    def __post_init__(self) -> None:
        check_rank(self.rank, "rank")
        hint = "use 0.1 or less, as the authors of VeRA advise"
        check_number("d_initial", self.d_initial, hint=hint)
        if self.d_initial == 0:
            raise ConfigError("d_initial must not be 0: the adapter would never train", hint=hint)
        normalize_fields(self)
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "d_initial", float(self.d_initial))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VeRAWeight(ScaledWeight, AdapterWeight):
    """A weight with frozen random projections A and B, and two trainable vectors: W + diag(b) B diag(d) A.

    Examples:
        >>> a, b = jnp.ones((1, 3)), jnp.ones((4, 1))
        >>> node = VeRAWeight(jnp.zeros((4, 3)), a, b, jnp.full((1,), 0.1), jnp.zeros((4,)))
        >>> node.linear(jnp.ones((2, 3))).shape
        (2, 4)
    """

    NAME: ClassVar[str] = "VeRA"
    PEFT_TYPE: ClassVar[str | None] = "VERA"
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]] = ("weight", "vera_a", "vera_b", "lora_lambda_d", "lora_lambda_b")
    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "vera_a": ("rank", "in"),
        "vera_b": ("out", "rank"),
        "lora_lambda_d": ("rank",),
        "lora_lambda_b": ("out",),
        "layer_scale": (),
    }
    """The axes of each leaf after the stack axes."""

    weight: Any
    """The base weight, [out, in] or stacked [L, out, in]: an array, or another `lowtide.core.LinearWeight`."""
    vera_a: Any
    """The frozen projection A, which multiplies the inputs, [r, in] or [L, r, in]."""
    vera_b: Any
    """The frozen projection B, which gives the outputs, [out, r] or [L, out, r]."""
    lora_lambda_d: Any
    """The trainable vector d, which scales the outputs of A, [r] or [L, r], float32."""
    lora_lambda_b: Any
    """The trainable vector b, which scales the outputs of B, [out] or [L, out], float32; zeros at first."""
    layer_scale: Any = None
    """Frozen array [L] of a stack: 1 for layers with an adapter, 0 for others. None: all layers have an adapter."""
    dropout_key: Any = None
    """With dropout, a random key from `lowtide.lora.dropout` (in a stack, one per layer); otherwise None."""
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})
    """Fraction of the correction's inputs that is set to zero (static)."""

    __array_ufunc__ = None

    @property
    def rank(self) -> int:
        """The rank r of the projections."""
        return int(self.vera_a.shape[-2])

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ + b * ((d * (x Aᵀ)) Bᵀ), in the dtype of `x`.

        Args:
            x: activations, shape [..., in].

        Returns:
            Shape [..., out].

        Memory:
            Activations of width r, and the product of width out before b scales it, in addition to the result. The
            backward pass keeps both. It keeps nothing of shape [out, in].
        """
        dropped_x = x if self.dropout_key is None else apply_dropout(x, self.dropout_key, self.dropout)
        low_rank = linear(dropped_x, self.vera_a)
        correction = linear(low_rank * expand_like(self.lora_lambda_d, low_rank), self.vera_b)
        scale = self.lora_lambda_b if self.layer_scale is None else self.lora_lambda_b * self.layer_scale
        return linear(x, self.weight) + correction * expand_like(scale, correction)

    def factors(self) -> tuple[Array, Array]:
        """Return the factors diag(d) A [r, in] and diag(b) B [out, r]; the correction is the second times the first."""
        scale = self.lora_lambda_b
        if self.layer_scale is not None:
            scale = scale * jnp.expand_dims(self.layer_scale, tuple(range(self.layer_scale.ndim, scale.ndim)))
        return self.vera_a * self.lora_lambda_d[..., None], self.vera_b * scale[..., None]

    scaled_factors = factors

    def inverted(self) -> VeRAWeight:
        """Return the inverse adapter: merging it undoes the merge of this adapter."""
        return dataclasses.replace(self, lora_lambda_b=-self.lora_lambda_b)

    def folded(self) -> Float[Array, "out in"]:
        """Return the matrix by which `linear` multiplies, in float32, for merging; the node must not be a stack."""
        a, b = (factor.astype(jnp.float32) for factor in self.factors())
        return self.weight.astype(jnp.float32) + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


def _projection(key: Any, fold: int, shape: tuple[int, int]) -> Array:
    bound = (6.0 / shape[-1]) ** 0.5  # kaiming_uniform_, PEFT's choice
    return jax.random.uniform(jax.random.fold_in(key, fold), shape, jnp.float32, -bound, bound)


def _make_node(site: Site, full_a: Array, full_b: Array, config: VeRAConfig) -> VeRAWeight:
    out, inner = site.weight.shape[-2:]
    a = make_leaf(site, (config.rank, inner), lambda shape: jnp.broadcast_to(full_a[:, :inner], shape))
    b = make_leaf(site, (out, config.rank), lambda shape: jnp.broadcast_to(full_b[:out], shape))
    d = make_leaf(site, (config.rank,), lambda shape: jnp.full(shape, config.d_initial, jnp.float32))
    zeros = make_leaf(site, (out,), lambda shape: jnp.zeros(shape, jnp.float32))
    return VeRAWeight(site.weight, a, b, d, zeros, layer_scale(site, config.layers))


class _VeRA(AdapterKind):
    name = VeRAWeight.NAME
    peft_type = "VERA"
    config_type = VeRAConfig
    schema = "VeraFile"
    dropout_option = "vera_dropout"
    shared_tensors = _PROJECTIONS

    def init(
        self, model: Tree, chosen: Sequence[Site], config: Any, key: Array | None, kernels: Mapping[int, Use]
    ) -> dict[int, Any]:
        # As in PEFT, one pair of projections has the largest sizes. Each site takes first columns of A and rows of B.
        max_out, max_in = (max(site.weight.shape[axis] for site in chosen) for axis in (-2, -1))
        full_a, full_b = _projection(key, 0, (config.rank, max_in)), _projection(key, 1, (max_out, config.rank))
        return {site.index: _make_node(site, full_a, full_b, config) for site in chosen}

    def check_file(self, path: Path, file: Any) -> None:
        if not file.save_projection:
            message = f"{path}: option 'save_projection' is false: the projections are not in the file"
            raise ModelFileError(message, hint="load it with PEFT, set save_projection there, and save it again")

    def tensor_suffixes(self, variants: Sequence[Variant] = (), *, table: bool = False) -> dict[str, str]:
        return {"lora_lambda_d": "vera_lambda_d", "lora_lambda_b": "vera_lambda_b"}

    def entry(self, node: Any, scale: float, rank: int | None = None) -> dict[str, Any]:
        return {"rank": node.rank}

    def describe(self, adapted: Mapping[str, Mapping[str, Any]], modules: Sequence[str]) -> dict[str, Any]:
        rank = next(iter(adapted.values()))["rank"]
        return {"r": rank, "projection_prng_key": 0, "save_projection": True, "vera_dropout": 0.0}

    def write_shared(self, adapted: Sequence[Site]) -> dict[str, np.ndarray]:
        trees = [host_leaves(site)[0] for site in adapted]
        projections: dict[str, np.ndarray] = {}
        for key, name in zip(_PROJECTIONS, ("vera_a", "vera_b"), strict=True):
            parts = [leaves[name].reshape(-1, *leaves[name].shape[-2:]) for leaves in trees]
            projection = max(parts, key=lambda part: part.size // len(part))[0]
            for site, part in zip(adapted, parts, strict=True):
                block = projection[: part.shape[1], : part.shape[2]]
                if block.shape != part.shape[1:] or not (part == block[None]).all():
                    message = f"{site.path}: its projections differ from those of {adapted[0].path}"
                    hint = "merge some of the adapters with lt.lora.merge; PEFT's VeRA has one pair of projections"
                    raise StructureError(message, hint=hint)
            projections[key] = np.ascontiguousarray(projection)
        return projections

    def read_shared(self, file: TensorFile, config: PeftConfig) -> list[np.ndarray]:
        projections: list[np.ndarray] = []
        for axis, key in enumerate(_PROJECTIONS):
            shape = file.shape(key)
            expected_shape = [*shape] if len(shape) == 2 else [1, 1]
            expected_shape[axis] = config.file.r
            projections.append(file.read(key, tuple(expected_shape)))
        return projections

    def read(
        self, file: TensorFile, site: Site, names: Sequence[str], mask: Sequence[bool], config: PeftConfig, shared: Any
    ) -> VeRAWeight:
        adapted_names = list(itertools.compress(names, mask))
        *layers, out, inner = site.weight.shape
        leaves: dict[str, Any] = {}
        for leaf, shape in (("lora_lambda_d", (config.file.r,)), ("lora_lambda_b", (out,))):
            tensors = {name: file.read(config.tensors(name)[leaf], shape) for name in adapted_names}
            leaves[leaf] = stack_layers(site, names, tensors, shape)
        full_a, full_b = shared
        if full_a.shape[1] < inner or full_b.shape[0] < out:
            message = f"{file.path}: the projections are too small for {site.path} [{out}, {inner}]"
            raise ModelFileError(message, got=f"{list(full_a.shape)} and {list(full_b.shape)}", hint=MODEL_HINT)
        leaves["vera_a"] = jnp.broadcast_to(jnp.asarray(full_a[:, :inner]), (*layers, full_a.shape[0], inner))
        leaves["vera_b"] = jnp.broadcast_to(jnp.asarray(full_b[:out]), (*layers, out, full_b.shape[1]))
        return VeRAWeight(site.weight, **leaves, layer_scale=mask_scale(mask))


VERA_KIND = _VeRA()
