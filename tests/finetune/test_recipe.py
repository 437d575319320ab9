import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowtide.core import ConfigError
from lowtide.finetune import FinetuneConfig, config_from_dict, config_to_toml, open_run, read_config, setting_of
from lowtide.finetune._config import _SYNONYMS, with_seq_len, with_steps
from lowtide.finetune._job import adamw, learning_rate, optimizer
from lowtide.finetune._run import stopping_callbacks
from lowtide.finetune._run_folder import check_same_run, write_config


def rates(num_steps=100, **settings):
    warmup = {} if "warmup_ratio" in settings else {"warmup_steps": 20}
    schedule = learning_rate(FinetuneConfig(num_steps=num_steps, learning_rate=1.0, **{**warmup, **settings}))
    return np.asarray(jax.vmap(schedule)(jnp.arange(num_steps + 20)))


@pytest.mark.slow_after(8)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "cosine"}, {19: 20 / 21, 20: 1.0, 60: 0.55, 100: 0.1, 119: 0.1}),
        ({"schedule": "linear"}, {20: 1.0, 60: 0.55, 100: 0.1, 119: 0.1}),
        ({"schedule": "linear", "final_rate_fraction": 0}, {60: 0.5, 100: 0.0, 119: 0.0}),
        ({"schedule": "constant"}, {0: 1 / 21, 20: 1.0, 119: 1.0}),
        ({"schedule": "inverse_sqrt"}, {20: 1.0, 80: 0.5}),
        ({"schedule": "warmup_stable_decay", "decay_fraction": 0.2}, {20: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 119: 0.1}),
        ({"schedule": "linear", "warmup_ratio": 0.5}, {50: 1.0, 75: 0.55}),
        ({"schedule": "linear", "warmup_steps": 0}, {0: 1.0, 50: 0.55}),
        ({"schedule": "linear", "schedule_steps": 60}, {40: 0.55, 60: 0.1, 99: 0.1}),
    ],
)
def test_a_schedule_is_what_its_name_says(settings, expected):
    found = rates(**settings)
    for step, rate in expected.items():
        assert found[step] == pytest.approx(rate, abs=1e-6), step


def test_the_default_warm_up_is_a_tenth_of_the_steps():
    for num_steps, warmup in ((50, 5), (200, 20)):
        by_ratio = learning_rate(FinetuneConfig(num_steps=num_steps, learning_rate=1.0))
        assert by_ratio(warmup - 1) == pytest.approx(warmup / (warmup + 1)) and by_ratio(warmup) == 1.0


@pytest.mark.parametrize(
    ("model", "context", "longest", "seq_len"),
    [(None, 512, None, 128), (None, 512, 20, 64), ("m", 512, None, 512), ("m", 2**17, None, 2048),
     ("m", 2**17, 10**6, 2048), ("m", 512, 129, 192), ("m", 100, 99, 100), ("m", 512, 0, 64)],
)  # fmt: skip
def test_a_length_that_is_not_given_is_that_of_the_longest_record(model, context, longest, seq_len):
    assert with_seq_len(FinetuneConfig(model=model), context, longest).seq_len == seq_len
    assert with_seq_len(FinetuneConfig(model=model, seq_len=7), context, longest).seq_len == 7


def test_the_default_is_the_schedule_of_earlier_runs():
    before = optax.warmup_cosine_decay_schedule(1 / 21, 1.0, 20, 100, end_value=0.1)
    np.testing.assert_allclose(rates(), [before(step) for step in range(120)], rtol=1e-6)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_of_a_step_has_a_rate(schedule, num_steps):
    found = rates(num_steps, schedule=schedule)
    assert np.isfinite(found).all() and (found[:num_steps] > 0).all()


def test_epochs_are_steps_of_the_data():
    config = FinetuneConfig(num_epochs=2.5, batch_size=8)
    assert with_steps(config, 30) == FinetuneConfig(num_steps=10, batch_size=8)
    assert with_steps(FinetuneConfig(), 30) == FinetuneConfig()


@pytest.mark.slow
def test_settings_of_the_optimizer_reach_it():
    grads, params = {"w": jnp.full(4, 3.0)}, {"w": jnp.zeros(4)}
    config = FinetuneConfig(adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=0.1, weight_decay=0.2)
    expected = optax.adamw(0.1, b1=0.5, b2=0.6, eps=0.1, weight_decay=0.2)
    for ours in (adamw(config, lambda _: 0.1), optimizer(dataclasses.replace(config, max_grad_norm=0), lambda _: 0.1)):
        (found, _), (right, _) = (tx.update(grads, tx.init(params), params) for tx in (ours, expected))
        np.testing.assert_allclose(found["w"], right["w"], rtol=1e-6)


def test_patience_counts_as_transformers_does():
    (watcher,) = stopping_callbacks(FinetuneConfig(early_stopping_patience=3, early_stopping_threshold=0.1))
    assert (watcher.monitor, watcher.patience, watcher.min_delta) == ("eval_loss", 2, 0.1)
    assert stopping_callbacks(FinetuneConfig()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_epochs": 1, "num_steps": 5}, r"num_epochs contradicts num_steps(.|\n)*hint: leave one"),
        ({"warmup_ratio": 0.2, "warmup_steps": 5}, r"warmup_ratio contradicts warmup_steps"),
        (
            {"schedule": "constant", "final_rate_fraction": 0.0},
            r"final_rate_fraction contradicts schedule.*no final rate",
        ),
        ({"decay_fraction": 0.3}, r"decay_fraction contradicts schedule.*cosine has no stable part"),
        ({"full": True, "max_grad_norm": 0, "clip_mode": "layer"}, r"clip_mode contradicts max_grad_norm"),
        ({"early_stopping_threshold": 0.1}, r"without early_stopping_patience(.|\n)*hint:"),
        ({"early_stopping_patience": 0}, r"early_stopping_patience is out of range(.|\n)*at least 1"),
        ({"schedule": "step"}, r"schedule is out of range(.|\n)*inverse_sqrt"),
        ({"adam_beta2": 1.0}, r"adam_beta2 is out of range(.|\n)*less than 1"),
        ({"lora_r": 8}, r"unknown key 'lora_r'(.|\n)*hint: lora_r is a setting of other libraries; use rank"),
        ({"gradient_accumulation_steps": 8}, r"hint:.*num_microbatches, the parts of a batch"),
        ({"save_total_limit": 8}, r"hint:.*max_to_keep"),
    ],
)
def test_contradictions_and_other_libraries_names_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values, "c.toml")


def test_hints_name_settings_that_there_are():
    fields = {field.name for field in dataclasses.fields(FinetuneConfig)}
    assert {*_SYNONYMS} - {"track", "project", "run_name"} <= fields
    names = [name for names in _SYNONYMS.values() for name in names.split()]
    assert len({*names}) == len(names) and not fields & {*names}
    assert setting_of("--max-seq-length=512") == "seq_len" and setting_of("--rank") is None
    assert setting_of("sample_packing") == "packing" and setting_of("peft_use_dora") == "--method dora"


def test_a_run_of_epochs_is_resumed_and_given_more_steps(tmp_path):
    config = FinetuneConfig(num_epochs=2)
    write_config(tmp_path, config)
    assert "num_steps" not in read_config(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="has not started"):
        open_run(tmp_path, {"num_steps": 9}, "flags", resume=True)
    check_same_run(tmp_path, with_steps(config, 24), "a")
    assert json.loads((tmp_path / "data.json").read_text())["num_steps"] == 6
    assert open_run(tmp_path, {}, "flags", resume=True) == config
    assert open_run(tmp_path, {"num_epochs": 2}, "flags", resume=True) == config
    longer = open_run(tmp_path, {"num_steps": 9}, "flags", resume=True)
    assert (longer.num_epochs, longer.num_steps, longer.schedule_steps) == (None, 9, 6)
    check_same_run(tmp_path, longer, "a")
    for values in ({"num_epochs": 3}, {"num_steps": 5}, {"schedule": "linear"}):
        with pytest.raises(ConfigError, match="does not match the configuration"):
            open_run(tmp_path, values, "flags", resume=True)


def test_an_edited_schedule_is_refused_and_what_is_kept_may_change(tmp_path):
    check_same_run(tmp_path, FinetuneConfig(), "a")
    check_same_run(tmp_path, FinetuneConfig(max_to_keep=5, keep_best=True, early_stopping_patience=2), "a")
    for values in ({"schedule": "linear"}, {"adam_beta1": 0.8}, {"warmup_ratio": 0.2}, {"final_rate_fraction": 0.0}):
        with pytest.raises(ConfigError, match=r"config.toml was changed"):
            check_same_run(tmp_path, FinetuneConfig(**values), "a")


def test_every_setting_survives_toml(tmp_path):
    config = FinetuneConfig(num_epochs=1.5, schedule="linear", max_to_keep=3, load_best_at_end=True, warmup_ratio=0.2)
    (tmp_path / "c.toml").write_text(config_to_toml(config))
    assert config_from_dict(read_config(tmp_path / "c.toml"), "c.toml") == config
