"""What `adapter_config.json` may say; see `lowtide.core.validate`.

This module needs pydantic, which takes a quarter of a second to import: only functions that read files import it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Rank = Annotated[int, Field(ge=1, le=2**20)]
Alpha = Annotated[float, Field(ge=-1e9, le=1e9)]
Pattern = Annotated[str, Field(max_length=2**18)]
Names = Pattern | list[Pattern]


class AdapterFile(BaseModel):
    """The options that Lowtide reads, strictly: text is no number, a number is no truth value, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())

    peft_type: str = "LORA"
    r: Rank
    """Rank of modules that no pattern names."""
    lora_alpha: Alpha
    """Alpha of modules that no pattern names."""
    rank_pattern: dict[Pattern, Rank] | None = None
    """Other ranks, by regular expression for the end of a module's name."""
    alpha_pattern: dict[Pattern, Alpha] | None = None
    """Other alphas, likewise."""
    use_rslora: bool | None = None
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    target_modules: Names | None = None
    """Which modules have an adapter; None when the file does not say."""
    exclude_modules: Names | None = None
    """Which of them have none after all."""
    lora_dropout: Annotated[float, Field(ge=0, le=1)] | None = None
    bias: str | None = "none"
    init_lora_weights: Any = True
