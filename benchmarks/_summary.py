"""Tables of a GPU day: the figures of every case, and their ratios to the case that the part's rule names.

If two cases did not compute the same values, the table shows the reason and no ratio. A ratio of cases that differ in
versions or commit is labelled, and never meets an aim. Imports only the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from _processes import reason

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
LOSS_TOLERANCE = 0.05  # nats by which the losses of two sides in bfloat16 may differ
VALUE_TOLERANCE = 0.05  # share of the largest value, or of the norm, by which values may differ
ERROR_AIM, OVERHEAD_AIM = 0.03, 0.02
LENGTH_AIM = 342_733  # tokens of QLoRA on Llama 3.1 8B with 80 GB in Unsloth's documentation
LEAST_PROGRAMS = 14  # number of programs whose peaks must be compared before the aim counts as met
VERSIONS = ("jax", "jaxlib", "torch", "transformers", "peft")  # must be equal for both cases of a ratio
FIGURES = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "seconds_per_step": "{:,.3f} s a step",
    "forward_ms": "{:,.1f} ms forward",
    "both_ms": "{:,.1f} ms with gradients",
    "both_tflops": "{:,.0f} TFLOP/s",
    "step_peak_gib": "peak {:,.2f} GiB",
    "both_peak_gib": "peak {:,.2f} GiB",
    "measured_gib": "peak {:,.2f} GiB",
    "peak_gib": "peak {:,.2f} GiB",
    "peak_before_gib": "{:,.2f} GiB before the first step",
    "predicted_gib": "predicted {:,.2f} GiB",
    "host_gib": "{:,.2f} GiB on the host",
    "hidden_percent": "{:.0f} % of the copies under kernels",
    "same_percent": "{:.0f} % of the tokens are Lowtide's, with random weights in bfloat16",
    "overhead_percent": "{:.2f} % over the bare step",
}
RATIOS = {
    "tokens_per_second": "tokens/s",
    "seconds_per_step": "time",
    "forward_ms": "forward time",
    "both_ms": "time with gradients",
    "peak_bytes": "peak",
    "predicted_bytes": "predicted bytes",
}


class Line(NamedTuple):
    """The figures of a case, its ratios, its aim, and whether the aim is met."""

    case: str
    figures: str
    ratios: str = ""
    aim: str = ""
    met: bool | None = None


class Rule(NamedTuple):
    """The cases to compare with, the keys of the ratios, whether losses must agree, and the aim."""

    bases: Callable[[str, Rows], list[str]]
    keys: tuple[str, ...] = ()
    compares: bool = True
    aim: str = ""
    bounds: Mapping[str, tuple[float, float]] = {}


# --- figures and ratios --------------------------------------------------------------------------------------------


def value(row: Row, key: str) -> float | None:
    """Return a figure of a row; the median if every step was timed."""
    entry = row.get(key) or None
    return statistics.median(entry) if isinstance(entry, list) else entry


def figures(row: Row) -> str:
    """Format the figures of a row."""
    words = ["runs out of memory"] if row.get("out_of_memory") else []
    if row.get("loss_after") is not None:
        words.append(f"{row['loss_before']:.4f} → {row['loss_after']:.4f} nats/token")
    if row.get("num_passed") is not None:
        words.append(f"{row['num_passed']} passed, {row['num_failed']} failed")
    shares = {"hidden": row.get("overlap", {}).get("hidden_share"), "same": row.get("share_of_same_tokens")}
    shares |= {"overhead": row.get("overhead")}
    entries = {key: value(row, key) for key in row} | {
        **{f"{key.removesuffix('_bytes')}_gib": row[key] / 2**30 for key in row if key.endswith("_bytes") and row[key]},
        **{f"{key}_percent": 100 * share for key, share in shares.items() if share is not None},
    }
    names = [key for key in FIGURES if entries.get(key) is not None]
    own_peak = {"step_peak_gib", "both_peak_gib", "measured_gib"} & {*names}
    hidden = {"peak_gib"} if own_peak else set[str]()  # creating the model may take more memory than the step
    if (row.get("peak_before_bytes") or 0) < (row.get("predicted_bytes") or 0):
        hidden.add("peak_before_gib")
    if row.get("out_of_memory"):
        hidden |= {key for key in names if "peak" in key}
    names = [key for key in names if key not in hidden]
    return ", ".join([*words, *(FIGURES[key].format(entries[key]) for key in names)])


def amiss(row: Row) -> str:
    """Return why a step is not valid; empty if it is."""
    losses = row.get("losses") or ()
    if row.get("verified") is False:
        return f"not verified: {(row.get('verify_error', '').strip().splitlines() or ['?'])[0]}"
    if not all(map(math.isfinite, losses)):
        return "the loss is no number"
    is_falling = row.get("loss_fell") is not False and (not row.get("side") or not losses or losses[-1] < losses[0])
    return "" if is_falling else "the loss does not fall"


def apart(row: Row, base: Row) -> str:
    """Return why two rows do not compute the same; empty if losses, values and counts agree.

    Losses and values that were not compared do not count as equal.
    """
    both = {**base, **row}
    for key in ("num_trained", "num_parameters"):
        # Each side counts quantised weights as it stores them: bitsandbytes packs several codes into one number.
        if row.get(key) != base.get(key) and (key == "num_trained" or row.get("method") != "qlora"):
            return f"{row.get(key)} of {key}, and {base.get(key)} of the other"
    if "relative_error" in both or "forward_ms" in both:
        error = both.get("relative_error")
        if error is None:
            return "values not compared"
        return "" if error <= VALUE_TOLERANCE else f"values apart by {error:.3g} of their norm"
    difference = both.get("loss_difference")
    if row.get("losses") and base.get("losses"):
        difference = max(abs(ours - theirs) for ours, theirs in zip(row["losses"], base["losses"], strict=False))
    if difference is None or not difference <= LOSS_TOLERANCE:
        return "losses not compared" if difference is None else f"losses apart by {difference:.3g} nats"
    distance, largest = both.get("max_difference"), both.get("largest_value", 1.0)
    is_close = distance is None or distance <= VALUE_TOLERANCE * largest
    return "" if is_close else f"values apart by {distance:.3g}, of at most {largest:.3g}"


def mixed(row: Row, base: Row) -> str:
    """Return a label for a ratio whose rows may differ in commit or versions; empty if they do not."""
    ours, theirs = row.get("versions", {}), base.get("versions", {})
    different = [name for name in VERSIONS if ours.get(name) != theirs.get(name)]
    key = "code_commit" if row.get("code_commit") and base.get("code_commit") else "commit"
    is_dirty = row.get("uncommitted_changes") or base.get("uncommitted_changes")
    if is_dirty or not row.get(key) or row[key] != base.get(key):
        different.append("commit")
    return f"; not of the same {', '.join(different)}" if different else ""


def compared(row: Row, base: Row, rule: Rule) -> tuple[str, bool | None]:
    """Return the ratios of a row to another, or the reason for no ratio, and whether they are within bounds."""
    if row.get("out_of_memory") or base.get("out_of_memory"):
        if not rule.keys or base.get("out_of_memory"):
            return "the other runs out of memory" * bool(base.get("out_of_memory")), None
        return "the other does not run out of memory", False
    if why := amiss(row) or amiss(base) or (apart(row, base) if rule.compares else ""):
        return why, False
    pairs = {key: (value(row, key), value(base, key)) for key in rule.keys}
    ratios = {key: ours / theirs for key, (ours, theirs) in pairs.items() if ours and theirs}
    label = mixed(row, base) if ratios else ""
    within = [low <= ratios[key] <= high for key, (low, high) in rule.bounds.items() if key in ratios]
    words = ", ".join(f"{ratio:.2f} × the {RATIOS[key]}" for key, ratio in ratios.items()) + label
    return words, None if label or not within else all(within)


# --- parts ---------------------------------------------------------------------------------------------------------


def _peers(name: str, rows: Rows) -> list[str]:
    """Return the cases of PEFT or transformers with the same model, shape and method."""
    head, side, tail = name.partition("lowtide")
    starts = (f"{head}peft", f"{head}transformers")
    return [other for other in rows if side and other.startswith(starts) and other.endswith(tail)]


def _offloaded(name: str, rows: Rows) -> list[str]:
    """Return the same step with one more thing on the device."""
    size, _, kind = name.partition("-")
    bases = {
        "activations": "device",
        "remat": "device",
        "inputs": "remat",
        "opt_state": "remat",
        "parameters": "gradients",
    }
    return [f"{size}-{bases[kind]}"] if kind in bases else []


def _first(name: str, rows: Rows) -> list[str]:
    """Return the first step with this method that fits; other methods have other weights, because of quantisation."""
    method = rows[name].get("method")
    return [key for key, row in rows.items() if row.get("tokens_per_second") and row.get("method") == method][:1]


PEFT = Rule(
    _peers,
    ("tokens_per_second", "peak_bytes"),
    aim="1.3 × the tokens/s at 0.7 × the peak",
    bounds={"tokens_per_second": (1.3, math.inf), "peak_bytes": (0, 0.7)},
)
OFFLOAD = Rule(_offloaded, ("seconds_per_step", "peak_bytes"))
RULES = {
    **{"lora": PEFT, "sft": PEFT, "qlora": PEFT, "ladder": Rule(_first), "offload": OFFLOAD},
    "offload/64k-activations": OFFLOAD._replace(aim="at most 1.1 × the time", bounds={"seconds_per_step": (0, 1.1)}),
    "offload/64k-inputs": OFFLOAD._replace(aim="at most 1.1 × the time", bounds={"seconds_per_step": (0, 1.1)}),
    "generate": Rule(_peers, ("tokens_per_second",), compares=False),
    "attention": Rule(lambda name, rows: [name.replace("-blocks", "-cudnn")], ("forward_ms", "both_ms")),
    "copies": Rule(lambda name, rows: ["device"], ("seconds_per_step",)),
    "optimizer": Rule(
        lambda name, rows: ["host-float32" if name.startswith("host-") else "float32"],
        ("seconds_per_step", "predicted_bytes"),
        compares=False,
    ),
    "layerwise": Rule(lambda name, rows: [f"{name.partition('-')[0]}-device"]),
    "pipeline": Rule(lambda name, rows: [f"accumulate-{name.rpartition('-')[2]}"], ("seconds_per_step",)),
}


def all_programs(rows: Rows, cases: set[str], measured: Rows) -> Line:
    """Compare the compiled and measured peaks of all programs."""
    errors = {name: abs(row["error"]) for name, row in measured.items() if row.get("error") is not None}
    # The compiler's autotuning may allocate more than the step. Such a run measures no error, and is only counted.
    covered = sum(bool(row.get("covered")) for row in measured.values())
    failed = sum(not row.get("ok") and not row.get("not_here") for row in rows.values())
    absent, words, met = len(cases - {*rows}), list[str](), None
    programs, known = ({name.removesuffix("-growing") for name in names} for names in (errors, cases))
    if errors:
        worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
        median = 100 * statistics.median(errors.values())
        words = [f"median error {median:.2f} %, worst {100 * errors[worst]:.2f} % ({worst})"]
        is_whole = not failed and not absent and len(programs) >= LEAST_PROGRAMS
        met = (True if is_whole else None) if errors[worst] <= ERROR_AIM else False
    words += [f"{covered} of {covered + len(errors)} runs below the compiler's own peak"] if covered else []
    words += [f"{count} {what}" for count, what in ((failed, "runs failed"), (absent, "not made")) if count]
    aim = f"within {100 * ERROR_AIM:.0f} %, also the worst"
    return Line(f"{len(programs)} of {len(known | programs)} programs", "; ".join(words), aim=aim, met=met)


def longest(measured: Rows) -> Line:
    """Return the line of the longest sequence that was trained on."""
    lost = min((row["length"] for row in measured.values() if row.get("out_of_memory")), default=0)
    fits = (row["length"] for row in measured.values() if row.get("tokens_per_second") and not amiss(row))
    most = max(fits, default=0)
    words = [f"{most:,} tokens"] * bool(most) + [f"{lost:,} run out of memory"] * bool(lost)
    met = True if most >= LENGTH_AIM else False if lost else None
    return Line("longest sequence", "; ".join(words), aim=f"at least {LENGTH_AIM:,} tokens", met=met)


def all_tests(rows: Rows, cases: set[str]) -> Line:
    """Return the line of the tests marked gpu; the aim is met only if every file ran and passed."""
    passed, failed = (sum(row.get(f"num_{key}", 0) for row in rows.values()) for key in ("passed", "failed"))
    is_met = not failed and passed > 0 and all(row.get("ok") for row in rows.values())
    absent = len(cases - {*rows})
    words = f"{passed} passed, {failed} failed" + f"; {absent} files were not run" * bool(absent)
    return Line("all files", words, aim="all pass", met=None if is_met and absent else is_met)


def lines(part: str, content: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of a part on one device; exit if the result is a rehearsal."""
    if content.get("rehearsal"):
        raise SystemExit(f"{part} is a rehearsal on {content['device_kind']}, not a measurement")
    rows, cases = content["rows"], {*(content.get("cases") or content["rows"])}
    measured: dict[str, Row] = {}
    for name, row in rows.items():
        if row.get("ok") is True and not row.get("not_tried"):
            runs = row.get("runs", {})
            measured |= {f"{name}, {shape}": {**row, **run, "out_of_memory": False} for shape, run in runs.items()}
            measured |= {name: row} if not runs or row.get("out_of_memory") else {}
    if part in ("peak", "tests"):
        yield all_programs(rows, cases, measured) if part == "peak" else all_tests(rows, cases)
        return
    if part == "longest":
        yield longest(measured)
    for name, row in measured.items():
        why, rule = amiss(row), RULES.get(f"{part}/{name}") or RULES.get(part, Rule(lambda name, rows: []))
        line = Line(row.get("rung", name), why or figures(row), met=False if why else None)
        if row.get("overhead") is not None:
            line = line._replace(aim=f"at most {100 * OVERHEAD_AIM:.0f} %", met=row["overhead"] <= OVERHEAD_AIM)
        if row.get("loss_after") is not None:
            line = line._replace(aim="the loss falls", met=row["loss_after"] < row["loss_before"])
        bases = [base for base in rule.bases(name, measured) if base in measured and base != name]
        for base in bases:
            words, met = compared(row, measured[base], rule)
            yield line._replace(ratios=words and f"over {base}: {words}", aim=rule.aim, met=met)
        if not bases and line.figures:
            yield line


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a Markdown table per device, followed by its failures and the parts without a result."""
    text: list[str] = []
    for device, content in results.items():
        text += [f"## {device}", "", "| part | case | measured | compared | aim | met |", "|---|---|---|---|---|---|"]
        for part in content:
            for line in lines(part, content[part]):
                cells = (part, *line[:-1], {None: "", True: "yes", False: "**no**"}[line.met])
                text.append(f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |")
        text.append("")
        for part, result in content.items():
            for name, row in result["rows"].items():
                if row.get("ok") is not True:
                    absent = row.get("not_here")
                    why = f"not here: {', '.join(absent)}" if absent else f"failed: {reason(row.get('error') or '')}"
                    text.append(f"- {part}/{name}: {why}")
        text.append("")
    return "\n".join(text) or "no results"
