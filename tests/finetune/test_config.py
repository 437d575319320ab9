import json
import os
import pathlib
import typing

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, OutputError
from lowtide.finetune import FinetuneConfig, config_from_dict, config_to_toml, open_run, read_config
from lowtide.finetune._job import learning_rate
from lowtide.finetune._run_folder import MetricsFile, check_checkpoint, check_same_run, read_records, write_config
from lowtide.train import Callback, JsonlLogger


def test_toml_round_trips(tmp_path):
    config = FinetuneConfig(model="m", rank=4, targets=("a", "b"), learning_rate=1e-3, remat=True)
    (tmp_path / "c.toml").write_text(config_to_toml(config))
    assert config_from_dict(read_config(tmp_path / "c.toml"), "c.toml") == config


def test_the_method_full_is_the_setting_full():
    for config in (FinetuneConfig(method="full"), config_from_dict({"method": "full"}, "c.toml")):
        assert config == FinetuneConfig(full=True)
        assert "method" not in config_to_toml(config)
    with pytest.raises(ConfigError, match="rank is a setting of adapters, and full tunes all parameters"):
        config_from_dict({"method": "full", "rank": 16}, "c.toml")
    with pytest.raises(ConfigError, match="method contradicts full"):
        config_from_dict({"method": "full", "full": False}, "c.toml")
    with pytest.raises(ConfigError, match="quantize is a setting of adapters"):
        FinetuneConfig(method="full", quantize="nf4")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rnak": 3}, r"unknown key 'rnak'(.|\n)*hint: did you mean rank"),
        ({"rank": "8"}, "rank must be a valid integer, not '8'"),
        ({"rank": True}, "rank must be a valid integer, not True"),
        ({"targets": [1]}, r"targets must be a valid string, not \(1,\)"),
        ({"rank": 0}, r"rank is out of range(.|\n)*at least 1(.|\n)*hint:.*--rank"),
        ({"num_steps": 0}, r"num_steps is out of range(.|\n)*hint:.*--steps"),
        ({"seed": -1}, r"seed is out of range(.|\n)*hint:"),
        ({"seed": 2**32}, r"seed is out of range(.|\n)*hint:.*--seed"),
        ({"lora_init": "loftq"}, r"lora_init is out of range(.|\n)*got: loftq\nhint: call lt.lora.loftq"),
        ({"alpha": 0.0}, r"alpha is out of range(.|\n)*hint: change alpha in the TOML file, or --alpha$"),
        ({"weight_decay": float("inf")}, r"weight_decay is out of range(.|\n)*hint:"),
        ({"alpha": float("nan")}, r"alpha is out of range(.|\n)*hint:"),
        ({"learning_rate": 0}, r"learning_rate is out of range(.|\n)*hint:"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction is out of range(.|\n)*hint:"),
        ({"compute_dtype": "int8"}, r"compute_dtype is out of range(.|\n)*hint:"),
        ({"offload": ["optimiser"]}, r"offload: unknown word 'optimiser'(.|\n)*hint: did you mean optimizer"),
        ({"offload": "optimizer"}, "offload must be a valid tuple, not 'optimizer'"),
        ({"full": True, "rank": 16}, r"rank is a setting of adapters(.|\n)*hint: leave out rank, or full"),
        ({"quantize": "nf5"}, r"quantize is out of range(.|\n)*nf4, int4, mxfp4, int8, fp8"),
        ({"quantize": "int8", "full": True}, r"quantize is a setting of adapters"),
        (
            {"quantize": "nf4", "offload": ["parameters"]},
            r"quantize contradicts offload of parameters(.|\n)*hint: leave parameters out of offload(.|\n)*4 bits",
        ),
        (
            {"quantize_embeddings": "int4", "offload": ["parameters"]},
            r"quantize_embeddings contradicts offload of parameters: JAX runs no program on 4-bit arrays",
        ),
        ({"full": True, "targets": ["a"], "alpha": 1.0}, r"alpha is a setting(.|\n)*hint: leave out alpha, targets"),
        (
            {"full": True, "param_dtype": "float16"},
            r"param_dtype: full trains the parameters(.|\n)*hint:.*compute_dtype",
        ),
        ({"full": True, "remat": False}, r"remat = false contradicts full(.|\n)*hint: leave remat out"),
        ({"tile_tokens": 64, "remat": False}, r"tile_tokens applies to blocks that(.|\n)*hint: leave tile_tokens out"),
        ({"state_dtype": "8 bit"}, r"state_dtype(.|\n)*one of float32, bfloat16, 8bit, companded, fp8, 4bit"),
        ({"layers_per_remat": 0}, r"layers_per_remat is out of range(.|\n)*at least 1"),
        (
            {"layers_per_remat": 2, "remat": False},
            r"contradicts remat = false, which rec(.|\n)*hint: leave out one of them: layers_per_remat, or remat = f",
        ),
        ({"layers_per_remat": 2, "full": True}, r"contradicts full, whose layers are updated one by one(.|\n)*or full"),
        (
            {"layers_per_remat": 2, "offload": ["parameters", "activations"]},
            r"contradicts offload of parameters, which streams(.|\n)*or parameters",
        ),
        ({"tile_tokens": 0}, r"tile_tokens(.|\n)*at least 1"),
        ({"attention": "flash"}, r"attention(.|\n)*cudnn, splash, blocks, xla"),
        ({"offload": ["activations"], "remat": False}, r"remat = false contradicts activations(.|\n)*hint:"),
        ({"save_dtype": "float32"}, r"save_dtype applies only to full-parameter tuning"),
        ({"clip_mode": "layer"}, r"clip_mode applies only to full-parameter tuning(.|\n)*hint:.*--full"),
        ({"full": True, "clip_mode": "global"}, r"clip_mode is out of range(.|\n)*hint:"),
        ({"num_microbatches": 3}, r"num_microbatches is out of range(.|\n)*divisor of batch_size 8(.|\n)*hint:"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values, "c.toml")


def test_adapter_settings_beside_full_are_refused_in_python_too():
    with pytest.raises(ConfigError, match=r"rank is a setting of adapters(.|\n)*hint:"):
        FinetuneConfig(full=True, rank=4)


def test_a_full_run_is_written_without_settings_of_adapters(tmp_path):
    config = FinetuneConfig(full=True, offload=())
    write_config(tmp_path, config)
    assert open_run(tmp_path, {"full": True}, "flags", resume=True) == config


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone.toml: cannot be read(.|\n)*hint:"):
        read_config(tmp_path / "gone.toml")
    (tmp_path / "c.toml").write_text("rank = ")
    with pytest.raises(ConfigError, match=r"c.toml: not a TOML file(.|\n)*hint:"):
        read_config(tmp_path / "c.toml")


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"the folder is not empty(.|\n)*hint: continue that run with --resume"):
        open_run(tmp_path, {}, "flags", resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/run: cannot be written(.|\n)*hint:"):
        open_run(tmp_path / "file" / "run", {}, "flags", resume=False)


def test_resume_takes_the_runs_own_configuration(tmp_path):
    write_config(tmp_path, FinetuneConfig(rank=4, num_steps=7))
    assert open_run(tmp_path, {}, "flags", resume=True) == FinetuneConfig(rank=4, num_steps=7)
    assert open_run(tmp_path, {"rank": 4}, "flags", resume=True).num_steps == 7


def test_resume_checks_a_part_of_the_settings_beside_the_runs_own(tmp_path):
    write_config(tmp_path, FinetuneConfig(batch_size=6, num_microbatches=3))
    assert open_run(tmp_path, {"num_microbatches": 3}, "flags", resume=True).batch_size == 6


def test_resume_with_another_configuration_is_refused(tmp_path):
    write_config(tmp_path, FinetuneConfig(rank=4, num_steps=7))
    with pytest.raises(
        ConfigError, match=r"does not match the configuration(.|\n)*rank = 4(.|\n)*rank = 8(.|\n)*hint:"
    ):
        open_run(tmp_path, {"rank": 8, "num_steps": 7}, "flags", resume=True)


def test_nothing_to_resume_is_an_error(tmp_path):
    with pytest.raises(OutputError, match=r"no run to resume(.|\n)*hint: .*config.toml"):
        open_run(tmp_path / "gone", {}, "flags", resume=True)


def test_resume_over_other_data_is_refused(tmp_path):
    check_same_run(tmp_path, FinetuneConfig(), "a")
    check_same_run(tmp_path, FinetuneConfig(), "a")
    with pytest.raises(ConfigError, match=r"data or the tokenizer changed(.|\n)*hint:"):
        check_same_run(tmp_path, FinetuneConfig(), "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 5), ("seq_len", 64), ("targets", ("**/q_proj",)), ("learning_rate", 1e-3), ("num_steps", 400)],
)
def test_a_configuration_that_was_edited_by_hand_is_refused(tmp_path, name, value):
    check_same_run(tmp_path, FinetuneConfig(), "a")
    with pytest.raises(ConfigError, match=r"config.toml was changed(.|\n)*= (.|\n)*hint: restore it.*--resume --steps"):
        check_same_run(tmp_path, FinetuneConfig(**{name: value}), "a")
    free = {"model": "moved", "data": "moved", "eval_every": 7, "checkpoint_every": 7, "sample_tokens": 0}
    check_same_run(tmp_path, FinetuneConfig(**free), "a")


@pytest.mark.slow
def test_a_run_is_extended_and_its_learning_rate_goes_on(tmp_path):
    write_config(tmp_path, FinetuneConfig(num_steps=7))
    check_same_run(tmp_path, FinetuneConfig(num_steps=7), "a")
    longer = open_run(tmp_path, {"num_steps": 9}, "flags", resume=True)
    assert (longer.num_steps, longer.schedule_steps) == (9, 7)
    check_same_run(tmp_path, longer, "a")
    write_config(tmp_path, longer)
    longest = open_run(tmp_path, {"num_steps": 12}, "flags", resume=True)
    assert (longest.num_steps, longest.schedule_steps) == (12, 7)
    rates = [
        [float(learning_rate(config)(step)) for step in range(12)] for config in (FinetuneConfig(num_steps=7), longest)
    ]
    assert rates[0] == rates[1] and len({*rates[1][7:]}) == 1 and rates[1][7] < rates[1][5]
    with pytest.raises(ConfigError, match=r"does not match the configuration(.|\n)*num_steps = 9(.|\n)*num_steps = 8"):
        open_run(tmp_path, {"num_steps": 8}, "flags", resume=True)


@pytest.mark.parametrize("name", ["model", "data"])
def test_an_empty_path_is_not_the_folder_one_is_in(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"{name} is empty(.|\n)*hint: leave {name} out"):
        open_run(tmp_path / "run", {name: ""}, "flags", resume=False)


def test_a_folder_that_nobody_may_look_into_is_named(tmp_path, monkeypatch):
    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "is_dir", refuse)
    monkeypatch.setattr(pathlib.Path, "is_file", refuse)
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"run: cannot be read(.|\n)*Permission denied(.|\n)*hint: .*--out"):
            open_run(tmp_path / "run", {}, "flags", resume=resume)


@pytest.mark.slow
def test_metrics_are_on_the_disk_before_a_checkpoint_is(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    metrics, logger = MetricsFile(tmp_path / "metrics.jsonl", None), JsonlLogger(tmp_path / "log.jsonl")
    seen = []

    class Saves(Callback):
        def on_checkpoint(self, trainer, step):
            seen.append((step, {os.path.basename(name) for name in synced}))

    ours = lt.Trainer(
        {"w": jnp.zeros(2)}, lambda m, x: jnp.sum(m["w"] * x), optax.sgd(0.1), checkpoint_dir=tmp_path / "c"
    )
    save = ours.checkpoints.save
    monkeypatch.setattr(ours.checkpoints, "save", lambda *a, **k: (synced.append("begun"), save(*a, **k))[1])
    options = {"callbacks": [logger, metrics, Saves()], "on_record": metrics.append, "progress": False}
    ours.fit([np.ones(2)] * 2, num_steps=2, **options)
    metrics.close()
    first = synced.index("begun")
    assert {str(tmp_path / "metrics.jsonl"), str(tmp_path / "log.jsonl")} <= {*synced[:first]} and seen[0][0] == 2
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_metrics_continue_after_the_last_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert len(read_records(path)) == 3
    metrics = MetricsFile(path, keep_through=2)
    metrics.append({"step": 3, "loss": 1.5})
    metrics.close()
    assert read_records(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.5}]
    MetricsFile(path, keep_through=None).close()
    assert read_records(path) == []


def test_paths_are_stored_for_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = open_run("run", {"model": "m", "data": "d.txt"}, "flags", resume=False)
    assert (config.model, config.data) == (str(tmp_path / "m"), str(tmp_path / "d.txt"))
    write_config(tmp_path / "run", config)
    assert open_run("run", {"model": "m"}, "flags", resume=True) == config


def test_a_path_that_is_no_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model must be a valid string, not 3"):
        open_run(tmp_path / "run", {"model": 3}, "c.toml", resume=False)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(tmp_path):
    config = FinetuneConfig(num_steps=30, checkpoint_every=10)
    lines = [f'{{"step": {step}, "loss": 1.0}}' for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    check_checkpoint(tmp_path, config, None)  # killed while the second waited for the first to be complete
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 21, "loss": 1.0}']))
    check_checkpoint(tmp_path, config, 20)
    with pytest.raises(OutputError, match=r"the folder has no checkpoint(.|\n)*recorded 21 steps(.|\n)*hint:"):
        check_checkpoint(tmp_path, config, None)


def test_an_ended_run_without_its_checkpoints_is_not_begun_again(tmp_path):
    config = FinetuneConfig(num_steps=3, checkpoint_every=10)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}')
    check_checkpoint(tmp_path, config, None)
    (tmp_path / "memory.json").write_text("{}")
    with pytest.raises(OutputError, match=r"the folder has no checkpoint(.|\n)*recorded 3 steps(.|\n)*hint:"):
        check_checkpoint(tmp_path, config, None)


def test_damaged_files_of_a_run_are_named(tmp_path):
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(OutputError, match=r"data.json: the file is damaged(.|\n)*hint:"):
        check_same_run(tmp_path, FinetuneConfig(), "a")
    (tmp_path / "metrics.jsonl").write_text('[1]\n{"step": 1}\n\n3\n')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_attention_has_the_names_of_its_implementations():
    names = [FinetuneConfig(attention=name).attention for name in ("auto", *typing.get_args(lt.ops.Implementation))]
    assert len(set(names)) == 5
    assert set(lt.ops.IMPLEMENTATIONS) == set(typing.get_args(lt.ops.Implementation)), "each one has a description"
    metavar = FinetuneConfig.__dataclass_fields__["attention"].metadata["metavar"]
    assert metavar == "{auto,cudnn,splash,blocks,xla}", "the help text lists them"
