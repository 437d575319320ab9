"""GGUF files, read only: their metadata as a `config.json`, their tensors as weights of that model."""

from ._file import gguf_model as gguf_model
from ._file import open_gguf as open_gguf
from ._header import read_header as read_header
from ._tensors import GgufTensor as GgufTensor

__all__ = ["GgufTensor", "gguf_model", "open_gguf", "read_header"]
