"""LoRA, with its variants rsLoRA and DoRA: configuration, node, learning rates, initial values, and PEFT's files.

A node is the pytree in place of a weight W. It computes x Wᵀ + s (x Aᵀ) Bᵀ, with the scale s = alpha / r and the
factors A and B of its correction B A. Neither the forward pass nor the backward pass materialises W + s B A. Shapes: L
layers, E experts, rank r, and the sizes ``out`` and ``in`` of the weight's outputs and inputs. Every leaf has the stack
axes of the weight (layers, experts), so `jax.lax.scan` slices a stacked node like the array that it replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ...core import (
    INTERNAL_PREFIX,
    ConfigError,
    LinearWeight,
    ModelFileError,
    Pattern,
    SelectionError,
    StructureError,
    Tree,
    check_choice,
    check_integer,
    check_number,
    check_type,
    leaves_with_paths,
    linear,
    map_with_paths,
    match_names,
    rows,
    shown,
    transposed_product,
)
from ...core import memory_space as space_of
from .._adapted import Use
from ._kernel import init_kernel
from ._node import AdapterWeight, Transposed, Variant, Variants, apply_dropout, expand_like, matmul, squared_row_norms
from ._peft import (
    BIASES,
    CONFIG_FILE,
    LORA,
    LORA_TENSORS,
    MODEL_HINT,
    WEIGHT_INITS,
    AdapterKind,
    Matcher,
    PeftConfig,
    TensorFile,
    mask_scale,
    short_names,
    stack_layers,
    suffix_pattern,
    value_by_pattern,
)
from ._sites import Site, check_rank, is_table, layer_scale, make_leaf, normalize_fields

if TYPE_CHECKING:
    import optax

VARIANTS = (
    Variant(field="rslora", option="use_rslora", name="rsLoRA", power=0.5, is_sum=True),
    Variant(field="dora", option="use_dora", name="DoRA", leaf="lora_magnitude", suffix="lora_magnitude_vector"),
)
"""The variants of LoRA; other modules read this table. Some features need `Variant.is_sum`: see there."""
SUM_NAMES = " and ".join(["LoRA", *(variant.name for variant in VARIANTS if variant.is_sum)])  # for messages
_INITS = ("peft", "gaussian", "orthogonal", *WEIGHT_INITS)
_DIGITS = 7
"""Significant digits of an alpha that is computed from a float32 scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A LoRA configuration; `rslora` and `dora` select variants.

    Raises:
        ConfigError: for a rank below 1, an alpha that is not positive and finite, an unknown `init` or `bias`, or
            invalid patterns or layers. Also for an odd rank with the `init` "orthogonal", for `dora` with "pissa" or
            "olora", and for `layers` with the `bias` "lora_only".

    Examples:
        >>> Config(rank=8, targets="**/{q,k,v,o}_proj").scaling
        4.0
    """

    rank: int = 16
    """Rank r of the correction B A. Each matrix [out, in] gets ``rank * (out + in)`` trainable parameters."""
    alpha: float = 32.0
    """The correction B A is scaled by ``alpha / rank``, so that a change of rank needs no new learning rate."""
    targets: Pattern | Sequence[Pattern] = "**/{q,v}_proj"
    """Globs, or compiled regular expressions, for the paths of modules (any node with a leaf named ``weight``) or of
    the weights themselves. A glob that begins with ``!`` excludes. See `add` for how a model may use these weights.
    ``"all-linear"`` stands for every matrix of a decoder's layers, without embeddings, head, routers and experts."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns of targets that get no adapter; they have the effect of globs with ``!`` in `targets`."""
    rank_pattern: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    """Ranks other than `rank`, by glob for the path of a module or a weight; the first glob that matches decides."""
    alpha_pattern: Mapping[str, float] | Sequence[tuple[str, float]] = ()
    """Alphas other than `alpha`, in the form of `rank_pattern`."""
    layers: Sequence[int] | None = None
    """Indices, from 0, of the layers that get an adapter; None for all. In a stack, the factors of other layers are
    zeros, which do not train and are not saved, but have gradients and optimizer state of the usual size."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)``, which keeps the size of updates as the rank grows."""
    dora: bool = False
    """Whether the norm of each row of the weight trains separately from its direction."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns for the paths of modules (any node that holds a leaf), such as ``"outer/lm_head"``, or of arrays. All
    their parameters train, in addition to adapters. As in PEFT, a target that these patterns match gets no adapter."""
    bias: str = "none"
    """Which biases train: "none", "lora_only" (biases of modules with a target) or "all"."""
    init: str = "peft"
    """Initial values of A and B. "peft" draws A uniformly in ±1/sqrt(in), "gaussian" with standard deviation 1/rank; B
    is zero in both. In embeddings of Lowtide's models, both draw A with standard deviation 1. "orthogonal" (even ranks
    only) draws A and B whose product is zero. "pissa" uses the largest singular values of the weight and their vectors,
    "olora" its QR decomposition. With these two, the correction is B A minus its initial value: outputs and base weight
    stay the same at first, and saved files have twice the rank."""

    def __post_init__(self) -> None:
        check_rank(self.rank, "rank")
        _check_alpha(self.alpha, "alpha")
        normalize_fields(self)
        check_choice("bias", self.bias, BIASES)
        if self.bias == "lora_only" and self.layers is not None:
            message = 'bias = "lora_only" contradicts layers: the biases of a stack train together'
            raise ConfigError(message, hint='leave layers out, or use bias = "all"')
        for field, check in (("rank_pattern", check_rank), ("alpha_pattern", _check_alpha)):
            pairs: Any = getattr(self, field)
            pairs = tuple(pairs.items() if isinstance(pairs, Mapping) else (tuple(pair) for pair in pairs))
            for pair in pairs:
                if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                    example = f'{{"**/down_proj": {8 if field == "rank_pattern" else 16.0}}}'
                    message = f"{field} must map globs on module paths to values, such as {example}, not {shown(pair)}"
                    raise ConfigError(message)
                check(pair[1], f"{field}[{pair[0]!r}]")
            object.__setattr__(self, field, pairs)
        if self.init in WEIGHT_INITS and (fields := [v.field for v in variants_of(self) if not v.is_sum]):
            reason = ", which needs the norms of the weight plus B A" if self.dora else ""
            raise ConfigError(f"init: {self.init!r} contradicts {fields[0]}{reason}")
        ranks = (self.rank, *dict(self.rank_pattern).values())
        if self.init == "orthogonal" and (odd := [rank for rank in ranks if rank % 2]):
            raise ConfigError(f'init = "orthogonal" uses half of the rank for A, so ranks must be even, not {odd[0]}')
        check_choice("init", self.init, _INITS)
        for variant in VARIANTS:
            check_type(variant.field, getattr(self, variant.field), bool, "True or False")
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def scaling(self) -> float:
        """Scale of the correction B A: ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``."""
        return self.alpha / self.rank ** variants_of(self).power


def variants_of(config: Config) -> Variants:
    return Variants(variant for variant in VARIANTS if getattr(config, variant.field))


def non_sum_kind(config: Any) -> str:
    """Return a name for a configuration whose adapted weight is not W + s B A, such as "DoRA"; otherwise empty text."""
    return variants_of(config).non_sums if isinstance(config, Config) else type(config).__name__


def _check_alpha(alpha: Any, name: str) -> None:
    hint = "use for instance twice the rank; with 0 the adapter would have no effect and no gradient"
    check_number(name, alpha, above=0, hint=hint)


# Sources: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685); Kalajdzievski, "A Rank
# Stabilization Scaling Factor for Fine-Tuning with LoRA" (arXiv:2312.03732); Liu et al., "DoRA: Weight-Decomposed
# Low-Rank Adaptation" (arXiv:2402.09353). Deviations from PEFT: PEFT multiplies in the adapter's dtype (float32) and
# rounds the sum. Here the factors are cast to the dtype of `x`, so a bfloat16 model multiplies in bfloat16 throughout.
# For DoRA, PEFT materialises W + B A to compute the norms of its rows. Here the squared norms are
# ‖W‖² + 2 s (W Aᵀ) · B + s² B A Aᵀ Bᵀ, in float32. Known inefficiency: the norms of W are constant, but every product
# computes them again, which reads W a second time.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAWeight(AdapterWeight):
    """A weight with a low-rank adapter; a pytree node that multiplies like the weight it replaced.

    The paths of its leaves are ``<path>/weight``, ``<path>/lora_a`` and ``<path>/lora_b``. The leaves are not checked:
    `lowtide.partition` sets some of them to None, and JAX transformations replace leaves by other objects.

    Examples:
        >>> node = LoRAWeight(jnp.ones((4, 3)), jnp.ones((1, 3)), jnp.zeros((4, 1)), alpha=1.0)
        >>> node.linear(jnp.ones((2, 3))).shape
        (2, 4)
    """

    NAME: ClassVar[str] = "LoRA"
    PEFT_TYPE: ClassVar[str | None] = LORA
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]] = ("weight", "lora_a", "lora_b")
    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "lora_a": ("rank", "in"),
        "lora_b": ("out", "rank"),
        "lora_magnitude": ("out",),
        "layer_scale": (),
        "start_a": ("rank", "in"),
        "start_b": ("out", "rank"),
    }
    """The axes of each leaf after the stack axes."""

    weight: Any
    """The base weight: [out, in], stacked [L, out, in], or for experts [L, E, out, in]. It is an array, or another
    `lowtide.core.LinearWeight`, such as a quantised weight."""
    lora_a: Any
    """The factor A, which multiplies the inputs: float32, [r, in] after the stack axes of the weight."""
    lora_b: Any
    """The factor B, which gives the outputs: float32, [out, r] after the stack axes of the weight."""
    alpha: float = dataclasses.field(metadata={"static": True})
    """Numerator of the scale of the correction (static)."""
    lora_magnitude: Any = None
    """DoRA's trainable norms of the rows of the adapted weight, [out] or [L, out], float32; None without DoRA."""
    layer_scale: Any = None
    """Frozen additional scale of each layer's correction in a stack, [L], float32; 0 for layers without an adapter.
    None: 1 for all layers."""
    dropout_key: Any = None
    """With dropout, a random key from `lowtide.lora.dropout` (in a stack, one per layer); otherwise None."""
    start_a: Any = None
    """Frozen initial A of an adapter that began as a part of the weight ("pissa" or "olora"); None for others."""
    start_b: Any = None
    """Frozen initial B of such an adapter. Its correction is B A minus the product `start_b` `start_a`."""
    rslora: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the scale is ``alpha / sqrt(rank)`` (static)."""
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})
    """Fraction of the correction's inputs that is set to zero (static)."""

    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

    @property
    def variants(self) -> Variants:
        is_selected = [getattr(self, v.leaf) is not None if v.leaf else getattr(self, v.field) for v in VARIANTS]
        return Variants(itertools.compress(VARIANTS, is_selected))

    @property
    def rank(self) -> int:
        """The rank r of B A."""
        return int(self.lora_a.shape[-2])

    @property
    def scaling(self) -> float:
        """Scale of the correction B A: ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``."""
        return self.alpha / self.rank**self.variants.power

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x (W + scaling B A)ᵀ, in the dtype of `x`, without forming W + scaling B A.

        With magnitudes m (`lora_magnitude`), each output is multiplied by m / ‖row of W + scaling B A‖. Gradients treat
        this norm as a constant, as DoRA's authors advise.

        Args:
            x: activations, shape [..., in]; their dtype is the compute dtype, to which the adapter is cast.

        Returns:
            Shape [..., out].

        Memory:
            Activations of width r in addition to the result. The backward pass keeps these activations and `x`. It
            keeps nothing of shape [out, in], unless W trains or has to be cast to the dtype of `x`. With magnitudes it
            also keeps the result before the multiplication by m. With dropout it also keeps `x` after dropout.
        """
        dropped_x = x if self.dropout_key is None else apply_dropout(x, self.dropout_key, self.dropout)
        if self.dropout_key is None:
            correction = self._compute_correction(x, *self.factors())
        else:
            correction = self._compute_correction(dropped_x, self.lora_a, self.lora_b)
            if self.start_a is not None:  # PEFT subtracts this product from W, so dropout does not apply to it
                correction = correction - self._compute_correction(x, self.start_a, self.start_b)
        base = linear(x, self.weight)
        if self.lora_magnitude is None:
            return base + correction
        scale = expand_like(self._magnitude_scale(x.dtype), base)
        if self.dropout_key is None:
            return scale * checkpoint_name(base + correction, f"{INTERNAL_PREFIX}lora_scaled")
        # As in PEFT, dropout also applies to the product with W that the magnitudes rescale.
        return base + (scale - 1) * linear(dropped_x, self.weight) + scale * correction

    def factors(self) -> tuple[Any, Any]:
        """Return A and B of the whole correction, without its scale; they have twice the rank with `start_a`."""
        if self.start_a is None:
            return self.lora_a, self.lora_b
        lora_a = jnp.concatenate([self.lora_a, self.start_a], axis=-2)
        return lora_a, jnp.concatenate([self.lora_b, -self.start_b], axis=-1)

    def scaled_factors(self) -> tuple[Any, Any] | None:
        """Return A and B of the adapted weight W + B A, with all scales included; None with a variant such as DoRA."""
        if self.variants.non_sums:
            return None
        scale = self.scaling if self.layer_scale is None else self.scaling * self.layer_scale[:, None, None]
        lora_a, lora_b = self.factors()
        return jnp.asarray(lora_a), scale * jnp.asarray(lora_b)

    def inverted(self) -> LoRAWeight:
        """Return the inverse adapter, for use without DoRA: merging it undoes the merge of this adapter."""
        # The correction is B A - start_b start_a, so negating both B negates it.
        return dataclasses.replace(self, lora_b=-self.lora_b, start_b=None if self.start_b is None else -self.start_b)

    def _compute_correction(self, x: Array, lora_a: Any, lora_b: Any) -> Array:
        low_rank = checkpoint_name(linear(x, lora_a), f"{INTERNAL_PREFIX}lora_low")
        low_rank = low_rank * self._layer_scaling(low_rank)
        # On a CPU, the gradient of B is cheaper as the transpose of (x Aᵀ)ᵀ dy than as dyᵀ (x Aᵀ): see
        # `core.transposed_product`.
        if getattr(lora_b, "dtype", None) == low_rank.dtype and lora_b.ndim == 2:
            return transposed_product(low_rank, lora_b)
        return linear(low_rank, lora_b)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows of an embedding W + scaling B A, without forming it; in the dtype of W, without dropout.

        Args:
            ids: indices of the rows; negative ones count from the end. An index out of range gives NaN.

        Returns:
            Shape [..., in].

        Raises:
            StructureError: for a variant that is not a sum, such as DoRA.

        Memory:
            The looked-up rows of W and of B. The backward pass keeps the rows of B.
        """
        if name := self.variants.non_sums:
            message = f"the lookup of an embedding {list(self.shape)} does not support {name}"
            raise StructureError(message, hint="leave the embedding out of the targets")
        base_rows = rows(self.weight, ids)
        lora_a, lora_b = self.factors()
        # Cast after the lookup, so that gradients of a row that is looked up several times add up in float32.
        low_rank = rows(lora_b, ids).astype(base_rows.dtype)
        return base_rows + jnp.matmul(low_rank * self._layer_scaling(low_rank), lora_a.astype(base_rows.dtype))

    def grouped(
        self, x_MI: Float[Array, "M I"], product: Callable[..., Array], *, transposed: bool
    ) -> Float[Array, "M O"]:
        """Multiply rows of activations by W + scaling B A of their expert, without forming it for any expert.

        Args:
            x_MI: rows of activations, sorted by expert.
            product: ``product(rows, weights, transposed=)`` multiplies each row by its expert's weights.
            transposed: whether experts are stored as [in, out].

        Returns:
            [M, O], in the dtype of the rows.

        Memory:
            Rows of width r in addition to the result. The backward pass keeps these rows and `x_MI`.
        """
        # For experts that are stored as [in, out], B multiplies the inputs and A gives the outputs.
        lora_a, lora_b = self.factors()
        first, second = (lora_b, lora_a) if transposed else (lora_a, lora_b)
        low_rank = product(x_MI, first, transposed=transposed) * self.scaling
        return product(x_MI, self.weight, transposed=transposed) + product(low_rank, second, transposed=transposed)

    def _layer_scaling(self, like: Array) -> Any:
        """Return the scale of the correction; with `layer_scale`, an array that broadcasts against `like`, [L, ...]."""
        if self.layer_scale is None:
            return self.scaling
        scale = (self.scaling * self.layer_scale).astype(like.dtype)
        return jnp.expand_dims(scale, tuple(range(scale.ndim, like.ndim)))

    def _magnitude_scale(self, dtype: Any) -> Float[Array, " out"]:
        """Return m / ‖row of W + scaling B A‖ for each row, without forming W + scaling B A."""
        if len(self.lora_a.shape) != 2:
            message = f"a stack with DoRA cannot be multiplied at once: A has shape {list(self.lora_a.shape)}"
            raise StructureError(message, hint="multiply inside of jax.lax.scan or jax.vmap over the layers")
        weight, a, b = jax.lax.stop_gradient((self.weight, self.lora_a, self.lora_b))
        a, b = a.astype(jnp.float32), b.astype(jnp.float32) * self._layer_scaling(b)
        # For row i, with the scale in b: ‖w_i + b_i A‖² = ‖w_i‖² + 2 b_i · (A w_i) + b_i (A Aᵀ) b_iᵀ.
        crossed = linear(a.astype(dtype), weight).astype(jnp.float32)  # A Wᵀ, [r, out]
        gram = jnp.matmul(a, a.T, precision=jax.lax.Precision.HIGHEST)
        inner = jnp.matmul(b, gram, precision=jax.lax.Precision.HIGHEST)
        squares = squared_row_norms(weight) + 2 * jnp.sum(b * crossed.T, axis=-1) + jnp.sum(inner * b, axis=-1)
        return self._divide_by_norm(jax.lax.stop_gradient(squares))

    def _divide_by_norm(self, squares: Float[Array, " out"]) -> Float[Array, " out"]:
        # A row of zeros has no direction to scale. Its norm counts as 1, so the result is zero and not NaN.
        scale = self.lora_magnitude.astype(jnp.float32) / jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        return scale if self.layer_scale is None else jnp.where(self.layer_scale != 0, scale, 1.0)

    def folded(self) -> Float[Array, "out in"]:
        """Return the matrix by which `linear` multiplies, in float32, for merging; the node must not be a stack."""
        # Without `precision`, a GPU or TPU multiplies float32 in a shorter format.
        a, b = (factor.astype(jnp.float32) for factor in self.factors())
        delta = jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
        merged = self.weight.astype(jnp.float32) + self._layer_scaling(delta) * delta
        if self.lora_magnitude is None:
            return merged
        return merged * self._divide_by_norm(squared_row_norms(merged))[:, None]

    def __matmul__(self, x: Float[Array, "*batch_in n"] | Float[Array, " in"]) -> Array:
        """Compute (W + scaling B A) x, in the dtype that W x has."""
        if not self.is_plain:
            return matmul(self, x)
        result = self.weight @ x
        lora_a, lora_b = (factor.astype(result.dtype) for factor in self.factors())
        low_rank = lora_a @ x
        low_rank = (low_rank * self._layer_scaling(low_rank)).astype(result.dtype)
        # For a stacked weight and a vector, `low_rank` is [L, r]: one vector per layer, which `@` would take for a
        # matrix.
        return result + (lora_b @ low_rank if x.ndim > 1 else jnp.einsum("...or,...r->...o", lora_b, low_rank))

    def __rmatmul__(self, x: Float[Array, "*batch out"]) -> Float[Array, "*batch in"]:
        """Compute x (W + scaling B A), in the dtype that x W has."""
        if not self.is_plain:
            return NotImplemented
        result = x @ self.weight
        lora_a, lora_b = (factor.astype(result.dtype) for factor in self.factors())
        low_rank = x @ lora_b
        low_rank = (low_rank * self._layer_scaling(low_rank)).astype(result.dtype)
        return result + (low_rank @ lora_a if x.ndim > 1 else jnp.einsum("...r,...ri->...i", low_rank, lora_a))

    @property
    def mT(self) -> Any:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out] or [L, in, out], whose factors are Bᵀ and Aᵀ."""
        if not self.is_plain:
            return Transposed(self)
        # (W + B A)ᵀ = Wᵀ + Aᵀ Bᵀ, so Bᵀ takes the place of A, and Aᵀ that of B.
        fields = {"weight": self.weight.mT, "lora_a": self.lora_b.mT, "lora_b": self.lora_a.mT}
        if self.start_a is not None:
            fields |= {"start_a": self.start_b.mT, "start_b": self.start_a.mT}
        return dataclasses.replace(self, **fields)

    @property
    def T(self) -> Any:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out]; a stack raises `StructureError`, since ``T`` would move its layer axis."""
        if self.ndim > 2:
            message = f"weight.T of a stacked weight {list(self.shape)} with an adapter also transposes its layer axis"
            raise StructureError(message, hint="use weight.mT, which transposes each layer, or narrow the targets")
        return self.mT

    @property
    def is_plain(self) -> bool:
        """Whether ``x @ weight`` is x W + s x B A: there is no dropout, and no variant such as DoRA."""
        return not self.variants.non_sums and self.dropout_key is None


# LoRA+: another learning rate for B. Source: Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models"
# (arXiv:2402.12354). Deviation from PEFT's `create_loraplus_optimizer`, which also applies the rate of B to vectors.


def plus(ratio: float) -> optax.GradientTransformation:
    """Return a transformation that multiplies the learning rate of the factors B; chain it after an optimizer.

    It multiplies the updates of B by `ratio`, including their decoupled weight decay.

    Args:
        ratio: B's learning rate divided by that of all other leaves; the authors of LoRA+ advise about 16.

    Returns:
        A transformation without state.

    Raises:
        ConfigError: for a ratio that is not positive and finite.
        SelectionError: from ``init``, when no trainable leaf is a factor B.

    Examples:
        >>> import optax
        >>> from lowtide import lora
        >>> tx = optax.chain(optax.sgd(1.0), lora.plus(16))
        >>> params = {"lora_a": jnp.ones(1), "lora_b": jnp.ones(1)}
        >>> jax.tree.map(float, jax.tree.map(jnp.sum, tx.update(params, tx.init(params))[0]))
        {'lora_a': -1.0, 'lora_b': -16.0}
    """
    import optax

    check_number("ratio", ratio, above=0, hint="the authors of LoRA+ advise about 16")

    def is_factor_b(path: str) -> bool:
        return path.rpartition("/")[2] == "lora_b"

    def init(params: Tree) -> optax.EmptyState:
        if not any(is_factor_b(path) for path, _ in leaves_with_paths(params)):
            hint = 'select adapters of LoRA or DoRA with wrt="**/lora_*", or leave lt.lora.plus out'
            raise SelectionError("LoRA+: the trainable leaves have no factor B", hint=hint)
        return optax.EmptyState()

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return map_with_paths(lambda path, leaf: leaf * float(ratio) if is_factor_b(path) else leaf, updates), state

    return optax.GradientTransformation(init, update)


_squared_row_norms = jax.jit(squared_row_norms)


def _values_by_site(chosen: Sequence[Site], pairs: Any, default: Any) -> dict[int, Any]:
    """Return each site's value, from the first glob that matches it; raise for a glob that matches no site."""
    names = [name for site in chosen for name in site.names]
    matches = [({*match_names(names, pattern)}, value) for pattern, value in pairs]
    return {site.index: next((value for hits, value in matches if hits & {*site.names}), default) for site in chosen}


def _init_matrix(
    site: Site, config: Config, rank: int, alpha: float, key: Any, draw_a: Callable[..., Array]
) -> LoRAWeight:
    out, inner = site.weight.shape[-2:]
    scale, fields = layer_scale(site, config.layers), variants_of(config).static_fields
    if config.init in (*WEIGHT_INITS, "orthogonal"):
        lora_a, lora_b = _init_factors(site, config, rank, alpha, key, scale)
    else:
        lora_a = make_leaf(site, (rank, inner), draw_a)
        lora_b = make_leaf(site, (out, rank), lambda shape: jnp.zeros(shape, jnp.float32))
    if config.init in WEIGHT_INITS:
        fields |= {"start_a": lora_a, "start_b": lora_b}
        if not isinstance(lora_a, jax.ShapeDtypeStruct):  # one array at two paths cannot train at only one of them
            lora_a, lora_b = jnp.array(lora_a, copy=True), jnp.array(lora_b, copy=True)
    if config.dora:
        fields["lora_magnitude"] = make_leaf(site, (out,), lambda shape: jnp.sqrt(_squared_row_norms(site.weight)))
    node = LoRAWeight(site.weight, lora_a, lora_b, alpha, layer_scale=scale, **fields)
    assert node.variants == variants_of(config), "each leaf of VARIANTS needs an initial value here"
    return node


def _init_factors(site: Site, config: Config, rank: int, alpha: float, key: Any, scale: Any) -> tuple[Any, Any]:
    """Make A and B for an `init` in which neither begins as zero; in layers without an adapter both are zero."""
    *layers, out, inner = site.weight.shape
    if isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct):
        shape_a, shape_b = (*layers, rank, inner), (*layers, out, rank)
        return jax.ShapeDtypeStruct(shape_a, jnp.float32), jax.ShapeDtypeStruct(shape_b, jnp.float32)
    if config.init == "orthogonal":
        factors = _orthogonal_factors(site.random_key(key), tuple(layers), out, inner, rank)
    else:
        factors = _principal_factors(site.weight, rank, alpha / rank ** variants_of(config).power, config.init)
    return factors if scale is None else (factors[0] * scale[:, None, None], factors[1] * scale[:, None, None])


def _orthogonal_factors(key: Array, layers: tuple[int, ...], out: int, inner: int, rank: int) -> tuple[Array, Array]:
    """Draw A and B from two halves of an orthogonal matrix, so that B A is zero; their scales are as in PEFT."""
    keys = jax.random.split(key, 3)
    q, _ = jnp.linalg.qr(jax.random.normal(keys[0], (*layers, rank, rank), jnp.float32))
    half = rank // 2
    # A and B use the even and the odd rows of q. These are orthogonal, so B A = Y q_odd q_evenᵀ Xᵀ = 0 for any X and Y.
    a = jax.random.normal(keys[1], (*layers, inner, half), jnp.float32) @ q[..., 0::2, :] / 10
    b = jax.random.normal(keys[2], (*layers, out, half), jnp.float32) @ q[..., 1::2, :] / 10
    return a.mT, b


# Initial values from the weight itself: PiSSA and OLoRA. The adapter begins as a part of the weight, so this part has
# to be subtracted once. PEFT subtracts it from the base weight. Here the base weight stays unchanged, because other
# adapters and files use it. The node keeps the initial factors A0 and B0, frozen, and its correction is B A - B0 A0. It
# is saved as a plain adapter of twice the rank, for the original base.
#
# Sources: Meng et al., "PiSSA" (arXiv:2404.02948); Büyükakyüz, "OLoRA" (arXiv:2406.01775). Known inefficiency: all
# singular values are computed, and only a few are used.


def _principal_factors(weight: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    """Return A [*L, r, in] and B [*L, out, r] for "pissa" or "olora"; ``scaling * B A`` is a part of the weight."""
    if len(weight.shape) == 2:
        return (pissa if init == "pissa" else _olora)(dense_matrix(weight), rank, scaling)
    layers = (jax.tree.map(operator.itemgetter(index), weight) for index in range(weight.shape[0]))
    factors = [_principal_factors(layer, rank, scaling, init) for layer in layers]
    return jnp.stack([a for a, _ in factors]), jnp.stack([b for _, b in factors])


def dense_matrix(matrix: Any) -> Float[Array, "out in"]:
    """Return a matrix in float32 on the device; a quantised matrix is dequantised."""
    array: Any = getattr(matrix, "dense")(jnp.float32) if isinstance(matrix, LinearWeight) else matrix  # noqa: B009
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    if is_concrete and space_of(array) == jax.memory.Space.Host:
        array = jax.device_put(array, jax.memory.Space.Device)
    return jnp.asarray(array, jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pissa(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    """Return A and B such that ``scaling * B A`` is the best approximation of the matrix with this rank."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    # Each factor gets the square roots of the singular values: B A = U (S / scaling) Vᵀ.
    root = jnp.sqrt(s[:rank] / scaling)
    return root[:, None] * vt[:rank], u[:, :rank] * root[None, :]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _olora(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    # As in PEFT, the part that is subtracted from the weight is `scaling` times this product.
    q, r = jnp.linalg.qr(matrix)
    return r[:rank], q[:, :rank]


class _LoRA(AdapterKind):
    name = "LoRA"
    peft_type = LORA
    config_type = Config
    schema = "AdapterFile"
    biases = BIASES
    variants = VARIANTS
    dropout_option = "lora_dropout"

    def init(
        self, model: Tree, chosen: Sequence[Site], config: Any, key: Array | None, kernels: Mapping[int, Use]
    ) -> dict[int, Any]:
        tables = {site.index for site in chosen if is_table(model, site)}
        ranks = _values_by_site(chosen, config.rank_pattern, config.rank)
        alphas = _values_by_site(chosen, config.alpha_pattern, config.alpha)
        nodes: dict[int, Any] = {}
        for site in chosen:
            use, shape = kernels.get(site.index), tuple(site.weight.shape)
            first, split = (-2, -1) if use is None else (use.num_stacked, use.num_stacked + use.num_rows)
            out, inner = math.prod(shape[first:split]), math.prod(shape[split:])
            rank = ranks[site.index]
            hint = f"lower it to at most the smaller side of {list(shape)}, or train the whole weight"
            check_integer(f"rank of {site.path}", rank, most=min(out, inner), hint=hint)
            scale = None if use is not None else layer_scale(site, config.layers)

            def draw_a(
                shape: tuple[int, ...], site: Site = site, rank: int = rank, scale: Any = scale, inner: int = inner
            ) -> Array:
                site_key = site.random_key(key)
                if site.index in tables:  # as for PEFT's embeddings, whatever `init` is
                    values = jax.random.normal(site_key, shape, jnp.float32)
                elif config.init == "gaussian":
                    values = jax.random.normal(site_key, shape, jnp.float32) / rank
                else:
                    # kaiming_uniform_(a=sqrt(5)), PEFT's choice: gain sqrt(2 / (1 + 5)), bound gain * sqrt(3 / in).
                    bound = float(inner) ** -0.5
                    values = jax.random.uniform(site_key, shape, jnp.float32, -bound, bound)
                # In layers without an adapter both factors are zero: neither gets a gradient, and weight decay keeps
                # them at zero.
                return values if scale is None else values * scale[:, None, None]

            alpha = float(alphas[site.index])
            if use is None:
                nodes[site.index] = _init_matrix(site, config, rank, alpha, key, draw_a)
            else:  # the scale of a kernel is always alpha / rank
                alpha *= rank ** (1 - variants_of(config).power)
                nodes[site.index] = init_kernel(site.weight, use, rank, alpha, draw_a)
        return nodes

    def check_file(self, path: Path, file: Any) -> None:
        # Refuse an alpha of zero, with which nothing would train, and a negative one, as `Config` does.
        alphas = {f"alpha_pattern[{shown(name)}]": alpha for name, alpha in (file.alpha_pattern or {}).items()}
        hint = "train it again with an alpha such as twice the rank; list modules without an adapter in exclude_modules"
        for name, alpha in {"lora_alpha": file.lora_alpha, **alphas}.items():
            check_number(f"{path}: {name}", alpha, above=0, hint=hint, error=ModelFileError)

    def patterns(self, file: Any) -> list[str]:
        return [suffix_pattern(end) for end in (*(file.rank_pattern or ()), *(file.alpha_pattern or ()))]

    def tensor_suffixes(self, variants: Sequence[Variant] = (), *, table: bool = False) -> dict[str, str]:
        ends = {"lora_a": "lora_embedding_B", "lora_b": "lora_embedding_A"} if table else LORA_TENSORS
        return {**ends, **{variant.leaf: variant.suffix for variant in variants if variant.leaf}}

    def entry(self, node: Any, scale: float, rank: int | None = None) -> dict[str, Any]:
        rank = rank or (node.rank if node.start_a is None else 2 * node.rank)
        alpha = node.alpha * scale * (rank / node.rank) ** node.variants.power  # the same scale at another rank
        alpha = float(f"{alpha:.{_DIGITS}g}") if rank < node.rank else alpha
        return {"rank": rank, "alpha": alpha, "variants": node.variants}

    def describe(self, adapted: Mapping[str, Mapping[str, Any]], modules: Sequence[str]) -> dict[str, Any]:
        # An option such as `use_rslora` holds for the whole file. If nodes differ, alphas are converted to give the
        # same scales. The entry of a kernel has None as its variants.
        lists = [node["variants"] for node in adapted.values() if node["variants"] is not None]
        common = Variants(v for v in VARIANTS if lists and all(v in variants for variants in lists))
        alphas = {name: _convert_alpha(node, common.power) for name, node in adapted.items()}
        alphas = {name: int(alpha) if float(alpha).is_integer() else alpha for name, alpha in alphas.items()}
        rank, rank_pattern = _default_and_pattern({name: node["rank"] for name, node in adapted.items()})
        alpha, alpha_pattern = _default_and_pattern(alphas)
        options: dict[str, Any] = {variant.option: variant in common for variant in VARIANTS}
        options |= {"r": rank, "rank_pattern": rank_pattern, "lora_alpha": alpha, "alpha_pattern": alpha_pattern}
        options |= {"init_lora_weights": True, "lora_dropout": 0.0, "target_parameters": None}
        return dict(sorted(options.items()))

    def layer_ranks(self, site: Site, leaves: Mapping[str, np.ndarray]) -> list[int] | None:
        is_stack = len(site.weight.shape) == 3 and site.node.start_a is None
        return _used_ranks(leaves["lora_a"], leaves["lora_b"]) if is_stack else None

    def read(
        self, file: TensorFile, site: Site, names: Sequence[str], mask: Sequence[bool], config: PeftConfig, shared: Any
    ) -> LoRAWeight:
        adapted_names = list(itertools.compress(names, mask))
        is_embedding, init = adapted_names[0] in config.tables, config.file.init_lora_weights
        out, inner = site.weight.shape[-2:]
        if len(site.weight.shape) == 3 and init not in WEIGHT_INITS:
            rank, alpha, ranks, scale = _stack_scales(names, adapted_names, config)
        else:
            rank, alpha = config.scale_of(adapted_names, site.path)
            ranks, scale = dict.fromkeys(adapted_names, rank), mask_scale(mask)

        def shape_of(leaf: str, rank: int) -> tuple[int, ...]:
            return tuple({"rank": rank, "in": inner, "out": out}[axis] for axis in LoRAWeight.AXES[leaf])

        leaves: dict[str, Any] = {}
        for leaf in config.tensors(adapted_names[0]):
            tensors: dict[str, np.ndarray] = {}
            for name, own_rank in ranks.items():
                key, shape = config.tensors(name)[leaf], shape_of(leaf, own_rank)
                tensors[name] = file.read(key, shape[::-1]).T if is_embedding else file.read(key, shape)
            # Pad after all tensors are read, so that a wrong rank in the configuration raises before it takes memory.
            full_shape = shape_of(leaf, rank)
            for name, values in tensors.items():
                padding = [(0, size - own_size) for size, own_size in zip(full_shape, values.shape, strict=True)]
                tensors[name] = np.pad(values, padding) if values.shape != full_shape else values
            leaves[leaf] = stack_layers(site, names, tensors, full_shape)
        node = LoRAWeight(site.weight, **leaves, alpha=alpha, layer_scale=scale, **config.variants.static_fields)
        return _subtract_start(file.path, site, node, init) if init in WEIGHT_INITS else node


LORA_KIND = _LoRA()


def _convert_alpha(node: Mapping[str, Any], power: float) -> float:
    """Convert a module's alpha for a file whose scales are alpha / rank**power; the module's scale stays the same."""
    excess = (node["variants"] or Variants()).power - power
    alpha, rank = node["alpha"], node["rank"]
    return round(alpha / rank**excess, 12) if excess > 0 else alpha * rank**-excess


def _default_and_pattern(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and a dict from modules' names to other values, longest names first."""
    default = Counter(values.values()).most_common(1)[0][0]
    pattern: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            names = short_names([name for name in values if values[name] == value], list(values))
            pattern |= dict.fromkeys(names, value)
    pattern = {name: pattern[name] for name in sorted(pattern, key=lambda name: (-len(name), name))}
    matcher = Matcher(CONFIG_FILE, is_trusted=True)
    if all(value_by_pattern(pattern, name, matcher, default) == value for name, value in values.items()):
        return default, pattern
    return default, {name: values[name] for name in sorted(values, key=lambda name: (-len(name), name))}


def _subtract_start(path: Path, site: Site, node: LoRAWeight, init: str) -> LoRAWeight:
    """Return the node with `start_a` and `start_b`: the recomputed factors of the part that PEFT subtracted from W."""
    if isinstance(site.weight, LinearWeight):
        message = f"{path}: the part that {init} subtracted from {site.path} is unknown for a quantised weight"
        hint = "convert it in PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise ModelFileError(message, hint=hint)
    name, most = f"{path}: rank of {init} for {site.path}", min(site.weight.shape[-2:])
    check_integer(name, node.rank, most=most, hint=MODEL_HINT, error=ModelFileError)
    if isinstance(site.weight, jax.ShapeDtypeStruct):
        start_a, start_b = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (node.lora_a, node.lora_b))
    else:
        start_a, start_b = _principal_factors(site.weight, node.rank, node.scaling, init)
        if node.layer_scale is not None:
            start_a, start_b = (leaf * node.layer_scale[:, None, None] for leaf in (start_a, start_b))
    return dataclasses.replace(node, start_a=start_a, start_b=start_b)


# Layers of a stack whose ranks or alphas differ in PEFT's files become one node of the largest rank. A [r, in] and B
# [out, r] of other layers are padded with zeros. A component with zeros in its row of A and its column of B adds
# nothing and has no gradient. So a layer of a lower rank keeps that rank. The scale of a layer comes from its own rank
# and alpha, and is stored relative to the node's scale.


def _stack_scales(
    names: Sequence[str], adapted_names: Sequence[str], config: PeftConfig
) -> tuple[int, float, dict[str, int], Array | None]:
    """Return rank and alpha of a stack's node, the ranks of its layers by name, and the node's `layer_scale`."""
    ranks = {name: config.rank_of(name) for name in adapted_names}
    power = config.variants.power
    # The node has the scale of the largest magnitude. `layer_scale` holds the scales of the layers divided by it.
    scales = {name: config.alpha_of(name) / rank**power for name, rank in ranks.items()}
    rank, largest = max(ranks.values()), max(scales.values(), key=abs)
    layer_scales = [scales.get(name, 0.0) / largest for name in names]
    is_uniform = len({(ranks[name], scales[name]) for name in adapted_names}) == 1
    alpha = config.alpha_of(adapted_names[0]) if is_uniform else largest * rank**power
    scale = None if all(share == 1 for share in layer_scales) else jnp.asarray(layer_scales, jnp.float32)
    return rank, alpha, ranks, scale


def _used_ranks(lora_a: np.ndarray, lora_b: np.ndarray) -> list[int]:
    """Return the rank of each layer of A [L, r, in] and B [L, out, r], without trailing components that are zero.

    A layer of zeros has rank r. If all ranks would be equal, they are r, because layers of equal rank are not padded.
    """
    rank = lora_a.shape[1]
    is_used = np.any(lora_a != 0, axis=2) | np.any(lora_b != 0, axis=1)
    ranks = [int(np.flatnonzero(layer)[-1]) + 1 if layer.any() else rank for layer in is_used]
    return ranks if len(set(ranks)) > 1 else [rank] * len(ranks)
