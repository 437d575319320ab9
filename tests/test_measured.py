"""The figures of the README and of `docs/measured.md` are those of the recorded results."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPU_CASES = [
    (part.relative_to(RESULTS / "gpu").with_suffix("").as_posix(), case)
    for part in sorted(RESULTS.glob("gpu/*/*.json"))
    for case, row in json.loads(part.read_text())["rows"].items()
    if "tokens_per_second" in row
]


def gib(num_bytes: int, digits: int = 2) -> str:
    return f"{num_bytes / 2**30:.{digits}f} GiB"


def test_measured_speeds_and_peaks():
    assert len(GPU_CASES) > 10
    for part, case in GPU_CASES:
        row = json.loads((RESULTS / "gpu" / f"{part}.json").read_text())["rows"][case]
        (line, *_) = [line for line in PAGE.splitlines() if f"{row['tokens_per_second']:,.0f}" in line]
        assert gib(row.get("step_peak_bytes", row["peak_bytes"])) in line, case


@pytest.mark.parametrize("model", ["1b", "8b"])
def test_compiled_lora_steps(model):
    rows = json.loads((RESULTS / "lora_step-v5p-2x2x1.json").read_text())["rows"]
    (row,) = [row for row in rows if row["model"] == model]
    naive, ours = (row[side]["device_bytes"] for side in ("naive", "ours"))
    assert f"{gib(naive)} | {gib(ours)}" in PAGE
    if model == "8b":
        assert gib(ours, 1) in README
        assert gib(naive, 1) in README


@pytest.mark.parametrize(
    ("part", "variant"),
    [
        ("stack", "remat + Adam"),
        ("stack", "+ parameters on the host"),
        ("8b", "everything on the host, 1 microbatch"),
    ],
)
def test_compiled_layerwise_steps(part, variant):
    rows = json.loads((RESULTS / "layerwise.json").read_text())[part]
    (row,) = [row for row in rows if row["variant"] == variant]
    device = gib(row["device_bytes"], 2 if row["host_bytes"] == 0 else 1)
    host = gib(row["host_bytes"], 1 if row["host_bytes"] < 2**35 else 0) if row["host_bytes"] else "0"
    assert f"| {device} | {host} |" in PAGE


def test_whether_eight_billion_parameters_fit():
    results = json.loads((RESULTS / "will_it_fit.json").read_text())["rows"]
    usable_cells = find_cells("usable memory")
    for case, label in (("QLoRA", "QLoRA: `"), ("LoRA", "LoRA in bfloat16"), ("full", "all parameters")):
        for row, cell, usable_cell in zip(results[case]["rows"], find_cells(label), usable_cells, strict=True):
            assert usable_cell.strip() in (gib(row["usable_bytes"], 1), gib(row["usable_bytes"]))
            assert row["fits"] is ("fits" in cell)
            assert gib(row["device_bytes"], 1) in cell or cell.strip() == "no"


def test_whether_qwen_and_gemma_fit():
    cases = json.loads((RESULTS / "families.json").read_text())["cases"]
    quantized = [row for row in cases["tune"] if row["method"] == "QLoRA"]
    for row, cell in zip(quantized, find_cells("Qwen 3.5 9B"), strict=True):
        assert cell.strip() == f"fits: {gib(row['device_bytes'], 1)}" and row["fits"]
    (gemma,) = cases["experts"]
    assert f"LoRA on Gemma 4 26B-A4B needs {gib(gemma['device_bytes'], 1)}" in README and gemma["fits"]


def find_cells(label):
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {label}")]
    return line.split("|")[2:5]
