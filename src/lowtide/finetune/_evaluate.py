"""The loss of a model on text: every token but the first is predicted once, and counts once.

Documents are joined as they are for training, and cut into rows that overlap by one token. A row sees nothing of the
rows before it, so longer rows give lower losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tokenizers import Tokenizer

from .. import models
from ..core import ConfigError, DataError, Tree
from ._text import IGNORE, tokenise
from ._tokens import named


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The loss of a model on text."""

    loss: float
    """Mean over all predicted tokens, in nats."""
    num_tokens: int
    """Predicted tokens."""

    @property
    def perplexity(self) -> float:
        """The loss as a number of equally likely tokens."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def token_stream(
    documents: Sequence[str] | Mapping[str, str],
    tokenizer: Tokenizer,
    end_token: int | None,
    *,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Tokenise documents and join them, each followed by the end token, if any.

    Args:
        documents: texts, or texts by what they are called in errors.
        tokenizer: the model's.
        end_token: appended to each document.
        vocab_size: embeddings of the model: tokens beyond are refused; None: nothing is.

    Returns:
        Token ids, int32 [N].

    Raises:
        DataError: for a token that the model has no embedding for.
        ModelFileError: for a tokenizer that cannot encode the text.
    """
    return tokenise(named(documents), tokenizer, end_token, vocab_size)


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
        model: the decoder, with or without adapters, all of it on the device.
        stream: token ids, [N], such as `token_stream` returns.
        seq_len: tokens in a row, T.
        batch_size: rows at once, B.
        on_progress: called with predicted tokens so far, those in all, and the loss so far.

    Returns:
        The mean over the N - 1 tokens that something stands before. What routers of a mixture are trained by is no
        part of it.

    Raises:
        DataError: for fewer than two tokens, or tokens that the model does not have.
        ConfigError: for a number below 1.

    Memory:
        One batch's activations of one layer, and logits of one chunk: `lowtide.losses.chunked_cross_entropy`.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(
                f"{name}: too small", expected="at least 1", got=value, hint="check --seq-len, --batch-size"
            )
    if len(stream) < 2:
        raise DataError(
            "the data has nothing to predict", expected="at least two tokens", got=len(stream), hint="give more text"
        )
    _check(model, stream)
    return batches_loss(model, _batches(stream, seq_len, batch_size), len(stream) - 1, on_progress=on_progress)


def batches_loss(
    model: models.Decoder,
    batches: Iterable[Mapping[str, np.ndarray]],
    num_tokens: int,
    *,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> TextLoss:
    """Compute a model's loss on batches, in which all labels count alike.

    Args:
        model: the decoder, with or without adapters, all of it on the device.
        batches: as `lowtide.models.loss` takes them; the label -100 is not predicted.
        num_tokens: predicted tokens in all, to show progress.
        on_progress: called with predicted tokens so far, those in all, and the loss so far.

    Returns:
        The mean over all labels.

    Raises:
        DataError: when there is no label, and for tokens that the model does not have.

    Memory:
        As in `text_loss`.
    """
    total, done = 0.0, 0  # in float64: a mean of float32 means would lose digits with many batches
    for batch in batches:
        count = int(np.sum(batch["labels"] != IGNORE))
        if count == 0:
            continue
        for name in ("tokens", "labels"):
            _check(model, batch[name])
        total += float(_mean_loss(model, dict(batch))) * count
        done += count
        if on_progress is not None:
            on_progress(done, num_tokens, total / done)
    if done == 0:
        raise DataError("the data has nothing to predict", expected="at least one label", hint="give more data")
    return TextLoss(loss=total / done, num_tokens=done)


def _check(model: models.Decoder, ids: np.ndarray) -> None:
    """Refuse ids beyond the embeddings, which a compiled program would not."""
    if (largest := int(ids.max())) >= model.config.vocab_size:
        raise DataError(
            "the data has tokens that the model has not",
            expected=f"ids below {model.config.vocab_size}",
            got=f"id {largest}",
            hint="the tokenizer is of another model",
        )


@jax.jit
def _mean_loss(model: models.Decoder, batch: Tree) -> Array:
    value, metrics = models.loss(model, batch)
    experts = model.config.experts
    if experts is None or "router_loss" not in metrics:
        return value
    return value - jnp.float32(experts.router_loss_coef) * metrics["router_loss"]


def _batches(stream: np.ndarray, seq_len: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows of one shape; what fills up the last ones is not predicted, nor a part of their length."""
    num_rows = -(-(len(stream) - 1) // seq_len)
    for first in range(0, num_rows, batch_size):
        tokens = np.zeros((batch_size, seq_len), np.int32)
        labels = np.full((batch_size, seq_len), IGNORE, np.int32)
        positions = np.tile(np.arange(seq_len, dtype=np.int32), (batch_size, 1))
        for row in range(min(batch_size, num_rows - first)):
            part = stream[(first + row) * seq_len :][: seq_len + 1]
            tokens[row, : len(part) - 1], labels[row, : len(part) - 1] = part[:-1], part[1:]
            positions[row] = np.minimum(positions[row], len(part) - 2)
        yield {"tokens": tokens, "labels": labels, "positions": positions}
