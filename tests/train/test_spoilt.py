"""Updates that make NaN of the weights although the loss and the gradients were finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import NonFiniteError
from lowtide.train import Callback

DATA = [{"x": np.full((2, 3), 1.0 + step, np.float32)} for step in range(12)]
BAD = 3
"""The number of the update that is NaN, from 0."""


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ model["w"] - 1) ** 2)


def trainer(*, mask: Any = None, **options: Any) -> lt.Trainer:
    tx = optax.sgd(lambda count: jnp.where(count == BAD, jnp.nan, 1e-3))
    model = {"w": jnp.ones((3, 1))} if mask is None else {"w": jnp.ones((3, 1)), "mask": mask}
    return lt.Trainer(model, loss_fn, tx, **options)


def is_good(trainer: lt.Trainer) -> bool:
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves((trainer.model, trainer.state.opt_state)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("on_nan", ["abort", "skip"])
@pytest.mark.parametrize("num_steps", [BAD + 1, 12])
def test_a_spoilt_update_ends_the_run_at_a_good_state(on_nan: Any, num_steps: int, tmp_path: Path) -> None:
    run = trainer(on_nan=on_nan, checkpoint_dir=tmp_path)
    with pytest.raises(NonFiniteError, match="an update made w not finite: check the learning rate"):
        run.fit(DATA, num_steps=num_steps, checkpoint_every=2, progress=False)
    assert is_good(run) and run.step == 2
    again = trainer(checkpoint_dir=tmp_path)
    assert again.restore() == 2 and is_good(again)


@pytest.mark.slow
def test_no_checkpoint_and_no_copy_is_made_of_it(tmp_path: Path) -> None:
    run = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(NonFiniteError, match="step 4: w is not finite"):
        run.fit(DATA, num_steps=12, checkpoint_every=1, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2", "3"]


@pytest.mark.slow
def test_a_run_that_goes_back_in_every_step_ends(tmp_path: Path) -> None:
    run = trainer(on_nan="roll_back", checkpoint_dir=tmp_path)  # the optimizer's count goes back, too
    with pytest.warns(UserWarning, match="w is not finite, so the weights"), pytest.raises(NonFiniteError):
        run.fit(DATA, num_steps=12, checkpoint_every=1, progress=False)
    assert is_good(run)


def test_an_exception_after_it_leaves_a_good_state_and_is_the_one_that_is_raised(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: lt.Trainer, step: int) -> None:
            if step == BAD + 1:
                raise ZeroDivisionError

    run = trainer(checkpoint_dir=tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        run.fit(DATA, num_steps=12, callbacks=[Fails()], progress=False)
    assert "an update made w not finite" in error.value.__notes__
    assert is_good(run) and not any(path.is_dir() for path in tmp_path.iterdir())


@pytest.mark.slow
def test_what_was_not_finite_from_the_beginning_and_what_may_be_is_left_alone() -> None:
    mask = jnp.array([0.0, -jnp.inf])
    run = lt.Trainer({"w": jnp.ones((3, 1)), "mask": mask}, loss_fn, optax.sgd(1e-3))
    assert len(run.fit(DATA, num_steps=12, progress=False)) == 12
    assert len(trainer(on_nan="ignore").fit(DATA, num_steps=12, progress=False)) == 12
