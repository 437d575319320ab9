"""Load a base model and its tokenizer, and check that they fit each other and the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from .. import models
from ..core import ConfigError, ModelFileError, Selector
from ..quant import QuantizedWeight
from ._auxiliary_files import tokenizer_folder
from ._config import FOUR_BITS, FinetuneConfig


def open_base(
    directory: str | Path | None,
    *,
    tokenizer: str | Path | None = None,
    param_dtype: str = "auto",
    compute_dtype: str = "auto",
    host: Selector | None = None,
    sharding: Callable[[str, Any], jax.sharding.Sharding] | None = None,
    quantize: str | Mapping[str, str] | None = None,
    attention: str = "auto",
    tile_tokens: int | None = None,
) -> tuple[models.Decoder, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        directory: a directory in Hugging Face's layout, or a GGUF file; None: the embedded model.
        tokenizer: the folder of its tokenizer; None: `directory`. A GGUF file needs one.
        param_dtype: dtype of the parameters: auto (as stored; float32 on a CPU), or a dtype's name.
        compute_dtype: dtype of activations: auto (bfloat16 on an accelerator, float32 on a CPU), or a dtype's name.
        host: as in `lowtide.models.load`.
        sharding: as in `lowtide.models.load`.
        quantize: as in `lowtide.models.load`.
        attention: as in `FinetuneConfig`.
        tile_tokens: likewise.

    Returns:
        The model and the tokenizer. Pass the model's ``config.vocab_size`` as `vocab_size` to the data functions, so
        that they refuse tokens without an embedding.

    Raises:
        ModelFileError: for an unusable directory, or a tokenizer of another model. Added tokens may have ids beyond
            the embeddings; the data functions refuse texts with such tokens.
        ConfigError: for float16 on a CPU.

    Memory:
        As `lowtide.models.load`.
    """
    directory = Path(directory) if directory is not None else models.base_path()
    weights_dtype, activations_dtype = dtypes(param_dtype, compute_dtype)
    model_config = models.load_config(directory)
    folder = tokenizer_folder(directory, tokenizer)
    loaded_tokenizer = models.load_tokenizer(folder)
    # Only added tokens may be beyond the embeddings, such as the image token of Gemma 3's small models. `check_ids`
    # refuses a text with such a token.
    largest = max(loaded_tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest >= model_config.vocab_size:
        raise ModelFileError(
            f"{folder}: tokenizer.json has more tokens than the model has embeddings",
            expected=f"ids below {model_config.vocab_size}",
            got=f"ids up to {largest}",
            hint="use the tokenizer of this model; the two are from different models",
        )
    model = models.load(
        directory, dtype=weights_dtype, compute_dtype=activations_dtype, host=host, sharding=sharding, quantize=quantize
    )
    return with_implementation(model, attention, tile_tokens), loaded_tokenizer


def with_implementation(model: models.Decoder, attention: str, tile_tokens: int | None) -> models.Decoder:
    """Return the model with the attention implementation and tile size of a `FinetuneConfig`."""
    implementation: Any = None if attention == "auto" else attention
    return dataclasses.replace(model, attention=implementation, tile_tokens=tile_tokens)


def formats(config: FinetuneConfig) -> dict[str, str] | None:
    """Return the quantised format of frozen weights by glob; None without quantisation."""
    by_glob = {"layers/**/*_proj": config.quantize, "outer/**": config.quantize_embeddings}
    return {glob: format_name for glob, format_name in by_glob.items() if format_name is not None} or None


def refuse_for_model(config: FinetuneConfig, directory: str | Path) -> None:
    """Raise ConfigError for settings that the model does not support; only headers of the model's files are read.

    These are `layers_per_remat` above the number of layers and, for a quantised model, `full` and 4-bit layers in host
    memory. `open_base` separately refuses `quantize` for a model that is already quantised.
    """
    num_layers = models.load_config(directory).num_layers
    if config.layers_per_remat > num_layers:
        raise ConfigError(
            f"layers_per_remat is larger than the number of layers of {directory}",
            expected=f"from 1 to {num_layers}",
            got=config.layers_per_remat,
            hint=f"use about the root of the number of layers, which takes the fewest bytes: {round(num_layers**0.5)}",
        )
    method = models.quantization_of(directory)
    if method is None:
        return
    shapes = models.load_shapes(directory)
    leaves = jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    quantized = [leaf for leaf in leaves if isinstance(leaf, QuantizedWeight)]
    if quantized and config.full:
        raise ConfigError(
            f"full tunes all parameters, but those of {directory} are quantised by {method}",
            expected="adapters, or the directory of the unquantised model",
            got="full",
            hint="leave full out to train an adapter (QLoRA)",
        )
    if any(weight.format in FOUR_BITS for weight in quantized) and "parameters" in (config.offload or ()):
        raise ConfigError(
            f"offload of parameters: the weights of {directory} have 4 bits",
            expected="layers on the device: JAX runs no program on 4-bit arrays in host memory",
            got=f"{quantized[0].format}, with parameters on the host",
            hint="leave parameters out of offload; in 4 bits, layers take a quarter of bfloat16's bytes",
        )


def training_dtype(config: FinetuneConfig) -> str:
    """Return the dtype to load the model in; with `full`, ``auto`` means float32, the dtype of adapters too."""
    return "float32" if config.full and config.param_dtype == "auto" else config.param_dtype


def dtypes(param_dtype: str, compute_dtype: str, platform: str | None = None) -> tuple[str, str]:
    """Return the dtypes of parameters and activations that ``auto`` stands for on ``cpu``, ``gpu`` or ``tpu``.

    Parameters on an accelerator keep ``auto``, the stored dtype. Without `platform` the hardware at hand decides.
    float16 activations on a CPU raise ConfigError.
    """
    # XLA multiplies in float32 on a CPU. It would hold a float32 copy of every half-precision stack in addition to it.
    is_on_cpu = (platform or jax.default_backend()) == "cpu"
    weights_dtype = "float32" if is_on_cpu and param_dtype == "auto" else param_dtype
    activations_dtype = ("float32" if is_on_cpu else "bfloat16") if compute_dtype == "auto" else compute_dtype
    if is_on_cpu and activations_dtype == "float16":
        raise ConfigError(
            "compute_dtype is float16, but a CPU does not multiply in float16",
            expected="auto, float32 or bfloat16 on a CPU",
            got="float16",
            hint="use bfloat16, which takes as many bytes and has the range of float32",
        )
    return weights_dtype, activations_dtype
