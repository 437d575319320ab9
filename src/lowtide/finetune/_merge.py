"""Write a model with its adapters merged, as a directory that other software loads.

The files go to a sibling folder whose name ends in `.unfinished`, which is renamed to the requested name at the end.
So a killed process leaves nothing under the requested name.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .. import models
from ..adapters import lora
from ..core import ConfigError, OutputError, input_file, parse_json, write_files
from ..quant import QuantizedWeight, dequantize
from ._base import (
    copy_config_keys,
    load_end_tokens,
    read_auxiliary_files,
    read_file,
    tokenizer_folder,
    with_end_tokens,
)


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
        directory: the base in Hugging Face's layout, or a GGUF file; None: the embedded model.
        adapters: directories of adapters in PEFT's format; their updates are summed.
        out: the folder to create; a folder that is not empty is refused.
        weights: a factor for each adapter; None: 1.
        dtype: dtype of the written weights; None: as stored in the base, or that of its embedding if it is quantised.
        max_shard_bytes: the most bytes in one file.
        chat_template: a file to write as `chat_template.jinja`; None: the base's template, if it has one.
        tokenizer: the folder of the base's tokenizer; None: the base's directory. A GGUF file needs one.

    Returns:
        The merged model.

    Raises:
        OutputError: when the folder is not empty or cannot be written.
        ModelFileError: for an unusable base or adapter.
        ConfigError: for weights that do not fit the adapters, or an unknown dtype.

    Memory:
        Holds the base, plus a second copy of each adapted weight while it is merged. With `dtype` or a quantised base,
        the base is in float32. The host holds one shard at a time.
    """
    base, out = Path(directory) if directory is not None else models.base_path(), Path(out)
    if not adapters:
        raise ConfigError(
            "there is no adapter to merge", expected="at least one directory", hint="name one with --adapter"
        )
    _refuse_full_folder(out)
    tokenizer_dir = tokenizer_folder(base, tokenizer)
    tokenizer_file = input_file(tokenizer_dir, "tokenizer.json", hint="save the tokenizer in the fast format")
    files = read_auxiliary_files(tokenizer_dir, chat_template)
    is_quantized = models.gguf_file(base) is not None or models.quantization_of(base) is not None
    if is_quantized and dtype is None:  # the dtype that bitsandbytes and PEFT would store; still rounded only once
        dtype = jnp.dtype(models.load_shapes(base).outer["embed"]["weight"].dtype).name
    model = models.load(base, dtype="auto" if dtype is None else "float32")
    if is_quantized and any(isinstance(leaf, QuantizedWeight) for leaf in _weight_leaves(model)):
        model = dequantize(model)
    merged = lora.merge(lora.combine([lora.load(model, adapter) for adapter in adapters], weights))
    if dtype is not None:  # the base was loaded in float32, so weights are rounded only here
        merged = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, merged)
    loaded_tokenizer = models.load_tokenizer(tokenizer_dir)
    ends = load_end_tokens(
        merged.config, loaded_tokenizer, base, tokenizer_dir=tokenizer_dir, chat_template=chat_template
    )
    settings = [_adapter_settings(Path(adapter)) for adapter in adapters]
    files["README.md"] = _card(directory, out, settings, weights, merged).encode()
    unfinished = out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(4)}.unfinished"
    try:
        models.save(merged, unfinished, tokenizer=tokenizer_file, max_shard_bytes=max_shard_bytes)
        copy_config_keys(base, unfinished, merged.config)
        write_files(unfinished, with_end_tokens(files, ends, merged.config))
        os.replace(unfinished, out)  # also replaces an empty folder
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be written", got=str(error), hint="choose another folder; nothing was left there"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return merged


def _weight_leaves(model: models.Decoder) -> list[Any]:
    return jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))


def _refuse_full_folder(out: Path) -> None:
    """Raise OutputError when a folder is not empty or cannot be read, or when a file has its name."""
    try:
        is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    except OSError as error:
        raise OutputError(f"{out}: cannot be read", got=str(error), hint="choose another folder") from error
    if not is_free:
        raise OutputError(
            f"{out}: the folder is not empty",
            expected="a new or an empty folder",
            hint="choose another --out; nothing in it was changed",
        )


def _adapter_settings(adapter: Path) -> dict[str, Any]:
    raw = parse_json(read_file(adapter, "adapter_config.json"), str(adapter))
    common = "peft_type r lora_alpha use_rslora use_dora rank_pattern alpha_pattern"
    names = f"{common} target_modules feedforward_modules target_parameters modules_to_save".split()
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
