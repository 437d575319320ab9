"""Packed arrays of optimizer state: codes of 8 or 4 bits with a scale for each block of neighbours, or bfloat16.

Blocks are consecutive parts of a *row*. A row is the last axis or, if that is shorter than a block, as many of the last
axes as fill a block. Codes have the shape of the array, so they are sharded like it. Codes of 4 bits are int4, which
devices store two to a byte. Scales have one number for each block of a row. So the axes before the row can be sliced
and sharded in codes and scales alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from ..core import ConfigError, check_choice
from ..core._compat import no_derivative
from ._formats import FORMATS, traced_once

BFLOAT16 = "bfloat16"
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
"""Bit patterns of infinity and NaN in float32."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class PackedArray:
    """A low-precision array of an optimizer's state: a pytree node of codes and scales, or of codes alone in bfloat16.

    Examples:
        >>> packed = PackedArray.of(jnp.array([[0.5, -1.0, 0.25]]), "8bit")
        >>> packed.codes.dtype.name, packed.scales.tolist()
        ('uint8', [-1.0])
        >>> packed.dense().round(2).tolist()
        [[0.5, -1.0, 0.25]]
    """

    codes: Any
    """Codes, in the shape of the array."""
    scales: Any
    """Float32, [axes before the row, blocks of a row]: in each block the number of the largest magnitude, with its
    sign. None for bfloat16."""
    format: str
    """One of `FORMATS`, or ``bfloat16`` (static)."""
    row: tuple[int, ...] = ()
    """Sizes of the last axes that form a row; empty for bfloat16 (static)."""
    is_positive: bool = False
    """Whether no number is negative, as in second moments (static)."""
    dtype: str = "float32"
    """Dtype of the dense array (static)."""

    @classmethod
    def of(
        cls, x: Float[Array, "*axes n"], format: str, *, is_positive: bool = False, scales: Any = None
    ) -> PackedArray:
        """Pack an array.

        Args:
            x: floating-point numbers with at least one axis.
            format: a name in `FORMATS`.
            is_positive: whether no number is negative; this is not checked.
            scales: the result of `scales_of` for these numbers, if it is already known.

        Returns:
            The node. A block that contains NaN or an infinity decodes to NaN throughout, because its scale is NaN.

        Raises:
            ConfigError: for any other `format`, or a scalar.
        """
        check_choice("format", format, tuple(FORMATS))
        if not x.ndim:
            raise ConfigError("a scalar cannot be packed", expected="an array with at least one axis", got=x.dtype.name)
        form, row = FORMATS[format], row_of(x.shape, format)
        scales = scales_of(x, format) if scales is None else scales
        divisors = _expand_scales(jnp.where(scales == 0, 1, scales), form.block, row)
        codes = form.encode(x.astype(jnp.float32) / divisors, is_positive)
        return cls(codes, scales, format, row, is_positive, x.dtype.name)

    @classmethod
    def rounded(cls, x: Float[Array, "*axes"], key: Array) -> PackedArray:
        """Store an array in bfloat16, stochastically rounded.

        Args:
            x: floating-point numbers.
            key: a random uint32; the same key rounds the same number the same way.
        """
        return cls(stochastic_round(x.astype(jnp.float32), key).astype(BFLOAT16), None, BFLOAT16, dtype=x.dtype.name)

    @classmethod
    def stored(
        cls, x: Float[Array, "*axes"], format: str, key: Array, *, is_positive: bool = False, scales: Any = None
    ) -> PackedArray:
        """Pack an array with `rounded` for bfloat16, and with `of` for other formats; arguments as in these methods."""
        if format == BFLOAT16:
            return cls.rounded(x, key)
        return cls.of(x, format, is_positive=is_positive, scales=scales)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Return the arrays as children, and the other fields as static data.

        A bfloat16 node has no child for scales, because Orbax refuses None below the nodes of other libraries.
        """
        names = ("codes",) if self.format == BFLOAT16 else ("codes", "scales")
        static = (self.format, self.row, self.is_positive, self.dtype)
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> PackedArray:
        """Rebuild a node from its children and static data."""
        codes, *scales = arrays
        return cls(codes, scales[0] if scales else None, *static)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.codes.shape

    def dense(self) -> Float[Array, "*axes n"]:
        """Return the array in its original dtype."""
        if self.scales is None:
            return self.codes.astype(self.dtype)
        form = FORMATS[self.format]
        return (form.decode(self.codes, self.is_positive) * _expand_scales(self.scales, form.block, self.row)).astype(
            self.dtype
        )


def row_of(shape: tuple[int, ...], format: str) -> tuple[int, ...]:
    """Return the sizes of the last axes that form a row: as few axes as hold at least one block, or all axes."""
    axis = len(shape) - 1
    while axis > 0 and math.prod(shape[axis:]) < FORMATS[format].block:
        axis -= 1
    return shape[axis:]


@traced_once
def scales_of(x: Float[Array, "*axes n"], format: str) -> Float[Array, "*before blocks"]:
    """Return the number of the largest magnitude in each block, in float32; NaN for a block with a non-finite number.

    The scale keeps the sign of this number, so the number divided by the scale is 1. Every format has a code for 1, but
    some have none for -1. So packing a decoded array again changes nothing.
    """
    row = row_of(x.shape, format)
    rows = x.astype(jnp.float32).reshape(*x.shape[: x.ndim - len(row)], math.prod(row))
    block = FORMATS[format].block
    if missing := -rows.shape[-1] % block:  # zeros fill the last block
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // block, block)
    bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
    # Compare integers: the bits of the magnitude, then a bit that is 1 for positive numbers. On a CPU, XLA's maximum of
    # floating-point numbers may lose a NaN (jax 0.10.2).
    largest = jnp.max((bits << 1) | (1 - (bits >> 31)), axis=-1)
    magnitude, sign = largest >> 1, (1 - (largest & 1)) << 31
    scale_bits = jnp.where(magnitude >= _INFINITY, jnp.uint32(_NAN), magnitude | sign)
    return jax.lax.bitcast_convert_type(scale_bits, jnp.float32)


def refuse_derivatives(x: Array) -> Array:
    """Return `x`; raise `StructureError` if a derivative goes through it, because packing would lose the derivative."""
    return no_derivative(x, "the quantised state of lt.optim.low_precision")


def bits_of(format: str) -> int:
    """Return the bits of one number in a format, without its share of a scale."""
    codes = jnp.dtype(BFLOAT16 if format == BFLOAT16 else FORMATS[format].codes)
    return (jnp.iinfo if jnp.issubdtype(codes, jnp.integer) else jnp.finfo)(codes).bits


def is_packed(node: Any) -> bool:
    return isinstance(node, PackedArray)


@jax.jit
def random_bits(x: Float[Array, "*axes"], key: Array) -> UInt32[Array, "*axes"]:
    """Return random bits that depend on float32 numbers and a uint32 key; equal numbers have equal bits.

    The bits do not depend on the position, so a block of an array is rounded in the same way as the whole array.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ key
    for _ in range(2):  # MurmurHash3's finalizer (Appleby, public domain), applied twice
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = (bits ^ (bits >> 16)) + jnp.uint32(0x9E3779B9)
    return bits


def stochastic_round(x: Float[Array, "*axes"], key: Array) -> Float[Array, "*axes"]:
    """Round float32 numbers stochastically to bfloat16 precision; over random keys, the mean result is the number."""
    # A random integer below one unit of bfloat16 is added, and the lower 16 bits are cut off. A carry rounds up.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(x, key) >> 16)
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _expand_scales(scales: Array, block: int, row: tuple[int, ...]) -> Array:
    """Repeat each scale for every number of its block."""
    leading = scales.shape[:-1]
    repeated = jnp.broadcast_to(scales[..., None], (*scales.shape, block)).reshape(*leading, scales.shape[-1] * block)
    return repeated[..., : math.prod(row)].reshape(*leading, *row)
