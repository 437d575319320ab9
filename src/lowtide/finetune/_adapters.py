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
from ..core import Tree
from ._config import FinetuneConfig
from ._offloaded import inputs_place, loss

_NUM_EVA_BATCHES = 8
"""Number of training batches that EVA reads."""


def add_adapter(base: models.Decoder, config: FinetuneConfig) -> models.Decoder:
    """Add the configured adapter to a model, or load `config.adapter`.

    With EVA the factors are random here, and `add_eva_adapter` initialises them from data. A target that EVA cannot
    initialise raises StructureError before any data is read.
    """
    if config.adapter is not None:
        with warnings.catch_warnings():
            if config.lora_dropout:  # the warning tells the user to set a dropout, and here it is set
                warnings.filterwarnings("ignore", r".*_dropout .* is not applied")
            return lora.load(base, config.adapter)
    key = jax.random.key(config.seed)
    shared_kwargs: dict[str, Any] = {"modules_to_save": config.modules_to_save or ()}
    if config.method == "ia3":
        # (IA)³ scales the inputs of `down_proj` and the outputs of all other targets. A `feedforward` pattern that
        # matches no target is an error. So first find the targets, then pass the paths of those that are `down_proj`.
        without_feedforward = lora.IA3Config(targets=config.targets, feedforward=())
        paths = [match.path for match in lora.report(lora.add(base, without_feedforward)).matched]
        feedforward = tuple(path for path in paths if path.endswith("/down_proj/weight"))
        return lora.add(base, lora.IA3Config(targets=config.targets, feedforward=feedforward, **shared_kwargs))
    if config.method == "vera":
        return lora.add(base, lora.VeRAConfig(rank=config.rank, targets=config.targets, **shared_kwargs), key=key)
    model = lora.add(base, _lora_config(config), key=key)
    if config.lora_init == "eva":
        lora.check_eva(base, model)
    return model


def add_eva_adapter(base: models.Decoder, config: FinetuneConfig, batches: Any) -> models.Decoder:
    """Add the adapter of `add_adapter`, initialised by EVA from the first training batches.

    `batches` are indexed by step. Each batch is read microbatch by microbatch, as in a step.
    """
    num_rows = config.batch_size // config.num_microbatches
    microbatches = [
        {name: leaf[index * num_rows : (index + 1) * num_rows] for name, leaf in batches[step].items()}
        for step in range(_NUM_EVA_BATCHES)
        for index in range(config.num_microbatches)
    ]
    key = jax.random.key(config.seed)
    loss_fn = _plain_loss(dataclasses.replace(config, layers_per_remat=1))  # EVA runs no backward pass
    return lora.eva(base, _lora_config(config), loss_fn, microbatches, key=key, has_aux=True)


def _lora_config(config: FinetuneConfig) -> lora.Config:
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


def make_loss(config: FinetuneConfig) -> Callable[..., Any]:
    """Return the loss function of a run's steps; with dropout it also takes a random key."""
    loss_fn = _plain_loss(config)
    return partial(_loss_with_dropout, loss_fn, config.lora_dropout) if config.lora_dropout else loss_fn


def _plain_loss(config: FinetuneConfig) -> Callable[..., Any]:
    groups = config.layers_per_remat
    return partial(loss, remat=config.remat, layers_per_remat=groups, inputs=inputs_place(config))


def _loss_with_dropout(
    loss_fn: Callable[..., Any], rate: float, model: Tree, batch: Tree, *, key: Any, training: bool
) -> Any:
    """Compute the loss; in a training step with dropout on the inputs of the adapters."""
    return loss_fn(lora.dropout(model, rate, key=key) if training else model, batch)
