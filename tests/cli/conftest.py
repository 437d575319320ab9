"""A user's file, and the command called on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.cli import main

TRAIN = """
import jax
import jax.numpy as jnp
import layers
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

S = jax.ShapeDtypeStruct
NUMBER = 3


def shapes(batch, width):
    return [S((width, width), jnp.float32)] * 2, S((batch, width), jnp.float32)


def step(params, x):
    grads = jax.grad(layers.loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def make_step(batch=4, width=128):
    return {"fn": step, "args": shapes(batch, width), "roles": {"params": 0, "batch": 1}, "donate_argnums": 0}


def pair(batch=4):
    return step, shapes(batch, 128)


def on_mesh(target, batch: int):
    mesh = Mesh(np.array(target.devices()), ("data",))
    params, x = shapes(batch, 128)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return step, (params, S(x.shape, x.dtype, sharding=sharding)), {"params": 0, "batch": 1}


def anything(**settings):
    return pair(settings["batch"])


def needs(batch):
    return pair(batch)


def text(kind="a"):
    assert kind == "b c", kind
    return pair()


def nothing():
    return None


def one():
    return (step,)


def not_callable():
    return (3, ())


def typo():
    return {"fn": step, "argss": ()}


def broken():
    return layers.fails()


def bad_shapes():
    return layers.mismatched, (S((4, 4), jnp.float32),)


def leaves():
    raise SystemExit("good bye")


if __name__ == "__main__":
    raise RuntimeError("the main part ran")
"""
LAYERS = """
import jax.numpy as jnp


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x * x)


def fails():
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("a value of mine") from error


def mismatched(x):
    return x @ jnp.ones((3, 3))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's `train.py` and a module beside it."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "train.py").write_text(TRAIN)
    (tmp_path / "user" / "layers.py").write_text(LAYERS)
    return tmp_path / "user"


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lowtide(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in the user's folder; returns exit status, standard output and standard error."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        return (status, *capfd.readouterr())

    return run
