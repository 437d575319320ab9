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
        i, count, start = np.arange(2**decade + 1), 2**decade, float(np.float32(0.1))
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        bounds = np.where(2 * i < count + 1, start + step * i, 1 - step * (count - i)).astype(np.float32)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        positive += (np.float32(10.0 ** (decade - _DECADES + 1)) * means).tolist()
    return np.asarray([*(-value for value in reversed(positive)), 0.0, *positive, 1.0], np.float32)


def quantize_scales(scales: Float[Array, "*stack O N"]) -> tuple[UInt8[Array, "*stack O N"], Array, Array]:
    """Quantise float32 scales to codes of the same shape, nested scales [..., nested] and their mean [...].

    A scale that is not finite is left out of the mean. Its nested scale becomes NaN, because no code stands for NaN.
    """
    flat = scales.reshape(*scales.shape[:-2], -1)
    mean = jnp.mean(flat, axis=-1)
    mean = jnp.where(jnp.isfinite(mean), mean, _mean_of_finite(flat))
    return *quantize_around_mean(scales, mean), mean


def _mean_of_finite(flat: Float[Array, "*stack N"]) -> Float[Array, "*stack"]:
    """Return the mean of the finite numbers, whose sum may be too large for float32."""
    is_finite = jnp.isfinite(flat)
    flat = jnp.where(is_finite, flat, 0)
    factor = overflow_factor(jnp.max(flat, axis=-1))
    total, count = jnp.sum(flat * factor[..., None], axis=-1), jnp.sum(is_finite, axis=-1)
    return total / jnp.maximum(count, 1).astype(jnp.float32) / factor


def overflow_factor(sizes: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return powers of two that keep sums and inverses of large numbers in float32: 1 for sizes up to 2⁶⁴."""
    return jnp.where(sizes > _LARGE, 1 / _LARGE, 1.0).astype(jnp.float32)


def quantize_around_mean(scales: Float[Array, "*stack O N"], mean: Array) -> tuple[UInt8[Array, "*stack O N"], Array]:
    """Quantise the distance of scales from a mean, bit for bit as bitsandbytes does.

    On GPUs, and in PyTorch, bitsandbytes takes the nearest code, as here. Its build for CPUs first rounds a distance to
    one of 65,536 numbers: there fewer than one code in 200 is the neighbouring one, and a zero here is 2.1e-5 there.
    The last digits of the mean depend on the order of its sum, which in PyTorch depends on processor and threads.
    """
    *stack, out, num_blocks = scales.shape
    shifted = scales.reshape(*stack, out * num_blocks) - mean[..., None]
    num_nested = math.ceil(out * num_blocks / NESTED_BLOCK)
    padding = num_nested * NESTED_BLOCK - out * num_blocks
    blocks = jnp.pad(shifted, ((0, 0),) * len(stack) + ((0, padding),)).reshape(*stack, num_nested, NESTED_BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    factor = overflow_factor(absmax)
    codes = _nearest_codes(blocks * factor[..., None] * (1 / jnp.where(absmax > 0, absmax * factor, 1))[..., None])
    # A maximum may ignore NaN, as XLA's does on a CPU.
    absmax = jnp.where(jnp.all(jnp.isfinite(blocks), axis=-1), absmax, jnp.nan)
    return codes.reshape(*stack, -1)[..., : out * num_blocks].reshape(scales.shape), absmax


def _nearest_codes(values: Array) -> Array:
    table = dynamic_map()
    bounds = (table[:-1] + table[1:]) / np.float32(2)  # rounded as in bitsandbytes; a tie takes the lower code
    return jnp.searchsorted(jnp.asarray(bounds), values).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the numbers that codes stand for, computed without a table: float32."""
    distance = codes.astype(jnp.int32) - _ZERO
    size = jnp.abs(distance)
    value = jnp.zeros(codes.shape, jnp.float32)
    for decade in range(_DECADES):
        position = (size - 2**decade).astype(jnp.float32)
        means = 0.1 + 0.9 * (position + 0.5) / 2**decade
        value = jnp.where(size >= 2**decade, 10.0 ** (decade - _DECADES + 1) * means, value)
    return jnp.where(size > _ZERO, 1.0, value) * jnp.sign(distance).astype(jnp.float32)


def dequantize_scales(codes: Array, nested_scales: Array, offset: Array) -> Float[Array, "*stack O N"]:
    """Return the float32 scales of whole matrices from codes [..., out, blocks] and nested scales [..., nested]."""
    *_, out, num_blocks = codes.shape
    flat = jnp.repeat(nested_scales, NESTED_BLOCK, axis=-1)[..., : out * num_blocks].reshape(codes.shape)
    return decode(codes) * flat + offset[..., None, None]


def dequantize_row_scales(codes: Array, nested_scales: Array, offset: Array, ids: Array) -> Float[Array, "*ids N"]:
    """Return the scales of the rows `ids` of one matrix from their codes [*ids, blocks]."""
    num_blocks = codes.shape[-1]
    block_indices = jnp.arange(num_blocks).reshape((1,) * ids.ndim + (num_blocks,))
    # Nested blocks run over the whole matrix, row by row, so one row may use several nested scales.
    nested_indices = (ids[..., None] * num_blocks + block_indices) // NESTED_BLOCK
    return decode(codes) * nested_scales[nested_indices] + offset
