"""The loss of a model on text: every token except the first is predicted once, and all count equally.

Documents are joined as for training, and cut into rows that overlap by one token. A row has no context from earlier
rows, so longer rows give lower losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import models
from ..core import DataError, Tree, check_integer
from .data._pack import IGNORE


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The loss of a model on text."""

    loss: float
    """Mean over all predicted tokens, in nats."""
    num_tokens: int
    """Number of predicted tokens."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinity above the float64 range."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def text_loss(
    model: models.Decoder,
    stream: np.ndarray,
    *,
    seq_len: int,
    batch_size: int,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> TextLoss:
    """Compute a model's loss on a stream of tokens.

    Args:
        model: the decoder, with or without adapters, entirely on the device.
        stream: token ids, [N], such as from `token_stream`.
        seq_len: tokens in a row, T.
        batch_size: rows in a batch, B.
        on_progress: called with the number of predicted tokens so far, their total, and the loss so far.

    Returns:
        The mean over the N - 1 tokens after the first. It excludes the load-balancing loss of a mixture of experts.

    Raises:
        DataError: for fewer than two tokens, or tokens without an embedding.
        ConfigError: for a `seq_len` or `batch_size` below 1.

    Memory:
        Holds one batch's activations of one layer, and the logits of one chunk of
        `lowtide.losses.chunked_cross_entropy`.
    """
    check_integer("seq_len", seq_len)
    check_integer("batch_size", batch_size)
    if len(stream) < 2:
        raise DataError("the data has nothing to predict: it has fewer than two tokens", hint="give more text")
    _check_vocabulary(model, stream)
    return batches_loss(model, _batches(stream, seq_len, batch_size), len(stream) - 1, on_progress=on_progress)


def batches_loss(
    model: models.Decoder,
    batches: Iterable[Mapping[str, np.ndarray]],
    num_tokens: int,
    *,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> TextLoss:
    """Compute a model's loss on batches, with equal weight for all labels.

    Args:
        model: the decoder, with or without adapters, entirely on the device.
        batches: batches for `lowtide.models.loss`; the label -100 is not predicted.
        num_tokens: total number of predicted tokens, for `on_progress`.
        on_progress: called with the number of predicted tokens so far, their total, and the loss so far.

    Returns:
        The mean over all labels other than -100.

    Raises:
        DataError: when there is no label, and for tokens without an embedding.

    Memory:
        As in `text_loss`.
    """
    total, num_predicted = 0.0, 0  # float64, since a float32 sum over many batches would lose digits
    for batch in batches:
        count = int(np.sum(batch["labels"] != IGNORE))
        if count == 0:
            continue
        for name in ("tokens", "labels"):
            _check_vocabulary(model, batch[name])
        total += float(_mean_loss(model, dict(batch))) * count
        num_predicted += count
        if on_progress is not None:
            on_progress(num_predicted, num_tokens, total / num_predicted)
    if num_predicted == 0:
        raise DataError("the data has nothing to predict: it has no label", hint="give more data")
    return TextLoss(loss=total / num_predicted, num_tokens=num_predicted)


def _check_vocabulary(model: models.Decoder, ids: np.ndarray) -> None:
    """Raise DataError for ids beyond the embeddings; a compiled lookup would clamp them without an error."""
    if (largest := int(ids.max())) >= model.config.vocab_size:
        got = f"id {largest}, but the model has ids below {model.config.vocab_size}"
        problem = "the data has tokens that the model has no embedding for"
        raise DataError(problem, got=got, hint="use the tokenizer of this model")


@jax.jit
def _mean_loss(model: models.Decoder, batch: Tree) -> Array:
    value, metrics = models.loss(model, batch)
    experts = model.config.experts
    # The training loss includes the load-balancing loss of a mixture of experts. It is no prediction error.
    if experts is None or "router_loss" not in metrics:
        return value
    return value - jnp.float32(experts.router_loss_coef) * metrics["router_loss"]


def _batches(stream: np.ndarray, seq_len: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of one shape; padding has no labels, and does not count in the length of a document."""
    num_rows = -(-(len(stream) - 1) // seq_len)
    for first in range(0, num_rows, batch_size):
        tokens = np.zeros((batch_size, seq_len), np.int32)
        labels = np.full((batch_size, seq_len), IGNORE, np.int32)
        positions = np.tile(np.arange(seq_len, dtype=np.int32), (batch_size, 1))
        for row in range(min(batch_size, num_rows - first)):
            part = stream[(first + row) * seq_len :][: seq_len + 1]
            tokens[row, : len(part) - 1], labels[row, : len(part) - 1] = part[:-1], part[1:]
            # Padding repeats the last position: rotary frequencies may depend on the length of the document.
            positions[row] = np.minimum(positions[row], len(part) - 2)
        yield {"tokens": tokens, "labels": labels, "positions": positions}
