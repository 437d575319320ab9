"""The node that stands where a weight stood: the frozen weight and its two thin factors.

Shapes: L layers, r rank; ``out`` and ``in`` are the weight's. Every leaf has the same leading axis as the weight, so
a stacked node is sliced by `jax.lax.scan` like the array it replaced.

The product is computed as x Wᵀ + (alpha / r) (x Aᵀ) Bᵀ; W + BA never exists, neither forward nor backward.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685). Deviation from PEFT: it
multiplies in the adapter's dtype (float32) and rounds the sum; here the factors are cast to the dtype of `x`, so a
bfloat16 model multiplies in bfloat16 throughout.

A model that knows nothing of `lowtide.core.linear` writes ``weight @ x`` (Equinox), ``x @ weight`` or ``x @ weight.T``:
the node multiplies so, too. What else is done to an array it cannot, and `lowtide.value_and_grad` and the trainer say
so.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import StructureError, linear


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "lora_a", "lora_b"], meta_fields=["alpha"])
@dataclasses.dataclass(frozen=True)
class LoRAWeight:
    """A weight with a low-rank adapter; a pytree node that multiplies like the weight it replaced.

    Its leaves stand at ``<path>/weight``, ``<path>/lora_a`` and ``<path>/lora_b``. They are not checked: after
    `lowtide.partition` some are None, and JAX puts other things there, too.

    Examples:
        >>> import jax.numpy as jnp
        >>> node = LoRAWeight(jnp.ones((4, 3)), jnp.ones((1, 3)), jnp.zeros((4, 1)), alpha=1.0)
        >>> node.linear(jnp.ones((2, 3))).shape
        (2, 4)
    """

    weight: Any
    """The base weight, [out, in] or stacked [L, out, in]: an array, or another `lowtide.core.LinearWeight`."""
    lora_a: Any
    """The factor A that reads the input, [r, in] or [L, r, in], float32."""
    lora_b: Any
    """The factor B that writes the output, [out, r] or [L, out, r], float32."""
    alpha: float
    """Numerator of the scale of the correction (static)."""

    __array_ufunc__ = None  # so that a NumPy array leaves a product to this class

    @property
    def rank(self) -> int:
        """The inner dimension r of B A."""
        return int(self.lora_a.shape[-2])

    @property
    def scaling(self) -> float:
        """The factor of B A: ``alpha / rank``."""
        return self.alpha / self.rank

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x (W + scaling B A)ᵀ, in the dtype of `x`, without forming W + scaling B A.

        Args:
            x: activations, shape [..., in]; their dtype is the compute dtype, to which the adapter is cast.

        Returns:
            Shape [..., out].

        Memory:
            Beside the result, activations of width r. The backward pass keeps `x` and those; nothing of shape
            [out, in] unless W itself trains or has to be cast to the dtype of `x`.
        """
        low_rank = linear(x, self.lora_a) * self.scaling
        return linear(x, self.weight) + linear(low_rank, self.lora_b)

    def __matmul__(self, x: Float[Array, "*batch_in n"] | Float[Array, " in"]) -> Array:
        """Compute (W + scaling B A) x, in the dtype that W x has."""
        result = self.weight @ x
        low_rank = (self.lora_a.astype(result.dtype) @ x * self.scaling).astype(result.dtype)
        lora_b = self.lora_b.astype(result.dtype)
        # Of a stacked weight a vector gives [L, r], which is no matrix.
        return result + (lora_b @ low_rank if x.ndim > 1 else jnp.einsum("...or,...r->...o", lora_b, low_rank))

    def __rmatmul__(self, x: Float[Array, "*batch out"]) -> Float[Array, "*batch in"]:
        """Compute x (W + scaling B A), in the dtype that x W has."""
        result = x @ self.weight
        low_rank = (x @ self.lora_b.astype(result.dtype) * self.scaling).astype(result.dtype)
        lora_a = self.lora_a.astype(result.dtype)
        return result + (low_rank @ lora_a if x.ndim > 1 else jnp.einsum("...r,...ri->...i", low_rank, lora_a))

    @property
    def mT(self) -> LoRAWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out] or [L, in, out], whose factors are Bᵀ and Aᵀ."""
        return LoRAWeight(self.weight.mT, self.lora_b.mT, self.lora_a.mT, self.alpha)

    @property
    def T(self) -> LoRAWeight:  # noqa: N802 - NumPy's name
        """The transposed weight, [in, out], of one that is not stacked.

        Raises:
            StructureError: for a stacked weight, whose product would need another node.
        """
        if self.ndim > 2:
            raise StructureError(
                "weight.T of a stacked weight with an adapter turns its layers, too",
                expected="weight.mT, which transposes each layer",
                got=f"shape {list(self.shape)}",
                hint="write weight.mT, or narrow the targets",
            )
        return LoRAWeight(self.weight.T, self.lora_b.T, self.lora_a.T, self.alpha)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """That of the weight."""
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        """That of the weight."""
        return self.weight.dtype
