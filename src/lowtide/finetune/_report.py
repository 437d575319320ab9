"""Reports of a run: the memory table of its step, and the page `report.html`.

The page is written from the files in the run's folder: at its end, after an interrupt, or later. It is independent of
the objective: it draws the ``loss`` and ``eval_loss`` of the records, whatever they are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from ..core import LowtideError, OutputError, format_bytes, write_files
from ..report import Chart, MemoryReport, RunFacts, run_page, versions
from ._config import FinetuneConfig, config_from_dict, flag_of, read_config
from ._run_folder import CONFIG, DATA, METRICS, read_records

PAGE, PARTS, REPORT = "report.html", "report.json", "memory-report.json"
_Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of a fine-tuning step; all figures are compiled or counted from shapes."""

    ours: MemoryReport
    """Report of the step that runs."""
    trainable_bytes: int
    """Adapters, or the whole model with `full`, without padding."""
    frozen_bytes: int
    """The base of the adapters, without padding."""
    gradient_bytes: int
    """Gradients of our step that are live at the same time: of all adapters; with `full`, of one layer or the largest
    outer leaf, plus a tied embedding."""
    optimizer_bytes: int
    """Optimizer state."""
    naive_gradient_bytes: int | None = None
    """Gradient tree of the naive step; None without a comparison."""
    naive: MemoryReport | None = None
    """Report of AdamW over the whole model, all on the device, with frozen leaves behind stop_gradient.

    None when it does not compile for lack of memory, or without a comparison.
    """

    @property
    def is_compared(self) -> bool:
        """Whether the table has figures of the naive step."""
        return self.naive_gradient_bytes is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `memory.json`; keys that begin with ``naive_`` are present only with a comparison."""
        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "int"}
        naive = {
            "naive_gradient_bytes": self.naive_gradient_bytes,
            "naive_device_bytes": None if self.naive is None else self.naive.device_bytes,
            "naive_by_role": None if self.naive is None else dict(self.naive.by_role),
        }
        return {
            "target": self.ours.target.name,
            **counts,
            "device_bytes": self.ours.device_bytes,
            "host_bytes": self.ours.host_bytes,
            "by_role": dict(self.ours.by_role),
            "host_by_role": dict(self.ours.host_by_role),
            **(naive if self.is_compared else {}),
            "measured_peak_bytes": measured_peak_bytes(),
            "chip": self.ours.target.chip,
            "versions": versions(),
        }


def measured_peak_bytes() -> int | None:
    """Return the peak bytes of JAX's allocator on the first device so far; None where it keeps no count (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


# --- page ------------------------------------------------------------------------------------------------------------


def save_report_inputs(
    out: Path,
    memory: MemoryReport,
    tables: Mapping[str, Sequence[tuple[str, str]]],
    samples: Mapping[str, tuple[str, str]],
) -> None:
    """Write the inputs of the page that no other file has.

    `tables` are rows of name and text by title, and `samples` prompt and continuation by title. Samples of an earlier
    call for the run stay in the file.
    """
    memory.to_json(out / REPORT)
    parts = {"tables": tables, "samples": {**dict(_text_pairs(_read_parts(out / PARTS, []).get("samples"))), **samples}}
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
        raise OutputError(
            f"{out}: the folder has no run to report on", expected=f"{out / CONFIG}", hint="name the folder of a run"
        )
    config = config_from_dict(read_config(out / CONFIG), str(out / CONFIG))
    records, notes = read_records(out / METRICS), list[str]()
    parts, memory = _read_parts(out / PARTS, notes), _read_memory(out / REPORT, notes)
    num_steps = config.num_steps if config.num_epochs is None else _read_count(out / DATA, "num_steps")
    verdict, facts = _facts(config, records, num_steps, memory)
    software = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    run = RunFacts(
        name=out.resolve().name,
        verdict=verdict,
        facts=facts,
        charts=_charts(config, records),
        samples={f"Sample {title}": sample for title, sample in _text_pairs(parts.get("samples"))},
        tables={**_table_rows(parts.get("tables")), "Settings": _settings(config)},
        notes=[*(f"Note: {note}" for note in notes), f"Made with {software}"],
    )
    write_files(out, {PAGE: run_page(run, memory)})
    return out / PAGE


def _charts(config: FinetuneConfig, records: Sequence[_Record]) -> list[Chart]:
    tokens = config.batch_size * config.seq_len

    def curve(name: str) -> list[tuple[float, float | None]]:
        return [(record["step"], _value(record, name)) for record in records if name in record]

    speed, note = _clip_peaks([(step, tokens / seconds if seconds else None) for step, seconds in curve("seconds")])
    return [
        Chart(title="Loss, nats per token", curves={"training": curve("loss"), "held out": curve("eval_loss")}),
        Chart(title="Learning rate", curves={"learning rate": curve("learning_rate")}),
        Chart(title="Norm of the gradients, before clipping", curves={"norm": curve("grad_norm")}),
        Chart(title=f"Tokens per second{note}", curves={"tokens per second": speed}),
    ]


def _clip_peaks(points: list[tuple[float, float | None]]) -> tuple[list[tuple[float, float | None]], str]:
    """Clip values above four times the median, and return a note for the title.

    Such values occur when the wait for a step is timed elsewhere, so that the step itself seems fast.
    """
    values = [value for _, value in points if value is not None]
    limit = 4 * statistics.median(values) if values else math.inf
    if max(values, default=0) <= limit:
        return points, ""
    clipped = [(step, None if value is None else min(value, limit)) for step, value in points]
    return clipped, f", cut at {limit:,.0f}"


def _facts(
    config: FinetuneConfig, records: Sequence[_Record], num_steps: int | None, memory: MemoryReport | None
) -> tuple[str, list[tuple[str, str]]]:
    last_step = max((record["step"] for record in records), default=0)
    progress = f"{last_step:,} of {num_steps:,} steps" if num_steps is not None else f"{last_step:,} steps"
    held_out = [(record["step"], _value(record, "eval_loss")) for record in records]
    losses = [(step, value) for step, value in held_out if value is not None]
    verdict = f"{progress} done"
    facts = [("Steps", progress)]
    if losses:
        verdict = f"Held-out loss {losses[0][1]:.4f} → {losses[-1][1]:.4f} in {progress}"
        step, best = min(losses, key=lambda point: point[1])
        facts.append(("Lowest held-out loss", f"{best:.4f} at step {step:,}"))
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
    texts = {name: ", ".join(value) if isinstance(value, tuple) else str(value) for name, value in rows.items()}
    return [(flag_of(name).removeprefix("--"), text) for name, text in texts.items() if rows[name] is not None]


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours or minutes else f"{seconds:.1f} s"


def _value(record: _Record, name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _read_count(path: Path, name: str) -> int | None:
    try:
        value = json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, int) else None


def _read_parts(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append("only runs with --report keep samples")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}


def _read_memory(path: Path, notes: list[str]) -> MemoryReport | None:
    if not path.is_file():
        notes.append("only runs with --report keep the memory of a step")
        return None
    try:
        return MemoryReport.from_json(path)
    except LowtideError as error:
        notes.append(f"the memory of a step cannot be shown: {error.message}")
        return None


def _text_pairs(samples: Any) -> list[tuple[str, tuple[str, str]]]:
    items: Any = samples.items() if isinstance(samples, dict) else ()
    return [(title, (str(pair[0]), str(pair[1]))) for title, pair in items if isinstance(pair, list) and len(pair) == 2]


def _table_rows(tables: Any) -> dict[str, list[tuple[str, str]]]:
    items: Any = tables.items() if isinstance(tables, dict) else ()
    return {
        title: [row for _, row in _text_pairs(dict(enumerate(rows)))] for title, rows in items if isinstance(rows, list)
    }
