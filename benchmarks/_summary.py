"""How the raw results of a GPU day become lines: one function for each part, and what each figure aims at.

Takes results as `gpu.results` finds them, {device: {part: content}}. Standard library only. A rehearsal is refused.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
GIB = 2**30
SPEED_AIM, PEAK_AIM, OFFLOAD_AIM, ERROR_AIM, OVERHEAD_AIM = 1.3, 0.7, 1.10, 0.03, 0.02
LONG = "64k"

Rows = Mapping[str, Mapping[str, Any]]


class Line(NamedTuple):
    """One figure: what it is, what it should be, what it is here, and whether that will do."""

    figure: str
    aim: str = ""
    found: str = ""
    met: bool | None = None

    @property
    def state(self) -> str:
        if not self.found:
            return "not measured"
        return {None: "measured", True: "met", False: "missed"}[self.met]


# --- parts ---------------------------------------------------------------------------------------------------------


def smoke(rows: Rows) -> list[Line]:
    """The default finetune."""
    row = rows.get("finetune", {})
    before, after = row.get("loss_before"), row.get("loss_after")
    found = "" if before is None or after is None else f"{before:.4f} → {after:.4f} nats/token"
    lines = [Line("held-out loss of the default finetune", "falls", found, after < before if found else None)]
    return [*lines, Line("bytes of its step, predicted and measured", "", _predicted(row))]


def peak(rows: Rows) -> list[Line]:
    """Compiled against measured."""
    errors = {name: abs(row["error"]) for name, row in rows.items() if row.get("error") is not None}
    figure, aim = "peak of {}, compiled against measured", f"within {_percent(ERROR_AIM)}, also the worst"
    if not errors:
        return [Line(figure.format("programs of many kinds"), aim)]
    worst = max(errors, key=lambda name: errors[name])
    covered = sum(bool(row.get("covered")) for row in rows.values())
    found = (
        f"median error {_percent(statistics.median(errors.values()), 2)}, worst {_percent(errors[worst], 2)} ({worst})"
    )
    found += f"; {covered} of {covered + len(errors)} runs below the compiler's own peak" if covered else ""
    programs = {name.removesuffix("-growing") for name in errors}
    return [Line(figure.format(f"{len(programs)} programs"), aim, found, errors[worst] <= ERROR_AIM)]


def lora(rows: Rows) -> list[Line]:
    """Beside PEFT, as it comes and in its other settings."""
    pairs: list[Line] = []
    for name, theirs in rows.items():
        base, _, peer = name.rpartition("-")
        ours = rows.get(f"{base}-lowtide", {})
        if not peer.startswith("peft"):
            continue
        if theirs.get("out_of_memory") and _speed(ours):
            pairs.append(Line(f"LoRA {base}", "", f"{_and(_speed(ours), _peak(ours))}; {peer} runs out of memory"))
        speed, size = _ratio(ours, theirs, "tokens_per_second"), _ratio(ours, theirs, "peak_bytes")
        if speed is not None:
            found = f"{speed:.2f} × ({ours['tokens_per_second']:,.0f} beside {theirs['tokens_per_second']:,.0f})"
            pairs.append(Line(f"LoRA {base}: tokens/s over {peer}'s", f"{SPEED_AIM} ×", found, speed >= SPEED_AIM))
        if speed is not None and size is not None:
            found = f"{size:.2f} × ({_gib(ours['peak_bytes'])} beside {_gib(theirs['peak_bytes'])})"
            pairs.append(Line(f"LoRA {base}: peak over {peer}'s", f"{PEAK_AIM} ×", found, size <= PEAK_AIM))
    beside = {line.figure.split(":")[0] for line in pairs}
    alone = [
        Line(f"{figure}: tokens/s and peak", "", found)
        for name, ours in rows.items()
        if name.endswith("-lowtide") and (found := _speed_and_peak(ours))
        if (figure := f"LoRA {name.rpartition('-')[0]}") not in beside
    ]
    if pairs:
        return [*pairs, *alone]
    return [Line("LoRA step over PEFT's: tokens/s and peak", f"{SPEED_AIM} × at {PEAK_AIM} ×"), *alone]


OFFLOADED = {"activations": "device", "remat": "device", "opt_state": "remat", "parameters": "gradients"}
"""What each kind of step is beside: the same with that on the device."""


def offload(rows: Rows) -> list[Line]:
    """Activations, state and parameters on the host."""
    lines: list[Line] = []
    for name, row in rows.items():
        size, _, kind = name.partition("-")
        base = rows.get(f"{size}-{OFFLOADED.get(kind)}", {})
        ratio = _over(row, base)
        aimed = kind == "activations" and size == LONG
        if ratio is not None:
            found = f"{ratio:.2f} × the time"
            if (peak := _ratio(row, base, "peak_bytes")) is not None:
                found += f", {peak:.2f} × the peak"
            if (share := row.get("overlap", {}).get("hidden_share")) is not None:
                found += f", {_percent(share)} of the copies under kernels"
        elif row.get("out_of_memory") or (base.get("out_of_memory") and _speed(row)):
            found = _and(_speed_and_peak(row), *["runs out of memory on the device"] * bool(base.get("out_of_memory")))
        else:
            continue
        aim = f"at most {OFFLOAD_AIM:.2f} ×" if aimed else ""
        met = ratio <= OFFLOAD_AIM if aimed and ratio is not None else None
        lines.append(Line(f"{kind} over {OFFLOADED.get(kind, 'device')}, {size} tokens", aim, found, met))
    if any(line.aim for line in lines):
        return lines
    return [Line("activations on the host over the device, 64k tokens", f"at most {OFFLOAD_AIM:.2f} ×"), *lines]


def layerwise(rows: Rows) -> list[Line]:
    """Every parameter of an 8B model."""
    lines = [
        Line(f"AdamW on all 8 B parameters, {name}", "", found)
        for name, row in rows.items()
        if (found := _speed_and_peak(row))
    ]
    return lines or [Line("AdamW on all 8 B parameters: tokens/s and peak")]


def trainer(rows: Rows) -> list[Line]:
    """What fit adds."""
    row = rows.get("1b", {})
    share = row.get("overhead")
    figure, aim = "Trainer.fit over the bare step, LoRA on 1B", f"at most {_percent(OVERHEAD_AIM)}"
    found = "" if share is None else _and(_percent(share, 2), _speed(row))
    lines = [Line(figure, aim, found, None if share is None else share <= OVERHEAD_AIM)]
    return [*lines, Line("bytes of that step, predicted and measured", "", _predicted(rows.get("1b-peak", {})))]


def pipeline(rows: Rows) -> list[Line]:
    """Beside plain accumulation."""
    lines: list[Line] = []
    for name, row in rows.items():
        schedule, _, size = name.rpartition("-")
        ratio = _over(row, rows.get(f"accumulate-{size}", {}))
        if schedule != "accumulate" and ratio is not None:
            count, _, blocks = size.partition("_")
            figure = f"pipeline of one stage, {schedule}, {count} microbatches{', ' * bool(blocks)}{blocks}"
            lines.append(Line(figure, "", f"{ratio:.2f} × plain accumulation"))
    return lines or [Line("a pipeline of one stage beside plain accumulation")]


def tests(rows: Rows) -> list[Line]:
    """The tests marked gpu."""
    counts = [row for row in rows.values() if row.get("num_passed") is not None]
    passed, failed = (sum(row.get(key, 0) for row in counts) for key in ("num_passed", "num_failed"))
    found = f"{passed} passed, {failed} failed" if counts else ""
    return [Line("tests marked gpu", "all pass", found, failed == 0 and passed > 0 if counts else None)]


PARTS: dict[str, tuple[Callable[[Rows], list[Line]], str]] = {
    "smoke": (smoke, "gpu_smoke.py"),
    "peak": (peak, "measured_peak.py"),
    "lora": (lora, "lora_peft.py"),
    "offload": (offload, "offload_time.py"),
    "layerwise": (layerwise, "layerwise_time.py"),
    "trainer": (trainer, "trainer_time.py"),
    "pipeline": (pipeline, "pipeline_time.py"),
    "tests": (tests, "gpu_tests.py"),
}


# --- all of them ---------------------------------------------------------------------------------------------------


def lines(content: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Line]]:
    """The part and line of every figure of one device, measured or not."""
    found: list[tuple[str, Line]] = []
    for part, (make, _) in PARTS.items():
        result = content.get(part, {})
        if result.get("rehearsal"):
            raise ValueError(f"{part} is a rehearsal on {result.get('device_kind')}, not a measurement")
        # Of tests the failed ones count; of anything else a case that failed has no figures.
        rows = {
            name: row if row.get("ok") or "num_failed" in row else {} for name, row in result.get("rows", {}).items()
        }
        found += [(part, line) for line in make(rows)]
    return found


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Every figure of every device with its aim, to read in a terminal."""
    text: list[str] = []
    for device, content in (results or {"no measurements": {}}).items():
        cells = [(part, line.figure, line.aim, line.found, line.state) for part, line in lines(content)]
        cells.insert(0, ("part", "figure", "aim", "found", "state"))
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        rows = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in cells]
        text += [device, *rows, *_failed(content), ""]
    return "\n".join(text)


def block(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """README's table, with the comments around it."""
    rows = [BEGIN, "", "| on a GPU | aim | figure | shown by |", "|---|---|---|---|"]
    for device, content in (results or {"": {}}).items():
        for part, line in lines(content):
            found = line.found + {True: ": met", False: ": **missed**", None: ""}[line.met] if line.found else ""
            figure = f"{line.figure} ({device})" if device and found else line.figure
            shown = f"`python benchmarks/{PARTS[part][1]}`"
            rows.append(f"| {figure} | {line.aim} | {found or 'not measured yet'} | {shown} |")
    return "\n".join([*rows, "", END])


def in_readme(text: str, new: str) -> str:
    """The text with the block in the place of the one it has."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    if len(re.findall(pattern, text, flags=re.DOTALL)) != 1:
        raise ValueError(f"expected one block from {BEGIN} to {END}")
    return re.sub(pattern, lambda _: new, text, flags=re.DOTALL)


# --- words ---------------------------------------------------------------------------------------------------------


def _failed(content: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for part, result in content.items():
        for name, row in result.get("rows", {}).items():
            if not row.get("ok"):
                why = f"not here: {', '.join(row['not_here'])}" if "not_here" in row else f"failed: {_reason(row)}"
                yield f"  {part}/{name}: {why}"


def _reason(row: Mapping[str, Any]) -> str:
    """The exception, which notes and hints may follow, or how the process ended."""
    told = row.get("error", "").strip().splitlines()
    named = [line for line in told if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named[-1:] or told[:1] or ["?"])[0]


def _ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> float | None:
    return ours[key] / theirs[key] if ours.get(key) and theirs.get(key) else None


def _seconds(row: Mapping[str, Any]) -> float | None:
    """The median where every step was timed."""
    found = row.get("seconds_per_step")
    return statistics.median(found) if isinstance(found, list) and found else found or None


def _over(row: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    one, other = _seconds(row), _seconds(base)
    return one / other if one and other else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s" if row.get("tokens_per_second") else ""


def _peak(row: Mapping[str, Any]) -> str:
    return f"peak {_gib(row['peak_bytes'])}" if row.get("peak_bytes") else ""


def _speed_and_peak(row: Mapping[str, Any]) -> str:
    return "runs out of memory" if row.get("out_of_memory") else _and(_speed(row), _peak(row))


def _predicted(row: Mapping[str, Any]) -> str:
    predicted, measured = row.get("predicted_bytes"), row.get("measured_bytes") or row.get("peak_bytes")
    if not predicted or not measured:
        return ""
    return f"{_gib(predicted)} and {_gib(measured)} ({_percent(predicted / measured - 1, 2)} off)"


def _and(*words: str) -> str:
    return ", ".join(word for word in words if word)
