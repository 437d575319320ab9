"""A small run that is killed again and again: `python killed.py FOLDER NUM_KILLS SEED` prints what happened, as JSON.

A process that has imported everything and has not asked JAX for a device forks one child after the other, so that a
start costs a second instead of five; the first of them says what that is, and compiles for those after it. A child
restores and trains; at a random moment it is killed. The last one comes to an end, and one more, which begins anew and
is left alone, says what the weights have to be.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain  # noqa: F401  (imported by the trainer when it is first needed, as Orbax is)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401

import lowtide as lt

EVERY, KEPT, ENDLESS = 3, 2, 10**6
"""Steps between checkpoints; how many are kept; more steps than a child can take before it is killed."""


class Data:
    """A batch for every step."""

    def __getitem__(self, step: int) -> Any:
        return np.float32(np.sin(step))


def loss(model: Any, batch: Any, key: Any) -> Any:
    goal = batch + 0.1 * jax.random.normal(key)
    return sum(jnp.mean((leaf - goal) ** 2) for leaf in model.values())


def make(folder: Path | None) -> lt.Trainer:
    """12 arrays that train and as many of the optimizer, 3 MiB."""
    model = {f"w{at}": np.linspace(0, at, 2**15, dtype=np.float32) for at in range(12)}
    options: Any = {"checkpoint_dir": folder, "max_to_keep": KEPT, "rollback": False, "on_nan": "ignore"}
    return lt.Trainer(model, loss, optax.sgd(1e-2, momentum=0.9), **options)


def digest(trainer: lt.Trainer) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trainer.state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def train(folder: Path, tell: Callable[[Any], None]) -> None:
    """What is killed: says the step it restored, its weights, and then every step that it has taken."""
    trainer = make(folder)
    tell([trainer.restore(), digest(trainer)])
    trainer.fit(Data(), num_steps=ENDLESS, checkpoint_every=EVERY, callbacks=[Tells(tell)])


def finish(folder: Path, tell: Callable[[Any], None]) -> None:
    """The last: a few steps more, to an end."""
    trainer = make(folder)
    tell([trainer.restore(), digest(trainer)])
    trainer.fit(Data(), num_steps=trainer.step + 10, checkpoint_every=EVERY)
    tell([trainer.step, digest(trainer)])


def warm_up(folder: Path) -> None:
    """Import what a child needs, and leave it the programs (where `JAX_COMPILATION_CACHE_DIR` says)."""

    def run(tell: Callable[[Any], None]) -> None:
        finish(folder, tell)
        finish(folder, tell)  # goes on from a checkpoint
        tell(sorted(sys.modules))

    for name in whole(run)[-1]:
        with contextlib.suppress(ImportError):  # some exist in memory only
            importlib.import_module(name)


def undisturbed(num_steps: int, tell: Callable[[Any], None]) -> None:
    """The same steps without a kill or a checkpoint: the weights where there would be one, and at the end."""
    trainer = make(None)
    tell([None, digest(trainer)])
    for end in [*range(EVERY, num_steps, EVERY), num_steps]:
        trainer.fit(Data(), num_steps=end)
        tell([trainer.step, digest(trainer)])


class Tells(lt.train.Callback):
    """Says every step."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell

    def on_step_end(self, trainer: Any, step: int) -> None:
        self.tell(step)


def forked(run: Callable[[Callable[[Any], None]], None]) -> tuple[int, Any]:
    """Start a child; its process number, and the lines that it writes."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, os.fdopen(reads)
    code = 1
    try:
        os.close(reads)
        warnings.filterwarnings("error", "the checkpoint of step")  # of damaged ones: a kill leaves none
        run(lambda value: os.write(writes, f"{json.dumps(value)}\n".encode()) and None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def whole(run: Callable[[Callable[[Any], None]], None]) -> list[Any]:
    """What a child says that is left alone."""
    child, lines = forked(run)
    with lines:
        said = [json.loads(line) for line in lines]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


def cut_off(run: Callable[[Callable[[Any], None]], None], num_lines: int, delay: float) -> list[Any]:
    """What a child says that is killed some seconds after it has written so many lines."""
    child, lines = forked(run)
    said: list[Any] = []
    with lines:
        while len(said) < num_lines and (line := lines.readline()):
            said.append(json.loads(line))
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        said += [json.loads(line) for line in lines if line.endswith("\n")]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, f"the child ended by itself with {status} after {said}"
    return said


def killed(folder: Path, chance: random.Random) -> dict[str, Any]:
    """Kill a child: while it starts, or a moment after one of its steps."""
    before, begun = unfinished(folder), time.monotonic()
    # Beyond twice the steps between checkpoints one is complete, however long writing takes: the next waited for it.
    num_steps, delay = chance.randrange(-1, 2 * EVERY + 5), chance.uniform(0, 0.15)
    said = cut_off(lambda tell: train(folder, tell), num_steps + 1, delay if num_steps >= 0 else 6 * delay)
    return {
        "restored": said[0] if said else None,
        "steps": said[1:],
        "is_writing": bool(unfinished(folder) - before),
        "num_unfinished": len(unfinished(folder)),
        "seconds": time.monotonic() - begun,
    }


def unfinished(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints that are not complete, as Orbax names them until they are, and when they were begun."""
    return {(path.name, path.stat().st_mtime_ns) for path in folder.iterdir() if "orbax-checkpoint-tmp" in path.name}


def main() -> None:
    folder, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        warm_up(Path(elsewhere))
    chance = random.Random(seed)
    kills = [killed(folder, chance) for _ in range(num_kills)]
    last = whole(lambda tell: finish(folder, tell))
    left = sorted(path.name for path in folder.iterdir())
    reference = whole(lambda tell: undisturbed(last[-1][0], tell))
    print(json.dumps({"kills": kills, "last": last, "left": left, "reference": reference}))


if __name__ == "__main__":
    main()
