"""Schemas of quantisation settings in files. This imports pydantic: only functions that read files import it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_Name = Annotated[str, Field(max_length=200)]
_Block = Annotated[int, Field(ge=8, le=2**16)]
_Axis = Annotated[int, Field(ge=1, le=2**24)]


class _Part(BaseModel):
    """Strict like the other schemas. Other fields are ignored: they describe kernels or how weights were quantised."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


class QuantizedNumbers(_Part):
    """Storage of weights according to compressed-tensors."""

    num_bits: int = 8
    type: _Name = "float"
    strategy: _Name | None = None
    symmetric: bool = True
    block_structure: Annotated[list[_Block], Field(min_length=2, max_length=2)] | None = None


class QuantizedGroup(_Part):
    """Group of modules that compressed-tensors stores in the same way."""

    weights: QuantizedNumbers | None = None
    format: _Name | None = None


class QuantizationFile(_Part):
    """``quantization_config`` of `config.json`, of any quantisation software."""

    quant_method: _Name | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    fmt: _Name = "e4m3"
    weight_block_size: Annotated[list[_Block], Field(min_length=2, max_length=2)] | None = None
    format: _Name | None = None
    config_groups: Annotated[dict[str, QuantizedGroup], Field(max_length=1000)] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class QuantState(_Part):
    """JSON in a tensor ``quant_state.bitsandbytes__nf4``."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[_Axis], Field(min_length=2, max_length=2)]
    nested_blocksize: Literal[256] | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: Annotated[float, Field(ge=-3e38, le=3e38)] | None = None
