"""A state as a checkpoint stores it: one flat dictionary from tree path to array; and which states are of another run.

Leaves without elements are not in it, which Orbax refuses; they come back from the structure that is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core import StructureError, Tree, leaves_with_paths, map_with_paths, on_host


def flat(state: Tree) -> dict[str, Any]:
    """Return the leaves that a checkpoint holds, by their names there.

    Raises:
        StructureError: when two leaves have one name.
    """
    found: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(state):
        name = _name(path)
        if name in found:
            raise StructureError(
                f"{path}: another leaf of the state is stored as {name!r}, too",
                expected="tree paths that differ also where '/' is written '.'",
                hint="rename one of the two keys",
            )
        found[name] = leaf
    return {name: leaf for name, leaf in found.items() if leaf.size}


def unflat(values: dict[str, Any], like: Tree) -> Tree:
    """Return the state of a dictionary that `flat` makes of one with this structure; the dictionary is empty then."""

    def one(path: str, leaf: Any) -> Any:
        return _typed(values.pop(_name(path))) if _name(path) in values else _empty(leaf)

    return map_with_paths(one, like)


def check_leaves(stored: Mapping[str, Any], like: Tree, step: int, directory: Path) -> None:
    """Raise unless a checkpoint holds a state of this structure.

    Args:
        stored: shapes and dtypes by name, as the checkpoint has them.
        like: the structure that is asked for.
        step: the checkpoint's.
        directory: of the checkpoints.

    Raises:
        StructureError: when the checkpoint holds other leaves.
    """
    found = {name: f"{meta.dtype}{list(meta.shape)}" for name, meta in stored.items()}
    wanted = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in flat(like).items()}
    if found != wanted:
        names = sorted({name for name, _ in set(found.items()) ^ set(wanted.items())})
        name, others = names[0], f" (and {len(names) - 1} other leaves)" if len(names) > 1 else ""
        raise StructureError(
            f"{name}{others}: the checkpoint of step {step} is not of this model and optimizer",
            expected=wanted.get(name, "no such leaf, in this trainer"),
            got=found.get(name, "no such leaf, in the checkpoint"),
            hint=f"resume with the model, optimizer and wrt that wrote {directory}",
        )


def check_arrangement(step: int, saved: list[int] | None, arrangement: list[int] | None) -> None:
    """Raise unless the layers are stored in the order in which the trainer has them."""
    if saved != arrangement:
        names = (
            "the order of the model" if rows is None else f"rows of layers {rows}" for rows in (arrangement, saved)
        )
        expected, got = names
        raise StructureError(
            f"the checkpoint of step {step} has its layers in another order than this trainer",
            expected=expected,
            got=got,
            hint="restore it with the schedule that wrote it; a new Trainer of that trainer.model goes on with its "
            "weights, and with new optimizer state",
        )


def check_base(step: int, saved: str | None, base: str) -> None:
    """Raise where a checkpoint was trained over other frozen weights than those of this fingerprint."""
    if saved is not None and saved != base:
        raise StructureError(
            f"the checkpoint of step {step} was trained over other frozen weights",
            expected=f"the base model with fingerprint {saved}",
            got=f"one with {base}",
            hint="resume with the model that the run began with",
        )


def check_random(step: int, saved: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Raise where the random keys of a checkpoint are of another kind than those of the state."""
    if saved is not None and saved["keys"] != own["keys"]:
        raise StructureError(
            f"the random keys in the checkpoint of step {step} are of another kind",
            expected=", ".join(saved["keys"]),
            got=", ".join(own["keys"]),
            hint="make the keys as the run began with, such as jax.random.key(0, impl=...)",
        )


def warn_of_random(step: int, saved: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Warn where JAX draws other random numbers than it did until this checkpoint."""
    before: Mapping[str, Any] = {} if saved is None else saved["settings"]
    changed = [f"{name}={value!r}" for name, value in before.items() if own["settings"].get(name) != value]
    if changed:
        warnings.warn(
            f"the run drew its random numbers with {', '.join(changed)} until step {step}, and draws others from here "
            "on\nhint: set jax.config as it was, unless nothing in the model is random",
            UserWarning,
            stacklevel=5,
        )


def _typed(leaf: Any) -> Any:
    # Orbax assembles arrays from shards, and of these JAX forgets in the type, not in the sharding, that they are on
    # the host (jax 0.10.2): a program would take them for the device's.
    return jax.device_put(leaf, jax.memory.Space.Host) if on_host(leaf.sharding) else leaf


def _empty(leaf: Any) -> Any:
    """Make a leaf without elements, of which a checkpoint has nothing to say."""
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def _name(path: str) -> str:
    return path.replace("/", ".")
