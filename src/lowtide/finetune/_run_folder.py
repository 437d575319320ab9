"""The folder of a run: checks before a start or a resume, and the metrics file.

config.toml     settings of the run
data.json       digest of the tokens, settings, steps and day that the run began with
metrics.jsonl   one record a line
checkpoints/    trainable state only
adapter/        the adapter in PEFT's format, or
model/          the model, if the whole model was tuned
memory.json     bytes of the step
report.html     with `report`, one page about the run; report.json and memory-report.json hold its further inputs
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from ..core import ConfigError, OutputError, check_writable, is_count, write_files
from ..distributed import of_first, same_in_all
from ..train import Callback
from ._config import FinetuneConfig, config_from_dict, config_to_toml, read_config

CONFIG, METRICS, MEMORY, DATA = "config.toml", "metrics.jsonl", "memory.json", "data.json"
CHECKPOINTS, ADAPTER, MODEL = "checkpoints", "adapter", "model"
_PATHS = ("model", "tokenizer", "data", "eval_data", "chat_template")
_EDITABLE = (
    *_PATHS,
    *("num_steps", "eval_every", "checkpoint_every", "sample_tokens"),
    *("num_microbatches", "offload", "remat", "layers_per_remat", "tile_tokens", "attention", "num_epochs"),
    *("track", "project", "run_name", "report"),
    *("max_to_keep", "keep_best", "load_best_at_end", "early_stopping_patience", "early_stopping_threshold"),
)
"""Settings that may be edited before a run is resumed: they change outputs, their times and bytes, but no losses."""


def open_run(out: str | Path, values: Mapping[str, Any], where: str, *, resume: bool) -> FinetuneConfig:
    """Determine a run's configuration, and check that its folder can be used.

    Args:
        out: the run's folder.
        values: configuration values of the call.
        where: source of these values, for messages.
        resume: continue the run in `out`. Its own `config.toml` applies, and `values` must not contradict it, except
            for a larger number of steps.

    Returns:
        The configuration.

    Raises:
        OutputError: when `out` is not empty and `resume` is not set, cannot be written, or has nothing to resume.
        ConfigError: for unusable values, or values that differ from those of the run to resume.
    """
    same_in_all("arguments", json.dumps(values, default=str, sort_keys=True))
    saved = of_first(lambda: config_to_toml(_open_run(Path(out), values, where, resume=resume)))
    return config_from_dict(tomllib.loads(saved), where)


def _open_run(out: Path, values: Mapping[str, Any], source: str, *, resume: bool) -> FinetuneConfig:
    # Absolute paths allow a resume from another working directory. An empty string means that no path is given.
    paths = {name: values[name] for name in _PATHS if isinstance(values.get(name), str) and values[name]}
    values = {**values, **{name: _absolute_path(Path(path)) for name, path in paths.items()}}
    if resume:
        if not _read_folder(out, lambda: (out / CONFIG).is_file()):
            raise OutputError(
                f"{out}: the folder has no run to resume",
                expected=f"{out / CONFIG}",
                hint="start the run without --resume",
            )
        saved = read_config(out / CONFIG)
        config = config_from_dict(saved, str(out / CONFIG))
        if config.num_epochs is not None and "num_steps" in values and "num_epochs" not in values:
            config = _epochs_to_steps(out, config)
            saved = {name: value for name, value in saved.items() if name != "num_epochs"}
        requested = config_from_dict({**saved, **values}, source)
        if requested.num_steps > config.num_steps:
            # The schedule keeps its length. Stretched over the new number of steps, the learning rate would jump up.
            steps = {"num_steps": requested.num_steps, "schedule_steps": config.schedule_steps or config.num_steps}
            config = dataclasses.replace(config, **steps)
        _refuse_other_config(config, requested, values, out)
    else:
        config = config_from_dict(values, source)
        if _read_folder(out, lambda: out.is_dir() and any(out.iterdir())):
            raise OutputError(
                f"{out}: the folder is not empty",
                hint="continue that run with --resume, or choose another --out; nothing in it was changed",
            )
    check_writable(out, "cannot be written", "choose an --out that you may write to")
    return config


def _absolute_path(path: Path) -> str:
    """Resolve a path. The last link of a GGUF file is kept: in a Hugging Face cache its target has another name."""
    return str(path.parent.resolve() / path.name if path.suffix.lower() == ".gguf" else path.resolve())


def _epochs_to_steps(out: Path, config: FinetuneConfig) -> FinetuneConfig:
    """Replace `num_epochs` with the number of steps that the run's first call recorded."""
    num_steps = json.loads((out / DATA).read_text()).get("num_steps") if (out / DATA).is_file() else None
    if not is_count(num_steps, 1):
        raise ConfigError(
            f"{out}: the run of {config.num_epochs} epochs has not started, so its steps cannot be raised",
            hint="leave --steps out, or start a run in another --out",
        )
    return dataclasses.replace(config, num_epochs=None, num_steps=num_steps)


def write_config(out: Path, config: FinetuneConfig) -> None:
    """Write `config.toml` atomically."""
    write_files(out, {CONFIG: config_to_toml(config).encode()})


def start_day(out: Path) -> str:
    """Return the day on which a run began, such as ``2025-01-31``; today for a new run or one without a recorded day.

    Chat templates may write the date, and a run resumed on another day needs the same tokens.
    """
    path, today = out / DATA, datetime.date.today().isoformat()
    return _read_start(path)[2] or today if path.is_file() else today


def check_same_run(out: Path, config: FinetuneConfig, digest: str, day: str | None = None) -> None:
    """Refuse to resume with other tokens or settings than those of the first call, which records them (ConfigError).

    Only the first process calls this. `digest` is that of the run's tokens, and `day` comes from `start_day`.
    """
    path, settings = out / DATA, _loss_settings(config)
    if not path.is_file():
        start = {"sha256_of_tokens": digest, "settings": settings, "num_steps": config.num_steps, "day": day}
        write_files(out, {DATA: (json.dumps(start) + "\n").encode()})
        return
    old_digest, old_settings, _ = _read_start(path)
    changed = [name for name in sorted(old_settings.keys() & settings.keys()) if old_settings[name] != settings[name]]
    if changed:
        raise ConfigError(
            f"{out / CONFIG} was changed since the run started",
            expected=", ".join(f"{name} = {old_settings[name]!r}" for name in changed),
            got=", ".join(f"{name} = {settings[name]!r}" for name in changed),
            hint="restore it, or start a run in another --out; for more steps use --resume --steps",
        )
    if old_digest != digest:
        raise ConfigError(
            f"{out}: the data or the tokenizer changed since this run started",
            hint="restore both, so that the losses are those of one run, or start a run in another --out",
        )


def check_checkpoint(out: Path, config: FinetuneConfig, resumed_at: int | None) -> None:
    """Refuse to restart a run whose checkpoints were deleted (OutputError), as its metrics prove.

    A kill before the first checkpoint is complete leaves records but no checkpoint, and then the run may restart.
    """
    # The first checkpoint is complete when the second one starts, or when the run has ended. The second one starts
    # after the record of step 2 * checkpoint_every and before the next record.
    last_step = max((record["step"] for record in read_records(out / METRICS)), default=0)
    has_saved = last_step > 2 * config.checkpoint_every or (out / MEMORY).is_file()
    if resumed_at is None and has_saved:
        raise OutputError(
            f"{out / CHECKPOINTS}: the folder has no checkpoint",
            expected=f"a checkpoint of a run that has recorded {last_step} steps",
            hint="restore the folder, or start again with another --out; nothing was changed",
        )


class MetricsFile(Callback):
    """Writer of `metrics.jsonl`, which appends and flushes one record a line.

    A run continues at the step `keep_through`. Later records are dropped, so the file reads as if the run had never
    stopped. None drops all records.
    """

    def __init__(self, path: Path, keep_through: int | None) -> None:
        self._file = None
        if jax.process_index():  # only the first process writes
            return
        records = [] if keep_through is None else [r for r in read_records(path) if r["step"] <= keep_through]
        write_files(path.parent, {path.name: "".join(json.dumps(record) + "\n" for record in records).encode()})
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def state(self) -> None:
        """Sync the file to disk, so that its records survive a power cut; called before every checkpoint."""
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


def _refuse_other_config(
    saved: FinetuneConfig, requested: FinetuneConfig, values: Mapping[str, Any], out: Path
) -> None:
    differing = {
        name: (old, new)
        for name, old in dataclasses.asdict(saved).items()
        if name in values and old != (new := getattr(requested, name))
    }
    if differing:
        raise ConfigError(
            f"{out}: --resume does not match the configuration of this run",
            expected=", ".join(f"{name} = {old!r}" for name, (old, _) in differing.items()),
            got=", ".join(f"{name} = {new!r}" for name, (_, new) in differing.items()),
            hint=f"leave them out to continue with {out / CONFIG}, where you may edit settings that change bytes but "
            "no losses, or start a run in another --out; only --steps may be larger",
        )


def _read_folder(out: Path, read: Callable[[], bool]) -> bool:
    """Call `read`, and report an unreadable folder as an OutputError."""
    try:
        return read()
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be read", got=error.strerror or error, hint="choose an --out that you may read and write"
        ) from error


def _loss_settings(config: FinetuneConfig) -> dict[str, Any]:
    """Return the settings that determine a run's losses, without paths, since files may be moved."""
    # With dropout the tile size changes losses, since each tile draws its own mask.
    extra = ("tile_tokens",) if config.lora_dropout and config.tile_tokens else ()
    values = {
        name: value for name, value in dataclasses.asdict(config).items() if name not in _EDITABLE or name in extra
    }
    return json.loads(json.dumps({**values, "schedule_steps": config.schedule_steps or config.num_steps}))


def _read_start(path: Path) -> tuple[str, dict[str, Any], str | None]:
    """Return the digest, settings and day that a run began with; earlier versions recorded no settings and no day."""
    try:
        values = json.loads(path.read_text())
        day = values.get("day")
        if day is not None:
            datetime.date.fromisoformat(day)
        return values["sha256_of_tokens"], dict(values.get("settings", {})), day
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(
            f"{path}: the file is damaged", got=str(error), hint="restore it, or start a run in another --out"
        ) from error
