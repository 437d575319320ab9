"""Callbacks that watch a value: their counting, the learning rate they lower, and both over a resume."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError
from lowtide.train import Callback, EarlyStopping, JsonlLogger, Profile, ReduceOnPlateau

BATCHES = [np.float32(1)] * 40


def loss(model: Any, batch: Any) -> Any:
    return jnp.sum(model["w"] * batch)


def adjustable(rate: Any = 1.0) -> Any:
    """The weight falls by the rate in every step."""
    return optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=rate))


def trainer(tx: Any = None, **options: Any) -> lt.Trainer:
    return lt.Trainer({"w": jnp.zeros(())}, loss, adjustable() if tx is None else tx, **options)


class Weights(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        self.seen.append(float(trainer.model["w"]))


def fit(ours: lt.Trainer, values: Any, policy: Callback, **options: Any) -> list[float]:
    """Evaluate to these values after every step from 0; the rates of the steps taken."""
    found, weights = iter(values), Weights()
    begun = float(ours.model["w"])
    ours._evaluation.means = lambda data: {"loss": next(found)}  # pyright: ignore
    ours.fit(BATCHES, eval_data=[0], eval_every=1, callbacks=[policy, weights], **options)
    return [round(float(rate), 4) for rate in -np.diff([begun, *weights.seen])]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [1, 1, 0.5, 0.25, 0.125, 0.125]),
        ({"patience": 1}, [1, 1, 1, 0.5, 0.5, 0.5]),
        ({"cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.5]),
        ({"cooldown": 1}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ({"minimum": 0.4}, [1, 1, 0.5, 0.4, 0.4, 0.4]),
        ({"min_delta": 1.5}, [1, 0.5, 0.25, 0.125, 0.0625, 0.0625]),
    ],
)
def test_the_rate_falls_when_a_value_does_not(options: Any, rates: list[float]) -> None:
    """Better after the first step and after the fifth, by 1."""
    values = [9, 8, 8, 8, 8, 7, 7]
    assert fit(trainer(), values, ReduceOnPlateau(factor=0.5, **{"patience": 0, **options}), num_steps=6) == rates


def test_more_may_be_better_and_training_records_may_be_watched() -> None:
    rising = ReduceOnPlateau("eval_loss", mode="max", patience=0, factor=0.5)
    assert fit(trainer(), [1, 2, 3, 3, 4], rising, num_steps=4) == [1, 1, 1, 0.5]
    ours, policy = trainer(), ReduceOnPlateau("grad_norm", patience=1, factor=0.5)
    ours.fit(BATCHES, num_steps=9, callbacks=[policy])
    assert float(optax.tree.get(ours.state.opt_state, "learning_rate")) == 0.5**4


def test_a_rate_that_never_rises_and_keeps_its_type() -> None:
    """Also below the minimum, and for parameters of half precision."""
    tx = adjustable(0.125)
    ours = lt.Trainer({"w": jnp.zeros((), jnp.bfloat16)}, loss, tx)
    kind = jax.typeof(optax.tree.get(ours.state.opt_state, "learning_rate"))
    assert set(fit(ours, [1] * 5, ReduceOnPlateau(patience=0, minimum=0.25), num_steps=4)) == {0.125}
    assert jax.typeof(optax.tree.get(ours.state.opt_state, "learning_rate")) == kind


def test_no_step_is_compiled_again(compilations: Any) -> None:
    ours, policy = trainer(), ReduceOnPlateau("grad_norm", patience=0, factor=0.5)
    ours.fit(BATCHES, num_steps=2, callbacks=[policy])
    with compilations.none():
        ours.fit(BATCHES, num_steps=6, callbacks=[policy])
    assert float(optax.tree.get(ours.state.opt_state, "learning_rate")) < 0.5


@pytest.mark.slow
def test_records_have_the_rate_of_their_step() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    records = trainer(adjustable(schedule)).fit(BATCHES, num_steps=4)
    assert [record["learning_rate"] for record in records] == [1.0, 0.75, 0.5, 0.25]
    ours, policy = trainer(), ReduceOnPlateau("grad_norm", patience=0, factor=0.5)
    records = ours.fit(BATCHES, num_steps=4, callbacks=[policy])
    assert [record["learning_rate"] for record in records] == [1.0, 1.0, 0.5, 0.25]
    assert "learning_rate" not in trainer(optax.sgd(1.0)).fit(BATCHES, num_steps=1)[0]


@pytest.mark.parametrize("kind", [lt.train.ema, None, "offload", "groups"])
def test_rates_are_found_wherever_they_are(kind: Any) -> None:
    """In wrappers, on the host, and of several groups, each with its own; never a leaf of the model with that name."""
    tx: Any = adjustable()
    if kind is lt.train.ema:
        tx = lt.train.ema(tx, 0.9)
    elif kind == "offload":
        tx = lt.offload.optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=1.0))
    elif kind == "groups":
        groups = {
            name: optax.inject_hyperparams(optax.sgd)(learning_rate=rate) for name, rate in [("a", 1.0), ("b", 4.0)]
        }
        tx = optax.multi_transform(groups, {"w": "a", "learning_rate": "b"})
    given = {"w": jnp.zeros(()), "learning_rate": jnp.full((3,), 7.0)}
    ours = lt.Trainer(given, loss, tx, on_nan="ignore")
    ours.fit(BATCHES, num_steps=3, callbacks=[ReduceOnPlateau("grad_norm", patience=0, factor=0.5)])
    found = optax.tree.get_all_with_path(ours.state.opt_state, "learning_rate")
    rates = [float(rate) for path, rate in found if getattr(path[-2], "name", None) == "hyperparams"]
    assert rates == ([0.25, 1.0] if kind == "groups" else [0.25])
    np.testing.assert_array_equal(ours.model["learning_rate"], np.full(3, 7.0))


@pytest.mark.slow
def test_the_rate_and_the_counting_survive_a_resume(tmp_path: Any) -> None:
    def policies() -> ReduceOnPlateau:
        return ReduceOnPlateau(patience=1, cooldown=1, factor=0.5)

    values = [9, 8, 8, 8, 8, 8, 8, 8, 8, 8]
    whole = trainer()
    rates = fit(whole, values, policies(), num_steps=9)
    assert len(set(rates)) > 2
    for at in range(1, 9):
        first = trainer(checkpoint_dir=tmp_path / str(at))
        begun = fit(first, values, policies(), num_steps=at)
        second = trainer(checkpoint_dir=tmp_path / str(at))
        assert second.restore() == at
        assert begun + fit(second, values[at + 1 :], policies(), num_steps=9) == rates, at
        jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)


@pytest.mark.slow
def test_an_epoch_s_evaluation_is_made_up_for_after_a_checkpoint_of_its_last_step(tmp_path: Any) -> None:
    class Killed(Callback):
        def on_checkpoint(self, trainer: Any, step: int) -> None:
            if step == 4:
                trainer.checkpoints.wait()
                raise MemoryError("as if killed")

    def run(where: Any, *callbacks: Callback) -> lt.Trainer:
        ours, policy = trainer(checkpoint_dir=where), ReduceOnPlateau(patience=0, factor=0.5)
        ours.restore()
        ours._evaluation.means = lambda data: {"loss": 1.0}  # pyright: ignore
        options: Any = {"eval_data": [0], "checkpoint_every": 2, "callbacks": [policy, *callbacks]}
        ours.fit(BATCHES[:2], num_epochs=4, **options)
        return ours

    whole = run(tmp_path / "whole")
    with pytest.raises(MemoryError):
        run(tmp_path / "killed", Killed())
    resumed = run(tmp_path / "killed")
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert float(optax.tree.get(whole.state.opt_state, "learning_rate")) == 0.5**4


@pytest.mark.slow
def test_patience_survives_a_resume_and_begins_anew_in_a_new_fit(tmp_path: Any) -> None:
    first = trainer(checkpoint_dir=tmp_path)
    fit(first, [1, 2, 2], EarlyStopping(patience=3), num_steps=2)
    resumed = trainer(checkpoint_dir=tmp_path)
    resumed.restore()
    fit(resumed, [2] * 9, EarlyStopping(patience=3), num_steps=9)
    assert resumed.step == 4
    fit(resumed, [2] * 9, EarlyStopping(patience=3), num_steps=20)
    assert resumed.step == 9


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceOnPlateau])
def test_what_was_counted_of_another_value_is_not_gone_on_with(kind: Any) -> None:
    counted = kind("grad_norm", patience=2)
    counted.best, counted.waited = 0.0, 5
    state = {**counted.state(), "cooling": 3}
    fresh, same = kind("loss", patience=2), kind("grad_norm", patience=2)
    before = fresh.state()
    fresh.resume(state)
    same.resume(state)
    assert fresh.state() == before
    assert same.best == 0 and same.waited == 5


@pytest.mark.slow
def test_callbacks_of_one_class_keep_their_own_counts(tmp_path: Any) -> None:
    class Counts(Callback):
        def __init__(self, by: int) -> None:
            self.by, self.total = by, 0

        def on_step_end(self, trainer: Any, step: int) -> None:
            self.total += self.by

        def state(self) -> Any:
            return {"total": self.total}

        def resume(self, state: Any) -> None:
            self.total = state["total"]

    trainer(checkpoint_dir=tmp_path).fit(BATCHES, num_steps=3, callbacks=[Counts(1), Callback(), Counts(10)])
    ours, again = trainer(checkpoint_dir=tmp_path), [Counts(1), Counts(10), Counts(100)]
    ours.restore()
    ours.fit(BATCHES, num_steps=5, callbacks=again)
    assert [counts.total for counts in again] == [5, 50, 200]


def test_what_cannot_be_lowered_is_named() -> None:
    fixed = trainer(optax.sgd(1.0))
    with pytest.raises(
        ConfigError, match=r"(?s)rate cannot be changed.*has no learning rate.*hint: optax.inject_hyperparams"
    ):
        fixed.fit(BATCHES, num_steps=1, callbacks=[ReduceOnPlateau()])
    scheduled = trainer(adjustable(optax.constant_schedule(0.1)))
    with pytest.raises(ConfigError, match=r"(?s)rate cannot be changed.*follows a schedule.*hint:"):
        scheduled.fit(BATCHES, num_steps=1, callbacks=[ReduceOnPlateau()])
    with pytest.raises(ConfigError, match=r"(?s)rate cannot be changed.*has one of type int32.*learning_rate=1e-3"):
        trainer(adjustable(1)).fit(BATCHES, num_steps=1, callbacks=[ReduceOnPlateau()])
    with pytest.raises(ConfigError, match=r"(?s)ReduceOnPlateau monitors 'eval_loss'.*hint: .*eval_data"):
        trainer().fit(BATCHES, num_steps=1, callbacks=[ReduceOnPlateau()])
    for wrong in ({"factor": 1.0}, {"factor": 0.0}, {"minimum": -1.0}):
        factor, minimum = wrong.get("factor", 0.1), wrong.get("minimum", 0.0)
        with pytest.raises(ConfigError, match=f"between 0 and 1, and minimum at least 0, not {factor} and {minimum}"):
            ReduceOnPlateau(**wrong)
    with pytest.raises(ConfigError, match="cooldown must be an integer of at least 0, not -1"):
        ReduceOnPlateau(cooldown=-1)
    with pytest.raises(ConfigError, match="must be numbers >= 0, not -1 and 0.0"):
        ReduceOnPlateau(patience=-1)
    with pytest.raises(ConfigError, match=r"(?s)mode must be \"min\" or \"max\", not 'least'.*hint:"):
        ReduceOnPlateau(mode="least")
    half = ReduceOnPlateau(factor=jnp.float32(0.5), min_delta=jnp.float32(0.25), patience=np.int64(3))  # type: ignore
    assert (half.factor, half.min_delta, half.patience) == (0.5, 0.25, 3)


@pytest.mark.parametrize(
    ("monitor", "eval_data", "step"), [("los", None, 1), ("eval_los", BATCHES[:1], 0), ("eval_loss", None, 1)]
)
def test_a_misspelt_name_is_told_at_the_first_record_that_lacks_it(monitor: str, eval_data: Any, step: int) -> None:
    ours = trainer()
    with pytest.raises(ConfigError, match=rf"(?s)monitors '{monitor}', which is not one of .*loss.*hint:"):
        ours.fit(BATCHES, num_steps=20, eval_data=eval_data, callbacks=[EarlyStopping(monitor)])
    assert step <= ours.step <= step + 1
    if step:
        assert [record["step"] for record in ours.history][:1] == [step]


@pytest.mark.slow
def test_a_value_that_is_never_a_number_stops_the_run() -> None:
    ours = trainer()
    fit(ours, [np.nan] * 9, EarlyStopping(patience=2), num_steps=8)
    assert ours.step == 2  # the third record, after that of step 0
    short = trainer()
    fit(short, [np.nan] * 9, EarlyStopping(patience=9), num_steps=3)
    assert short.step == 3


def test_a_run_that_was_stopped_is_not_trained_on_after_a_resume(tmp_path: Any) -> None:
    first = trainer(checkpoint_dir=tmp_path)
    fit(first, [1] * 9, EarlyStopping(patience=1), num_steps=8)
    assert first.step == 2
    again = trainer(checkpoint_dir=tmp_path)
    again.restore()
    assert fit(again, [1] * 9, EarlyStopping(patience=1), num_steps=8) == [] and again.step == 2
    longer = trainer(checkpoint_dir=tmp_path)
    longer.restore()
    fit(longer, [1] * 9, EarlyStopping(patience=3), num_steps=8)
    assert longer.step == 4


def test_a_log_is_json_also_of_what_is_no_number(tmp_path: Any) -> None:
    import json

    ours = trainer(on_nan="ignore")
    ours.fit([np.float32(np.nan)], num_steps=1, callbacks=[JsonlLogger(tmp_path / "log")])

    def refuse(name: str) -> None:
        raise ValueError(name)

    record = json.loads((tmp_path / "log").read_text(), parse_constant=refuse)
    assert record["step"] == 1 and record["loss"] is None


def test_a_callback_of_several_runs_profiles_each(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", starts.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    profile = Profile(tmp_path, first=1, num_steps=1)
    for _ in range(2):
        ours = trainer()
        ours.fit(BATCHES, num_steps=3, callbacks=[profile])
        ours.fit(BATCHES, num_steps=6, callbacks=[profile])
    assert len(starts) == 2


def test_a_run_that_begins_later_is_profiled_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    ours = trainer()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: steps.append(("start", ours.step)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: steps.append(("stop", ours.step)))
    ours.fit(BATCHES, num_steps=6)
    ours.fit(BATCHES, num_steps=20, callbacks=[Profile(tmp_path, first=4, num_steps=2)])
    assert steps == [("start", 6), ("stop", 8)]
