"""A run that is killed three times: `python killed_data.py FOLDER SEED KIND` prints the examples that it saw."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import optax
from killed import cut_off, digest, whole

import lowtide as lt

NUM_EXAMPLES, BATCH, NUM_EPOCHS, NUM_KILLS = 24, 2, 8, 3


class Again:
    """A plain iterable: it begins anew, and has no state."""

    def __iter__(self) -> Any:
        order = np.random.default_rng(3).permutation(NUM_EXAMPLES)
        return iter(np.split(order.astype(np.float32), NUM_EXAMPLES // BATCH))


def dataset() -> Any:
    order = grain.MapDataset.range(NUM_EXAMPLES).seed(1).shuffle()
    return order.map(np.float32).to_iter_dataset().batch(BATCH)


def loader() -> Any:
    sampler = grain.samplers.IndexSampler(NUM_EXAMPLES, shuffle=True, seed=2, num_epochs=1)
    operations = [grain.transforms.Batch(BATCH, drop_remainder=True)]
    source = np.arange(NUM_EXAMPLES, dtype=np.float32)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=0)


def array() -> Any:
    return lt.train.array_data(np.arange(NUM_EXAMPLES, dtype=np.float32), BATCH)


KINDS: dict[str, Callable[[], Any]] = {"dataset": dataset, "loader": loader, "iterable": Again, "array": array}


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model["w"] - batch) ** 2), {f"example {at}": batch[at] for at in range(BATCH)}


class Tells(lt.train.Callback):
    """Says what each step was trained on, as soon as that is known: at the latest before a checkpoint of it."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell

    def on_record(self, trainer: Any, record: Any) -> None:
        self.tell([record["step"], [int(record[f"example {at}"]) for at in range(BATCH)]])


def train(kind: str, folder: Path | None, tell: Callable[[Any], None]) -> None:
    model = {"w": np.zeros((), np.float32)}
    trainer = lt.Trainer(model, loss, optax.adam(0.1), checkpoint_dir=folder, rollback=False)
    restored = None if folder is None else trainer.restore()
    tell([restored or 0, None])
    every = None if folder is None else 3
    trainer.fit(KINDS[kind](), num_epochs=NUM_EPOCHS, checkpoint_every=every, callbacks=[Tells(tell)])
    tell([trainer.step, digest(trainer)])


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[3]
    chance = random.Random(f"{sys.argv[2]} {kind}")
    # From the seventh step on the checkpoint of the third is complete: every life gets further than the last.
    moments = [(chance.randrange(7, 16), chance.uniform(0, 0.1)) for _ in range(NUM_KILLS)]
    lives = [cut_off(lambda tell: train(kind, folder, tell), 1 + n, delay) for n, delay in moments]
    lives.append(whole(lambda tell: train(kind, folder, tell)))
    print(json.dumps({"lives": lives, "whole": whole(lambda tell: train(kind, None, tell))}))


if __name__ == "__main__":
    main()
