"""What becomes of checkpoints whose files a disk or a copy has changed: never other weights than were saved."""

import errno
import json
import logging
import os
import pathlib
import random
import shutil
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowtide as lt
from lowtide.core import LowtideError, StateError, StructureError
from lowtide.train.checkpoint import _storage

SUMS = _storage.CHECKSUMS


def loss_fn(model, x):
    loss = jnp.mean((model["w"] * x).astype(jnp.float32) ** 2) + jnp.mean(model["half"].astype(jnp.float32) ** 2)
    return loss, {}, {**model, "count": model["count"] + 1, "key": jax.random.split(model["key"])[0]}


def trainer(folder, width=8, **options):
    model = {
        "w": jnp.arange(8.0 * width).reshape(8, width),
        "half": jnp.ones(5, jnp.bfloat16),
        "none": jnp.zeros((0, 3)),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
    }
    tx = optax.adam(0.1)
    return lt.Trainer(model, loss_fn, tx, wrt=["w", "half", "none"], mutable=["count", "key"], checkpoint_dir=folder)


def state(ours):
    """All bits of it."""
    numbers = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in _leaves(ours)]
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in numbers]


def _leaves(ours):
    return jax.tree.leaves(ours.state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of two steps, and the states that they are of."""
    folder = tmp_path_factory.mktemp("saved")
    ours, states = trainer(folder), {}
    for step in (1, 2):
        ours.fit([np.ones((8, 8), np.float32)] * 2, num_steps=step, progress=False)
        states[step] = state(ours)
    return folder, states


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def restored(folder, **options):
    """What a new trainer restores, and what it says of that."""
    ours = trainer(folder, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = ours.restore()
    return step, state(ours), " ".join(str(one.message) for one in said)


@pytest.mark.slow
def test_a_flipped_bit_never_gives_other_weights(saved, tmp_path):
    """Two in each file."""
    pristine, states = saved
    count = 2 * len(files(pristine / "2"))
    draw = random.Random(count)
    outcomes = []
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(pristine, folder)
        path = files(folder / "2")[number % len(files(folder / "2"))]
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        try:
            step, found, said = restored(folder)
        except LowtideError:
            outcomes.append("error")
            continue
        finally:
            shutil.rmtree(folder)
        assert found == states[step], path
        assert step == 2 or "checkpoint of step 2" in said and "damaged" in said and "hint:" in said, (path, said)
        outcomes.append(step)
    assert outcomes.count(1) >= count * 2 // 3


@pytest.mark.slow_after(5)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (SUMS, lambda path: path.write_bytes(b"")),
        (SUMS, lambda path: path.write_text("[]")),
        (SUMS, lambda path: path.write_text('{"crc32": {"state/\\u0000": [1, "00"]}}')),
        (SUMS, lambda path: path.write_text('{"crc32": 3}')),
        (SUMS, lambda path: path.write_text('{"crc32": {}}')),
        (SUMS, lambda path: path.unlink()),
        ("notes/metadata", lambda path: path.unlink()),
        ("state/_METADATA", lambda path: path.write_text(path.read_text().replace("trainable.w", "trainable.v"))),
        ("state/_METADATA", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("_CHECKPOINT_METADATA", lambda path: path.write_bytes(b"{")),
    ],
)
def test_damage_of_every_kind_leads_to_the_one_before(saved, tmp_path, name, change):
    pristine, states = saved
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "2" / name)
    step, found, said = restored(tmp_path)
    assert found == states[step]
    assert step == 1 and "damaged" in said or (step == 2 and name.startswith("_"))
    assert (tmp_path / "damaged-2").is_dir() == (step == 1)


@pytest.mark.parametrize("how", ["all of them", "all after the copy on the host"])
def test_what_is_said_of_damage_is_what_was_done(saved, tmp_path, how):
    ours, there = trainer(tmp_path), shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    for step in ("1", "2"):
        (there / step / SUMS).write_bytes(b"")
    ours.checkpoints.look_again()
    ours._snapshots.take(ours._snapshots.metadata)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if how == "all of them":
            with pytest.raises(StateError, match="no checkpoint can be read"):
                ours.restore()
        else:
            assert ours._snapshots.roll_back() == 0
    told = [str(one.message).partition("hint: ")[2] for one in said if "step" in str(one.message)]
    assert told[:2] == ["the checkpoint before it is tried", "there is no earlier checkpoint"]
    is_renamed = [(tmp_path / f"damaged-{step}").is_dir() for step in (1, 2)]
    assert is_renamed == [how != "all of them"] * 2
    assert any("were renamed: damaged-" in str(one.message) for one in said) == is_renamed[0]


def test_another_model_is_the_users_mistake_and_no_damage(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    with pytest.raises(
        StructureError, match=r"(?s)step 2 has float32.*, but this trainer has float32.*hint: resume with the model"
    ):
        trainer(tmp_path, width=4).restore()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "2"]


def test_all_files_that_are_restored_have_checksums_and_one_written_anew_too(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    ours = trainer(tmp_path)
    ours.restore()
    ours.update({**ours.model, "w": jnp.full((8, 8), 5.0)})
    ours.save()
    ours.checkpoints.wait()
    names = {path.relative_to(tmp_path / "2").as_posix() for path in files(tmp_path / "2")}
    listed = json.loads((tmp_path / "2" / SUMS).read_text())["crc32"]
    assert {SUMS, "_CHECKPOINT_METADATA"} <= names - set(listed) and len(listed) > 5
    assert {"notes/metadata", "state/_METADATA", "state/manifest.ocdbt"} <= set(listed)
    assert listed["notes/metadata"][1] == f"{zlib.crc32((tmp_path / '2' / 'notes' / 'metadata').read_bytes()):08x}"
    again = trainer(tmp_path)
    assert again.restore() == 2 and again.model["w"].tolist() == [[5.0] * 8] * 8


def test_what_is_damaged_costs_a_trainer_nothing_that_it_holds(saved, tmp_path):
    """Also without a copy on the host: nothing is given up for what was not verified."""
    shutil.copytree(saved[0] / "2", tmp_path / "2")
    path = max(files(tmp_path / "2"), key=lambda path: path.stat().st_size if "/d/" in path.as_posix() else 0)
    path.write_bytes(bytes(len(path.read_bytes())))
    ours = lt.Trainer(
        {"w": jnp.ones(3)}, lambda m, x: jnp.sum(m["w"]), optax.sgd(1.0), rollback=False, checkpoint_dir=tmp_path
    )
    with pytest.raises(StateError, match=r"(?s)step 2 in .* is damaged: state/.* does not match its checksum.*hint:"):
        ours.restore(step=2)
    assert ours.model["w"].tolist() == [1.0] * 3


def test_large_files_are_read_in_parts_and_shared_by_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(_storage, "_BUFFER_BYTES", 10)
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(bytes(range(95)))
    _storage.write_checksums(tmp_path)
    (tmp_path / "2").write_bytes(bytes(range(94)) + b"!")
    assert [_storage.find_damage(tmp_path, part, 4) is None for part in range(4)] == [True, True, False, True]
    (tmp_path / "3").write_bytes(b"")
    assert all(pathlib.Path(tmp_path, "3").name in (_storage.find_damage(tmp_path, part, 4) or "") for part in range(2))


def test_a_file_that_its_disk_gives_no_more_is_damage_and_one_that_may_not_be_read_is_not(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    _storage.write_checksums(tmp_path)
    for number, expected in [(errno.EIO, "can no longer be read from its disk"), (errno.EACCES, None)]:

        def fail(paths, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(_storage, "_compute_checksums", fail)
        if expected:
            assert expected in str(_storage.find_damage(tmp_path))
        else:
            with pytest.raises(PermissionError):
                _storage.find_damage(tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "message", "is_said"),
    [
        ("asyncio", "asyncio/base_events.py", "Task exception was never retrieved: /site/orbax/checkpoint/x.py", False),
        ("asyncio", "asyncio/base_events.py", "Task exception was never retrieved: /home/user/data.py", True),
        ("absl", "/site/orbax/checkpoint/_src/futures/future.py", "_SignalingThread.run() raised an exception", False),
        ("absl", "/site/orbax/checkpoint/_src/checkpointers/async_checkpointer.py", "Failed to run 4 Handler", False),
        ("absl", "/site/orbax/checkpoint/checkpoint_manager.py", "Save Finalize thread failed", False),
        ("absl", "/site/orbax/checkpoint/_src/path/deleter.py", "could not delete a checkpoint", True),
        ("absl", "/site/clu/metrics.py", "of the user", True),
    ],
)
def test_what_is_raised_is_not_said_by_the_threads_of_orbax_too(name, path, message, is_said):
    record = logging.LogRecord(name, logging.ERROR, path, 1, message, (), None)
    assert bool(logging.getLogger(name).filter(record)) == is_said
