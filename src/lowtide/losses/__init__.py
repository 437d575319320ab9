"""Losses that avoid large intermediate arrays, such as the logits of all tokens, and losses of preferences."""

from ._contrastive import embed_in_chunks as embed_in_chunks
from ._contrastive import info_nce as info_nce
from ._cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from ._distillation import distillation as distillation
from ._distillation import distillation_top_k as distillation_top_k
from ._distillation import top_log_probs as top_log_probs
from ._log_probs import chunked_log_probs as chunked_log_probs
from ._preferences import cpo as cpo
from ._preferences import dpo as dpo
from ._preferences import kto as kto
from ._preferences import orpo as orpo
from ._preferences import reward as reward
from ._preferences import simpo as simpo

__all__ = [
    "chunked_cross_entropy",
    "chunked_log_probs",
    "cpo",
    "distillation",
    "distillation_top_k",
    "dpo",
    "embed_in_chunks",
    "info_nce",
    "kto",
    "orpo",
    "reward",
    "simpo",
    "top_log_probs",
]
