"""Schemas of the files in a Hugging Face folder: types, ranges, and the fields that change the computation.

An unknown field of `config.json` is an error when it is switched on (not null, false, zero or empty): otherwise the
logits would silently be those of another model. pydantic takes a quarter of a second to import, so only functions that
read files import this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_MOST_LAYERS = 10_000
_MOST_TOKENS = 2**24

Size = Annotated[int, Field(ge=1, le=2**22)]
TokenId = Annotated[int, Field(ge=0, lt=_MOST_TOKENS)]
Length = Annotated[int, Field(ge=1, le=2**40)]
Count = Annotated[int, Field(ge=1, le=2**16)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Stretch = Annotated[float, Field(ge=1e-3, le=1e6)]


class _File(BaseModel):
    """Strict model: no conversion between strings, numbers and booleans, and every number is finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())


class RopeEntry(_File):
    """``rope_scaling`` or ``rope_parameters``; ``type`` is the older name of ``rope_type``."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] | None = None
    factor: Stretch | None = None
    low_freq_factor: Stretch | None = None
    high_freq_factor: Stretch | None = None
    original_max_position_embeddings: Length | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    beta_fast: Stretch | None = None
    beta_slow: Stretch | None = None
    truncate: bool | None = None
    attention_factor: Stretch | None = None
    short_factor: Annotated[list[Stretch], Field(max_length=2**16)] | None = None
    long_factor: Annotated[list[Stretch], Field(max_length=2**16)] | None = None


class ConfigFile(_File):
    """The fields of `config.json` that Lowtide reads."""

    architectures: Annotated[list[str], Field(max_length=16)] | str | None = None
    model_type: str | None = None
    vocab_size: Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=_MOST_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str | None = None
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] | None = None
    rope_scaling: RopeEntry | None = None
    rope_parameters: RopeEntry | None = None
    local_rope: RopeEntry = RopeEntry()
    rope_local_base_freq: Annotated[float, Field(ge=1, le=1e15)] | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    original_max_position_embeddings: Length | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] = 1e-6
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    attention_dropout: Dropout | None = None
    resid_pdrop: Dropout | None = None
    embd_pdrop: Dropout | None = None
    max_position_embeddings: Length = 2048
    bos_token_id: TokenId | list[TokenId] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    quantization_config: Any = None
    query_pre_attn_scalar: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    attn_logit_softcapping: Annotated[float, Field(ge=0, le=1e6)] | None = None
    final_logit_softcapping: Annotated[float, Field(ge=0, le=1e6)] | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=_MOST_LAYERS)] | None = None
    sliding_window_pattern: Annotated[int, Field(ge=1, le=_MOST_LAYERS)] | None = None
    old_sliding_window_pattern: Annotated[int, Field(ge=1, le=_MOST_LAYERS)] | None = Field(
        default=None, alias="_sliding_window_pattern"
    )
    layer_types: (
        Annotated[list[Literal["full_attention", "sliding_attention"]], Field(max_length=_MOST_LAYERS)] | None
    ) = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    experts_per_token: Count | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    output_router_logits: bool | None = None
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=1e6)] | None = None
    swiglu_limit: Annotated[float, Field(gt=0, le=1e6)] | None = None


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
"""Fields that must be null or have one of these values, which have no effect."""


def unhandled(
    file: _File, known_fields: Collection[str] | None = None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> dict[str, Any]:
    """Return the fields that are switched on and would compute something that Lowtide does not.

    `known_fields` are those that the family reads; with None, for a section of the file, all fields of the schema.
    """
    values: dict[str, Any] = {**(file.model_extra or {})}
    harmless = _HARMLESS | {"local_rope"}
    if known_fields is not None:
        fields = type(file).model_fields
        values |= {fields[name].alias or name: getattr(file, name) for name in file.model_fields_set & set(fields)}
        harmless = harmless | (set(known_fields) - set(neutral))
    if values.get("use_sliding_window") is False:  # the window's sizes have no effect
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
    """Strict like the other schemas. Other fields are ignored: they describe kernels or how weights were quantised."""

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
    """JSON in a tensor ``quant_state.bitsandbytes__nf4``."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[_Axis], Field(min_length=2, max_length=2)]
    nested_blocksize: Literal[256] | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: Annotated[float, Field(ge=-3e38, le=3e38)] | None = None
