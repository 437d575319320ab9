"""Copies of the state to which a trainer can return: the newest checkpoint, and at most one copy on the host.

A step donates its state. If it fails on the device, neither its inputs nor its results can be read. So copies are kept
where they need no device memory. With `rollback`, the state is copied to the host at the start of a run and after each
epoch, unless a checkpoint already holds it.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ...core import ConfigError, StateError, Tree, check_type, is_key, key_numbers, shown
from ...distributed import Processes, fingerprint
from .._state import TrainStateStore
from .._step import TrainState
from ._manager import Checkpoints

_RANDOM = ("jax_default_prng_impl", "jax_threefry_partitionable")
"""JAX settings that decide which random numbers a seed gives."""


class RunMetadata(NamedTuple):
    """Metadata of a state, in addition to its arrays."""

    position: Mapping[str, Any] | None = None
    """Position of the run in its data."""
    callbacks: Mapping[str, Any] | None = None
    """States of the run's callbacks; None once a later run has resumed them."""


class Snapshots:
    """The copies of a state, and the ways to restore them. Mutable: every copy replaces the previous one.

    With `rollback`, one copy is kept on the host. The state of a pipeline may stack its layers in another order than
    the model: `arrangement` lists the layer in each row of the stack, -1 for padding; None for the model's order.
    """

    def __init__(
        self,
        store: TrainStateStore,
        arrangement: list[int] | None,
        checkpoints: Checkpoints | None,
        processes: Processes,
        *,
        rollback: bool,
    ) -> None:
        self._store, self._arrangement, self._processes, self._rollback = store, arrangement, processes, rollback
        self.checkpoints = checkpoints
        self.metadata = RunMetadata()
        """Metadata of the state, as the last restored checkpoint or ended run stored it."""
        self._snapshot: tuple[HostSnapshot, RunMetadata, int] | None = None
        """The copy of the state on the host, its metadata and its step."""
        self._saved_state: weakref.ref[TrainState] | None = None
        """The state that was last saved or restored."""
        self._digest: tuple[Tree, str] | None = None

    def set_metadata(self, metadata: RunMetadata) -> None:
        """Replace the metadata: a run stores its position when it ends, and clears the callback states it resumed."""
        self.metadata = metadata

    def take(self, metadata: RunMetadata) -> None:
        """With `rollback`, copy the state to the host, unless a checkpoint holds it."""
        self._snapshot = None
        self._store.borrow(lend=False)  # includes changes made in a mutable object
        step, is_saved = self._store.step, self._saved_state is not None and self._saved_state() is self._store.state
        if self._rollback and not (is_saved and self.checkpoints and self.checkpoints.latest_step() == step):
            self._snapshot = HostSnapshot(self._store.state), metadata, step

    # --- going back ------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Return whether the state can be read: no step consumed it, and the step that made it did not fail."""
        state = self._store.state
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return False
        try:
            jax.block_until_ready(state)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def roll_back(self) -> int | None:
        """Restore the newest readable checkpoint or a newer host copy; return its step, or None if none exists."""
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        snapshot_step = -1 if self._snapshot is None else self._snapshot[-1]
        restored_step = None
        if latest is not None and latest > snapshot_step:
            try:
                restored_step = self.restore()
            except Exception as error:
                if self._snapshot is None:
                    raise
                warnings.warn(
                    f"no checkpoint could be restored, so the copy on the host is used: {error}", stacklevel=2
                )
                if self.checkpoints is not None and isinstance(error, StateError):
                    self.checkpoints.set_aside(after=snapshot_step)
        if self._snapshot is not None and (restored_step is None or restored_step < snapshot_step):
            snapshot, self.metadata, _ = self._snapshot
            self._store.adopt(snapshot.restore())
            return self._store.step
        return restored_step

    def recover(self) -> str:
        """Restore a copy after an exception if the state is lost; return a message on how to continue.

        Several processes restore nothing, because one of them cannot restore alone. A single process raises
        `StateError` if there is no copy.
        """
        if self._processes.count > 1:  # one of several processes cannot restore alone
            latest = None if self.checkpoints is None else self.checkpoints.latest_step()
            newest = "there is no checkpoint" if latest is None else f"the newest checkpoint is of step {latest}"
            if self.is_alive():
                return (
                    f"the trainer holds the state of step {self._store.step}; fit goes on from there if all processes "
                    f"are alive; otherwise start all processes again and restore: {newest}"
                )
            return f"the step that failed had consumed its state; start all processes again and restore: {newest}"
        if self.is_alive():
            return f"the trainer holds the state of step {self._store.step}; fit goes on from there"
        step = self.roll_back()
        if step is None:
            hint = "make a new Trainer from the model's weights; rollback=True or a checkpoint_dir keeps a copy"
            raise StateError("a step failed after it had consumed its state, and there is no copy of it", hint=hint)
        return f"the step that failed had consumed its state; the trainer is back at step {step}, where fit goes on"

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def prepare_save(self) -> None:
        """Adopt changes made in a mutable object; raise without a folder for checkpoints, or inside of `averaged`."""
        require_checkpoints(self.checkpoints, "save")
        self._store.refuse_averaged("save")
        self._store.borrow(lend=False)

    def save(self, metadata: RunMetadata) -> bool:
        checkpoints = require_checkpoints(self.checkpoints, "save")
        state, positions = self._store.state, self._processes.positions(metadata.position)
        content = {"positions": positions, **self._identity(), "callbacks": metadata.callbacks}
        has_changed = self._saved_state is None or self._saved_state() is not state  # since the last save or restore
        is_new = checkpoints.save(self._store.step, jax.tree.map(key_numbers, state), content, replace=has_changed)
        self._saved_state = weakref.ref(state) if is_new else self._saved_state
        return is_new

    def restore(self, step: int | None = None, *, best: bool = False) -> int | None:
        checkpoints = require_checkpoints(self.checkpoints, "restore")
        if best and step is not None:
            raise ConfigError(f"restore takes step or best, not both step={step} and best=True")
        like = jax.tree.map(_stored_struct, self._store.state)
        backups: list[HostSnapshot] = []

        def release_state() -> None:
            if self._rollback and self.is_alive():
                backups.append(HostSnapshot(self._store.state))
            jax.tree.map(lambda x: x.delete(), self._store.state)

        arguments = like, self._identity(), release_state
        target = checkpoints.existing(step) if best or step is not None else None
        try:
            result = checkpoints.newest(*arguments) if target is None else checkpoints.read(target, *arguments)
            if result is None:
                return None
            loaded, numbers, content = result
            self._store.adopt(jax.tree.map(_restore_key, numbers, self._store.state))
            self._saved_state = weakref.ref(self._store.state)
            self.metadata = RunMetadata(self._processes.position(content["positions"]), content.get("callbacks"))
            return loaded
        except BaseException as error:
            if backups:
                self._store.adopt(backups[0].restore())
            if self.is_alive():
                error.add_note(f"the trainer holds the state of step {self._store.step}, as before")
            elif not self._rollback:
                error.add_note("the trainer's own state was deleted before: rollback=False keeps no copy")
            raise

    def _identity(self) -> dict[str, Any]:
        """Return the metadata that shows whether a checkpoint fits this run."""
        if self._digest is None or self._digest[0] is not self._store.frozen:  # `update` may replace frozen leaves
            self._digest = self._store.frozen, fingerprint(self._store.frozen, self._arrangement)
        keys = [str(jax.random.key_impl(leaf)) for leaf in jax.tree.leaves(self._store.state) if is_key(leaf)]
        random = {"keys": keys, "settings": {name: getattr(jax.config, name) for name in _RANDOM}}
        return {"base": self._digest[1], "arrangement": self._arrangement, "random": random}


def open_checkpoints(
    directory: str | Path | None,
    state: Tree,
    on_nan: str,
    rollback: bool,
    max_to_keep: int,
    best: str | None,
    best_mode: str,
) -> Checkpoints | None:
    """Return the checkpoints in a folder, or None without a folder; raise for invalid or contradictory settings."""
    check_type("rollback", rollback, bool, "True or False")
    folder: Any = directory
    if not (folder is None or (isinstance(folder, str | os.PathLike) and str(folder))):
        raise ConfigError(f"checkpoint_dir must be a path or None, not {shown(folder)}")
    if on_nan == "roll_back" and not rollback and directory is None:
        raise ConfigError('on_nan="roll_back" has no copy to restore', hint="set rollback=True or checkpoint_dir")
    if directory is not None:
        return Checkpoints(directory, max_to_keep=max_to_keep, best=best, best_mode=best_mode, like=state)
    return None if best is None else require_checkpoints(None, "best")


def require_checkpoints(checkpoints: Checkpoints | None, feature: str) -> Checkpoints:
    """Return the checkpoints; raise if there is no folder for them."""
    if checkpoints is None:
        raise ConfigError(f"{feature} needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
    return checkpoints


def _stored_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf in a checkpoint, which stores random keys as integers."""
    numbers = key_numbers(leaf)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=numbers.sharding)


def _restore_key(numbers: Any, like: Any) -> Any:
    """Convert integers to random keys if `like` is a key, even if the array of `like` was donated."""
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like)) if is_key(like) else numbers


class HostSnapshot:
    """A copy of arrays on the host; each process copies its own shards, and devices need no memory for it."""

    def __init__(self, tree: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._arrays = [_HostArray(leaf) for leaf in leaves]

    def restore(self) -> Tree:
        return self._structure.unflatten([array.restore() for array in self._arrays])


class _HostArray:
    """A copy, on the host, of the shards of an array on this process's devices."""

    def __init__(self, leaf: Any) -> None:
        self._impl = jax.random.key_impl(leaf) if is_key(leaf) else None
        leaf = key_numbers(leaf)
        self._shape, self._sharding = leaf.shape, leaf.sharding
        # On a CPU, NumPy would share the buffer, which the next step donates.
        shards = {str(shard.index): shard for shard in leaf.addressable_shards}  # replicas count once
        parts = {index: np.array(shard.data, copy=True) for index, shard in shards.items()}
        self._shards = [(shard.device, parts[str(shard.index)]) for shard in leaf.addressable_shards]

    def restore(self) -> Any:
        kind = self._sharding.memory_kind
        parts = [
            jax.device_put(value, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
            for device, value in self._shards
        ]
        # A new buffer: on a CPU, device_put may share NumPy's buffer, and the next step would donate it.
        parts = [part.copy() for part in parts] if kind != "pinned_host" else parts
        # For an array on one device, make_array_from_single_device_arrays drops the memory kind from the array's type
        # (jax 0.10).
        is_whole = isinstance(self._sharding, jax.sharding.SingleDeviceSharding)
        array = parts[0] if is_whole else jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)
        return array if self._impl is None else jax.random.wrap_key_data(array, impl=self._impl)
