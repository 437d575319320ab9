"""The adapter of a run: of the method that was asked for, or one that goes on training."""

from __future__ import annotations

import jax

from .. import models
from ..adapters import lora
from ._config import FinetuneConfig


def adapted(base: models.Decoder, config: FinetuneConfig) -> models.Decoder:
    """Give a model the adapter that the settings say.

    Args:
        base: the model.
        config: of which `method`, `rank`, `alpha`, `targets`, `adapter` and `seed` are read.

    Returns:
        The model with adapters.

    Raises:
        SelectionError: when a target matches nothing.
        ModelFileError: for an adapter that cannot be read, or of another model.
    """
    if config.adapter is not None:
        return lora.load(base, config.adapter)
    key = jax.random.key(config.seed)
    if config.method == "ia3":
        plain = lora.IA3Config(targets=config.targets, feedforward=())
        paths = [each.path for each in lora.report(lora.add(base, plain)).matched]
        wide = tuple(path for path in paths if path.endswith("/down_proj/weight"))
        return lora.add(base, lora.IA3Config(targets=config.targets, feedforward=wide))
    if config.method == "vera":
        return lora.add(base, lora.VeRAConfig(rank=config.rank, targets=config.targets), key=key)
    made = lora.Config(
        rank=config.rank,
        alpha=config.alpha,
        targets=config.targets,
        rslora=config.method == "rslora",
        dora=config.method == "dora",
    )
    return lora.add(base, made, key=key)
