"""Interface between models and what replaces a weight: ``linear(x, weight)``, and ``rows(weight, ids)`` for lookups.

Models multiply through these functions. An adapter or a quantised weight is a pytree node in the place of the array,
with its own product (`LinearWeight`). So models do not depend on adapters, and a factored weight is never materialised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._errors import StructureError
from ._paths import Tree, leaves_with_paths
from ._traced import traced_device

# The TPU compiler casts small weights, such as adapters, of all layers before a loop over layers, and keeps the copies.
# If they are rounded to bfloat16 first, which does not change the cast, it casts them one layer at a time. The most
# elements of one layer's weight for which this is done:
_MAX_ROUNDED_SIZE = 2**21


@runtime_checkable
class LinearWeight(Protocol):
    """A node in the place of a weight matrix of shape [out, in].

    A node that also changes what is added to the product has ``linear_with_bias(x, bias)``, too.
    """

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ, in the dtype of `x`."""
        ...


def linear(
    x: Float[Array, "*batch in"], weight: Array | LinearWeight, bias: Float[Array, " out"] | None = None
) -> Float[Array, "*batch out"]:
    """Multiply activations by a weight stored as [out, in]: y = x Wᵀ, with a bias y = x Wᵀ + b.

    Args:
        x: activations, shape [..., in]; their dtype is the compute dtype.
        weight: an array of shape [out, in], cast to the dtype of `x`, or a `LinearWeight`.
        bias: added to the product, cast to the dtype of `x`. A model that has a bias passes it here, because some
            adapters scale it, too.

    Returns:
        Shape [..., out], in the dtype of `x`.

    Memory:
        A weight of another dtype is cast again in the backward pass. So under a scan over layers no cast copy is kept.

    Examples:
        >>> import jax.numpy as jnp
        >>> linear(jnp.ones((2, 3)), jnp.ones((4, 3))).shape
        (2, 4)
    """
    if bias is not None:
        linear_with_bias: Any = getattr(weight, "linear_with_bias", None)
        if linear_with_bias is not None:
            return linear_with_bias(x, bias)
        y = linear(x, weight)
        return y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - 1)))
    if isinstance(weight, LinearWeight):
        return weight.linear(x)
    if weight.dtype == x.dtype:
        return _product(x, weight)
    # Without `checkpoint` the cast weight would be a residual: under a scan, a second copy of all stacked weights.
    return jax.checkpoint(_cast_product, prevent_cse=False)(x, weight)


def rows(weight: Array | LinearWeight, ids: Int[Array, "*ids"], *, path: str = "weight") -> Float[Array, "*ids in"]:
    """Look up rows of a weight stored as [rows, width], such as an embedding.

    Args:
        weight: an array, or a `LinearWeight` that has a method ``rows(ids)``.
        ids: row indices; an index out of range gives NaN.
        path: path of the module that holds the weight, for messages.

    Returns:
        Shape [..., width], in the dtype of the weight.

    Raises:
        StructureError: for a `LinearWeight` that has no such method.

    Memory:
        The rows.

    Examples:
        >>> import jax.numpy as jnp
        >>> rows(jnp.eye(3), jnp.array([2, 0])).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    if not isinstance(weight, LinearWeight):
        return jnp.take(weight, ids, axis=0)
    look_up: Any = getattr(weight, "rows", None)
    if look_up is None:
        raise StructureError(
            f"{path}: an embedding looks rows up, and cannot be adapted or factored like a matrix",
            expected="an array [rows, width], or a weight with a method rows(ids)",
            got=type(weight).__name__,
            hint='leave it out of the targets, for instance with the pattern "!outer/embed"',
        )
    return look_up(ids)


def _product(x: Array, weight: Array) -> Array:
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


def _cast_product(x: Array, weight: Array) -> Array:
    is_rounded = (x.dtype, weight.dtype) == (jnp.bfloat16, jnp.float32)
    if is_rounded and weight.size <= _MAX_ROUNDED_SIZE and traced_device().platform == "tpu":
        weight = jax.lax.reduce_precision(weight, 8, 7)
    return _product(x, weight)


@contextlib.contextmanager
def products_explained(model: Tree) -> Generator[None]:
    """Explain, in a ``with`` block, the error of a function that uses a `LinearWeight` for more than products.

    Args:
        model: the model that the function is called with.

    Raises:
        StructureError: in place of the `TypeError` or `AttributeError` of such a use.
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        nodes = leaves_with_paths(model, is_leaf=lambda node: isinstance(node, LinearWeight))
        kinds = {type(node).__name__: path for path, node in reversed(nodes) if isinstance(node, LinearWeight)}
        for kind, path in kinds.items():
            if kind in str(error):
                raise StructureError(
                    f"the model uses a weight as an array where a {kind} stands now, at {path} for instance",
                    expected="products alone: lowtide.core.linear(x, weight), weight @ x, x @ weight, x @ weight.T",
                    got=str(error).splitlines()[0],
                    hint="write the product so, or narrow the targets to weights that the model only multiplies by: no "
                    "embeddings, and no layers that make an array of their weight, as those of Flax do",
                ) from error
        raise
