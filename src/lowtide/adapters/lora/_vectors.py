"""Adapters that train vectors: (IA)³, which scales, and VeRA, which scales between random projections.

Sources: Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning"
(arXiv:2205.05638); Kopiczko et al., "VeRA: Vector-based Random Matrix Adaptation" (arXiv:2310.11454).

Known inefficiency: VeRA's projections are the same for all modules, but a stacked node holds them once per layer. The
reason is that `jax.lax.scan` passes only slices of leaves to a layer. They are frozen, so they cost no gradient and no
optimizer state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import linear
from ._wrapper import ScaledWeight, apply_dropout, expand_like


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "lora_scale", "layer_scale"],
    meta_fields=["feedforward"],
)
@dataclasses.dataclass(frozen=True)
class IA3Weight(ScaledWeight):
    """A weight whose outputs, or inputs, are scaled by a trainable vector.

    Examples:
        >>> node = IA3Weight(jnp.ones((4, 3)), jnp.full((4,), 2.0))
        >>> node.linear(jnp.ones((1, 3))).tolist()
        [[6.0, 6.0, 6.0, 6.0]]
    """

    weight: Any
    """The base weight, [out, in] or stacked [L, out, in]: an array, or another `lowtide.core.LinearWeight`."""
    lora_scale: Any
    """The vector, float32: [out], or with `feedforward` [in]; in a stack with L in front."""
    layer_scale: Any = None
    """In a stack, 1 for layers with an adapter and 0 for those without, [L], which does not train. None: all have
    one."""
    feedforward: bool = False
    """Whether inputs are scaled instead of outputs (static)."""

    __array_ufunc__ = None

    @property
    def AXES(self) -> dict[str, tuple[str, ...]]:  # noqa: N802 - as in the other nodes, where it is a class attribute
        """The axes of each leaf that follow the layer axes."""
        return {"lora_scale": ("in",) if self.feedforward else ("out",), "layer_scale": ()}

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute l * (x Wᵀ), with `feedforward` (l * x) Wᵀ, in the dtype of `x`.

        Args:
            x: activations, shape [..., in].

        Returns:
            Shape [..., out].

        Memory:
            The backward pass keeps the array that was scaled: the product, or `x`.
        """
        if self.feedforward:
            return linear(x * expand_like(self._scale_vector(), x), self.weight)
        y = linear(x, self.weight)
        return y * expand_like(self._scale_vector(), y)

    def linear_with_bias(self, x: Float[Array, "*batch in"], bias: Float[Array, " out"]) -> Float[Array, "*batch out"]:
        """Compute l * (x Wᵀ + b), because the bias is a part of the outputs; with `feedforward` (l * x) Wᵀ + b."""
        if self.feedforward:
            y = self.linear(x)
            return y + expand_like(bias, y)
        y = linear(x, self.weight)
        return (y + expand_like(bias, y)) * expand_like(self._scale_vector(), y)

    def _scale_vector(self) -> Array:
        scale = self.lora_scale.astype(jnp.float32)
        if self.layer_scale is None:
            return scale
        is_adapted = jnp.expand_dims(self.layer_scale != 0, tuple(range(self.layer_scale.ndim, scale.ndim)))
        return jnp.where(is_adapted, scale, 1.0)

    def folded(self) -> Float[Array, "out in"]:
        """Return the matrix that `linear` multiplies by, in float32; only for merging, on one matrix."""
        vector = self._scale_vector()
        return self.weight.astype(jnp.float32) * (vector[None, :] if self.feedforward else vector[:, None])

    def folded_bias(self, bias: Float[Array, "*L out"]) -> Float[Array, "*L out"]:
        """Return the bias that belongs to `folded`; also of a stack."""
        return bias if self.feedforward else (bias.astype(jnp.float32) * self._scale_vector()).astype(bias.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "vera_a", "vera_b", "lora_lambda_d", "lora_lambda_b", "layer_scale", "dropout_key"],
    meta_fields=["dropout"],
)
@dataclasses.dataclass(frozen=True)
class VeRAWeight(ScaledWeight):
    """A weight with frozen random projections A and B, and two trainable vectors: W + diag(b) B diag(d) A.

    Examples:
        >>> a, b = jnp.ones((1, 3)), jnp.ones((4, 1))
        >>> node = VeRAWeight(jnp.zeros((4, 3)), a, b, jnp.full((1,), 0.1), jnp.zeros((4,)))
        >>> node.linear(jnp.ones((2, 3))).shape
        (2, 4)
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {
        "vera_a": ("rank", "in"),
        "vera_b": ("out", "rank"),
        "lora_lambda_d": ("rank",),
        "lora_lambda_b": ("out",),
        "layer_scale": (),
    }
    """The axes of each leaf that follow the layer axes."""

    weight: Any
    """The base weight, [out, in] or stacked [L, out, in]: an array, or another `lowtide.core.LinearWeight`."""
    vera_a: Any
    """The projection that reads the input, [r, in] or [L, r, in], frozen."""
    vera_b: Any
    """The projection that writes the output, [out, r] or [L, out, r], frozen."""
    lora_lambda_d: Any
    """The vector d that scales the inner dimension, [r] or [L, r], float32."""
    lora_lambda_b: Any
    """The vector b that scales the correction, [out] or [L, out], float32; zeros at first."""
    layer_scale: Any = None
    """In a stack, 1 for layers with an adapter and 0 for those without, [L], which does not train. None: all have
    one."""
    dropout_key: Any = None
    """With dropout, a random key from `lowtide.lora.dropout` (in a stack, one per layer); otherwise None."""
    dropout: float = 0.0
    """Fraction of the correction's inputs that is set to zero (static)."""

    __array_ufunc__ = None

    @property
    def rank(self) -> int:
        """The inner dimension."""
        return int(self.vera_a.shape[-2])

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ + b * (d * (x Aᵀ)) Bᵀ, in the dtype of `x`.

        Args:
            x: activations, shape [..., in].

        Returns:
            Shape [..., out].

        Memory:
            In addition to the result, activations of width r, and those of width out before b scales them, which the
            backward pass keeps; nothing of shape [out, in].
        """
        dropped_x = x if self.dropout_key is None else apply_dropout(x, self.dropout_key, self.dropout)
        low_rank = linear(dropped_x, self.vera_a)
        correction = linear(low_rank * expand_like(self.lora_lambda_d, low_rank), self.vera_b)
        scale = self.lora_lambda_b if self.layer_scale is None else self.lora_lambda_b * self.layer_scale
        return linear(x, self.weight) + correction * expand_like(scale, correction)

    def factors(self) -> tuple[Array, Array]:
        """Return diag(d) A and diag(b) B, whose product is the correction; also of a stack."""
        scale = self.lora_lambda_b
        if self.layer_scale is not None:
            scale = scale * jnp.expand_dims(self.layer_scale, tuple(range(self.layer_scale.ndim, scale.ndim)))
        return self.vera_a * self.lora_lambda_d[..., None], self.vera_b * scale[..., None]

    def folded(self) -> Float[Array, "out in"]:
        """Return the matrix that `linear` multiplies by, computed in float32; only for merging, on one matrix."""
        a, b = (factor.astype(jnp.float32) for factor in self.factors())
        return self.weight.astype(jnp.float32) + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)
