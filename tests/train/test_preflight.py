"""What `fit` says about memory before its first step, and when it runs out."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, OutOfMemoryError

WIDTH = 256


def trainer(loss=None, **options):
    model = {"up": jnp.ones((WIDTH, WIDTH)), "base": jnp.ones((WIDTH, WIDTH))}

    def plain(model, x):
        return jnp.mean((jax.nn.relu(x @ model["up"]) @ model["base"]) ** 2)

    return lt.Trainer(model, loss or plain, optax.adam(1e-3), wrt="up", **options)


DATA = [np.ones((8, WIDTH), np.float32)] * 3
STATE = 3 * 4 * WIDTH**2


@pytest.mark.slow
def test_the_bytes_of_each_role_are_printed_beside_the_budget(capfd):
    ours = trainer(budget="64 MiB")
    ours.fit(DATA, num_steps=2, eval_data=DATA)
    printed = capfd.readouterr()
    assert not printed.out
    report = ours.memory(DATA[0])
    for text in (
        "trainable 256.00 KiB",
        "optimizer 512.00 KiB",
        "frozen 256.00 KiB",
        "batch 8.00 KiB",
        f"predicted {report.device_bytes / 2**20:.2f} MiB of 64.00 MiB",
        "step 2 eval_loss",
    ):
        assert text in " ".join(printed.err.split()), printed.err
    assert report.device_bytes >= STATE + 4 * WIDTH**2


def test_a_notebook_shows_some_losses(monkeypatch):
    shown, display = [], types.ModuleType("IPython.display")
    display.display = lambda output: shown.append(output.text)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("builtins.get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    records = trainer().fit(DATA * 10, num_steps=30)
    lines = [text for text in shown if "s/step" in text]
    steps = [1, *range(3, 31, 3)]
    assert [line.split()[:4] for line in lines] == [
        ["step", f"{step}", "loss", f"{records[step - 1]['loss']:.4f}"] for step in steps
    ]


@pytest.mark.slow
def test_nothing_is_printed_when_nothing_is_asked_for(capfd):
    trainer().fit(DATA, num_steps=2, eval_data=DATA, progress=False)
    printed = capfd.readouterr()
    assert not printed.out and not printed.err


@pytest.mark.slow
def test_a_step_over_the_budget_is_refused_with_owners_and_remedies_and_nothing_is_lost():
    ours = trainer(budget=2**20)
    with pytest.raises(OutOfMemoryError, match=r"(?s)before its first step: .*\(1.00 MiB usable\).*hint:") as raised:
        ours.fit(DATA, num_steps=2, progress=False)
    text = str(raised.value)
    assert "optimizer" in text and "frozen" in text and "base" in text
    assert raised.value.report.device_bytes > 2**20
    assert "the trainer holds the state of step 0" in raised.value.__notes__[-1]
    ours.budget_bytes = 2**30
    assert len(ours.fit(DATA, num_steps=2, progress=False)) == 2


def test_remedies_are_listed_for_activations():
    def deep(model, x):
        for _ in range(8):
            x = jnp.tanh(x @ model["up"] + model["base"][:1])
        return jnp.mean(x**2)

    error = trainer(deep).shortage(jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32), "in a test")
    assert "remedies, each applied separately:\n  1. " in str(error) and error.remedies


@pytest.mark.parametrize("budget", [0, -1, "0 MiB"])
def test_a_budget_of_nothing_is_an_error(budget):
    with pytest.raises(ConfigError, match=r"(?s)budget must be an integer of at least 1.*hint:"):
        trainer(budget=budget)
    ours = trainer()
    with pytest.raises(ConfigError, match="budget must be an integer of at least 1"):
        ours.budget_bytes = budget
    ours.budget_bytes = "2 MiB"
    assert ours.budget_bytes == 2 * 2**20


@pytest.mark.slow
def test_memory_that_runs_out_in_a_step_is_explained_and_the_state_is_safe():
    def fail(value):
        if fail.now:
            raise RuntimeError("RESOURCE_EXHAUSTED: planted")
        return np.asarray(value)

    def loss(model, x):
        value = jnp.mean((x @ model["up"] @ model["base"]) ** 2)
        seen = jax.pure_callback(fail, jax.ShapeDtypeStruct((), value.dtype), jax.lax.stop_gradient(value))
        return value + 0 * seen

    fail.now = True
    ours = trainer(loss)
    before = np.array(ours.model["up"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as raised:
        ours.fit(DATA, num_steps=2, progress=False)
    notes = "\n".join(raised.value.__notes__)
    assert "the trainer is back at step 0" in notes
    assert "out of memory in fit: the program needs" in notes and "optimizer" in notes and "num_microbatches" in notes
    np.testing.assert_array_equal(ours.model["up"], before)
    fail.now = False
    assert len(ours.fit(DATA, num_steps=2, progress=False)) == 2


def test_looking_ahead_compiles_the_step_once(compilations):
    ours = trainer()
    ours.fit(DATA, num_steps=1, progress=False)
    with compilations.none():
        ours.fit(DATA, num_steps=3, progress=False)


def test_a_step_over_the_budget_is_refused_every_time_and_after_it_was_measured():
    ours = trainer(budget=2**20)
    ours.memory(DATA[0])
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="before its first step"):
            ours.advance(DATA[0])
    assert ours.step == 0
