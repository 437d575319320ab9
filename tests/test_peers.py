"""The recordings of peers' answers: what they catch, and what they let pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from . import peers

WEIGHT = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
ANSWER: dict[str, Any] = {"logits": WEIGHT[:2], "ids": np.arange(3), "text": "ebb", "options": {"a": [1, 2.5, None]}}


def never(*_: Any) -> Any:
    raise AssertionError("a recording needs no peer")


def question_of(folder: Path, weight: np.ndarray = WEIGHT, theta: float = 1e4) -> Any:
    """Save a folder, as tests do before a peer reads it."""
    folder.mkdir(exist_ok=True)
    half = weight.astype(ml_dtypes.bfloat16)
    peers.write_tensors(folder / "model.safetensors", {"weight": weight, "half": half})
    (folder / "config.json").write_text(f'{{"theta": {theta}, "transformers_version": "{theta}"}}')
    return {"folder": folder, "tokens": np.arange(5)}


def record(file: Path, question: Any, answer: dict[str, Any] = ANSWER, mode: str = "live", test: str = "test") -> None:
    peer = peers.Peer(file, test, mode)
    got = peer.answer("answer", lambda: answer, question)
    assert got.keys() == answer.keys()
    peer.close({"test", "other"})


def test_a_recording_gives_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    record(file, question_of(tmp_path / "first"))
    content = file.read_bytes()
    record(file, question_of(tmp_path / "second"))
    assert file.read_bytes() == content
    rounded = WEIGHT * np.float32(1 + 1e-6)
    got = peers.Peer(file, "test", "recorded").answer("answer", never, question_of(tmp_path / "third", rounded))
    assert got.keys() == ANSWER.keys()
    assert (got["text"], got["options"]) == (ANSWER["text"], ANSWER["options"])
    for name in ("logits", "ids"):
        np.testing.assert_array_equal(got[name], ANSWER[name])
        assert got[name].dtype == ANSWER[name].dtype


def other_element(row: int) -> np.ndarray:
    changed = WEIGHT.copy()
    changed[row, 3] *= -1
    return changed


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": WEIGHT.T},
        {"weight": WEIGHT[::-1]},
        {"weight": WEIGHT[:, [1, 0, *range(2, 16)]]},
        {"weight": WEIGHT.reshape(8, 32)},
        {"weight": WEIGHT.astype(np.float64)},
        {"weight": WEIGHT * np.float32(1.0001)},
        {"weight": other_element(7)},
        {"theta": 10001.0},
    ],
    ids=["transposed", "rows", "two columns", "shape", "dtype", "scale", "one sign", "config"],
)
def test_another_question_has_no_recorded_answer(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    record(file, question_of(tmp_path / "folder"))
    peer = peers.Peer(file, "test", "recorded")
    question = question_of(tmp_path / "folder", **changes)
    with pytest.raises(pytest.fail.Exception, match=r"asked something else(.|\n)*/folder/(.|\n)*make peers"):
        peer.answer("answer", never, question)
    with pytest.raises(pytest.fail.Exception, match="/tokens"):
        peer.answer("answer", never, question_of(tmp_path / "folder") | {"tokens": np.array([0, 1, 3, 2, 4])})
    record(file, question)
    assert peers.Peer(file, "test", "recorded").answer("answer", never, question)["text"] == "ebb"


def test_what_is_not_recorded_fails(tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    with pytest.raises(pytest.fail.Exception, match=r"answers.safetensors is missing: run `make peers`"):
        peers.Peer(file, "test", "recorded")
    record(file, 1)
    for test, name in (("test", "other"), ("other", "answer")):
        with pytest.raises(pytest.fail.Exception, match=f"no recorded answer '{name}' of {test}: run `make peers`"):
            peers.Peer(file, test, "recorded").answer(name, never, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", WEIGHT[:2] * 1.001),
        ("logits", WEIGHT[:1]),
        ("ids", np.array([0, 2, 1])),
        ("text", "flow"),
        ("new", 1),
    ],
)
def test_another_live_answer_fails_until_it_is_recorded(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    record(file, 1)
    record(file, 1, ANSWER | {"logits": WEIGHT[:2] * (1 + 1e-6)})
    with pytest.raises(pytest.fail.Exception, match=r"'answer' of test changed(.|\n)*--peers=record"):
        record(file, 1, ANSWER | {name: value})
    record(file, 1, ANSWER | {name: value}, mode="record")
    np.testing.assert_array_equal(peers.Peer(file, "test", "recorded").answer("answer", never, 1)[name], value)


def test_a_folder_is_written_without_the_peer_and_without_its_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"

    def make(path: Path) -> None:
        path.mkdir()
        peers.write_tensors(path / "model.safetensors", {"random": WEIGHT, "norm.weight": WEIGHT[0], "table": WEIGHT})
        (path / "config.json").write_text(f'{{"base": "{path.parent}/base"}}')
        (path / "README.md").write_text("a card")

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        return None if name == "table" else peers.normal(name, shape)

    first, second = tmp_path / "first" / "theirs", tmp_path / "second" / "theirs"
    first.parent.mkdir()
    peer = peers.Peer(file, "test", "live")
    peer.folder(first, make, {"option": 1}, draw)
    peer.close({"test"})
    peers.Peer(file, "test", "recorded").folder(second, never, {"option": 1}, draw)
    assert sorted(path.name for path in second.iterdir()) == ["config.json", "model.safetensors"]
    assert (second / "config.json").read_text() == f'{{"base": "{second.parent}/base"}}'
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    tensors, _ = peers.read_tensors(second / "model.safetensors")
    np.testing.assert_array_equal(tensors["table"], WEIGHT)
    assert not np.array_equal(tensors["random"], WEIGHT)
    assert abs(tensors["norm.weight"].mean() - 1) < 0.2
    recorded, _ = peers.read_recording(file)
    assert [array.shape for array in recorded.values()] == [(16, 16)]
    with pytest.raises(pytest.fail.Exception, match="/option: 1 and 2"):
        peers.Peer(file, "test", "recorded").folder(second, never, {"option": 2}, draw)


def test_answers_of_removed_tests_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    record(file, 1, {"a": WEIGHT}, test="gone")
    record(file, 1, test="other")
    record(file, 1)
    arrays, entries = peers.read_recording(file)
    assert entries.keys() == {"test", "other"}
    assert sorted(array.size for array in arrays.values()) == [3, 32]


def test_every_recorded_test_exists() -> None:
    for file in peers.GOLDEN.rglob("*.safetensors"):
        source = (Path(__file__).parent / file.relative_to(peers.GOLDEN)).with_suffix(".py").read_text(encoding="utf-8")
        _, entries = peers.read_recording(file)
        gone = [test for test in entries if f"def {test.partition('[')[0]}(" not in source]
        assert not gone, f"{file.name} has answers of tests that are gone: delete the file and run `make peers`"
