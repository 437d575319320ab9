"""Decoders of many families, their files, and sampling."""

from ._config import DecoderConfig as DecoderConfig
from ._config import Experts as Experts
from ._config import LlamaConfig as LlamaConfig
from ._config import RopeScaling as RopeScaling
from ._decoder import Decoder as Decoder
from ._decoder import Llama as Llama
from ._decoder import init as init
from ._decoder import logits as logits
from ._decoder import loss as loss
from ._files import base_path as base_path
from ._files import load as load
from ._files import load_config as load_config
from ._files import save as save
from ._generate import generate as generate
from ._host_bytes import HostBytes as HostBytes
from ._host_bytes import host_bytes as host_bytes
from ._tokenizer import load_tokenizer as load_tokenizer

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Experts",
    "HostBytes",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "base_path",
    "generate",
    "host_bytes",
    "init",
    "load",
    "load_config",
    "load_tokenizer",
    "logits",
    "loss",
    "save",
]
