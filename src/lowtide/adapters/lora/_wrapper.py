"""Functions and base classes that the nodes of several adapters share.

Shapes: L layers; ``out`` and ``in`` are the weight's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import LinearWeight, StructureError


def expand_like(vector: Float[Array, " n"], like: Array) -> Array:
    """Cast a vector to the dtype of activations [..., n], and give it as many axes."""
    return jnp.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - vector.ndim)))


def apply_dropout(x: Float[Array, "*batch in"], key: Array, rate: float) -> Float[Array, "*batch in"]:
    """Set a fraction of the activations to zero, and scale the others so that the mean stays the same."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def squared_row_norms(weight: Any) -> Float[Array, "*L out"]:
    """Return the squared norm of each row of a weight, in float32, without a float32 copy of it."""
    if isinstance(weight, LinearWeight):  # quantised: dequantise a stack one matrix at a time
        dense: Any = weight
        if len(dense.shape) > 2:
            return jax.lax.map(squared_row_norms, weight)
        weight = dense.dense()
    return jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)


def matmul(node: Any, x: Array) -> Array:
    """Compute ``node @ x`` for a matrix by the node's own ``linear``, in the dtype that W x would have."""
    if len(node.shape) != 2 or x.ndim > 2:
        raise StructureError(
            f"an adapter that scales rows does not support weight @ x of shapes {list(node.shape)} and {list(x.shape)}",
            expected="one matrix [out, in], and a vector or a matrix",
            hint="multiply with lowtide.core.linear(x, weight), or under jax.vmap",
        )
    x = jnp.asarray(x, jnp.result_type(x, node.dtype))
    return node.linear(x) if x.ndim == 1 else node.linear(x.T).T


class WrappedWeight:
    """A node with the shape and dtype of the weight that it holds."""

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.weight.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


class ScaledWeight(WrappedWeight):
    """A node whose only product is its ``linear``, which ``@`` and ``x @ weight.mT`` call."""

    def __matmul__(self, x: Array) -> Array:
        """Compute the product with a vector or a matrix [in, n]."""
        return matmul(self, x)

    @property
    def mT(self) -> Transposed:  # noqa: N802 - NumPy's name
        """The transposed weight, for ``x @ weight.mT``."""
        return transpose_matrix(self)

    T = mT


class Transposed:
    """The transpose of a node, which supports only ``x @ weight.T``."""

    __array_ufunc__ = None

    def __init__(self, node: Any) -> None:
        self._node = node

    def __rmatmul__(self, x: Array) -> Array:
        return self._node.linear(jnp.asarray(x, jnp.result_type(x, self._node.dtype)))


def transpose_matrix(node: Any) -> Transposed:
    """Return the transpose of a node that is one matrix, not a stack."""
    if len(node.shape) != 2:
        raise StructureError(
            "a stacked weight with an adapter that scales rows cannot be transposed",
            expected="one matrix [out, in]",
            got=f"shape {list(node.shape)}",
            hint="multiply with lowtide.core.linear(x, weight), or under jax.vmap",
        )
    return Transposed(node)
