"""The folder of a run: checks before a start or a resume, the metrics file, and the reports.

config.toml     settings of the run
data.json       digest of the tokens; settings, number of steps and date at the start of the run
metrics.jsonl   one record a line
checkpoints/    trainable state only
adapter/        the adapter in PEFT's format, or
model/          the model, if the whole model was tuned
memory.json     bytes of the step
plan.json       what the step keeps of each layer, for a run with a budget
report.html     with `report`, one page about the run; report.json and memory-report.json hold its further inputs

The page is written from these files: at the end of a run, after an interrupt, or later.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..core import ConfigError, LowtideError, OutputError, check_writable, format_bytes, is_count, write_files
from ..distributed import call_on_first, check_equal
from ..planning import Plan
from ..report import Chart, MemoryReport, RunFacts, run_page, versions
from ..train import Callback
from ._config import FinetuneConfig, config_from_dict, config_to_toml, flag_of, read_config

CONFIG, METRICS, MEMORY, DATA, PLAN = "config.toml", "metrics.jsonl", "memory.json", "data.json", "plan.json"
CHECKPOINTS, ADAPTER, MODEL = "checkpoints", "adapter", "model"
PAGE, PARTS, REPORT = "report.html", "report.json", "memory-report.json"
_PATHS = tuple(field.name for field in dataclasses.fields(FinetuneConfig) if field.metadata.get("path"))
_EDITABLE = tuple(field.name for field in dataclasses.fields(FinetuneConfig) if field.metadata.get("editable"))


def open_run(out: str | Path, values: Mapping[str, Any], where: str, *, resume: bool) -> FinetuneConfig:
    """Determine a run's configuration, and check that its folder can be used.

    Args:
        out: the run's folder.
        values: configuration values of the call.
        where: source of these values, for messages.
        resume: whether to continue the run in `out`. Then the `config.toml` in `out` applies. `values` must
            agree with this file, but may set a larger number of steps.

    Returns:
        The configuration.

    Raises:
        OutputError: when `out` cannot be written, is not empty (without `resume`), or has no run to resume.
        ConfigError: for unusable values, or values that differ from the settings of the run to resume.
    """
    check_equal("arguments", json.dumps(values, default=str, sort_keys=True))
    saved = call_on_first(lambda: config_to_toml(_open_run(Path(out), values, where, resume=resume)))
    return config_from_dict(tomllib.loads(saved), where)


def _open_run(out: Path, values: Mapping[str, Any], source: str, *, resume: bool) -> FinetuneConfig:
    # Absolute paths allow a resume from another working directory. An empty string means that no path is given.
    paths = {name: values[name] for name in _PATHS if isinstance(values.get(name), str) and values[name]}
    values = {**values, **{name: _absolute_path(Path(path)) for name, path in paths.items()}}
    try:
        is_used = (out / CONFIG).is_file() if resume else out.is_dir() and any(out.iterdir())
    except OSError as error:
        hint = "choose an --out that you may read and write"
        raise OutputError(f"{out}: cannot be read", got=error.strerror or error, hint=hint) from error
    if resume:
        if not is_used:
            hint = f"start the run without --resume; the folder has no {CONFIG}"
            raise OutputError(f"{out}: the folder has no run to resume", hint=hint)
        saved = read_config(out / CONFIG)
        config = config_from_dict(saved, str(out / CONFIG))
        if config.num_epochs is not None and "num_steps" in values and "num_epochs" not in values:
            if not (start := _read_start(out)):
                problem = f"the run of {config.num_epochs} epochs has not started, so its steps cannot be raised"
                raise ConfigError(f"{out}: {problem}", hint="leave --steps out, or start a run in another --out")
            config = dataclasses.replace(config, num_epochs=None, num_steps=start["num_steps"])
            saved = {name: value for name, value in saved.items() if name != "num_epochs"}
        requested = config_from_dict({**saved, **values}, source)
        if requested.num_steps > config.num_steps:
            # The schedule keeps its length. If it covered the new number of steps, the learning rate would jump up.
            steps = {"num_steps": requested.num_steps, "schedule_steps": config.schedule_steps or config.num_steps}
            config = dataclasses.replace(config, **steps)
        changed = [name for name, old in vars(config).items() if name in values and old != getattr(requested, name)]
        if changed:
            old, new = (_describe_settings(vars(settings), changed) for settings in (config, requested))
            hint = (
                f"leave them out to continue with {out / CONFIG}, where you may edit settings that change bytes but no "
                "losses, or start a run in another --out; only --steps may be larger"
            )
            problem = "--resume does not match the configuration of this run"
            raise ConfigError(f"{out}: {problem}", expected=old, got=new, hint=hint)
    else:
        config = config_from_dict(values, source)
        if is_used:
            hint = "continue that run with --resume, or choose another --out; nothing in it was changed"
            raise OutputError(f"{out}: the folder is not empty", hint=hint)
    check_writable(out, "cannot be written", "choose an --out that you may write to")
    return config


def _absolute_path(path: Path) -> str:
    """Resolve the links of a path, except a link to a GGUF file: in a Hugging Face cache, its target has no suffix."""
    return str(path.parent.resolve() / path.name if path.suffix.lower() == ".gguf" else path.resolve())


def write_config(out: Path, config: FinetuneConfig) -> None:
    """Write `config.toml` atomically."""
    write_files(out, {CONFIG: config_to_toml(config).encode()})


def start_day(out: Path) -> str:
    """Return the day on which a run began, such as ``2025-01-31``; today for a run without a recorded day.

    Chat templates may write the date, and a run resumed on another day needs the same tokens.
    """
    return _read_start(out).get("day") or datetime.date.today().isoformat()


def check_same_run(out: Path, config: FinetuneConfig, digest: str, day: str | None = None) -> None:
    """Record a run's settings and the digest of its tokens when it starts; raise ConfigError if a resumed run differs.

    Only the first process calls this. `digest` is the hash of the run's tokens, and `day` comes from `start_day`.
    """
    settings, start = _loss_settings(config), _read_start(out)
    if not start:
        start = {"sha256_of_tokens": digest, "settings": settings, "num_steps": config.num_steps, "day": day}
        write_files(out, {DATA: (json.dumps(start) + "\n").encode()})
        return
    old_settings = start["settings"]
    changed = [name for name in sorted(old_settings.keys() & settings.keys()) if old_settings[name] != settings[name]]
    if changed:
        old, new = (_describe_settings(values, changed) for values in (old_settings, settings))
        hint = "restore it, or start a run in another --out; for more steps use --resume --steps"
        raise ConfigError(f"{out / CONFIG} was changed since the run started", expected=old, got=new, hint=hint)
    if start["sha256_of_tokens"] != digest:
        hint = "restore both, so that the losses are those of one run, or start a run in another --out"
        raise ConfigError(f"{out}: the data or the tokenizer changed since this run started", hint=hint)


def check_checkpoint(out: Path, config: FinetuneConfig, resumed_at: int | None) -> None:
    """Raise OutputError for a run without a checkpoint if its metrics prove that checkpoints were deleted.

    A kill before the first checkpoint is complete leaves records but no checkpoint, and then the run may restart.
    """
    # The first checkpoint is complete when the second one starts, or when the run has ended. The second one starts
    # after the record of step 2 * checkpoint_every and before the next record.
    last_step = max((record["step"] for record in read_records(out / METRICS)), default=0)
    has_saved = last_step > 2 * config.checkpoint_every or (out / MEMORY).is_file()
    if resumed_at is None and has_saved:
        problem = f"the folder has no checkpoint of a run that has recorded {last_step} steps"
        hint = "restore the folder, or start again with another --out; nothing was changed"
        raise OutputError(f"{out / CHECKPOINTS}: {problem}", hint=hint)


class MetricsFile(Callback):
    """Writer of `metrics.jsonl`, which appends and flushes one record a line.

    `keep_through` is the step at which the run continues. Later records are dropped, so the file reads as if the run
    had never stopped. None drops all records.
    """

    def __init__(self, path: Path, keep_through: int | None) -> None:
        self._file, self._path, self._last_step = None, path, 0
        if jax.process_index():  # only the first process writes
            return
        self._open(keep_through)

    def _open(self, keep_through: int | None) -> None:
        path = self._path
        records = [] if keep_through is None else [r for r in read_records(path) if r["step"] <= keep_through]
        write_files(path.parent, {path.name: "".join(json.dumps(record) + "\n" for record in records).encode()})
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; if the run went back to an earlier step, drop the records that it makes again."""
        if self._file is None:
            return
        if "loss" in record:
            if record["step"] <= self._last_step:
                self._file.close()
                self._open(record["step"] - 1)
            self._last_step = record["step"]
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def state(self) -> None:
        """Sync the file to disk before every checkpoint, so that its records survive a power cut."""
        if self._file is not None and not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self.state()
            self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the complete records of a metrics file; a line truncated by a kill is skipped."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def _describe_settings(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} = {values[name]!r}" for name in names)


def _loss_settings(config: FinetuneConfig) -> dict[str, Any]:
    """Return the settings that determine a run's losses, without paths, since files may be moved."""
    # With dropout the tile size changes losses, since each tile draws its own mask.
    editable = {*_EDITABLE} - ({"tile_tokens"} if config.lora_dropout and config.tile_tokens else set[str]())
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in editable}
    return json.loads(json.dumps({**values, "schedule_steps": config.schedule_steps or config.num_steps}))


def read_plan(out: Path) -> Plan | None:
    """Return the plan with which a run began, or None; a damaged file raises OutputError."""
    if not (out / PLAN).is_file():
        return None
    try:
        return Plan.from_json((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, LowtideError) as error:
        hint = "remove it to continue without a plan, or pass --budget to plan again"
        raise OutputError(f"{out / PLAN}: the file is damaged", got=str(error), hint=hint) from error


def _read_start(out: Path) -> dict[str, Any]:
    """Return what `check_same_run` recorded when the run began; empty for a run that has not started."""
    if not (out / DATA).is_file():
        return {}
    try:
        start = json.loads((out / DATA).read_text())
        if start["day"] is not None:
            datetime.date.fromisoformat(start["day"])
        if not is_count(start["num_steps"], 1):
            raise ValueError(f"num_steps is {start['num_steps']!r}")
        return {**start, "settings": dict(start["settings"]), "sha256_of_tokens": str(start["sha256_of_tokens"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "restore it, or start a run in another --out"
        raise OutputError(f"{out / DATA}: the file is damaged", got=str(error), hint=hint) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Bytes of a fine-tuning step, as the compiler reports them or counted from shapes."""

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
    """Gradients of the step in `naive`; None without a comparison."""
    naive: MemoryReport | None = None
    """Report of the naive step: AdamW over the whole model on the device, with frozen leaves behind `stop_gradient`.
    None if it does not compile for lack of memory, or without a comparison."""

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


def save_report_inputs(
    out: Path,
    memory: MemoryReport,
    tables: Mapping[str, Sequence[tuple[str, str]]],
    samples: Mapping[str, tuple[str, str]],
) -> None:
    """Write the inputs of the page that no other file of the run has; samples that an earlier call wrote are kept."""
    memory.to_json(out / REPORT)
    parts = {"tables": tables, "samples": {**_read_parts(out, [])[1], **samples}}
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
        hint = f"name the folder of a run, which has {CONFIG}"
        raise OutputError(f"{out}: the folder has no run to report on", hint=hint)
    config = config_from_dict(read_config(out / CONFIG), str(out / CONFIG))
    records, notes = read_records(out / METRICS), list[str]()
    (tables, samples), memory = _read_parts(out, notes), _read_memory(out / REPORT, notes)
    num_steps = config.num_steps
    if config.num_epochs is not None:
        try:
            num_steps = _read_start(out).get("num_steps")
        except OutputError as error:
            num_steps = None
            notes.append(error.message)
    verdict, facts = _facts(config, records, num_steps, memory)
    software = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    run = RunFacts(
        name=out.resolve().name,
        verdict=verdict,
        facts=facts,
        charts=_charts(config, records),
        samples={f"Sample {title}": sample for title, sample in samples.items()},
        tables={**tables, "Settings": _settings(config)},
        notes=[*(f"Note: {note}" for note in notes), f"Made with {software}"],
    )
    write_files(out, {PAGE: run_page(run, memory)})
    return out / PAGE


def _charts(config: FinetuneConfig, records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    tokens = config.batch_size * config.seq_len

    def curve(name: str) -> list[tuple[float, float | None]]:
        return [(record["step"], _value(record, name)) for record in records if name in record]

    speed, note = _clip_peaks([(step, tokens / seconds if seconds else None) for step, seconds in curve("seconds")])
    unit = config.loss_unit.replace("/", " per ")
    name = "accuracy" if config.objective in ("classification", "embedding") else "rewards/accuracies"
    accuracy = {"training": curve(name), "held out": curve(f"eval_{name}")}
    title = "Accuracy" if name == "accuracy" else "Share of pairs ranked as preferred"
    preference = [Chart(title=title, curves=accuracy)] if accuracy["training"] else []
    return [
        Chart(title=f"Loss, {unit}", curves={"training": curve("loss"), "held out": curve("eval_loss")}),
        *preference,
        Chart(title="Learning rate", curves={"learning rate": curve("learning_rate")}),
        Chart(title="Norm of the gradients, before clipping", curves={"norm": curve("grad_norm")}),
        Chart(title=f"Tokens per second{note}", curves={"tokens per second": speed}),
    ]


def _clip_peaks(points: list[tuple[float, float | None]]) -> tuple[list[tuple[float, float | None]], str]:
    """Return a curve of speeds, clipped at four times the median, and a note for the title ("" if nothing is clipped).

    Higher speeds are artefacts: the wait for a step was not counted in its time, so the step seems fast.
    """
    values = [value for _, value in points if value is not None]
    limit = 4 * statistics.median(values) if values else math.inf
    if max(values, default=0) <= limit:
        return points, ""
    clipped = [(step, None if value is None else min(value, limit)) for step, value in points]
    return clipped, f", cut at {limit:,.0f}"


def _facts(
    config: FinetuneConfig, records: Sequence[Mapping[str, Any]], num_steps: int | None, memory: MemoryReport | None
) -> tuple[str, list[tuple[str, str]]]:
    last_step = max((record["step"] for record in records), default=0)
    progress = f"{last_step:,} of {num_steps:,} steps" if num_steps is not None else f"{last_step:,} steps"
    losses = [(record["step"], loss) for record in records if (loss := _value(record, "eval_loss")) is not None]
    verdict = f"{progress} done"
    facts = [("Steps", progress)]
    if losses:
        verdict = f"Held-out loss {losses[0][1]:.4f} → {losses[-1][1]:.4f} in {progress}"
        step, best = min(losses, key=lambda point: point[1])
        facts.append(("Lowest held-out loss", f"{best:.4f} at step {step:,}"))
    times = [value for record in records if (value := _value(record, "seconds"))]
    if times:
        tokens = config.batch_size * config.seq_len
        # Records have no count of padding tokens; the table of the data has their share.
        facts.append(("Tokens in batches, with padding", f"{tokens * len(times):,}"))
        facts.append(("Time in steps", _duration(sum(times))))
        facts.append(("Tokens per second", f"{tokens / statistics.median(times):,.0f} (median)"))
    if memory is not None:
        facts.append(("Device", format_bytes(memory.device_bytes)))
        facts += [("Host", format_bytes(memory.host_bytes))] if memory.host_bytes else []
    return verdict, facts


def _settings(config: FinetuneConfig) -> list[tuple[str, str]]:
    values: dict[str, Any] = {name: value for name, value in vars(config).items() if value is not None}
    texts = {name: ", ".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()}
    return [(flag_of(name).removeprefix("--"), text) for name, text in texts.items()]


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours or minutes else f"{seconds:.1f} s"


def _value(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _read_parts(out: Path, notes: list[str]) -> tuple[dict[str, list[tuple[str, str]]], dict[str, tuple[str, str]]]:
    """Read tables and samples from `report.json`, as `save_report_inputs` wrote them."""
    tables: dict[str, list[tuple[str, str]]] = {}
    samples: dict[str, tuple[str, str]] = {}
    try:
        parts = json.loads((out / PARTS).read_bytes())
        for title, (prompt, text) in parts["samples"].items():
            samples[title] = str(prompt), str(text)
        for title, rows in parts["tables"].items():
            tables[title] = [(str(name), str(text)) for name, text in rows]
    except FileNotFoundError:
        notes.append("only runs with --report keep samples")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        notes.append(f"{PARTS} cannot be read: {error}")
    return tables, samples


def _read_memory(path: Path, notes: list[str]) -> MemoryReport | None:
    if not path.is_file():
        notes.append("only runs with --report keep the memory of a step")
        return None
    try:
        return MemoryReport.from_json(path)
    except LowtideError as error:
        notes.append(f"the memory of a step cannot be shown: {error.message}")
        return None
