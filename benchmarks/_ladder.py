"""The ladder: one LoRA step of a decoder, where each rung adds a technique. All rungs are compiled and timed alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from _losses import offloaded_loss

import lowtide as lt
from lowtide.models import logits, loss

Tree = Any
RANK = 16
TARGETS = "layers/**/*_proj"


class Rung(NamedTuple):
    """A step, defined by its loss, the context in which it is traced, and the format of its projections."""

    said: str
    loss: Callable[[Any, Tree], tuple[Any, Tree]]
    around: Callable[[], Any] = contextlib.nullcontext
    base: str | None = None

    @property
    def is_hosted(self) -> bool:
        """Return whether the layer inputs are on the host."""
        return self.loss is HOSTED

    def adapted(self, model: Any, key: Any) -> Any:
        """Return the model with the adapters that the rung trains; also works within `jax.eval_shape`."""
        model = model if self.base is None else lt.quantize(model, TARGETS, self.base)
        return lt.lora.add(model, lt.lora.Config(rank=RANK, targets=TARGETS), key=key)


@contextlib.contextmanager
def all_scores() -> Generator[None]:
    """Make attention compute all scores at once within a ``with`` block."""
    from lowtide.ops import AttentionChoice, _attention

    choose = _attention.choose_attention
    _attention.choose_attention = lambda _: AttentionChoice("xla", "")
    try:
        yield
    finally:
        _attention.choose_attention = choose


def dense_loss(model: Any, batch: Tree) -> tuple[Any, Tree]:
    """Return the cross-entropy of all logits at once, over labels that are tokens."""
    is_token = batch["labels"] >= 0
    labels = jnp.where(is_token, batch["labels"], 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(model, batch["tokens"]), labels)
    return jnp.sum(losses * is_token) / jnp.sum(is_token), {}


HOSTED = partial(offloaded_loss, remat=True, inputs="host")
RUNGS = {
    "scores": Rung("all scores, all logits", dense_loss, all_scores),
    "chunks": Rung("+ loss in chunks", partial(loss, remat=False), all_scores),
    "kernel": Rung("+ attention by the kernel", partial(loss, remat=False)),
    "remat": Rung("+ layers run again, in tiles", partial(loss, remat=True)),
    "host": Rung("+ layers' inputs on the host", HOSTED),
    "nf4": Rung("+ base in nf4", HOSTED, base="nf4"),
}
GROUPS = Rung("layers run again, in groups of 4", partial(loss, remat=True, layers_per_remat=4))
"""For comparison with the rung that recomputes one layer at a time."""
