import json
from types import SimpleNamespace

import pytest

from lowtide.core import OutputError
from lowtide.finetune import FinetuneConfig, write_report
from lowtide.finetune._run_folder import METRICS, PARTS, REPORT, save_report_inputs, write_config


@pytest.fixture
def out(tmp_path):
    write_config(tmp_path, FinetuneConfig(num_steps=9, batch_size=4, seq_len=8, run_name="<b>mine</b>"))
    records = [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "loss": 4.5, "seconds": 0.5, "learning_rate": 1e-3, "grad_norm": None},
        {"step": 2, "loss": 4.0, "seconds": 0.25, "learning_rate": 2e-3, "grad_norm": 1.0},
        {"step": 2, "eval_loss": 4.25},
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "lo')
    return tmp_path


def test_an_interrupted_run_has_a_page_of_its_files(out):
    (out / PARTS).write_text(json.dumps({"samples": {"before": ["<i>a", "b"]}, "tables": {"Data": [["rows", "7"]]}}))
    page = write_report(out)
    text = page.read_text()
    assert page == out / "report.html" and "Held-out loss 5.0000 → 4.2500 in 2 of 9 steps" in text
    assert "&lt;i&gt;a" in text and "&lt;b&gt;mine" in text and "Sample before" in text
    for said in (
        "4.2500 at step 2",
        "Tokens in batches, with padding",
        "64",
        "rows",
        "only runs with --report keep the memory of a step",
    ):
        assert said in text
    before = text
    assert write_report(out).read_text() == before


def test_a_resumed_run_keeps_the_sample_of_before(tmp_path):
    report = SimpleNamespace(to_json=lambda path: None)
    save_report_inputs(tmp_path, report, {"Data": [("rows", "7")]}, {"before": ("a", "b")})
    save_report_inputs(tmp_path, report, {}, {"after": ("a", "c")})
    parts = json.loads((tmp_path / PARTS).read_text())
    assert parts == {"tables": {}, "samples": {"before": ["a", "b"], "after": ["a", "c"]}}


def test_a_step_that_took_no_time_does_not_flatten_the_others(out):
    with (out / METRICS).open("a") as file:
        file.write("\n" + json.dumps({"step": 3, "loss": 4.0, "seconds": 1e-6}) + "\n")
    assert "Tokens per second, cut at 512" in write_report(out).read_text()


def test_a_run_that_has_done_nothing_has_a_page(tmp_path):
    write_config(tmp_path, FinetuneConfig(num_epochs=2))
    assert "0 steps done" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("content", ["{", "[1]", '{"samples": [1], "tables": {"a": 3, "b": [1, ["x"]]}}', "\0"])
def test_damaged_parts_leave_the_rest(out, content):
    (out / PARTS).write_text(content)
    (out / REPORT).write_text(content)
    assert "the memory of a step cannot be shown" in write_report(out).read_text()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"no run to report on(.|\n)*hint: .*config.toml"):
        write_report(tmp_path)
