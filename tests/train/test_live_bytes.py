"""What lives on the device while a trainer works: the state once, a batch, and nothing that grows.

`jax.live_arrays` counts what the host holds, between steps; the compiled step counts what the device holds during one.
Activations and gradients are the compiled step's temporaries, and no part of the bound.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.train import Callback

SLOW = pytest.mark.slow
DIM, ROWS = 512, 8


@pytest.fixture(autouse=True)
def rank_promotion() -> Any:
    """Keras adds its biases by rank promotion."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def frozen_heap() -> Any:
    """What other tests left behind is looked through once, and not in every step."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def plain() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    model = {name: jax.random.normal(key, (DIM, DIM)) / DIM**0.5 for name, key in zip("abc", keys, strict=True)}

    def call(model: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ model["a"]) @ model["b"]) @ model["c"]

    # A third of it is frozen.
    return model, {"wrt": "[ab]"}, call


def equinox() -> tuple[Any, Any, Any]:
    import equinox as eqx

    return eqx.nn.MLP(DIM, DIM, DIM, 2, key=jax.random.key(0)), {}, lambda model, x: jax.vmap(model)(x)


def nnx() -> tuple[Any, Any, Any]:
    from flax import nnx as flax_nnx

    from lowtide.ext.nnx import Bridge

    rngs = flax_nnx.Rngs(0)
    layers = [flax_nnx.Linear(DIM, DIM, rngs=rngs), flax_nnx.BatchNorm(DIM, rngs=rngs)]
    layers += [flax_nnx.Dropout(0.1, rngs=rngs), flax_nnx.Linear(DIM, DIM, rngs=rngs)]
    return Bridge(flax_nnx.Sequential(*layers)), {}, lambda model, x: model(x)


def keras() -> tuple[Any, Any, Any]:
    import keras

    from lowtide.ext.keras import Bridge

    layers = [keras.layers.Dense(DIM), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((DIM,)), *layers, keras.layers.Dense(DIM)])
    return Bridge(model), {}, lambda model, x: model(x)


def live_bytes() -> int:
    """Of every buffer on the devices, once however many arrays share it."""
    gc.collect()
    shards = [(shard.device, shard.data) for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({(device, data.unsafe_buffer_pointer()): data.nbytes for device, data in shards}.values())


def array_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Made:
    """A trainer of a model of one kind, and the bytes that were there before it."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.others = live_bytes()
        model, defaults, self.call = globals()[kind]()
        loss = self._loss()
        self.trainer = lt.Trainer(model, loss, optax.adam(1e-3), **defaults, **options)
        self.kind = kind

    def _loss(self) -> Callable[..., Any]:
        return lambda model, batch: jnp.mean((self.call(model, batch["x"]) - batch["y"]) ** 2)

    @property
    def state_bytes(self) -> int:
        return array_bytes((self.trainer.state, self.trainer.frozen))

    @property
    def bound(self) -> float:
        """State and batch, and 2 %."""
        return 1.02 * (self.state_bytes + array_bytes(batch()))

    def live(self) -> int:
        """Bytes of the trainer's making."""
        return live_bytes() - self.others


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ROWS, DIM)).astype(np.float32) for name in "xy"}


class Watch(Callback):
    """The live bytes at every event of a run."""

    def __init__(self, made: Made) -> None:
        self.made, self.seen = made, {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *_: self.seen.setdefault(name, []).append(self.made.live())


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({}, {}),
    "validation": ({}, {"eval_every": 2}),
    "accumulation": ({"num_microbatches": 2}, {}),
    "no rollback": ({"rollback": False}, {}),
    "checkpoints": ({}, {"checkpoint_every": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "run"),
    # Steps of every kind; each other run once, and checkpoints of modules that lend arrays as well as of pytrees.
    [
        *((kind, "steps") for kind in ("plain", "equinox", "nnx", "keras")),
        ("plain", "checkpoints"),
        pytest.param("plain", "accumulation", marks=SLOW),
        *(pytest.param("nnx", run, marks=SLOW) for run in ("validation", "no rollback", "checkpoints")),
    ],
)
def test_live_arrays_in_fit(kind: str, run: str, tmp_path: Any) -> None:
    options, given = RUNS[run]
    made = Made(kind, **options, **({"checkpoint_dir": tmp_path} if run == "checkpoints" else {}))
    assert made.state_bytes > 4 * 2**20
    watch = Watch(made)
    data = [batch(step) for step in range(6)]
    asked = {"eval_data": data[:3], **given} if run == "validation" else given
    made.trainer.fit(data, num_steps=6, callbacks=[watch], **asked)
    events = {"on_step_begin", "on_step_end", "on_record", "on_train_end"}
    events |= {"validation": {"on_evaluate_end"}, "checkpoints": {"on_checkpoint"}}.get(run, set())
    assert events <= set(watch.seen)
    # A checkpoint is written from a copy on the host. A CPU's is the consumed state itself, until the write has ended.
    host = array_bytes(made.trainer.state) if run == "checkpoints" else 0
    over = {event: max(seen) for event, seen in watch.seen.items() if max(seen) > made.bound + host}
    assert not over, (over, made.state_bytes)
    assert made.live() <= made.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_microbatches"),
    [("plain", 2), ("nnx", 2), ("plain", 1), ("keras", 2)],
)
def test_the_compiled_step_takes_the_state_once(kind: str, num_microbatches: int) -> None:
    made = Made(kind, num_microbatches=num_microbatches)
    report = made.trainer.memory(batch())
    assert report.device.alias_bytes >= array_bytes(made.trainer.state)
    without_temporaries = report.device.argument_bytes + report.device.output_bytes - report.device.alias_bytes
    assert made.state_bytes <= without_temporaries <= made.bound
    assert report.device.temp_bytes > 0  # activations and gradients, apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "nnx"])
def test_many_predictions_are_flat(kind: str) -> None:
    made, number = Made(kind), 200
    watched: list[int] = []

    def data(count: int) -> Iterator[Any]:
        one = batch()["x"]
        for at in range(count):
            if at % 20 == 10:
                watched.append(made.live())
            yield one

    for _ in made.trainer.predict_batches(data(number), made.call):
        pass
    assert len(watched) == 10
    outputs_bytes = 4 * ROWS * DIM
    assert max(watched) - min(watched) <= outputs_bytes
    assert max(watched) <= made.bound + 2 * outputs_bytes
    watched.clear()
    found = made.trainer.predict(data(number), made.call)
    assert isinstance(found, np.ndarray) and found.shape == (number * ROWS, DIM)
    assert max(watched) - min(watched) <= outputs_bytes
    assert max(watched) <= made.bound + 2 * outputs_bytes
