"""Batches in the order of a run, and how they get to the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt
from lowtide.train import array_data


def test_a_batch_may_be_filled_again_while_its_step_runs() -> None:
    """Loaders reuse their buffers, and a call on a CPU would read NumPy's own."""
    rows = 4096

    def loss_fn(w: Any, batch: Any) -> Any:
        slow = jax.lax.fori_loop(0, 8, lambda _, a: jnp.tanh(a @ a), jnp.full((512, 512), 0.01) * w)
        return jnp.mean(batch) * w + 0 * jnp.sum(slow)

    memory = np.zeros(4 * rows + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :][: 4 * rows].view(np.float32)  # what a device can share
    trainer = lt.Trainer(jnp.ones(()), loss_fn, optax.sgd(0.0))
    losses = []
    for value in (1.0, 2.0, 3.0):
        aligned[:] = value
        losses.append(trainer.advance(aligned)["loss"])
        aligned[:] = 1000.0
    assert [float(loss) for loss in losses] == [1.0, 2.0, 3.0]


def test_types_that_jax_does_not_have_are_those_that_it_makes_of_them() -> None:
    seen = []

    def loss_fn(w: Any, batch: Any) -> Any:
        seen.append({name: leaf.dtype for name, leaf in batch.items()})
        return jnp.mean(w[None] * batch["x"]) + 0 * jnp.sum(batch["label"]) * batch["scale"]

    trainer = lt.Trainer(jnp.ones(2), loss_fn, optax.sgd(0.1))
    batch = {"x": np.ones((3, 2)), "label": np.arange(3), "scale": 2.0}
    trainer.fit([batch] * 2, num_steps=2)
    assert seen[0] == {"x": jnp.float32, "label": jnp.int32, "scale": jnp.float32}


def test_array_data_is_shuffled_anew_in_every_epoch_and_gives_each_example_once():
    seen = []
    data = array_data(np.arange(8, dtype=np.float32), 2).map(lambda batch: (seen.append(batch.tolist()), batch)[1])
    trainer = lt.Trainer({"w": jnp.zeros(())}, lambda m, x: jnp.mean((m["w"] - x) ** 2), optax.sgd(0.1))
    trainer.fit(data, num_epochs=3)
    epochs = [sum(seen[at : at + 4], []) for at in (0, 4, 8)]
    assert len(seen) == 12 and all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
