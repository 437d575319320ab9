"""Batches in the order of a run."""

import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt
from lowtide.train import array_data


def test_array_data_is_shuffled_anew_in_every_epoch_and_gives_each_example_once():
    seen = []
    data = array_data(np.arange(8, dtype=np.float32), 2).map(lambda batch: (seen.append(batch.tolist()), batch)[1])
    trainer = lt.Trainer({"w": jnp.zeros(())}, lambda m, x: jnp.mean((m["w"] - x) ** 2), optax.sgd(0.1))
    trainer.fit(data, num_epochs=3)
    epochs = [sum(seen[at : at + 4], []) for at in (0, 4, 8)]
    assert len(seen) == 12 and all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
