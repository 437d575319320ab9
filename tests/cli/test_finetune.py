"""`lowtide finetune` from arguments to files, and every way to call it wrongly."""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import lowtide as lt
from lowtide import lora, models
from lowtide.cli import main
from lowtide.cli._config_flags import _words, flag_settings, register
from lowtide.cli._finetune import _choose_tiles, _shortages
from lowtide.core import LOW_TILES
from lowtide.finetune import FinetuneConfig, config_from_dict, flag_of, read_config
from lowtide.finetune import _run as finetune_job
from lowtide.finetune._job import JobPlan
from lowtide.memory import MemoryReport, SpaceBytes
from lowtide.train._data import DataCursor
from lowtide.train._evaluation import Evaluation

TEXT = "the tide goes out and the tide comes in and the moon pulls and the sea follows\n" * 60


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data.txt").write_text(TEXT)
    return str(tmp_path / "data.txt")


@pytest.fixture
def finetune(tiny_model_dir, data, tmp_path, capfd):
    """Run the command on tiny things; returns exit status, standard output and standard error."""

    def run(*flags, model=tiny_model_dir, data=data, out="run"):
        args = ["finetune", "--model", str(model), "--data", str(data), "--out", str(tmp_path / out)]
        small = [] if {"--resume", "--seq-len"} & {*flags} else ["--seq-len", "8", "--batch-size", "4", "--rank", "2"]
        if "--config" not in flags and "--resume" not in flags:
            small += ["--config", _config(tmp_path, sample_tokens=0)]
        steps = [] if "--steps" in flags or "--resume" in flags else ["--steps", "4"]
        status = main([*args, *small, *steps, *flags])
        return (status, *capfd.readouterr())

    return run


def _records(out: Path):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sentinel
@pytest.mark.slow
def test_a_run_learns_writes_its_files_and_says_where_the_bytes_went(finetune, tmp_path, tiny_model_dir):
    status, printed, _ = finetune("--steps", "100", "--config", _config(tmp_path, learning_rate=2e-2, sample_tokens=8))
    assert status == 0
    out = tmp_path / "run"
    texts = ("predicted", "saved  ", "sample before", "sample after", "gradient tree", "; --compare", "→")
    for expected in (*texts, "answers end  at <|endoftext|> (0) "):
        assert expected in printed
    assert "stop_gradient" not in printed
    losses = [r["eval_loss"] for r in _records(out) if "eval_loss" in r]
    assert losses[-1] < losses[0] - 0.05
    assert [r["step"] for r in _records(out) if "loss" in r] == list(range(1, 101))
    memory = json.loads((out / "memory.json").read_text())
    for key in ("trainable", "frozen", "gradient", "optimizer", "device"):
        assert isinstance(memory[f"{key}_bytes"], int)
    assert not [key for key in memory if "naive" in key]
    assert memory["gradient_bytes"] == memory["trainable_bytes"]
    assert memory["target"] == "here"
    config = config_from_dict(read_config(out / "config.toml"), "config.toml")
    assert (config.num_steps, config.rank, config.learning_rate) == (100, 2, 2e-2)
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 2
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    assert all(np.abs(tensors[name]).max() > 0 for name in tensors)
    adapted = lora.load(models.load(tiny_model_dir), out / "adapter")
    assert adapted.layers["attn"]["q_proj"]["weight"].lora_b.any()


@pytest.mark.slow
def test_the_step_is_compiled_once_and_the_naive_one_after_the_run(finetune, tmp_path, monkeypatch):
    out, compiled = tmp_path / "run", []

    def analyzed(*args, **options):
        compiled.append("naive")
        assert len([r for r in _records(out) if "loss" in r]) == 4 and (out / "memory.json").is_file()
        return naive(*args, **options)

    naive, lower = finetune_job.analyze_naive, jax.stages.Lowered.compile
    monkeypatch.setattr(finetune_job, "analyze_naive", analyzed)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: (compiled.append("ours"), lower(*a, **k))[1])
    status, printed, _ = finetune("--compare")
    memory = json.loads((out / "memory.json").read_text())
    assert status == 0
    assert compiled[:2] == ["ours", "naive"]
    assert {key for key in memory if "naive" in key} == {"naive_device_bytes", "naive_by_role", "naive_gradient_bytes"}
    assert "AdamW + stop_gradient" in printed and "saved  " not in printed and "Training all weights" not in printed
    # A run without --compare counts the difference of the compiled steps.
    difference = memory["naive_by_role"]["optimizer"] - memory["by_role"]["optimizer"]
    difference += memory["naive_gradient_bytes"] - memory["gradient_bytes"]
    config = config_from_dict(read_config(out / "config.toml"), "config.toml")
    assert JobPlan.from_shapes(config).saved_bytes() == pytest.approx(difference, abs=16)


@pytest.mark.slow  # those of a job are in the tests of offloading
def test_offloaded_bytes_are_in_the_plan_and_in_the_table(finetune, tmp_path, monkeypatch):
    compiled, lower = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: (compiled.append("ours"), lower(*a, **k))[1])
    status, printed, _ = finetune("--offload", "optimizer", "--offload", "parameters")
    assert status == 0 and compiled == ["ours"]  # the naive step only where it is asked for
    for expected in ("optimizer, parameters", "on the host (pinned", "on the host"):
        assert expected in printed
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["host_bytes"] == sum(memory["host_by_role"].values()) > 0
    assert memory["host_by_role"]["optimizer"] == 2 * memory["trainable_bytes"]


@pytest.mark.slow
def test_a_full_run_learns_and_writes_a_model(finetune, tmp_path, tiny_model_dir):
    config = _config(tmp_path, learning_rate=1e-2, sample_tokens=8)
    shutil.copytree(tiny_model_dir, tmp_path / "base")
    models.save(models.load(tiny_model_dir), tmp_path / "base", dtype="bfloat16")
    sizes = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**sizes, "pad_token_id": 3}))
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    flags = ("--full", "--batch-size", "4", "--seq-len", "8", "--steps", "20", "--seed", "1", "--config", config)
    status, printed, said = finetune(*flags, model=tmp_path / "base")
    assert status == 0, said
    for expected in (
        "all parameters",
        "layers, optimizer, activations",
        "sample after",
        "Model, metrics",
    ):
        assert expected in printed
    out = tmp_path / "run"
    losses = [r["eval_loss"] for r in _records(out) if "eval_loss" in r]
    assert losses[-1] < losses[0] - 0.5
    assert not (out / "adapter").exists()
    tuned, base = models.load(out / "model"), models.load(tiny_model_dir)
    assert not np.array_equal(tuned.layers["mlp"]["up_proj"]["weight"], base.layers["mlp"]["up_proj"]["weight"])
    assert (
        models.load_tokenizer(out / "model").get_vocab_size() == models.load_tokenizer(tiny_model_dir).get_vocab_size()
    )
    assert (out / "model" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert sizes["torch_dtype"] == "bfloat16"  # as are the weights that are written, not those that train
    assert tuned.layers["mlp"]["up_proj"]["weight"].dtype == "bfloat16"
    assert json.loads((out / "model" / "config.json").read_text()) == {**sizes, "pad_token_id": 3}
    # To resume a finished run changes nothing.
    before = _records(out), (out / "model" / "model.safetensors").read_bytes()
    status, printed, _ = finetune("--resume", "--compare", model=tmp_path / "base")
    assert status == 0 and "AdamW + remat" in printed
    assert "saved  " not in printed
    assert (_records(out), (out / "model" / "model.safetensors").read_bytes()) == before


@pytest.mark.slow
def test_an_interrupt_saves_the_steps_that_were_taken(finetune, tmp_path, monkeypatch):
    """Whatever the display does with the records that are read on the way out."""
    took, before = DataCursor.next, signal.getsignal(signal.SIGINT)

    def interrupted(self, step):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
        return took(self, step)

    monkeypatch.setattr(DataCursor, "next", interrupted)
    try:
        status, printed, _ = finetune("--steps", "9")
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130 and "Continue with:" in printed
    assert [record["step"] for record in _records(tmp_path / "run") if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()


def test_float16_is_refused_on_a_cpu_before_anything_is_written(finetune, tmp_path):
    status, _, said = finetune("--compute-dtype", "float16")
    assert status == 2 and "hint: use bfloat16, which takes as many bytes" in said
    assert not (tmp_path / "run").exists()


def test_a_host_that_is_too_small_is_named():
    target = lt.target("v5e", host_bytes="1 GiB")
    report = MemoryReport(
        target=target,
        device=SpaceBytes(),
        host=SpaceBytes(argument_bytes=2 * 1024**3),
        by_role={},
        host_by_role={"frozen": 2 * 1024**3},
    )
    (said,) = _shortages(FinetuneConfig(full=True), report)
    assert "does not fit the host: 2.00 GiB of 1.00 GiB" in said
    small = dataclasses.replace(report, device=SpaceBytes(temp_bytes=1024**4), host=SpaceBytes())
    (said,) = _shortages(FinetuneConfig(offload=("optimizer",)), small)
    assert said.endswith("or use --offload parameters,activations")
    (said,) = _shortages(FinetuneConfig(), small, ("activations",))  # of a pipeline
    assert said.endswith("or use --offload activations")


@pytest.mark.parametrize(
    ("values", "saved", "is_told"),
    [
        ({"full": True}, None, True),
        ({"offload": ("optimizer", "parameters")}, None, True),
        ({"offload": ["optimizer"]}, None, False),
        ({"offload": ["optimizer"], "state_dtype": "8bit"}, None, True),
        ({"full": False, "offload": 3}, None, False),
        ({}, "full = true\n", True),
        ({}, "full = \n", False),
    ],
)
def test_what_is_on_a_tpus_host_in_few_bits_is_streamed(values, saved, is_told, tmp_path, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    flag = LOW_TILES.split("=", 1)[1]
    (tmp_path / "libtpu.so").write_text(flag)
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    if saved is not None:
        (tmp_path / "config.toml").write_text(saved)
    _choose_tiles(None if saved is None else tmp_path, values)
    assert (os.environ.get("LIBTPU_INIT_ARGS") == flag) == is_told


def test_contradicting_flags_are_named(finetune):
    _error(finetune("--full"), "rank is a setting of adapters", "leave out rank, or full")
    _error(finetune("--offload", "optimiser"), "unknown word 'optimiser'", "did you mean optimizer")


@pytest.mark.slow  # the parts are proved by the trainer's tests
def test_bfloat16_remat_and_microbatches_run(finetune, tmp_path):
    config = _config(tmp_path, param_dtype="bfloat16", compute_dtype="bfloat16", num_microbatches=2, sample_tokens=0)
    status, printed, _ = finetune("--config", config)
    assert status == 0
    assert "in 2 microbatches" in printed


@pytest.mark.slow
def test_groups_of_layers_learn_what_single_ones_do_and_wait_on_the_host(finetune, tmp_path):
    groups = ("--layers-per-remat", "2", "--offload", "activations")
    assert finetune(out="single")[0] == finetune(*groups, out="groups")[0] == 0
    single, grouped = (
        [record["loss"] for record in _records(tmp_path / name) if "loss" in record] for name in ("single", "groups")
    )
    assert len(single) == 4
    np.testing.assert_allclose(single, grouped, rtol=1e-5)
    _error(
        finetune("--layers-per-remat", "4", out="more"),
        "layers_per_remat must be an integer from 1 to 2, not 4",
        "has 2 layers",
    )
    assert not (tmp_path / "more").exists()


def _config(tmp_path, **values):
    import tomli_w

    (tmp_path / "config.toml").write_text(tomli_w.dumps(values))
    return str(tmp_path / "config.toml")


def _error(result, *parts):
    status, _, errors = result
    assert status == 2, errors
    assert "Traceback" not in errors
    for part in (*parts, "hint:"):
        assert part in errors, errors


def _broken(tmp_path, tiny_model_dir, file, content):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, broken)
    if content is None:
        (broken / file).unlink()
    else:
        (broken / file).write_bytes(content((broken / file).read_bytes()))
    return broken


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "model.safetensors: no such file"),
        ("model.safetensors", lambda data: data[: len(data) // 2], "not a complete safetensors file"),
        ("config.json", None, "config.json: no such file"),
        ("config.json", lambda d: d.replace(b'"num_hidden_layers": 2', b'"num_hidden_layers": 5'), "missing, first"),
        ("config.json", lambda d: d.replace(b"LlamaForCausalLM", b"GPT2LMHeadModel"), "unknown architecture"),
        ("tokenizer.json", None, "tokenizer.json: no such file"),
    ],
)
def test_broken_models_are_named(finetune, tmp_path, tiny_model_dir, file, content, message):
    broken = _broken(tmp_path, tiny_model_dir, file, content)
    _error(finetune(model=broken), message, str(broken))
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_here_is_not_a_tokenizer_problem(finetune):
    _error(
        finetune(model="meta-llama/Llama-3.2-1B"),
        "Llama-3.2-1B is neither a folder nor a model in the local Hugging Face cache",
        "hint: download it: hf download meta-llama/Llama-3.2-1B",
    )


def test_data_that_is_named_twice_is_refused(finetune, capfd):
    with pytest.raises(SystemExit):
        finetune("--data", "more.txt")
    assert "--data is given twice; name a folder" in capfd.readouterr().err


def test_an_adapter_that_the_model_cannot_use_leaves_nothing_behind(finetune, tmp_path):
    _error(
        finetune("--config", _config(tmp_path, targets="outer/embed")), "outer/embed/weight is also the model's head"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(finetune, tmp_path):
    result = finetune("--config", _config(tmp_path, learning_rate=1e30, max_grad_norm=1e30, sample_tokens=0))
    _error(result, "is not finite, so the run was stopped", "learning_rate", "the last checkpoint is finite")
    assert not (tmp_path / "run" / "adapter").exists()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("[0-9]*")
    assert int(saved.name) == len(_records(tmp_path / "run")) + 1  # the step that was left out
    assert all(np.isfinite(list(record.values())).all() for record in _records(tmp_path / "run"))


@pytest.mark.slow
def test_a_held_out_loss_that_is_not_finite_leaves_no_checkpoint_of_it(finetune, tmp_path, monkeypatch):
    means = lambda self, data: {"loss": float("nan") if self._store.step else 1.0}  # noqa: E731
    monkeypatch.setattr(Evaluation, "means", means)
    _error(finetune(), "step 4: eval_loss is not finite, so the run was stopped", "the last checkpoint is finite")
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_a_tokenizer_of_another_model_is_named(finetune, tmp_path, tiny_model_dir):
    other = _broken(tmp_path, tiny_model_dir, "tokenizer.json", lambda data: data)
    shutil.copy(models.base_path() / "tokenizer.json", other / "tokenizer.json")
    _error(finetune(model=other), "tokenizer.json has ids up to 2047, but the model has", "tokenizer of this model")


def test_empty_and_short_data_are_named(finetune, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    _error(finetune(data=tmp_path / "empty.txt"), "empty.txt: the data has no text")
    (tmp_path / "short.txt").write_text("tide")
    short = finetune("--rank", "2", "--seq-len", "500", data=tmp_path / "short.txt")
    _error(short, "too few for one training and one held-out")
    _error(finetune(data=tmp_path / "gone"), "gone: no such file or folder")


def test_rank_zero_and_targets_that_match_nothing_are_named(finetune, tmp_path):
    _error(finetune("--rank", "0"), "rank is out of range", "at least 1")
    _error(finetune("--config", _config(tmp_path, targets="**/query")), "'**/query'", "near")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dora", "ia3", "vera"])
def test_methods_train_and_an_adapter_goes_on_training(finetune, tmp_path, tiny_model_dir, method):
    size = ("--seq-len", "8", "--batch-size", "4")
    rank = () if method == "ia3" else ("--rank", "3")
    status, printed, _ = finetune("--method", method, *rank, *size, "--steps", "2")
    assert status == 0 and {"dora": "DoRA rank 3", "ia3": "(IA)³ on", "vera": "VeRA rank 3"}[method] in printed
    status, printed, _ = finetune("--adapter", str(tmp_path / "run" / "adapter"), *size, "--steps", "2", out="more")
    assert status == 0 and "that of" in printed
    # The second run begins where the first ended.
    ended, began = (
        [record["eval_loss"] for record in _records(tmp_path / out) if "eval_loss" in record] for out in ("run", "more")
    )
    assert began[0] == pytest.approx(ended[-1], rel=1e-6) and began[-1] != began[0]
    base = models.load(tiny_model_dir)
    first, second = (lora.load(base, tmp_path / out / "adapter") for out in ("run", "more"))
    assert lora.report(first) == lora.report(second)


def test_settings_that_a_method_has_not_are_named(finetune):
    _error(finetune("--method", "lokr"), "method is out of range", "one of lora, rslora, dora, ia3, vera")
    _error(finetune("--method", "ia3"), "rank contradicts method", "ia3 has no rank")
    _error(finetune("--method", "vera", "--alpha", "2"), "alpha contradicts method", "vera has no alpha")
    _error(finetune("--adapter", "somewhere"), "rank contradicts adapter")


def test_an_unwritable_folder_is_named(finetune, data):
    _error(finetune(out="data.txt/run"), "data.txt/run: cannot be written")


@pytest.mark.slow
def test_a_finished_run_is_left_alone_and_only_more_steps_go_on_with_it(finetune, tmp_path):
    assert finetune()[0] == 0
    before = {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}
    _error(finetune(), "the folder is not empty", "--resume")
    assert {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()} == before

    for flag, name, was, now in [("--steps", "num_steps", 4, 3), ("--batch-size", "batch_size", 4, 5)]:
        got = finetune("--resume", flag, str(now))
        _error(
            got,
            "--resume does not match the configuration",
            f"{name} = {was}",
            f"{name} = {now}",
            "only --steps may be larger",
        )
    _error(finetune("--resume", out="never"), "no run to resume")
    status, printed, _ = finetune("--resume", "--steps", "6")
    assert (
        status == 0
        and "4 of 6 done" in printed
        and "from step 4 on, the learning rate stays" in " ".join(printed.split())
    )
    records = [record for record in _records(tmp_path / "run") if "loss" in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[4]["learning_rate"] == records[5]["learning_rate"] < records[3]["learning_rate"]


@pytest.mark.parametrize("flag", ["--data", "--model", "--out", "--config"])
def test_an_unset_variable_of_a_script_is_no_path(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", "--steps", "1", flag, ""]) == 2
    assert f"{flag.strip('-')} is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_settings_are_named(finetune, tmp_path):
    _error(finetune("--config", _config(tmp_path, lerning_rate=1.0)), "unknown key 'lerning_rate'", "learning_rate")
    _error(finetune("--config", str(tmp_path / "gone.toml")), "gone.toml: cannot be read")


def test_help_and_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["finetune", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--config", "--out", "--resume", "--compare", "--steps", "--no-remat", "--distributed"):
        assert flag in text
    for field in ("num_steps", "rank", "batch_size", "seq_len"):
        assert f"(default: {getattr(FinetuneConfig(), field)})" in " ".join(text.split())
    with pytest.raises(SystemExit) as stop:
        main(["finetune", "--steps", "many"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0


SAMPLES = {
    "targets": "**/{q,v}_proj",
    "offload": "optimizer,parameters",
    "clip_mode": "layer",
    "model": "m",
    "method": "vera",
    "quantize": "nf4",
    "quantize_embeddings": "int8",
    "modules_to_save": "outer/{norm,embed}",
    "bias": "all",
    "lora_init": "pissa",
    "attention": "blocks",
    "schedule": "linear",
    "num_epochs": "0.5",
    "warmup_ratio": "0.5",
    "track": "wandb,trackio",
    "columns": "prompt=q,completion=a",
    "loss_on": "all",
    "packing": "best-fit",
    "too_long": "split",
    "objective": "cpo",
    "preference_loss": "hinge",
    "pooling": "last",
    "label_smoothing": "0.1",
    **dict.fromkeys(("beta", "nll_weight", "temperature"), "2.5"),
}
"""Values of settings that take a word of a list."""
OTHER_SETTINGS = {
    "clip_mode": {"full": True},
    "save_dtype": {"full": True},
    "decay_fraction": {"schedule": "warmup_stable_decay"},
    "early_stopping_threshold": {"early_stopping_patience": 1},
    "objective": {"data": "pairs.jsonl"},
    **{name: {"data": "pairs.jsonl", "objective": "dpo"} for name in ("beta", "preference_loss", "label_smoothing")},
    "preference_margin": {"data": "pairs.jsonl", "objective": "simpo"},
    "nll_weight": {"data": "pairs.jsonl", "objective": "cpo"},
    "desirable_weight": {"data": "pairs.jsonl", "objective": "kto"},
    "undesirable_weight": {"data": "pairs.jsonl", "objective": "kto"},
    "reward_margin": {"data": "pairs.jsonl", "objective": "reward"},
    "num_labels": {"data": "texts.jsonl", "objective": "classification"},
    "pooling": {"data": "texts.jsonl", "objective": "embedding"},
    "temperature": {"data": "texts.jsonl", "objective": "embedding"},
    "teacher": {"objective": "distillation"},
    "teacher_top_k": {"objective": "distillation", "teacher": "teacher"},
}
"""Settings that a setting depends on."""


def test_every_setting_is_a_flag_with_its_default_and_a_help():
    """A new field without a flag fails here."""
    by_type = {str: "bfloat16", int: "2", float: "0.5", tuple: "optimizer,parameters"}
    parser = argparse.ArgumentParser()
    register(parser)
    assert flag_settings(parser.parse_args([])) == {}
    helps = {action.dest: action.help for action in parser._actions}
    for field in dataclasses.fields(FinetuneConfig):
        kind = type(field.default) if field.default is not None else None
        value = SAMPLES.get(field.name) or by_type.get(kind) or ("0.5" if "rate" in field.name else "2")
        settings = flag_settings(parser.parse_args([flag_of(field.name), *([] if kind is bool else [value])]))
        assert list(settings) == [field.name]
        config = config_from_dict({**OTHER_SETTINGS.get(field.name, {}), **settings}, "flags")
        expected = {bool: True, int: 2, float: 0.5}.get(kind, value)
        got = getattr(config, field.name)
        assert got == expected or str(got) in (value, str(tuple(value.split(",")))), field.name
        text = helps[field.name]
        assert len(text) > 10 and (field.default in (None, False) or f"(default: {field.default})" in text), field.name


def test_flags_that_say_no_and_say_it_twice_win_over_the_file(finetune, tmp_path):
    config = _config(tmp_path, full=True, sample_tokens=0, targets="**/q_proj", learning_rate=1.0)
    parser = argparse.ArgumentParser()
    register(parser)
    flags = ["--no-full", "--targets", "**/{q,v}_proj", "--targets", "**/up_proj", "--learning-rate", "1e-3"]
    values = read_config(config) | flag_settings(parser.parse_args([*flags, "--offload", "none"]))
    found = config_from_dict(values, "flags")
    assert (found.full, found.targets, found.learning_rate) == (False, ("**/{q,v}_proj", "**/up_proj"), 1e-3)
    assert found.offload == ()


def test_resume_needs_a_folder(capsys):
    assert main(["finetune", "--resume"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


def test_an_empty_offload_is_no_offload_and_none_is_a_word(finetune, capfd):
    with pytest.raises(SystemExit):
        finetune("--offload", "")
    assert "the value is empty; write `none`" in capfd.readouterr().err
    assert _words("none") == () and _words("optimizer, activations") == ("optimizer", "activations")


def test_a_second_interrupt_ends_what_the_first_waits_for_without_a_traceback(monkeypatch):
    """The first has ended the command, and the process waits for threads that write."""

    def interrupted(args):
        raise KeyboardInterrupt

    ended, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr("lowtide.cli._finetune.run", interrupted)
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        assert main(["finetune"]) == 130
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [130]
