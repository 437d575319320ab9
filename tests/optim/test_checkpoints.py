"""`lt.Trainer` with state in few bits: what it saves, and what it goes on with."""

from __future__ import annotations

from collections.abc import Sequence
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
    return sum(jnp.mean((jnp.tanh(x @ weight) - 0.5) ** 2) for weight in model.values())


def trainer(tx: Any, folder: Path, names: Sequence[str] = ("w",)) -> lt.Trainer:
    rng = np.random.default_rng(9)
    model = {name: jnp.asarray(rng.normal(size=(32, 256)).astype(np.float32)) for name in names}
    return lt.Trainer(model, loss_fn, tx, checkpoint_dir=folder)


@pytest.mark.slow
def test_a_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A weight for each format, whose moments are stored in it."""
    forms = ("8bit", "companded", "fp8", "4bit", "bfloat16")
    tx = low_precision(optax.adamw(1e-2), {f".*/{form}": form for form in forms})
    whole = trainer(tx, tmp_path / "whole", forms)
    moments = whole.state.opt_state.inner[0].mu
    assert {form: moments[form].format for form in forms} == dict(zip(forms, forms, strict=True))
    whole.fit(DATA, num_steps=8, progress=False)
    first = trainer(tx, tmp_path / "halves", forms)
    first.fit(DATA, num_steps=5, progress=False, checkpoint_every=5)
    second = trainer(tx, tmp_path / "halves", forms)
    assert second.restore() == 5
    second.fit(DATA, num_steps=8, progress=False)
    jax.tree.map(np.testing.assert_array_equal, second.model, whole.model)


@pytest.mark.slow
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
