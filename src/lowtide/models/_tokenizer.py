"""Load the tokenizer of a model directory, and check `tokenizer.json` before this process parses it.

The tokenizers library is written in Rust. A stack overflow, a failed allocation or a panic in it aborts the process,
which no `except` catches. So this module first checks JSON, depth, ids and sizes. Then a subprocess loads the file and
encodes a line of text. This takes about 0.1 s; for a large vocabulary, it takes as long as a second load.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer

from ..core import ModelFileError, input_file, parse_json, read_input, shortened, shown, validate

_MOST_BYTES = 256 * 1024**2
_MOST_CONFIG_BYTES = 64 * 1024**2
_CONFIG, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_MOST_SECONDS = 120
_COPY_HINT = "the file is damaged; copy it from its source again"
_PROBE = "The tide, 12 m: naïve ébb 潮\n\tdef f(x): return {'a': 1}  # 🌊 <s> </s>"

_checked_digests = set[bytes]()

# The subprocess limits its CPU time and address space, and writes no core dump: a crash is an expected outcome here.
_GUARD = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import resource
    for name, most in (("RLIMIT_CORE", 0), ("RLIMIT_CPU", int(sys.argv[2])), ("RLIMIT_AS", int(sys.argv[3]))):
        what = getattr(resource, name)
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
except ImportError:
    pass
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
tokenizer.no_truncation()
tokenizer.no_padding()
try:
    tokenizer.decode(tokenizer.encode(sys.argv[4]).ids)
except Exception:
    pass  # such as a character that the vocabulary lacks; this test is only for errors that end the process
"""


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a model directory.

    Args:
        directory: the folder with `tokenizer.json`. Further tokens in `tokenizer_config.json`,
            `special_tokens_map.json` and `added_tokens.json` are added as transformers adds them.

    Returns:
        The tokenizer, from the `tokenizers` library, with the file's truncation and padding switched off.

    Raises:
        ModelFileError: when `tokenizer.json` is missing, or a file is damaged. Also when another file lists a token
            that `tokenizer.json` lacks, with an id that is not the next free id.
    """
    hint = "save the tokenizer in the fast format: transformers' AutoTokenizer(...).save_pretrained writes it"
    path = input_file(directory, "tokenizer.json", hint=hint)
    content = read_input(path, most_bytes=_MOST_BYTES)
    _check(content, str(path))
    try:
        tokenizer = Tokenizer.from_buffer(content)
        # A file may contain the truncation and padding settings of its author; they would silently change texts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelFileError(f"{path}: not a tokenizer", got=shortened(error), hint=_COPY_HINT) from error
    _add_tokens(tokenizer, Path(directory))
    return tokenizer


def load_special_tokens(directory: str | Path) -> dict[str, str]:
    """Load the special tokens of a tokenizer's folder.

    Args:
        directory: the folder, with `tokenizer_config.json`, `special_tokens_map.json`, both or neither.

    Returns:
        Texts by name, such as ``eos_token``. If both files have a name, `tokenizer_config.json` takes precedence.

    Raises:
        ModelFileError: for a damaged file.
    """
    tokens: dict[str, str] = {}
    for file in (_SPECIAL, _CONFIG):
        for name, value in _read(Path(directory), file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _read(directory: Path, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file of the folder, or an empty object if it is absent."""
    if not (directory / name).is_file():
        return {}
    path = input_file(directory, name, hint="copy the model's files again")
    return parse_json(read_input(path, most_bytes=_MOST_CONFIG_BYTES), str(path))


def _add_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Add the tokens that other files list and `tokenizer.json` lacks, in the order that transformers uses."""
    from ._schema import AddedTokenFile

    ids, tokens = dict[str, int](), dict[str, AddedToken]()
    special = load_special_tokens(directory)
    decoder = _read(directory, _CONFIG).get("added_tokens_decoder")
    tokens_by_id = decoder if isinstance(decoder, dict) else {}
    entries = [
        {**token, "id": int(id)} for id, token in tokens_by_id.items() if id.isdecimal() and isinstance(token, dict)
    ]
    if not tokens_by_id:
        ids_by_text = _read(directory, _ADDED)
        entries = [
            {"id": id, "content": text, "special": text in special.values(), "normalized": text not in special.values()}
            for text, id in ids_by_text.items()
        ]
    source = f"{directory / (_CONFIG if tokens_by_id else _ADDED)}: added tokens"
    for entry in entries:
        token = validate(AddedTokenFile, entry, source, hint=_COPY_HINT)
        ids[token.content] = token.id
        fields = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}
        tokens[token.content] = AddedToken(**token.model_dump(include=fields))
    order = sorted(tokens, key=ids.__getitem__)
    existing = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in dict.fromkeys([*order, *special.values()]):
        if text in existing or not text:
            continue
        token = tokens.get(text, AddedToken(text, special=True, normalized=False))
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (id := tokenizer.token_to_id(text)) != ids.get(text, id):
            problem = f"{source}: {shown(text)} has id {ids[text]}, but the next free id of tokenizer.json is {id}"
            hint = "copy all files of the tokenizer from one source, or save it again with transformers"
            raise ModelFileError(problem, hint=hint)


def _check(content: bytes, filename: str) -> None:
    """Raise unless the file is safe to load; each content is checked once per process."""
    from ._schema import TokenizerFile

    digest = hashlib.sha256(content).digest()
    if digest in _checked_digests:
        return
    validate(TokenizerFile, parse_json(content, filename), f"{filename}: not a tokenizer", hint=_COPY_HINT)
    if sys.executable:  # empty when Python is embedded in another program, where no subprocess can be started
        _check_in_subprocess(content, filename)
    _checked_digests.add(digest)


def _check_in_subprocess(content: bytes, filename: str) -> None:
    most_bytes = 8 * 1024**3 + 100 * len(content)
    # -I and -S keep site-packages out of the subprocess, so the folder of tokenizers is passed as an argument.
    site_packages = str(Path(tokenizers.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", _GUARD, site_packages, str(_MOST_SECONDS), str(most_bytes), _PROBE]
    # Threads take address space, which is limited.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            command, input=content, env=environment, capture_output=True, timeout=_MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        got = f"no result after {_MOST_SECONDS} s"
        raise ModelFileError(f"{filename}: not a tokenizer", got=got, hint=_COPY_HINT) from error
    if process.returncode:
        causes = process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        if process.returncode < 0:
            causes.insert(0, f"a process that signal {-process.returncode} ended while it read the file")
        got = shortened(": ".join(causes))
        raise ModelFileError(f"{filename}: not a tokenizer", got=got, hint=_COPY_HINT)
