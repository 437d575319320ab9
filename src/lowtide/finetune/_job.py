"""The training step of a run, built from `config.json` and the settings without any weight, for any target.

`lowtide fits`, `lowtide explain` and ``--budget`` compile this step. It uses the same functions as the run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .. import models, quant, train
from ..core import Tree
from ..memory import Job, Target
from ..offload import to_host
from ..targets import resolve_target
from ._adapters import add_adapter, make_loss
from ._base import dtypes, formats, refuse_for_model, training_dtype, with_implementation
from ._config import FinetuneConfig, config_from_dict
from ._offloaded import full_step, is_hosted, optimizer
from ._recipe import learning_rate, with_seq_len
from ._text import IGNORE

WRT = "**/lora_*"
"""Glob of the trainable leaves of a model with adapters."""


def step_job(model: str | Path, *, target: Target | str | None = None, **settings: Any) -> Job:
    """Make the step of `lowtide finetune` from shapes alone.

    Args:
        model: a folder with `config.json`, or a GGUF file. Weights are not read and need not exist. The base of a
            quantised folder is quantised in the same format.
        target: device that the step will be compiled for. It decides the meaning of the dtype ``auto``.
        **settings: fields of `FinetuneConfig`, such as `batch_size`, `seq_len`, `quantize`, `full` and `offload`.
            Batches have the columns of packed records, unless `packing` is ``contiguous``.

    Returns:
        The job, for `lowtide.memory.Job.analyze`.

    Raises:
        ModelFileError: when `config.json` cannot be read.
        ConfigError: for an unknown setting or a value out of range.
        SelectionError: when `targets` matches nothing.

    Memory:
        Allocates nothing; the job's arguments are shapes.

    Examples:
        >>> from lowtide import models
        >>> step_job(models.base_path(), batch_size=2, seq_len=32).analyze("cpu").by_role["batch"]
        1024
    """
    config = config_from_dict({"packing": "best-fit", **settings, "model": str(model)}, "the settings")
    return config_job(config, target)


def config_job(config: FinetuneConfig, target: Target | str | None = None) -> Job:
    """Make the step of a run from shapes alone.

    The job has the roles of `lowtide.train.analyze_step`; with `full`: ``state``, ``frozen`` and ``batch``.
    """
    refuse_for_model(config, directory_of(config))
    base = base_shapes(config, target)
    config = with_seq_len(config, base.config.max_position_embeddings)
    names = ("tokens", "labels", *(("segment_ids", "positions") if config.is_packed else ()))
    batch = {name: jax.ShapeDtypeStruct((config.batch_size, config.seq_len), jnp.int32) for name in names}
    # Without data, epochs have no length in steps. The compiled step is the same for any number of steps.
    schedule = learning_rate(dataclasses.replace(config, num_epochs=None))
    if config.full:
        step = full_step(config, base.stack, schedule, num_targets)
        args = (*step.init(base.outer, base.layers), batch)
        return Job(fn=step, args=args, roles={"state": 0, "frozen": 1, "batch": 2}, donate_argnums=0)
    return train.step_job(
        add_adapter(base, config),
        make_loss(config),
        optimizer(config, schedule),
        WRT,
        batch,
        num_microbatches=config.num_microbatches,
        weight=num_targets,
    )


def base_shapes(config: FinetuneConfig, target: Target | str | None = None) -> models.Decoder:
    """Return the base as shapes, with the dtypes, quantisation and memory spaces that a run loads it with."""
    platform = None if target is None else resolve_target(target).platform
    weights_dtype, activations_dtype = dtypes(training_dtype(config), config.compute_dtype, platform)
    shapes = models.load_shapes(directory_of(config), dtype=weights_dtype, compute_dtype=activations_dtype)
    base = with_implementation(shapes, config.attention, config.tile_tokens)
    for glob, format_name in (formats(config) or {}).items():
        base = quant.quantize(base, glob, format_name)
    select_hosted = is_hosted(config)
    return base if select_hosted is None else to_host(base, select_hosted)


def directory_of(config: FinetuneConfig) -> Path:
    """Return the model's folder; without `model`, the folder of the embedded model."""
    return Path(config.model) if config.model is not None else models.base_path()


def num_targets(batch: Tree) -> Any:
    """Count the tokens that have a label; this count is the weight of a microbatch."""
    return jnp.sum(batch["labels"] != IGNORE)
