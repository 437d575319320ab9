import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from lowtide.core import ModelFileError, _placement, memory_space
from lowtide.models import _safetensors
from lowtide.models._safetensors import open_tensors, read_leaf

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def _sharding(*spec, memory_kind=None):
    return jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*spec), memory_kind=memory_kind)


@pytest.fixture
def stacked(tmp_path):
    """A stack over layers and experts, and its files."""
    values = np.arange(2 * 3 * 8 * 4, dtype=np.float32).reshape(2, 3, 8, 4)
    names = [f"{i}.{j}" for i, j in itertools.product(range(2), range(3))]
    tensors = {name: values[tuple(map(int, name.split(".")))] for name in names}
    save_file({name: tensors[name] for name in names[:4]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[4:]}, tmp_path / "b.safetensors")
    return values, names, [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


PLACES = {
    "the default device": lambda: None,
    "layers and rows": lambda: _sharding("a", None, "b"),
    "columns": lambda: _sharding(None, None, None, "b"),
    "every device": lambda: _sharding(),
    "the host": lambda: _sharding("a", memory_kind="pinned_host"),
    "the host of one device": lambda: jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("piece", [1, 40, 2**20])
@pytest.mark.parametrize("place", PLACES)
def test_a_leaf_is_put_together_from_pieces_wherever_it_belongs(stacked, monkeypatch, piece, place):
    values, names, files = stacked
    for module in (_placement, _safetensors):
        monkeypatch.setattr(module, "PIECE_BYTES", piece)
    sharding = PLACES[place]()
    with open_tensors(files) as tensors:
        leaf = read_leaf([tensors[name] for name in names], values.shape, jnp.bfloat16, sharding)
        one = read_leaf([tensors["1.2"]], values.shape[2:], jnp.float32, None)
    np.testing.assert_array_equal(np.asarray(leaf), values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(one, values[1, 2])
    assert sharding is None or leaf.sharding == sharding
    assert memory_space(leaf) == (jax.memory.Space.Host if "host" in place else jax.memory.Space.Device)
    assert leaf.dtype == jnp.bfloat16


def test_no_piece_is_larger_than_promised(stacked, monkeypatch):
    values, names, files = stacked
    monkeypatch.setattr(_safetensors, "PIECE_BYTES", 40)
    read, sizes = _safetensors.Source.read, []

    def watched(source, index):
        found = read(source, index)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(_safetensors.Source, "read", watched)
    with open_tensors(files) as tensors:
        read_leaf([tensors[name] for name in names], values.shape, jnp.float32, None)
    assert max(sizes) <= 40
    assert sum(sizes) == values.nbytes


def _file(entries, content=b"\0" * 16, length=None):
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BAD = {
    "an end behind the file's": _file({"a": {**GOOD, "data_offsets": [0, 2**50], "shape": [2**24, 2**24]}}),
    "fewer bytes than the shape": _file({"a": {**GOOD, "shape": [2, 3]}}),
    "a shape that overflows": _file({"a": {**GOOD, "shape": [2**62, 2**62]}}),
    "a negative size": _file({"a": {**GOOD, "shape": [-2, -2]}}),
    "two in one place": _file({"a": GOOD, "b": GOOD}),
    "a gap": _file({"a": {**GOOD, "shape": [2], "data_offsets": [8, 16]}}),
    "bytes of nobody": _file({"a": {**GOOD, "shape": [2], "data_offsets": [0, 8]}}),
    "an end before its start": _file({"a": {**GOOD, "data_offsets": [16, 0]}}),
    "an unknown dtype": _file({"a": {**GOOD, "dtype": "F33"}}),
    "a header as long as a disk": _file({"a": GOOD}, length=2**60),
    "a header of 99 MB that is not there": _file({"a": GOOD}, length=99 * 10**6),
    "no JSON": (8).to_bytes(8, "little") + b"abcdefgh",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_sizes_that_disagree_are_found_in_the_header(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with (
        pytest.raises(ModelFileError, match="a.safetensors: not a complete safetensors file"),
        open_tensors([tmp_path / "a.safetensors"]),
    ):
        pass
