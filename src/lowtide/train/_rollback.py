"""Getting back to a good state after a step that failed when its inputs were gone.

A step consumes its state: when it fails on the device, neither what it was given nor what it should have returned can
be read. So a copy is kept where it costs no device memory: on the host, or in the newest checkpoint.

Interrupts are held back while a step is sent to the device, because between the sending and the assignment of its
results nobody holds the state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..core import Tree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """The shards of an array that this process holds, on the host."""

    shape: tuple[int, ...]
    sharding: Any
    shards: list[tuple[Any, np.ndarray]]
    impl: Any
    """Of a random key, how it is made of numbers."""


class Snapshot:
    """A copy of arrays on the host, each process with its own shards.

    Args:
        tree: arrays, which stay as they are.

    Memory:
        On the host the bytes of the tree (of this process's shards); none on the device.
    """

    def __init__(self, tree: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [_copied(leaf) for leaf in leaves]

    def restore(self) -> Tree:
        """The arrays again, where they were."""
        return self._structure.unflatten([_restored(leaf) for leaf in self._leaves])


def _copied(leaf: Any) -> _Leaf:
    impl = None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf, impl = jax.random.key_data(leaf), jax.random.key_impl(leaf)
    # On a CPU NumPy would share the buffer, which the next step consumes.
    parts: dict[str, np.ndarray] = {}  # of what several devices hold, one copy
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
    # A buffer of its own: on a CPU device_put may share NumPy's, and the next step consumes it.
    parts = [part.copy() for part in parts] if kind != "pinned_host" else parts
    array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return array if leaf.impl is None else jax.random.wrap_key_data(array, impl=leaf.impl)


def is_alive(tree: Tree) -> bool:
    """Whether every array can still be read: none was consumed, and the step that made them did not fail."""
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(tree)):
        return False
    try:
        jax.block_until_ready(tree)
    except jax.errors.JaxRuntimeError:
        return False
    return True


_HELD = (signal.SIGTERM, signal.SIGINT)
"""In the order in which they are let through: an interrupt raises, and nothing comes after it."""
_handler: Callable[[int], Any] = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
"""`signal.getsignal` without its search among the names of handlers, which Python 3.11 does for functions, too."""


class _Valve:
    """A signal handler that passes signals on to the one before it, or keeps them while it is shut."""

    def __init__(self, number: int, before: Any) -> None:
        self.number, self.before, self.is_shut, self.has_come = number, before, False, False

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_shut:
            self.has_come = True
        elif callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextlib.contextmanager
def valves() -> Generator[None]:
    """Make `undisturbed` cheap inside the block: handlers stay, where setting them is system calls in every step."""
    ours: dict[int, _Valve] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _HELD}
        # One that is None is not Python's.
        ours = {number: _Valve(number, handler) for number, handler in before.items() if handler is not None}
    try:
        for number, valve in ours.items():
            signal.signal(number, valve)
        yield
    finally:
        for number, valve in ours.items():
            if signal.getsignal(number) is valve:  # else somebody has set another
                signal.signal(number, valve.before)


class _Shut:
    """Keeps valves shut inside of a ``with`` block; not a generator, because every step enters one."""

    def __init__(self, valves: Sequence[_Valve]) -> None:
        self._valves = valves

    def __enter__(self) -> None:
        try:
            for valve in self._valves:
                valve.is_shut = True
        except BaseException:  # an interrupt between two valves: nobody would open the first again
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for valve in self._valves:
            valve.is_shut = False
        for valve in self._valves:
            if valve.has_come:
                valve.has_come = False
                signal.raise_signal(valve.number)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Hold back Ctrl-C and SIGTERM until the block has ended; elsewhere than in the main thread they do not come."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    handlers = [_handler(number) for number in _HELD]
    shut = [handler for handler in handlers if isinstance(handler, _Valve)]
    return _Shut(shut) if len(shut) + handlers.count(None) == len(_HELD) else _shut_anew()


@contextlib.contextmanager
def _shut_anew() -> Generator[None]:
    with valves(), undisturbed():
        yield


class Ended(BaseException):
    """SIGTERM has come while data was waited for, which might never come."""


class Terminated:
    """Whether SIGTERM has come, asked for between steps; a context manager.

    The machine is about to be taken away: the loop ends at the next step, saves, and lets the signal do what it would
    have done.

    Args:
        is_alone: whether this is the only process; several have to end together.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self.has_come = False
        self.is_last = False
        """Whether only files are waited for: a second signal ends that."""
        self._is_alone, self._waits = is_alone, False
        self._before: Any = None

    def __enter__(self) -> Terminated:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
            if self.has_come:
                signal.raise_signal(signal.SIGTERM)

    def waited(self, wait: Callable[[], T]) -> T:
        """What a function returns that waits for data.

        Raises:
            Ended: when the signal comes meanwhile, or has come. Of several processes one cannot leave the others, so
                there a second signal ends the process.
        """
        self._waits = True
        try:
            if self.has_come and self._is_alone:
                raise Ended
            return wait()
        finally:
            self._waits = False

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """The batches of an evaluation, each of them `waited` for."""
        iterator = self.waited(lambda: iter(data))
        nothing: Any = object()
        while (batch := self.waited(lambda: next(iterator, nothing))) is not nothing:
            yield batch

    def _note(self, *_: object) -> None:
        if (self.is_last or self._waits) and self.has_come:
            self.__exit__()
        self.has_come = True
        if self._waits and self._is_alone:
            self._waits = False
            raise Ended
