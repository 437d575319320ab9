"""Records in the files of TensorBoard and of Weights & Biases, read back."""

from __future__ import annotations

import builtins
import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import ConfigError, OutputError
from lowtide.train import Callback, Scalars, TensorBoard

BATCHES = [np.float32(at) for at in range(20)]


def trainer(**options: Any) -> lt.Trainer:
    def loss(model: Any, batch: Any) -> Any:
        return (model["w"] - batch) ** 2, {"batch": batch}

    return lt.Trainer({"w": jnp.zeros(())}, loss, optax.adam(0.1), **options)


def written(directory: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of everything that TensorBoard shows of a folder."""
    from tensorboardX.proto.event_pb2 import Event

    shown: list[tuple[int, str, float]] = []
    for file in sorted(directory.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            # A record is its length, a checksum, the event and another checksum.
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == event.session_log.START:
                shown = [value for value in shown if value[0] < event.step]
            shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def values(records: list[Any]) -> list[tuple[int, str, float]]:
    return [
        (record["step"], name, pytest.approx(value, rel=1e-6))
        for record in records
        for name, value in record.items()
        if name != "step"
    ]


@pytest.fixture
def tensorboard() -> Any:
    return pytest.importorskip("tensorboardX", reason="needs tensorboardX: install the tensorboard extra")


def test_tensorboard_reads_every_value(tensorboard: Any, tmp_path: Path) -> None:
    records = trainer().fit(BATCHES, num_steps=5, eval_data=BATCHES[:2], callbacks=[TensorBoard(tmp_path)])
    assert {"loss", "batch", "grad_norm", "seconds", "eval_loss"} <= {name for _, name, _ in written(tmp_path)}
    assert written(tmp_path) == values(records)


@pytest.mark.slow
def test_what_a_resumed_run_does_again_is_shown_once(tensorboard: Any, tmp_path: Path) -> None:
    class Dies(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 7:
                trainer._snapshots.save = lambda metadata: False  # as if it were killed
                raise ZeroDivisionError

    def fit(*callbacks: Any) -> Any:
        ours = trainer(checkpoint_dir=tmp_path / "checkpoints")
        ours.restore()
        options: Any = {"checkpoint_every": 4, "callbacks": [TensorBoard(tmp_path), *callbacks]}
        return ours.fit(BATCHES, num_steps=9, **options)

    with pytest.raises(ZeroDivisionError):
        fit(Dies())
    assert [step for step, name, _ in written(tmp_path) if name == "loss"] == [1, 2, 3, 4, 5, 6, 7]
    records = fit()
    assert [record["step"] for record in records] == [5, 6, 7, 8, 9]
    losses = [(step, value) for step, name, value in written(tmp_path) if name == "loss"]
    assert losses[4:] == [(record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in records]
    assert [step for step, _ in losses] == list(range(1, 10))


def test_the_writer_of_tensorboardx_is_one_of_scalars(tensorboard: Any, tmp_path: Path) -> None:
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        records = trainer().fit(BATCHES, num_steps=3, callbacks=[Scalars(writer)])
    assert written(tmp_path) == values(records)


def test_a_folder_that_tensorboard_cannot_write_to_is_named(tensorboard: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"(?s)file/logs cannot be written: Not a dir.*hint: choose another"):
        trainer().fit(BATCHES, num_steps=1, callbacks=[TensorBoard(tmp_path / "file" / "logs")])


def test_without_tensorboardx_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "tensorboardX":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"(?s)needs tensorboardX.*hint: pip install \"lowtide\[tensorboard\]\""):
        trainer().fit(BATCHES, num_steps=1, callbacks=[TensorBoard(tmp_path)])


def test_a_writer_that_only_logs_gets_whole_records_and_a_failed_run_is_flushed() -> None:
    class Run:
        """With the methods of a run of Weights & Biases."""

        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.num_flushes = 0

        def log(self, values: Any, step: int) -> None:
            self.seen.append({"step": step, **values})

        def flush(self) -> None:
            self.num_flushes += 1

    run = Run()
    records = trainer().fit(BATCHES, num_steps=3, eval_data=BATCHES[:1], callbacks=[Scalars(run)])
    assert run.seen == records and run.num_flushes == 1
    with pytest.raises(ConfigError):
        trainer().fit(BATCHES, num_steps=3, callbacks=[Scalars(run), lt.train.EarlyStopping("other")])
    assert run.num_flushes == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_weights_and_biases_writes_every_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline: its file of the run, which `wandb sync` would send."""
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(project="lowtide", dir=str(tmp_path)) as run:
        records = trainer().fit(BATCHES, num_steps=3, eval_data=BATCHES[:1], callbacks=[Scalars(run)])
    (file,) = tmp_path.rglob("*.wandb")
    logged = [record.history.item for record in map(Record.FromString, logs(file.read_bytes())) if record.history.item]
    found = [{"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items} for items in logged]
    merged: dict[int, Any] = {}
    for record in records:  # those of one step are one for W&B
        merged[record["step"]] = {**merged.get(record["step"], {}), **record}
    assert [{"step": values["_step"], **{k: v for k, v in values.items() if k[0] != "_"}} for values in found] == [
        *merged.values()
    ]


def logs(data: bytes) -> list[bytes]:
    """The entries of a file in LevelDB's log format, after a header of 7 bytes; blocks of 32 KiB."""
    found, at = [b""], 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        found[-1] += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(b"")
    return found[:-1]
