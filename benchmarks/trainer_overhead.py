"""Cost of `lowtide.Trainer` versus the compiled step alone: time of a step, and time to the first one.

    python benchmarks/trainer_overhead.py [--json FILE] [--repeats N] [--steps N]

A residual MLP with AdamW, sized so that a step takes about 5 ms of a CPU. Three runs use the same batches and the same
weights. They alternate, and each is first equally often, so that variations of the machine affect all of them:

bare           a loop around the jitted step: state donated, the loss read one step late, as a trainer would
lowtide        `Trainer.fit`, with the guard against losses that are not finite
no guard       `Trainer.fit` with ``on_nan="ignore"``, whose program is the bare loop's with a norm of the gradients

The overhead is the median over repeats of the difference in the same repeat. "Host alone" is the same difference in the
processor time of the thread that dispatches the steps, which remains meaningful on a busy machine. The program of the
bare loop also returns the norm of the gradients, because every record has it.

`benchmarks/trainer_time.py` does the same on a GPU, with LoRA on 1B shapes in addition to this small step.

The first step is timed in separate processes: from the call of `fit` to the end of the first step, versus lowering,
compiling and running the bare step.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import ROOT, header, write
from rich.console import Console
from rich.table import Table

import lowtide as lt
from lowtide.train import Callback

NUM_LAYERS, DIM, BATCH = 24, 160, 128
Seconds = float


def model(num_layers: int = NUM_LAYERS) -> Any:
    keys = jax.random.split(jax.random.key(0), num_layers)
    weights = [jax.random.normal(key, (DIM, DIM)) / DIM**0.5 for key in keys]
    return {f"layer_{i:02}": {"w": w, "b": jnp.zeros((DIM,))} for i, w in enumerate(weights)}


def loss_fn(model: Any, batch: Any) -> Any:
    x = batch["x"]
    for name in sorted(model):
        x = x + jnp.tanh(x @ model[name]["w"] + model[name]["b"][None])
    return jnp.mean((x - batch["y"]) ** 2)


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(16, 2, BATCH, DIM)).astype(np.float32)
    some = [{"x": x, "y": y} for x, y in draws]
    return [some[i % len(some)] for i in range(count)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The training task of every subject."""

    make: Callable[[], Any]
    """Returns a model whose trainable leaves are not shared."""
    loss_fn: Callable[..., Any]
    """The loss of the model on a batch."""
    tx: optax.GradientTransformation
    """The optimizer."""
    wrt: str = "**"
    """Pattern of the trainable leaves."""


SMALL = Task(make=model, loss_fn=loss_fn, tx=optax.adamw(1e-3))


class Bare:
    """The loop without a trainer, as a lower bound on the time; mutable."""

    def __init__(self, task: Task = SMALL) -> None:
        self.task = task
        self.params, self.frozen = lt.partition(task.make(), task.wrt)
        self.state = task.tx.init(self.params)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _step(self, params: Any, state: Any, frozen: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: self.task.loss_fn(lt.combine(p, frozen), batch))(params)
        updates, state = self.task.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    def run(self, data: list[Any]) -> list[float]:
        losses, pending = [], None
        for batch in data:
            self.params, self.state, *values = self.step(self.params, self.state, self.frozen, batch)
            if pending is not None:
                losses.append([float(value) for value in pending])
            pending = values
        losses.append([float(value) for value in pending])
        return losses


class Ours:
    """`Trainer.fit`; mutable."""

    def __init__(self, task: Task = SMALL, on_nan: Any = "abort") -> None:
        # The copy on the host is made once per run and not once per step; it is not part of the measurement.
        self.trainer = lt.Trainer(task.make(), task.loss_fn, task.tx, wrt=task.wrt, on_nan=on_nan, rollback=False)

    def run(self, data: list[Any]) -> list[float]:
        start = self.trainer.step
        records = self.trainer.fit(_From(data, start), num_steps=start + len(data))
        return [[record["loss"], record["grad_norm"]] for record in records]


class _From:
    """A run's batches, counted from a given step."""

    def __init__(self, data: list[Any], start: int) -> None:
        self.data, self.start = data, start

    def __getitem__(self, step: int) -> Any:
        return self.data[step - self.start]


SUBJECTS: dict[str, Callable[[Task], Any]] = {
    "bare": Bare,
    "lowtide": Ours,
    "no guard": lambda task: Ours(task, "ignore"),
}


def paired(
    repeats: int, data: list[Any], task: Task = SMALL, rtol: float = 1e-5
) -> tuple[dict[str, list[Seconds]], dict[str, list[Seconds]]]:
    """Return seconds per step of each subject by repeat: wall-clock, and processor time of the main thread."""
    subjects = {name: make(task) for name, make in SUBJECTS.items()}
    first = {name: subject.run(data[:3]) for name, subject in subjects.items()}
    for values in first.values():
        np.testing.assert_allclose(values, first["bare"], rtol=rtol)
    times: dict[str, list[Seconds]] = {name: [] for name in subjects}
    own: dict[str, list[Seconds]] = {name: [] for name in subjects}
    order = list(subjects)
    for repeat in range(repeats):
        gc.collect()
        for name in [*order[repeat % 3 :], *order[: repeat % 3]]:
            started = time.perf_counter(), time.thread_time()
            subjects[name].run(data)
            times[name].append((time.perf_counter() - started[0]) / len(data))
            own[name].append((time.thread_time() - started[1]) / len(data))
    return times, own


def summarise(times: dict[str, list[Seconds]], own: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Return each subject's step time, and its excess over the bare loop."""
    bare, found = statistics.median(times["bare"]), {}
    for name, values in times.items():
        extra = over(times, name)
        found[name] = {"step_seconds": statistics.median(values), "over_bare_seconds": extra, "share": extra / bare}
        found[name] |= {"least_step_seconds": min(values), "host_over_bare_seconds": over(own, name)}
    return found


def over(times: dict[str, list[Seconds]], name: str) -> Seconds:
    """Return the median over repeats of the difference from the bare loop in the same repeat."""
    return statistics.median(ours - theirs for ours, theirs in zip(times[name], times["bare"], strict=True))


def first_step(name: str) -> Seconds:
    """Time from weights on the device to the end of the first step, in a process that has not compiled it."""
    data = batches(1)
    if name == "bare":
        subject = Bare()
        jax.block_until_ready((subject.params, subject.state))
        started = time.perf_counter()
        subject.run(data)
        return time.perf_counter() - started

    class Ended(Callback):
        at = 0.0

        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.wait()
            self.at = time.perf_counter()

    ours, ended = Ours(), Ended()
    ours.trainer.wait()
    started = time.perf_counter()
    ours.trainer.fit(data, num_steps=1, callbacks=[ended])
    return ended.at - started


def first_steps(repeats: int) -> dict[str, list[Seconds]]:
    """Time the first steps of each subject, in turn."""
    found: dict[str, list[Seconds]] = {"bare": [], "lowtide": []}
    for _ in range(repeats):
        for name, times in found.items():
            command = [sys.executable, __file__, "--first-step", name]
            times.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=ROOT / "results" / "trainer_overhead.json", help="where to write the result")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50, help="of a repeat")
    parser.add_argument("--first-step", choices=["bare", "lowtide"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step:
        print(json.dumps(first_step(options.first_step)))
        return
    load_before = os.getloadavg()
    (times, own), firsts = paired(options.repeats, batches(options.steps)), first_steps(5)
    summary = summarise(times, own)
    table = Table("", "step, ms", "over bare, us", "%", "host alone over bare, us", "first step, s")
    for name, row in summary.items():
        first = f"{statistics.median(firsts[name]):.2f}" if name in firsts else "-"
        cells = [f"{row['step_seconds'] * 1e3:.3f}", f"{row['over_bare_seconds'] * 1e6:.0f}", f"{row['share']:.2%}"]
        table.add_row(name, *cells, f"{row['host_over_bare_seconds'] * 1e6:.0f}", first)
    Console(width=120).print(table)
    Console(width=120).print(f"load average {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    result = {**header("python benchmarks/trainer_overhead.py"), "num_cpus": os.cpu_count()}
    result |= {"load_average": {"before": load_before, "after": os.getloadavg()}, "summary": summary}
    raw = {"seconds_a_step": times, "main_thread_seconds_a_step": own, "first_step_seconds": firsts}
    write(Path(options.json), {**result, **raw})


if __name__ == "__main__":
    main()
