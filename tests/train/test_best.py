"""The best checkpoint, beside the newest."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, OutputError, StateError
from lowtide.train import Callback

BATCHES = [np.float32(1)] * 40


def trainer(where: Any, **options: Any) -> lt.Trainer:
    """One weight that is the number of steps taken."""
    return lt.Trainer(
        {"w": jnp.zeros(())}, lambda m, x: -m["w"] * x, optax.sgd(1.0), checkpoint_dir=where, rollback=False, **options
    )


def losses(*values: float) -> Any:
    """Means of evaluations that are these."""
    found = iter(values)
    return lambda data: {"loss": next(found), "accuracy": 0.5}


def fit(ours: lt.Trainer, num_steps: int, *values: float, **options: Any) -> Any:
    ours._evaluation.means = losses(*values)  # pyright: ignore
    return ours.fit(BATCHES, num_steps=num_steps, eval_data=[0], eval_every=2, **options)


def kept(where: Any) -> list[int]:
    return sorted(int(path.name) for path in where.iterdir() if path.name.isdigit())


class Saved(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        self.steps.append(step)


@pytest.mark.slow
def test_the_best_is_saved_where_it_is_found_and_stays_beside_the_newest(tmp_path: Any) -> None:
    saved, ours = Saved(), trainer(tmp_path, best="eval_loss", max_to_keep=2)
    fit(ours, 14, 9, 5, 2, 3, 4, 5, 6, 7, checkpoint_every=3, callbacks=[saved])
    assert saved.steps == [0, 2, 3, 4, 6, 9, 12, 14]  # what a run begins with may stay the best
    assert kept(tmp_path) == [4, 12, 14]
    other = trainer(tmp_path, best="eval_loss")
    assert other.restore(best=True) == 4 and float(other.model["w"]) == 4
    assert other.restore(step=12) == 12 and float(other.model["w"]) == 12
    with pytest.raises(OutputError, match=r"(?s)a checkpoint of step 14, but the trainer is at step 12.*hint:"):
        fit(other, 14, 1.0)
    assert other.restore() == 14 and float(other.model["w"]) == 14


@pytest.mark.slow
def test_the_best_of_all_runs_survives_resuming(tmp_path: Any) -> None:
    fit(trainer(tmp_path, best="eval_loss", max_to_keep=1), 6, 9, 2, 3, 4)
    assert kept(tmp_path) == [2, 6]
    second = trainer(tmp_path, best="eval_loss", max_to_keep=1)
    assert second.restore() == 6
    fit(second, 10, 5, 2)  # at 8 and 10; not better
    assert kept(tmp_path) == [2, 10]
    third = trainer(tmp_path, best="eval_loss", max_to_keep=1)
    third.restore()
    fit(third, 16, 1, 7, 8)
    assert kept(tmp_path) == [12, 16]
    assert third.restore(best=True) == 12


@pytest.mark.slow
def test_more_may_be_better_and_a_saved_step_may_be_evaluated_later(tmp_path: Any) -> None:
    ours = trainer(tmp_path, best="eval_loss", best_mode="max", max_to_keep=1)
    ours._evaluation.means = losses(0, 7, 3, 4)  # pyright: ignore
    # The checkpoints at 2, 4 and 6 are written before the epochs' evaluations.
    ours.fit(BATCHES[:2], num_epochs=3, eval_data=[0], checkpoint_every=2)
    assert kept(tmp_path) == [2, 6]
    assert trainer(tmp_path, best="eval_loss", best_mode="max").restore(best=True) == 2


@pytest.mark.slow
def test_a_value_whose_checkpoint_was_never_complete_is_passed_over(tmp_path: Any) -> None:
    fit(trainer(tmp_path, best="eval_loss"), 6, 9, 3, 4, 5)
    file = tmp_path / "evaluations.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "8": {"eval_loss": 1.0}}))
    ours = trainer(tmp_path, best="eval_loss")
    assert ours.restore(best=True) == 2
    assert ours.restore() == 6
    fit(ours, 8, 1.0)
    assert ours.restore(best=True) == 8


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("is_evaluated_again", [False, True])
def test_an_evaluation_is_of_the_weights_that_were_evaluated(is_evaluated_again: bool, tmp_path: Any) -> None:
    class Edits(Callback):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 1:
                trainer.update({"w": jnp.float32(50)})

    ours = trainer(tmp_path, best="eval_loss")
    ours._evaluation.means = losses(9, 3, 1, 2)  # pyright: ignore
    ours.fit(BATCHES[:2], num_epochs=2, eval_data=[0], checkpoint_every=2, callbacks=[Edits()])
    if is_evaluated_again:
        ours.checkpoints.evaluated(4, {"step": 4, "eval_loss": 1.0})  # pyright: ignore
        ours.state = dataclasses.replace(ours.state)
        ours.save()
    for reader in (ours, trainer(tmp_path, best="eval_loss")):
        assert reader.restore(best=True) == (4 if is_evaluated_again else 2)
        assert float(reader.model["w"]) == (50 if is_evaluated_again else 2)


def test_a_value_that_is_no_number_is_never_the_best(tmp_path: Any) -> None:
    ours = trainer(tmp_path, best="eval_loss", max_to_keep=1)
    fit(ours, 6, float("nan"), float("nan"), 3.0, float("nan"))
    assert kept(tmp_path) == [4, 6]


@pytest.mark.slow
def test_leftovers_of_a_killed_run_are_deleted_by_the_next_that_saves(tmp_path: Any) -> None:
    fit(trainer(tmp_path, best="eval_loss"), 2, 2, 1)
    half, value = tmp_path / "4.orbax-checkpoint-tmp", tmp_path / ".evaluations.json.0123.tmp"
    (half / "state").mkdir(parents=True)
    value.write_text("{")
    ours = trainer(tmp_path, best="eval_loss")
    assert ours.restore() == 2
    assert half.is_dir() and value.is_file(), "who reads leaves them: their writer may be at work"
    fit(ours, 6, 3, 4)
    assert not half.exists() and not value.exists()


def test_what_cannot_be_the_best_or_is_not_there_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)best needs checkpoint_dir.*hint: Trainer"):
        trainer(None, best="eval_loss")
    with pytest.raises(ConfigError, match=r"(?s)best_mode must be \"min\" or \"max\", not 'least'.*hint:"):
        trainer(tmp_path, best="eval_loss", best_mode="least")
    with pytest.raises(ConfigError, match="max_to_keep must be an integer of at least 1, not 0"):
        trainer(tmp_path, max_to_keep=0)
    with pytest.raises(ConfigError, match=r"(?s)best='eval_loss' needs evaluations.*hint: pass eval_data"):
        trainer(tmp_path, best="eval_loss").fit(BATCHES, num_steps=1)
    with pytest.raises(
        ConfigError, match=r"(?s)best='loss' is not a value.*which has eval_loss, eval_accuracy.*hint: return it"
    ):
        fit(trainer(tmp_path, best="loss"), 2, 1)
    with pytest.raises(
        ConfigError, match=r"(?s)no checkpoint was evaluated.*got: no checkpoint.*hint:.*best=\"eval_loss\""
    ):
        trainer(tmp_path, best="eval_loss").restore(best=True)
    ours = trainer(tmp_path)
    ours.fit(BATCHES, num_steps=4, checkpoint_every=2)
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint of step 3.*got: steps 2, 4.*hint:"):
        ours.restore(step=3)
    assert ours.step == 4 and float(ours.model["w"]) == 4
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint was evaluated.*got: steps 2, 4"):
        ours.restore(best=True)
    with pytest.raises(ConfigError, match="takes step or best, not both step=2 and best=True"):
        ours.restore(step=2, best=True)
    for file in (tmp_path / "2" / "notes").rglob("*"):
        file.unlink()
    with pytest.raises(StateError, match=r"(?s)checkpoint of step 2 in .* is damaged.*hint: restore\(\) loads"):
        ours.restore(step=2)
    assert ours.restore() == 4
