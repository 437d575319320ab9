"""The supported model families: one table (`Family`) for each ``model_type``, such as ``llama`` and ``gpt_oss``."""

from __future__ import annotations

from ...core import check_choice
from .._config import DecoderConfig
from . import _gemma, _llama, _qwen
from ._family import Family

FAMILIES: dict[str, Family] = {
    value.model_type: value
    for module in (_llama, _qwen, _gemma)
    for value in vars(module).values()
    if isinstance(value, Family)
}
"""Families by `model_type`."""


def family_of(config: DecoderConfig) -> Family:
    """Return the family that defines the names and files of a config's model; an unknown family raises ConfigError."""
    check_choice("family", config.family, [*FAMILIES])
    return FAMILIES[config.family]
