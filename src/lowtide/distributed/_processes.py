"""What the processes of one run have to agree on, and what they hear of one another.

All of them run the same program in the same order, and wait for one another inside of it. So before a run they compare
what it depends on, they end it at the same step, and when one fails the others, which would wait for it for ever, say
so and end. A process that dies without a word is the runtime's matter (`jax.distributed.initialize`, its
``heartbeat_timeout_seconds``): collectives fail, or the runtime ends the process.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import ConfigError, ModelObject, StateError, Tree, key_numbers, leaves_with_paths, split_static, write_files
from ..core._compat import exchange, post, posted
from ._fingerprint import fingerprint
from ._sharding import ShardingRules, is_whole

_TOPICS = itertools.count()
_WAIT_SECONDS = 300
"""How long processes wait for one another, unless they are told otherwise."""
_GRACE_SECONDS = 5
"""How long a process has to fail by itself, after it heard that another one has."""
_FAILING_SECONDS = 120
"""How long it has to end what it does after a failure of its own."""
_POLL_SECONDS = 1
SHARED = ".shared-"
"""How the names of files begin by which processes find out whether they see one folder."""
_SHARED_SECONDS = 20
"""How long another machine may take to see a file that was written."""


def of_first(make: Callable[[], Any]) -> Any:
    """Give all processes what the first makes: for what only one may do, such as making a folder.

    Args:
        make: called in the first process; gives JSON.

    Raises:
        StateError: in the others, with what went wrong in the first.
        Exception: in the first, what `make` raises.
    """
    if jax.process_count() == 1:
        return make()
    topic, said = f"lowtide/first/{next(_TOPICS)}", ""
    try:
        made = make() if jax.process_index() == 0 else None
        said = json.dumps({"made": made})
    except Exception as error:
        said = json.dumps({"error": str(error)})
        raise
    finally:
        first = exchange(topic, said, _WAIT_SECONDS)[0]
    answer = json.loads(first) if first else {"error": f"it did not come within {_WAIT_SECONDS} s"}
    if "error" in answer:
        raise StateError(f"the first process failed: {answer['error']}", hint="look at its log")
    return answer["made"]


def same_in_all(what: str, text: str) -> None:
    """Raise unless all processes say the same.

    Args:
        what: what it is, for the message.
        text: what this one says.

    Raises:
        ConfigError: with a process that says otherwise.
    """
    if jax.process_count() == 1:
        return
    for index, said in enumerate(exchange(f"lowtide/same/{next(_TOPICS)}", text, _WAIT_SECONDS)):
        if said != text:
            raise ConfigError(
                f"process {index} differs from process {jax.process_index()} in {what}",
                expected=text,
                got="nothing in time" if said is None else said,
                hint="start all processes with the same code, arguments and data, over the same folder",
            )


def in_any(happened: bool, timeout_seconds: int = _WAIT_SECONDS) -> bool:
    """Whether something happened in any of the processes; all of them have to ask.

    Args:
        happened: whether it did in this one.
        timeout_seconds: how long to wait for the others; one that does not come counts.
    """
    if jax.process_count() == 1:
        return happened
    said = exchange(f"lowtide/any/{next(_TOPICS)}", json.dumps(happened), timeout_seconds)
    return any(text is None or json.loads(text) for text in said)


def refuse_other_folders(processes: Processes, folder: Path) -> None:
    """Raise unless all processes see the same folder: they write into it together, and would wait for ever.

    Raises:
        ConfigError: in all of them.
        OutputError: when the first cannot write there.
    """
    if processes.count == 1:
        return

    def write() -> str:
        name = f"{SHARED}{secrets.token_hex(8)}"
        write_files(folder, {name: b""})
        return name

    name = of_first(write)
    is_missing = in_any(not _appears(folder / name))
    if processes.is_first:
        (folder / name).unlink()
    if is_missing:
        raise ConfigError(
            f"{folder} is not one folder for all processes",
            expected="a folder that all of them read and write, on a shared file system",
            got="another one in at least one process",
            hint="give all processes the same folder; a disk of each machine's own is not shared",
        )


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes soon: shared file systems keep what they have seen for some seconds."""
    until = time.monotonic() + _SHARED_SECONDS
    while not path.is_file():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Processes:
    """The processes of a run; with one process nothing of it does anything.

    Args:
        rules: how arrays are divided among their devices; None with one process.
    """

    def __init__(self, rules: ShardingRules | None) -> None:
        self._rules: Any = rules
        """None with one process alone."""
        self.count = jax.process_count()
        self.is_first = jax.process_index() == 0
        """Whether this process writes what is written once."""
        if self.count > 1 and rules is None:
            raise ConfigError(
                f"there are {self.count} processes, and nothing says how they share the work",
                expected="Trainer(..., sharding=ShardingRules(mesh=make_mesh()))",
                got="sharding=None, with which each process would train a model of its own",
                hint="pass sharding, or start one process",
            )
        self._is_failing, self._is_watched = False, False
        self._ends: Callable[[], bool] = lambda: False
        self.has_left = False
        """Whether the last evaluation was left."""
        self._shapes: set[tuple[str, ...]] = set()
        here = jax.process_index()
        self._num_devices = 0 if rules is None else sum(d.process_index == here for d in rules.mesh.devices.flat)
        self._largest: Any = None if rules is None else jax.jit(jnp.max, out_shardings=rules.replicated())

    def agree(self, **facts: Any) -> None:
        """Raise unless all processes say the same.

        Args:
            **facts: what has to be equal, as JSON.

        Raises:
            ConfigError: with the first fact that differs, and the process that says otherwise.
            StateError: with the processes that did not come.
        """
        if self.count > 1:
            self._compare(self._exchange(facts), facts)

    def _compare(self, all_said: list[Any], facts: Mapping[str, Any]) -> None:
        hint = "start all processes with the same code, arguments and data, over the same folder"
        here = jax.process_index()
        for index, said in enumerate(all_said):
            if set(said) != set(facts):
                raise ConfigError(
                    f"process {index} is elsewhere in the run than process {here}",
                    expected=", ".join(facts),
                    got=", ".join(said),
                    hint="data that ends earlier in one process does that; " + hint,
                )
            for name, mine in json.loads(json.dumps(facts, default=_plain)).items():
                if said[name] != mine:
                    what, expected, got = _first_difference(mine, said[name])
                    raise ConfigError(
                        f"process {index} differs from process {here} in {name}{what}",
                        expected=expected,
                        got=got,
                        hint=hint,
                    )

    def agree_on_batch(self, batch: Tree) -> None:
        """Raise unless all processes have batches of the same shapes; asked once for each.

        Raises:
            ConfigError: as `agree`.
            StateError: when the others go on with the shapes that they know.
        """
        if self.count > 1:
            shapes = tuple(
                f"{path}: {jnp.result_type(leaf)}{list(np.shape(leaf))}" for path, leaf in leaves_with_paths(batch)
            )
            if shapes not in self._shapes:
                self.agree(batch=list(shapes), content="" if self._rules.local_batches else _digest(batch))
                self._shapes.add(shapes)

    def agree_on_values(self, model: Tree) -> None:
        """Raise unless all processes begin with the same model."""
        if self.count > 1:
            self.agree(weights=fingerprint(split_static(model)[0]))

    def agree_on_program(self, lowered: Any) -> None:
        """Raise unless all processes are about to compile the same step."""
        if self.count > 1:
            text = re.sub(r"\d{9,}", "", lowered.as_text())  # without the addresses of callbacks
            self.agree(step=hashlib.sha256(text.encode()).hexdigest()[:16])

    def batches(self, data: Iterable[Tree]) -> Iterator[Tree]:
        """Batches, of which each process has as many, until any process leaves them (`leaving`).

        Raises:
            ConfigError: in all processes, when one has more.
        """
        for number, batch in enumerate(data):
            self.has_left = self._is_left(f"{number} or more") and number > 0
            if self.has_left:
                return
            yield batch
        self._is_left("no more")

    @contextlib.contextmanager
    def leaving(self, ends: Callable[[], bool]) -> Generator[None]:
        """Leave `batches` inside of the block once `ends` says so in any process; `has_left` tells afterwards."""
        self._ends, self.has_left = ends, False
        try:
            yield
        finally:
            self._ends = lambda: False

    def fail(self) -> None:
        """Say that this process is about to raise by itself; it has time to end what it does."""
        self._is_failing = True

    def _is_left(self, batches: str) -> bool:
        is_left = self._ends()
        if self.count == 1:
            return is_left
        facts = {"batches": batches}
        said = self._exchange({**facts, "is_left": is_left})
        lefts = [one.pop("is_left", False) for one in said]
        self._compare(said, facts)
        return any(lefts)

    def _exchange(self, facts: Mapping[str, Any]) -> list[Any]:
        seconds = self._rules.timeout_seconds
        said = exchange(f"lowtide/agree/{next(_TOPICS)}", json.dumps(facts, default=_plain), seconds)
        missing = [index for index, text in enumerate(said) if text is None]
        if missing:
            raise StateError(
                f"process {', '.join(map(str, missing))} did not come within {seconds} s",
                expected=f"all {self.count} processes, to agree on {', '.join(facts)}",
                got=f"process {', '.join(str(index) for index, text in enumerate(said) if text is not None)}",
                hint="look at its log; if it is only slow, raise ShardingRules(timeout_seconds=...)",
            )
        return [json.loads(text) for text in said if text is not None]

    def positions(self, mine: Mapping[str, Any] | None) -> list[Any]:
        """Where the data of each process is."""
        if self.count == 1 or not self._rules.local_batches:
            return [{"shard": None, "position": mine}]
        return self._exchange({"shard": list(self._rules.data_shard), "position": mine})

    def position(self, saved: list[Any]) -> Mapping[str, Any] | None:
        """Of the positions that were saved this process's; what other numbers of processes saved names no example."""
        is_local = self.count > 1 and self._rules.local_batches
        shard = list(self._rules.data_shard) if is_local else None
        for one in saved:
            if one["shard"] == shard:
                return one["position"]
        first = saved[0]["position"]
        return None if first is None else {**first, "num_processes": len(saved)}

    def any(self, happened: bool) -> bool:
        """Whether something happened in any of the processes; all of them have to ask."""
        return happened if self.count == 1 else in_any(happened, self._rules.timeout_seconds)

    def least(self, number: int | None) -> int | None:
        """Return the least number of all processes, which all of them have to ask for; None where any has none."""
        if self.count == 1:
            return number
        numbers = [said["bytes left"] for said in self._exchange({"bytes left": number})]
        return None if None in numbers else min(numbers)

    def in_turn(self, results: Tree) -> Tree:
        """Results, on CPUs of several processes when they are there.

        Collectives of two programs that run at once on CPUs may wait for each other's threads for ever; accelerators
        run one program after the other.
        """
        if self.count > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(results)
        return results

    def vote(self, wish: int) -> Any:
        """Return the largest wish of all processes, as an array that is ready when the step sent before it is."""
        if self.count == 1:
            return wish
        mesh = self._rules.mesh
        everywhere = jax.sharding.NamedSharding(mesh, jax.P(tuple(mesh.axis_names)))
        mine = np.full(self._num_devices, wish, np.int32)
        wishes = jax.make_array_from_process_local_data(everywhere, mine, (mesh.size,))
        return self.in_turn(self._largest(wishes))

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Tell the others when the block fails, and end this process when another has failed."""
        if self.count == 1 or self._is_watched:  # of blocks inside of one another the outermost tells
            yield
            return
        self._is_failing, self._is_watched = False, True
        over, topic = threading.Event(), f"lowtide/failed/{next(_TOPICS)}"
        threading.Thread(target=self._watch, args=(topic, over), daemon=True, name="lowtide-watch").start()
        try:
            yield
        except BaseException as error:
            text = (str(error).splitlines() or [""])[0][:200]
            post(topic, f"process {jax.process_index()} failed: {type(error).__name__}: {text}")
            raise
        finally:
            over.set()
            self._is_watched = False

    def _watch(self, topic: str, over: threading.Event) -> None:
        while not over.wait(_POLL_SECONDS):
            try:
                said = posted(topic)
            except jax.errors.JaxRuntimeError:  # the coordinator is gone; the runtime says so itself
                return
            if said is None:
                continue
            sys.stderr.write(f"lowtide: {said}; process {jax.process_index()} cannot go on without it\n")
            sys.stderr.flush()
            is_over = over.wait(_GRACE_SECONDS) or (self._is_failing and over.wait(_FAILING_SECONDS))
            if not is_over:
                # The main thread waits in a collective for the process that failed; nothing can wake it.
                sys.stderr.write(
                    "hint: start all processes again; trainer.restore() goes on from the last checkpoint\n"
                )
                sys.stderr.flush()
                os._exit(1)
            return


def placed(model: Any, rules: ShardingRules, arrange: Callable[[Any], Any] = lambda model: model) -> Any:
    """Arrange a model that all processes begin with, its arrays where they belong; a mutable object itself."""
    processes = Processes(rules)
    if not isinstance(model, ModelObject):
        processes.agree_on_values(model)
        return rules.place(arrange(model))
    processes.agree_on_values(model.arrays())
    model.give_back(rules.place(model.arrays()))
    return model


def _plain(value: Any) -> Any:
    """Write a number of NumPy as JSON has it."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _digest(batch: Tree) -> str:
    """Digest what a batch holds, of the arrays that are in this process's memory."""
    found = hashlib.sha256()
    for path, leaf in leaves_with_paths(batch):
        if not is_whole(leaf):
            found.update(f"{path}:".encode() + np.ascontiguousarray(key_numbers(leaf)).tobytes())
    return found.hexdigest()[:16]


def _first_difference(mine: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Of two lists the first entries that differ, and which; else the two."""
    if not (isinstance(mine, list) and isinstance(theirs, list)):
        return "", mine, theirs
    for at, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"[{at}]", a, b
    return " (how many)", len(mine), len(theirs)
