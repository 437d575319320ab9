"""The arrays of a checkpoint are read in chunks, wherever they belong and however they were divided before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.arrays.subchunking import choose_chunk_shape

import lowtide as lt
from lowtide.core import StateError, _placement, memory_space
from lowtide.train import Checkpoints
from lowtide.train.checkpoint import _storage


def _sharding(*axes, memory_kind=None):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.sharding.NamedSharding(mesh, jax.P(*axes), memory_kind=memory_kind)


PLACES = {
    "one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[1]),
    "rows": lambda: _sharding("a"),
    "columns": lambda: _sharding(None, "b"),
    "both": lambda: _sharding(("a", "b"), None),
    "every device": lambda: _sharding(),
    "the host": lambda: _sharding("a", memory_kind="pinned_host"),
    "the host of one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
}
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "uint32", "int32", "bool"]
OF_EACH_SIZE = ["float32", "bfloat16", "bool"]


@pytest.fixture
def small_chunks(monkeypatch):
    for module, name in ((_placement, "PIECE_BYTES"), (_storage, "CHUNK_BYTES"), (_storage, "_AHEAD_BYTES")):
        monkeypatch.setattr(module, name, 64)
    monkeypatch.setattr(_storage, "_ROW_BYTES", 48)
    monkeypatch.setattr(_storage, "_LEAST_BYTES", 1)
    monkeypatch.setattr(_storage, "_JOINED_BYTES", 64)


def _state(dtypes=DTYPES):
    random = np.random.default_rng(0)
    arrays = {dtype: random.integers(0, 2, (8, 6, 5)).astype(jnp.dtype(dtype)) for dtype in dtypes}
    return {**arrays, "vector": np.arange(40.0, dtype=np.float32), "one": np.float32(3), "wide": np.ones((8, 26))}


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("before", "after"), [*(("both", place) for place in PLACES), ("one device", "both"), ("the host", "columns")]
)
def test_leaves_are_read_wherever_they_belong(tmp_path, before, after):
    def place(leaf, where):
        sharding = PLACES[where]()
        return sharding if leaf.ndim > 1 else PLACES["every device"]()

    values = jax.tree.map(jnp.asarray, _state(DTYPES if after == "both" else OF_EACH_SIZE))
    saved = jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf, before)), values)
    ours = Checkpoints(tmp_path, like=saved)
    ours.save(1, saved, {})
    ours.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x, after)), values)
    found = ours.restore(1, like)
    for name, leaf in found.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(values[name]), err_msg=name)
        assert leaf.dtype == values[name].dtype and leaf.sharding == like[name].sharding
        is_host = "host" in after and leaf.ndim > 1
        assert memory_space(leaf) == (jax.memory.Space.Host if is_host else jax.memory.Space.Device)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_no_chunk_and_no_row_is_larger_than_promised(tmp_path, monkeypatch):
    state = {"stack": jnp.arange(6 * 5 * 4.0).reshape(6, 5, 4), "table": jnp.arange(64 * 4.0).reshape(64, 4)}
    ours = Checkpoints(tmp_path, like=state)
    ours.save(1, state, {})
    ours.wait()
    sizes, chunks = [], _storage._chunks

    def watched(stored, index):
        for start, values in chunks(stored, index):
            sizes.append(values.nbytes)
            yield start, values

    monkeypatch.setattr(_storage, "_chunks", watched)
    found = ours.restore(1, state)
    assert max(sizes) <= 64 and sum(sizes) == sum(leaf.nbytes for leaf in state.values())
    assert all((found[name] == state[name]).all() for name in state)


def test_what_orbax_wrote_as_it_likes_is_read(tmp_path):
    values = jax.tree.map(jnp.asarray, _state())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "there", values)
    found = _storage.read_leaves(tmp_path / "there", values)
    assert all((np.asarray(found[name]) == np.asarray(values[name])).all() for name in values)


def test_another_shape_or_dtype_is_refused_before_anything_is_allocated(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "there", {"w": jnp.ones((4, 4))})
    for like in (jax.ShapeDtypeStruct((10**9, 10**9), "float32"), jax.ShapeDtypeStruct((4, 4), "int32")):
        with pytest.raises(ValueError, match=r"w is float32\[4, 4\], not"):
            _storage.read_leaves(tmp_path / "there", {"w": like})


def _trainer(folder):
    def loss(model, batch):
        return jnp.mean((batch["x"] @ model["w"]) ** 2)

    return lt.Trainer({"w": jnp.ones((8, 8))}, loss, optax.adam(0.1), checkpoint_dir=folder)


def test_a_state_that_is_too_large_to_copy_is_written_before_training_goes_on(tmp_path, monkeypatch):
    """As on a GPU, on which Orbax would copy what is left while the next step consumes it."""
    monkeypatch.setattr(_storage, "_copied_bytes", lambda leaf: 2**30)
    waited, finish = [], Checkpoints._finish
    monkeypatch.setattr(Checkpoints, "_finish", lambda self: (waited.append(1), finish(self)))
    data = [{"x": jnp.ones((2, 8))} for _ in range(6)]
    ours = _trainer(tmp_path)
    assert not ours._snapshots.checkpoints._is_copied
    ours.fit(data, num_steps=6, checkpoint_every=2)
    assert len(waited) >= 3
    again = _trainer(tmp_path)
    assert again.restore() == 6
    assert (again.model["w"] == ours.model["w"]).all()
    with pytest.raises(StateError, match="damaged"):
        next((tmp_path / "6" / "state" / "d").iterdir()).write_bytes(b"nothing")
        _trainer(tmp_path).restore(step=6)


def test_a_prime_length_is_not_divided_into_ones_and_small_chunks_are_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr(_storage, "CHUNK_BYTES", 8192)
    for name, value in (("_AHEAD_BYTES", 12288), ("_JOINED_BYTES", 4096)):
        monkeypatch.setattr(_storage, name, value)
    chunks = _storage._chunks
    state = {"vector": jnp.arange(2.0 * 4099), "table": jnp.arange(8 * 4099.0).reshape(4099, 8)}
    monkeypatch.setattr(_storage, "_LEAST_BYTES", 32)  # what a row of the table has
    ours = Checkpoints(tmp_path, like=state)
    ours.save(1, state, {})
    ours.wait()
    assert _storage.chunking(state["vector"])["chunk_byte_size"] == 4 * 8192
    assert _storage.chunking(state["table"])["chunk_byte_size"] == 8192
    pieces = []
    monkeypatch.setattr(
        _storage, "_chunks", lambda *part: ((pieces.append(x.shape) or (start, x)) for start, x in chunks(*part))
    )
    found = ours.restore(1, state)
    assert all((found[name] == state[name]).all() for name in state)
    assert pieces.count((128, 8)) == 4099 // 128 and pieces.count((4099,)) == 2


@pytest.mark.parametrize("shape", [(), (7,), (59, 26), (12, 51, 35), (2, 3, 59, 16)])
@pytest.mark.parametrize("is_divided", [False, True])
def test_the_chunks_are_those_that_orbax_makes(shape, is_divided):
    leaf = jax.ShapeDtypeStruct(shape, "float32")
    axes = (0,) if is_divided and shape else ()
    for limit in (4, 64, 400, 4000, 10**6):
        chunk = choose_chunk_shape(shape, shape, leaf.dtype, limit, shard_axes=axes)
        assert _storage._chunk_bytes(leaf, limit, bool(axes)) == 4 * np.prod(chunk, dtype=int)


def test_leaves_without_elements_and_scalars_cost_nothing() -> None:
    state = {"none": jnp.zeros((4, 0)), "other": jnp.zeros((0, 4)), "one": jnp.float32(1)}
    assert _storage.checkpoint_bytes(state) == _storage.CheckpointBytes(saving=8, restoring=8, is_copied=True)
