"""Nodes of adapters: what every kind of node has, and what their products share.

A node is a frozen dataclass and a pytree that stands in place of a weight. Fields whose names begin with ``lora_``
train. ``AXES`` of a node lists its leaves with the axes that follow the layer axes; a node without it places its leaves
when it is made. Shapes: L layers; ``out`` and ``in`` are the weight's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import LinearWeight, StructureError, put
from .._adapted import WrappedWeight

TRAINABLE = "**/lora_*"
"""A glob that selects the trainable leaves of every kind of adapter, and nothing else."""
_PRODUCT_HINT = "multiply with lowtide.core.linear(x, weight), or under jax.vmap"


class AdapterWeight(WrappedWeight):
    """A weight with an adapter: the base class of the nodes of all kinds."""

    NAME: ClassVar[str]
    """Name of the kind, as its authors write it."""
    PEFT_TYPE: ClassVar[str | None] = None
    """PEFT's name of the kind; None for an array that trains as a whole."""
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]]
    """Leaves of a complete node, the weight first. One half of a partition lacks some of them."""

    @property
    def kind(self) -> str:
        """Name of the kind with its variant, such as "DoRA"."""
        return self.NAME

    @property
    def rank(self) -> int | None:
        """The inner dimension; None for kinds that have none."""
        return None

    @property
    def summary(self) -> str:
        """The kind with its rank, for messages."""
        return self.kind if self.rank is None else f"{self.kind} of rank {self.rank}"

    def scaled_factors(self) -> tuple[Any, Any] | None:
        """Return A and B, with all scales of their product included; None for kinds that do not compute W + B A."""
        return None

    def inverted(self) -> Any:
        """Return the adapter whose merge undoes that of this one."""
        raise NotImplementedError

    def folded_bias(self, bias: Any) -> Any:
        """Return the bias of the module of a merged weight."""
        return bias


class ScaledWeight(WrappedWeight):
    """A node whose only product is its ``linear``, which ``@`` and ``x @ weight.mT`` call."""

    def __matmul__(self, x: Array) -> Array:
        """Compute the product with a vector or a matrix [in, n]."""
        return matmul(self, x)

    @property
    def mT(self) -> Transposed:  # noqa: N802 - NumPy's name
        """The transposed weight, for ``x @ weight.mT``."""
        return Transposed(self)

    T = mT


class Transposed:
    """The transpose of a node that is one matrix, not a stack; it supports only ``x @ weight.T``."""

    __array_ufunc__ = None

    def __init__(self, node: Any) -> None:
        if len(node.shape) != 2:
            message = f"a stacked weight {list(node.shape)} with an adapter that scales rows cannot be transposed"
            raise StructureError(message, hint=_PRODUCT_HINT)
        self._node = node

    def __rmatmul__(self, x: Array) -> Array:
        return self._node.linear(jnp.asarray(x, jnp.result_type(x, self._node.dtype)))


def matmul(node: Any, x: Array) -> Array:
    """Compute ``node @ x`` for a matrix by the node's own ``linear``, in the dtype that W x would have."""
    if len(node.shape) != 2 or x.ndim > 2:
        shapes = f"{list(node.shape)} and {list(x.shape)}"
        message = f"an adapter that scales rows does not support weight @ x of shapes {shapes}"
        raise StructureError(message, hint=_PRODUCT_HINT)
    x = jnp.asarray(x, jnp.result_type(x, node.dtype))
    return node.linear(x) if x.ndim == 1 else node.linear(x.T).T


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


def is_adapter(node: Any) -> bool:
    return isinstance(node, AdapterWeight)


def shard_adapter(node: Any) -> Any:
    """Shard the leaves of an adapter like its weight, along the axes they share."""
    sharding = named_sharding(node.weight)
    if sharding is None or not getattr(node, "AXES", None):  # those are placed when they are made
        return node
    *layers, out, inner = (*sharding.spec, *(None,) * (len(node.weight.shape) - len(sharding.spec)))
    mesh_axes = {"out": out, "in": inner, "rank": None}
    sharded: dict[str, Any] = {}
    for name, axes in node.AXES.items():
        if (leaf := getattr(node, name)) is not None:
            spec = jax.P(*layers, *(mesh_axes[axis] for axis in axes))
            sharded[name] = shard_leaf(leaf, jax.sharding.NamedSharding(sharding.mesh, spec))
    return dataclasses.replace(node, **sharded)


def named_sharding(weight: Any) -> jax.sharding.NamedSharding | None:
    """Return the `NamedSharding` of an array, or None where it has none."""
    sharding = None if isinstance(weight, jax.core.Tracer) else getattr(weight, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def shard_leaf(leaf: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Place an array on its devices; a `jax.ShapeDtypeStruct` gets the sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return put(leaf, sharding)
