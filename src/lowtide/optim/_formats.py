"""How numbers of an optimizer's state are stored: codes of 8 or 4 bits for what is divided by a scale of its block.

Every format makes codes of numbers between -1 and 1, or between 0 and 1 where none is negative, and numbers of codes.
Both are arithmetic of single elements without a table, so that XLA fuses them with the update: looking up is slow on a
TPU, and a search through a table of 256 would be a loop.

Of the dynamic map, level i of 7 has 2 ** i numbers (twice as many without negative ones) at even distances between a
tenth of ``10 ** (i - 6)`` and the whole; 0 and 1 are beside them. So of a code's distance from that of 0 the highest
bit is the level, and what is left the place in it.

In 4 bits there are too few codes for that: with three levels of it, and second moments in sixteenths, as torchao has
them, convolutions ended 3.0 % above the held-out loss of float32, companded 0.5 %; and a decoder from scratch 0.5 %
above it with blocks of 128, over eight seeds (benchmarks/LOG.md), so that they are smaller here.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), for the dynamic map and
its blocks; FlashOptim (arXiv:2602.23349), for companded numbers (there in groups of 32); Li et al., "Memory Efficient
Optimizers with 4-bit States" (arXiv:2309.01507), for second moments in 4 bits, of which none is 0 (in sixteenths
there, of roots here).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_MOST_FP8 = 448.0
_LEAST_FP8 = 2.0**-9 / _MOST_FP8


traced_once = functools.partial(jax.jit, static_argnums=1)
"""Leaves and blocks of one shape share what JAX traces and lowers; XLA puts it where it is called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFormat:
    """One way to store numbers of a state."""

    name: str
    """What users call it."""
    block: int
    """Neighbours that share a scale."""
    codes: Any
    """Dtype of the codes."""
    encode: Callable[[Array, bool], Array]
    """Codes of float32 numbers in [-1, 1]; or, where the second argument says that none is negative, in [0, 1]."""
    decode: Callable[[Array, bool], Array]
    """Float32 numbers of codes."""


_LEVELS = 7
_POWERS = [10.0 ** (level - _LEVELS + 1) for level in range(_LEVELS)]


@traced_once
def _encode_dynamic(x: Array, is_positive: bool) -> Array:
    most, size = jnp.minimum(jnp.abs(x), 1), 2 if is_positive else 1
    first, last = _middles(size)
    # Between two levels, as between all numbers, the nearer one: from halfway between the neighbours at the border.
    level = _number_below(most, [(above + below) / 2 for above, below in zip(first[1:], last[:-1], strict=True)])
    count = jnp.left_shift(size, level)
    tenths = most * _by_level(level, [1 / power for power in _POWERS])
    place = jnp.floor((tenths - 0.1) / 0.9 * count.astype(jnp.float32)).astype(jnp.int32)
    distance = count + jnp.clip(place, 0, count - 1) - (size - 1)
    distance = jnp.where(most < first[0] / 2, _least(most) if is_positive else 0, distance)
    largest = (size << _LEVELS) - (size - 1)
    distance = jnp.where(most >= (1 + last[-1]) / 2, largest, distance)
    if not is_positive:
        middle = (1 << _LEVELS) - 1  # the largest has a sign of its own
        distance = middle + jnp.where(x < 0, -jnp.minimum(distance, middle), distance)
    return distance.astype(jnp.uint8)


@traced_once
def _decode_dynamic(codes: Array, is_positive: bool) -> Array:
    size = 2 if is_positive else 1
    signed = codes.astype(jnp.int32) - (0 if is_positive else (1 << _LEVELS) - 1)
    distance, largest = jnp.abs(signed), (size << _LEVELS) - (size - 1)
    place = jnp.maximum(distance + 1 if is_positive else distance, 1)  # with its level as the highest bit
    bits = 31 - jax.lax.clz(place)
    count = jnp.left_shift(1, bits)
    level = bits - 1 if is_positive else bits
    tenths = 0.1 + 0.9 * ((place - count).astype(jnp.float32) + 0.5) / count.astype(jnp.float32)
    found = tenths * _by_level(level, _POWERS)
    found = jnp.where(distance == 0, 0.0, jnp.where(distance >= largest, 1.0, found))
    return jnp.where(signed < 0, -found, found)


def _least(x: Array) -> Array:
    """Return the least code of second moments: one that is stored as 0 divides, where the first moment may not be 0."""
    return (x > 0).astype(jnp.int32)


def _middles(size: int) -> tuple[list[float], list[float]]:
    """Return the first and the last number of each level."""
    powers = _POWERS
    first = [power * (0.1 + 0.45 / (size << level)) for level, power in enumerate(powers)]
    return first, [power * (1 - 0.45 / (size << level)) for level, power in enumerate(powers)]


def _number_below(x: Array, borders: list[float]) -> Array:
    found = jnp.zeros(x.shape, jnp.int32)
    for border in borders:
        found = found + (x >= border).astype(jnp.int32)
    return found


def _by_level(level: Array, values: list[float]) -> Array:
    found = jnp.full(level.shape, values[0], jnp.float32)
    for at, value in enumerate(values[1:], 1):
        found = jnp.where(level >= at, jnp.float32(value), found)
    return found


@traced_once
def _encode_companded(x: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.maximum(_nearest(255 * jnp.sqrt(jnp.clip(x, 0, 1))).astype(jnp.int32), _least(x)).astype(jnp.uint8)
    return (_nearest(127 * _companded(x, 1)).astype(jnp.int32) + 127).astype(jnp.uint8)


@traced_once
def _decode_companded(codes: Array, is_positive: bool) -> Array:
    if is_positive:
        return jnp.square(codes.astype(jnp.float32) / 255)
    return _expanded((codes.astype(jnp.float32) - 127) / 127, 1)


def _companded(x: Array, by: int) -> Array:
    """Spread numbers near 0, where most are: the slope is ``1 + by`` there."""
    return (1 + by) * x / (1 + by * jnp.abs(x))


def _expanded(y: Array, by: int) -> Array:
    """Return the numbers that `_companded` has spread."""
    return y / (1 + by - by * jnp.abs(y))


def _nearest(x: Array) -> Array:
    return jnp.floor(x + 0.5)  # kernels on GPUs know no jnp.round


@traced_once
def _encode_fp8(x: Array, is_positive: bool) -> Array:
    # Roots of second moments have fewer magnitudes.
    x = jnp.maximum(jnp.sqrt(jnp.clip(x, 0, 1)), _LEAST_FP8 * _least(x)) if is_positive else x
    return (x * _MOST_FP8).astype(jnp.float8_e4m3fn)


@traced_once
def _decode_fp8(codes: Array, is_positive: bool) -> Array:
    x = codes.astype(jnp.float32) / _MOST_FP8
    return jnp.square(x) if is_positive else x


@traced_once
def _encode_4bit(x: Array, is_positive: bool) -> Array:
    if is_positive:  # sixteenths of roots, without 0
        codes = jnp.clip(_nearest(16 * jnp.sqrt(jnp.clip(x, 0, 1))), 1, 16) - 9
    else:
        codes = _nearest(7 * _companded(x, 2))
    return codes.astype(jnp.int32).astype(jnp.int4)  # unsigned numbers of 4 bits cannot be stored in checkpoints


@traced_once
def _decode_4bit(codes: Array, is_positive: bool) -> Array:
    found = codes.astype(jnp.int32).astype(jnp.float32)
    return jnp.square((found + 9) / 16) if is_positive else _expanded(found / 7, 2)


FORMATS = {
    each.name: each
    for each in (
        StateFormat(name="8bit", block=256, codes=jnp.uint8, encode=_encode_dynamic, decode=_decode_dynamic),
        StateFormat(name="companded", block=128, codes=jnp.uint8, encode=_encode_companded, decode=_decode_companded),
        StateFormat(name="fp8", block=256, codes=jnp.float8_e4m3fn, encode=_encode_fp8, decode=_decode_fp8),
        StateFormat(name="4bit", block=64, codes=jnp.int4, encode=_encode_4bit, decode=_decode_4bit),
    )
}
"""By name; ``bfloat16`` is a dtype, and needs no scales."""
