"""Decoder models of many families: configs, checkpoints, tokenizers and generation."""

from ..core import gguf_file as gguf_file
from ..core import require_extra

require_extra("finetune")

from ._config import DecoderConfig as DecoderConfig
from ._config import DeltaNet as DeltaNet
from ._config import Experts as Experts
from ._config import RopeScaling as RopeScaling
from ._decoder import Decoder as Decoder
from ._decoder import hidden_states as hidden_states
from ._decoder import init as init
from ._decoder import logits as logits
from ._decoder import loss as loss
from ._decoder import unstack as unstack
from ._decoder import with_score_head as with_score_head
from ._files import HostBytes as HostBytes
from ._files import StoredWeight as StoredWeight
from ._files import base_path as base_path
from ._files import host_bytes as host_bytes
from ._files import load as load
from ._files import load_config as load_config
from ._files import load_shapes as load_shapes
from ._files import quantization_of as quantization_of
from ._files import save as save
from ._files import stored_weights as stored_weights
from ._generation import Completion as Completion
from ._generation import Conversation as Conversation
from ._generation import Sampling as Sampling
from ._generation import cache_bytes as cache_bytes
from ._generation import generate as generate
from ._generation import generate_batch as generate_batch
from ._generation import stream as stream
from ._tokenizer import load_special_tokens as load_special_tokens
from ._tokenizer import load_tokenizer as load_tokenizer

__all__ = [
    "Completion",
    "Conversation",
    "Decoder",
    "DecoderConfig",
    "DeltaNet",
    "Experts",
    "HostBytes",
    "RopeScaling",
    "Sampling",
    "StoredWeight",
    "base_path",
    "cache_bytes",
    "generate",
    "generate_batch",
    "gguf_file",
    "host_bytes",
    "hidden_states",
    "init",
    "load",
    "load_config",
    "load_shapes",
    "load_special_tokens",
    "load_tokenizer",
    "logits",
    "loss",
    "quantization_of",
    "save",
    "stored_weights",
    "stream",
    "unstack",
    "with_score_head",
]
