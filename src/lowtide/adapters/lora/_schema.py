"""Schemas of `adapter_config.json`; see `lowtide.core.validate`.

Importing pydantic takes a quarter of a second, so only functions that read files import this module.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Rank = Annotated[int, Field(ge=1, le=2**20)]
Alpha = Annotated[float, Field(ge=-1e9, le=1e9)]
Pattern = Annotated[str, Field(max_length=2**18)]
Name = Annotated[str, Field(min_length=1, max_length=2**18)]
Names = Pattern | list[Pattern]
Axes = Annotated[int, Field(ge=1, le=32)]
Layer = Annotated[int, Field(ge=0, le=2**20)]
Word = Annotated[str, Field(pattern=r"^\w*$", max_length=2**10)]


class CommonFile(BaseModel):
    """Options of every kind of adapter.

    Types are strict: text is not a number, a number is not a boolean, and numbers are finite.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())

    peft_type: str = "LORA"
    target_modules: Names | None = None
    """Modules that have an adapter; None when the file has no such option."""
    exclude_modules: Names | None = None
    """Modules among `target_modules` that have no adapter."""
    layers_to_transform: Layer | list[Layer] | None = None
    """Layers that have an adapter; None for all."""
    layers_pattern: Word | list[Word] | None = None
    """Segment before the index of a layer in a module's name; None for any segment."""
    modules_to_save: Annotated[list[Name], Field(max_length=2**14)] | None = None
    """Ends of the names of modules of which all parameters train."""
    ensure_weight_tying: bool | None = None
    """Whether an embedding that is also the head stays tied to it."""


class AdapterFile(CommonFile):
    """The options of LoRA that Lowtide reads."""

    r: Rank
    """Rank of modules that no pattern names."""
    lora_alpha: Alpha
    """Alpha of modules that no pattern names."""
    rank_pattern: dict[Pattern, Rank] | None = None
    """Other ranks, by regular expression for the end of a module's name."""
    alpha_pattern: dict[Pattern, Alpha] | None = None
    """Other alphas, in the form of `rank_pattern`."""
    target_parameters: Annotated[list[Name], Field(max_length=2**14)] | None = None
    """Ends of the names of parameters that have an adapter; only parameters of experts are supported."""
    use_rslora: bool | None = None
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""
    use_dora: bool | None = None
    """Whether the adapter has magnitudes (DoRA)."""
    lora_dropout: Annotated[float, Field(ge=0, le=1)] | None = None
    bias: str | None = "none"
    init_lora_weights: Any = True
    lowtide_kernels: dict[Pattern, Annotated[list[Axes], Field(min_length=2, max_length=2)]] | None = None
    """Lowtide's own key: for each module that is not a matrix, the numbers of row axes and column axes."""


class IA3File(CommonFile):
    """The options of (IA)³ that Lowtide reads."""

    feedforward_modules: Names | None = None
    """Modules whose inputs are scaled."""


class VeraFile(CommonFile):
    """The options of VeRA that Lowtide reads."""

    r: Rank
    save_projection: bool = True
    """Whether the projections are in the file."""
    vera_dropout: Annotated[float, Field(ge=0, le=1)] | None = None
    bias: str | None = "none"
