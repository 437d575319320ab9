"""What the summary and README say of a GPU day: no aim is met by what was not compared, verified or run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowtide as lt

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _gpu  # noqa: E402
import _summary  # noqa: E402
import gpu  # noqa: E402
import gpu_smoke  # noqa: E402
import layerwise_time  # noqa: E402
import lora_peft  # noqa: E402
import measured_peak  # noqa: E402
import offload_time  # noqa: E402
from _decoders import LLAMA_1B  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def results(**parts: dict[str, dict[str, Any]]) -> Any:
    return {"NVIDIA H200": {name: {"part": name, "rows": rows} for name, rows in parts.items()}}


def good(**fields: Any) -> dict[str, Any]:
    made = {"commit": "a", "versions": {"jax": "1"}}
    return {"ok": True, "seconds": 1.0, "losses": [5.0, 4.5], **made, **fields}


FAILED = {"ok": False, "error": "exit status 1\nValueError: no\n----\nFor simplicity, JAX has removed frames."}
KILLED = {"ok": False, "error": "killed at its limit of 5 s"}


def state(found: Any, figure: str) -> tuple[str, str]:
    (line,) = [line for _, line in _summary.lines(found["NVIDIA H200"]) if line.figure.startswith(figure)]
    return line.state, line.found


def test_key_figures_beside_their_aims() -> None:
    found = results(
        smoke={"finetune": good(loss_before=3.8, loss_after=3.2, predicted_bytes=2**30, measured_bytes=2**30)},
        peak={
            "a": good(error=0.01),
            "a-growing": good(error=-0.04),
            "b": good(error=None, covered=True),
            "c": FAILED,
            "d": KILLED,
        },
        lora={
            "1b-4x2048-remat-lowtide": good(tokens_per_second=1400.0, num_trained=9, peak_bytes=6 * 2**30),
            "1b-4x2048-remat-peft": good(tokens_per_second=1000.0, num_trained=9, peak_bytes=10 * 2**30),
            "8b-1x2048-plain-lowtide": good(tokens_per_second=100.0, peak_bytes=2**34),
            "8b-1x2048-plain-peft": {"ok": False, "not_here": ["peft"]},
            "8b-16x2048-plain-lowtide": good(tokens_per_second=100.0, peak_bytes=2**34),
            "8b-16x2048-plain-peft": good(out_of_memory=True, peak_bytes=2**37),
        },
        offload={
            "64k-device": good(seconds_per_step=[2.0, 2.0, 9.0]),
            "64k-activations": good(seconds_per_step=[2.1, 2.1, 2.1], overlap={"hidden_share": 0.9}),
            "64k-remat": good(seconds_per_step=2.4),
            "16k-opt_state": good(seconds_per_step=2.4),
        },
        layerwise={
            "4k-device": good(tokens_per_second=4000.0, peak_bytes=2**36),
            "4k-host": FAILED,
            "16k-device": good(out_of_memory=True),
        },
        trainer={"1b": good(overhead=0.03, tokens_per_second=40000.0)},
        pipeline={"accumulate-8_remat": good(seconds_per_step=2.0), "zb-h1-8_remat": good(seconds_per_step=2.2)},
        tests={"test_gpu.py": {**FAILED, "num_passed": 8, "num_failed": 1}},
    )
    assert state(found, "held-out loss") == ("met", "3.8000 → 3.2000 nats/token")
    assert state(found, "peak of 1 of")[0] == "missed"
    assert (
        "median error 2.50 %, worst 4.00 % (a-growing); 1 of 3 runs below the compiler's own peak; 2 runs failed"
        in state(found, "peak of 1 of")[1]
    )
    assert state(found, "LoRA 1b-4x2048-remat: tokens/s") == ("met", "1.40 × (1,400 beside 1,000)")
    assert state(found, "LoRA 1b-4x2048-remat: peak") == ("met", "0.60 × (6.00 GiB beside 10.00 GiB)")
    assert state(found, "LoRA 8b-1x2048-plain") == ("measured", "100 tokens/s, peak 16.00 GiB")
    assert state(found, "LoRA 8b-16x2048-plain")[1].endswith("16.00 GiB; peft runs out of memory")
    assert state(found, "activations over device, 64k") == ("met", "1.05 × the time, 90 % of the copies under kernels")
    assert state(found, "remat over device, 64k") == ("measured", "1.20 × the time")
    assert state(found, "AdamW on all 8 B parameters, 4k-device")[1] == "4,000 tokens/s, peak 64.00 GiB"
    assert state(found, "AdamW on all 8 B parameters, 4k-host") == ("failed", "")
    assert state(found, "AdamW on all 8 B parameters, 16k-device")[1] == "runs out of memory"
    assert state(found, "Trainer.fit") == ("missed", "3.00 %, 40,000 tokens/s")
    assert state(found, "pipeline of one stage, zb-h1, 8 microbatches, remat") == (
        "measured",
        "1.10 × plain accumulation",
    )
    assert state(found, "tests marked") == ("missed", "8 passed, 1 failed")
    table, block = _summary.table(found), _summary.block(found)
    assert "lora/8b-1x2048-plain-peft: not here: peft" in table and "peak/c: failed: ValueError: no\n" in table
    assert "peak/d: failed: killed at its limit of 5 s" in table
    assert "| Trainer.fit over the bare step, LoRA on 1B (NVIDIA H200) | at most 2 % | 3.00 %, 40,000" in block
    assert block.count("**missed**") == 3


def test_without_results_every_line_says_so() -> None:
    for found in ({}, results(lora={"x": good()}, peak={"a": good()}, trainer={})):
        block = _summary.block(found)
        rows = [line for line in block.splitlines() if line.startswith("| ")][1:]
        assert len(rows) >= 10 and all("not measured yet" in row for row in rows)
        shapes = [*_summary.SHAPES, *_summary.PACKED, *_summary.OTHERS]
        assert sum("beside peft" in row for row in rows) == len(shapes)


def test_a_rehearsal_is_refused(tmp_path: Path) -> None:
    content = {"part": "peak", "rehearsal": True, "device_kind": "cpu", "rows": {}}
    _gpu.write(tmp_path / "cpu/peak.json", content)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{_summary.BEGIN}\n{_summary.END}\nafter\n")
    with pytest.raises(ValueError, match="peak is a rehearsal on cpu"):
        gpu.rewrite_readme(readme, tmp_path)
    with pytest.raises(ValueError, match="peak is a rehearsal on cpu"):
        _summary.table(gpu.results(tmp_path))


def test_the_block_is_rewritten_in_its_place(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{_summary.BEGIN}\nold\n{_summary.END}\nafter\n")
    assert gpu.rewrite_readme(readme, tmp_path / "nothing")
    text = readme.read_text()
    assert text.startswith(f"before\n{_summary.BEGIN}\n") and text.endswith(f"{_summary.END}\nafter\n")
    assert "old" not in text and not gpu.rewrite_readme(readme, tmp_path / "nothing")
    with pytest.raises(ValueError, match="expected one block"):
        _summary.in_readme("no comments", "new")


def test_readme_shows_what_the_results_give() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert _summary.in_readme(text, _summary.block(gpu.results(_gpu.RESULTS))) == text, "run benchmarks/gpu.py --readme"


# --- what meets no aim ---------------------------------------------------------------------------------------------

OFFLOADED = "activations over device, 64k"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verified": True}, ("met", "1.05 × the time")),
        ({"verified": False, "verify_error": "a is elsewhere\nhint"}, ("missed", "not verified: a is elsewhere")),
        ({"losses": [5.0, 4.6]}, ("missed", "losses apart by 0.1 nats")),
        ({"losses": [5.0, float("nan")]}, ("missed", "losses apart by nan nats")),
        ({"losses": None, "loss_difference": None}, ("missed", "losses not compared")),
        ({"max_difference": 0.2, "largest_value": 2.0}, ("missed", "values apart by 0.2, of at most 2")),
        (
            {"out_of_memory": True, "seconds_per_step": None},
            ("missed", "runs out of memory, which the step on the dev"),
        ),
        ({"versions": {"jax": "2"}}, ("measured", "1.05 × the time; not of the same jax")),
        ({"commit": "b"}, ("measured", "1.05 × the time; not of the same commit")),
        ({"commit": "b", "code_commit": "c"}, ("met", "1.05 × the time")),
        ({"commit": None}, ("measured", "1.05 × the time; not of the same commit; of unknown commit")),
        ({"uncommitted_changes": True}, ("measured", "1.05 × the time; with uncommitted changes")),
    ],
)
def test_an_offload_meets_its_aim_where_it_is_verified_and_the_same(
    fields: dict[str, Any], said: tuple[str, str]
) -> None:
    row = {
        "seconds_per_step": 2.1,
        "versions": {"jax": "1"},
        "commit": "a",
        "code_commit": "c" * ("code_commit" in fields),
    }
    found = results(
        offload={"64k-device": good(**{**row, "seconds_per_step": 2.0}), "64k-activations": good(**row | fields)}
    )
    line = state(found, OFFLOADED)
    assert (line[0], line[1][: len(said[1])]) == said


SIDE = {"tokens_per_second": 100.0, "peak_bytes": 2**30, "num_trained": 9, "num_parameters": 99}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ("met", "2.00 × (200 beside 100)")),
        ({"losses": [5.0, 4.4]}, ("missed", "losses apart by 0.1 nats")),
        ({"num_trained": 8}, ("missed", "8 parameters trained, and 9 by the other")),
        ({"num_parameters": 98}, ("missed", "98 parameters frozen, and 99 by the other")),
        ({"num_parameters": 98, "method": "qlora"}, ("met", "2.00 × (200 beside 100)")),
        ({"losses": [4.5, 4.51], "side": "lowtide"}, ("missed", "the loss of lowtide does not fall")),
        ({"out_of_memory": True, "tokens_per_second": None}, ("missed", "runs out of memory; peft 100 tokens/s")),
    ],
)
def test_a_speed_beside_peft_is_claimed_where_both_train_the_same(
    fields: dict[str, Any], said: tuple[str, str]
) -> None:
    losses = [4.5, 4.49] if fields.get("side") else [5.0, 4.5]
    ours, theirs = good(**SIDE | {"tokens_per_second": 200.0} | fields), good(**SIDE, losses=losses)
    found = results(lora={"1b-16x2048-remat-lowtide": ours, "1b-16x2048-remat-peft": theirs})
    line = state(found, "LoRA 1b-16x2048-remat: tokens/s")
    assert (line[0], line[1][: len(said[1])]) == said
    assert (line[0] == "met") == any("peak over" in one.figure for _, one in _summary.lines(found["NVIDIA H200"]))


def test_peak_is_met_by_enough_programs_of_which_none_failed() -> None:
    rows = {f"p{at}": good(error=0.01) for at in range(14)}
    for more, expected in (({}, "met"), ({"x": FAILED}, "measured"), ({"x": good(error=0.04)}, "missed")):
        assert state(results(peak=rows | more), "peak of")[0] == expected
    assert "1 runs failed" in state(results(peak=rows | {"x": FAILED}), "peak of")[1]
    few = dict(list(rows.items())[:13])
    assert state(results(peak=few), "peak of 13 of 13")[0] == "measured"
    found = results(peak=few)
    found["NVIDIA H200"]["peak"]["cases"] = [f"p{at}" for at in range(25)]
    assert state(found, "peak of 13 of 25 programs")[0] == "measured"


def test_tests_are_met_when_all_ran_and_every_row_is_ok() -> None:
    rows = {"test_a.py": good(num_passed=8, num_failed=0)}
    found = results(tests=rows)
    assert state(found, "tests marked") == ("measured", "8 passed, 0 failed, not all were run")
    found["NVIDIA H200"]["tests"]["complete"] = True
    assert state(found, "tests marked") == ("met", "8 passed, 0 failed")
    for fields in ({"complete": "yes"}, {"cases": ["test_a.py", "test_new.py"]}):
        partial = {"NVIDIA H200": {"tests": found["NVIDIA H200"]["tests"] | fields}}
        assert state(partial, "tests marked")[0] == "measured"
    found = results(tests={**rows, "test_b.py": KILLED})
    assert state(found, "tests marked") == ("missed", "8 passed, 0 failed, 1 files without an outcome")


def test_other_steps_that_go_wrong_are_missed() -> None:
    found = results(
        layerwise={
            "4k-device": good(tokens_per_second=1.0),
            "4k-host": good(tokens_per_second=1.0, losses=[5.0, 4.0]),
            "4k-opt_state": good(tokens_per_second=1.0, verified=False, verify_error="no"),
            "16k-device": good(out_of_memory=True),
            "16k-plain": good(tokens_per_second=1.0, seconds_per_step=1.0),
            "16k-host": good(tokens_per_second=1.0, loss_fell=False),
        },
        pipeline={
            "accumulate-8": good(seconds_per_step=1.0),
            "1f1b-8": good(seconds_per_step=1.0, max_difference=1.0, largest_value=1.0),
            "zb-h1-8": good(out_of_memory=True),
        },
    )
    for figure, said in (
        ("AdamW on all 8 B parameters, 4k-host", "losses apart by 0.5 nats"),
        ("AdamW on all 8 B parameters, 4k-opt_state", "not verified: no"),
        ("AdamW on all 8 B parameters, 16k-device", "runs out of memory, which plain AdamW does not"),
        ("AdamW on all 8 B parameters, 16k-host", "the loss does not fall"),
        ("pipeline of one stage, 1f1b", "values apart by 1, of at most 1"),
        ("pipeline of one stage, zb-h1", "runs out of memory, which plain accumulation does not"),
    ):
        assert state(found, figure) == ("missed", said)


def test_bytes_held_before_the_first_step_cover_its_own() -> None:
    row = {"predicted_bytes": 2**30, "measured_bytes": 2**31}
    for before, said in ((2**31, "1.00 GiB, below the 2.00 GiB that were held"), (2**29, "1.00 GiB and 2.00 GiB (-50")):
        found = results(trainer={"1b-peak": good(**row, peak_before_bytes=before)})
        assert state(found, "bytes of that step")[1].startswith(said)


BOTH = results(
    smoke={"finetune": {**FAILED, "loss_before": 3.2, "loss_after": 3.9}, "full": FAILED},
    peak={"a": FAILED, "b": good(error=None, covered=True)},
    lora={
        "1b-4x2048-remat-lowtide": FAILED,
        "1b-4x2048-remat-peft": good(**SIDE),
        "8b-4x2048-remat-lowtide": good(**SIDE),
        "8b-4x2048-remat-peft": FAILED,
        "1b-4x2048-plain-lowtide": FAILED,
        "1b-4x2048-plain-peft": {"ok": False, "not_here": ["peft"]},
    },
    offload={"64k-device": good(seconds_per_step=1.0), "64k-activations": KILLED},
    layerwise={"4k-host": FAILED},
    trainer={"1b": FAILED, "1b-peak": {"ok": False, "not_here": None}},
    pipeline={"accumulate-8": good(seconds_per_step=1.0), "1f1b-8": FAILED},
)


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("held-out loss", ("missed", "3.2000 → 3.9000 nats/token")),
        ("bytes of its step", ("failed", "")),
        ("peak of programs", ("measured", "all 1 runs below the compiler's own peak; 1 runs failed")),
        ("LoRA 1b-4x2048-remat", ("failed", "")),
        ("LoRA 8b-4x2048-remat", ("measured", "100 tokens/s, peak 1.00 GiB; peft failed")),
        ("LoRA 1b-4x2048-plain:", ("failed", "")),
        (OFFLOADED, ("failed", "")),
        ("AdamW on all 8 B parameters, 4k-host", ("failed", "")),
        ("Trainer.fit", ("failed", "")),
        ("bytes of that step", ("failed", "")),
        ("pipeline of one stage, 1f1b", ("failed", "")),
    ],
)
def test_what_failed_is_not_what_was_not_measured(figure: str, said: tuple[str, str]) -> None:
    assert state(BOTH, figure) == said
    rows = [row for row in _summary.block(BOTH).splitlines() if row.startswith(f"| {figure}")]
    assert rows and all(("**failed**" in row) == (said[0] == "failed") for row in rows)
    assert "trainer/1b-peak: failed: ?" in _summary.table(BOTH)


def test_a_figure_of_one_of_two_devices_is_no_line_without_a_device() -> None:
    sides = {f"1b-4x2048-remat-{name}": good(**SIDE) for name in ("lowtide", "peft")}
    found = results(lora=sides, peak={"a": good(error=0.01)}, trainer={"1b": good(overhead=0.01)})
    wrong = good(verified=False, verify_error="a | b\nhint")
    found["NVIDIA L4 | PCIe"] = {"offload": {"part": "offload", "rows": {"64k-activations": wrong}}}
    block = _summary.block(found)
    rows = [row for row in block.splitlines() if row.startswith("| ")]
    assert len(rows) == len({*rows}) and all(row.replace("\\|", "").count("|") == 5 for row in rows)
    figures = ("Trainer.fit", "LoRA 1b-4x2048-remat", "peak of", "activations")
    unmeasured = [row for row in rows if "not measured yet" in row]
    assert not any(row.startswith(f"| {figure}") for row in unmeasured for figure in figures)
    assert any("held-out loss" in row for row in unmeasured)


def test_peak_is_met_when_every_run_was_made_and_has_a_number() -> None:
    found = results(peak={f"p{at}": good(error=0.01) for at in range(14)})
    found["NVIDIA H200"]["peak"]["cases"] = [f"p{at}" for at in range(26)]
    assert state(found, "peak of 14 of 26")[0] == "measured"
    assert state(found, "peak of 14 of 26")[1].endswith("; 12 not made")
    found["NVIDIA H200"]["peak"] = {
        "rows": {f"p{at}": good(error=0.01) for at in range(14)} | {"x": good(error=math.nan)}
    }
    assert state(found, "peak of 15 of 15")[0] == "missed"


# --- what the parts refuse -----------------------------------------------------------------------------------------


def test_a_prediction_above_the_measured_peak_is_not_covered() -> None:
    assert measured_peak.is_covered(10, 10, 10) and measured_peak.is_covered(10, 10, 9)
    assert not measured_peak.is_covered(10, 10, 11) and not measured_peak.is_covered(9, 10, 9)
    assert not measured_peak.is_covered(None, None, 9)


def test_a_measurement_of_a_peer_without_a_gpu_raises() -> None:
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    assert lora_peft.device_of(torch, rehearsal=True) == "cpu"
    with pytest.raises(RuntimeError, match="PyTorch finds no GPU"):
        lora_peft.device_of(torch, rehearsal=False)


def test_a_default_run_on_the_cpu_is_no_measurement() -> None:
    gpu_smoke.check_place({"target": "here", "chip": "H200", "measured_peak_bytes": 1})
    for memory in ({"chip": "cpu", "measured_peak_bytes": 1}, {"chip": "H200", "measured_peak_bytes": None}):
        with pytest.raises(RuntimeError, match="needs a GPU"):
            gpu_smoke.check_place({"target": "here", **memory})


def test_a_case_pins_no_more_than_the_host_has() -> None:
    assert layerwise_time.host_bytes() > 0
    layerwise_time.check_host("host", 128 * 2**30)
    layerwise_time.check_host("device", 2**30)
    with pytest.raises(MemoryError, match="opt_state pins up to 76 GiB of the host's memory, which has 64 GiB"):
        layerwise_time.check_host("opt_state", 64 * 2**30)


def test_a_refused_offload_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def verify(program: Any, places: Any, *, host_temp_bytes: int) -> Any:
        asked.append(host_temp_bytes)
        raise lt.core.PlacementError("1 leaf is elsewhere", expected="", got="", hint="")

    monkeypatch.setattr(offload_time.lt.offload, "verify", verify)
    found = offload_time.verified("activations", None, offload_time.saved_bytes(LLAMA_1B, 4096))
    assert found["verified"] is False and "elsewhere" in found["verify_error"]
    per_token = 16 * 2 * (2048 + 2 * 512 + 2 * 8192)  # layers, bytes, features
    assert asked == [4096 * per_token // 2]


def test_answers_are_told_also_where_a_side_has_none() -> None:
    run = {"tokens_per_second": 300.0}
    ours = {"runs": {"1x128": run, "8x128": run}}
    theirs = {"runs": {"1x128": {"tokens_per_second": 150.0, "share_of_same_tokens": 0.5}}, "out_of_memory": True}
    both = {"8b-lowtide": ours, "8b-transformers": theirs}
    lines = _summary.generate(_summary.Result(both, True, list(both)))
    assert lines[0].found.startswith(
        "2.00 × (300 tokens/s; of random weights in bfloat16 50 % of the tokens are the same)"
    )
    assert lines[1].found == "300 tokens/s; transformers runs out of memory"
    alone = {"8b-lowtide": ours, "8b-transformers": {"not_here": "torch"}}
    assert [line.found for line in _summary.generate(_summary.Result(alone, True, list(alone)))][:2] == [
        "300 tokens/s"
    ] * 2
    short = {"8b-lowtide": {"runs": {}, "out_of_memory": True}, "8b-transformers": {"runs": {"1x128": run}}}
    assert _summary.generate(_summary.Result(short, True, list(short)))[0].state == "missed"
