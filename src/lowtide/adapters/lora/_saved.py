"""The node for an array that trains as a whole in addition to adapters: PEFT's `modules_to_save`, and biases.

The original array stays next to the copy that trains, as in PEFT. So the base is available without the adapter, and one
glob selects the trainable leaves of every kind.

Deviation from PEFT: the copy is float32 whatever the dtype of the array, like all trainable leaves here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import linear, put, rows


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "lora_saved"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SavedWeight:
    """An array with a trainable copy that is used in its place: a head, an embedding, a norm or a bias.

    The paths of its leaves are ``<path>/weight`` and ``<path>/lora_saved``. For operations that this class does not
    define, use ``jnp.asarray(node)`` or `lowtide.adapted`.

    Examples:
        >>> node = SavedWeight(jnp.zeros((2, 3)), jnp.ones((2, 3)))
        >>> node.linear(jnp.ones((1, 3))).tolist(), (jnp.ones((2, 3)) * node).shape
        ([[3.0, 3.0]], (2, 3))
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Empty: the copy is sharded like the array."""

    weight: Any
    """The array as it was, of any shape, frozen."""
    lora_saved: Any
    """The trainable copy, of the same shape, float32."""

    __array_ufunc__ = None  # so that a NumPy array leaves an operation to this class

    def linear(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Compute x Wᵀ with the copy, in the dtype of `x`."""
        return linear(x, self.lora_saved)

    def rows(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids in"]:
        """Look up rows of the copy."""
        return rows(self.lora_saved, ids)

    def folded(self) -> Array:
        """Return the copy in the dtype of the array; for merging, and for programs that expect that dtype."""
        return self.lora_saved.astype(self.weight.dtype)

    def astype(self, dtype: Any) -> Array:
        """Return the copy in a dtype."""
        return self.lora_saved.astype(dtype)

    def __jax_array__(self) -> Array:
        return self.folded()

    def __getitem__(self, index: Any) -> Array:
        return self.folded()[index]

    def __matmul__(self, other: Any) -> Array:
        return self.folded() @ other

    def __rmatmul__(self, other: Any) -> Array:
        return other @ self.folded()

    def __add__(self, other: Any) -> Array:
        return self.folded() + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Array:
        return self.folded() * other

    __rmul__ = __mul__

    @property
    def mT(self) -> Array:  # noqa: N802 - NumPy's name
        """The copy with its last two axes swapped."""
        return self.folded().mT

    @property
    def T(self) -> Array:  # noqa: N802 - NumPy's name
        """The transposed copy."""
        return self.folded().T

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the array."""
        return len(self.weight.shape)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return self.weight.size

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.weight.dtype


def make_saved(weight: Any, values: Any = None) -> SavedWeight:
    """Make a node of an array; the copy has these values or the array's, is sharded like it, and abstract if it is."""
    sharding = getattr(weight, "sharding", None)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return SavedWeight(weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=sharding))
    # Always copy: one array at two paths cannot train at only one of them.
    copy = jnp.array(weight if values is None else values, jnp.float32, copy=True)
    is_placed = isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(copy, jax.core.Tracer)
    return SavedWeight(weight, put(copy, sharding) if is_placed else copy)
