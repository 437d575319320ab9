"""Random damage to data files and templates: records come out, or a Lowtide error says what is wrong.

Each mutation has a seed of its own, which a failure names. ``LOWTIDE_FUZZ=4000`` sets how many there are.
"""

import csv
import io
import json
import os
import random
from collections import Counter

import pytest

from lowtide.core import LowtideError
from lowtide.finetune.data import ChatTemplate, Example, _chat, read_records

from ...integration.test_damaged_files import mutate_bytes, mutate_json, time_limit
from .templates import CHATS, FAMILIES, SPECIAL, marked

RECORDS = [{"messages": messages, "id": i} for i, messages in enumerate(CHATS)]
COUNT = int(os.environ.get("LOWTIDE_FUZZ", "400"))
PIECES = ["{%", "%}", "{{", "}}", "for a in range(99)", "| join", "__class__", "~", "endfor", "'", "\0", "* 9**9"]


def _table(records):
    out = io.StringIO()
    csv.writer(out).writerows([["id", "messages"], *([each["id"], json.dumps(each["messages"])] for each in records)])
    return out.getvalue().encode()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Every kind of file, whole."""
    folder = tmp_path_factory.mktemp("good")
    lines = b"\n".join(json.dumps(each).encode() for each in RECORDS)
    files = {"a.jsonl": lines, "a.json": json.dumps(RECORDS).encode(), "a.csv": _table(RECORDS)}
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        return files
    table = pa.Table.from_pylist(RECORDS)
    parquet.write_table(table, folder / "a.parquet")
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = json.dumps({"_data_files": [{"filename": "a.arrow"}], "_indices": None, "_split": "train"}).encode()
    return {**files, **{name: (folder / name).read_bytes() for name in ("a.parquet", "a.arrow")}, "state.json": state}


def _mutated(name, content, rng):
    if rng.random() < 0.5 and name == "a.jsonl":
        return b"\n".join(mutate_json(json.loads(line), rng) for line in content.splitlines())
    if rng.random() < 0.5 and name in ("a.json", "state.json"):
        return mutate_json(json.loads(content), rng)
    return mutate_bytes(content, rng)


def _outcome(seed, good, folder):
    rng = random.Random(seed)
    name = rng.choice(sorted(good))
    for each in (name, "a.arrow"):
        if each in good:
            (folder / each).write_bytes(good[each])
    if name == "a.arrow":
        (folder / "state.json").write_bytes(good["state.json"])
    (folder / name).write_bytes(_mutated(name, good[name], rng))
    path = folder if name in ("a.arrow", "state.json") else folder / name
    try:
        with time_limit(20):
            for example in read_records(path, {}):
                assert example is None or all(isinstance(turn["role"], str) for turn in example.messages)
        return "loaded"
    except LowtideError as error:
        assert error.hint, f"seed {seed}, {name}: {error}"
        assert len(str(error)) < 3000, f"seed {seed}, {name}"
        return error.code
    except Exception as error:
        raise AssertionError(f"seed {seed}, {name}: {error!r}") from error


def test_damaged_data_is_read_or_refused(good, tmp_path):
    outcomes: Counter[str] = Counter()
    for seed in range(COUNT):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes[_outcome(seed, good, folder)] += 1
    assert set(outcomes) <= {"loaded", "LT005"}
    assert min(outcomes["loaded"], outcomes["LT005"]) > COUNT // 20, outcomes


def _damaged_template(rng):
    source = marked(FAMILIES[rng.choice(sorted(FAMILIES))])
    for _ in range(rng.choice([1, 2, 5])):
        at, more = rng.randrange(len(source)), rng.randrange(1, 12)
        how = rng.choice(["cut", "put", "swap"])
        rest = source[at if how == "put" else at + more :]
        source = source[:at] + ("" if how == "cut" else rng.choice(PIECES)) + rest
    return source


@pytest.mark.slow
def test_damaged_templates_render_or_are_refused(monkeypatch):
    monkeypatch.setattr(_chat, "_SECONDS", 5.0)
    outcomes: Counter[str] = Counter()
    for seed in range(COUNT // 8):  # each starts a process
        template = ChatTemplate(source=_damaged_template(random.Random(seed)), special=SPECIAL, where="template")
        renderer = None
        try:
            with time_limit(20):
                renderer = _chat.Renderer(template)
                text, spans = renderer.render(Example(kind="chat", where="record", messages=tuple(CHATS[2])))
            assert all(0 <= start <= end <= len(text) for start, end in spans)
            outcomes["rendered"] += 1
        except LowtideError as error:
            assert error.hint
            outcomes[error.code] += 1
        finally:
            if renderer is not None:
                renderer.close()
    assert set(outcomes) <= {"rendered", "LT004", "LT005"}
    assert min(outcomes["rendered"], outcomes["LT004"]) > 0, outcomes
