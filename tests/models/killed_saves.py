"""Save models and be killed, at every point where the disk changes; then say what is in each folder.

The saving processes are forks, which is safe as long as JAX has no backend: the models are of NumPy arrays.
"""

import functools
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from lowtide.core import ModelFileError
from lowtide.models import DecoderConfig, _safetensors, init, load, save

LAYOUTS = {"single": 2**30, "sharded": 1500}
"""The most bytes of a file."""


@functools.cache
def model(value, rope_theta):
    """Return a model whose weights all have one value."""
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 12, "num_layers": 2}
    config = DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=4, rope_theta=rope_theta)
    shapes = jax.eval_shape(lambda: init(config, key=jax.random.key(0)))
    return jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), shapes)


def killed_at(point, folder, new, max_shard_bytes):
    """Whether a process that saves is killed before its change of this number, or ends before."""
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    count = itertools.count()

    def counted(function):
        def call(*args, **kwargs):
            if next(count) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.replace, os.fsync, Path.unlink = counted(os.replace), counted(os.fsync), counted(Path.unlink)
    pieces = _safetensors.pieces
    _safetensors.pieces = lambda *args: map(counted(lambda cut: cut), pieces(*args))
    save(new, folder, max_shard_bytes=max_shard_bytes)
    os._exit(0)


def found(folder):
    """Say what a folder holds: the values of the weights, and of the configuration; or that there is no model."""
    try:
        loaded = load(folder)
    except ModelFileError as error:
        return [str(error).splitlines()[0].rpartition("/")[2]]
    values = {float(value) for leaf in jax.tree.leaves((loaded.outer, loaded.layers)) for value in np.unique(leaf)}
    return [sorted(values), loaded.config.rope_theta]


def main(root):
    """Kill at every point of every kind; print a line for each."""
    kills = []
    # SIGKILL loses nothing that was written, synced or not, and waiting for the disk is most of the time of a save.
    os.fsync = lambda descriptor: None
    for old, new, theta in itertools.product(LAYOUTS, LAYOUTS, (1000.0, 2000.0)):
        for point in itertools.count():
            folder = root / f"{old}-{new}-{theta}-{point}"
            save(model(1.0, 1000.0), folder, max_shard_bytes=LAYOUTS[old])
            is_killed = killed_at(point, folder, model(2.0, theta), LAYOUTS[new])
            kills.append((folder, new, theta, is_killed))
            if not is_killed:
                break
    for folder, new, theta, is_killed in kills:
        row = {"is_killed": is_killed, "theta": theta, "found": found(folder)}
        save(model(3.0, 3000.0), folder, max_shard_bytes=LAYOUTS[new])  # over whatever is left
        left = sorted(path.name for path in folder.iterdir())
        print(json.dumps({**row, "folder": folder.name, "again": found(folder), "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
