"""The node that replaces a weight: the frozen weight and its two thin factors.

Shapes: L layers, E experts, r rank; ``out`` and ``in`` are the weight's. Every leaf has the same leading axes as the
weight, so `jax.lax.scan` slices a stacked node like the array it replaced.

The product is computed as x Wᵀ + (alpha / r) (x Aᵀ) Bᵀ. W + BA is never materialised, neither in the forward pass nor
in the backward pass.

Sources: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685); Kalajdzievski, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA" (arXiv:2312.03732); Liu et al., "DoRA: Weight-Decomposed
Low-Rank Adaptation" (arXiv:2402.09353). Deviations from PEFT: it multiplies in the adapter's dtype (float32) and rounds
the sum; here the factors are cast to the dtype of `x`, so a bfloat16 model multiplies in bfloat16 throughout. For DoRA,
PEFT materialises W + BA to compute the norms of its rows. Here their squares are ‖W‖² + 2 s (W Aᵀ) · B + s² B A Aᵀ Bᵀ,
in float32. Known inefficiency: the norms of W are constant, but every use computes them again, which reads W a second
time.

A model that does not call `lowtide.core.linear` writes ``weight @ x`` (Equinox), ``x @ weight`` or ``x @ weight.T``.
The node supports these products, too. For any other operation on the array, `lowtide.value_and_grad` and the trainer
raise an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ...core import OWN_NAMES, StructureError, linear, rows, transposed_product
from ._wrapper import WrappedWeight, apply_dropout, expand_like, matmul, squared_row_norms, transpose_matrix


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "lora_a", "lora_b", "lora_magnitude", "layer_scale", "dropout_key", "start_a", "start_b"],
    meta_fields=["alpha", "rslora", "dropout"],
)
@dataclasses.dataclass(frozen=True)
class LoRAWeight(WrappedWeight):
    """A weight with a low-rank adapter; a pytree node that multiplies like the weight it replaced.

    The paths of its leaves are ``<path>/weight``, ``<path>/lora_a`` and ``<path>/lora_b``. The leaves are not checked:
    `lowtide.partition` sets some of them to None, and JAX transformations replace leaves by other objects.

    Examples:
        >>> import jax.numpy as jnp
        >>> node = LoRAWeight(jnp.ones((4, 3)), jnp.ones((1, 3)), jnp.zeros((4, 1)), alpha=1.0)
        >>> node.linear(jnp.ones((2, 3))).shape
        (2, 4)
    """

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
    """The factor A that reads the input, [r, in] or [L, r, in], float32."""
    lora_b: Any
    """The factor B that writes the output, [out, r] or [L, out, r], float32."""
    alpha: float
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
    """Likewise B. The correction is then B A minus the product of the two first factors."""
    rslora: bool = False
    """Whether the scale is ``alpha / sqrt(rank)`` (static)."""
    dropout: float = 0.0
    """Fraction of the correction's inputs that is set to zero (static)."""

    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

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
            return scale * checkpoint_name(base + correction, f"{OWN_NAMES}lora_scaled")
        # As in PEFT, dropout also applies to the product with W that the magnitude scales.
        return base + (scale - 1) * linear(dropped_x, self.weight) + scale * correction

    def factors(self) -> tuple[Any, Any]:
        """Return A and B of all that is added to W; with `start_a` and `start_b` they have twice the rank."""
        if self.start_a is None:
            return self.lora_a, self.lora_b
        lora_a = jnp.concatenate([self.lora_a, self.start_a], axis=-2)
        return lora_a, jnp.concatenate([self.lora_b, -self.start_b], axis=-1)

    def _compute_correction(self, x: Array, lora_a: Any, lora_b: Any) -> Array:
        low_rank = checkpoint_name(linear(x, lora_a), f"{OWN_NAMES}lora_low")
        low_rank = low_rank * self._layer_scaling(low_rank)
        # On a CPU, the gradient of B is cheaper as the transpose of (x Aᵀ)ᵀ dy than as dyᵀ (x Aᵀ): see
        # `core.transposed_product`.
        if getattr(lora_b, "dtype", None) == low_rank.dtype and lora_b.ndim == 2:
            return transposed_product(low_rank, lora_b)
        return linear(low_rank, lora_b)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows of W + scaling B A, for an embedding, without forming it; in the dtype of W.

        Args:
            ids: indices of the rows; an index out of range gives NaN.

        Returns:
            Shape [..., in].

        Raises:
            StructureError: with a magnitude.

        Memory:
            The rows, and their rows of B, which the backward pass keeps. Dropout has no effect, as in PEFT.
        """
        if self.lora_magnitude is not None:
            raise StructureError(
                "an embedding lookup does not support DoRA",
                expected="LoRA without DoRA on an embedding",
                got=f"DoRA on {list(self.shape)}",
                hint="leave the embedding out of the targets",
            )
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
        # Experts that are stored as [in, out] read with B and write with A.
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
            raise StructureError(
                "a stack of weights with DoRA cannot be multiplied at once",
                got=f"A of shape {list(self.lora_a.shape)}",
                hint="multiply inside of jax.lax.scan or jax.vmap over the layers",
            )
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
        norms = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        scale = self.lora_magnitude.astype(jnp.float32) / norms
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
            return transpose_matrix(self)
        # (W + B A)ᵀ = Wᵀ + Aᵀ Bᵀ, so Bᵀ takes the place of A, and Aᵀ that of B.
        fields = {"weight": self.weight.mT, "lora_a": self.lora_b.mT, "lora_b": self.lora_a.mT}
        if self.start_a is not None:
            fields |= {"start_a": self.start_b.mT, "start_b": self.start_a.mT}
        return dataclasses.replace(self, **fields)

    @property
    def T(self) -> Any:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out], if it is not stacked.

        Raises:
            StructureError: for a stacked weight, whose product would need another node.
        """
        if self.ndim > 2:
            raise StructureError(
                "weight.T of a stacked weight with an adapter also transposes its layer axis",
                expected="weight.mT, which transposes each layer",
                got=f"shape {list(self.shape)}",
                hint="use weight.mT, or narrow the targets",
            )
        return self.mT

    @property
    def is_plain(self) -> bool:
        """Whether W, A and B may be multiplied from either side."""
        return self.lora_magnitude is None and self.dropout_key is None
