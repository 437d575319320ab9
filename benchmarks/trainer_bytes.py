"""Live device bytes while a Keras model trains and predicts: `lowtide.Trainer`, Keras' `fit`, and a plain loop.

    python benchmarks/trainer_bytes.py [--json FILE]

One model with 27 MiB of weights and Adam, so that weights and moments are 81 MiB, is trained by

lowtide        `lowtide.Trainer` through `lowtide.ext.keras.Bridge`
keras          `model.fit` with the JAX backend
three copies   a loop that is easily written: the model object keeps its variables, and a jitted step that donates
               nothing takes a state and returns another

Live bytes are those of the distinct buffers of `jax.live_arrays`, minus those that existed before the model. For
training the figure is the maximum over the ends of steps; for 1,000 predicted batches it is the first and the last
sample. The compiled step's bytes are arguments, and outputs that reuse no argument. Its temporaries (gradients,
activations) are listed separately. For Keras' `fit` they are those of ``model.train_step``, jitted as in `fit`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from _common import MIB, ROOT, header, mib, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.ext.keras import Bridge
from lowtide.train import Callback

DIM, NUM_LAYERS, ROWS = 1536, 3, 32
STEPS, PREDICTED, EVERY = 6, 1000, 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes of one way to train."""

    trainer: str
    """The way to train."""
    state_bytes: int
    """Weights and moments."""
    fit_bytes: int
    """Maximum of the live bytes at the end of a step."""
    step_bytes: int
    """Bytes of the compiled step: arguments, and outputs that reuse no argument."""
    temp_bytes: int
    """Temporaries of the compiled step."""
    predict_bytes: list[int]
    """Live bytes after every 100 of 1,000 predicted batches."""


def live_bytes() -> int:
    """Return the bytes of all live buffers, each counted once."""
    gc.collect()
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


def make() -> keras.Model:
    """Return the model."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(DIM, activation="tanh") for _ in range(NUM_LAYERS)]
    return keras.Sequential([keras.Input((DIM,)), *layers])


def batches(count: int, sample: Callable[[], None] | None = None) -> Iterator[Any]:
    """Yield pairs of inputs and labels."""
    rng = np.random.default_rng(0)
    some = [tuple(rng.normal(size=(2, ROWS, DIM)).astype(np.float32)) for _ in range(4)]
    for at in range(count):
        if sample is not None and at % EVERY == EVERY - 1:
            sample()
        yield some[at % 4]


class Probe:
    """Records the live bytes beyond those that existed before; mutable."""

    def __init__(self) -> None:
        self.before = live_bytes()
        self.seen: list[int] = []

    def __call__(self, *_: Any, **__: Any) -> None:
        self.seen.append(live_bytes() - self.before)

    def take(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def compiled_bytes(stats: Any) -> dict[str, int]:
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return {"step_bytes": kept, "temp_bytes": stats.temp_size_in_bytes}


def ours(probe: Probe) -> Measured:
    bridge = Bridge(make())
    trainer = lt.Trainer(bridge, bridge.loss("mse"), optax.adam(1e-3))

    class Sample(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.wait()
            probe()

    trainer.fit(list(batches(STEPS)), num_steps=STEPS, callbacks=[Sample()])
    fit, report = probe.take(), trainer.memory(next(batches(1))).device
    trainer.predict((x for x, _ in batches(PREDICTED, probe)))
    return Measured(
        trainer="lowtide",
        state_bytes=nbytes((trainer.state, trainer.frozen)),
        fit_bytes=max(fit),
        step_bytes=report.argument_bytes + report.output_bytes - report.alias_bytes,
        temp_bytes=report.temp_bytes,
        predict_bytes=probe.take(),
    )


def theirs(probe: Probe) -> Measured:
    model = make()
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse", jit_compile=True)
    sample = keras.callbacks.LambdaCallback(on_train_batch_end=probe)
    model.fit(batches(STEPS), steps_per_epoch=STEPS, epochs=1, verbose=0, shuffle=False, callbacks=[sample])
    fit = probe.take()
    groups = (model.trainable_variables, model.non_trainable_variables)
    groups += (model.optimizer.variables, model.metrics_variables)
    state = tuple([jax.ShapeDtypeStruct(v.shape, v.value.dtype) for v in group] for group in groups)
    batch = next(batches(1))
    stats = jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    every = keras.callbacks.LambdaCallback(
        on_predict_batch_end=lambda at, logs: probe() if at % EVERY == EVERY - 1 else None
    )
    model.predict(((x,) for x, _ in batches(PREDICTED)), steps=PREDICTED, verbose=0, callbacks=[every])
    return Measured(
        trainer="keras",
        state_bytes=sum(v.value.nbytes for group in groups for v in group),
        fit_bytes=max(fit),
        **compiled_bytes(stats),
        predict_bytes=probe.take(),
    )


def three_copies(probe: Probe) -> Measured:
    model, tx = make(), optax.adam(1e-3)
    fixed = [v.value for v in model.non_trainable_variables]

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        x, y = batch

        def loss(params: Any) -> Any:
            return jnp.mean((model.stateless_call(params, fixed, x)[0] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    run = jax.jit(step)
    state: Any = [jnp.copy(v.value) for v in model.trainable_variables]
    state = state, tx.init(state)
    for batch in batches(STEPS):
        after = run(*state, batch)
        jax.block_until_ready(after)
        probe()
        state = after[:2]
        del after
    fit, stats = probe.take(), run.lower(*state, next(batches(1))).compile().memory_analysis()
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    call = jax.jit(lambda params, x: model.stateless_call(params, fixed, x)[0])
    outputs = [call(state[0], x) for x, _ in batches(PREDICTED, probe)]
    jnp.concatenate(outputs)
    return Measured(
        trainer="three copies",
        state_bytes=nbytes(state),
        fit_bytes=max(fit),
        **compiled_bytes(stats),
        predict_bytes=probe.take(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=ROOT / "results" / "trainer_bytes.json", help="where to write the raw result")
    options = parser.parse_args()
    table = Table("MiB", "state", "live in fit", "of state", "compiled step", "temporaries", "live in predict")
    rows: list[Measured] = []
    for measure in (ours, theirs, three_copies):
        rows.append(measure(Probe()))
        keras.backend.clear_session()
        last = rows[-1]
        figures = [mib(last.state_bytes), mib(last.fit_bytes), f"{last.fit_bytes / last.state_bytes:.3f}"]
        figures += [mib(last.step_bytes), mib(last.temp_bytes)]
        table.add_row(last.trainer, *figures, f"{mib(last.predict_bytes[0])} to {mib(last.predict_bytes[-1])}")
    Console(width=150).print(table)
    batch_bytes = nbytes(next(batches(1)))
    Console().print(f"a batch is {batch_bytes / MIB:.2f} MiB, an output {batch_bytes / 2 / MIB:.2f}")
    content = {**header("python benchmarks/trainer_bytes.py"), "keras": keras.__version__, "batch_bytes": batch_bytes}
    write(Path(options.json), {**content, "rows": [dataclasses.asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
