"""A fine-tuning step from a model's `config.json` alone, to ask where it fits before any weight is there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import models
from ..adapters import lora
from ..core import ConfigError, Tree, combine, partition, value_and_grad
from ..memory import Job
from ._config import FinetuneConfig
from ._recipe import with_seq_len

_WRT = "**/lora_*"


def step_job(
    model: str | Path,
    *,
    batch_size: int = 1,
    seq_len: int = 2048,
    rank: int = 16,
    targets: str | tuple[str, ...] = "layers/**/*_proj",
    remat: bool = True,
    layers_per_remat: int = 1,
    param_dtype: str = "bfloat16",
    compute_dtype: str = "bfloat16",
    packed: bool = False,
) -> Job:
    """Make the step of `lowtide finetune`, LoRA with AdamW, of shapes alone.

    Args:
        model: a folder with `config.json`, or a GGUF file; weights are not read, and need not be there. The base of a
            quantised folder is quantised as it is.
        batch_size: sequences in a batch.
        seq_len: tokens in a sequence; 0 takes the model's context, up to 2,048.
        rank: of the adapters.
        targets: globs on module paths: which projections get an adapter.
        remat: whether each block is computed again in the backward pass.
        layers_per_remat: of how many blocks one activation is kept then.
        param_dtype: dtype of the frozen base; what trains is float32.
        compute_dtype: dtype of activations.
        packed: whether batches have segments and positions, as packed documents do.

    Returns:
        The job, for `lowtide.memory.Job.analyze` or ``lowtide fits DIR``.

    Raises:
        ModelFileError: when `config.json` cannot be read.
        ConfigError: for a setting out of range.
        SelectionError: when `targets` matches nothing.

    Memory:
        Allocates nothing; the job's arguments are shapes.
    """
    settings: dict[str, Any] = {"rank": rank, "batch_size": batch_size, "seq_len": seq_len, "targets": targets}
    asked = FinetuneConfig(model=str(model), **settings, remat=remat, layers_per_remat=layers_per_remat)
    config = models.load_config(model)
    seq_len = with_seq_len(asked, config.max_position_embeddings).seq_len
    for name in (param_dtype, compute_dtype):
        if name not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"{name!r} is no dtype of a step", expected="float32, bfloat16 or float16", hint="for instance bfloat16"
            )
    adapters = lora.Config(rank=rank, alpha=2.0 * rank, targets=targets)

    def make() -> Tree:
        base = models.init(config, key=jax.random.key(0), dtype=param_dtype, compute_dtype=compute_dtype)
        return lora.add(base, adapters, key=jax.random.key(1))

    shapes: Any
    if models.quantization_of(model) is None:
        shapes = jax.eval_shape(make)
    else:
        base = models.load_shapes(model, dtype=param_dtype, compute_dtype=compute_dtype)
        shapes = jax.eval_shape(lambda base: lora.add(base, adapters, key=jax.random.key(1)), base)
    trainable, frozen = partition(shapes, _WRT)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    names = ("tokens", "labels", *(("segment_ids", "positions") if packed else ()))
    batch = {name: jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32) for name in names}
    gradients = value_and_grad(partial(models.loss, remat=remat, layers_per_remat=layers_per_remat), _WRT, has_aux=True)

    def step(trainable: Tree, opt_state: Tree, frozen: Tree, batch: Tree) -> tuple[Tree, Tree, Any]:
        (loss, _), grads = gradients(combine(trainable, frozen), batch)
        updates, opt_state = tx.update(grads, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, loss

    return Job(
        fn=step,
        args=(trainable, jax.eval_shape(tx.init, trainable), frozen, batch),
        roles={"trainable": 0, "optimizer": 1, "frozen": 2, "batch": 3},
        donate_argnums=(0, 1),
    )
