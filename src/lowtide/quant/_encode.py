"""Quantise weights to codes and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._double import nested, shrinking
from ._formats import Format
from ._weight import QuantizedWeight, numbers

_LEAST = 2.0**-126
_E8M0_NAN = 255


class Codes(NamedTuple):
    """Quantised rows of a weight, before double quantisation of the scales."""

    codes: Array
    """[..., out, in]."""
    scales: Array
    """[..., out, blocks]."""


def encode(weight: Float[Array, "*stack out in"], form: Format) -> Codes:
    """Quantise rows, each independently of the others, so that a weight may come in parts.

    Args:
        weight: the weight. A block with a number that is not finite gets NaN as its scale.
        form: the format.
    """
    weight = weight.astype(jnp.float32)
    *outer, inner = weight.shape
    block = min(form.block or inner, inner)
    number = -(-inner // block)
    padded = jnp.pad(weight, ((0, 0),) * len(outer) + ((0, number * block - inner),))
    blocks = padded.reshape(*outer, number, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    is_finite = jnp.all(jnp.isfinite(blocks), axis=-1)  # a maximum may ignore NaN, as XLA's does on a CPU
    if form.scales == jnp.uint8:
        # The exponent comes from the bits, because a computed logarithm of a power of two may be too small. The largest
        # number of a block is then 4 to 8 times the scale, and the largest code stands for 6.
        exponents = (jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 2
        scales = jnp.where(is_finite, jnp.clip(exponents, 1, 254), _E8M0_NAN).astype(jnp.uint8)
        divisor = numbers(scales, form.name)
    else:
        scales = jnp.where(is_finite, largest / form.largest, jnp.nan).astype(form.scales)
        divisor = scales.astype(jnp.float32)
    if form.name == "nf4":  # multiplied by the inverse as in bitsandbytes: near a border between codes it matters
        factor = shrinking(divisor)
        inverse = 1 / (jnp.maximum(divisor, _LEAST) * factor)
        scaled = jnp.clip(blocks * factor[..., None] * inverse[..., None], -1, 1)
    else:
        scaled = blocks / jnp.where(divisor > 0, divisor, 1)[..., None]
    codes = _rounded(scaled, form).reshape(*outer, number * block)[..., :inner]
    return Codes(codes, scales)


def _rounded(scaled: Array, form: Format) -> Array:
    if form.table:
        code_of = {value: code for code, value in reversed([*enumerate(form.table)])}  # the first of two zeros
        values = sorted(code_of)
        place = jnp.zeros(scaled.shape, jnp.int32)
        for low, high in zip(values, values[1:], strict=False):
            border = (np.float32(low) + np.float32(high)) / np.float32(2)
            place += (scaled > border).astype(jnp.int32)
        codes = jnp.asarray([code_of[value] for value in values], jnp.int32)[place]
        return codes.astype(jnp.uint8).astype(form.codes)
    if form.name == "fp8":
        clipped = jnp.clip(scaled, -form.largest, form.largest)
        return jax.lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.clip(jnp.round(scaled), -form.largest, form.largest).astype(jnp.int8).astype(form.codes)


def assembled(codes: Any, scales: Any, form: Format, dtype: Any) -> QuantizedWeight:
    """Make the node of whole matrices; the scales are quantised again where the format has double quantisation.

    Args:
        codes: [..., out, in].
        scales: [..., out, blocks].
        form: the format.
        dtype: of the weight that the node replaces.
    """
    name = jnp.dtype(dtype).name
    if not form.double:
        return QuantizedWeight(codes, scales, None, None, form.name, form.block, name)
    codes_of_scales, nested_scales, offset = nested(scales)
    return QuantizedWeight(codes, codes_of_scales, nested_scales, offset, form.name, form.block, name)
