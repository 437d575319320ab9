"""The tables of a GPU day: no aim is met by a case that was not compared, verified or run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import _summary  # noqa: E402
import gpu  # noqa: E402

sys.path.remove(str(BENCHMARKS))

GIB = 2**30
FAILED = {"ok": False, "error": "exit status 1\nValueError: no | way\nhint"}


def good(**fields: Any) -> dict[str, Any]:
    source = {"commit": "a", "versions": {"jax": "1"}}
    return {"ok": True, "seconds": 1.0, "losses": [5.0, 4.5], **source, **fields}


def lines(part: str, rows: dict[str, Any], **content: Any) -> dict[str, _summary.Line]:
    found = list(_summary.lines(part, {"device_kind": "NVIDIA H200", "rows": rows, **content}))
    return {line.case: line for line in found}


def test_figures_beside_their_aims() -> None:
    rows = {
        "1b-lowtide": good(tokens_per_second=1400.0, num_trained=9, peak_bytes=6 * GIB, side="lowtide"),
        "1b-peft": good(tokens_per_second=1000.0, num_trained=9, peak_bytes=10 * GIB, side="peft"),
        "8b-lowtide": good(tokens_per_second=100.0, peak_bytes=16 * GIB),
        "8b-peft": {"ok": False, "not_here": ["peft"]},
        "9b-lowtide": good(tokens_per_second=100.0, peak_bytes=16 * GIB),
        "9b-peft": good(out_of_memory=True, peak_bytes=99 * GIB),
    }
    table = lines("lora", rows)
    assert table["1b-lowtide"].figures == "1,400 tokens/s, peak 6.00 GiB" and table["1b-lowtide"].met is True
    assert table["1b-lowtide"].ratios == "over 1b-peft: 1.40 × the tokens/s, 0.60 × the peak"
    assert (table["8b-lowtide"].ratios, table["8b-lowtide"].met) == ("", None) and "8b-peft" not in table
    assert table["9b-lowtide"].ratios == "over 9b-peft: the other runs out of memory"
    assert table["9b-peft"].figures == "runs out of memory"
    rows["1b-lowtide"]["peak_bytes"] = 8 * GIB  # one of two bounds is missed
    assert lines("lora", rows)["1b-lowtide"].met is False
    smoke = good(
        loss_before=3.8, loss_after=3.2, predicted_bytes=GIB, measured_bytes=2 * GIB, peak_before_bytes=2 * GIB
    )
    line = lines("smoke", {"finetune": smoke})["finetune"]
    assert line.met is True and line.figures.startswith("3.8000 → 3.2000 nats/token, peak 2.00 GiB, 2.00 GiB before")
    assert lines("trainer", {"1b": good(overhead=0.03)})["1b"].met is False
    copies = {"device": good(seconds_per_step=[2.0, 2.0, 9.0]), "ahead": good(seconds_per_step=2.1)}
    copies["ahead"] |= {"overlap": {"hidden_share": 0.9}}
    ahead = lines("copies", copies)["ahead"]
    assert ahead.figures.endswith("90 % of the copies under kernels") and ahead.ratios.endswith("1.05 × the time")
    state = {"float32": good(seconds_per_step=2.0), "host-8bit": good(seconds_per_step=1.0)}
    state |= {"host-float32": good(seconds_per_step=4.0)}
    assert lines("optimizer", state)["host-8bit"].ratios == "over host-float32: 0.25 × the time"


RUN = {"seconds_per_step": 2.1}
REASONS = [
    ({}, True, "1.05 × the time"),
    ({"verified": False, "verify_error": "a is elsewhere\nhint"}, False, "not verified: a is elsewhere"),
    ({"losses": [5.0, 4.6]}, False, "losses apart by 0.1 nats"),
    ({"losses": [5.0, math.nan]}, False, "the loss is no number"),
    ({"losses": None}, False, "losses not compared"),
    ({"max_difference": 0.2, "largest_value": 2.0}, False, "values apart by 0.2, of at most 2"),
    ({"max_difference": math.nan}, False, "values apart by nan, of at most 1"),
    ({"num_trained": 8}, False, "8 of num_trained, and None of the other"),
    ({"num_parameters": 8}, False, "8 of num_parameters, and None of the other"),
    ({"num_parameters": 8, "method": "qlora"}, True, "1.05 × the time"),
    ({"loss_fell": False}, False, "the loss does not fall"),
    ({"losses": [4.99, 5.0], "side": "lowtide"}, False, "the loss does not fall"),
    ({"out_of_memory": True}, False, "the other does not run out of memory"),
    ({"versions": {"jax": "2"}}, None, "1.05 × the time; not of the same jax"),
    ({"commit": "b"}, None, "1.05 × the time; not of the same commit"),
    ({"commit": "b", "code_commit": "c"}, True, "1.05 × the time"),
    ({"commit": None}, None, "1.05 × the time; not of the same commit"),
    ({"uncommitted_changes": True}, None, "1.05 × the time; not of the same commit"),
    ({"seconds_per_step": 2.3}, False, "1.15 × the time"),
]


def test_a_ratio_meets_its_aim_if_both_sides_did_the_same() -> None:
    for fields, met, words in REASONS:
        base = good(seconds_per_step=2.0, code_commit=fields.get("code_commit"))
        table = lines("offload", {"64k-device": base, "64k-activations": good(**RUN | fields)})
        line = table["64k-activations"]
        assert (line.met, line.ratios) == (met, f"over 64k-device: {words}"), fields
    for base, words in ((good(losses=[1.0, math.nan], **RUN), "the loss is no number"), (FAILED, "")):
        line = lines("offload", {"64k-device": base, "64k-activations": good(**RUN)})["64k-activations"]
        assert line.ratios.endswith(words) and line.met is (False if words else None)


def test_attention_is_compared_by_values() -> None:
    cudnn = good(forward_ms=2.0, both_ms=8.0, both_tflops=480.0, both_peak_bytes=GIB, losses=None)
    blocks = good(forward_ms=5.0, both_ms=16.0, both_tflops=240.0, losses=None)
    ratios = "over 4k-cudnn: 2.50 × the forward time, 2.00 × the time with gradients"
    for error, met, words in (
        (0.01, None, ratios),
        (0.3, False, "over 4k-cudnn: values apart by 0.3 of their norm"),
        (math.nan, False, "over 4k-cudnn: values apart by nan of their norm"),
        (None, False, "over 4k-cudnn: values not compared"),
    ):
        table = lines("attention", {"4k-cudnn": cudnn, "4k-blocks": {**blocks, "relative_error": error}})
        assert (table["4k-blocks"].met, table["4k-blocks"].ratios) == (met, words)
    assert table["4k-cudnn"].figures == "2.0 ms forward, 8.0 ms with gradients, 480 TFLOP/s, peak 1.00 GiB"


def test_a_rung_is_compared_with_the_first_that_fits() -> None:
    step = {"tokens_per_second": 900.0, "step_peak_bytes": 2 * GIB, "peak_bytes": 8 * GIB, "method": "lora"}
    rows = {
        "scores": good(out_of_memory=True, method="lora"),
        "kernel": good(**step),
        "wrong": good(**step, losses=[5.0, 4.0]),
        "nf4": good(**step | {"method": "qlora", "host_bytes": GIB}, losses=[9.0, 8.0], rung="+ base in nf4"),
    }
    table = lines("ladder", rows)
    assert (table["scores"].met, table["kernel"].ratios, table["kernel"].met) == (None, "", None)
    assert (table["wrong"].met, table["wrong"].ratios) == (False, "over kernel: losses apart by 0.5 nats")
    assert table["+ base in nf4"][1:] == ("900 tokens/s, peak 2.00 GiB, 1.00 GiB on the host", "", "", None)


def test_the_longest_sequence_is_one_that_was_trained_on() -> None:
    fits = good(tokens_per_second=900.0, peak_bytes=64 * GIB, verified=True)
    lost, skipped = good(out_of_memory=True), good(not_tried=True, did_not_fit=131072)
    for rows, words, met in (
        ({65536: fits, 400000: fits}, "400,000 tokens", True),
        ({65536: fits, 131072: lost, 262144: skipped}, "65,536 tokens; 131,072 run out of memory", False),
        ({65536: fits}, "65,536 tokens", None),
        ({65536: lost}, "65,536 run out of memory", False),
        ({65536: fits, 400000: fits | {"verified": False}}, "65,536 tokens", None),
        ({65536: fits, 400000: fits | {"losses": [math.nan]}}, "65,536 tokens", None),
    ):
        named = {str(length): {**row, "length": length} for length, row in rows.items()}
        assert lines("longest", named)["longest sequence"][1::3] == (words, met)
        assert "262144" not in lines("longest", named)


def test_peaks_are_met_when_every_run_was_made_and_is_a_number() -> None:
    rows = {f"p{index}": good(error=0.01) for index in range(14)}
    cases = [*rows, "x"]
    for more, names, met in (
        ({}, [*rows], True),
        ({}, cases, None),
        ({"x": FAILED}, cases, None),
        ({"x": {"ok": False, "not_here": ["keras"]}}, cases, True),
        ({"x": good(error=0.04)}, cases, False),
        ({"x": good(error=math.nan)}, cases, False),
    ):
        (line,) = lines("peak", rows | more, cases=names).values()
        assert line.met is met
    (line,) = lines(
        "peak", {"p-growing": good(error=-0.04), "b": good(covered=True), "c": FAILED}, cases=["d"]
    ).values()
    assert line.case == "1 of 2 programs" and "worst 4.00 % (p-growing); 1 of 2 runs below" in line.figures
    assert line.figures.endswith("1 runs failed; 1 not made")
    (line,) = lines("peak", dict([*rows.items()][:13])).values()
    assert line.met is None  # too few programs


def test_tests_are_met_when_all_ran_and_passed() -> None:
    rows = {"a.py": good(num_passed=8, num_failed=0)}
    assert lines("tests", rows)["all files"].met is True
    assert lines("tests", rows, cases=["a.py", "b.py"])["all files"][1::3] == (
        "8 passed, 0 failed; 1 files were not run",
        None,
    )
    assert lines("tests", {**rows, "b.py": FAILED})["all files"].met is False
    assert (
        lines("tests", {"a.py": {**FAILED, "num_passed": 8, "num_failed": 1}})["all files"].figures
        == "8 passed, 1 failed"
    )


def test_generation_is_shown_for_each_shape() -> None:
    ours = good(runs={shape: {"tokens_per_second": 300.0} for shape in ("1x128", "8x128")})
    run = {"tokens_per_second": 150.0, "share_of_same_tokens": 0.5}
    theirs = good(runs={"1x128": run}, out_of_memory=True)
    table = lines("generate", {"8b-lowtide": ours, "8b-transformers": theirs})
    assert table["8b-lowtide, 1x128"].ratios == "over 8b-transformers, 1x128: 2.00 × the tokens/s"
    assert table["8b-transformers, 1x128"].figures.startswith("150 tokens/s, 50 % of the tokens are Lowtide's")
    assert table["8b-lowtide, 8x128"][1:3] == ("300 tokens/s", "")
    assert table["8b-transformers"].figures == "runs out of memory"


def test_failures_are_named_and_rehearsals_refused(tmp_path: Path) -> None:
    rows = {"1b": good(overhead=0.01), "a": FAILED, "b": {"ok": False, "not_here": ["peft"]}, "c": {"ok": False}}
    content = {"part": "trainer", "rehearsal": False, "device_kind": "a | b", "rows": rows}
    _gpu.write(tmp_path / "a/trainer.json", content)
    (tmp_path / "package.json").write_text("[")  # not a part's file
    text = _summary.table(gpu.results(tmp_path))
    assert "- trainer/a: failed: ValueError: no | way\n- trainer/b: not here: peft\n- trainer/c: failed: ?" in text
    assert "| trainer | 1b | 1.00 % over the bare step |  | at most 2 % | yes |" in text
    _gpu.write(tmp_path / "a/trainer.json", {**content, "rehearsal": True})
    with pytest.raises(SystemExit, match="trainer is a rehearsal on a | b"):
        _summary.table(gpu.results(tmp_path))


def test_committed_results_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--summary"])
    assert gpu.main() == 0
    text = capsys.readouterr().out
    assert text.count("## NVIDIA") == 2 and "10,412 tokens/s" in text and "1.63 × the tokens/s, 0.66 × the peak" in text
    assert "2.05 × the time, 0.44 × the peak | at most 1.1 × the time | **no** |" in text
