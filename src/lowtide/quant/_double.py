"""Double quantisation as in bitsandbytes: 8-bit codes of a scale's distance from the mean.

The scales of one matrix are taken row by row, and 256 of them share a nested scale. A code stands for one of 256
numbers between -1 and 1 whose spacing grows with their size: within a power of ten, 2ⁱ of them are evenly spaced.
Decoding computes these numbers instead of looking them up, because gathers are slow on a TPU.

Sources: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (arXiv:1511.04561); Dettmers et al., "QLoRA"
(arXiv:2305.14314), section 3.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

NESTED_BLOCK = 256
_DECADES = 7
_ZERO = 127
_LARGE = 2.0**64


@functools.cache
def dynamic_map() -> np.ndarray:
    """Return the numbers that the 256 codes stand for, ascending, float32."""
    positive: list[float] = []
    for decade in range(_DECADES):
        # From both ends to the middle, each rounded once, as PyTorch spaces float32: the last digit can change a code.
        i, number, start = np.arange(2**decade + 1), 2**decade, float(np.float32(0.1))
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(number))
        bounds = np.where(2 * i < number + 1, start + step * i, 1 - step * (number - i)).astype(np.float32)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        positive += (np.float32(10.0 ** (decade - _DECADES + 1)) * means).tolist()
    return np.asarray([*(-value for value in reversed(positive)), 0.0, *positive, 1.0], np.float32)


def nested(scales: Float[Array, "*stack O N"]) -> tuple[UInt8[Array, "*stack O N"], Array, Array]:
    """Quantise the scales of matrices.

    Args:
        scales: float32, [..., out, blocks].

    Returns:
        Codes of the same shape; nested scales [..., number]; the mean that was subtracted, [...]. A scale that is not
        finite is left out of the mean, and its nested scale becomes NaN, because no code stands for NaN.
    """
    flat = scales.reshape(*scales.shape[:-2], -1)
    mean = jnp.mean(flat, axis=-1)
    mean = jnp.where(jnp.isfinite(mean), mean, _mean_of_finite(flat))
    return *around(scales, mean), mean


def _mean_of_finite(flat: Float[Array, "*stack N"]) -> Float[Array, "*stack"]:
    """Return the mean of the finite numbers, whose sum may be too large for float32."""
    is_finite = jnp.isfinite(flat)
    flat = jnp.where(is_finite, flat, 0)
    factor = shrinking(jnp.max(flat, axis=-1))
    total, count = jnp.sum(flat * factor[..., None], axis=-1), jnp.sum(is_finite, axis=-1)
    return total / jnp.maximum(count, 1).astype(jnp.float32) / factor


def shrinking(sizes: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return powers of two that keep sums and inverses of large numbers in float32: 1 for sizes up to 2⁶⁴."""
    return jnp.where(sizes > _LARGE, 1 / _LARGE, 1.0).astype(jnp.float32)


def around(scales: Float[Array, "*stack O N"], mean: Array) -> tuple[UInt8[Array, "*stack O N"], Array]:
    """Quantise the distance of scales from a mean, bit for bit as bitsandbytes does.

    On GPUs, and in PyTorch, bitsandbytes takes the nearest code, as here. Its build for CPUs first rounds a distance to
    one of 65,536 numbers: there fewer than one code in 200 is the neighbouring one, and a zero here is 2.1e-5 there.
    The last digits of the mean depend on the order of its sum, which in PyTorch depends on processor and threads.

    Args:
        scales: float32, [..., out, blocks].
        mean: [...].

    Returns:
        Codes of the same shape; nested scales [..., number].
    """
    *stack, out, number = scales.shape
    shifted = scales.reshape(*stack, out * number) - mean[..., None]
    count = math.ceil(out * number / NESTED_BLOCK)
    short = count * NESTED_BLOCK - out * number
    blocks = jnp.pad(shifted, ((0, 0),) * len(stack) + ((0, short),)).reshape(*stack, count, NESTED_BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    factor = shrinking(largest)
    codes = _nearest(blocks * factor[..., None] * (1 / jnp.where(largest > 0, largest * factor, 1))[..., None])
    # A maximum may ignore NaN, as XLA's does on a CPU.
    largest = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1), largest, jnp.nan)
    return codes.reshape(*stack, -1)[..., : out * number].reshape(scales.shape), largest


def _nearest(values: Array) -> Array:
    table = dynamic_map()
    bounds = (table[:-1] + table[1:]) / np.float32(2)  # rounded as in bitsandbytes; a tie takes the lower code
    return jnp.searchsorted(jnp.asarray(bounds), values).astype(jnp.uint8)


def decoded(codes: UInt8[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the numbers that codes stand for, computed without a table: float32."""
    distance = codes.astype(jnp.int32) - _ZERO
    size = jnp.abs(distance)
    value = jnp.zeros(codes.shape, jnp.float32)
    for decade in range(_DECADES):
        inside = (size - 2**decade).astype(jnp.float32)
        means = 0.1 + 0.9 * (inside + 0.5) / 2**decade
        value = jnp.where(size >= 2**decade, 10.0 ** (decade - _DECADES + 1) * means, value)
    return jnp.where(size > _ZERO, 1.0, value) * jnp.sign(distance).astype(jnp.float32)


def unnested(codes: Array, nested_scales: Array, offset: Array) -> Float[Array, "*stack O N"]:
    """Return the scales of whole matrices, float32.

    Args:
        codes: [..., out, blocks].
        nested_scales: [..., number].
        offset: the mean, [...].
    """
    *_, out, number = codes.shape
    flat = jnp.repeat(nested_scales, NESTED_BLOCK, axis=-1)[..., : out * number].reshape(codes.shape)
    return decoded(codes) * flat + offset[..., None, None]


def unnested_rows(codes: Array, nested_scales: Array, offset: Array, ids: Array) -> Float[Array, "*ids N"]:
    """Return the scales of some rows of one matrix.

    Args:
        codes: of the rows, [*ids, blocks].
        nested_scales: of the matrix.
        offset: the mean of the matrix.
        ids: indices of the rows.
    """
    number = codes.shape[-1]
    inside = jnp.arange(number).reshape((1,) * ids.ndim + (number,))
    # Nested blocks run over the whole matrix, row by row, so one row may use several nested scales.
    at = (ids[..., None] * number + inside) // NESTED_BLOCK
    return decoded(codes) * nested_scales[at] + offset
