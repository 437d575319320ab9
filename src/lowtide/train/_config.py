"""What `lowtide finetune` was asked to do: a TOML file, checked field by field."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ..core import ConfigError

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# The checked fields that are flags of the command, too, for hints.
_FLAGS = {"num_steps": "--steps"} | {f: f"--{f.replace('_', '-')}" for f in ("rank", "batch_size", "seq_len", "seed")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Every choice of a fine-tuning run, with defaults; the fields are the keys of the TOML file."""

    model: str | None = None
    """A Hugging Face directory of a Llama model; by default the model embedded in Lowtide."""
    data: str | None = None
    """A text file, a folder of text or source, or JSONL with ``text``; by default Python's language reference."""
    num_steps: int = 300
    """Optimizer steps."""
    rank: int = 16
    """LoRA rank."""
    alpha: float = 32.0
    """LoRA scale: the adapter's product is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "layers/**/*_proj"
    """Globs on module paths: which projections get an adapter (by default all seven of a block)."""
    batch_size: int = 8
    """Sequences in a batch."""
    seq_len: int = 128
    """Tokens in a sequence."""
    num_microbatches: int = 1
    """Parts of a batch that are run one after the other, to save activation memory."""
    learning_rate: float | None = None
    """Peak of the schedule: linear warm-up, then cosine to a tenth. By default 2e-4, or 5e-3 for the embedded model."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on the adapters."""
    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    param_dtype: str = "auto"
    """Dtype of the frozen base: auto (as stored; float32 on a CPU), float32, bfloat16 or float16. Adapters are always
    float32."""
    compute_dtype: str = "auto"
    """Dtype of activations: auto (bfloat16 on an accelerator, float32 on a CPU), float32, bfloat16 or float16."""
    remat: bool = True
    """Whether to recompute each block in the backward pass instead of keeping its activations."""
    eval_every: int = 100
    """Steps between held-out evaluations; the first and the last step are always evaluated."""
    held_out_fraction: float = 0.1
    """Part of the data kept for evaluation."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    sample_tokens: int = 48
    """Length of the text sampled before and after; 0 samples nothing."""
    seed: int = 0
    """Of the data order, the adapters and the sample."""

    def __post_init__(self) -> None:
        for field, kind in typing.get_type_hints(type(self)).items():
            _check_type(field, getattr(self, field), kind)
        at_least_one = (
            "num_steps",
            "rank",
            "batch_size",
            "seq_len",
            "num_microbatches",
            "eval_every",
            "checkpoint_every",
        )
        for field in at_least_one:
            _check(field, getattr(self, field), getattr(self, field) >= 1, "at least 1")
        for field in ("warmup_steps", "weight_decay", "sample_tokens"):
            _check(field, getattr(self, field), 0 <= getattr(self, field) < math.inf, "at least 0")
        _check("seed", self.seed, 0 <= self.seed < 2**32, "an integer from 0 to 2**32 - 1")
        for field in ("alpha", "max_grad_norm"):
            _check(field, getattr(self, field), 0 < getattr(self, field) < math.inf, "greater than 0")
        rate = self.learning_rate
        _check("learning_rate", rate, rate is None or 0 < rate < math.inf, "greater than 0")
        _check("held_out_fraction", self.held_out_fraction, 0 < self.held_out_fraction < 1, "between 0 and 1")
        for field in ("param_dtype", "compute_dtype"):
            _check(field, getattr(self, field), getattr(self, field) in _DTYPES, f"one of {', '.join(_DTYPES)}")
        fits = self.batch_size % self.num_microbatches == 0
        _check("num_microbatches", self.num_microbatches, fits, f"a divisor of batch_size {self.batch_size}")


def config_from_dict(values: Mapping[str, Any], where: str) -> FinetuneConfig:
    """Make a configuration from plain values.

    Args:
        values: field names and values, as in TOML.
        where: where they come from, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigError: for an unknown field (with near misses), a value of the wrong type or out of range.
    """
    known = [field.name for field in dataclasses.fields(FinetuneConfig)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            raise ConfigError(
                f"{where}: unknown key {name!r}",
                expected=f"one of {', '.join(known)}",
                hint=f"did you mean {' or '.join(close)}?" if close else "see the reference of FinetuneConfig",
            )
    fixed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return FinetuneConfig(**fixed)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as plain values.

    Args:
        path: the file.

    Returns:
        Keys and values, unchecked (see `config_from_dict`).

    Raises:
        ConfigError: when the file is missing or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read", got=str(error), hint="--config takes a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path}: not TOML", got=str(error), hint='lines like: rank = 16, targets = "**/q_proj"'
        ) from error


def config_to_toml(config: FinetuneConfig) -> str:
    """The configuration as TOML, every field that is not None; `read_config` reads it back."""
    return tomli_w.dumps({k: v for k, v in dataclasses.asdict(config).items() if v is not None})


def _check(field: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        flag = f", or {_FLAGS[field]}" if field in _FLAGS else ""
        raise ConfigError(
            f"{field} is out of range", expected=expected, got=value, hint=f"change {field} in the TOML file{flag}"
        )


def _check_type(field: str, value: Any, kind: Any) -> None:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if any(_is_a(value, each) for each in kinds):
        return
    names = " or ".join("nothing" if each is type(None) else str(getattr(each, "__name__", each)) for each in kinds)
    raise ConfigError(
        f"{field} has the wrong type", expected=names, got=f"{value!r}", hint=f"change {field} in the configuration"
    )


def _is_a(value: Any, kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    if kind is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in typing.cast("tuple[Any, ...]", value))
    return isinstance(value, kind)
