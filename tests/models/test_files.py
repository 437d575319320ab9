import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lowtide import lora
from lowtide.core import ConfigError, ModelFileError, OutputError, StateError, StructureError
from lowtide.models import (
    DecoderConfig,
    RopeScaling,
    init,
    load,
    load_config,
    load_shapes,
    load_tokenizer,
    save,
    unstack,
)

CONFIG = DecoderConfig(
    vocab_size=30,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_scaling=RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64),
    attention_bias=True,
    eos_token_id=(3, 4),
)


@pytest.fixture
def model():
    return init(CONFIG, key=jax.random.key(0))


@pytest.fixture
def directory(model, tmp_path):
    save(model, tmp_path / "m")
    return tmp_path / "m"


def _edit_config(directory: Path, **changes):
    raw = json.loads((directory / "config.json").read_text())
    raw.update(changes)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "gone"}))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("max_shard_bytes", [2**30, 1500])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_round_trips(tmp_path, max_shard_bytes, dtype):
    model = init(CONFIG, key=jax.random.key(0), dtype=dtype)
    save(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes == 1500)
    again = load(tmp_path)
    assert again.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, (again.outer, again.layers), (model.outer, model.layers))
    assert {leaf.dtype for leaf in jax.tree.leaves(again)} == {jnp.dtype(dtype)}
    if max_shard_bytes == 1500:
        sizes = [sum(t.nbytes for t in load_file(f).values()) for f in tmp_path.glob("*.safetensors")]
        assert len(sizes) >= 3
        assert max(sizes) <= 1500


@pytest.mark.slow
def test_dtypes_are_chosen_on_loading(directory):
    loaded = load(directory, dtype="bfloat16", compute_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}
    assert loaded.compute_dtype == "float32"


@pytest.mark.parametrize("wrong", [{"dtype": "bfloat"}, {"compute_dtype": "int8"}, {"compute_dtype": "auto"}])
def test_dtypes_that_cannot_be_computed_in_are_refused(directory, wrong):
    for read in (load, load_shapes):
        with pytest.raises(ConfigError, match="must be floating-point, such as float32 or bfloat16, not"):
            read(directory, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "bfloat"}, 'dtype must be "float64", .*hint: did you mean "bfloat16"'),
        ({"max_shard_bytes": 0}, "max_shard_bytes must be an integer of at least 1, not 0"),
    ],
)
def test_wrong_arguments_of_save_are_refused_before_anything_is_written(model, tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        save(model, tmp_path / "out", **wrong)
    with pytest.raises(StructureError, match=r"layers are not stacked(.|\n)*hint: save the stacked decoder"):
        save(unstack(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_may_be_rounded_while_they_are_written(model, tmp_path):
    save(model, tmp_path, dtype="bfloat16", max_shard_bytes=1500)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), jax.tree.map(lambda x: x.astype("bfloat16"), model))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_tied_checkpoint_may_repeat_its_head(model, tmp_path):
    import dataclasses

    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    tied = init(config, key=jax.random.key(0))
    save(tied, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head" not in load(tmp_path).outer
    save_file({name: tensors[name] for name in tensors if "embed" not in name}, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), tied)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"lm_head.weight is not the embedding(.|\n)*hint: set tie_word_emb"):
        load(tmp_path)


def test_missing_files_are_named(directory, tmp_path):
    with pytest.raises(ModelFileError, match=r"nowhere/config.json: no such file(.|\n)*hint:"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=rf"config.json is a file, not a folder(.|\n)*holds it: {directory}"):
        load(directory / "config.json")
    with pytest.raises(ModelFileError, match=r"tokenizer.json: no such file(.|\n)*hint:"):
        load_tokenizer(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model.safetensors: no such file(.|\n)*hint:"):
        load(directory)


def test_a_missing_shard_is_named(model, tmp_path):
    save(model, tmp_path, max_shard_bytes=1500)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=rf"{shard.name}: no such file"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
def test_truncated_weights_are_named(directory, keep):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ModelFileError, match=r"model.safetensors: not a complete safetensors file(.|\n)*hint:"):
        load(directory)


def test_config_and_weights_that_disagree_are_named(directory):
    _edit_config(directory, intermediate_size=13)
    with pytest.raises(ModelFileError, match=r"the shape of .*mlp.*_proj.weight is .* requires \(8, 13\)\nhint:"):
        load(directory)
    _edit_config(directory, intermediate_size=12, num_hidden_layers=3)
    with pytest.raises(ModelFileError, match=r"are missing, first model.layers.2(.|\n)*hint:"):
        load(directory)
    _edit_config(directory, num_hidden_layers=1)
    with pytest.raises(ModelFileError, match=r"have model.layers.1.*does not describe(.|\n)*hint:"):
        load(directory)


def test_unknown_models_are_refused(directory):
    _edit_config(directory, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelFileError, match=r"unknown architecture 'MambaForCausalLM'(.|\n)*hint:"):
        load(directory)
    _edit_config(directory, architectures=["LlamaForCausalLM"], hidden_act="gelu")
    with pytest.raises(
        ModelFileError, match=r"hidden_act must be \"silu\" or \"swish\", not 'gelu'\nhint: the MLP of Llama"
    ):
        load(directory)
    _edit_config(directory, hidden_act="silu", rope_scaling={"rope_type": "spiral", "factor": 2.0})
    with pytest.raises(
        ModelFileError, match=r'rope_type must be "default", .* or "proportional", not \'spiral\'\nhint:'
    ):
        load(directory)


def test_an_unusable_config_is_refused(directory):
    _edit_config(directory, hidden_size="gone")
    with pytest.raises(ModelFileError, match=r"hidden_size is missing(.|\n)*hint:"):
        load(directory)
    _edit_config(directory, hidden_size="wide")
    with pytest.raises(ModelFileError, match=r"hidden_size has an unusable value(.|\n)*'wide'(.|\n)*hint:"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config.json: not readable as JSON(.|\n)*hint:"):
        load(directory)


def test_integer_weights_are_refused(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = np.ones((8,), np.int8)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"dtype of model.norm.weight must be .*, not 'I8'\nhint:"):
        load(directory)


def test_a_damaged_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer.json: not a tokenizer(.|\n)*hint:"):
        load_tokenizer(directory)


def test_adapters_are_not_saved_as_a_model(model, tmp_path):
    adapted = lora.add(model, lora.Config(rank=2), key=jax.random.key(0))
    with pytest.raises(
        ModelFileError,
        match=r"do not match the model's configuration(.|\n)*hint: dequantise weights(.|\n)*merge",
    ):
        save(adapted, tmp_path)


def test_weights_that_a_trainer_consumed_are_not_saved(model, tmp_path):
    adapted = lora.add(model, lora.Config(rank=2), key=jax.random.key(0))
    model.outer["embed"]["weight"].delete()  # as a donating function does
    for write, tree in ((save, model), (lora.save, adapted)):
        with pytest.raises(StateError, match=r"outer/embed/weight was consumed by another trainer(.|\n)*hint: use the"):
            write(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/m: cannot write the model(.|\n)*hint:"):
        save(model, tmp_path / "file" / "m")


@pytest.mark.parametrize("sizes", [10**9, 10**4])
def test_who_may_read_what_is_saved_is_said_by_the_umask(model, tmp_path, sizes):
    before = os.umask(0o027)
    try:
        save(model, tmp_path / "model", max_shard_bytes=sizes)
        lora.save(lora.add(model, lora.Config(rank=2), key=jax.random.key(0)), tmp_path / "adapter")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) > 3 and set(modes.values()) == {"0o640"}, modes


def test_weights_that_may_not_be_read_are_named(directory, monkeypatch):
    def refuse(file, **options):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("lowtide.models._safetensors.safe_open", refuse)
    with pytest.raises(ModelFileError, match=r"safetensors: cannot be read(.|\n)*Permission denied(.|\n)*hint:"):
        load(directory)


def test_the_tokenizer_is_copied(model, tiny_model_dir, tmp_path):
    save(model, tmp_path, tokenizer=Path(tiny_model_dir) / "tokenizer.json")
    assert load_tokenizer(tmp_path).get_vocab_size() > 0
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("sizes", [(1500, 2**30), (2**30, 1500)])
def test_saving_over_another_layout_leaves_none_of_the_older_weights_to_be_read(tmp_path, sizes):
    older, newer = (init(CONFIG, key=jax.random.key(seed)) for seed in (0, 1))
    save(older, tmp_path, max_shard_bytes=sizes[0])
    save(newer, tmp_path, max_shard_bytes=sizes[1])
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).outer, newer.outer)
    assert (tmp_path / "model.safetensors").exists() != (tmp_path / "model.safetensors.index.json").exists()


def test_an_index_that_names_no_files_is_refused(directory):
    index = directory / "model.safetensors.index.json"
    index.write_text("{")
    load(directory)  # as transformers does, the single file where there is one
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(ModelFileError, match=r"weight_map.a has an unusable value(.|\n)*hint:"):
        load(directory)


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tiny_model_dir, tmp_path):
    tokenizer = load_tokenizer(tiny_model_dir)
    want = tokenizer.encode("the tide goes out").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("the tide goes out").ids == want


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "change", [{"factor": 0}, {"factor": "much"}, {"low_freq_factor": 4.0, "high_freq_factor": 4.0}, {"factor": None}]
)
def test_rope_scaling_that_cannot_be_computed_is_refused(directory, change):
    scaling = json.loads((directory / "config.json").read_text())["rope_scaling"]
    _edit_config(directory, rope_scaling={**scaling, **change})
    with pytest.raises(
        ModelFileError,
        match=r"config.json: (rope_scaling(.factor has an unusable| has no factor)|high_freq_factor must)(.|\n)*hint:",
    ):
        load(directory)


def test_layers_of_different_dtypes_stack_without_losing_digits(model, directory):
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].astype(jnp.bfloat16)}, directory / "model.safetensors")
    loaded = load(directory).layers["attn"]["q_proj"]["weight"]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded[1], model.layers["attn"]["q_proj"]["weight"][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 99}, r"eos_token_id must be an integer from 0 to 29, not 99"),
        ({"eos_token_id": "</s>"}, r"eos_token_id has an unusable value"),
        ({"rope_scaling": "llama3"}, r"rope_scaling has an unusable value(.|\n)*a JSON object(.|\n)*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling has no factor"),
        ({"quantization_config": {"bits": 4}}, r"the checkpoint is quantised"),
        ({"num_key_value_heads": 3}, r"config.json: num_kv_heads must be a divisor of num_heads = 2, not 3"),
        ({"architectures": "GPT2LMHeadModel"}, r"unknown architecture 'GPT2LMHeadModel'"),
    ],
)
def test_unusable_entries_of_the_config_are_named(directory, changes, message):
    _edit_config(directory, **changes)
    with pytest.raises(ModelFileError, match=rf"{message}(.|\n)*hint:") as caught:
        load(directory)
    assert str(caught.value).count("hint:") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 4096},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"partial_rotary_factor": 0.5},
        {"use_qk_norm": True},
        {"qkv_bias": True},
        {"logit_scale": 0.0625},
        {"residual_multiplier": 0.22},
        {"no_rope_layers": [1, 0]},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"num_local_experts": 8},
        {"clip_qkv": 8},
        {"alibi": True},
        {"norm_type": "layernorm"},
        {"auto_map": {"AutoModelForCausalLM": "own.py"}},
        {"quantization": {"bits": 4}},
        {"some_new_thing": "on"},
    ],
)
def test_fields_that_change_the_mathematics_are_refused_by_name(directory, changes):
    _edit_config(directory, **changes)
    name = [*changes][-1]
    with pytest.raises(ModelFileError, match=rf"is not supported(.|\n)*{name}=(.|\n)*hint:"):
        load_config(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None, "attn_logit_softcapping": 0.0, "qkv_bias": False, "auto_map": {}},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"partial_rotary_factor": 1.0, "rope_interleaved": False, "layer_types": ["full_attention"] * 2},
        {"_name_or_path": "x", "_attn_implementation_autoset": True, "pretraining_tp": 2, "use_cache": True},
        {"initializer_range": 0.02, "pad_token_id": -1, "transformers_version": "5.0.0", "dtype": "bfloat16"},
        {"hidden_act": "swish", "return_dict": True, "id2label": {"0": "a"}, "temperature": 1.0, "top_k": 50},
        {"unsloth_version": "2025.1", "is_llama_config": True, "attention_dropout": 0.0, "tie_word_embeddings": None},
    ],
)
def test_fields_that_say_nothing_of_the_forward_pass_are_read_over(directory, changes):
    before = load_config(directory)
    _edit_config(directory, **changes)
    assert load_config(directory) == before


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"mrope_section": [1, 2]}, "rope_scaling has 'mrope_section', which Lowtide does not compute"),
        ({"partial_rotary_factor": 0.25}, "rope_scaling has 'partial_rotary_factor'"),
        ({"type": "linear"}, "it has two different values of rope_type and type"),
        ({"factor": 1e300}, "rope_scaling.factor has an unusable value"),
        ({"factor": True}, "rope_scaling.factor has an unusable value"),
    ],
)
def test_rope_entries_that_would_give_other_frequencies_are_refused(directory, scaling, message):
    raw = json.loads((directory / "config.json").read_text())["rope_scaling"]
    _edit_config(directory, rope_scaling=raw | scaling)
    with pytest.raises(ModelFileError, match=rf"config.json: {message}(.|\n)*hint:"):
        load_config(directory)


def test_rope_in_two_places_has_to_agree(directory):
    raw = json.loads((directory / "config.json").read_text())
    theta = raw["rope_theta"]
    _edit_config(directory, rope_parameters=raw["rope_scaling"] | {"rope_theta": theta})
    assert load_config(directory) == CONFIG
    _edit_config(directory, rope_parameters=raw["rope_scaling"] | {"rope_theta": theta * 2})
    with pytest.raises(ModelFileError, match=r"has two different values of rope_theta(.|\n)*hint:"):
        load_config(directory)
    _edit_config(directory, rope_parameters={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(
        ModelFileError, match=r"has two different values of rope_parameters and rope_scaling(.|\n)*hint:"
    ):
        load_config(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2**31},
        {"vocab_size": 2**40},
        {"hidden_size": -8},
        {"num_attention_heads": 2.0},
        {"tie_word_embeddings": "false"},
        {"attention_bias": 1},
        {"rms_norm_eps": -1e-5},
        {"rope_theta": 0.0},
        {"max_position_embeddings": 10**39},
        {"eos_token_id": True},
        {"architectures": [3]},
        {"head_dim": "4"},
    ],
)
def test_values_that_no_model_has_are_refused_by_name(directory, changes):
    _edit_config(directory, **changes)
    (name,) = changes
    with pytest.raises(ModelFileError, match=rf"config.json: ({name}\S* has an unusable|unknown arch)(.|\n)*hint:"):
        load_config(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 8, "hidden_size": 8}', "'hidden_size' occurs twice"),
        ('{"rms_norm_eps": NaN}', "NaN is not a finite number"),
        ('{"rope_theta": 1e999}', "1e999 is not a finite number"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"model_type": "\\ud800"}', "surrogates not allowed"),
        ("[" * 10**6, "recursion|nested|Stack overflow"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested more than 64 levels"),
    ],
)
def test_json_is_read_strictly(directory, text, message):
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=rf"config.json: not readable as JSON(.|\n)*({message})(.|\n)*hint:"):
        load_config(directory)


def test_dropout_of_attention_gives_one_warning(directory):
    _edit_config(directory, attention_dropout=0.1)
    with pytest.warns(UserWarning, match="attention_dropout 0.1 is not applied"):
        load_config(directory)


_NESTED = {"type": "Sequence", "pretokenizers": []}
for _ in range(70):
    _NESTED = {"type": "Sequence", "pretokenizers": [_NESTED]}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": _NESTED}, "nested more than 64 levels"),
        ({"added_tokens": [{"id": 2**31, "content": "a"}]}, r"added_tokens.0.id has an unusable value"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, r"model.vocab.a has an unusable value"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}, "not a tokenizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "not a tokenizer"),
    ],
)
def test_a_tokenizer_that_would_end_the_process_is_refused(tiny_model_dir, tmp_path, changes, message):
    raw = json.loads((Path(tiny_model_dir) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelFileError, match=rf"tokenizer.json: (.|\n)*{message}(.|\n)*hint:"):
        load_tokenizer(tmp_path)


def test_a_process_that_reading_a_tokenizer_ends_is_not_ours(tiny_model_dir, tmp_path, monkeypatch):
    shutil.copy(Path(tiny_model_dir) / "tokenizer.json", tmp_path)
    with open(tmp_path / "tokenizer.json", "a") as file:
        file.write(" \n")  # not a content that was found harmless before
    monkeypatch.setattr("lowtide.models._tokenizer._GUARD", "import os; os.abort()")
    with pytest.raises(ModelFileError, match=r"not a tokenizer(.|\n)*a process that signal 6 ended(.|\n)*hint:"):
        load_tokenizer(tmp_path)


def test_an_empty_list_of_end_tokens_means_none(directory):
    _edit_config(directory, eos_token_id=[])
    assert load(directory).config.eos_token_id is None


def test_each_device_reads_its_part(tiny_model_dir):
    from lowtide.train import ShardingRules, make_mesh

    rules = ShardingRules(mesh=make_mesh(fsdp=4, tensor=2), min_bytes=0)
    whole, ours = load(tiny_model_dir), load(tiny_model_dir, sharding=rules.of)
    jax.tree.map(np.testing.assert_array_equal, ours, whole)
    weight = ours.layers["attn"]["q_proj"]["weight"]
    assert weight.addressable_shards[0].data.nbytes * 8 == weight.nbytes
    half = load(tiny_model_dir, sharding=rules.of, dtype="bfloat16")
    assert half.layers["attn"]["q_proj"]["weight"].dtype == "bfloat16"
