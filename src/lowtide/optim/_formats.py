"""Storage formats of optimizer state: dtype of the codes, size of the blocks, encoding and decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# A block of neighbouring numbers shares a scale, and each number divided by the scale is stored as a code. So a format
# encodes and decodes numbers in [-1, 1], or in [0, 1] for moments that are never negative. Both directions are
# elementwise arithmetic without a table, so XLA fuses them with the update. A table lookup is slow on a TPU, and a
# search in a table of 256 entries would be a loop.
#
# The dynamic map has 7 levels of magnitudes, and the numbers 0 and 1. Level i has 2 ** i magnitudes, evenly spaced
# between 10 ** (i - 7) and 10 ** (i - 6); twice as many if no number is negative. Take the distance of a code from the
# code of 0, plus 1 if no number is negative: its highest bit encodes the level, and its lower bits the index in it.
#
# 4 bits have too few codes for the dynamic map. torchao uses three of its levels for first moments and multiples of
# 1/16 for second moments. With these, a convolutional network ended 3.0 % above the held-out loss of float32 state.
# With companding, which spaces codes near 0 more finely, it ended 0.5 % above. With 4-bit blocks of 128, a decoder
# trained from scratch ended 0.5 % above float32, over eight seeds (benchmarks/log/). So 4-bit blocks have 64 numbers.
#
# Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), for the dynamic map and
# its blocks; FlashOptim (arXiv:2602.23349), for companded numbers (there in groups of 32); Li et al., "Memory Efficient
# Optimizers with 4-bit States" (arXiv:2309.01507), for 4-bit second moments without a code for 0. They store multiples
# of 1/16 of the moments; this module stores multiples of 1/16 of their square roots.

traced_once = functools.partial(jax.jit, static_argnums=1)
"""`jax.jit` with a static second argument: traced and lowered once for each shape; XLA inlines the call."""

_MAX_FP8 = 448.0
_MIN_FP8 = 2.0**-9 / _MAX_FP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFormat:
    """A storage format of optimizer state."""

    block: int
    """Number of neighbouring elements that share a scale."""
    codes: Any
    """Dtype of the codes."""
    encode: Callable[[Array, bool], Array]
    """Encode float32 numbers in [-1, 1], or in [0, 1] if the second argument, `is_positive`, is True."""
    decode: Callable[[Array, bool], Array]
    """Decode codes to float32 numbers; the second argument is `is_positive`, as for `encode`."""


# The functions of the formats compare with no zeros and select none: jnp.where(..., 0.0, ...), x > 0 and
# jnp.clip(x, 0, 1) need zeros of the shape of x. XLA for GPUs shares such zeros with the loop that computes the
# gradients of stacked layers, and then stores a copy: 4 bytes per parameter (compiled for an H100, jax 0.10.2).

_LEVELS = 7
_POWERS = [10.0 ** (level - _LEVELS + 1) for level in range(_LEVELS)]


@traced_once
def _encode_dynamic(x: Array, is_positive: bool) -> Array:
    magnitude, size = jnp.minimum(jnp.abs(x), 1), 2 if is_positive else 1
    first = [power * (0.1 + 0.45 / (size << level)) for level, power in enumerate(_POWERS)]
    last = [power * (1 - 0.45 / (size << level)) for level, power in enumerate(_POWERS)]
    # Round to the nearest number: a border is halfway between the last number of a level and the first of the next one.
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
        distance = middle + jnp.where(jnp.signbit(x), -jnp.minimum(distance, middle), distance)
    return distance.astype(jnp.uint8)


@traced_once
def _decode_dynamic(codes: Array, is_positive: bool) -> Array:
    size = 2 if is_positive else 1
    signed = codes.astype(jnp.int32) - (0 if is_positive else (1 << _LEVELS) - 1)
    distance, largest = jnp.abs(signed), (size << _LEVELS) - (size - 1)
    # The highest bit encodes the level, as in the encoder. The sign of a distance of 0 makes the number 0 below.
    biased = jnp.maximum(distance + 1 if is_positive else distance, 1)
    bits = 31 - jax.lax.clz(biased)
    count = jnp.left_shift(1, bits)
    level = bits - 1 if is_positive else bits
    tenths = 0.1 + 0.9 * ((biased - count).astype(jnp.float32) + 0.5) / count.astype(jnp.float32)
    values = tenths * _level_value(level, _POWERS)
    values = jnp.where(distance >= largest, 1.0, values)
    return jnp.sign(signed).astype(jnp.float32) * values


def _min_code(x: Array) -> Array:
    """Return the smallest code for second moments: 1 for a positive number, else 0."""
    # An update divides a first moment by the root of its second moment. If a positive second moment were stored as 0,
    # the update would divide by about 0.
    return jnp.minimum(jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32), 1)


def _square_root(x: Array) -> Array:
    return jnp.sqrt(jnp.minimum(jnp.abs(x), 1))  # the argument is positive; abs makes -0 a 0


def _level_value(level: Array, values: list[float]) -> Array:
    result = jnp.full(level.shape, values[0], jnp.float32)
    for index, value in enumerate(values[1:], 1):
        result = jnp.where(level >= index, jnp.float32(value), result)
    return result


@traced_once
def _encode_companded(x: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.maximum(_round(255 * _square_root(x)).astype(jnp.int32), _min_code(x)).astype(jnp.uint8)
    return (_round(127 * _compand(x, 1)).astype(jnp.int32) + 127).astype(jnp.uint8)


@traced_once
def _decode_companded(codes: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.square(codes.astype(jnp.float32) / 255)
    return _expand((codes.astype(jnp.float32) - 127) / 127, 1)


def _compand(x: Array, strength: int) -> Array:
    """Map [-1, 1] to [-1, 1] with the slope ``1 + strength`` at 0, so that the many small numbers have more codes."""
    return (1 + strength) * x / (1 + strength * jnp.abs(x))


def _expand(y: Array, strength: int) -> Array:
    return y / (1 + strength - strength * jnp.abs(y))


def _round(x: Array) -> Array:
    return jnp.floor(x + 0.5)  # GPU kernels have no jnp.round


@traced_once
def _encode_fp8(x: Array, is_positive: bool) -> Array:
    # Square roots of second moments are stored: they span half as many powers of two.
    x = jnp.maximum(_square_root(x), _MIN_FP8 * _min_code(x)) if is_positive else x
    return (x * _MAX_FP8).astype(jnp.float8_e4m3fn)


@traced_once
def _decode_fp8(codes: Array, is_positive: bool) -> Array:
    x = codes.astype(jnp.float32) / _MAX_FP8
    return jnp.square(x) if is_positive else x


@traced_once
def _encode_4bit(x: Array, is_positive: bool) -> Array:
    if is_positive:  # sixteenths of square roots, from 1 to 16: no code means 0
        codes = jnp.clip(_round(16 * _square_root(x)), 1, 16) - 9
    else:
        codes = _round(7 * _compand(x, 2))
    return codes.astype(jnp.int32).astype(jnp.int4)  # checkpoints cannot store unsigned 4-bit numbers


@traced_once
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
