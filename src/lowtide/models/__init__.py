"""The reference decoder, its files, and sampling."""

from ._config import LlamaConfig as LlamaConfig
from ._config import RopeScaling as RopeScaling
from ._files import base_path as base_path
from ._files import load as load
from ._files import load_config as load_config
from ._files import save as save
from ._generate import generate as generate
from ._host_bytes import HostBytes as HostBytes
from ._host_bytes import host_bytes as host_bytes
from ._llama import Llama as Llama
from ._llama import init as init
from ._llama import logits as logits
from ._llama import loss as loss
from ._tokenizer import load_tokenizer as load_tokenizer

__all__ = [
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
