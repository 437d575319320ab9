"""Copies of the state to which a trainer can return: the newest checkpoint, and one copy on the host.

A step consumes its state: if it fails on the device, neither its inputs nor its results can be read. So a copy is kept
where it needs no device memory: in a checkpoint, and before the first checkpoint on the host.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import ConfigError, StateError, Tree, is_key, key_numbers
from ..distributed import Processes, fingerprint
from ._checkpoint import Checkpoints
from ._state import LiveState
from ._step import TrainState

_RANDOM = ("jax_default_prng_impl", "jax_threefry_partitionable")
"""JAX settings that decide which random numbers a seed gives."""


class Notes(NamedTuple):
    """Metadata of a state, in addition to its arrays."""

    position: Mapping[str, Any] | None = None
    """Position of the run in its data."""
    callbacks: Mapping[str, Any] | None = None
    """States of the run's callbacks, until a run has resumed them."""


class Copies:
    """The copies of a state, and the ways to restore them.

    Args:
        live: the state.
        arrangement: layer of every row of the state, or None for the order of the model.
        checkpoints: the checkpoints, or None.
        processes: the other processes of the run.
        rollback: whether a copy is kept on the host until there is a checkpoint.
    """

    def __init__(
        self,
        live: LiveState,
        arrangement: list[int] | None,
        checkpoints: Checkpoints | None,
        processes: Processes,
        *,
        rollback: bool,
    ) -> None:
        self._live, self._arrangement, self._processes, self._rollback = live, arrangement, processes, rollback
        self.checkpoints = checkpoints
        """The checkpoints, or None."""
        self.notes = Notes()
        """Metadata of the state, as the last checkpoint or run left it."""
        self._snapshot: tuple[Snapshot, Notes, int] | None = None
        """A copy of the state, its notes and its step."""
        self._saved: weakref.ref[TrainState] | None = None
        """The state that was last saved or restored."""
        self._hashed: tuple[Tree, str] | None = None

    def leave(self, notes: Notes) -> None:
        """Replace the metadata of the state: a run stores its own at its end, and removes what it has resumed."""
        self.notes = notes

    def keep(self, notes: Notes) -> None:
        """Copy the state to the host, unless there is a checkpoint of this step."""
        self._snapshot = None
        self._live.borrow(lend=False)  # includes changes made in a mutable object
        step, is_saved = self._live.step, self._saved is not None and self._saved() is self._live.state
        if self._rollback and not (is_saved and self.checkpoints and self.checkpoints.latest_step() == step):
            self._snapshot = Snapshot(self._live.state), notes, step

    # --- going back ------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Return whether the state can be read: no step consumed it, and the step that made it did not fail."""
        state = self._live.state
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return False
        try:
            jax.block_until_ready(state)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def roll_back(self) -> int | None:
        """Restore the newest checkpoint that can be read, or the copy on the host if that is newer.

        Returns:
            Its step, or None when there is neither.

        Warns:
            UserWarning: for checkpoints that cannot be read.
        """
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        kept = -1 if self._snapshot is None else self._snapshot[-1]
        found = None
        if latest is not None and latest > kept:
            try:
                found = self.restore()
            except Exception as error:
                if self._snapshot is None:
                    raise
                warnings.warn(f"no checkpoint could be restored, so the copy on the host is: {error}", stacklevel=2)
                if self.checkpoints is not None and isinstance(error, StateError):
                    self.checkpoints.set_aside(after=kept)
        if self._snapshot is not None and (found is None or found < kept):
            snapshot, self.notes, _ = self._snapshot
            self._live.hold(snapshot.restore())
            return self._live.step
        return found

    def recover(self) -> str:
        """Make sure that the trainer holds a valid state after an exception.

        Returns:
            A message for the user about what was done.

        Raises:
            StateError: when the state is gone and there is no copy.
        """
        if self._processes.count > 1:
            return self._with_others()
        if self.is_alive():
            return f"the trainer holds the state of step {self._live.step}; fit goes on from there"
        step = self.roll_back()
        if step is None:
            raise StateError(
                "a step failed after it had consumed its state, and there is no copy of it",
                expected="a checkpoint, or Trainer(..., rollback=True)",
                got="neither",
                hint="make a new Trainer from the model's weights; with checkpoint_dir it could be restored",
            )
        return f"the step that failed had consumed its state; the trainer is back at step {step}, where fit goes on"

    def _with_others(self) -> str:
        """Return a message about the state after an exception in one of several processes; it cannot restore alone."""
        latest = None if self.checkpoints is None else self.checkpoints.latest_step()
        newest = "there is no checkpoint" if latest is None else f"the newest checkpoint is of step {latest}"
        if self.is_alive():
            return (
                f"the trainer holds the state of step {self._live.step}; fit goes on from there if all processes live, "
                f"else start them all again and restore: {newest}"
            )
        return f"the step that failed had consumed its state; start all processes again and restore: {newest}"

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, notes: Notes) -> bool:
        """Start to write a checkpoint of the state; see `Trainer.save`."""
        checkpoints = needs_checkpoints(self.checkpoints, "save")
        state, positions = self._live.state, self._processes.positions(notes.position)
        kept = {"positions": positions, **self._identity(), "callbacks": notes.callbacks}
        has_changed = self._saved is None or self._saved() is not state  # since the last save or restore
        is_new = checkpoints.save(self._live.step, jax.tree.map(key_numbers, state), kept, replace=has_changed)
        self._saved = weakref.ref(state) if is_new else self._saved
        return is_new

    def restore(self, step: int | None = None, *, best: bool = False) -> int | None:
        """Load a checkpoint; see `Trainer.restore`."""
        checkpoints = needs_checkpoints(self.checkpoints, "restore")
        if best and step is not None:
            raise ConfigError("restore takes step or best", got=f"step={step}, best=True", hint="leave one out")
        like = jax.tree.map(_numbers_like, self._live.state)
        before: list[Snapshot] = []

        def give_up() -> None:
            if self._rollback and self.is_alive():
                before.append(Snapshot(self._live.state))
            jax.tree.map(lambda x: x.delete(), self._live.state)

        how = like, self._identity(), give_up
        chosen = checkpoints.existing(step) if best or step is not None else None
        try:
            found = checkpoints.newest(*how) if chosen is None else checkpoints.read(chosen, *how)
            if found is None:
                return None
            loaded, numbers, kept = found
            self._live.hold(jax.tree.map(_keys_again, numbers, self._live.state))
            self._saved = weakref.ref(self._live.state)
            self.notes = Notes(self._processes.position(kept["positions"]), kept.get("callbacks"))
            return loaded
        except BaseException as error:
            if before:
                self._live.hold(before[0].restore())
            if self.is_alive():
                error.add_note(f"the trainer holds the state of step {self._live.step}, as before")
            elif not self._rollback:
                error.add_note("the trainer's own state was given up for it: rollback=False keeps no copy")
            raise

    def _identity(self) -> dict[str, Any]:
        """Return the metadata that identifies the run of a checkpoint."""
        if self._hashed is None or self._hashed[0] is not self._live.frozen:  # `update` may replace frozen leaves
            self._hashed = self._live.frozen, fingerprint(self._live.frozen, self._arrangement)
        keys = [str(jax.random.key_impl(leaf)) for leaf in jax.tree.leaves(self._live.state) if is_key(leaf)]
        random = {"keys": keys, "settings": {name: getattr(jax.config, name) for name in _RANDOM}}
        return {"base": self._hashed[1], "arrangement": self._arrangement, "random": random}


def open_checkpoints(
    directory: str | Path | None,
    state: Tree,
    on_nan: str,
    rollback: bool,
    max_to_keep: int,
    best: str | None,
    best_mode: str,
) -> Checkpoints | None:
    """Return the checkpoints if there is a folder for them; raise for settings that make them unusable."""
    given: Any = rollback
    if not isinstance(given, bool):
        raise ConfigError("rollback is no choice", expected="True or False", got=repr(given), hint="rollback=False")
    where: Any = directory
    if not (where is None or (isinstance(where, str | os.PathLike) and str(where))):
        raise ConfigError("checkpoint_dir is no folder", expected="a path, or None", got=repr(where), hint='"run"')
    if on_nan == "roll_back" and not rollback and directory is None:
        raise ConfigError(
            'on_nan="roll_back" has nothing to go back to',
            expected="rollback=True, or a checkpoint_dir",
            got="neither",
            hint="leave rollback=False out",
        )
    if directory is not None:
        return Checkpoints(directory, max_to_keep=max_to_keep, best=best, best_mode=best_mode, like=state)
    if best is not None:
        raise ConfigError("best needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
    return None


def needs_checkpoints(checkpoints: Checkpoints | None, what: str) -> Checkpoints:
    """Return the checkpoints; raise if there is no folder for them."""
    if checkpoints is None:
        raise ConfigError(f"{what} needs checkpoint_dir", hint="Trainer(..., checkpoint_dir=...)")
    return checkpoints


def _numbers_like(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf in a checkpoint, which stores random keys as numbers."""
    numbers = key_numbers(leaf)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=numbers.sharding)


def _keys_again(numbers: Any, like: Any) -> Any:
    """Convert numbers to random keys where `like` is a key, even if its array was consumed."""
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like)) if is_key(like) else numbers


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The shards of an array that this process holds, on the host."""

    shape: tuple[int, ...]
    sharding: Any
    shards: list[tuple[Any, np.ndarray]]
    impl: Any
    """For a random key, the implementation that makes it from numbers."""


class Snapshot:
    """A copy of arrays on the host; each process copies its own shards.

    Args:
        tree: arrays, which stay unchanged.

    Memory:
        Host: the bytes of the tree (of this process's shards). Device: none.
    """

    def __init__(self, tree: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [_copied(leaf) for leaf in leaves]

    def restore(self) -> Tree:
        """Return the arrays with their original placement."""
        return self._structure.unflatten([_restored(leaf) for leaf in self._leaves])


def _copied(leaf: Any) -> _Leaf:
    impl = None
    if is_key(leaf):
        leaf, impl = key_numbers(leaf), jax.random.key_impl(leaf)
    # On a CPU, NumPy would share the buffer, which the next step consumes.
    parts: dict[str, np.ndarray] = {}  # one copy of each shard that several devices hold
    for shard in leaf.addressable_shards:
        if str(shard.index) not in parts:
            parts[str(shard.index)] = np.array(shard.data, copy=True)
    shards = [(shard.device, parts[str(shard.index)]) for shard in leaf.addressable_shards]
    return _Leaf(leaf.shape, leaf.sharding, shards, impl)


def _restored(leaf: _Leaf) -> Any:
    kind = leaf.sharding.memory_kind
    parts = [
        jax.device_put(value, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        for device, value in leaf.shards
    ]
    # A new buffer: on a CPU, device_put may share NumPy's buffer, and the next step would consume it.
    parts = [part.copy() for part in parts] if kind != "pinned_host" else parts
    # For an array on one device, make_array_from_single_device_arrays would lose host memory in the type (jax 0.10).
    is_whole = isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding)
    array = parts[0] if is_whole else jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return array if leaf.impl is None else jax.random.wrap_key_data(array, impl=leaf.impl)
