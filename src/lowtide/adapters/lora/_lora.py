"""LoRA, with its variants rsLoRA and DoRA: configuration, node, learning rates, initial values, and PEFT's files.

Shapes: L layers, E experts, r rank; ``out`` and ``in`` are the weight's. Every leaf has the same leading axes as the
weight, so `jax.lax.scan` slices a stacked node like the array it replaced. The product is computed as
x Wᵀ + (alpha / r) (x Aᵀ) Bᵀ. W + BA is never materialised, neither in the forward pass nor in the backward pass.
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
from ._node import AdapterWeight, Transposed, apply_dropout, expand_like, matmul, squared_row_norms
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

_INITS = ("peft", "gaussian", "orthogonal", *WEIGHT_INITS)
_DIGITS = 7
"""Significant digits of an alpha that is computed from a float32 scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A LoRA configuration; `rslora` and `dora` select variants.

    Raises:
        ConfigError: for a rank below 1, an alpha that is not positive and finite, an unknown `init` or `bias`, or
            invalid patterns or layers. Also for an odd rank with "orthogonal", `dora` with "pissa" or "olora", and
            `layers` with "lora_only".

    Examples:
        >>> Config(rank=8, targets="**/{q,k,v,o}_proj").scaling
        4.0
    """

    rank: int = 16
    """Inner dimension of the correction B A; its parameters are ``rank * (out + in)`` for each matrix."""
    alpha: float = 32.0
    """The correction is scaled by ``alpha / rank``, so that a change of rank needs no new learning rate."""
    targets: Pattern | Sequence[Pattern] = "**/{q,v}_proj"
    """Globs, or compiled regular expressions, on the paths of modules (any node with a leaf named ``weight``) or on the
    paths of the weights themselves; globs that start with ``!`` exclude. `add` says how a model may use these weights.
    ``"all-linear"`` stands for every matrix of a decoder's layers, without embeddings, head, routers and experts."""
    exclude: Pattern | Sequence[Pattern] = ()
    """Patterns of targets that get no adapter, like globs of `targets` with ``!``."""
    rank_pattern: Mapping[str, int] | Sequence[tuple[str, int]] = ()
    """Other ranks, by glob on the path of the module or the weight; the first match decides."""
    alpha_pattern: Mapping[str, float] | Sequence[tuple[str, float]] = ()
    """Other alphas, likewise."""
    layers: Sequence[int] | None = None
    """Indices of the layers that have an adapter, counted from 0; None for all. A stack stays one stack: its other
    layers have factors of zeros, which do not train and are not saved. They cost as many bytes of gradients and
    optimizer state as any other layer."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)``, which keeps the size of updates as the rank grows."""
    dora: bool = False
    """Whether the norm of each output's weights trains separately from their direction."""
    modules_to_save: Pattern | Sequence[Pattern] = ()
    """Patterns on the paths of modules (any node that holds a leaf) that train as a whole in addition to the adapters,
    such as ``"outer/lm_head"``. As in PEFT, targets among them get no adapter."""
    bias: str = "none"
    """Which biases train as a whole: "none", "lora_only" (those of modules with a target) or "all"."""
    init: str = "peft"
    """First values. "peft" draws A uniformly in ±1/sqrt(in), "gaussian" with standard deviation 1/rank; B is zero in
    both. "orthogonal" (even ranks only) draws A and B whose product is zero. "pissa" takes the largest singular values
    of the weight and their vectors, "olora" the first columns of its QR decomposition. These two subtract their first
    product from the correction: nothing changes at first, the weight itself stays, and files have twice the rank."""

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
        if self.dora and self.init in WEIGHT_INITS:
            raise ConfigError(f"init: {self.init!r} contradicts dora, which needs the norms of the weight plus B A")
        ranks = (self.rank, *dict(self.rank_pattern).values())
        if self.init == "orthogonal" and (odd := [rank for rank in ranks if rank % 2]):
            raise ConfigError(f'init = "orthogonal" uses half of the rank for A, so ranks must be even, not {odd[0]}')
        check_choice("init", self.init, _INITS)
        for field in ("rslora", "dora"):
            check_type(field, getattr(self, field), bool, "True or False")
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "alpha", float(self.alpha))

    @property
    def scaling(self) -> float:
        """The factor of B A: ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def _check_alpha(alpha: Any, name: str) -> None:
    hint = "use for instance twice the rank; with 0 the adapter would have no effect and no gradient"
    check_number(name, alpha, above=0, hint=hint)


# Sources: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685); Kalajdzievski, "A Rank
# Stabilization Scaling Factor for Fine-Tuning with LoRA" (arXiv:2312.03732); Liu et al., "DoRA: Weight-Decomposed
# Low-Rank Adaptation" (arXiv:2402.09353). Deviations from PEFT: it multiplies in the adapter's dtype (float32) and
# rounds the sum; here the factors are cast to the dtype of `x`, so a bfloat16 model multiplies in bfloat16 throughout.
# For DoRA, PEFT materialises W + BA to compute the norms of its rows. Here their squares are
# ‖W‖² + 2 s (W Aᵀ) · B + s² B A Aᵀ Bᵀ, in float32. Known inefficiency: the norms of W are constant, but every use
# computes them again, which reads W a second time.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAWeight(AdapterWeight):
    """A weight with a low-rank adapter; a pytree node that multiplies like the weight it replaced.

    The paths of its leaves are ``<path>/weight``, ``<path>/lora_a`` and ``<path>/lora_b``. The leaves are not checked:
    `lowtide.partition` sets some of them to None, and JAX transformations replace leaves by other objects.

    Examples:
        >>> import jax.numpy as jnp
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
    """The axes of each leaf that follow the layer axes."""

    weight: Any
    """The base weight: [out, in], stacked [L, out, in], or for experts [L, E, out, in]. It is an array, or another
    `lowtide.core.LinearWeight`."""
    lora_a: Any
    """The factor A that reads the input, [r, in] after the stack axes of the weight, float32."""
    lora_b: Any
    """The factor B that writes the output, [out, r] after the stack axes of the weight, float32."""
    alpha: float = dataclasses.field(metadata={"static": True})
    """Numerator of the scale of the correction (static)."""
    lora_magnitude: Any = None
    """DoRA's norm of each row of W + BA, [out] or [L, out], float32; None for plain LoRA."""
    layer_scale: Any = None
    """In a stack, an additional factor of each layer's correction, [L], float32, which does not train: 0 for layers
    without an adapter. None: 1 for all."""
    dropout_key: Any = None
    """With dropout, a random key from `lowtide.lora.dropout` (in a stack, one per layer); otherwise None."""
    start_a: Any = None
    """The first A of an adapter that began as a part of the weight, which does not train; None for others."""
    start_b: Any = None
    """The first B of such an adapter. The correction is then B A minus the product of the two first factors."""
    rslora: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the scale is ``alpha / sqrt(rank)`` (static)."""
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})
    """Fraction of the correction's inputs that is set to zero (static)."""

    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

    @property
    def kind(self) -> str:
        """Name of the variant: LoRA, rsLoRA or DoRA."""
        stabilised = "rsLoRA" if self.rslora else "LoRA"
        return stabilised if self.lora_magnitude is None else f"{stabilised} with DoRA" if self.rslora else "DoRA"

    @property
    def rank(self) -> int:
        """The inner dimension r of B A."""
        return int(self.lora_a.shape[-2])

    @property
    def scaling(self) -> float:
        """The factor of B A: ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x (W + scaling B A)ᵀ, in the dtype of `x`, without forming W + scaling B A.

        With a magnitude m, each output is multiplied by m / ‖row of W + scaling B A‖. The norm is a constant to
        gradients, as DoRA's authors advise.

        Args:
            x: activations, shape [..., in]; their dtype is the compute dtype, to which the adapter is cast.

        Returns:
            Shape [..., out].

        Memory:
            In addition to the result, activations of width r. The backward pass keeps `x` and those. It keeps nothing
            of shape [out, in], unless W itself trains or has to be cast to the dtype of `x`. With a magnitude it also
            keeps the result before the scaling. With dropout it keeps `x` a second time.
        """
        dropped_x = x if self.dropout_key is None else apply_dropout(x, self.dropout_key, self.dropout)
        if self.dropout_key is None:
            correction = self._compute_correction(x, *self.factors())
        else:
            correction = self._compute_correction(dropped_x, self.lora_a, self.lora_b)
            if self.start_a is not None:  # PEFT subtracts this from W: without dropout
                correction = correction - self._compute_correction(x, self.start_a, self.start_b)
        base = linear(x, self.weight)
        if self.lora_magnitude is None:
            return base + correction
        scale = expand_like(self._magnitude_scale(x.dtype), base)
        if self.dropout_key is None:
            return scale * checkpoint_name(base + correction, f"{INTERNAL_PREFIX}lora_scaled")
        # As in PEFT, dropout also applies to the product with W that the magnitude scales.
        return base + (scale - 1) * linear(dropped_x, self.weight) + scale * correction

    def factors(self) -> tuple[Any, Any]:
        """Return A and B of all that is added to W; with `start_a` and `start_b` they have twice the rank."""
        if self.start_a is None:
            return self.lora_a, self.lora_b
        lora_a = jnp.concatenate([self.lora_a, self.start_a], axis=-2)
        return lora_a, jnp.concatenate([self.lora_b, -self.start_b], axis=-1)

    def scaled_factors(self) -> tuple[Any, Any] | None:
        """Return A and B, with all scales of their product included; None with a magnitude."""
        if self.lora_magnitude is not None:
            return None
        scale = self.scaling if self.layer_scale is None else self.scaling * self.layer_scale[:, None, None]
        lora_a, lora_b = self.factors()
        return jnp.asarray(lora_a), scale * jnp.asarray(lora_b)

    def inverted(self) -> LoRAWeight:
        """Return the adapter whose merge undoes that of this one, without a magnitude."""
        # The correction is linear in B, and with first factors it is B A minus their product, so both B are negated.
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
        """Look up rows of W + scaling B A, for an embedding, without forming it; in the dtype of W, without dropout.

        Args:
            ids: indices of the rows; an index out of range gives NaN.

        Returns:
            Shape [..., in].

        Raises:
            StructureError: with a magnitude.

        Memory:
            The rows of W, and the same rows of B, which the backward pass keeps.
        """
        if self.lora_magnitude is not None:
            message = f"the lookup of an embedding {list(self.shape)} does not support DoRA"
            raise StructureError(message, hint="leave the embedding out of the targets")
        base_rows = rows(self.weight, ids)
        lora_a, lora_b = self.factors()
        # Cast after the lookup, so that gradients of a row that is looked up several times add up in float32.
        low_rank = rows(lora_b, ids).astype(base_rows.dtype)
        return base_rows + jnp.matmul(low_rank * self._layer_scaling(low_rank), lora_a.astype(base_rows.dtype))

    def grouped(
        self, x_MI: Float[Array, "M I"], product: Callable[..., Array], *, transposed: bool
    ) -> Float[Array, "M O"]:
        """Multiply rows, sorted by expert, by their expert's W + scaling B A, without forming it for any expert.

        Args:
            x_MI: rows of activations.
            product: ``product(rows, weights, transposed=)`` multiplies each row by its expert's weights.
            transposed: whether experts are stored as [in, out].

        Returns:
            [M, O], in the dtype of the rows.

        Memory:
            In addition to the result, rows of width r, which the backward pass keeps with `x_MI`.
        """
        # For experts that are stored as [in, out], B multiplies the inputs and A gives the outputs.
        lora_a, lora_b = self.factors()
        first, second = (lora_b, lora_a) if transposed else (lora_a, lora_b)
        low_rank = product(x_MI, first, transposed=transposed) * self.scaling
        return product(x_MI, self.weight, transposed=transposed) + product(low_rank, second, transposed=transposed)

    def _layer_scaling(self, like: Array) -> Any:
        """Return the scale of the correction, shaped for an array whose axes begin with those of `layer_scale`."""
        if self.layer_scale is None:
            return self.scaling
        scale = (self.scaling * self.layer_scale).astype(like.dtype)
        return jnp.expand_dims(scale, tuple(range(scale.ndim, like.ndim)))

    def _magnitude_scale(self, dtype: Any) -> Float[Array, " out"]:
        """Return m / ‖W + scaling B A‖ for each row, from the norms of W, W Aᵀ and A Aᵀ, which are all thin."""
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
        """Return the matrix that `linear` multiplies by, computed in float32; only for merging, on one matrix."""
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
        """The transposed weight, [in, out], if it is not stacked.

        Raises:
            StructureError: for a stacked weight, whose layer axis would be transposed, too.
        """
        if self.ndim > 2:
            message = f"weight.T of a stacked weight {list(self.shape)} with an adapter also transposes its layer axis"
            raise StructureError(message, hint="use weight.mT, which transposes each layer, or narrow the targets")
        return self.mT

    @property
    def is_plain(self) -> bool:
        """Whether W, A and B may be multiplied from either side."""
        return self.lora_magnitude is None and self.dropout_key is None


# LoRA+: another learning rate for B. Source: Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models"
# (arXiv:2402.12354). Deviation from PEFT's `create_loraplus_optimizer`: there vectors also have B's rate; here only B
# has it.


def plus(ratio: float) -> optax.GradientTransformation:
    """Multiply the learning rate of the factors B of adapters; chain it after an optimizer.

    It multiplies the updates of B. The result is the update at that multiple of the rate, including decoupled weight
    decay.

    Args:
        ratio: B's learning rate divided by that of all other leaves; the authors of LoRA+ advise about 16.

    Returns:
        A transformation without state.

    Raises:
        ConfigError: for a ratio that is not positive and finite.
        SelectionError: from ``init``, when no trainable leaf is a factor B.

    Memory:
        None.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
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
    """Return the value of the first glob that matches each site, and raise for a glob that matches none."""
    names = [name for site in chosen for name in site.names]
    matches = [({*match_names(names, pattern)}, value) for pattern, value in pairs]
    return {site.index: next((value for hits, value in matches if hits & {*site.names}), default) for site in chosen}


def _init_matrix(
    site: Site, config: Config, rank: int, alpha: float, key: Any, draw_a: Callable[..., Array]
) -> LoRAWeight:
    out, inner = site.weight.shape[-2:]
    scale, fields = layer_scale(site, config.layers), dict[str, Any]()
    if config.init in (*WEIGHT_INITS, "orthogonal"):
        lora_a, lora_b = _init_factors(site, config, rank, alpha, key, scale)
    else:
        lora_a = make_leaf(site, (rank, inner), draw_a)
        lora_b = make_leaf(site, (out, rank), lambda shape: jnp.zeros(shape, jnp.float32))
    if config.init in WEIGHT_INITS:
        fields = {"start_a": lora_a, "start_b": lora_b}
        if not isinstance(lora_a, jax.ShapeDtypeStruct):  # one array at two paths cannot train at only one of them
            lora_a, lora_b = jnp.array(lora_a, copy=True), jnp.array(lora_b, copy=True)
    if config.dora:
        fields["lora_magnitude"] = make_leaf(site, (out,), lambda shape: jnp.sqrt(_squared_row_norms(site.weight)))
    return LoRAWeight(site.weight, lora_a, lora_b, alpha, layer_scale=scale, rslora=config.rslora, **fields)


def _init_factors(site: Site, config: Config, rank: int, alpha: float, key: Any, scale: Any) -> tuple[Any, Any]:
    """Make A and B for an `init` in which neither begins as zero; in layers without an adapter both are zero."""
    *layers, out, inner = site.weight.shape
    if isinstance(jax.tree.leaves(site.weight)[0], jax.ShapeDtypeStruct):
        shape_a, shape_b = (*layers, rank, inner), (*layers, out, rank)
        return jax.ShapeDtypeStruct(shape_a, jnp.float32), jax.ShapeDtypeStruct(shape_b, jnp.float32)
    if config.init == "orthogonal":
        factors = _orthogonal_factors(site.random_key(key), tuple(layers), out, inner, rank)
    else:
        factors = _principal_factors(site.weight, rank, alpha / (rank**0.5 if config.rslora else rank), config.init)
    return factors if scale is None else (factors[0] * scale[:, None, None], factors[1] * scale[:, None, None])


def _orthogonal_factors(key: Array, layers: tuple[int, ...], out: int, inner: int, rank: int) -> tuple[Array, Array]:
    """Draw factors through two halves of an orthogonal matrix, so that B A is zero; the scales are PEFT's."""
    keys = jax.random.split(key, 3)
    q, _ = jnp.linalg.qr(jax.random.normal(keys[0], (*layers, rank, rank), jnp.float32))
    half = rank // 2
    # A and B use the even and the odd rows of q. These are orthogonal, so B A = Y q_odd q_evenᵀ Xᵀ = 0 for any X and Y.
    a = jax.random.normal(keys[1], (*layers, inner, half), jnp.float32) @ q[..., 0::2, :] / 10
    b = jax.random.normal(keys[2], (*layers, out, half), jnp.float32) @ q[..., 1::2, :] / 10
    return a.mT, b


# First values from the weight itself: PiSSA and OLoRA. The adapter begins as a part of the weight, which has to be
# subtracted from the weight for that. PEFT changes the base weight to do so. Here the base weight stays unchanged,
# because other adapters and files use it. The node keeps the first factors, frozen, and subtracts their product from
# its correction. A saved adapter is therefore B A - B0 A0: a plain one of twice the rank, for the original base.
#
# Sources: Meng et al., "PiSSA" (arXiv:2404.02948); Büyükakyüz, "OLoRA" (arXiv:2406.01775). Known inefficiency: all
# singular values are computed, and only a few are used.


def _principal_factors(weight: Any, rank: int, scaling: float, init: str) -> tuple[Array, Array]:
    """Return the factors A [*L, r, in] and B [*L, out, r] of the part ``scaling * B A`` of a weight [*L, out, in]."""
    if len(weight.shape) == 2:
        return (pissa if init == "pissa" else _olora)(dense_matrix(weight), rank, scaling)
    layers = (jax.tree.map(operator.itemgetter(index), weight) for index in range(weight.shape[0]))
    factors = [_principal_factors(layer, rank, scaling, init) for layer in layers]
    return jnp.stack([a for a, _ in factors]), jnp.stack([b for _, b in factors])


def dense_matrix(matrix: Any) -> Float[Array, "out in"]:
    """Return a matrix in float32, on the device; a quantised one is dequantised."""
    array: Any = getattr(matrix, "dense")(jnp.float32) if isinstance(matrix, LinearWeight) else matrix  # noqa: B009
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    if is_concrete and space_of(array) == jax.memory.Space.Host:
        array = jax.device_put(array, jax.memory.Space.Device)
    return jnp.asarray(array, jnp.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def pissa(matrix: Float[Array, "out in"], rank: int, scaling: float) -> tuple[Array, Array]:
    """Return the factors of the best approximation of a given rank, divided by `scaling`."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    # Half of the singular values goes into each factor, as their square root: B A = U (S / scaling) Vᵀ.
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
            else:
                alpha *= rank**0.5 if config.rslora else 1
                nodes[site.index] = init_kernel(site.weight, use, rank, alpha, draw_a)
        return nodes

    def check_file(self, path: Path, file: Any) -> None:
        # Refuse, as `Config` does, an alpha of zero or less: the adapter would train nothing, or be subtracted.
        alphas = {f"alpha_pattern[{shown(name)}]": alpha for name, alpha in (file.alpha_pattern or {}).items()}
        hint = "train it again with an alpha such as twice the rank; list modules without an adapter in exclude_modules"
        for name, alpha in {"lora_alpha": file.lora_alpha, **alphas}.items():
            check_number(f"{path}: {name}", alpha, above=0, hint=hint, error=ModelFileError)

    def patterns(self, file: Any) -> list[str]:
        return [suffix_pattern(end) for end in (*(file.rank_pattern or ()), *(file.alpha_pattern or ()))]

    def tensor_suffixes(self, *, dora: bool = False, table: bool = False) -> dict[str, str]:
        ends = {"lora_a": "lora_embedding_B", "lora_b": "lora_embedding_A"} if table else {**LORA_TENSORS}
        return {**ends, "lora_magnitude": "lora_magnitude_vector"} if dora else ends

    def entry(self, node: Any, scale: float) -> dict[str, Any]:
        dora, rank, alpha = node.lora_magnitude is not None, node.rank, node.alpha
        if node.start_a is not None:  # twice the rank, at the same scale
            rank, alpha = 2 * rank, alpha * (2**0.5 if node.rslora else 2)
        return {"rank": rank, "alpha": alpha * scale, "rslora": node.rslora, "dora": dora}

    def describe(self, adapted: Mapping[str, Mapping[str, Any]], modules: Sequence[str]) -> dict[str, Any]:
        rslora = ({node["rslora"] for node in adapted.values()} - {None}) == {True}
        # `use_rslora` holds for the whole file. Where nodes of both kinds occur, alphas are converted to give the same
        # scale.
        alphas = {name: _convert_alpha(node, rslora) for name, node in adapted.items()}
        alphas = {name: int(alpha) if float(alpha).is_integer() else alpha for name, alpha in alphas.items()}
        rank, rank_pattern = _default_and_pattern({name: node["rank"] for name, node in adapted.items()})
        alpha, alpha_pattern = _default_and_pattern(alphas)
        return {
            "alpha_pattern": alpha_pattern,
            "init_lora_weights": True,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "r": rank,
            "rank_pattern": rank_pattern,
            "target_parameters": None,
            "use_dora": next(iter(adapted.values()))["dora"],
            "use_rslora": rslora,
        }

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
            return {"lora_a": (rank, inner), "lora_b": (out, rank), "lora_magnitude": (out,)}[leaf]

        leaves: dict[str, Any] = {}
        for leaf in config.tensors(adapted_names[0]):
            tensors: dict[str, np.ndarray] = {}
            for name, own_rank in ranks.items():
                key, shape = config.tensors(name)[leaf], shape_of(leaf, own_rank)
                tensors[name] = file.read(key, shape[::-1]).T if is_embedding else file.read(key, shape)
            # Padding starts after all tensors are read, so a rank that no tensor has is refused before it takes memory.
            full_shape = shape_of(leaf, rank)
            for name, values in tensors.items():
                padding = [(0, size - own_size) for size, own_size in zip(full_shape, values.shape, strict=True)]
                tensors[name] = np.pad(values, padding) if values.shape != full_shape else values
            leaves[leaf] = stack_layers(site, names, tensors, full_shape)
        node = LoRAWeight(site.weight, **leaves, alpha=alpha, layer_scale=scale, rslora=bool(config.file.use_rslora))
        return _subtract_start(file.path, site, node, init) if init in WEIGHT_INITS else node


LORA_KIND = _LoRA()


def _convert_alpha(node: Mapping[str, Any], rslora: bool) -> float:
    """Return the alpha that gives a node's scale in a file whose `use_rslora` is `rslora`."""
    root = math.sqrt(node["rank"])
    if rslora and not node["rslora"]:
        return round(node["alpha"] / root, 12)
    return node["alpha"] * (root if node["rslora"] and not rslora else 1)


def _default_and_pattern(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and a pattern for the modules that differ, longest names first."""
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
    """Subtract the part that PEFT subtracted from the weight, computed again from the weight."""
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
    power = 0.5 if config.file.use_rslora else 1.0
    # The node has the largest scale of its layers, and each layer stores its share of it, 1 or less in size.
    scales = {name: config.alpha_of(name) / rank**power for name, rank in ranks.items()}
    rank, largest = max(ranks.values()), max(scales.values(), key=abs)
    layer_scales = [scales.get(name, 0.0) / largest for name in names]
    is_uniform = len({(ranks[name], scales[name]) for name in adapted_names}) == 1
    alpha = config.alpha_of(adapted_names[0]) if is_uniform else largest * rank**power
    scale = None if all(share == 1 for share in layer_scales) else jnp.asarray(layer_scales, jnp.float32)
    return rank, alpha, ranks, scale


def _used_ranks(lora_a: np.ndarray, lora_b: np.ndarray) -> list[int]:
    """Return how many components of each layer, A [L, r, in] and B [L, out, r], are more than padding.

    A layer of zeros has the full rank. If all layers have the same number, nothing counts as padding.
    """
    rank = lora_a.shape[1]
    is_used = np.any(lora_a != 0, axis=2) | np.any(lora_b != 0, axis=1)
    ranks = [int(np.flatnonzero(layer)[-1]) + 1 if layer.any() else rank for layer in is_used]
    return ranks if len(set(ranks)) > 1 else [rank] * len(ranks)


def layer_entry(entry: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the entries for a layer with fewer components than its node: its own rank, and the same scale."""
    alpha = entry["alpha"] * (math.sqrt(rank / entry["rank"]) if entry["rslora"] else rank / entry["rank"])
    return {**entry, "rank": rank, "alpha": float(f"{alpha:.{_DIGITS}g}")}


def remove_padding(values: np.ndarray, leaf: str, rank: int) -> np.ndarray:
    return values[:rank] if leaf == "lora_a" else values[:, :rank] if leaf == "lora_b" else values
