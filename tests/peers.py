"""Recorded answers of torch, transformers, PEFT and others: tests compare with the recordings and need none of them.

A test takes the fixture ``peer`` and does two things with it:

- ``peer.answer(name, compute, question)`` returns what the peer computes: arrays and JSON values by name. ``compute``
  imports the peer inside. ``question`` is everything that the peer gets from us: folders, arrays, options.
- ``peer.folder(path, make, question)`` returns a folder that the peer writes. Random tensors are drawn here by name and
  shape, so that a recording holds the folder's configuration and no weights.

``pytest --peers=recorded`` (the default) calls neither ``compute`` nor ``make``. It reads the recording. It fails when
today's question differs from the recorded one: an answer to an old question proves nothing.
``pytest --peers=live`` (``make peers``) asks the peers. It fails when an answer differs from the recorded answer to the
same question, and it records answers to new or changed questions. ``pytest --peers=record`` records every answer.
Answers of a test that fails are not recorded.

A recorded question is a sketch: names, shapes, dtypes, JSON values, and for each array a few sums and samples, because
our numbers differ by rounding between JAX versions and machines. The code of ``compute`` is not part of it:
`make peers` runs that. One file of safetensors per test module lies in ``tests/golden/peers`` and names versions.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

MODES = ("recorded", "live", "record")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao", "safetensors", "numpy")
GOLDEN = Path(__file__).parent / "golden" / "peers"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
TOLERANCES = {"BF16": 2.0**-8, "F16": 2.0**-11, "F8_E4M3": 2.0**-4, "F8_E5M2": 2.0**-3}
"""Relative tolerance of a sketch by dtype: one unit in the last place; 1e-5 for every other dtype."""
TOLERANCE = 1e-5
LONGEST_TEXT = 4000
"""Longer texts of a question, such as a tokenizer, are recorded as a hash."""
CARDS = ".md"
"""Model cards are for people: no software reads them."""
PARENT = "{parent}"
"""Stands in a recording for the temporary folder that contains a peer's folder."""
SET_KEYS = ("target_modules", "modules_to_save", "exclude_modules", "feedforward_modules", "target_parameters")
"""PEFT writes these sets in any order."""
VERSION_KEYS = ("transformers_version", "peft_version")

Tensors = Mapping[str, np.ndarray]
Draw = Callable[[str, tuple[int, ...]], np.ndarray | None]


class Peer:
    """Answers of other software for one test, recorded or live. Changes while the test runs: it collects answers."""

    def __init__(self, file: Path, test: str, mode: str) -> None:
        self.is_live = mode != "recorded"
        self._file, self._test, self._mode = file, test, mode
        self._entries: dict[str, Any] = {}
        self._arrays: dict[str, np.ndarray] = {}
        if mode == "recorded" and not file.exists():
            pytest.fail(f"{file.name} is missing: run `make peers`", pytrace=False)
        recorded = _read_recording(file, file.stat().st_mtime_ns) if file.exists() else ({}, {})
        self._old_arrays, entries = recorded
        self._old: dict[str, Any] = entries.get(test, {}).get("answers", {})
        self._old_versions: dict[str, str] = entries.get(test, {}).get("versions", {})

    def answer(self, name: str, compute: Callable[[], Mapping[str, Any]], question: Any) -> dict[str, Any]:
        """Return arrays and JSON values that a peer computes from a question.

        Args:
            name: of the answer, unique in the test.
            compute: asks the peer. Never called when answers come from the recording.
            question: what the peer gets, as nested dicts and lists of folders, arrays and JSON values.
        """
        sketch = describe(question)
        if not self.is_live:
            entry = self._recorded(name, sketch)
            return {**entry["values"], **{key: self._old_arrays[digest] for key, digest in entry["arrays"].items()}}
        answer = dict(compute())
        arrays = {key: np.asarray(value) for key, value in answer.items() if hasattr(value, "dtype")}
        values = json.loads(json.dumps({key: value for key, value in answer.items() if key not in arrays}))
        self._collect(name, {"question": sketch, "values": values}, arrays)
        return {**values, **arrays}

    def folder(
        self, path: Path, make: Callable[[Path], object], question: Any = None, draw: Draw | None = None
    ) -> Path:
        """Return a folder that a peer writes, with tensors that are drawn here.

        The peer's own tensors are overwritten: to compute with them, load the folder again inside ``compute``.

        Args:
            path: of the folder; its name is the name of the answer.
            make: writes the folder. Never called when answers come from the recording.
            question: as in `answer`.
            draw: values of a tensor from its name and shape, or None to record the peer's own. Default: `normal`.
        """
        sketch, draw = describe(question), draw or normal
        if not self.is_live:
            entry = self._recorded(path.name, sketch)
            path.mkdir(parents=True, exist_ok=True)
            for name, text in entry["values"]["texts"].items():
                content = text if isinstance(text, str) else json.dumps(text)
                (path / name).write_text(content.replace(PARENT, str(path.parent)), encoding="utf-8")
            for name, shapes in entry["values"]["tensors"].items():
                own = {key: self._old_arrays[digest] for key, digest in entry["arrays"].items()}
                write_tensors(path / name, {key: _drawn(draw, key, *shapes[key], own) for key in shapes})
            return path
        make(path)
        texts, tensors, own = {}, {}, {}
        for file in sorted(path.iterdir()):
            if file.suffix == ".safetensors":
                arrays, _ = read_tensors(file)
                tensors[file.name] = {key: [_dtype_name(array), list(array.shape)] for key, array in arrays.items()}
                own |= {key: array for key, array in arrays.items() if draw(key, array.shape) is None}
                drawn = {key: _drawn(draw, key, *tensors[file.name][key], arrays) for key in arrays}
                write_tensors(file, drawn)
            elif file.suffix == ".md":
                file.unlink()  # a model card; a recorded folder has none
            else:
                texts[file.name] = _read_text(file, path.parent)
        self._collect(path.name, {"question": sketch, "values": {"texts": texts, "tensors": tensors}}, own)
        return path

    def close(self, tests: Container[str]) -> None:
        """Write new answers to the file of the module, and remove those of other tests than ``tests``."""
        if not self._entries or self._entries == self._old:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Another process of pytest may run other tests of the module.
            arrays, entries = read_recording(self._file) if self._file.exists() else ({}, {})
            entries = {test: entry for test, entry in entries.items() if test in tests}
            entries[self._test] = {"versions": _versions(), "answers": self._entries}
            arrays = {**arrays, **self._arrays}
            answers = [answer for entry in entries.values() for answer in entry["answers"].values()]
            used = {digest for answer in answers for digest in answer["arrays"].values()}
            header = {test: _pack(entries[test]) for test in sorted(entries)}
            write_tensors(self._file, {digest: arrays[digest] for digest in used}, header)

    def _recorded(self, name: str, sketch: Any) -> Any:
        if name not in self._old:
            pytest.fail(f"no recorded answer {name!r} of {self._test}: run `make peers`", pytrace=False)
        changes = differences(self._old[name]["question"], sketch)
        if changes:
            lines = "\n  ".join(changes[:8])
            pytest.fail(
                f"The peer was asked something else when {name!r} of {self._test} was recorded "
                f"({len(changes)} differences, recorded and now):\n  {lines}\n"
                "hint: run `make peers`, unless the difference is a mistake.",
                pytrace=False,
            )
        return self._old[name]

    def _collect(self, name: str, entry: dict[str, Any], arrays: Tensors) -> None:
        """Keep a new answer; compare it with the recorded answer to the same question."""
        entry["arrays"] = {key: _digest(array) for key, array in arrays.items()}
        old = self._old.get(name)
        if self._mode == "live" and old and not differences(old["question"], entry["question"]):
            changes = differences(old["values"], entry["values"])
            changes += _array_differences({key: self._old_arrays[d] for key, d in old["arrays"].items()}, arrays)
            if changes:
                lines = "\n  ".join(changes[:8])
                pytest.fail(
                    f"The peer's answer {name!r} of {self._test} changed (recorded and now):\n  {lines}\n"
                    f"versions: {self._old_versions} and {_versions()}\n"
                    "hint: run `pytest --peers=record` on this test to accept it.",
                    pytrace=False,
                )
            entry, arrays = old, {key: self._old_arrays[d] for key, d in old["arrays"].items()}
        assert name not in self._entries, f"two answers with the name {name!r}"
        self._entries[name] = entry
        self._arrays |= {entry["arrays"][key]: array for key, array in arrays.items()}


@contextlib.contextmanager
def peer_of(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """Yield the answers of the test that asks for the fixture ``peer``."""
    module = request.node.path.relative_to(Path(__file__).parent).with_suffix(".safetensors")
    peer = Peer(GOLDEN / module, request.node.name, request.config.getoption("--peers"))
    num_failures = request.session.testsfailed
    yield peer
    if request.session.testsfailed == num_failures:
        peer.close({item.name for item in request.node.getparent(pytest.Module).collect()})


def normal(name: str, shape: tuple[int, ...], std: float = 0.2) -> np.ndarray:
    """Draw normal values that depend on the name and the shape alone; norms are near 1."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * std
    return 1 + values if name.endswith("norm.weight") else values


def thin(array: Any, step: int = 7) -> np.ndarray:
    """Return one of ``step`` elements in flat order, for arrays too large to record; let ``step`` divide no axis."""
    return np.asarray(array).reshape(-1)[::step]


def describe(value: Any) -> Any:
    """Sketch a question as JSON values."""
    if isinstance(value, Path):
        if not value.is_dir():
            return _describe_file(value)
        files = [file for file in sorted(value.iterdir()) if file.is_file() and file.suffix != CARDS]
        return {file.name: _describe_file(file, value.parent) for file in files}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if hasattr(value, "dtype"):
        return _sketch(np.asarray(value))
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return {"sha256": hashlib.sha256(value.encode()).hexdigest()}
    assert value is None or isinstance(value, (bool, int, float, str)), f"a question of type {type(value)}"
    return value


def differences(recorded: Any, now: Any, path: str = "") -> list[str]:
    """List where two sketches differ beyond rounding."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        if "sketch" in recorded and "sketch" in now:
            return [] if _same_sketch(recorded, now) else [f"{path}: {recorded} and {now}"]
        pairs = {key: (recorded.get(key, "absent"), now.get(key, "absent")) for key in {**recorded, **now}}
        pairs = {key: pair for key, pair in pairs.items() if key not in VERSION_KEYS}
        for key in pairs.keys() & set(SET_KEYS):
            pairs[key] = tuple(sorted(item) if isinstance(item, list) else item for item in pairs[key])
        return [line for key, pair in pairs.items() for line in differences(*pair, f"{path}/{key}")]
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        return [
            line for i, pair in enumerate(zip(recorded, now, strict=True)) for line in differences(*pair, f"{path}/{i}")
        ]
    if isinstance(recorded, float) and isinstance(now, float):
        return [] if math.isclose(recorded, now, rel_tol=TOLERANCE) else [f"{path}: {recorded} and {now}"]
    is_same = type(recorded) is type(now) and recorded == now
    return [] if is_same else [f"{path}: {recorded!r:.200} and {now!r:.200}"]


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read tensors of any dtype, and the metadata of their file."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    metadata = header.pop("__metadata__", {})
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(raw[start + begin : start + end], DTYPES[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"])
    return arrays, metadata


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any dtype; the same tensors give the same bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, array in ordered:
        offsets = [end, end := end + array.nbytes]
        header[name] = {"dtype": _dtype_name(array), "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in ordered))


def read_recording(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the recorded arrays by their hashes, and the answers by tests."""
    arrays, metadata = read_tensors(file)
    return arrays, {test: _unpack(text) for test, text in metadata.items()}


def _pack(entry: Any) -> str:
    """Compress JSON values: questions repeat names and shapes, so that a recording shrinks to a third."""
    return base64.b64encode(zlib.compress(json.dumps(entry).encode(), 9)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


@functools.lru_cache(maxsize=2)
def _read_recording(file: Path, _changed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return read_recording(file)


def _describe_file(file: Path, parent: Path | None = None) -> Any:
    if file.suffix == ".safetensors":
        arrays, _ = read_tensors(file)
        return {name: _sketch(arrays[name]) for name in sorted(arrays)}
    if file.stat().st_size > LONGEST_TEXT and "index" not in file.name:
        return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    return _read_text(file, parent)


def _read_text(file: Path, parent: Path | None = None) -> Any:
    text = file.read_text(encoding="utf-8")
    text = text if parent is None else text.replace(str(parent), PARENT)
    return json.loads(text) if file.suffix == ".json" else text


def _sketch(array: np.ndarray) -> dict[str, Any]:
    """Describe an array by its mean absolute value, three weighted sums, and two samples.

    Rounding of every element moves the sums little. A permutation or another sign of a few elements moves them a lot.
    """
    flat = np.nan_to_num(array.astype(np.float64).reshape(-1), posinf=1e30, neginf=-1e30)
    indices = np.arange(flat.size)
    sums = [float(np.cos(indices * rate) @ flat) for rate in (0.0, 1.0, 2.3)]
    samples = [float(flat[int(part * (flat.size - 1))]) for part in (0.31, 0.77)] if flat.size else []
    numbers = [float(np.abs(flat).mean()) if flat.size else 0.0, *sums, *samples]
    dtype, shape = _dtype_name(array), list(array.shape)
    return {"dtype": dtype, "shape": shape, "sketch": [float(f"{number:.7g}") for number in numbers]}


def _same_sketch(recorded: dict[str, Any], now: dict[str, Any]) -> bool:
    if any(recorded[key] != now[key] for key in ("dtype", "shape")):
        return False
    pairs = list(zip(recorded["sketch"], now["sketch"], strict=True))
    scale = recorded["sketch"][0]
    if np.dtype(DTYPES[now["dtype"]]).kind in "iub":  # no rounding: all but the last digit of each number
        return all(abs(a - b) <= 1e-6 * (scale + abs(a)) for a, b in pairs)
    tolerance = TOLERANCES.get(now["dtype"], TOLERANCE)
    # Rounding errors are independent, so those of a sum grow with the root of its length.
    limits = [tolerance * scale, *[4 * tolerance * scale * math.sqrt(math.prod(now["shape"]))] * 3]
    are_sums_near = all(abs(a - b) <= limit for (a, b), limit in zip(pairs, limits, strict=False))
    return are_sums_near and all(abs(a - b) <= 2 * tolerance * (scale + abs(a)) for a, b in pairs[4:])


def _array_differences(recorded: Tensors, now: Tensors) -> list[str]:
    """List arrays of an answer that differ by more than the processor explains."""
    if recorded.keys() != now.keys():
        return [f"names: {sorted(recorded)} and {sorted(now)}"]
    lines = []
    for name, old in recorded.items():
        new = now[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            lines.append(f"{name}: {old.dtype}{old.shape} and {new.dtype}{new.shape}")
        elif old.dtype.kind in "iub":
            lines += [f"{name}: other integers"] if not np.array_equal(old, new) else []
        elif not np.allclose(old, new, rtol=0, atol=1e-4 * np.abs(np.nan_to_num(old)).max(initial=0), equal_nan=True):
            lines.append(f"{name}: largest difference {np.abs(old - new).max()}")
    return lines


def _drawn(draw: Draw, name: str, dtype: str, shape: list[int], own: Tensors) -> np.ndarray:
    values = draw(name, tuple(shape))
    return own[name] if values is None else np.asarray(values).astype(DTYPES[dtype])


def _dtype_name(array: np.ndarray) -> str:
    return next(name for name, dtype in DTYPES.items() if array.dtype == dtype)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
