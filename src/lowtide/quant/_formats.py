"""The formats as data: what a code means, and how many weights share a scale.

Codes stand in an array of the weight's own shape, of a dtype of JAX that XLA stores packed (4 bits take 4), so whoever
slices, divides or streams a weight does the same to its codes. bitsandbytes stores two neighbours of a row in a byte;
to take those apart, a TPU would have to interleave lanes: compiled for a v5e, the forward and backward pass of a layer
took 2.5 times the cycles of bfloat16 with bytes, and 1.1 times with XLA's own 4-bit arrays.

Every code is an integer, also those of FP8, which are its bits: nothing that selects floating-point leaves to train
takes a code for one.

Sources: Dettmers et al., "QLoRA" (arXiv:2305.14314), for nf4 and scales of scales; Micikevicius et al., "FP8 Formats
for Deep Learning" (arXiv:2209.05433); Open Compute Project, "OCP Microscaling Formats" 1.0, for mxfp4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core import ConfigError, check_choice, is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One way to store weights in few bits."""

    name: str
    """What users call it."""
    codes: Any
    """Dtype of the codes."""
    block: int
    """Neighbours of a row that share a scale; 0: the whole row."""
    scales: Any
    """Dtype of the scales, before they are quantised themselves."""
    table: tuple[float, ...] = ()
    """What each code stands for, times its scale; empty where a code is a number itself."""
    largest: float = 1.0
    """The number that the largest of a block is stored as."""
    double: bool = False
    """Whether scales are stored as 8-bit codes with scales of their own."""


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))

LARGEST_BLOCK = 2**16
"""Neighbours of a row that can share a scale; more can as a whole row."""

FORMATS = {
    each.name: each
    for each in (
        Format(name="nf4", codes=jnp.uint4, block=64, scales=jnp.float32, table=NF4_VALUES, double=True),
        Format(name="int8", codes=jnp.int8, block=0, scales=jnp.float32, largest=127.0),
        Format(name="int4", codes=jnp.int4, block=32, scales=jnp.bfloat16, largest=7.0),
        Format(name="fp8", codes=jnp.uint8, block=0, scales=jnp.float32, largest=448.0),
        Format(name="mxfp4", codes=jnp.uint4, block=32, scales=jnp.uint8, table=E2M1_VALUES, largest=6.0),
    )
}
"""By name."""


def format_named(name: str, block: int | None = None) -> Format:
    """Return a format, with other blocks if asked for.

    Args:
        name: of `FORMATS`.
        block: neighbours of a row that share a scale, a multiple of 8 up to 65,536; None for the format's own, 0 for
            the whole row.

    Raises:
        ConfigError: for a name that is unknown, and blocks that the format does not have.
    """
    check_choice("no format to quantise in", name, tuple(FORMATS), hint="nf4 is that of QLoRA")
    found = FORMATS[name]
    if block is None:
        return found
    is_fixed = name == "mxfp4"
    is_size = is_count(block, least=0) and block % 8 == 0 and block <= LARGEST_BLOCK
    if not is_size or (is_fixed and block != found.block):
        raise ConfigError(
            f"block: {block!r} is no size of the blocks of {name}",
            expected=f"{found.block}" if is_fixed else "a multiple of 8 up to 65,536, or 0 for whole rows",
            got=repr(block),
            hint=f"leave it out for {found.block or 'whole rows'}",
        )
    return dataclasses.replace(found, block=int(block))
