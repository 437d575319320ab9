"""Base classes of adapter nodes, and helpers for their matrix products and shardings.

A node is a frozen dataclass and a pytree that stands in place of a weight. Fields whose names begin with ``lora_``
train. ``AXES`` maps leaves of a node to their axes after the stack axes, and `shard_adapter` shards the leaves by it.
If ``AXES`` is missing or empty, the code that makes the node also shards its leaves. Stack axes are the leading axes of
a weight, for layers and experts. Shapes: L layers, and the sizes ``out`` and ``in`` of a weight's outputs and inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import LinearWeight, StructureError, put
from .._adapted import WrappedWeight

TRAINABLE = "**/lora_*"
"""A glob that selects the trainable leaves of every kind of adapter, and nothing else."""
_PRODUCT_HINT = "multiply with lowtide.core.linear(x, weight), or under jax.vmap"


class Variant(NamedTuple):
    """A variant of LoRA. Two booleans select it: the field `field` of `Config`, and the option `option` of PEFT."""

    field: str
    option: str
    name: str
    power: float = 1.0
    """Exponent p in the scale alpha / rank**p of the product B A. Of several variants, the smallest p applies."""
    is_sum: bool = False
    """Whether the adapted weight is W + s B A, with the leaves of plain LoRA and a scale s. Other variants do not
    support kernels, experts, embeddings, LoftQ, `init` "pissa" or "olora", `combine`, `unmerge` and the product x W."""
    leaf: str = ""
    """Leaf that only nodes of this variant have. If empty, nodes have a static field with the name `field` instead."""
    suffix: str = ""
    """End of the name of the leaf's tensor in PEFT's files."""


class Variants(tuple[Variant, ...]):
    """The variants that a configuration, a node or a file selects."""

    @property
    def power(self) -> float:
        return min((variant.power for variant in self), default=1.0)

    @property
    def non_sums(self) -> str:
        """Names of the variants whose `is_sum` is False, joined by "with"; empty without such variants."""
        return " with ".join(variant.name for variant in self if not variant.is_sum)

    @property
    def static_fields(self) -> dict[str, Any]:
        """Static fields for the constructor of a node; variants with a leaf have none."""
        return {variant.field: True for variant in self if not variant.leaf}


class AdapterWeight(WrappedWeight):
    """A weight with an adapter. Each subclass is one kind of adapter, such as LoRA, VeRA or (IA)³."""

    NAME: ClassVar[str]
    """Name of the kind, for messages."""
    PEFT_TYPE: ClassVar[str | None] = None
    """PEFT's name of the kind; None for `SavedWeight`, which belongs to files of any kind."""
    REQUIRED_LEAVES: ClassVar[tuple[str, ...]]
    """Leaves of a complete node, the weight first. The halves that `lowtide.partition` returns lack some of them."""
    variants = Variants()
    """Variants of LoRA that this node has."""

    @property
    def kind(self) -> str:
        """Names of the variants, such as "DoRA"; without variants `NAME`."""
        return " with ".join(variant.name for variant in self.variants) or self.NAME

    @property
    def rank(self) -> int | None:
        """The rank of the correction; None for kinds without a rank."""
        return None

    @property
    def summary(self) -> str:
        """The kind with its rank, for messages."""
        return self.kind if self.rank is None else f"{self.kind} of rank {self.rank}"

    def scaled_factors(self) -> tuple[Any, Any] | None:
        """Return A and B of an adapted weight W + B A, with all scales included; None for weights of another form."""
        return None

    def inverted(self) -> Any:
        """Return the inverse adapter: merging it undoes the merge of this adapter."""
        raise NotImplementedError

    def folded_bias(self, bias: Any) -> Any:
        """Return the bias that the module needs after its weight is merged; by default it is unchanged."""
        return bias


class ScaledWeight(WrappedWeight):
    """A node that computes all products with its method `linear`; ``weight @ x`` and ``x @ weight.mT`` call it."""

    def __matmul__(self, x: Array) -> Array:
        """Multiply a vector [in] or a matrix [in, n] by the weight."""
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
    """Compute ``node @ x`` with `node.linear` for a vector or a matrix [in, n]; the result has the dtype of W x."""
    if len(node.shape) != 2 or x.ndim > 2:
        shapes = f"{list(node.shape)} and {list(x.shape)}"
        message = f"an adapter that scales rows does not support weight @ x of shapes {shapes}"
        raise StructureError(message, hint=_PRODUCT_HINT)
    x = jnp.asarray(x, jnp.result_type(x, node.dtype))
    return node.linear(x) if x.ndim == 1 else node.linear(x.T).T


def expand_like(vector: Float[Array, " n"], like: Array) -> Array:
    """Cast a vector to the dtype of activations [..., n], and add leading axes up to their number of axes."""
    return jnp.expand_dims(vector.astype(like.dtype), tuple(range(like.ndim - vector.ndim)))


def apply_dropout(x: Float[Array, "*batch in"], key: Array, rate: float) -> Float[Array, "*batch in"]:
    """Set a random fraction `rate` of the activations to zero, and divide the others by ``1 - rate``."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def squared_row_norms(weight: Any) -> Float[Array, "*L out"]:
    """Return the squared norm of each row of a weight in float32; under `jax.jit`, an array gets no float32 copy."""
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
    if sharding is None or not getattr(node, "AXES", None):  # kinds without `AXES` shard new leaves
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
    """Return the `NamedSharding` of an array; None for another sharding, and for a tracer."""
    sharding = None if isinstance(weight, jax.core.Tracer) else getattr(weight, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def shard_leaf(leaf: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Place an array with a sharding; for a `jax.ShapeDtypeStruct`, return one that has this sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return put(leaf, sharding)
