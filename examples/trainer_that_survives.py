"""Kill a run and resume it: it ends with the same weights as a run that is not killed.

For your model: pass your pytree (or an NNX, Keras or Equinox model through `lowtide.ext`), your loss and your optimizer
to `lt.Trainer`, and your data to `fit`.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import lowtide as lt
from lowtide.train import Callback, array_data

STEPS = 300


def train(folder, pause=0.0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype(np.float32)
    data = array_data({"x": x, "y": np.sin(x).astype(np.float32)}, 32)
    model = {"w": jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32), "b": jnp.zeros(8)}
    trainer = lt.Trainer(
        model,
        lambda m, batch: jnp.mean((jnp.tanh(batch["x"] @ m["w"]) + m["b"] - batch["y"]) ** 2),
        optax.adam(1e-2),
        checkpoint_dir=folder,
    )

    class Slowly(Callback):
        def on_step_end(self, trainer, step):
            time.sleep(pause)

    restored = trainer.restore()
    trainer.fit(data, num_steps=STEPS, checkpoint_every=20, callbacks=[Slowly()], progress=False)
    return restored, trainer


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the child process, which is killed
        train(sys.argv[1], pause=0.01)
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        killed, alone = Path(folder) / "killed", Path(folder) / "alone"
        child = subprocess.Popen([sys.executable, __file__, str(killed)])
        while not (killed / "60").is_dir() and child.poll() is None:
            time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        restored, resumed = train(killed)
        _, whole = train(alone)
        same = np.array_equal(resumed.model["w"], whole.model["w"])
        print(f"killed, resumed from step {restored}, ended at step {resumed.step}: the same weights: {same}")
        assert same and restored
