"""Rotary position embeddings: frequencies, their scaling beyond the length of pretraining, and the rotation.

Shapes: B batch, T sequence, N heads, H head, R the rotated part of a head.

Sources: Su et al., "RoFormer" (arXiv:2104.09864). Llama 3.1's reference code for `llama3`. Peng et al., "YaRN"
(arXiv:2309.00071), which also describes the dynamic rule. Ding et al., "LongRoPE" (arXiv:2402.13753).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._config import DecoderConfig, RopeScaling


def rotary(
    config: DecoderConfig,
    positions_BT: Int[Array, "B T"],
    is_sliding: Array | bool = False,
    lengths_BT: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T 1 R/2"], Float[Array, "B T 1 R/2"]]:
    """Return the cosines and sines that rotate queries and keys, in float32.

    Layers with `is_sliding` may have separate frequencies (`local_rope_theta`). `positions_BT` are positions in
    documents, and `lengths_BT` is the result of `document_lengths`.
    """
    freq, scale = frequencies(config, lengths_BT)
    factor: Array | float = scale
    if config.local_rope_theta is not None:
        local_freq = _base_frequencies(config.local_rope_theta, config.rotary_dim)
        freq, factor = jnp.where(is_sliding, local_freq, freq), jnp.where(is_sliding, 1.0, scale)
    freq = freq[:, :, None] if freq.ndim == 3 else freq[None, None, None]
    angles = positions_BT.astype(jnp.float32)[:, :, None, None] * freq
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BTNH: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first R dimensions of each head, in float32; the result has the dtype of the input."""
    rotary_dim = 2 * cos.shape[-1]
    first, second = jnp.split(x_BTNH[..., :rotary_dim].astype(jnp.float32), 2, axis=-1)
    output = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTNH.dtype)
    return output if rotary_dim == x_BTNH.shape[-1] else jnp.concatenate([output, x_BTNH[..., rotary_dim:]], axis=-1)


def frequencies(config: DecoderConfig, length: Int[Array, "B T"] | None) -> tuple[Float[Array, "*BT R/2"], float]:
    """Return scaled rotary frequencies, per token if they depend on `length`, and a factor for cosines and sines."""
    scaling, dim = config.rope_scaling, config.rotary_dim
    freq = _base_frequencies(config.rope_theta, dim)
    if scaling is None:
        return freq, 1.0
    match scaling.rope_type:
        case "linear":
            return freq / scaling.factor, 1.0
        case "dynamic":
            assert length is not None
            pretrained_length = config.max_position_embeddings
            effective_length = jnp.maximum(length, pretrained_length).astype(jnp.float32)
            # The base grows with the length beyond that of pretraining. Lowest frequency: theta ** -((dim - 2) / dim).
            # Multiplying the base by growth ** (dim / (dim - 2)) divides that frequency by exactly `growth`. The
            # highest frequency, 1, does not change.
            growth = scaling.factor * effective_length / pretrained_length - (scaling.factor - 1)
            return _base_frequencies(config.rope_theta * growth[..., None] ** (dim / (dim - 2)), dim), 1.0
        case "llama3":
            # Frequencies with few turns over the length of pretraining are scaled, with many kept, others blended.
            turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
            return (1 - smooth) * freq / scaling.factor + smooth * freq, 1.0
        case "yarn":
            ramp = _yarn_ramp(scaling, config.rope_theta, dim)
            # YaRN's temperature of attention: sqrt(1 / t) = 0.1 ln(factor) + 1, applied to queries and keys.
            default = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
            return freq / scaling.factor * (1 - ramp) + freq * ramp, scaling.attention_factor or default
        case "proportional":
            num_rotating = int(scaling.partial_rotary_factor * dim // 2)
            return jnp.where(jnp.arange(dim // 2) < num_rotating, freq, 0.0) / scaling.factor, 1.0
        case "longrope":
            original = scaling.original_max_position_embeddings
            assert length is not None
            batch_axes = tuple(range(length.ndim))
            freq, short, long = (
                jnp.expand_dims(jnp.asarray(values, jnp.float32), batch_axes)
                for values in (freq, scaling.short_factor, scaling.long_factor)
            )
            default = math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if scaling.factor > 1 else 1.0
            return freq / jnp.where(length[..., None] > original, long, short), scaling.attention_factor or default


def _depends_on_length(config: DecoderConfig) -> bool:
    return config.rope_scaling is not None and config.rope_scaling.rope_type in ("dynamic", "longrope")


def frequencies_change(config: DecoderConfig, lengths_B: Int[Array, "B"]) -> Array | None:
    """Return for each row whether its last token changed the rotary frequencies of earlier tokens, [B].

    `lengths_B` counts the tokens of a row, including the last one. The result is None if frequencies do not depend on
    the length.
    """
    scaling = config.rope_scaling
    if scaling is None or not _depends_on_length(config):
        return None
    if scaling.rope_type == "dynamic":
        return lengths_B > config.max_position_embeddings
    return lengths_B == scaling.original_max_position_embeddings + 1


def document_lengths(config: DecoderConfig, positions_BT: Array, segments_BT: Array | None) -> Array | None:
    """Return the length of each token's document, [B, T], if frequencies depend on it, else None.

    A document ends before a new segment or a position that does not increase. Its length is its last position plus 1.
    A maximum over the batch would be wrong: other documents and rows must not change a document's frequencies.
    """
    if not _depends_on_length(config):
        return None
    last_index, ends_BT = positions_BT.shape[1] - 1, positions_BT[:, 1:] <= positions_BT[:, :-1]
    if segments_BT is not None:
        ends_BT = ends_BT | (segments_BT[:, 1:] != segments_BT[:, :-1])
        positions_BT = jnp.broadcast_to(positions_BT, segments_BT.shape)
    ends_BT = jnp.pad(ends_BT, ((0, 0), (0, 1)), constant_values=True)
    # A reversed running minimum over the end positions finds the end of each token's own document.
    end_index_BT = jnp.where(ends_BT, jnp.arange(last_index + 1)[None], last_index)
    return jnp.take_along_axis(positions_BT, jax.lax.cummin(end_index_BT, axis=1, reverse=True), axis=1) + 1


def _base_frequencies(theta: float | Array, dim: int) -> Array:
    exponents = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return theta ** -jnp.expand_dims(exponents, tuple(range(jnp.ndim(theta) - 1)))


def _yarn_ramp(scaling: RopeScaling, theta: float, dim: int) -> Array:
    """Return the weight of the unscaled value in each blended frequency: 1 for fast rotations, 0 for slow rotations."""

    # Solve turns = length * theta ** (-2 d / dim) / (2 pi) for d, the index of the frequency.
    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    return 1 - jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
