"""Sampling of the next token from logits.

Shapes: B rows, V vocabulary.

Sources: Holtzman et al., "The Curious Case of Neural Text Degeneration" (arXiv:1904.09751), for top-p; Nguyen et al.,
"Turning Up the Heat: Min-p Sampling" (arXiv:2407.01082); Keskar et al., "CTRL" (arXiv:1909.05858), for the repetition
penalty. The order is that of transformers: penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..core import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling the next token.

    Raises:
        ConfigError: for a value out of range.

    Examples:
        >>> Sampling(temperature=0).is_greedy
        True
    """

    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token."""
    top_k: int = 0
    """Keep only this number of most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this cumulative probability, including the token that reaches it."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or in the answer so far."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (0 <= self.temperature < math.inf, "a finite number >= 0"),
            "top_k": (self.top_k >= 0, "an integer >= 0, 0 for all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number above 0, at most 1"),
            "min_p": (0 <= self.min_p <= 1, "a number from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a finite number above 0"),
        }
        for name, (is_valid, expected) in checks.items():
            if not is_valid:
                raise ConfigError(
                    f"{name} is out of range",
                    expected=expected,
                    got=getattr(self, name),
                    hint="use temperature 0 for the most likely token, whatever the other settings",
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0


class Knobs(NamedTuple):
    """Values of a `Sampling` as arrays, so that other values need no recompilation."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array


class SamplingSwitches(NamedTuple):
    """Static switches of the program: sorting a vocabulary costs more than one layer of a small model."""

    filters: bool
    """Whether top-k, top-p or min-p is in use."""
    penalises: bool
    """Whether the repetition penalty is in use."""


def knobs_of(sampling: Sampling) -> tuple[SamplingSwitches, Knobs]:
    """Split a `Sampling` into static switches and traced values."""
    settings = sampling
    filters = not settings.is_greedy and (settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0)
    knobs = Knobs(*(jnp.float32(getattr(settings, name)) for name in Knobs._fields))
    return SamplingSwitches(filters, settings.repetition_penalty != 1), knobs._replace(top_k=jnp.int32(settings.top_k))


def choose(
    logits_BV: Float[Array, "B V"],
    keys_B: Array,
    seen_BV: Bool[Array, "B V"] | None,
    switches: SamplingSwitches,
    knobs: Knobs,
) -> Int[Array, "B"]:
    """Choose a token for each row with the row's random key."""
    if seen_BV is not None:
        penalty = knobs.repetition_penalty
        logits_BV = jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)
    if switches.filters:
        logits_BV = _filter_logits(logits_BV, knobs)
    # Gumbel-max: argmax(logits / T + g) samples from softmax(logits / T). Multiplied by T it also covers T = 0, greedy.
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, logits_BV.shape[1:]))(keys_B)
    return jnp.argmax(logits_BV + knobs.temperature * noise_BV, axis=-1).astype(jnp.int32)


def _filter_logits(logits_BV: Array, knobs: Knobs) -> Array:
    """Set the logits of excluded tokens to minus infinity."""
    size = logits_BV.shape[-1]
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    rank_V = jnp.arange(size)[None]
    top_k = jnp.where(knobs.top_k > 0, knobs.top_k, size)
    scaled_BV = jnp.where(rank_V < top_k, sorted_BV, -jnp.inf) / knobs.temperature
    probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
    cumulative_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    mask_BV = (rank_V < top_k) & (cumulative_BV < knobs.top_p) & (probs_BV >= knobs.min_p * probs_BV[:, :1])
    mask_BV = mask_BV | (rank_V == 0)  # whatever rounding does, the most likely token stays
    threshold_B1 = jnp.min(jnp.where(mask_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= threshold_B1, logits_BV, -jnp.inf)
