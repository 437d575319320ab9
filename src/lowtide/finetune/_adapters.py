"""The adapter of a run, either new with the configured method or loaded to continue training; and the run's loss."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .. import models
from ..adapters import lora
from ..core import ConfigError, Tree
from ._config import FinetuneConfig
from ._offloaded import inputs_place, loss

_NUM_EVA_BATCHES = 8
"""Number of training batches that EVA reads."""


def adapted(base: models.Decoder, config: FinetuneConfig) -> models.Decoder:
    """Add the configured adapter to a model.

    Args:
        base: the model.
        config: `method`, `rank`, `alpha`, `targets`, `modules_to_save`, `bias`, `lora_init`, `adapter` and `seed` are
            used. With EVA the adapter is random here; `begun_with_data` initialises it from data.

    Returns:
        The model with adapters.

    Raises:
        SelectionError: when a target matches nothing.
        StructureError: with EVA, for a target that EVA cannot initialise.
        ModelFileError: for an adapter that cannot be read, or one of another model.
    """
    if config.adapter is not None:
        with warnings.catch_warnings():
            if config.lora_dropout:  # the warning tells the user to set a dropout, and here it is set
                warnings.filterwarnings("ignore", r".*_dropout .* is not applied")
            return lora.load(base, config.adapter)
    key = jax.random.key(config.seed)
    saved: dict[str, Any] = {"modules_to_save": config.modules_to_save or ()}
    if config.method == "ia3":
        # (IA)³ scales the inputs of `down_proj` and the outputs of all other targets. A `feedforward` pattern that
        # matches no target is an error. So first find the targets, then pass the paths of those that are `down_proj`.
        plain = lora.IA3Config(targets=config.targets, feedforward=())
        paths = [each.path for each in lora.report(lora.add(base, plain)).matched]
        wide = tuple(path for path in paths if path.endswith("/down_proj/weight"))
        return lora.add(base, lora.IA3Config(targets=config.targets, feedforward=wide, **saved))
    if config.method == "vera":
        return lora.add(base, lora.VeRAConfig(rank=config.rank, targets=config.targets, **saved), key=key)
    model = lora.add(base, _lora(config), key=key)
    if config.lora_init == "eva":
        lora.check_eva(base, model)
    return model


def begun_with_data(base: models.Decoder, config: FinetuneConfig, batches: Any) -> models.Decoder:
    """Add the adapter of `adapted` to a model, initialised by EVA from training data.

    Args:
        base: the model.
        config: as in `adapted`; a batch is read microbatch by microbatch, as in a step.
        batches: training batches, indexed by step; the first ones are read.

    Returns:
        The model with adapters.
    """
    rows = config.batch_size // config.num_microbatches
    first = [
        {name: leaf[number * rows : (number + 1) * rows] for name, leaf in batches[step].items()}
        for step in range(_NUM_EVA_BATCHES)
        for number in range(config.num_microbatches)
    ]
    key = jax.random.key(config.seed)
    plain = _plain_loss(dataclasses.replace(config, layers_per_remat=1))  # EVA runs no backward pass
    return lora.eva(base, _lora(config), plain, first, key=key, has_aux=True)


def _lora(config: FinetuneConfig) -> lora.Config:
    return lora.Config(
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        bias=config.bias,
        init="peft" if config.lora_init == "eva" else config.lora_init,
        modules_to_save=config.modules_to_save or (),
        rslora=config.method == "rslora",
        dora=config.method == "dora",
    )


def loss_of(config: FinetuneConfig) -> Callable[..., Any]:
    """Return the loss function of a run's steps; with dropout it takes a random key."""
    plain = _plain_loss(config)
    return partial(_dropped, plain, config.lora_dropout) if config.lora_dropout else plain


def _plain_loss(config: FinetuneConfig) -> Callable[..., Any]:
    groups = config.layers_per_remat
    return partial(loss, remat=config.remat, layers_per_remat=groups, inputs=inputs_place(config))


def _dropped(plain: Callable[..., Any], rate: float, model: Tree, batch: Tree, *, key: Any, training: bool) -> Any:
    """Compute the loss; in a training step with dropout on the inputs of the adapters."""
    return plain(lora.dropout(model, rate, key=key) if training else model, batch)


def refuse_eva(config: FinetuneConfig) -> None:
    """Raise for EVA with batches sharded over devices or processes, since EVA reads whole batches."""
    if config.lora_init == "eva":
        raise ConfigError(
            "lora_init: EVA looks at whole batches, on one device",
            expected="another lora_init with --distributed and --pipeline",
            got=config.lora_init,
            hint="leave lora_init out, or begin on one device and go on with --adapter",
        )


def refuse_dropout(config: FinetuneConfig) -> None:
    """Raise for dropout in a pipeline, whose loss takes no random key."""
    if config.lora_dropout:
        raise ConfigError(
            "lora_dropout: the loss of a pipeline takes no random key",
            expected="lora_dropout = 0 with --pipeline",
            got=config.lora_dropout,
            hint="leave lora_dropout or --pipeline out",
        )
