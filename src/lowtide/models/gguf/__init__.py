"""GGUF files, read only: metadata is converted to a `config.json`, and tensors to the weights of that model."""

from ._config import config_of as config_of
from ._header import read_header as read_header
from ._tensors import GgufTensor as GgufTensor
from ._tensors import map_tensors as map_tensors

__all__ = ["GgufTensor", "config_of", "map_tensors", "read_header"]
