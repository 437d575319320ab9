"""`lt.Trainer` with state in few bits: what it saves, and what it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import lowtide as lt
from lowtide.core import LowtideError
from lowtide.optim import PackedArray, low_precision

DATA = [np.random.default_rng(at).normal(size=(4, 32)).astype(np.float32) for at in range(8)]


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ model["w"]) - 0.5) ** 2)


def trainer(tx: Any, folder: Path) -> lt.Trainer:
    model = {"w": jnp.asarray(np.random.default_rng(9).normal(size=(32, 256)).astype(np.float32))}
    return lt.Trainer(model, loss_fn, tx, checkpoint_dir=folder)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["8bit", "companded", "fp8", "4bit", "bfloat16"])
def test_a_trainer_goes_on_bit_for_bit(form: str, tmp_path: Path) -> None:
    tx = low_precision(optax.adamw(1e-2), form)
    whole = trainer(tx, tmp_path / "whole")
    whole.fit(DATA, num_steps=8, progress=False)
    first = trainer(tx, tmp_path / "halves")
    first.fit(DATA, num_steps=5, progress=False, checkpoint_every=5)
    second = trainer(tx, tmp_path / "halves")
    assert second.restore() == 5
    second.fit(DATA, num_steps=8, progress=False)
    assert np.array_equal(second.model["w"], whole.model["w"])


def test_a_checkpoint_of_other_state_is_refused(tmp_path: Path) -> None:
    trainer(optax.adamw(1e-2), tmp_path).fit(DATA, num_steps=2, progress=False, checkpoint_every=2)
    ours = trainer(low_precision(optax.adamw(1e-2)), tmp_path)
    with pytest.raises(LowtideError, match=r"(?s)hint:"):
        ours.restore()
    assert isinstance(low_precision(optax.adamw(1e-2)).init(ours.model).inner[0].mu["w"], PackedArray)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["8bit", "bfloat16"])
def test_an_optimizer_of_nnx_comes_back_from_orbax(form: str, tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    def made() -> Any:
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, low_precision(optax.adamw(1e-2), form), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(jnp.ones((8, 64))) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    one, other = made(), made()
    first = step(*one)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(one))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: nnx.state(other))))
    again = step(*one)
    assert float(step(*other)) == float(again) != float(first)
