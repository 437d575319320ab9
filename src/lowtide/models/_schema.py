"""Schemas of the files in a Hugging Face folder: types, ranges, and the fields that change the computation.

An unknown field of `config.json` is an error when it is switched on (not null, false, zero or empty). If it were
ignored, the logits would silently be wrong. pydantic takes a quarter of a second to import, so only functions that
read files import this module.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from .families import FAMILIES
from .families._family import Dropout, Factor, Fraction, Length, NumLayers, Scale, Size, Theta

_MOST_TOKENS = 2**24

TokenId = Annotated[int, Field(ge=0, lt=_MOST_TOKENS)]


class _File(BaseModel):
    """Strict model: no conversion between strings, numbers and booleans, and every number is finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())


class RopeEntry(_File):
    """``rope_scaling`` or ``rope_parameters``; ``type`` is the older name of ``rope_type``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Scale | None = None
    low_freq_factor: Scale | None = None
    high_freq_factor: Scale | None = None
    original_max_position_embeddings: Length | None = None
    partial_rotary_factor: Fraction | None = None
    beta_fast: Scale | None = None
    beta_slow: Scale | None = None
    truncate: bool | None = None
    attention_factor: Scale | None = None
    mscale: Factor | None = None
    mscale_all_dim: Factor | None = None
    llama_4_scaling_beta: Factor | None = None
    short_factor: Annotated[list[Scale], Field(max_length=2**16)] | None = None
    long_factor: Annotated[list[Scale], Field(max_length=2**16)] | None = None


class ConfigFile(_File):
    """Fields of `config.json` that are read for every family; `config_schema` adds the fields of single families."""

    if TYPE_CHECKING:  # a type checker does not know the fields that `config_schema` adds

        def __getattr__(self, name: str) -> Any: ...

    architectures: Annotated[list[str], Field(max_length=16)] | str | None = None
    model_type: str | None = None
    vocab_size: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str | None = None
    rope_theta: Theta | None = None
    rope_scaling: RopeEntry | None = None
    rope_parameters: RopeEntry | None = None
    local_rope: RopeEntry = RopeEntry()
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] = 1e-6
    tie_word_embeddings: bool | None = None
    attention_dropout: Dropout | None = None
    max_position_embeddings: Length = 2048
    bos_token_id: TokenId | list[TokenId] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    quantization_config: Any = None


@functools.cache
def config_schema() -> type[ConfigFile]:
    """Return the schema of `config.json` with the fields of all families; these fields may be missing or null."""
    # A field of pydantic cannot have a name with a leading underscore.
    fields: dict[str, Any] = {
        f"old{name}" if name.startswith("_") else name: (field_type | None, Field(default=None, alias=name))
        for family in FAMILIES.values()
        for name, field_type in family.field_types.items()
    }
    return create_model("ConfigFile", __base__=ConfigFile, **fields)


_HARMLESS = frozenset(
    # metadata
    "architectures model_type transformers_version torch_dtype dtype name_or_path tokenizer_class finetuning_task "
    "task_specific_params id2label label2id num_labels problem_type prefix unsloth_version unsloth_fixed "
    "is_llama_config transformers.js_config license license_name "
    # initial values, losses, and settings that change the implementation but not the result
    "initializer_range use_cache pretraining_tp attn_implementation use_flash_attn gradient_checkpointing "
    "use_bfloat16 torchscript tf_legacy_loss chunk_size_feed_forward is_decoder "
    # outputs, and tokens that the decoder does not use
    "return_dict output_attentions output_hidden_states pad_token_id sep_token_id unk_token_id cls_token_id "
    "mask_token_id decoder_start_token_id "
    # lengths that a tokenizer or a server truncates to
    "max_sequence_length model_max_length max_seq_len max_length min_length "
    # text generation
    "do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens".split()
)
"""Fields that do not change a forward pass, from `LlamaConfig` and `PretrainedConfig` of transformers 4 and 5."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("silu", "swish"),
    "rope_type": ("default",),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rope_interleaved": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "position_embedding_type": ("rope", "rotary"),
    "norm_type": ("rmsnorm", "rms_norm"),
}
"""Values without effect, by field of `config.json`; such a field must be null or have one of its values."""


def unhandled(
    file: _File, known_fields: Collection[str] | None = None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> dict[str, Any]:
    """Return the fields that are switched on, may change what the model computes, and are not supported.

    `known_fields` are the fields that the family reads. None means the schema's fields, as for a section of the file.
    """
    values: dict[str, Any] = {**(file.model_extra or {})}
    harmless = _HARMLESS | {"local_rope"}
    if known_fields is not None:
        fields = type(file).model_fields
        values |= {fields[name].alias or name: getattr(file, name) for name in fields if name in file.model_fields_set}
        harmless = harmless | (set(known_fields) - set(neutral))
    if values.get("use_sliding_window") is False:  # then the window's sizes have no effect
        harmless = harmless | {"sliding_window", "max_window_layers"}
    return {
        name: value
        for name, value in values.items()
        if name not in harmless
        and (not name.startswith("_") or name == "_sliding_window_pattern")  # other private fields are ignored
        and not _is_off(name, value, neutral)
    }


def _is_off(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    if name in neutral:
        return value is None or any(
            value == allowed and (value is True) == (allowed is True) for allowed in neutral[name]
        )
    if name == "layer_types":
        return not value or all(layer_type == "full_attention" for layer_type in value)
    return not value


def _file_name(name: str) -> str:
    if not name.endswith(".safetensors") or any(c in name for c in "/\\\0") or not name.isprintable():
        raise ValueError("the name of a .safetensors file in the same folder")
    return name


ShardName = Annotated[str, Field(max_length=255), AfterValidator(_file_name)]


class IndexFile(_File):
    """`model.safetensors.index.json`: the shard of each tensor."""

    weight_map: Annotated[dict[str, ShardName], Field(min_length=1, max_length=2**20)]


class AddedTokenFile(_File):
    """A token that was added to the vocabulary."""

    id: TokenId
    content: Annotated[str, Field(max_length=2**16)]
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


# JSON has only lists, which a strict tuple field rejects.
_Piece = Annotated[tuple[str, float], Field(strict=False)]
_Pair = Annotated[tuple[str, str], Field(strict=False)]


class _TokenizerModel(_File):
    type: Literal["BPE", "WordPiece", "WordLevel", "Unigram"] | None = None
    vocab: dict[str, TokenId] | list[_Piece]
    merges: list[str | _Pair] | None = None


class TokenizerFile(_File):
    """`tokenizer.json`: types and sizes of its parts; the tokenizers library checks the rest."""

    version: str | None = None
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None
    added_tokens: list[AddedTokenFile] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: _TokenizerModel


_Name = Annotated[str, Field(max_length=200)]
_Block = Annotated[int, Field(ge=8, le=2**16)]
_Axis = Annotated[int, Field(ge=1, le=2**24)]


class _QuantizationSection(BaseModel):
    """Strict model that ignores unknown fields: they describe kernels, or how weights were quantised."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


class QuantizedNumbers(_QuantizationSection):
    """Storage of weights according to compressed-tensors."""

    num_bits: int = 8
    type: _Name = "float"
    strategy: _Name | None = None
    symmetric: bool = True
    block_structure: Annotated[list[_Block], Field(min_length=2, max_length=2)] | None = None


class QuantizedGroup(_QuantizationSection):
    """Group of modules that compressed-tensors stores in the same way."""

    weights: QuantizedNumbers | None = None
    format: _Name | None = None


class QuantizationFile(_QuantizationSection):
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


class QuantState(_QuantizationSection):
    """JSON in a tensor such as ``q_proj.weight.quant_state.bitsandbytes__nf4``, which describes one weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[_Axis], Field(min_length=2, max_length=2)]
    nested_blocksize: Literal[256] | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: Annotated[float, Field(ge=-3e38, le=3e38)] | None = None
