import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lowtide.core import ModelFileError, OutputError
from lowtide.models import _safetensors, load, save
from lowtide.models._safetensors import Tensor, write_model


@pytest.mark.processes
@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_model_or_the_new_one(tmp_path):
    script = Path(__file__).with_name("killed_saves.py")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["QUICK_CPU_FLAGS"]}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    seen = Counter()
    for kill in kills:
        old, new = [[1.0], 1000.0], [[2.0], kill["theta"]]
        what = "old" if kill["found"] == old else "new" if kill["found"] == new else "none"
        seen[what, kill["theta"]] += 1
        assert what == "new" or kill["is_killed"], kill
        if what == "none":  # only where two names have to change, and then by name
            assert kill["theta"] == 2000.0 and kill["found"] == ["config.json: no such file"], kill
        # Nothing of what was left is in the way of the next save, or stays after it.
        assert kill["again"] == [[3.0], 3000.0], kill
        shards = [name for name in kill["left"] if name.startswith("model-")]
        assert len(kill["left"]) == (2 + len(shards)) and not any(name.startswith(".") for name in kill["left"]), kill
    assert len(kills) > 80 and sum(not kill["is_killed"] for kill in kills) == 8
    assert min(seen["old", 1000.0], seen["new", 1000.0], seen["old", 2000.0], seen["new", 2000.0]) >= 4, seen
    assert seen["none", 1000.0] == 0


def test_a_full_disk_is_known_before_anything_is_written(tiny_model_dir, tmp_path, monkeypatch):
    model = load(tiny_model_dir)
    save(model, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 9000, 9000))
    with pytest.raises(OutputError, match=r"the model needs .*, but only 8\.79 KiB are free\nhint:"):
        save(model, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_failed_save_leaves_the_old_model_and_nothing_else(tiny_model_dir, tmp_path, monkeypatch):
    model = load(tiny_model_dir)
    save(model, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def refuse(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="No space left"):
        save(model, tmp_path, max_shard_bytes=10**4)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).layers, model.layers)


@pytest.mark.parametrize("kind", ["numpy", "one device", "sharded", "host"])
def test_pieces_are_of_any_array(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(_safetensors, "PIECE_BYTES", 100)
    values = np.arange(2 * 3 * 16 * 8, dtype=np.float32).reshape(2, 3, 16, 8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    leaf = {
        "numpy": lambda: values,
        "one device": lambda: jnp.asarray(values),
        "sharded": lambda: jax.device_put(values, jax.sharding.NamedSharding(mesh, spec)),
        "host": lambda: jax.device_put(values, jnp.zeros(()).sharding.with_memory_kind("pinned_host")),
    }[kind]()
    narrow = jnp.arange(5, dtype=jnp.bfloat16)
    tensors = [Tensor("narrow", narrow), Tensor("none", jnp.zeros(()))]
    tensors += [Tensor(f"{i}.{j}", leaf, (i, j)) for i in range(2) for j in range(3)]
    write_model(tmp_path, tensors, {"config.json": b"{}"}, max_shard_bytes=2**30)
    found = load_file(tmp_path / "model.safetensors")
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(found[f"{i}.{j}"], values[i, j])
    np.testing.assert_array_equal(found["narrow"], narrow)
    assert found["none"].shape == () and len(found) == 8


def test_dtypes_that_are_not_written_are_named(tmp_path):
    with pytest.raises(ModelFileError, match="dtype of x must be .*, not 'int32'"):
        write_model(tmp_path, [Tensor("x", np.zeros(3, np.int32))], {"config.json": b"{}"}, max_shard_bytes=100)
    assert not list(tmp_path.iterdir())
