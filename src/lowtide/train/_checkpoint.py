"""Checkpoints of the trainable state, written by Orbax: asynchronous, atomic, a few kept.

The state is stored as one flat dictionary from tree path to array, so a checkpoint does not depend on Python classes
and its contents can be listed by name. Frozen leaves are never in it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

from ..core import StructureError, Tree, leaves_with_paths, on_host

# Orbax reports every save through absl at INFO and above; the trainer's own records say what a user needs.
logging.getLogger("absl").setLevel(logging.ERROR)


class Checkpoints:
    """Numbered checkpoints in one folder.

    Args:
        directory: the folder; made when missing.
        max_to_keep: how many of the newest to keep.
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int = 2) -> None:
        import orbax.checkpoint as ocp  # takes a second; `import lowtide` does not need it

        self._ocp = ocp
        self.directory = Path(directory).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=True)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handler)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Tree) -> None:
        """Begin to write a checkpoint; the arrays are copied to the host before this returns, so they may be donated.

        Args:
            step: its number.
            state: any pytree of arrays.

        Memory:
            One copy of the state on the host until the write ends; none on the device.
        """
        if step != self._manager.latest_step():
            self._manager.save(step, args=self._ocp.args.StandardSave(_flat(state)))

    def check(self, step: int, like: Tree) -> None:
        """Raise unless a checkpoint holds a state of this structure; reads no array.

        Args:
            step: its number.
            like: as in `restore`.

        Raises:
            StructureError: when the checkpoint holds other leaves.
        """
        expected = _flat(like)
        stored = dict(self._manager.item_metadata(step))
        found = {name: f"{meta.dtype}{list(meta.shape)}" for name, meta in stored.items()}
        wanted = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in expected.items()}
        if found != wanted:
            name = sorted(set(found.items()) ^ set(wanted.items()))[0][0]
            raise StructureError(
                f"{name}: the checkpoint of step {step} is not of this model and optimizer",
                expected=wanted.get(name, "no such leaf"),
                got=found.get(name, "no such leaf"),
                hint=f"resume with the configuration that wrote {self.directory}",
            )

    def restore(self, step: int, like: Tree) -> Tree:
        """Read a checkpoint.

        Args:
            step: its number.
            like: a pytree with the structure, shapes and dtypes that the checkpoint has to have: arrays, or
                `jax.ShapeDtypeStruct`s with shardings.

        Returns:
            The state, arrays placed as in `like`, in device or host memory.

        Raises:
            StructureError: when the checkpoint holds other leaves.

        Memory:
            The state where it belongs; `like` holds no bytes when it is made of shapes.
        """
        self.check(step, like)
        expected = _flat(like)
        abstract = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, expected)
        values: Any = self._manager.restore(step, args=self._ocp.args.StandardRestore(abstract))
        return jax.tree.unflatten(jax.tree.structure(like), [_typed(values.pop(name)) for name in expected])

    def wait(self) -> None:
        """Wait until all begun checkpoints are complete on disk."""
        self._manager.wait_until_finished()


def _typed(leaf: Any) -> Any:
    # Orbax assembles arrays from shards, and of these JAX forgets in the type, not in the sharding, that they are on
    # the host (jax 0.10.2): a program would take them for the device's.
    return jax.device_put(leaf, jax.memory.Space.Host) if on_host(leaf.sharding) else leaf


def _flat(state: Tree) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(state):
        name = path.replace("/", ".")
        if name in flat:
            raise StructureError(
                f"{path}: another leaf of the state is stored as {name!r}, too",
                expected="tree paths that differ also where '/' is written '.'",
                hint="rename one of the two keys",
            )
        flat[name] = leaf
    return flat
