"""Quantisation formats as data: the meaning of a code, and the number of weights that share a scale.

Codes are stored in an array of the weight's own shape, in a JAX dtype that XLA stores packed (4 bits take 4). Code that
slices, shards or streams a weight therefore does the same to its codes. bitsandbytes stores two neighbours of a row in
a byte. To separate them, a TPU would have to interleave lanes. Compiled for a v5e, the forward and backward pass of a
layer took 2.5 times the cycles of bfloat16 with bytes. It took 1.1 times with XLA's own 4-bit arrays.

Every code is an integer. FP8 codes are the bits of the number, so that a selection of floating-point leaves for
training never includes a code.

Sources: Dettmers et al., "QLoRA" (arXiv:2305.14314), for nf4 and double quantisation; Micikevicius et al., "FP8 Formats
for Deep Learning" (arXiv:2209.05433); Open Compute Project, "OCP Microscaling Formats" 1.0, for mxfp4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core import ConfigError, check_choice, is_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One format of quantised weights."""

    name: str
    """Name of the format, such as ``nf4``."""
    codes: Any
    """Dtype of the codes."""
    block: int
    """Neighbours in a row that share a scale; 0: the whole row."""
    scales: Any
    """Dtype of the scales, before double quantisation."""
    table: tuple[float, ...] = ()
    """The number that each code stands for, relative to its scale; empty where the code itself is a number."""
    largest: float = 1.0
    """The number, relative to the scale, that stores the largest of a block."""
    double: bool = False
    """Whether scales are quantised again, to 8-bit codes with nested scales."""


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))

LARGEST_BLOCK = 2**16
"""Most neighbours in a row that can share a scale; a whole row may be longer."""

FORMATS = {
    form.name: form
    for form in (
        Format(name="nf4", codes=jnp.uint4, block=64, scales=jnp.float32, table=NF4_VALUES, double=True),
        Format(name="int8", codes=jnp.int8, block=0, scales=jnp.float32, largest=127.0),
        Format(name="int4", codes=jnp.int4, block=32, scales=jnp.bfloat16, largest=7.0),
        Format(name="fp8", codes=jnp.uint8, block=0, scales=jnp.float32, largest=448.0),
        Format(name="mxfp4", codes=jnp.uint4, block=32, scales=jnp.uint8, table=E2M1_VALUES, largest=6.0),
    )
}
"""Formats by name."""


def format_named(name: str, block: int | None = None) -> Format:
    """Return a format, with another block size if given.

    Args:
        name: of `FORMATS`.
        block: neighbours in a row that share a scale, a multiple of 8 up to 65,536; None for the format's own, 0 for
            the whole row.

    Raises:
        ConfigError: for an unknown name, or a block size that the format does not support.
    """
    check_choice(f"{name!r} is not a quantisation format", name, tuple(FORMATS), hint="QLoRA uses nf4")
    form = FORMATS[name]
    if block is None:
        return form
    is_fixed = name == "mxfp4"
    is_size = is_count(block, least=0) and block % 8 == 0 and block <= LARGEST_BLOCK
    if not is_size or (is_fixed and block != form.block):
        raise ConfigError(
            f"block: {block!r} is not a block size of {name}",
            expected=f"{form.block}" if is_fixed else "a multiple of 8 up to 65,536, or 0 for whole rows",
            got=repr(block),
            hint=f"leave it out for {form.block or 'whole rows'}",
        )
    return dataclasses.replace(form, block=int(block))
