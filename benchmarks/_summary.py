"""How the raw results of a GPU day become lines: one function for each part, and what each figure aims at.

Takes results as `gpu.results` finds them, {device: {part: content}}. Standard library only. A rehearsal is refused.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import _words as words
from _lines import Line, Result, Row
from _processes import reason
from _summary_long import attention, copies, ladder, longest

BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
SPEED_AIM, PEAK_AIM, OFFLOAD_AIM, ERROR_AIM, OVERHEAD_AIM = 1.3, 0.7, 1.10, 0.03, 0.02
LONG = "64k"
SHAPES = [f"{model}-{rows}x2048-{kind}" for model in ("1b", "8b") for rows in (4, 16) for kind in ("remat", "plain")]
"""Of the LoRA steps that are listed, measured or not."""
PACKED = ("8b-4x2048-remat", "moe-4x2048-remat")
OTHERS = [f"{model}-4x2048-remat" for model in ("1.7b-qlora", "1.7b-dora", "1.7b-rslora", "8b-qlora", "8b-dora")]
"""Of the fine-tuning steps on packed rows."""
LEAST_PROGRAMS = 14


class Rehearsed(ValueError):
    """A rehearsal was given where a measurement is meant."""


# --- parts ---------------------------------------------------------------------------------------------------------


def smoke(result: Result) -> list[Line]:
    """The default finetune."""
    row = result.rows.get("finetune", {})
    before, after = row.get("loss_before"), row.get("loss_after")
    found = "" if before is None or after is None else f"{before:.4f} → {after:.4f} nats/token"
    failed = "failed" in row
    met = after < before if found else None
    lines = [Line("held-out loss of the default finetune", "falls", found, met, failed)]
    return [*lines, Line("bytes of its step, predicted and measured", "", words.predicted(row), None, failed)]


def peak(result: Result) -> list[Line]:
    """Compiled against measured."""
    rows = result.rows
    errors = {name: abs(row["error"]) for name, row in rows.items() if row.get("error") is not None}
    figure, aim = "peak of {}, compiled against measured", f"within {words.percent(ERROR_AIM)}, also the worst"
    covered = sum(bool(row.get("covered")) for row in rows.values())
    failed = sum("failed" in row for row in rows.values())
    if not errors:
        found = f"all {covered} runs below the compiler's own peak" if covered else ""
        found += f"; {failed} runs failed" if found and failed else ""
        return [Line(figure.format("programs of many kinds"), aim, found, failed=bool(failed))]
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    absent = len({*result.cases} - {*rows})
    median = words.percent(statistics.median(errors.values()), 2)
    found = f"median error {median}, worst {words.percent(errors[worst], 2)} ({worst})"
    found += f"; {covered} of {covered + len(errors)} runs below the compiler's own peak" if covered else ""
    found += f"; {failed} runs failed" * bool(failed) + f"; {absent} not made" * bool(absent)
    programs, all_of_them = ({name.removesuffix("-growing") for name in names} for names in (errors, result.cases))
    met: bool | None = errors[worst] <= ERROR_AIM
    if met and (failed or absent or len(programs) < LEAST_PROGRAMS):
        met = None
    return [Line(figure.format(f"{len(programs)} of {len(all_of_them | programs)} programs"), aim, found, met)]


def lora(result: Result) -> list[Line]:
    """Beside PEFT, as it comes and in its other settings."""
    return _beside(result, "LoRA", SHAPES)


def sft(result: Result, shapes: Sequence[str] = PACKED) -> list[Line]:
    """Packed rows beside PEFT."""
    return _beside(result, "SFT", shapes)


def generate(result: Result) -> list[Line]:
    """Answers beside transformers."""
    lines = list[Line]()
    for model in ("8b", "moe"):
        ours = result.rows.get(f"{model}-lowtide", {})
        peers = {name.partition("-")[2]: row for name, row in result.rows.items() if name.startswith(f"{model}-transf")}
        found = [_answers(model, shape, ours, peers) for shape in _shapes(ours, *peers.values())]
        lines += [line for each in found for line in each]
        if not found:
            failed = any("failed" in row for row in (ours, *peers.values()))
            said = "runs out of memory" * bool(ours.get("out_of_memory"))
            figure = f"generation {model}, beside transformers: tokens/s"
            lines.append(Line(figure, "", said, False if said else None, failed))
    return lines


def _shapes(*rows: Row) -> list[str]:
    """What any side has measured, in order."""
    return [*dict.fromkeys(shape for row in rows for shape in row.get("runs", {}))]


def _answers(model: str, shape: str, ours: Row, peers: Mapping[str, Row]) -> list[Line]:
    """One shape of prompts, beside each peer; alone where there is none."""
    own, figure = ours.get("runs", {}).get(shape), f"generation {model}, {shape}"
    speed = "" if own is None else f"{own['tokens_per_second']:,.0f} tokens/s"
    lines = list[Line]()
    for peer, row in peers.items():
        other = row.get("runs", {}).get(shape)
        if own and other:
            same = other.get("share_of_same_tokens")
            told = (
                ""
                if same is None
                else f"; of random weights in bfloat16 {words.percent(same)} of the tokens are the same"
            )
            ratio = own["tokens_per_second"] / other["tokens_per_second"]
            found = f"{ratio:.2f} × ({speed}{told}){words.mixed(ours, row)}"
            lines.append(Line(f"{figure}: tokens/s over {peer}'s", "", found))
        elif own and row.get("out_of_memory"):
            lines.append(Line(f"{figure}: tokens/s over {peer}'s", "", f"{speed}; {peer} runs out of memory"))
        elif other and ours.get("out_of_memory"):
            lines.append(Line(f"{figure}: tokens/s over {peer}'s", "", "runs out of memory, which it does not", False))
    return lines or ([Line(f"{figure}: tokens/s", "", speed)] if own else [])


def _beside(result: Result, what: str, shapes: Sequence[str]) -> list[Line]:
    rows, pairs = result.rows, list[Line]()
    for name, theirs in rows.items():
        base, _, peer = name.rpartition("-")
        if peer.startswith("peft"):
            pairs += _beside_peft(f"{what} {base}", peer, rows.get(f"{base}-lowtide", {}), theirs)
    beside = {line.figure.split(":")[0] for line in pairs}
    alone = [
        Line(f"{figure}: tokens/s and peak", "", found, failed="failed" in ours)
        for name, ours in rows.items()
        if name.endswith("-lowtide") and ((found := words.speed_and_peak(ours)) or "failed" in ours)
        if (figure := f"{what} {name.rpartition('-')[0]}") not in beside
    ]
    absent = [
        Line(f"{figure}, beside peft: tokens/s and peak", f"{SPEED_AIM} × at {PEAK_AIM} ×")
        for shape in shapes
        if (figure := f"{what} {shape}") not in beside
    ]
    return [*pairs, *alone, *absent]


def _beside_peft(step: str, peer: str, ours: Row, theirs: Row) -> list[Line]:
    """Speed and peak of one pair; a reason instead where they did not train the same."""
    figures = f"{step}: tokens/s over {peer}'s", f"{step}: peak over {peer}'s"
    if theirs.get("out_of_memory") and words.speed(ours):
        return [Line(step, "", f"{words.joined(words.speed(ours), words.peak(ours))}; {peer} runs out of memory")]
    if ours.get("out_of_memory") and words.speed(theirs):
        return [Line(figures[0], f"{SPEED_AIM} ×", f"runs out of memory; {peer} {words.speed_and_peak(theirs)}", False)]
    speed, size = words.ratio(ours, theirs, "tokens_per_second"), words.ratio(ours, theirs, "peak_bytes")
    if speed is None and "failed" in ours and "not_here" not in theirs:
        return [Line(figures[0], f"{SPEED_AIM} ×", failed=True)]
    if speed is None and "failed" in theirs and (found := words.speed_and_peak(ours)):
        return [Line(figures[0], f"{SPEED_AIM} ×", f"{found}; {peer} failed")]
    if speed is None:
        return []
    if why := words.apart(theirs, ours) or words.not_alike(ours, theirs):
        return [Line(figures[0], f"{SPEED_AIM} ×", why, False)]
    mixed = words.mixed(ours, theirs)
    found = f"{speed:.2f} × ({ours['tokens_per_second']:,.0f} beside {theirs['tokens_per_second']:,.0f}){mixed}"
    lines = [Line(figures[0], f"{SPEED_AIM} ×", found, None if mixed else speed >= SPEED_AIM)]
    if size is not None:
        found = f"{size:.2f} × ({words.gib(ours['peak_bytes'])} beside {words.gib(theirs['peak_bytes'])}){mixed}"
        lines.append(Line(figures[1], f"{PEAK_AIM} ×", found, None if mixed else size <= PEAK_AIM))
    return lines


OFFLOADED = {"activations": "device", "remat": "device", "opt_state": "remat", "parameters": "gradients"}
"""What each kind of step is beside: the same with that on the device."""


def offload(result: Result) -> list[Line]:
    """Activations, state and parameters on the host."""
    rows, lines = result.rows, list[Line]()
    for name, row in rows.items():
        size, _, kind = name.partition("-")
        if kind not in OFFLOADED:
            continue
        base = rows.get(f"{size}-{OFFLOADED[kind]}", {})
        ratio, met = words.over(row, base), None
        aimed = kind == "activations" and size == LONG
        if row.get("verified") is False:
            found, met = f"not verified: {words.first(row.get('verify_error', ''))}", False
        elif ratio is not None:
            mixed, why = words.mixed(row, base), words.apart(row, base)
            found = f"{ratio:.2f} × the time"
            if (size_ratio := words.ratio(row, base, "peak_bytes")) is not None:
                found += f", {size_ratio:.2f} × the peak"
            if (share := row.get("overlap", {}).get("hidden_share")) is not None:
                found += f", {words.percent(share)} of the copies under kernels"
            found, met = (why, False) if why else (found + mixed, ratio <= OFFLOAD_AIM if aimed and not mixed else None)
        elif row.get("out_of_memory") and words.seconds(base):
            found, met = "runs out of memory, which the step on the device does not", False
        elif row.get("out_of_memory") or (base.get("out_of_memory") and words.speed(row)):
            found = words.joined(
                words.speed_and_peak(row), *["runs out of memory on the device"] * bool(base.get("out_of_memory"))
            )
        elif "failed" in row or "failed" in base:
            found = ""
        else:
            continue
        aim = f"at most {OFFLOAD_AIM:.2f} ×" if aimed else ""
        lines.append(Line(f"{kind} over {OFFLOADED[kind]}, {size} tokens", aim, found, met, failed=not found))
    if any(line.aim for line in lines):
        return lines
    return [Line("activations on the host over the device, 64k tokens", f"at most {OFFLOAD_AIM:.2f} ×"), *lines]


def optimizer(result: Result) -> list[Line]:
    """Updates with state in few bits."""
    rows, lines = result.rows, list[Line]()
    for name, row in rows.items():
        beside = "host-float32" if name.startswith("host-") else "float32"
        base = rows.get(beside, {})
        if row is base or name == "float32":
            continue
        found, ratio = "", words.over(row, base)
        if ratio is not None:
            found = f"{ratio:.2f} × the time{words.mixed(row, base)}"
            if (size_ratio := words.ratio(row, base, "predicted_bytes")) is not None:
                found += f", {size_ratio:.2f} × the bytes"
        elif row.get("out_of_memory"):
            found = "runs out of memory"
        if found or "failed" in row:
            lines.append(Line(f"AdamW's update of 1.07 B, {name} over {beside}", "", found, None, "failed" in row))
    return lines or [Line("AdamW's update with state in 8 bits over float32")]


def layerwise(result: Result) -> list[Line]:
    """Every parameter of an 8B model."""
    rows, lines = result.rows, list[Line]()
    for name, row in rows.items():
        size, _, kind = name.partition("-")
        device, plain = rows.get(f"{size}-device", {}), rows.get(f"{size}-plain", {})
        found, met = words.speed_and_peak(row), None
        if row.get("verified") is False:
            found, met = f"not verified: {words.first(row.get('verify_error', ''))}", False
        elif row.get("loss_fell") is False:
            found, met = "the loss does not fall", False
        elif kind != "device" and device.get("losses") and row.get("losses") and (why := words.apart(row, device)):
            found, met = why, False
        elif row.get("out_of_memory") and kind != "plain" and words.seconds(plain):
            found, met = "runs out of memory, which plain AdamW does not", False
        if found or "failed" in row:
            lines.append(Line(f"AdamW on all 8 B parameters, {name}", "", found, met, "failed" in row))
    return lines or [Line("AdamW on all 8 B parameters: tokens/s and peak")]


def trainer(result: Result) -> list[Line]:
    """What fit adds."""
    rows = result.rows
    row = rows.get("1b", {})
    share = row.get("overhead")
    figure, aim = "Trainer.fit over the bare step, LoRA on 1B", f"at most {words.percent(OVERHEAD_AIM)}"
    found = "" if share is None else words.joined(words.percent(share, 2), words.speed(row))
    lines = [Line(figure, aim, found, None if share is None else share <= OVERHEAD_AIM, "failed" in row)]
    row = rows.get("1b-peak", {})
    return [*lines, Line("bytes of that step, predicted and measured", "", words.predicted(row), None, "failed" in row)]


def pipeline(result: Result) -> list[Line]:
    """Beside plain accumulation."""
    rows, lines = result.rows, list[Line]()
    for name, row in rows.items():
        schedule, _, size = name.rpartition("-")
        base = rows.get(f"accumulate-{size}", {})
        ratio, found, met = words.over(row, base), "", None
        if schedule == "accumulate":
            continue
        if ratio is not None:
            why = words.apart(row, base)
            found, met = (why, False) if why else (f"{ratio:.2f} × plain accumulation{words.mixed(row, base)}", None)
        elif row.get("out_of_memory") and words.seconds(base):
            found, met = "runs out of memory, which plain accumulation does not", False
        failed = not found and ("failed" in row or "failed" in base)
        if found or failed:
            count, _, blocks = size.partition("_")
            figure = f"pipeline of one stage, {schedule}, {count} microbatches{', ' * bool(blocks)}{blocks}"
            lines.append(Line(figure, "", found, met, failed))
    return lines or [Line("a pipeline of one stage beside plain accumulation")]


def tests(result: Result) -> list[Line]:
    """The tests marked gpu; one file that has no outcome is one too many."""
    counts = [row for row in result.rows.values() if row.get("num_passed") is not None]
    passed, failed = (sum(row.get(key, 0) for row in counts) for key in ("num_passed", "num_failed"))
    without = sum("failed" in row for row in result.rows.values() if row.get("num_passed") is None)
    found = f"{passed} passed, {failed} failed" if counts or without else ""
    found += f", {without} files without an outcome" if without else ""
    met: bool | None = not failed and not any("failed" in row for row in result.rows.values()) and passed > 0
    if met and not result.complete:
        found, met = f"{found}, not all were run", None
    return [Line("tests marked gpu", "all pass", found, met if found else None)]


PARTS: dict[str, tuple[Callable[[Result], list[Line]], str]] = {
    "smoke": (smoke, "gpu_smoke.py"),
    "peak": (peak, "measured_peak.py"),
    "lora": (lora, "lora_peft.py"),
    "sft": (sft, "sft_peft.py"),
    "qlora": (lambda result: sft(result, OTHERS), "qlora_peft.py"),
    "generate": (generate, "generate_time.py"),
    "attention": (attention, "attention_time.py"),
    "ladder": (ladder, "ladder_time.py"),
    "longest": (longest, "longest_sequence.py"),
    "offload": (offload, "offload_time.py"),
    "copies": (copies, "copies_time.py"),
    "optimizer": (optimizer, "optimizer_time.py"),
    "layerwise": (layerwise, "layerwise_time.py"),
    "trainer": (trainer, "trainer_time.py"),
    "pipeline": (pipeline, "pipeline_time.py"),
    "tests": (tests, "gpu_tests.py"),
}


# --- all of them ---------------------------------------------------------------------------------------------------


def lines(content: Mapping[str, Row]) -> list[tuple[str, Line]]:
    """The part and line of every figure of one device, measured or not."""
    found: list[tuple[str, Line]] = []
    for part, (make, _) in PARTS.items():
        result = content.get(part, {})
        if result.get("rehearsal"):
            raise Rehearsed(f"{part} is a rehearsal on {result.get('device_kind')}, not a measurement")
        rows = {name: _counted(row) for name, row in result.get("rows", {}).items()}
        cases = result.get("cases") or list(rows)
        complete = result.get("complete") is True and {*cases} <= {*rows}
        found += [(part, line) for line in make(Result(rows, complete, cases))]
    return found


def _counted(row: Row) -> Row:
    """Of what failed the tests are counted and the losses shown; it has no other figures."""
    if row.get("ok") is True:
        return row
    if row.get("not_here"):
        return {"not_here": row["not_here"]}
    kept = ("num_passed", "num_failed", "loss_before", "loss_after")
    return {"failed": True, **{key: row[key] for key in kept if key in row}}


def table(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Every figure of every device with its aim, to read in a terminal."""
    text: list[str] = []
    for device, content in (results or {"no measurements": {}}).items():
        cells = [(part, line.figure, line.aim, line.found, line.state) for part, line in lines(content)]
        cells.insert(0, ("part", "figure", "aim", "found", "state"))
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        rows = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in cells]
        text += [device, *rows, *_failed(content), ""]
    return "\n".join(text)


def block(results: Mapping[str, Mapping[str, Row]]) -> str:
    """README's table, with the comments around it."""
    rows = [BEGIN, "", "| on a GPU | aim | figure | shown by |", "|---|---|---|---|"]
    made = {device: lines(content) for device, content in (results or {"": {}}).items()}
    for part, (_, script) in PARTS.items():
        absent: list[Line] | None = None  # on every device
        for device, found in made.items():
            own = [line for name, line in found if name == part]
            lacked = [line for line in own if line.state == "not measured"]
            rows += [_row(f"{line.figure} ({device})", line, script) for line in own if line not in lacked]
            absent = lacked if absent is None else [line for line in absent if line in lacked]
        rows += [_row(line.figure, line, script) for line in absent or ()]
    return "\n".join([*rows, "", END])


def _row(figure: str, line: Line, script: str) -> str:
    """A row of README's table, in which the texts of errors are no columns of their own."""
    found = line.found + {True: ": met", False: ": **missed**", None: ""}[line.met] if line.found else ""
    found = found or ("**failed**" if line.failed else "not measured yet")
    cells = (figure, line.aim, found, f"`python benchmarks/{script}`")
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def in_readme(text: str, new: str) -> str:
    """The text with the block in the place of the one it has."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    if len(re.findall(pattern, text, flags=re.DOTALL)) != 1:
        raise ValueError(f"expected one block from {BEGIN} to {END}")
    return re.sub(pattern, lambda _: new, text, flags=re.DOTALL)


# --- words ---------------------------------------------------------------------------------------------------------


def _failed(content: Mapping[str, Row]) -> Iterable[str]:
    for part, result in content.items():
        for name, row in result.get("rows", {}).items():
            if row.get("ok") is not True:
                told = f"failed: {reason(row.get('error') or '')}"
                why = f"not here: {', '.join(row['not_here'])}" if row.get("not_here") else told
                yield f"  {part}/{name}: {why}"
