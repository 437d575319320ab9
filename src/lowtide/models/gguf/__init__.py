"""GGUF files, read only: metadata is converted to a `config.json`, and tensors to the weights of that model."""

from ._config import config_of as config_of
from ._header import read_header as read_header
from ._tensors import GgufTensor as GgufTensor
from ._tensors import open_gguf as open_gguf

__all__ = ["GgufTensor", "config_of", "open_gguf", "read_header"]
