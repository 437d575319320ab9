"""Embedding models: pairs of similar texts, and all other texts of the batch as negatives (InfoNCE).

A row holds one pair. `num_microbatches` splits only the computation of the embeddings (GradCache), so that each pair is
compared with the whole batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ... import losses
from ...core import Tree, write_files
from ._heads import is_last
from ._objective import Hidden, Objective
from ._preferences import num_pairs

_MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Modules of sentence-transformers, each with its folder."""


def loss(model: Any, batch: Tree, hidden: Hidden, config: Any) -> tuple[Any, Tree]:
    """Compute the loss of `lowtide.losses.info_nce` over the pairs of a batch."""

    def embed(model: Any, rows: Tree) -> Array:
        h_BTD, segments = model.head_inputs(hidden(model, rows))[0], rows["segment_ids"]
        is_pooled = is_last(rows) if config.pooling == "last" else segments > 0
        # [B, 2, T]: 1 / tokens for the tokens of each of the two texts
        weights = jnp.stack([is_pooled & (segments == number) for number in (1, 2)], axis=1).astype(jnp.float32)
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
        return jnp.einsum("bnt,btd->bnd", weights, h_BTD.astype(jnp.float32))

    num_rows = batch["tokens"].shape[0]
    embeddings = losses.embed_in_chunks(embed, model, batch, max(1, num_rows // config.num_microbatches))
    weights = (jnp.max(batch["segment_ids"], axis=1) == 2).astype(jnp.float32)
    temperature = 0.05 if config.temperature is None else config.temperature
    return losses.info_nce(embeddings[:, 0], embeddings[:, 1], temperature=temperature, weights=weights)


def write_modules(folder: Path, pooling: str, width: int, seq_len: int) -> None:
    """Write the files by which sentence-transformers opens a folder with a model of embeddings [`width`]."""
    kinds = enumerate(_MODULES.items())
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in kinds
    ]
    modes = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_lasttoken": pooling == "last"}
    files: dict[str, Any] = {"modules.json": modules, "sentence_bert_config.json": {"max_seq_length": seq_len}}
    write_files(folder, {name: json.dumps(content, indent=2).encode() for name, content in files.items()})
    pooling_config = {"word_embedding_dimension": width, "pooling_mode_cls_token": False, **modes}
    write_files(folder / _MODULES["Pooling"], {"config.json": json.dumps(pooling_config, indent=2).encode()})


EMBEDDING = Objective(description="an embedding model", loss=loss, weight=num_pairs, group=2)
