"""Reading `tokenizer.json`, which code in another language parses.

The tokenizers library is written in Rust. A file can make it end the process, which no `except` sees: by a stack that
overflows, memory that cannot be had, or a panic. So what can be checked is checked first (JSON, depth, ids, sizes),
and then a process of its own reads the file and encodes a line of text before this one does. It costs a tenth of a
second for a small vocabulary, and one reading more for a large one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from ..core import ModelFileError, input_file, parse_json, read_input, shortened, validate

_MOST_BYTES = 256 * 1024**2
_MOST_SECONDS = 120
_AGAIN = "the file is damaged; copy it from its source again"
_PROBE = "The tide, 12 m: naïve ébb 潮\n\tdef f(x): return {'a': 1}  # 🌊 <s> </s>"

_harmless = set[bytes]()

# Without the address space of a small machine, and without a core dump: a crash is an answer here.
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
    pass  # a vocabulary may lack a character; what ends the process is looked for
"""


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a model directory.

    Args:
        directory: the folder with `tokenizer.json`.

    Returns:
        The tokenizer, of the `tokenizers` library, with the truncation and padding that the file may ask for off.

    Raises:
        ModelFileError: when `tokenizer.json` is missing or damaged.
    """
    path = input_file(
        directory,
        "tokenizer.json",
        hint="save the tokenizer in the fast format: transformers' AutoTokenizer(...).save_pretrained writes it",
    )
    content = read_input(path, most_bytes=_MOST_BYTES)
    _check(content, str(path))
    try:
        tokenizer = Tokenizer.from_buffer(content)
        # A file may carry the truncation and padding of whoever saved it; text would silently be cut or filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelFileError(f"{path}: not a tokenizer", got=shortened(error), hint=_AGAIN) from error


def _check(content: bytes, where: str) -> None:
    """Raise unless a file can be read without harm; remembered, so that a file is tried once in a process."""
    from ._schema import TokenizerFile

    digest = hashlib.sha256(content).digest()
    if digest in _harmless:
        return
    validate(TokenizerFile, parse_json(content, where), f"{where}: not a tokenizer", hint=_AGAIN)
    if sys.executable:  # not where Python is inside of another program: there is nothing to start
        _try_elsewhere(content, where)
    _harmless.add(digest)


def _try_elsewhere(content: bytes, where: str) -> None:
    most_bytes = 8 * 1024**3 + 100 * len(content)
    where_from = str(Path(tokenizers.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", _GUARD, where_from, str(_MOST_SECONDS), str(most_bytes), _PROBE]
    alone = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # threads take address space
    try:
        done = subprocess.run(
            command, input=content, env=alone, capture_output=True, timeout=_MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        got = f"it was not read in {_MOST_SECONDS} s"
        raise ModelFileError(f"{where}: not a tokenizer", got=got, hint=_AGAIN) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        how = f"reading it ended a process by signal {-done.returncode}" if done.returncode < 0 else ""
        raise ModelFileError(
            f"{where}: not a tokenizer", got=shortened(": ".join(filter(None, [how, *said[-1:]]))), hint=_AGAIN
        )
