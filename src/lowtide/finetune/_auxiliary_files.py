"""Files that go with a model's weights: tokenizer, chat template, generation settings, and further keys of config.json.

`save` functions of `lowtide.models` write weights and the sizes in config.json. This module copies the other files of
the base and the other keys of its config.json, such as token ids.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

from .. import models
from ..core import ModelFileError, input_file, parse_json, read_input, write_files

_COPIED_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)
_SKIPPED_KEYS = {"rope_parameters", "dtype", "quantization_config", "text_config", "vision_config"}
"""Keys of the base's config.json that are not copied: the written file states them in another form, or they describe
parts that are not written (quantisation, the vision tower)."""
_MOST_BYTES = 256 * 1024**2


def tokenizer_folder(base: Path, tokenizer: str | Path | None) -> Path:
    """Return the folder of a model's tokenizer and chat template; a GGUF file without one raises ModelFileError."""
    if tokenizer is not None:
        return Path(tokenizer)
    if models.gguf_file(base) is not None and not os.path.lexists(base / "tokenizer.json"):
        raise ModelFileError(
            f"{base}: the tokenizer inside a GGUF file is not read",
            expected="the directory of the original model's tokenizer, with tokenizer.json",
            hint="name it with --tokenizer DIR",
        )
    return base


def read_auxiliary_files(base: Path, chat_template: str | Path | None = None) -> dict[str, bytes]:
    """Read the files of a base that are copied to every model made from it, by name.

    The file `chat_template`, if given, replaces the base's `chat_template.jinja`.
    """
    files = {name: read_file(base, name) for name in _COPIED_FILES if os.path.lexists(base / name)}
    if chat_template is not None:
        files["chat_template.jinja"] = read_file(Path(chat_template).parent, Path(chat_template).name)
    return files


def copy_config_keys(base: Path, out: Path, config: models.DecoderConfig) -> None:
    """Copy further keys of the base's config.json, such as token ids, into the config.json in `out`.

    Keys that the saved file states in another form are not copied. If the merged file describes a different model than
    `config`, nothing is copied. A GGUF base has no further keys.
    """
    name = "config.json"
    if models.gguf_file(base) is not None:
        return
    saved, original = (parse_json(read_file(folder, name), str(folder / name)) for folder in (out, base))
    text = original.get("text_config")
    extra = {
        key: value for key, value in (text if isinstance(text, dict) else original).items() if key not in _SKIPPED_KEYS
    }
    write_files(out, {name: (json.dumps({**extra, **saved}, indent=2) + "\n").encode()})
    # A copied key may change what the written keys mean. So load the merged file, and compare the configurations.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            is_same = models.load_config(out) == config
        except ModelFileError:
            is_same = False
    if not is_same:
        write_files(out, {name: (json.dumps(saved, indent=2) + "\n").encode()})


def read_file(folder: Path, name: str) -> bytes:
    """Read one file of a directory."""
    return read_input(input_file(folder, name, hint="copy it again"), most_bytes=_MOST_BYTES)
