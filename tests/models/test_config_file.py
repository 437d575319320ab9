"""`config.json` of every family: what is refused, by name, and random damage to each."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import warnings
from typing import Any, get_args

import jax.numpy as jnp
import pytest

from lowtide.core import ConfigError, LowtideError, ModelFileError, parse_json
from lowtide.models import DecoderConfig, RopeScaling
from lowtide.models._config import Activation
from lowtide.models._config_file import config_from_hf, config_to_hf
from lowtide.models._layers import _ACTIVATIONS
from lowtide.models._rope import frequencies
from lowtide.models._schema import ConfigFile, config_schema
from lowtide.models._shapes import parameter_shapes
from lowtide.models.families import FAMILIES
from lowtide.models.families._family import ACTIVATIONS

from ..integration.test_damaged_files import mutate_json
from .kinds import KINDS
from .published import PUBLISHED

FILES = {kind: config_to_hf(config, "float32") for kind, config in KINDS.items()}


def computed(config: DecoderConfig) -> None:
    """Fail unless what a configuration says can be computed."""
    freq, scale = frequencies(config, jnp.int32(9))
    assert bool(jnp.isfinite(freq).all()) and math.isfinite(scale)
    parameter_shapes(config)


@pytest.mark.slow
def test_damaged_configurations_are_refused_by_lowtide_or_can_be_computed() -> None:
    wrong: list[str] = []
    for seed in range(int(os.environ.get("LOWTIDE_FUZZ", "300"))):
        rng = random.Random(seed)
        kind = rng.choice([*FILES, *PUBLISHED])
        data = mutate_json(FILES.get(kind) or PUBLISHED[kind], rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", UserWarning)
                computed(config_from_hf(parse_json(data, "config.json"), "config.json"))
        except LowtideError as error:
            if str(error).count("hint:") != 1 or len(str(error)) > 4000:
                wrong.append(f"seed {seed}, {kind}: {error}")
        except Exception as error:
            wrong.append(f"seed {seed}, {kind}: {type(error).__name__}: {error}"[:300])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("llama", {"sliding_window": 4}, "'sliding_window'"),
        ("llama", {"attn_logit_softcapping": 5.0}, "'attn_logit_softcapping'"),
        ("llama", {"query_pre_attn_scalar": 5}, "'query_pre_attn_scalar'"),
        ("llama", {"num_experts": 4}, "'num_experts'"),
        ("llama", {"resid_pdrop": 0.1}, "'resid_pdrop'"),
        ("qwen2", {"clip_qkv": 8.0}, "'clip_qkv'"),
        ("gemma2", {"hidden_activation": "relu"}, "'hidden_activation'"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a number, not null"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("phi3", {"attention_bias": True}, "'attention_bias'"),
        ("phi3", {"full_attn_mod": 2}, "'full_attn_mod'"),
        ("phi3", {"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "auto_map names custom code of the model"),
        ("mixtral", {"router_jitter_noise": 0.1}, "'router_jitter_noise'"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "'mlp_only_layers'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "'decoder_sparse_step'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "the checkpoint is quantised by 'gptq'"),
        ("qwen3 yarn", {"rope_scaling": {**FILES["qwen3 yarn"]["rope_scaling"], "mscale": 0.7}}, "'mscale'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}}, "'beta_fast'"),
        ("llama", {"model_type": "mistral"}, "unknown architecture 'mistral'"),
        ("llama", {"layer_types": ["linear_attention"] * 4}, "'layer_types'"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4}, "layer_types must be"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types must be"),
        ("qwen3_5_text", {"attn_output_gate": False}, "'attn_output_gate'"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "3 value heads are no multiple of 2 key heads"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "'mlp_only_layers'"),
        ("qwen3 yarn", {"rope_scaling": {"rope_type": "proportional"}}, "has no rope_type 'proportional'"),
        ("gemma4_text", {"hidden_size_per_layer_input": 256}, "'hidden_size_per_layer_input'"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "'num_kv_shared_layers'"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention'"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must give all layers"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
        ("llama", {"residual_multiplier": 0.5}, "'residual_multiplier'"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is off"),
        ("gemma4_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have one entry"),
        ("gemma4_text", {"num_global_key_value_heads": 3}, "num_global_kv_heads must be a divisor"),
        ("ministral3", {"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta needs rope_type yarn"),
        ("mistral", {"rope_scaling": {**FILES["ministral3"]["rope_scaling"]}}, "'llama_4_scaling_beta'"),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(kind: str, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"config.json: (.|\n)*{name}(.|\n)*hint:"):
        config_from_hf({**FILES[kind], **changes}, "config.json")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0.0}),
        ("gemma3_text", {"_sliding_window_pattern": "6"}),
        ("phi3", {"resid_pdrop": 1.0}),
        ("llama", {"num_experts": "four"}),  # a field of other families
    ],
)
def test_fields_of_families_have_types_and_ranges(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: {next(iter(changes))} has an unusable value"):
        config_from_hf({**FILES[kind], **changes}, "config.json")


def test_one_schema_fits_the_fields_of_all_families() -> None:
    types: dict[str, Any] = {}
    names = {field.alias or name for name, field in config_schema().model_fields.items()}
    for family in FAMILIES.values():
        for name, field_type in family.field_types.items():
            assert types.setdefault(name, field_type) == field_type, f"{family.model_type}: another type of {name}"
        assert {*family.fields.values(), *family.stored} <= family.known <= names
    assert not types.keys() & ConfigFile.model_fields.keys()  # a family must not change the type of a common field


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_older_names_of_a_familys_rotary_scaling_are_read(old_name: str) -> None:
    file = {**FILES["phi3"], "rope_scaling": {**FILES["phi3"]["rope_scaling"], "rope_type": old_name}}
    assert config_from_hf(file, "config.json") == config_from_hf(FILES["phi3"], "config.json")
    with pytest.raises(ModelFileError, match="hint: choose another model"):  # Qwen 3 has no such older names
        config_from_hf({**FILES["qwen3"], "rope_scaling": file["rope_scaling"]}, "config.json")


def test_rotary_settings_of_transformers_5_and_their_defaults() -> None:
    phi = {name: value for name, value in FILES["phi3"].items() if name != "partial_rotary_factor"}
    scaling = {**phi.pop("rope_scaling"), "partial_rotary_factor": 0.75, "rope_theta": phi.pop("rope_theta")}
    assert config_from_hf({**phi, "rope_parameters": scaling}, "config.json") == KINDS["phi3"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.25}
    read = config_from_hf({**FILES["qwen3_5_text"], "rope_scaling": None, "rope_parameters": yarn}, "config.json")
    assert (read.rotary_fraction, read.rope_scaling and read.rope_scaling.factor) == (0.25, 4.0)
    # Without settings, transformers uses those of its classes.
    gemma = {name: value for name, value in FILES["gemma4_text"].items() if name != "rope_parameters"}
    read = config_from_hf(gemma, "config.json")
    assert (read.rope_scaling and read.rope_scaling.partial_rotary_factor, read.rope_theta) == (0.25, 1e6)
    ministral = {
        name: value for name, value in FILES["ministral3"].items() if name not in ("rope_scaling", "rope_theta")
    }
    read = config_from_hf(ministral, "config.json")
    assert (read.rope_scaling and read.rope_scaling.llama_4_scaling_beta, read.rope_theta) == (0.1, 1e6)


def test_equal_computations_are_written() -> None:
    for kind, changes in {
        "qwen3_5_text": {"delta_layers": None},
        "smollm3": {"rotary_layers": None},
        "gemma4_text": {"global_head_dim": None, "num_global_kv_heads": 2},
    }.items():
        config = dataclasses.replace(KINDS[kind], **changes)
        assert parameter_shapes(config_from_hf(config_to_hf(config, "float32"), "config.json")) == parameter_shapes(
            config
        )


@pytest.mark.parametrize(("kind", "name"), [("llama", "attention_dropout"), ("phi3", "embd_pdrop")])
def test_dropout_rates_of_a_file_are_not_applied_with_a_warning(kind: str, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} 0.1 is not applied; training uses no dropout"):
        config = config_from_hf({**FILES[kind], name: 0.1}, "config.json")
    assert config == config_from_hf(FILES[kind], "config.json")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),  # all that Microsoft published
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),  # Phi-4-mini
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096}),  # gemma-2-9b
    ],
)
def test_what_published_files_say_beside_the_mathematics_changes_nothing(kind: str, more: dict[str, Any]) -> None:
    assert config_from_hf({**FILES[kind], **more}, "config.json") == config_from_hf(FILES[kind], "config.json")


def test_a_cap_that_transformers_stores_and_does_not_apply_changes_nothing_and_is_said() -> None:
    file = {**FILES["gemma3_text"], "attn_logit_softcapping": 6.0}
    with pytest.warns(UserWarning, match="attn_logit_softcapping is not applied"):
        assert config_from_hf(file, "config.json") == config_from_hf(FILES["gemma3_text"], "config.json")
    with pytest.raises(
        ConfigError, match="a config.json of Gemma3ForCausalLM cannot express attention_soft_cap = 6.0, only None"
    ):
        config_to_hf(dataclasses.replace(KINDS["gemma3_text"], attention_soft_cap=6.0), "float32")


def test_a_wrong_value_of_a_configuration_in_python_is_one_error() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("activation", "gelu_pytorch_tanh", '"silu", "gelu" or "gelu_tanh"(.|\n)*hint: did you mean "gelu_tanh"\\?'),
        ("activation", None, '"silu", "gelu" or "gelu_tanh", not None'),
        ("qk_norm", "heads", '"none", "head" or "width", not \'heads\'(.|\n)*hint: did you mean "head"\\?'),
        ("qk_norm", True, '"none", "head" or "width", not True'),
        ("attention_soft_cap", 0, "a finite number above 0, not 0"),
        ("rms_norm_eps", -1e-5, "a finite number of at least 0"),
        ("rope_theta", None, "a finite number above 0, not None"),
        ("local_rope_theta", -1.0, "a finite number above 0"),
    ]
    for name, value, message in cases:
        with pytest.raises(ConfigError, match=f"{name} must be {message}"):
            dataclasses.replace(KINDS["llama"], **{name: value})


def test_every_activation_has_a_function_and_a_name_in_files() -> None:
    assert get_args(Activation) == tuple(_ACTIVATIONS) == tuple(ACTIVATIONS)


def test_what_a_file_leaves_out_is_its_familys_default() -> None:
    with pytest.warns(UserWarning, match="only its text decoder is read"):
        config = config_from_hf(PUBLISHED["gemma-3-12b"], "config.json")
    assert (config.head_dim, config.vocab_size, config.rope_theta, config.local_rope_theta) == (256, 262_208, 1e6, 1e4)
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=8.0) and config.tie_embeddings
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.eos_token_id == (1, 106)
    mixtral = config_from_hf(PUBLISHED["mixtral-8x7b"], "config.json")
    assert mixtral.experts.num_experts_per_token == 2 and mixtral.experts.normalize and mixtral.sliding_window is None
    llama = {name: value for name, value in FILES["llama"].items() if name != "num_key_value_heads"}
    assert config_from_hf(llama, "config.json").num_kv_heads == llama["num_attention_heads"] > 1


def test_both_names_of_the_number_of_experts_are_read() -> None:
    file = {**FILES["qwen3_moe"]}
    file["num_local_experts"] = file.pop("num_experts")
    assert config_from_hf(file, "config.json") == KINDS["qwen3_moe"]


def test_sizes_are_taken_from_json_of_both_spellings_of_rotary_frequencies() -> None:
    file = json.loads(json.dumps(FILES["gemma3_text"]))
    before = config_from_hf(file, "config.json")
    scaling, theta, local = (file.pop(name) for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"))
    by_kind = {"full_attention": {**scaling, "rope_theta": theta}, "sliding_attention": {"rope_theta": local}}
    assert config_from_hf({**file, "rope_parameters": by_kind}, "config.json") == before
    # So transformers 5.1 writes it where all layers are of one kind.
    more = {"rope_type": "default", "rope_theta": None}
    assert config_from_hf({**file, "rope_parameters": {**by_kind, **more}}, "config.json") == before
    for one, rest in (("full_attention", {"local_rope_theta": 1e4}), ("sliding_attention", {"rope_scaling": None})):
        found = config_from_hf({**file, "rope_parameters": {one: by_kind[one], **more}}, "config.json")
        assert found == dataclasses.replace(before, **rest)
    for more, kind in (({"rope_theta": 5.0}, "gemma3_text"), ({"rope_type": "yarn"}, "gemma3_text"), ({}, "qwen3")):
        message = (
            "keys other than full_attention and sliding_attention" if more else "rope_scaling has 'full_attention'"
        )
        with pytest.raises(ModelFileError, match=message):
            config_from_hf({**FILES[kind], "rope_parameters": {**by_kind, **more}}, "config.json")
    by_kind["sliding_attention"] = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ModelFileError, match="rope_type of sliding-window layers must be \"default\", not 'yarn'"):
        config_from_hf({**file, "rope_parameters": by_kind}, "config.json")
