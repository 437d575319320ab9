"""The recipe of a run, out of its settings: how many steps, the learning rate of each, the optimizer, what watches.

Nothing here knows what the loss is.
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
"""Of a sequence whose length is chosen: the most, those with the embedded model, and their common divisor."""


def with_steps(config: FinetuneConfig, num_sequences: int | None) -> FinetuneConfig:
    """Say in steps what `num_epochs` says in passes over the data.

    Args:
        config: the settings.
        num_sequences: sequences to train on, or None where the data does not say.

    Returns:
        Settings with `num_steps` alone.

    Raises:
        ConfigError: for epochs of data whose length is not known.
    """
    if config.num_epochs is None:
        return config
    if num_sequences is None:
        raise ConfigError(
            "num_epochs: the data does not say how long it is",
            expected="num_steps",
            got=f"num_epochs = {config.num_epochs}",
            hint="give --steps in place of --num-epochs",
        )
    num_steps = max(1, math.ceil(config.num_epochs * num_sequences / config.batch_size))
    return dataclasses.replace(config, num_epochs=None, num_steps=num_steps)


def with_seq_len(config: FinetuneConfig, context: int, longest: int | None = None) -> FinetuneConfig:
    """Choose the tokens of a sequence if the configuration names none.

    Args:
        config: the settings.
        context: positions that the model was made for.
        longest: tokens of the longest record, if it is known.
    """
    if config.seq_len:
        return config
    most = min(_MOST_TOKENS, context) if config.model is not None else _EMBEDDED_TOKENS
    needed = most if longest is None else max(1, math.ceil(longest / _ROUND_TOKENS)) * _ROUND_TOKENS
    return dataclasses.replace(config, seq_len=min(most, needed))


def peak_rate(config: FinetuneConfig) -> float:
    """Return the peak of the learning rate, given or by default."""
    given, embedded = (1e-5, 1e-3) if config.full else (2e-4, 5e-3)
    return config.learning_rate or (given if config.model is not None else embedded)


def learning_rate(config: FinetuneConfig) -> optax.Schedule:
    """Make the learning rate of every step: a linear warm-up, and then what `schedule` names.

    The first step of a warm-up has a rate of its own instead of 0, which would do nothing.
    """
    peak = peak_rate(config)
    num_steps = config.schedule_steps or config.num_steps
    asked = round(config.warmup_ratio * num_steps) if config.warmup_steps is None else config.warmup_steps
    warmup = min(asked, num_steps - 1)
    rest = _AFTER_WARMUP[config.schedule](config, peak, warmup, max(num_steps - warmup, 1))
    if warmup == 0:
        return rest
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, rest], [warmup])


def adamw(config: FinetuneConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Make AdamW as the settings say, without clipping."""
    return optax.adamw(
        schedule,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def watchers(config: FinetuneConfig) -> list[Callback]:
    """Make the callbacks that may end a run before its last step."""
    if config.early_stopping_patience is None:
        return []
    # Ours acts at the evaluation after those that are waited for.
    patience = config.early_stopping_patience - 1
    return [EarlyStopping("eval_loss", patience=patience, min_delta=config.early_stopping_threshold)]


def trackers(config: FinetuneConfig, out: Path, values: Callable[[Record], Mapping[str, float]]) -> list[Callback]:
    """Make what gives the records to trackers; raises for a package that is not there.

    Args:
        config: the settings.
        out: the run's folder.
        values: what is shown of a record.
    """
    shown = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return [
        Tracker(library, out, project=config.project, name=config.run_name, config=shown, values=values)
        for library in dict.fromkeys(config.track or ())
    ]


def _cosine(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, num_steps, alpha=config.final_rate_fraction)


def _linear(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.linear_schedule(peak, peak * config.final_rate_fraction, num_steps)


def _constant(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    return optax.constant_schedule(peak)


def _inverse_sqrt(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    shift = max(warmup, 1)
    return lambda step: peak * (shift / (shift + step)) ** 0.5


def _stable(config: FinetuneConfig, peak: float, warmup: int, num_steps: int) -> optax.Schedule:
    decay = min(num_steps, max(1, round(config.decay_fraction * (num_steps + warmup))))
    fall = optax.linear_schedule(peak, peak * config.final_rate_fraction, decay)
    return optax.join_schedules([optax.constant_schedule(peak), fall], [num_steps - decay])


_AFTER_WARMUP: dict[str, Callable[[FinetuneConfig, float, int, int], optax.Schedule]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable,
}
