import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from lowtide.models import _tensors
from lowtide.models._tensors import open_tensors, read_leaf

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
}


@pytest.mark.parametrize("piece", [1, 40, 2**20])
@pytest.mark.parametrize("place", PLACES)
def test_a_leaf_is_put_together_from_pieces_wherever_it_belongs(stacked, monkeypatch, piece, place):
    values, names, files = stacked
    monkeypatch.setattr(_tensors, "PIECE_BYTES", piece)
    sharding = PLACES[place]()
    with open_tensors(files) as tensors:
        leaf = read_leaf([tensors[name] for name in names], values.shape, jnp.bfloat16, sharding)
        one = read_leaf([tensors["1.2"]], values.shape[2:], jnp.float32, None)
    np.testing.assert_array_equal(np.asarray(leaf), values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(one, values[1, 2])
    assert sharding is None or leaf.sharding == sharding
    assert leaf.dtype == jnp.bfloat16


def test_no_piece_is_larger_than_promised(stacked, monkeypatch):
    values, names, files = stacked
    monkeypatch.setattr(_tensors, "PIECE_BYTES", 40)
    read, sizes = _tensors.Source.read, []

    def watched(source, index):
        found = read(source, index)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(_tensors.Source, "read", watched)
    with open_tensors(files) as tensors:
        read_leaf([tensors[name] for name in names], values.shape, jnp.float32, None)
    assert max(sizes) <= 40
    assert sum(sizes) == values.nbytes
