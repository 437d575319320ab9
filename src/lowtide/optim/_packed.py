"""Packed arrays of an optimizer's state: codes of 8 or 4 bits, with a scale for each block of neighbours; or bfloat16.

Blocks run along a *row*: the last axis, or, where that is shorter than a block, as many of the last axes as fill one.
Codes have the shape of the array, so they are sharded like it. Codes of 4 bits are int4, which devices store two to a
byte. Scales have one number for each block of a row. So the axes before the row can be sliced and sharded, and codes
and scales follow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from ..core import ConfigError, check_choice
from ..core._compat import no_derivative

BFLOAT16 = "bfloat16"
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
"""Bit patterns of float32."""

_traced_once = functools.partial(jax.jit, static_argnums=1)
"""Trace and lower once for all leaves and blocks of one shape; XLA inlines the call."""


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
    """Float32, [..., blocks of a row]: the number of each block that is farthest from 0; None for bfloat16."""
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
            format: one of `FORMATS`.
            is_positive: whether no number is negative; this is not checked.
            scales: the result of `scales_of` for these numbers, if it is already known.

        Returns:
            The node. A block that contains NaN or an infinity decodes to NaN throughout, because its scale is NaN.

        Raises:
            ConfigError: for another format, or a scalar.
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
        """Pack an array in any format: with `rounded` in bfloat16, else with `of`."""
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


@_traced_once
def scales_of(x: Float[Array, "*axes n"], format: str) -> Float[Array, "*before blocks"]:
    """Return the number of each block that is farthest from 0, in float32; NaN for a block with a non-finite number.

    The scale keeps its sign. So the largest number divided by the scale is 1, and 1 has a code where -1 has none:
    packing a decoded array again changes nothing.
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
    """Return `x`, and raise where a derivative is taken through it, because packing would lose the derivative."""
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
    """Round float32 numbers stochastically to bfloat16 precision, so that the mean of many results is the number."""
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


# --- formats ---------------------------------------------------------------------------------------------------------

# Every format encodes numbers between -1 and 1, or between 0 and 1 where none is negative, and decodes them. Both
# directions are elementwise arithmetic without a table, so that XLA fuses them with the update. A table lookup is slow
# on a TPU, and a search in a table of 256 entries would be a loop.
#
# The dynamic map has 7 levels. Level i has 2 ** i numbers, or twice as many without negative numbers. They are evenly
# spaced between a tenth of 10 ** (i - 6) and 10 ** (i - 6). The map also contains 0 and 1. Take a code's distance from
# the code of 0 (plus 1 without negative numbers): its highest bit encodes the level, and the lower bits the place in
# the level.
#
# 4 bits have too few codes for the dynamic map. A convolutional network was trained with three of its levels for first
# moments, and sixteenths for second moments, as in torchao. It ended 3.0 % above the held-out loss of float32; with
# companding, 0.5 % above it. A decoder trained from scratch with blocks of 128 ended 0.5 % above float32, over eight
# seeds (benchmarks/log/). So 4-bit blocks have 64 numbers.
#
# Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), for the dynamic map and
# its blocks; FlashOptim (arXiv:2602.23349), for companded numbers (there in groups of 32); Li et al., "Memory Efficient
# Optimizers with 4-bit States" (arXiv:2309.01507), for 4-bit second moments without a code for 0 (they store sixteenths
# of the moments, this module sixteenths of the square roots).

_MAX_FP8 = 448.0
_MIN_FP8 = 2.0**-9 / _MAX_FP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFormat:
    """One format for the numbers of a state."""

    block: int
    """Number of neighbouring elements that share a scale."""
    codes: Any
    """Dtype of the codes."""
    encode: Callable[[Array, bool], Array]
    """Encode float32 numbers in [-1, 1]; or in [0, 1], where the second argument says that none is negative."""
    decode: Callable[[Array, bool], Array]
    """Decode to float32 numbers."""


_LEVELS = 7
_POWERS = [10.0 ** (level - _LEVELS + 1) for level in range(_LEVELS)]


@_traced_once
def _encode_dynamic(x: Array, is_positive: bool) -> Array:
    magnitude, size = jnp.minimum(jnp.abs(x), 1), 2 if is_positive else 1
    first = [power * (0.1 + 0.45 / (size << level)) for level, power in enumerate(_POWERS)]
    last = [power * (1 - 0.45 / (size << level)) for level, power in enumerate(_POWERS)]
    # The nearest number: the border between two levels is halfway between their neighbouring numbers.
    borders = [(upper + lower) / 2 for upper, lower in zip(first[1:], last[:-1], strict=True)]
    level = sum(((magnitude >= border).astype(jnp.int32) for border in borders), jnp.zeros(x.shape, jnp.int32))
    count = jnp.left_shift(size, level)
    tenths = magnitude * _level_value(level, [1 / power for power in _POWERS])
    index = jnp.floor((tenths - 0.1) / 0.9 * count.astype(jnp.float32)).astype(jnp.int32)
    distance = count + jnp.clip(index, 0, count - 1) - (size - 1)
    distance = jnp.where(magnitude < first[0] / 2, _min_code(magnitude) if is_positive else 0, distance)
    largest = (size << _LEVELS) - (size - 1)
    distance = jnp.where(magnitude >= (1 + last[-1]) / 2, largest, distance)
    if not is_positive:
        middle = (1 << _LEVELS) - 1  # the code of 0; only the positive sign has a code for the largest magnitude
        distance = middle + jnp.where(x < 0, -jnp.minimum(distance, middle), distance)
    return distance.astype(jnp.uint8)


@_traced_once
def _decode_dynamic(codes: Array, is_positive: bool) -> Array:
    size = 2 if is_positive else 1
    signed = codes.astype(jnp.int32) - (0 if is_positive else (1 << _LEVELS) - 1)
    distance, largest = jnp.abs(signed), (size << _LEVELS) - (size - 1)
    # The highest bit encodes the level, as in the encoder. A distance of 0 is replaced by the number 0 below.
    biased = jnp.maximum(distance + 1 if is_positive else distance, 1)
    bits = 31 - jax.lax.clz(biased)
    count = jnp.left_shift(1, bits)
    level = bits - 1 if is_positive else bits
    tenths = 0.1 + 0.9 * ((biased - count).astype(jnp.float32) + 0.5) / count.astype(jnp.float32)
    values = tenths * _level_value(level, _POWERS)
    values = jnp.where(distance == 0, 0.0, jnp.where(distance >= largest, 1.0, values))
    return jnp.where(signed < 0, -values, values)


def _min_code(x: Array) -> Array:
    """Return the smallest code for second moments: 1 for a positive number, else 0."""
    # The update divides by the root of a second moment. A positive one that is stored as 0 would divide a first moment
    # that may not be 0.
    return (x > 0).astype(jnp.int32)


def _level_value(level: Array, values: list[float]) -> Array:
    result = jnp.full(level.shape, values[0], jnp.float32)
    for index, value in enumerate(values[1:], 1):
        result = jnp.where(level >= index, jnp.float32(value), result)
    return result


@_traced_once
def _encode_companded(x: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.maximum(_round(255 * jnp.sqrt(jnp.clip(x, 0, 1))).astype(jnp.int32), _min_code(x)).astype(jnp.uint8)
    return (_round(127 * _compand(x, 1)).astype(jnp.int32) + 127).astype(jnp.uint8)


@_traced_once
def _decode_companded(codes: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.square(codes.astype(jnp.float32) / 255)
    return _expand((codes.astype(jnp.float32) - 127) / 127, 1)


def _compand(x: Array, strength: int) -> Array:
    """Spread numbers near 0, where most numbers are: the slope there is ``1 + strength``."""
    return (1 + strength) * x / (1 + strength * jnp.abs(x))


def _expand(y: Array, strength: int) -> Array:
    """Undo `_compand`."""
    return y / (1 + strength - strength * jnp.abs(y))


def _round(x: Array) -> Array:
    return jnp.floor(x + 0.5)  # GPU kernels have no jnp.round


@_traced_once
def _encode_fp8(x: Array, is_positive: bool) -> Array:
    # The square roots of second moments span half as many powers of two.
    x = jnp.maximum(jnp.sqrt(jnp.clip(x, 0, 1)), _MIN_FP8 * _min_code(x)) if is_positive else x
    return (x * _MAX_FP8).astype(jnp.float8_e4m3fn)


@_traced_once
def _decode_fp8(codes: Array, is_positive: bool) -> Array:
    x = codes.astype(jnp.float32) / _MAX_FP8
    return jnp.square(x) if is_positive else x


@_traced_once
def _encode_4bit(x: Array, is_positive: bool) -> Array:
    if is_positive:  # sixteenths of square roots, from 1 to 16: no code means 0
        codes = jnp.clip(_round(16 * jnp.sqrt(jnp.clip(x, 0, 1))), 1, 16) - 9
    else:
        codes = _round(7 * _compand(x, 2))
    return codes.astype(jnp.int32).astype(jnp.int4)  # checkpoints cannot store unsigned 4-bit numbers


@_traced_once
def _decode_4bit(codes: Array, is_positive: bool) -> Array:
    numbers = codes.astype(jnp.int32).astype(jnp.float32)
    return jnp.square((numbers + 9) / 16) if is_positive else _expand(numbers / 7, 2)


FORMATS = {
    "8bit": StateFormat(block=256, codes=jnp.uint8, encode=_encode_dynamic, decode=_decode_dynamic),
    "companded": StateFormat(block=128, codes=jnp.uint8, encode=_encode_companded, decode=_decode_companded),
    "fp8": StateFormat(block=256, codes=jnp.float8_e4m3fn, encode=_encode_fp8, decode=_decode_fp8),
    "4bit": StateFormat(block=64, codes=jnp.int4, encode=_encode_4bit, decode=_decode_4bit),
}
"""Formats by name. ``bfloat16`` is not among them: it is a dtype and needs no scales."""
