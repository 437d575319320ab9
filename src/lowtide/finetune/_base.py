"""The base model of a run: its weights, tokenizer and end tokens; and models made from it, such as merged ones.

`lowtide.models.save` writes the weights, and the keys of config.json that define the architecture. This module copies
the base's tokenizer, chat template, generation settings, and other keys of its config.json, such as token ids.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp

from .. import models
from ..adapters import lora
from ..core import (
    ConfigError,
    DataError,
    ModelFileError,
    OutputError,
    Selector,
    check_choice,
    check_integer,
    input_file,
    parse_json,
    read_input,
    write_files,
)
from ..quant import QuantizedWeight, dequantize
from ._config import FOUR_BITS, Dtype, FinetuneConfig
from .data import ChatTemplate, chat_turn, load_chat_template
from .data._encode import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COPIED_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)
_SKIPPED_KEYS = {"rope_parameters", "dtype", "quantization_config", "text_config", "vision_config"}
"""Keys of the base's config.json that are not copied: the written file states them in another form, or they describe
parts that are not written (quantisation, the vision tower)."""
_MOST_BYTES = 256 * 1024**2
_GENERATION_CONFIG = "generation_config.json"
_ANSWER = "Spring tide"


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
        directory: a directory in Hugging Face's layout, or a GGUF file; None: the small model included in Lowtide.
        tokenizer: the folder of the tokenizer; None: `directory`, which then has to be a folder with `tokenizer.json`.
        param_dtype: dtype of the parameters: auto (as stored; float32 on a CPU), or a dtype's name.
        compute_dtype: dtype of activations: auto (bfloat16 on an accelerator, float32 on a CPU), or a dtype's name.
        host: as in `lowtide.models.load`.
        sharding: as in `lowtide.models.load`.
        quantize: as in `lowtide.models.load`.
        attention: as in `FinetuneConfig`.
        tile_tokens: as in `FinetuneConfig`.

    Returns:
        The model and the tokenizer. Pass the model's ``config.vocab_size`` as `vocab_size` to the data functions, so
        that they refuse tokens without an embedding.

    Raises:
        ModelFileError: for an unusable directory, or a tokenizer with ids beyond the model's embeddings. Ids of added
            tokens may be beyond them; the data functions refuse texts with such tokens.
        ConfigError: for the `compute_dtype` float16 on a CPU. Other errors are those of `lowtide.models.load`.

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
        problem = f"tokenizer.json has ids up to {largest}, but the model has {model_config.vocab_size} embeddings"
        hint = "use the tokenizer of this model; the two are from different models"
        raise ModelFileError(f"{folder}: {problem}", hint=hint)
    model = models.load(
        directory, dtype=weights_dtype, compute_dtype=activations_dtype, host=host, sharding=sharding, quantize=quantize
    )
    return with_implementation(model, attention, tile_tokens), loaded_tokenizer


def directory_of(config: FinetuneConfig) -> Path:
    """Return the path in `config.model`, or the folder of the small model included in Lowtide."""
    return Path(config.model) if config.model is not None else models.base_path()


def with_implementation(model: models.Decoder, attention: str, tile_tokens: int | None) -> models.Decoder:
    """Return the model with the attention implementation and tile size of a `FinetuneConfig`."""
    implementation: Any = None if attention == "auto" else attention
    return dataclasses.replace(model, attention=implementation, tile_tokens=tile_tokens)


def formats(config: FinetuneConfig) -> dict[str, str] | None:
    """Return the argument `quantize` of `lowtide.models.load`, a dict from globs to formats; None: quantise nothing."""
    if config.quantize is None and config.quantize_embeddings is None:
        return None
    projections = models.load_config(directory_of(config)).projections
    by_glob = {**dict.fromkeys(projections, config.quantize), "outer/**": config.quantize_embeddings}
    return {glob: format_name for glob, format_name in by_glob.items() if format_name is not None} or None


def refuse_for_model(config: FinetuneConfig, directory: str | Path) -> None:
    """Raise ConfigError for settings that the model does not support; only headers of the model's files are read.

    `open_base` separately refuses `quantize` for a model that is already quantised.
    """
    model_config = models.load_config(directory)
    num_layers = model_config.num_groups
    size = len(model_config.pattern)
    kind = "layers" if size == 1 else f"groups of {size} layers"
    hint = f"{directory} has {num_layers} {kind}; about their root takes the fewest bytes: {round(num_layers**0.5)}"
    check_integer("layers_per_remat", config.layers_per_remat, 1, num_layers, hint=hint)
    method = models.quantization_of(directory)
    if method is None:
        return
    quantized = quantized_weights(models.load_shapes(directory))
    if quantized and config.full:
        hint = "leave full out to train an adapter (QLoRA), or name the directory of the unquantised model"
        raise ConfigError(f"full tunes all parameters, but those of {directory} are quantised by {method}", hint=hint)
    if any(weight.format in FOUR_BITS for weight in quantized) and "parameters" in (config.offload or ()):
        problem = f"{directory} has 4-bit weights, and JAX runs no program on 4-bit arrays in host memory"
        hint = "leave parameters out of offload; in 4 bits, layers take a quarter of bfloat16's bytes"
        raise ConfigError(problem, hint=hint)


def quantized_weights(model: models.Decoder) -> list[QuantizedWeight]:
    """Return the quantised weights of a model."""
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedWeight)]


def training_dtype(config: FinetuneConfig) -> str:
    """Return the dtype for loading the model. With `full`, ``auto`` becomes float32, the dtype that adapters have."""
    return "float32" if config.full and config.param_dtype == "auto" else config.param_dtype


def dtypes(param_dtype: str, compute_dtype: str, platform: str | None = None) -> tuple[str, str]:
    """Return the dtypes of parameters and activations, with ``auto`` replaced by the default of a platform.

    `platform` is ``cpu``, ``gpu`` or ``tpu``; None: the hardware at hand. On an accelerator, the dtype of parameters
    stays ``auto``, which means the stored dtype. float16 activations on a CPU raise ConfigError.
    """
    # XLA for CPU multiplies in float32. It would hold half-precision weights and a float32 copy of them.
    is_on_cpu = (platform or jax.default_backend()) == "cpu"
    weights_dtype = "float32" if is_on_cpu and param_dtype == "auto" else param_dtype
    activations_dtype = ("float32" if is_on_cpu else "bfloat16") if compute_dtype == "auto" else compute_dtype
    if is_on_cpu and activations_dtype == "float16":
        hint = "use bfloat16, which takes as many bytes and has the range of float32"
        raise ConfigError("compute_dtype is float16, but a CPU does not multiply in float16", hint=hint)
    return weights_dtype, activations_dtype


def tokenizer_folder(base: Path, tokenizer: str | Path | None) -> Path:
    """Return the folder of a model's tokenizer and chat template; a GGUF file without them raises ModelFileError."""
    if tokenizer is not None:
        return Path(tokenizer)
    if models.gguf_file(base) is not None and not os.path.lexists(base / "tokenizer.json"):
        hint = "name the directory of the original model's tokenizer, with tokenizer.json: --tokenizer DIR"
        raise ModelFileError(f"{base}: the tokenizer inside a GGUF file is not read", hint=hint)
    return base


def read_auxiliary_files(base: Path, chat_template: str | Path | None = None) -> dict[str, bytes]:
    """Read the files of a base that are copied to every model made from it; return their contents by name."""
    files = {name: read_file(base, name) for name in _COPIED_FILES if os.path.lexists(base / name)}
    if chat_template is not None:
        files["chat_template.jinja"] = read_file(Path(chat_template).parent, Path(chat_template).name)
    return files


def write_model(
    model: models.Decoder, base: Path, out: Path, files: Mapping[str, bytes], ends: EndTokens, **options: Any
) -> None:
    """Write a model and the files that go with its weights; `options` go to `lowtide.models.save`."""
    models.save(model, out, **options)
    _copy_config_keys(base, out, model.config)
    write_files(out, with_end_tokens(files, ends, model.config))


def _copy_config_keys(base: Path, out: Path, config: models.DecoderConfig) -> None:
    """Copy keys that the config.json in `out` lacks, such as token ids, from the base's config.json."""
    name = "config.json"
    if models.gguf_file(base) is not None:  # a GGUF file has no such keys
        return
    saved, original = (parse_json(read_file(folder, name), str(folder / name)) for folder in (out, base))
    text = original.get("text_config")
    keys = text if isinstance(text, dict) else original
    extra = {key: value for key, value in keys.items() if key not in _SKIPPED_KEYS}
    # `save` writes null for a key whose default in Transformers may be wrong for the model, such as Phi-3's
    # `pad_token_id`. A value of the base takes precedence.
    written = {key: value for key, value in saved.items() if value is not None or key not in extra}
    write_files(out, {name: (json.dumps({**extra, **written}, indent=2) + "\n").encode()})
    # A copied key may change what the written keys mean. So load the merged file, and compare the configurations.
    with warnings.catch_warnings(action="ignore"):
        try:
            is_same = models.load_config(out) == config
        except ModelFileError:
            is_same = False
    if not is_same:
        write_files(out, {name: (json.dumps(saved, indent=2) + "\n").encode()})


def read_file(folder: Path, name: str) -> bytes:
    """Read one file of a directory."""
    return read_input(input_file(folder, name, hint="copy it again"), most_bytes=_MOST_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndTokens:
    """Ids of the tokens that end a generated text.

    A base model's config.json names the end of a document (``<|endoftext|>``). Chats end their turns with another token
    (``<|im_end|>``), and a model tuned on chats writes only this second token. So an answer ends at every end
    token of config.json, generation_config.json and the tokenizer. It also ends at the token that closes an assistant's
    turn in the chat template.
    """

    answer: tuple[int, ...]
    """All end tokens; the end tokens of config.json come first."""
    text: int | None
    """Token that training appends to documents and completions (from config.json, else the tokenizer), or None."""
    turn: int | None
    """Token that closes an assistant's turn in the chat template; None without a template or such a token."""
    is_turn_open: bool
    """Whether chats teach no stop: the template writes no added token after an answer, or one without an embedding."""


def load_end_tokens(
    config: models.DecoderConfig,
    tokenizer: Tokenizer,
    directory: str | Path | None,
    *,
    tokenizer_dir: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> EndTokens:
    """Collect the tokens that end an answer.

    Args:
        config: the model's configuration.
        tokenizer: the model's tokenizer.
        directory: the model's directory, or a GGUF file; None: the small model included in Lowtide.
        tokenizer_dir: the folder of the tokenizer, if it is not `directory`.
        chat_template: a file to use instead of the model's template.

    Raises:
        ModelFileError: for an unusable file, and for an end token outside the vocabulary; the error names the file.
    """
    folders = [Path(folder) for folder in (directory, tokenizer_dir) if folder is not None]
    sources: list[tuple[Any, Any]] = [(directory or "the embedded model", config.eos_token_id)]
    for folder in folders:
        if os.path.lexists(folder / _GENERATION_CONFIG):
            path = input_file(folder, _GENERATION_CONFIG, hint="copy it from the model's source again")
            sources.append((path, parse_json(read_input(path, most_bytes=1024**2), str(path)).get("eos_token_id")))
    ends = [end for source, value in sources for end in _parse_ids(value, source, config.vocab_size)]
    template_folder = (folders or [models.base_path()])[-1]
    tokenizer_end = tokenizer.token_to_id(models.load_special_tokens(template_folder).get("eos_token", ""))
    try:
        template = load_chat_template(template_folder, chat_template)
        turn, is_turn_open = (None, False) if template is None else _turn_end(template, tokenizer)
    except (DataError, ModelFileError):  # plain text needs no template; rendering a chat raises this error again
        turn, is_turn_open = None, False
    # The tokenizer may have tokens that the model has no embedding for.
    is_turn_open |= turn is not None and turn >= config.vocab_size  # the token cannot be learned
    tokenizer_end, turn = (None if end is None or end >= config.vocab_size else end for end in (tokenizer_end, turn))
    text = tokenizer_end if config.eos_token_id is None else ends[0]
    answer = [*ends, *(end for end in (tokenizer_end, turn) if end is not None)]
    return EndTokens(answer=tuple(dict.fromkeys(answer)), text=text, turn=turn, is_turn_open=is_turn_open)


def _parse_ids(value: Any, source: Any, vocab_size: int) -> Sequence[int]:
    ends: list[Any] = [*value] if isinstance(value, tuple | list) else [] if value is None else [value]
    hint = "copy the file from the model's source again; it belongs to a model with another vocabulary"
    for end in ends:
        check_integer(f"{source}: eos_token_id", end, 0, vocab_size - 1, hint=hint, error=ModelFileError)
    return ends


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int | None, bool]:
    """Return the token that closes an answer in a rendered chat, or None, and whether the chat lacks such a token.

    That token is the first added token after the answer. If the rendered chat lacks the answer, return (None, False).
    """
    text = chat_turn(template, _ANSWER)
    begin = text.rfind(_ANSWER)
    if begin < 0:
        return None, False
    begin += len(_ANSWER)
    encoding = encode(tokenizer, [text], special=False, offsets=True)[0]
    added = tokenizer.get_added_tokens_decoder()
    tokens = zip(encoding.ids, encoding.offsets, strict=True)
    end = next((id for id, (start, _) in tokens if start >= begin and id in added), None)
    return end, end is None


def with_end_tokens(files: Mapping[str, bytes], ends: EndTokens, config: models.DecoderConfig) -> dict[str, bytes]:
    """Return a model's files (a dict from names to contents), with all end tokens in generation_config.json.

    The `generate` of transformers stops at the end tokens of this file, or at those of `config` if the file has none.
    """
    settings = parse_json(files[_GENERATION_CONFIG], _GENERATION_CONFIG) if _GENERATION_CONFIG in files else {}
    stop_ids = settings.get("eos_token_id", config.eos_token_id)
    if set(ends.answer) <= set(stop_ids if isinstance(stop_ids, list | tuple) else [stop_ids]):
        return dict(files)
    if config.bos_token_id is not None:
        settings.setdefault("bos_token_id", config.bos_token_id)
    settings["eos_token_id"] = ends.answer[0] if len(ends.answer) == 1 else list(ends.answer)
    return {**files, _GENERATION_CONFIG: (json.dumps(settings, indent=2) + "\n").encode()}


# --- merged models ---------------------------------------------------------------------------------------------------

# The files go to a sibling folder whose name ends in `.unfinished`, which is renamed to the requested name at the end.
# So a killed process leaves nothing under the requested name.


def write_merged(
    directory: str | Path | None,
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    chat_template: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> models.Decoder:
    """Merge adapters into their base, and write the directory of a whole model.

    Args:
        directory: the base in Hugging Face's layout, or a GGUF file; None: the small model included in Lowtide.
        adapters: directories of adapters in PEFT's format; their updates are summed.
        out: the folder to create; a folder that is not empty is refused.
        weights: a factor for each adapter; None: 1.
        dtype: dtype of the written weights; None: the stored dtype, or the dtype of the embedding of a quantised base.
        max_shard_bytes: the most bytes in one file.
        chat_template: a file to write as `chat_template.jinja`; None: the base's template, if it has one.
        tokenizer: the folder of the base's tokenizer; None: `directory`, which then has to contain `tokenizer.json`.

    Returns:
        The merged model.

    Raises:
        OutputError: when the folder is not empty or cannot be written.
        ModelFileError: for an unusable base or adapter.
        ConfigError: for an unknown `dtype`, without adapters, or if `weights` does not have one number per adapter.

    Memory:
        Holds the base and a second copy of the adapted weights. With `dtype` or a quantised base, both are in float32,
        and the result in the written dtype is held, too. Writing takes a few pieces of 64 MiB on the host.
    """
    if dtype is not None:
        check_choice("dtype", dtype, [name for name in get_args(Dtype) if name != "auto"])
    base, out = Path(directory) if directory is not None else models.base_path(), Path(out)
    if not adapters:
        raise ConfigError("there is no adapter to merge", hint="name at least one directory with --adapter")
    _refuse_full_folder(out)
    tokenizer_dir = tokenizer_folder(base, tokenizer)
    tokenizer_file = input_file(tokenizer_dir, "tokenizer.json", hint="save the tokenizer in the fast format")
    files = read_auxiliary_files(tokenizer_dir, chat_template)
    is_quantized = models.gguf_file(base) is not None or models.quantization_of(base) is not None
    if is_quantized and dtype is None:  # the dtype that bitsandbytes and PEFT would store; still rounded only once
        dtype = jnp.dtype(models.load_shapes(base).outer["embed"]["weight"].dtype).name
    model = models.load(base, dtype="auto" if dtype is None else "float32")
    if is_quantized and quantized_weights(model):
        model = dequantize(model)
    merged = lora.merge(lora.combine([lora.load(model, adapter) for adapter in adapters], weights))
    if dtype is not None:  # the base was loaded in float32, so weights are rounded only here
        merged = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, merged)
    template_kwargs = {"tokenizer_dir": tokenizer_dir, "chat_template": chat_template}
    ends = load_end_tokens(merged.config, models.load_tokenizer(tokenizer_dir), base, **template_kwargs)
    settings = [_adapter_settings(Path(adapter)) for adapter in adapters]
    files["README.md"] = _card(directory, out, settings, weights, merged).encode()
    unfinished = out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(4)}.unfinished"
    try:
        write_model(merged, base, unfinished, files, ends, tokenizer=tokenizer_file, max_shard_bytes=max_shard_bytes)
        if Path(adapters[0], "modules.json").is_file():  # of an embedding model, for sentence-transformers
            shutil.copytree(adapters[0], unfinished, dirs_exist_ok=True, ignore=shutil.ignore_patterns("adapter_*"))
            _add_padding_token(unfinished / "tokenizer_config.json")
        os.replace(unfinished, out)  # also replaces an empty folder
    except OSError as error:
        hint = "choose another folder; nothing was left there"
        raise OutputError(f"{out}: cannot be written", got=str(error), hint=hint) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return merged


def _add_padding_token(path: Path) -> None:
    """Name the end token as padding if a tokenizer names none; sentence-transformers needs one to make batches."""
    if path.is_file() and not (settings := json.loads(path.read_text())).get("pad_token"):
        path.write_text(json.dumps({**settings, "pad_token": settings.get("eos_token")}, indent=2))


def _refuse_full_folder(out: Path) -> None:
    """Raise OutputError when a folder is not empty or cannot be read, or when a file has its name."""
    try:
        is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    except OSError as error:
        raise OutputError(f"{out}: cannot be read", got=str(error), hint="choose another folder") from error
    if not is_free:
        raise OutputError(f"{out}: the folder is not empty", hint="choose another --out; nothing in it was changed")


def _adapter_settings(adapter: Path) -> dict[str, Any]:
    raw = parse_json(read_file(adapter, "adapter_config.json"), str(adapter))
    variants = sorted((name for name in raw if name.startswith("use_")), reverse=True)  # such as "use_dora"
    names = "rank_pattern alpha_pattern target_modules feedforward_modules target_parameters modules_to_save".split()
    names = ["peft_type", "r", "lora_alpha", *variants, *names]
    return {"name": adapter.name, **{name: raw[name] for name in names if raw.get(name)}}


def _card(
    directory: str | Path | None,
    out: Path,
    settings: Sequence[dict[str, Any]],
    weights: Sequence[float] | None,
    merged: models.Decoder,
) -> str:
    """Return the model card, with the header that Hugging Face's hub reads."""
    # The card has only the last part of the path: the other folders of this machine are private.
    name = "lowtide's embedded base model" if directory is None else Path(directory).resolve().name
    folder = json.dumps(out.absolute().name, ensure_ascii=False)[1:-1]
    count = sum(leaf.size for leaf in jax.tree.leaves(merged) if jnp.issubdtype(leaf.dtype, jnp.floating))
    dtype = jnp.dtype(merged.outer["embed"]["weight"].dtype).name
    rows = [
        f"- {json.dumps(setting.pop('name'), ensure_ascii=False)}"
        + (f", times {weights[index]:g}" if weights is not None else "")
        + "".join(f"\n    - `{key}`: `{json.dumps(value, ensure_ascii=False)}`" for key, value in setting.items())
        for index, setting in enumerate(map(dict, settings))
    ]
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "safetensors", "tokenizers"))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
base_model: {json.dumps(name, ensure_ascii=False)}
base_model_relation: finetune
tags:
- lowtide
- lora
- merged
---

# {name}, with merged adapters

{count:,} parameters in {dtype}, of the family {merged.config.family}. Made from {name} by merging these adapters
into its weights, in float32, rounded once:

{chr(10).join(rows)}

The licence is that of the base model.

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

or `lt.models.load("{folder}")`.

Made by lowtide {version("lowtide")} with {versions}.
"""
