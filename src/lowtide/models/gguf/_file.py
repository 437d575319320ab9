"""Tensors of a GGUF file under their Hugging Face names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core import ModelFileError, shortened, shown
from ._config import CONSTANTS, config_of
from ._header import Header, Place, read_header
from ._library import tensor_names
from ._tensors import GgufTensor

_CONVERT_HINT = "convert the original again: the file is damaged, or has another version of its architecture"
_MOST_EXPERTS = 2**18
"""Most experts in all layers together: ten times as many as the largest models have."""
_LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_STACKED = re.compile(r"blk\.\d+\.ffn_\w+_exps\.")
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


def gguf_model(file: Path) -> dict[str, Any]:
    """Return the metadata of the file as the contents of a `config.json`.

    Args:
        file: result of `core.gguf_file`.

    Raises:
        ModelFileError: for a damaged file or an unsupported model.
        ConfigError: when the library `gguf` is not installed.
    """
    return config_of(read_header(file))


@contextlib.contextmanager
def open_gguf(
    file: Path, *, layers: int, experts: int, heads: Mapping[str, int], names: Iterable[str]
) -> Generator[dict[str, GgufTensor], None, None]:
    """Yield the tensors of a file by Hugging Face name.

    Args:
        file: result of `core.gguf_file`.
        layers: number of layers.
        experts: number of experts per layer; 1 without a mixture of experts.
        heads: number of heads of ``"q"`` and ``"k"``.
        names: names of all the model's weights, generated lazily.

    Raises:
        ModelFileError: for a damaged file, a missing tensor, or a tensor that is not part of the model.

    Memory:
        Headers; each tensor is read on demand.
    """
    header = read_header(file)
    if layers > len(header.places):  # checked before that many names are generated
        raise ModelFileError(
            f"{file}: the metadata requires tensors that the file lacks",
            expected=f"weights of {layers} layers",
            got=f"{len(header.places)} tensors",
            hint=_CONVERT_HINT,
        )
    if experts > 1:
        _check_experts(header, [place for name, place in header.places.items() if _STACKED.match(name)], experts)
        if layers * experts > _MOST_EXPERTS:
            raise ModelFileError(
                f"{file}: too many experts",
                expected=f"at most {_MOST_EXPERTS:,} in all layers",
                got=f"{layers} layers of {experts:,}",
                hint=_CONVERT_HINT,
            )
    yield _map_tensors(header, names, experts, heads)


def _check_experts(header: Header, places: Iterable[Place], experts: int) -> None:
    for place in places:
        if len(place.shape) != 3 or place.shape[0] != experts:
            raise ModelFileError(
                f"{header.file}: the shape of {shown(place.name)} differs from the metadata",
                expected=f"{experts} matrices, one for each expert",
                got=place.shape,
                hint=_CONVERT_HINT,
            )


def _map_tensors(header: Header, names: Iterable[str], experts: int, heads: Mapping[str, int]) -> dict[str, GgufTensor]:
    architecture = str(header.fields["general.architecture"])
    translate = tensor_names(architecture)
    tensors: dict[str, GgufTensor] = {}
    for hf_name in names:
        expert, layer = _EXPERT.search(hf_name), _LAYER.search(hf_name)
        # The library's table covers one layer and no experts: look up the name in layer 0, then insert the layer again.
        first_layer_name = translate(_LAYER.sub("0", _EXPERT.sub("", hf_name)))
        name = (
            first_layer_name.replace("blk.0.", f"blk.{layer[0]}.", 1)
            if first_layer_name is not None and layer is not None
            else first_layer_name
        )
        place = header.places.get(name or "")
        if place is None:
            raise ModelFileError(
                f"{header.file}: the metadata requires tensors that the file lacks",
                expected=f"{name or 'a tensor'}, for {hf_name}",
                got=f"{len(header.places)} tensors without it",
                hint=_CONVERT_HINT,
            )
        if expert is not None:
            _check_experts(header, [place], experts)
        permuted = _PERMUTED.search(hf_name) if architecture == "llama" else None
        is_shifted = architecture.startswith("gemma") and hf_name.endswith("norm.weight")
        tensors[hf_name] = GgufTensor(
            name=place.name,
            file=header.file,
            place=place,
            expert=None if expert is None else int(expert[1]),
            heads=0 if permuted is None else heads[permuted[1]],
            added=1.0 if is_shifted else 0.0,
        )
    used = {tensor.name for tensor in tensors.values()}
    for name in header.places:
        if name not in used and name not in CONSTANTS:
            raise ModelFileError(
                f"{header.file}: it has {shown(name)}, which its metadata does not describe",
                got=shortened(", ".join(sorted(set(header.places) - used - set(CONSTANTS)))),
                hint="load the original safetensors, if Lowtide supports the family; this tensor would be ignored",
            )
    return tensors
