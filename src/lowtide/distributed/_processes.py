"""Communication of the processes of a run: agreement, failure detection and fingerprints of weights.

All processes have to run the same program in the same order. So they compare their inputs before a run, and end it at
the same step. If a process raises, the other processes report its error and exit, because they would wait for it
forever. If a process dies without raising, JAX either raises in the collectives of the other processes, or ends them
after ``heartbeat_timeout_seconds`` (see `jax.distributed.initialize`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import (
    ConfigError,
    ModelObject,
    StateError,
    Tree,
    is_stacked,
    key_numbers,
    leaves_with_paths,
    on_host,
    split_static,
    write_files,
)
from ..core._compat import exchange, post, posted
from ._sharding import ShardingRules, is_global

# All processes call the functions below in the same order, so equal numbers belong to the same exchange.
_TOPICS = itertools.count()
_WAIT_SECONDS = 300
"""Default time that processes wait for one another."""
_GRACE_SECONDS = 5
"""Time that a process has to fail with its own error after another process has failed."""
_REPORT_SECONDS = 2
"""Time that the other processes have to report that processes differ, before the first one ends. With JAX 0.12 they end
without a report when the coordination service ends, which runs in the first process."""
_FAILING_SECONDS = 120
"""Time that a process has to clean up after its own failure (`Processes.fail`)."""
_POLL_SECONDS = 1
SHARED = ".shared-"
"""Prefix of the files by which processes detect whether they see the same folder."""
_SHARED_SECONDS = 20
"""Time that another machine may need to see a new file."""
_SAMPLES_PER_AXIS = 8
_RESTART_HINT = "hint: start all processes again; trainer.restore() continues from the last checkpoint"
_START_ALIKE = "start all processes with the same code, arguments, data and folder"


def _wait_for_reports() -> None:
    """Wait in the first process before it raises an error that all processes raise."""
    if jax.process_index() == 0:
        time.sleep(_REPORT_SECONDS)


def call_on_first(make: Callable[[], Any]) -> Any:
    """Call a function in the first process only, for example to make a folder, and return its result in all processes.

    `make` returns a value that JSON can represent. If it raises or takes too long, other processes raise `StateError`.
    """
    if jax.process_count() == 1:
        return make()
    topic, message = f"lowtide/first/{next(_TOPICS)}", ""
    try:
        result = make() if jax.process_index() == 0 else None
        message = json.dumps({"made": result})
    except Exception as error:
        message = json.dumps({"error": str(error)})
        raise
    finally:
        reply = exchange(topic, message, _WAIT_SECONDS)[0]
        if message.startswith('{"error"'):
            _wait_for_reports()
    answer = json.loads(reply) if reply else {"error": f"it did not answer within {_WAIT_SECONDS} s"}
    if "error" in answer:
        raise StateError(f"the first process failed: {answer['error']}", hint="read its log")
    return answer["made"]


def check_equal(what: str, text: str) -> None:
    """Raise `ConfigError` unless all processes pass the same text, described by `what`, within `_WAIT_SECONDS`."""
    if jax.process_count() == 1:
        return
    for index, reply in enumerate(exchange(f"lowtide/same/{next(_TOPICS)}", text, _WAIT_SECONDS)):
        if reply != text:
            problem = f"process {index} differs from process {jax.process_index()} in {what}"
            got = "no answer in time" if reply is None else reply
            _wait_for_reports()
            raise ConfigError(problem, expected=text, got=got, hint=_START_ALIKE)


def any_process(happened: bool, timeout_seconds: int = _WAIT_SECONDS) -> bool:
    """Return whether any process passes True as `happened`, or does not answer within `timeout_seconds`.

    All processes have to call this function.
    """
    if jax.process_count() == 1:
        return happened
    replies = exchange(f"lowtide/any/{next(_TOPICS)}", json.dumps(happened), timeout_seconds)
    return any(text is None or json.loads(text) for text in replies)


def check_shared_folder(processes: Processes, folder: Path) -> None:
    """Raise `ConfigError` if processes see different folders: they would wait for each other's files forever."""
    if processes.count == 1:
        return

    def write() -> str:
        name = f"{SHARED}{secrets.token_hex(8)}"
        write_files(folder, {name: b""})
        return name

    name = call_on_first(write)
    is_missing = any_process(not _wait_for_file(folder / name))
    if processes.is_first:
        (folder / name).unlink()
    if is_missing:
        hint = "give all processes the same folder on a shared file system; a local disk is not shared"
        raise ConfigError(f"{folder} is not the same folder for all processes", hint=hint)


def _wait_for_file(path: Path) -> bool:
    """Return whether a file appears within `_SHARED_SECONDS`: shared file systems cache listings for some seconds."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Processes:
    """Communication of a run's processes; mutable.

    A run with a single process exchanges nothing and never waits.

    Raises:
        ConfigError: for several processes without `rules`.
    """

    def __init__(self, rules: ShardingRules | None) -> None:
        self._rules: Any = rules
        self.count = jax.process_count()
        self.is_first = jax.process_index() == 0
        """Whether this process writes the files that are written once per run."""
        if self.count > 1 and rules is None:
            raise ConfigError(
                f"there are {self.count} processes, but no sharding rules for them: each would train its own model",
                hint="pass Trainer(..., sharding=ShardingRules(mesh=make_mesh())), or start one process",
            )
        self._is_failing, self._is_watched = False, False
        self._should_end: Callable[[], bool] = lambda: False
        self.has_left = False
        """Whether the last loop over `batches` ended early."""
        self._shapes: set[tuple[str, ...]] = set()
        index = jax.process_index()
        self._num_devices = 0 if rules is None else sum(d.process_index == index for d in rules.mesh.devices.flat)
        self._max: Any = None if rules is None else jax.jit(jnp.max, out_shardings=rules.replicated())

    def agree(self, **facts: Any) -> None:
        """Raise `ConfigError` unless all processes pass the same facts, or `StateError` if one does not answer."""
        if self.count > 1:
            self._compare(self._exchange(facts), facts)

    def _compare(self, all_facts: list[Any], facts: Mapping[str, Any]) -> None:
        process_index = jax.process_index()
        for index, process_facts in enumerate(all_facts):
            if set(process_facts) != set(facts):
                problem = f"process {index} is at another point of the run than process {process_index}"
                expected, got = ", ".join(facts), ", ".join(process_facts)
                hint = f"check whether the data ends earlier in one process; {_START_ALIKE}"
                raise ConfigError(problem, expected=expected, got=got, hint=hint)
            # The others' facts have passed through JSON, which turns tuples into lists.
            for name, value in json.loads(json.dumps(facts, default=_to_json)).items():
                if process_facts[name] != value:
                    _wait_for_reports()
                    location, expected, got = _first_difference(value, process_facts[name])
                    problem = f"process {index} differs from process {process_index} in {name}{location}"
                    raise ConfigError(problem, expected=expected, got=got, hint=_START_ALIKE)

    def agree_on_batch(self, batch: Tree) -> None:
        """Raise unless all processes have batches of the same paths, shapes and dtypes; compare each combination once.

        Without `local_batches`, the contents of the compared batch have to be equal, too. If a combination is new in
        this process only, the other processes do not join the comparison. Then this process raises `StateError` after
        the timeout, or `ConfigError` if the others reach a later exchange first.
        """
        if self.count > 1:
            shapes = tuple(
                f"{path}: {jnp.result_type(leaf)}{list(np.shape(leaf))}" for path, leaf in leaves_with_paths(batch)
            )
            if shapes not in self._shapes:
                self.agree(batch=list(shapes), content="" if self._rules.local_batches else _digest_batch(batch))
                self._shapes.add(shapes)

    def agree_on_values(self, model: Tree) -> None:
        """Raise unless all processes start with the same model."""
        if self.count > 1:
            self.agree(weights=fingerprint(split_static(model)[0]))

    def agree_on_program(self, lowered: Any) -> None:
        """Raise unless all processes are about to compile the same step."""
        if self.count > 1:
            text = re.sub(r"\d{9,}", "", lowered.as_text())  # callbacks appear with addresses, which differ
            self.agree(step=hashlib.sha256(text.encode()).hexdigest()[:16])

    def batches(self, data: Iterable[Tree]) -> Iterator[Tree]:
        """Yield batches of `data`; end early if the function passed to `ending_together` returns True in any process.

        All processes end after the same batch. The first batch is always yielded. Raises `ConfigError` if the data ends
        earlier in one process than in another.
        """
        for number, batch in enumerate(data):
            # The first batch is always yielded, because means over no batch would raise.
            self.has_left = self._should_leave(f"{number} or more") and number > 0
            if self.has_left:
                return
            yield batch
        self._should_leave("no more")

    @contextlib.contextmanager
    def ending_together(self, ends: Callable[[], bool]) -> Generator[None]:
        """End the loop over `batches` in this block when `ends()` is true in any process, and set `has_left`."""
        self._should_end, self.has_left = ends, False
        try:
            yield
        finally:
            self._should_end = lambda: False

    def fail(self) -> None:
        """Mark this process as failing: if another process fails, this one has `_FAILING_SECONDS` to clean up."""
        self._is_failing = True

    def _should_leave(self, batches: str) -> bool:
        is_leaving = self._should_end()
        if self.count == 1:
            return is_leaving
        facts = {"batches": batches}
        all_facts = self._exchange({**facts, "is_left": is_leaving})
        leaving = [process_facts.pop("is_left", False) for process_facts in all_facts]
        self._compare(all_facts, facts)
        return any(leaving)

    def _exchange(self, facts: Mapping[str, Any]) -> list[Any]:
        seconds = self._rules.timeout_seconds
        replies = exchange(f"lowtide/agree/{next(_TOPICS)}", json.dumps(facts, default=_to_json), seconds)
        missing = [index for index, text in enumerate(replies) if text is None]
        if missing:
            problem = f"process {', '.join(map(str, missing))} did not answer within {seconds} s"
            expected = f"answers of all {self.count} processes about {', '.join(facts)}"
            hint = "read its log; if it is only slow, increase ShardingRules(timeout_seconds=...)"
            raise StateError(problem, expected=expected, hint=hint)
        return [json.loads(text) for text in replies if text is not None]

    def positions(self, mine: Mapping[str, Any] | None) -> list[Any]:
        """Return a list of each process's ``{"shard": ..., "position": mine}``; one entry if all read whole batches."""
        if self.count == 1 or not self._rules.local_batches:
            return [{"shard": None, "position": mine}]
        return self._exchange({"shard": list(self._rules.data_shard), "position": mine})

    def position(self, saved: list[Any]) -> Mapping[str, Any] | None:
        """Return the position (or None) that was saved for this process's shard; `saved` is a result of `positions`.

        If no entry has this shard, return the first position, with the number of entries as ``num_processes``. Only
        data indexed by step resumes from this position; `DataCursor.start` raises `DataError` for other data.
        """
        is_local = self.count > 1 and self._rules.local_batches
        shard = list(self._rules.data_shard) if is_local else None
        for entry in saved:
            if entry["shard"] == shard:
                return entry["position"]
        first = saved[0]["position"]
        return None if first is None else {**first, "num_processes": len(saved)}

    def any(self, happened: bool) -> bool:
        """Return whether any process passes True or does not answer; all processes have to call this."""
        return happened if self.count == 1 else any_process(happened, self._rules.timeout_seconds)

    def min_over_processes(self, number: int | None) -> int | None:
        """Return the smallest number of all processes, or None if any passes None; all processes have to call this."""
        if self.count == 1:
            return number
        numbers = [facts["bytes left"] for facts in self._exchange({"bytes left": number})]
        return None if None in numbers else min(numbers)

    def wait_on_cpu(self, results: Tree) -> Tree:
        """Return `results`; with several processes on CPUs, wait until the results are ready."""
        # On CPUs, the collectives of two programs that run at once may wait for each other's threads forever.
        # Accelerators run one program after the other.
        if self.count > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(results)
        return results

    def max_action(self, action: int) -> Any:
        """Return the highest action that any process requests, as an array; a single process gets `action` itself."""
        if self.count == 1:
            return action
        # The maximum is a collective, dispatched like a step. This call does not wait: the host reads the result later.
        mesh = self._rules.mesh
        sharding = jax.sharding.NamedSharding(mesh, jax.P(tuple(mesh.axis_names)))
        local_actions = np.full(self._num_devices, action, np.int32)
        actions = jax.make_array_from_process_local_data(sharding, local_actions, (mesh.size,))
        return self.wait_on_cpu(self._max(actions))

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Report an exception in the ``with`` block to the other processes; end this process when another fails."""
        if self.count == 1 or self._is_watched:  # only the outermost of nested blocks reports
            yield
            return
        self._is_failing, self._is_watched = False, True
        finished, topic = threading.Event(), f"lowtide/failed/{next(_TOPICS)}"
        threading.Thread(target=self._watch, args=(topic, finished), daemon=True, name="lowtide-watch").start()
        try:
            yield
        except BaseException as error:
            # From JAX 0.12, a collective raises when another process has ended, often before `_watch` reads why.
            if (message := _posted(topic)) is None:
                text = (str(error).splitlines() or [""])[0][:200]
                post(topic, f"process {jax.process_index()} failed: {type(error).__name__}: {text}")
            else:
                error.add_note(f"lowtide: {message}\n{_RESTART_HINT}")
            raise
        finally:
            finished.set()
            self._is_watched = False

    def _watch(self, topic: str, finished: threading.Event) -> None:
        while not finished.wait(_POLL_SECONDS):
            if (message := _posted(topic)) is None:
                continue
            sys.stderr.write(f"lowtide: {message}; process {jax.process_index()} cannot continue without it\n")
            sys.stderr.flush()
            has_finished = finished.wait(_GRACE_SECONDS) or (self._is_failing and finished.wait(_FAILING_SECONDS))
            if not has_finished:
                # The main thread waits in a collective for the process that failed; nothing can wake it.
                sys.stderr.write(f"{_RESTART_HINT}\n")
                sys.stderr.flush()
                os._exit(1)
            return


def _posted(topic: str) -> str | None:
    """Return the message of the process that failed first, or None; None also if the coordinator is gone."""
    try:
        return posted(topic)
    except jax.errors.JaxRuntimeError:  # the runtime reports that itself
        return None


def placed(model: Any, rules: ShardingRules, arrange: Callable[[Any], Any] = lambda model: model) -> Any:
    """Check that all processes have the same model, and put it on the mesh.

    A pytree is passed to `arrange` after the check. A `ModelObject` is changed in place and returned.
    """
    processes = Processes(rules)
    if not isinstance(model, ModelObject):
        processes.agree_on_values(model)
        return rules.place(arrange(model))
    processes.agree_on_values(model.arrays())
    model.give_back(rules.place(model.arrays()))
    return model


def _to_json(value: Any) -> Any:
    """Convert a NumPy number to a Python number for JSON, and any other value to text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _digest_batch(batch: Tree) -> str:
    """Return a digest of the batch's arrays that are in this process's memory."""
    digest = hashlib.sha256()
    for path, leaf in leaves_with_paths(batch):
        if not is_global(leaf):
            digest.update(f"{path}:".encode() + np.ascontiguousarray(key_numbers(leaf)).tobytes())
    return digest.hexdigest()[:16]


def _first_difference(expected: Any, got: Any) -> tuple[str, Any, Any]:
    """Return where two values first differ, as text, and the expected and the actual part there.

    Two lists differ at an index, such as ``[3]``, or in length. For other values, the text is empty, and the parts are
    the whole values.
    """
    if not (isinstance(expected, list) and isinstance(got, list)):
        return "", expected, got
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return f"[{index}]", a, b
    return " (length)", len(expected), len(got)


# --- fingerprints of the weights that a run is based on --------------------------------------------------------------
# An adapter is useless on a base other than its own, and shapes do not reveal the difference. Two models differ in
# nearly all of their weights, so samples on a grid in every leaf distinguish them. Sampling is cheap even if leaves are
# sharded or in host memory.


def fingerprint(tree: Tree, arrangement: Sequence[int] | None = None) -> str:
    """Return a hash of the paths, shapes, dtypes and samples of all leaves, as 16 hexadecimal digits.

    `arrangement` has one entry for each row of the leaves below the path ``layers``: the index of its layer, or -1 for
    padding. Rows are hashed in the order of the layers, without padding, so the hash does not depend on `arrangement`.
    """
    digest = hashlib.sha256()
    for path, leaf in leaves_with_paths(tree):
        if not hasattr(leaf, "dtype"):
            digest.update(f"{path}={leaf!r};".encode())
            continue
        rows = range(leaf.shape[0]) if leaf.shape else ()
        if arrangement is not None and is_stacked(path, leaf, len(arrangement)):
            rows = [arrangement.index(layer) for layer in range(1 + max(arrangement))]
        digest.update(f"{path}:{leaf.dtype}{[len(rows), *leaf.shape[1:]] if leaf.shape else []};".encode())
        digest.update(np.ascontiguousarray(_sample_leaf(leaf, rows)).tobytes())
    return digest.hexdigest()[:16]


def _sample_leaf(leaf: Any, rows: Sequence[int]) -> np.ndarray:
    leaf = key_numbers(leaf)
    if not isinstance(leaf, jax.Array) or (_is_host_readable(leaf.sharding) and leaf.is_fully_addressable):
        return _sample_grid(np.asarray(leaf), rows, np)
    if on_host(leaf.sharding):
        return np.zeros(0)  # this process cannot read the shards of others, so only shape and dtype are hashed
    sharding = leaf.sharding
    replicated = jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else None
    return np.asarray(jax.jit(lambda x: _sample_grid(x, rows, jnp), out_shardings=replicated)(leaf))


def _is_host_readable(sharding: jax.sharding.Sharding) -> bool:
    """Return whether NumPy can read arrays of this sharding directly; others need a compiled program per shape."""
    devices = sharding.device_set
    return on_host(sharding) or (len(devices) == 1 and next(iter(devices)).platform == "cpu")


def _sample_grid(leaf: Any, rows: Sequence[int], module: Any) -> Any:
    for axis, size in enumerate(leaf.shape):
        indices: Any = np.asarray(range(size) if axis else rows, int)
        samples = np.unique(np.linspace(0, max(len(indices) - 1, 0), min(len(indices), _SAMPLES_PER_AXIS), dtype=int))
        leaf = module.take(leaf, indices[samples], axis=axis)
    return leaf
