import json

import pytest

from lowtide.core import DataError
from lowtide.finetune.data import is_records, read_records

pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
parquet = pytest.importorskip("pyarrow.parquet")

CHAT = [{"role": "user", "content": "ebb?", "name": None}, {"role": "assistant", "content": "flow", "name": None}]
TABLE = pa.table({"messages": [CHAT] * 3, "id": [1, 2, 3]})


def _read(path):
    return list(read_records(path, {}))


def _save(folder, table, *, as_file=False, **state):
    folder.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for i, name in enumerate(names):
        part = table.slice(i * 2, 2)
        new = pa.ipc.new_file if as_file else pa.ipc.new_stream
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_indices": None, **state}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_is_streamed_and_its_nulls_are_no_fields(tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet", row_group_size=2)
    found = _read(tmp_path / "a.parquet")
    assert [each.where for each in found] == [f"{tmp_path}/a.parquet: row {i}" for i in (1, 2, 3)]
    assert found[0].messages == ({"role": "user", "content": "ebb?"}, {"role": "assistant", "content": "flow"})


@pytest.mark.parametrize("as_file", [False, True])
def test_a_saved_dataset_is_read_shard_by_shard(tmp_path, as_file):
    folder = _save(tmp_path / "saved", TABLE, as_file=as_file)
    assert is_records(folder)
    assert len(_read(folder)) == 3


def test_of_several_splits_train_is_taken(tmp_path):
    for split in ("test", "train"):
        _save(tmp_path / split, TABLE)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    assert f"{tmp_path}/train" in _read(tmp_path)[0].where
    for splits in (["test", "dev"], ["../train"], [], 3):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        with pytest.raises(DataError, match=r"has no split that can be selected(.|\n)*hint:"):
            _read(tmp_path)


def test_a_selection_and_files_elsewhere_are_refused(tmp_path):
    _save(tmp_path / "a", TABLE, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DataError, match="state.json has _indices_data_files(.|\n)*flatten_indices"):
        _read(tmp_path / "a")
    for number, files in enumerate(([{"filename": "../a/data-00000-of-00002.arrow"}], [{"filename": 3}], [], "x")):
        folder = _save(tmp_path / f"b{number}", TABLE, _data_files=files)
        with pytest.raises(DataError, match="hint:"):
            _read(folder)


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_damaged_tables_are_named(tmp_path, name):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    path = tmp_path / name
    file = path if name == "a.parquet" else _save(path, TABLE) / "data-00000-of-00002.arrow"
    good = file.read_bytes()
    for content in (good[: len(good) // 2], b"PAR1" + b"\0" * 20 + b"PAR1", b"ARROW1\0\0" * 9, b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(DataError, match="hint:"):
            _read(path)
