"""Lines of a GPU day about attention and long sequences. Standard library only."""

from __future__ import annotations

import math

import _words as words
from _lines import Line, Result, Row

LENGTH_AIM = 342_733
"""Tokens that Unsloth's documentation has for QLoRA of Llama 3.1 8B on 80 GB."""
ATTENTION = "attention of Llama 3.1 8B's shapes"


def attention(result: Result) -> list[Line]:
    """Blocks of XLA's operations beside cuDNN's kernel."""
    rows, lines = result.rows, list[Line]()
    for shape in dict.fromkeys(name.rpartition("-")[0] for name in rows):
        ours, theirs = (rows.get(f"{shape}-{name}", {}) for name in ("blocks", "cudnn"))
        found, met = _blocks(ours, theirs)
        if found or "failed" in ours or "failed" in theirs:
            lines.append(Line(f"{ATTENTION}, {shape}: time of blocks over cuDNN's", "", found, met, failed=not found))
    return lines or [Line(f"{ATTENTION}: time of blocks over cuDNN's")]


def _blocks(ours: Row, theirs: Row) -> tuple[str, bool | None]:
    """One shape by both, or by the one that was measured."""
    error = ours.get("relative_error")
    if error is not None and not error <= words.VALUE_TOLERANCE:
        return f"values apart by {words.percent(error, 1)} of their norm", False
    named = {"blocks": _kernel(ours), "cuDNN": _kernel(theirs)}
    told = "; ".join(f"{name} {said}" for name, said in named.items() if said)
    passes = {"forward": "forward", "both": "with gradients"}
    found = {
        said: ratio for key, said in passes.items() if (ratio := words.ratio(ours, theirs, f"{key}_ms")) is not None
    }
    if found:
        ratios = ", ".join(f"{ratio:.2f} × {said}" for said, ratio in found.items())
        same = "" if error is not None or "with gradients" not in found else "; values not compared"
        told = f"{ratios} ({told}){same}{words.mixed(ours, theirs)}"
    lost = ours.get("out_of_memory") and bool(_kernel(theirs)) and not theirs.get("out_of_memory")
    return told, False if lost else None


def _kernel(row: Row) -> str:
    """Milliseconds of both passes, what the second one computes of what is seen, and the peak."""
    if row.get("both_ms"):
        peak = f", peak {words.gib(row['both_peak_bytes'])}" * bool(row.get("both_peak_bytes"))
        return f"{row['forward_ms']:,.1f} and {row['both_ms']:,.1f} ms, {row['both_tflops']:,.0f} TFLOP/s{peak}"
    if row.get("forward_ms"):
        return f"{row['forward_ms']:,.1f} ms, and runs out of memory with gradients"
    return "runs out of memory" * bool(row.get("out_of_memory"))


LADDER = "LoRA 1b-4x2048"


def ladder(result: Result) -> list[Line]:
    """A technique more in each line, with the peak of a step alone: making the model may take more.

    Losses are compared with those of the first step that fits; in few bits the weights are others.
    """
    rows, lines = result.rows, list[Line]()
    base = next((row for row in rows.values() if words.speed(row) and row.get("method") == "lora"), {})
    for name, row in rows.items():
        found, why = words.speed_and_peak({**row, "peak_bytes": row.get("step_peak_bytes")}), ""
        if words.speed(row):
            why = _amiss(row) or (words.apart(row, base) if row.get("method") == "lora" else "")
            on_host = [f"{words.gib(row['host_bytes'])} on the host"] * bool(row.get("host_bytes"))
            found = why or words.joined(found, *on_host)
        figure = f"{LADDER}, {row.get('rung', name)}: tokens/s and peak"
        lines.append(Line(figure, "", found, False if why else None, failed=not found))
    return lines or [Line(f"{LADDER}, a technique more in each step: tokens/s and peak")]


COPIES = "layers' inputs on the host over the device"


def copies(result: Result) -> list[Line]:
    """What options and orders of a program do to copies beside kernels."""
    rows, lines = result.rows, list[Line]()
    base = rows.get("device", {})
    for name, row in rows.items():
        ratio, met = words.over(row, base), None
        if name == "device":
            continue
        found = ""
        if row.get("option_error"):
            found = "an option that is not known here"
        elif row.get("out_of_memory"):
            found = "runs out of memory"
        elif ratio is None and words.seconds(row) and "failed" not in base:
            found = "no step on the device to compare it with"
        elif ratio is not None and (found := words.apart(row, base)):
            met = False
        elif ratio is not None:
            share = row.get("overlap", {}).get("hidden_share")
            under = "" if share is None else f", {words.percent(share)} of the copies under kernels"
            found = f"{ratio:.2f} × the time{under}{words.mixed(row, base)}"
        lines.append(Line(f"{COPIES}, {name}", "", found, met, failed=not found))
    return lines or [Line(f"{COPIES}, by options and order")]


LONGEST = "QLoRA of Llama 3.1 8B's shapes on 80 GB"


def longest(result: Result) -> list[Line]:
    """One sequence, as long as it fits."""
    rows = {int(name): row for name, row in result.rows.items() if not row.get("not_tried")}
    lines, fits = list[Line](), dict[int, Row]()
    for length, row in sorted(rows.items()):
        found, why = words.speed_and_peak(row), _amiss(row) if words.speed(row) else ""
        if words.speed(row):
            found = why or words.joined(
                found, *[f"{words.gib(row['host_bytes'])} on the host"] * bool(row.get("host_bytes"))
            )
        if found and not why and not row.get("out_of_memory"):
            fits[length] = row
        lines.append(Line(f"{LONGEST}, {length:,} tokens", "", found, False if why else None, failed=not found))
    lost = [length for length, row in rows.items() if row.get("out_of_memory")]
    figure, aim, most = f"{LONGEST}, longest sequence", f"at least {LENGTH_AIM:,} tokens", max(fits, default=0)
    found = f"{most:,} tokens" if fits else f"less than {min(lost):,} tokens" if lost else ""
    found += f"; {min(lost):,} run out of memory" if fits and lost else ""
    met = True if most >= LENGTH_AIM else False if lost else None
    return [Line(figure, aim, found, met, failed=bool(rows) and not found), *lines]


def _amiss(row: Row) -> str:
    """Why a step that was taken is not the one that was meant; nothing where it is."""
    if row.get("verified") is False:
        return f"not verified: {words.first(row.get('verify_error', ''))}"
    return "" if all(map(math.isfinite, row.get("losses", ()))) else "the loss is no number"
