"""What people type first: other tools' words, names of models, and runs whose output goes to a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

import lowtide as lt
from lowtide.cli import main
from lowtide.core import ConfigError
from lowtide.train import LossLines


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train --model x", "hint: use lowtide finetune"),
        ("chat", "hint: use lowtide generate --chat"),
        ("eval", "hint: use lowtide evaluate"),
        ("finetune --learning_rate 1e-4", "hint: the flag is --learning-rate"),
        ("finetune --load-in-4bit", "hint: --load-in-4bit of other libraries is --quantize nf4 here"),
    ],
)
def test_words_of_other_tools_get_a_hint(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert hint in capsys.readouterr().err


def test_a_path_with_a_nul_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--data", "a\0b"]) == 2
    assert "NUL character" in capsys.readouterr().err


def test_qlora_and_a_package_that_is_called_get_a_hint() -> None:
    with pytest.raises(
        ConfigError,
        match=r"method is out of range(.|\n)*hint: leave method out(.|\n)*--quantize nf4(.|\n)*QLoRA is LoRA",
    ):
        lt.finetune.FinetuneConfig(method="qlora")
    call: Any = lt.finetune
    with pytest.raises(ConfigError, match=r"is a package(.|\n)*hint: call lt.finetune.Finetune\("):
        call(model="x")


def test_a_downloaded_model_is_found_by_its_name(
    tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "Someone/tiny-1.0"]) == 2
    assert "hint: download it: hf download Someone/tiny-1.0" in capsys.readouterr().err
    cached = tmp_path / "models--Someone--tiny-1.0"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "snapshots" / "abc").symlink_to(tiny_model_dir)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert main(["inspect", "Someone/tiny-1.0"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["generate", "--model", "Someone/tiny-1.0", "--prompt", "a", "--max-new-tokens", "1"]) == 0


@pytest.mark.slow
def test_a_run_without_a_terminal_prints_its_loss_and_the_next_command(
    tiny_model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("the tide goes out and the moon follows\n" * 40)
    paths = ["--model", tiny_model_dir, "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "run")]
    flags = "--steps 20 --seq-len 8 --batch-size 2 --rank 2 --sample-tokens 0".split()
    assert main(["finetune", *paths, *flags]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"step +(\d+)  loss \d+\.\d+  [\d,]+ tokens/s", printed) == ["1", *map(str, range(2, 21, 2))]
    (command,) = re.findall(r"Next: .*lowtide (generate .*)", printed)
    words = command.replace("...", "the").split()
    assert main([*words, "--max-new-tokens", "2"]) == 0


def test_lines_are_few_and_come_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = LossLines(10_000)
    assert [step for step in range(1, 40) if lines.is_due(step)] == [1, 10, 19, 28, 37]


def test_data_is_inspected_before_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "user", "content": "ebb?"}, {"role": "assistant", "content": "flow"}]
    rows: list[Any] = [{"messages": [*turns], "id": 1}, {"messages": [*turns], "id": 2}]
    rows.append({"messages": [turns[0], {"role": "assistant", "content": " "}]})
    rows.append({"messages": [turns[0], {"role": "assistant", "content": "flow " * 40}]})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    flags = ["--chat-template", str(tmp_path / "chat.jinja"), "--seq-len", "32", "--json"]
    assert main(["inspect", str(tmp_path / "chats.jsonl"), *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = found["facts"]
    assert (found["kind"], facts["records"], facts["duplicates"]) == ("data", {"chat": 4}, 1)
    assert (facts["empty turns"], facts["columns not read"]) == (1, {"id": 2})
    assert facts["longer than a row"]["of 32 tokens"] == 1
    assert facts["longer than a row"]["tokens lost"] == facts["tokens of a record"]["longest"] - 32 > 0
    assert 0 < facts["tokens"]["learned"] < facts["tokens"]["total"]
    assert any("are lost at --seq-len 32" in note for note in found["notes"])
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": turns[:1]}) + "\n")
    assert main(["inspect", str(tmp_path / "asked.jsonl"), *flags]) == 1
    assert json.loads(capsys.readouterr().out)["facts"]["without a token to learn"] == 1
    (tmp_path / "text.txt").write_text("the tide\n" * 500)
    assert main(["inspect", str(tmp_path / "text.txt")]) == 0
    assert "lost" not in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--seq-len", "8", "--columns", "a=b"]) == 2
    assert "leave --columns, --seq-len out" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    assert main(["inspect", str(tmp_path / "bad.jsonl")]) == 2
