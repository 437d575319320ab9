"""Write the page of a run, `report.html`, from the files in its folder: at its end, after an interrupt, or later.

The page is independent of the objective: it draws the ``loss`` and ``eval_loss`` of the records, whatever they are.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..core import LowtideError, OutputError, format_bytes, write_files
from ..report import Chart, MemoryReport, RunFacts, run_page, versions
from ._config import FinetuneConfig, config_from_dict, flag_of, read_config
from ._runs import CONFIG, DATA, METRICS, read_records

PAGE, PARTS, REPORT = "report.html", "report.json", "memory-report.json"

Record = Mapping[str, Any]


def keep_for_report(
    out: Path,
    memory: MemoryReport,
    tables: Mapping[str, Sequence[tuple[str, str]]],
    samples: Mapping[str, tuple[str, str]],
) -> None:
    """Write the inputs of the page that no other file has.

    Args:
        out: the run's folder.
        memory: the memory report of its step.
        tables: rows of name and text by title.
        samples: prompt and continuation by title. Samples of an earlier call of the run are kept.

    Raises:
        OutputError: when a file cannot be written.
    """
    memory.to_json(out / REPORT)
    parts = {"tables": tables, "samples": {**dict(_texts(_parts(out / PARTS, []).get("samples"))), **samples}}
    write_files(out, {PARTS: (json.dumps(parts, indent=2) + "\n").encode()})


def write_report(out: str | Path) -> Path:
    """Write the page of a finished or unfinished run from the files in its folder.

    Args:
        out: the run's folder.

    Returns:
        Path of the page, `report.html` in that folder: one file that needs no network and no script.

    Raises:
        OutputError: when the folder holds no run, or cannot be written.
        ConfigError: when its `config.toml` is damaged.

    Memory:
        Holds the records on the host.
    """
    out = Path(out)
    if not (out / CONFIG).is_file():
        raise OutputError(f"{out}: no run to report on", expected=f"{out / CONFIG}", hint="name the folder of a run")
    config = config_from_dict(read_config(out / CONFIG), str(out / CONFIG))
    records, notes = read_records(out / METRICS), list[str]()
    parts, memory = _parts(out / PARTS, notes), _memory(out / REPORT, notes)
    num_steps = config.num_steps if config.num_epochs is None else _number(out / DATA, "num_steps")
    verdict, facts = _facts(config, records, num_steps, memory)
    software = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    run = RunFacts(
        name=out.resolve().name,
        verdict=verdict,
        facts=facts,
        charts=_charts(config, records),
        samples={f"Sample {title}": sample for title, sample in _texts(parts.get("samples"))},
        tables={**_tables(parts.get("tables")), "Settings": _settings(config)},
        notes=[*(f"Note: {note}" for note in notes), f"Made with {software}"],
    )
    write_files(out, {PAGE: run_page(run, memory)})
    return out / PAGE


def _charts(config: FinetuneConfig, records: Sequence[Record]) -> list[Chart]:
    tokens = config.batch_size * config.seq_len

    def curve(name: str) -> list[tuple[float, float | None]]:
        return [(record["step"], _value(record, name)) for record in records if name in record]

    speed, cut = _without_peaks([(step, tokens / seconds if seconds else None) for step, seconds in curve("seconds")])
    return [
        Chart(title="Loss, nats per token", curves={"training": curve("loss"), "held out": curve("eval_loss")}),
        Chart(title="Learning rate", curves={"learning rate": curve("learning_rate")}),
        Chart(title="Norm of the gradients, before clipping", curves={"norm": curve("grad_norm")}),
        Chart(title=f"Tokens per second{cut}", curves={"tokens per second": speed}),
    ]


def _without_peaks(points: list[tuple[float, float | None]]) -> tuple[list[tuple[float, float | None]], str]:
    """Clip values above four times the median, and return a note for the title.

    Such values occur when the wait for a step is timed elsewhere, so that the step itself seems fast.
    """
    known = [value for _, value in points if value is not None]
    limit = 4 * statistics.median(known) if known else math.inf
    if max(known, default=0) <= limit:
        return points, ""
    drawn = [(step, None if value is None else min(value, limit)) for step, value in points]
    return drawn, f", cut at {limit:,.0f}"


def _facts(
    config: FinetuneConfig, records: Sequence[Record], num_steps: int | None, memory: MemoryReport | None
) -> tuple[str, list[tuple[str, str]]]:
    done = max((record["step"] for record in records), default=0)
    of = f"{done:,} of {num_steps:,} steps" if num_steps is not None else f"{done:,} steps"
    held_out = [(record["step"], _value(record, "eval_loss")) for record in records]
    known = [(step, value) for step, value in held_out if value is not None]
    verdict = f"{of} done"
    facts = [("Steps", of)]
    if known:
        verdict = f"Held-out loss {known[0][1]:.4f} → {known[-1][1]:.4f} in {of}"
        step, best = min(known, key=lambda point: point[1])
        facts.append(("Least held-out loss", f"{best:.4f} at step {step:,}"))
    times = [value for record in records if (value := _value(record, "seconds"))]
    if times:
        tokens = config.batch_size * config.seq_len
        # Records do not count padding. The table of the data has the share of padding in the rows.
        facts.append(("Tokens in batches, with padding", f"{tokens * len(times):,}"))
        facts.append(("Time in steps", _duration(sum(times))))
        facts.append(("Tokens per second", f"{tokens / statistics.median(times):,.0f} (median)"))
    if memory is not None:
        facts.append(("Device", format_bytes(memory.device_bytes)))
        facts += [("Host", format_bytes(memory.host_bytes))] if memory.host_bytes else []
    return verdict, facts


def _settings(config: FinetuneConfig) -> list[tuple[str, str]]:
    rows = {name: getattr(config, name) for name in type(config).__dataclass_fields__}
    shown = {name: ", ".join(value) if isinstance(value, tuple) else str(value) for name, value in rows.items()}
    return [(flag_of(name).removeprefix("--"), text) for name, text in shown.items() if rows[name] is not None]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours or minutes else f"{seconds:.1f} s"


def _value(record: Record, name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _number(path: Path, name: str) -> int | None:
    try:
        found = json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def _parts(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append("samples are kept by runs with --report")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _memory(path: Path, notes: list[str]) -> MemoryReport | None:
    if not path.is_file():
        notes.append("the memory of a step is kept by runs with --report")
        return None
    try:
        return MemoryReport.from_json(path)
    except LowtideError as error:
        notes.append(f"the memory of a step cannot be shown: {error.message}")
        return None


def _texts(samples: Any) -> list[tuple[str, tuple[str, str]]]:
    items: Any = samples.items() if isinstance(samples, dict) else ()
    return [(title, (str(pair[0]), str(pair[1]))) for title, pair in items if isinstance(pair, list) and len(pair) == 2]


def _tables(tables: Any) -> dict[str, list[tuple[str, str]]]:
    items: Any = tables.items() if isinstance(tables, dict) else ()
    return {title: [row for _, row in _texts(dict(enumerate(rows)))] for title, rows in items if isinstance(rows, list)}
