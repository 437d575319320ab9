"""The recipe of a run from its settings: number of steps, learning rates, optimizer, callbacks and trackers.

The recipe is independent of the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import optax

from ..core import ConfigError
from ..train import Callback, EarlyStopping, Record, Tracker
from ._config import FinetuneConfig

_MOST_TOKENS, _EMBEDDED_TOKENS, _ROUND_TOKENS = 2048, 128, 64
"""Default sequence lengths: the largest, that of the embedded model, and the multiple that lengths round up to."""


def with_steps(config: FinetuneConfig, num_sequences: int | None) -> FinetuneConfig:
    """Convert `num_epochs` to `num_steps`; data of unknown length (`num_sequences` is None) raises ConfigError."""
    if config.num_epochs is None:
        return config
    if num_sequences is None:
        raise ConfigError(
            "num_epochs: the length of the data is unknown",
            expected="num_steps",
            got=f"num_epochs = {config.num_epochs}",
            hint="use --steps instead of --num-epochs",
        )
    num_steps = max(1, math.ceil(config.num_epochs * num_sequences / config.batch_size))
    return dataclasses.replace(config, num_epochs=None, num_steps=num_steps)


def with_seq_len(config: FinetuneConfig, context: int, longest: int | None = None) -> FinetuneConfig:
    """Choose the sequence length if the configuration sets none.

    `context` is the model's number of positions, and `longest` the tokens of the longest record, if known.
    """
    if config.seq_len:
        return config
    max_len = min(_MOST_TOKENS, context) if config.model is not None else _EMBEDDED_TOKENS
    needed_len = max_len if longest is None else max(1, math.ceil(longest / _ROUND_TOKENS)) * _ROUND_TOKENS
    return dataclasses.replace(config, seq_len=min(max_len, needed_len))


def peak_rate(config: FinetuneConfig) -> float:
    """Return the configured or default peak learning rate."""
    default, embedded = (1e-5, 1e-3) if config.full else (2e-4, 5e-3)
    return config.learning_rate or (default if config.model is not None else embedded)


def learning_rate(config: FinetuneConfig) -> optax.Schedule:
    """Build the learning-rate schedule: a linear warm-up, then the shape that `schedule` names.

    A warm-up of n steps begins at 1 / (n + 1) of the peak, since a first step with rate 0 would do nothing.
    """
    peak = peak_rate(config)
    num_steps = config.schedule_steps or config.num_steps
    warmup_steps = round(config.warmup_ratio * num_steps) if config.warmup_steps is None else config.warmup_steps
    warmup = min(warmup_steps, num_steps - 1)
    main_schedule = _AFTER_WARMUP[config.schedule](config, peak, warmup, max(num_steps - warmup, 1))
    if warmup == 0:
        return main_schedule
    warmup_schedule = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([warmup_schedule, main_schedule], [warmup])


def adamw(config: FinetuneConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Build AdamW from the settings, without clipping."""
    return optax.adamw(
        schedule,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def stopping_callbacks(config: FinetuneConfig) -> list[Callback]:
    """Build the callbacks that may end a run before its last step."""
    if config.early_stopping_patience is None:
        return []
    # `EarlyStopping` stops at the evaluation after `patience` ones without improvement; our setting counts it, too.
    patience = config.early_stopping_patience - 1
    return [EarlyStopping("eval_loss", patience=patience, min_delta=config.early_stopping_threshold)]


def trackers(config: FinetuneConfig, out: Path, values: Callable[[Record], Mapping[str, float]]) -> list[Callback]:
    """Build the callbacks that send records to trackers; they raise if a tracker's package is missing.

    `values` selects the values of a record to send.
    """
    settings = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return [
        Tracker(library, out, project=config.project, name=config.run_name, config=settings, values=values)
        for library in dict.fromkeys(config.track or ())
    ]


def _cosine(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, num_steps, alpha=config.final_rate_fraction)


def _linear(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(peak, peak * config.final_rate_fraction, num_steps)


def _constant(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.constant_schedule(peak)


def _inverse_sqrt(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    # `step` counts from the end of the warm-up, so in steps s of the run this is peak * sqrt(warmup / s).
    shift = max(warmup, 1)
    return lambda step: peak * (shift / (shift + step)) ** 0.5


def _stable(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    # `decay_fraction` refers to all steps of the schedule, including the warm-up.
    decay_steps = min(num_steps, max(1, round(config.decay_fraction * (num_steps + warmup))))
    decay_schedule = optax.linear_schedule(peak, peak * config.final_rate_fraction, decay_steps)
    return optax.join_schedules([optax.constant_schedule(peak), decay_schedule], [num_steps - decay_steps])


_AFTER_WARMUP: dict[str, Callable[[FinetuneConfig, float, int, int], optax.Schedule]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable,
}
