"""The supported model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import ConfigError
from ._family import Family
from ._gemma import GEMMA2, GEMMA3
from ._gpt_oss import GPT_OSS
from ._llama import LLAMA
from ._mistral import MISTRAL, MIXTRAL
from ._olmo import OLMO2
from ._phi import PHI3
from ._qwen import QWEN2, QWEN3, QWEN3_MOE

if TYPE_CHECKING:
    from .._config import DecoderConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GPT_OSS)
}
"""Families by `model_type`."""


def family_of(config: DecoderConfig) -> Family:
    """Return the family that defines the names and files of a config's model.

    Raises:
        ConfigError: when ``config.family`` is not in `FAMILIES`.
    """
    if config.family not in FAMILIES:
        raise ConfigError(
            f"unknown family {config.family!r}", expected=f"one of {', '.join(FAMILIES)}", hint="check config.family"
        )
    return FAMILIES[config.family]
