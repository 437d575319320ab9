"""Mistakes in what a trainer is given: told before anything runs where that can be known, and in the user's words."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, DataError, StateError, StructureError
from lowtide.train import Callback

BATCHES = [np.full((4, 2), float(number), np.float32) for number in range(4)]


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((model["w"][None] - batch) ** 2)


def trainer(loss: Any = loss_fn, **options: Any) -> lt.Trainer:
    return lt.Trainer({"w": jnp.zeros(2)}, loss, optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m, x, y: 0.0, r"\(m, x, y\)"),
        (lambda m: 0.0, r"\(m\)"),
        (lambda m, x, *, mask: 0.0, r"\(m, x, \*, mask\)"),
    ],
)
def test_a_loss_of_other_arguments_is_refused_at_once(loss: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)must take a model and a batch, not {got}.*hint: a batch is one"):
        trainer(loss)


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(lambda m, x, scale: loss_fn(m, x) * scale, scale=2.0),
        lambda m, x, key, training: loss_fn(m, x),
        lambda m, x, training=False: loss_fn(m, x),
        lambda *args: loss_fn(*args),
    ],
)
def test_a_loss_that_takes_a_model_and_a_batch_in_its_own_way_is_taken(loss: Any) -> None:
    assert len(trainer(loss).fit(BATCHES, num_steps=1, progress=False)) == 1


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda loss: None, "NoneType"),
        (lambda loss: [loss, {}], r"\['float32\[\]', {}\]"),
        (lambda loss: jnp.int32(loss), r"int32\[\]"),
        (lambda loss: 1, "int"),
        (lambda loss: "loss", "str"),
        (lambda loss: (loss, loss), r"\('float32\[\]', 'float32\[\]'\)"),
    ],
)
def test_what_is_no_loss_is_described(result: Any, got: str) -> None:
    with pytest.raises(StructureError, match=rf"(?s)must return a floating-point scalar, .*, not {got}.*hint:"):
        trainer(lambda m, x: result(loss_fn(m, x))).fit(BATCHES, num_steps=1, progress=False)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_a_number_of_microbatches_is_one(number: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"(?s)num_microbatches must be an integer of at least 1, not {number!r}.*hint: 1 means"
    ):
        trainer(num_microbatches=number)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("weight", "got"), [(lambda batch: jnp.ones(batch.shape[0]), r"float32\["), (lambda batch: None, "NoneType")]
)
def test_a_weight_is_one_number_for_a_batch(weight: Any, got: str, num_microbatches: int) -> None:
    ours = trainer(weight=weight, num_microbatches=num_microbatches)
    with pytest.raises(StructureError, match=f"weight must return one number for a batch, not {got}"):
        ours.fit(BATCHES, num_steps=1, progress=False)
    with pytest.raises(StructureError, match=f"weight must return one number for a batch, not {got}"):
        ours.evaluate(BATCHES)


@pytest.mark.parametrize(
    ("batch", "got"),
    [({"x": "text"}, "str"), ({"x": np.array(["a"])}, "dtype <U1"), ({"x": object()}, "object")],
)
def test_a_batch_of_no_numbers_is_named_by_its_path(batch: Any, got: str) -> None:
    for use in (lambda ours: ours.fit([batch], num_steps=1, progress=False), lambda ours: ours.evaluate([batch])):
        with pytest.raises(DataError, match=rf"(?s)batch leaf x holds no numbers.*got: {got}.*hint: encode"):
            use(trainer())


def test_an_iterator_cannot_be_evaluated_twice() -> None:
    with pytest.raises(
        DataError, match=r"(?s)eval_data must return its batches more than once, which a generator .*hint: list"
    ):
        trainer().fit(BATCHES, num_steps=1, eval_data=(batch for batch in BATCHES))


def test_a_loader_that_is_its_own_iterator_may_begin_again() -> None:
    class Loader:
        def __init__(self, num_passes: int) -> None:
            self.left = num_passes

        def __iter__(self) -> Loader:
            self.left -= 1
            self.batches = iter(BATCHES[:2] if self.left >= 0 else [])
            return self

        def __next__(self) -> Any:
            return next(self.batches)

    records = trainer().fit(BATCHES, num_steps=2, eval_data=Loader(2), progress=False)
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 2]
    with pytest.raises(ConfigError, match=r"(?s)evaluate got no batch.*hint: .*re-iterable"):
        trainer().fit(BATCHES, num_steps=2, eval_data=Loader(1), progress=False)


def test_records_survive_the_exception_that_ends_a_run() -> None:
    ours = trainer()
    with pytest.raises(DataError):
        ours.fit(BATCHES[:2], num_steps=3, progress=False)
    assert [record["step"] for record in ours.history] == [1, 2]
    assert ours.fit(BATCHES, num_steps=3, progress=False) is ours.history


@pytest.mark.slow
def test_an_evaluation_is_the_mean_over_all_rows() -> None:
    ours, rows = trainer(), np.concatenate(BATCHES)
    uneven = [rows[:7], rows[7:14], rows[14:]]
    whole = ours.evaluate([rows])["loss"]
    assert ours.evaluate(uneven)["loss"] == pytest.approx(whole, rel=1e-6)
    assert np.mean([ours.evaluate([part])["loss"] for part in uneven]) != pytest.approx(whole, rel=1e-2)
    equal = trainer(weight=lambda batch: 1)
    assert equal.evaluate(uneven)["loss"] == pytest.approx(np.mean([ours.evaluate([p])["loss"] for p in uneven]))


class Restore(Callback):
    def __init__(self, event: str) -> None:
        self.event = event

    def on_step_end(self, trainer: Any, step: int) -> None:
        if self.event == "step":
            trainer.restore(step=1)

    def on_train_end(self, trainer: Any) -> None:
        if self.event == "end":
            trainer.restore(best=True)


def test_a_checkpoint_is_restored_when_steps_have_ended(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "num_steps": 3,
        "eval_data": BATCHES[:1],
        "eval_every": 1,
        "checkpoint_every": 1,
        "progress": False,
    }
    ours = trainer(checkpoint_dir=tmp_path / "a")
    with pytest.raises(StateError, match=r"(?s)restore was called while fit takes steps.*hint: call trainer.stop"):
        ours.fit(BATCHES, callbacks=[Restore("step")], **options)
    best = trainer(checkpoint_dir=tmp_path / "b", best="eval_loss")  # the weight moves away from what is evaluated
    assert [record["step"] for record in best.fit(BATCHES, callbacks=[Restore("end")], **options)][-1] == 3
    assert best.step == 0  # what a run begins with may be the best


def test_logs_of_others_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("absl")
    assert logger.level != logging.ERROR
    with caplog.at_level(logging.WARNING, logger="absl"):
        logger.warning("of somebody else")
    assert "of somebody else" in caplog.text


class Acts(Callback):
    """Does something after the first step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 1:
            self.act(trainer)


def test_the_step_is_not_set_while_fit_takes_steps() -> None:
    ours = trainer()
    with pytest.raises(StateError, match=r"(?s)setting step was called while fit takes steps.*hint:"):
        ours.fit(BATCHES, num_steps=4, callbacks=[Acts(lambda t: setattr(t, "step", 100))], progress=False)
    assert ours.step == 1


def test_a_fit_inside_of_fit_is_refused_and_changes_nothing() -> None:
    def nested(ours: Any) -> None:
        ours.stop()
        with pytest.raises(StateError, match="fit was called while another fit is running"):
            ours.fit(BATCHES, num_steps=4, progress=False)

    ours = trainer()
    records = ours.fit(BATCHES, num_steps=4, callbacks=[Acts(nested)], progress=False)
    assert ours.step == 1 and ours.history is records


class Scaled:
    scale = 1.0

    def of(self, model: Any, batch: Any) -> Any:
        return batch * self.scale


@dataclasses.dataclass
class Holds:
    scale: np.ndarray

    def __call__(self, model: Any, batch: Any) -> Any:
        return batch * self.scale[None]


def test_functions_of_predictions_that_look_the_same_are_told_apart() -> None:
    ours, scaled = trainer(), Scaled()
    for scale in (1.0, 10.0):
        scaled.scale = scale
        np.testing.assert_array_equal(ours.predict(BATCHES[1:2], scaled.of), BATCHES[1] * scale)
    for scale in (1.0, 10.0):
        np.testing.assert_array_equal(ours.predict(BATCHES[1:2], Holds(np.full(2, scale))), BATCHES[1] * scale)


def test_outputs_of_the_average_are_not_read_after_it() -> None:
    ours = lt.Trainer({"w": jnp.zeros(2)}, loss_fn, lt.train.ema(optax.sgd(0.1), decay=0.9))
    ours.fit(BATCHES, num_steps=4, progress=False)

    def outputs() -> Any:
        return ours.predict_batches(BATCHES[:2], lambda model, batch: model["w"])

    before = outputs()
    with ours.averaged():
        assert len(list(outputs())) == 2
        inside = outputs()
        with pytest.raises(StateError, match="read outside, or the reverse"):
            next(before)
    with pytest.raises(StateError, match="inside of averaged and is read outside"):
        next(inside)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("ids", [np.array([0, 2**40]), np.array([2**63], np.uint64), np.int64(-(2**31) - 1), 2**40])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_integers_that_jax_would_cut_are_refused(ids: Any, is_sharded: bool) -> None:
    """A hash or a time in 64 bits came to the step as its lower 32."""
    options = {"sharding": lt.train.ShardingRules(mesh=lt.train.make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))}
    ours = trainer(lambda m, batch: loss_fn(m, batch["x"]), **(options if is_sharded else {}))
    batch = {"x": BATCHES[0], "ids": {"user": ids}}
    for use in (lambda: ours.evaluate([batch]), lambda: ours.fit([batch], num_steps=1, progress=False)):
        with pytest.raises(DataError, match=r"(?s)leaf ids/user holds integers of more than 32 bits.*hint:"):
            use()
    batch["ids"]["user"] = np.array([-(2**31), 2**31 - 1])
    assert ours.fit([batch], num_steps=1, progress=False)


def test_a_dataclass_that_is_no_pytree_says_how_to_make_it_one() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Any

    with pytest.raises(DataError, match="hint: .*register_dataclass"):
        trainer().fit([Batch(BATCHES[0])], num_steps=1, progress=False)


@pytest.mark.parametrize("metrics", [{1: 0.0}, {"phase": 1j}, {"eval_loss": 0.0}], ids=str)
def test_what_cannot_be_recorded_under_its_name_is_refused(metrics: Any) -> None:
    metrics = {name: jnp.asarray(value) for name, value in metrics.items()}
    with pytest.raises(StructureError, match=r"metric.* (must be text|must be a real scalar|is reserved)"):
        trainer(lambda m, x: (loss_fn(m, x), metrics)).fit(BATCHES, num_steps=1, progress=False)


def test_a_name_of_an_event_that_does_not_come_is_told() -> None:
    class Typo(Callback):
        def on_batch_end(self, trainer: lt.Trainer, step: int) -> None:
            raise AssertionError

    with pytest.warns(UserWarning, match="(?s)Typo.on_batch_end is never called.*did you mean on_step_end"):
        trainer().fit(BATCHES, num_steps=1, callbacks=[Typo()], progress=False)


@pytest.mark.parametrize("seed", [2**32, 2**63, -(2**31) - 1])
def test_a_seed_has_32_bits(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer from -2,147,483,648 to 4,294,967,295, not"):
        trainer(seed=seed)


def test_flags_of_jax_for_debugging() -> None:
    with jax.disable_jit(), pytest.raises(ConfigError, match=r"(?s)jax.disable_jit is on.*hint:"):
        trainer().fit(BATCHES, num_steps=1, progress=False)
    bad = [BATCHES[0], BATCHES[1] * np.nan]
    with jax.debug_nans(True), pytest.warns(UserWarning, match="jax_debug_nans is on, .* donates no buffers"):
        ours = trainer()
        with pytest.raises(Exception, match="nan"):  # an error of JAX' own
            ours.fit(bad, num_steps=2, progress=False)
    assert np.isfinite(ours.model["w"]).all()


def test_an_optimizer_that_takes_no_value_and_one_that_wants_more() -> None:
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2)
    model = {"w": jnp.zeros(2)}
    assert len(lt.Trainer(model, loss_fn, sam).fit(BATCHES, num_steps=4, progress=False)) == 4
    with pytest.raises(TypeError) as error:
        lt.Trainer({"w": jnp.zeros(2)}, loss_fn, optax.lbfgs()).fit(BATCHES, num_steps=1, progress=False)
    assert any("raised by the optimizer, whose update gets" in note for note in error.value.__notes__)


def test_a_terminal_that_was_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    assert len(trainer().fit(BATCHES, num_steps=2, eval_data=BATCHES)) == 4
