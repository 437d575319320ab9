"""Quantise weights to codes and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._double import overflow_factor, quantize_scales
from ._formats import Format
from ._weight import QuantizedWeight, scales_as_float32

_MIN_NORMAL = 2.0**-126
_E8M0_NAN = 255


class Codes(NamedTuple):
    """Quantised rows of a weight, before double quantisation of the scales."""

    codes: Array
    """[..., out, in]."""
    scales: Array
    """[..., out, blocks]."""


def encode(weight: Float[Array, "*stack out in"], form: Format) -> Codes:
    """Quantise rows, each independently of the others, so that a weight may come in parts.

    A block with a number that is not finite gets NaN as its scale.
    """
    weight = weight.astype(jnp.float32)
    *leading, width = weight.shape
    block = min(form.block or width, width)
    num_blocks = -(-width // block)
    padded = jnp.pad(weight, ((0, 0),) * len(leading) + ((0, num_blocks * block - width),))
    blocks = padded.reshape(*leading, num_blocks, block)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    is_finite = jnp.all(jnp.isfinite(blocks), axis=-1)  # a maximum may ignore NaN, as XLA's does on a CPU
    if form.scales == jnp.uint8:
        # The exponent comes from the bits, because a computed logarithm of a power of two may be too small. The largest
        # number of a block is then 4 to 8 times the scale, and the largest code stands for 6.
        exponents = (jax.lax.bitcast_convert_type(absmax, jnp.int32) >> 23) - 2
        scales = jnp.where(is_finite, jnp.clip(exponents, 1, 254), _E8M0_NAN).astype(jnp.uint8)
        divisor = scales_as_float32(scales, form.name)
    else:
        scales = jnp.where(is_finite, absmax / form.largest, jnp.nan).astype(form.scales)
        divisor = scales.astype(jnp.float32)
    if form.name == "nf4":  # multiplied by the inverse as in bitsandbytes: near a border between codes it matters
        factor = overflow_factor(divisor)
        inverse = 1 / (jnp.maximum(divisor, _MIN_NORMAL) * factor)
        scaled = jnp.clip(blocks * factor[..., None] * inverse[..., None], -1, 1)
    else:
        scaled = blocks / jnp.where(divisor > 0, divisor, 1)[..., None]
    codes = _round_to_codes(scaled, form).reshape(*leading, num_blocks * block)[..., :width]
    return Codes(codes, scales)


def _round_to_codes(scaled: Array, form: Format) -> Array:
    if form.table:
        code_of = {value: code for code, value in reversed([*enumerate(form.table)])}  # the first of two zeros
        values = sorted(code_of)
        index = jnp.zeros(scaled.shape, jnp.int32)
        for low, high in zip(values, values[1:], strict=False):
            midpoint = (np.float32(low) + np.float32(high)) / np.float32(2)
            index += (scaled > midpoint).astype(jnp.int32)
        codes = jnp.asarray([code_of[value] for value in values], jnp.int32)[index]
        return codes.astype(jnp.uint8).astype(form.codes)
    if form.name == "fp8":
        clipped = jnp.clip(scaled, -form.largest, form.largest)
        return jax.lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.clip(jnp.round(scaled), -form.largest, form.largest).astype(jnp.int8).astype(form.codes)


def assemble_node(codes: Any, scales: Any, form: Format, dtype: Any) -> QuantizedWeight:
    """Make the node of whole matrices from codes [..., out, in] and scales [..., out, blocks].

    `dtype` is that of the weight. The scales are quantised again where the format has double quantisation.
    """
    name = jnp.dtype(dtype).name
    if not form.double:
        return QuantizedWeight(codes, scales, None, None, form.name, form.block, name)
    scale_codes, nested_scales, offset = quantize_scales(scales)
    return QuantizedWeight(codes, scale_codes, nested_scales, offset, form.name, form.block, name)
