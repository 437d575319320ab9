"""Read untrusted files within limits, and write files either completely or not at all; this needs no JAX.

Loading a model opens files that strangers wrote. All files are read in the same steps. No size
that a file states decides how much memory these steps allocate:

1. `input_file` accepts only a regular file inside of its folder. A link may lead to a file of the same folder. In a
   snapshot of a Hugging Face cache (``<repository>/snapshots/<revision>``) a link may also lead to the blobs of the
   same repository (``<repository>/blobs``). Any other link is refused, so a model that was unpacked from an archive
   consists only of files of the archive. The folder itself may be reached through links, since the user chose it.
2. `read_input` reads at most a given number of bytes.
3. `parse_json` accepts objects in standard JSON without duplicate names, without non-finite numbers, and with at most
   `MAX_DEPTH` levels. `parse_json_value` also accepts values other than objects.
4. `validate` checks types and ranges with a pydantic model. Text does not count as a number or a boolean.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ._errors import ModelFileError, OutputError
from ._units import format_bytes

if TYPE_CHECKING:
    from pydantic import BaseModel

Schema = TypeVar("Schema", bound="BaseModel")

MAX_DEPTH = 64
"""The most levels of nested arrays and objects; the deepest files of today have about ten."""
MAX_DIGITS = 40
"""The most digits of an integer."""
_COPY_AGAIN = "copy the file from its source again"
_PACKAGE_FOLDER = Path(__file__).parents[1].resolve()  # an installer may link the files of a package to its own store


def input_file(folder: str | os.PathLike[str], name: str, *, expected: str | None = None, hint: str) -> Path:
    """Return the path of a file in a folder if it is a regular file that belongs there.

    Args:
        folder: the folder, as the user named it.
        name: the file's name, without a folder.
        expected: what the folder should hold, for the message about a missing file.
        hint: the remedy for a missing file.

    Returns:
        The path as the user named it: links are not resolved, since messages show it.

    Raises:
        ModelFileError: when the name leads to another folder, the file is missing, or access fails; when a link
            leads out of the folder (except to blobs of a Hugging Face cache); for a folder, a pipe or a device.
    """
    path = Path(folder) / name
    if not name or name in (".", "..") or "\0" in name or Path(name).name != name or "\\" in name:
        hint = "copy the model from its source again; all of its files belong in one folder"
        raise ModelFileError(f"{folder}: {shown(name)} is not the name of a file in this folder", hint=hint)
    try:
        real, home = path.resolve(strict=True), Path(folder).resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        if isinstance(error, NotADirectoryError) and Path(folder).is_file():
            hint = f"give the folder that holds it: {shortened(Path(folder).parent)}"
            raise ModelFileError(f"{shortened(folder)} is a file, not a folder with {name}", hint=hint) from error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ModelFileError(f"{shortened(path)}: no such file", expected=expected, hint=hint) from error
        hint = "check the file's name, and the permissions of the file and its folder"
        raise ModelFileError(f"{shortened(path)}: cannot be read", got=shortened(error), hint=hint) from error
    # Links are resolved on both sides, so that a folder that is itself reached through a link passes.
    # A Hugging Face cache keeps the content of a snapshot's files in another folder.
    blobs = [(parent.parent / "blobs").resolve() for parent in home.parents if parent.name == "snapshots"][:1]
    is_inside = any(real.is_relative_to(allowed) for allowed in (home, *blobs))
    if not (is_inside or home.is_relative_to(_PACKAGE_FOLDER)):
        hint = "if you trust it, copy the file itself there (cp -L), or give the folder that it leads to"
        raise ModelFileError(f"{path}: the link leads out of the folder, to {real}", hint=hint)
    if not stat.S_ISREG(mode):
        kinds = {"d": "a folder", "p": "a pipe", "c": "a device", "b": "a device", "s": "a socket"}
        kind = kinds.get(stat.filemode(mode)[0], "something else")
        hint = "write the content to a file; a pipe or a device has no end"
        raise ModelFileError(f"{path}: not a regular file but {kind}", hint=hint)
    return path


def read_input(path: Path, *, most_bytes: int) -> bytes:
    """Read the content of a file whose path `input_file` returned.

    Raises:
        ModelFileError: when the file cannot be read or has more than `most_bytes`; a larger file is not read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # One byte more than allowed, because the file may grow after `fstat`.
            content = file.read(most_bytes + 1) if size <= most_bytes else b""
    except OSError as error:
        hint = "check the file's permissions, or copy it again"
        raise ModelFileError(f"{path}: cannot be read", got=str(error), hint=hint) from error
    if (size := max(size, len(content))) > most_bytes:
        problem = f"{path}: too large with {format_bytes(size)}, at most {format_bytes(most_bytes)} are accepted"
        raise ModelFileError(problem, hint="copy it from its source again; a file of this name is never so large")
    return content


def parse_json_value(content: bytes, file_name: str, *, allow_nan: bool = False) -> Any:
    """Parse a JSON value of any type; refuse content whose meaning the JSON standard leaves open.

    With `allow_nan`, numbers may be NaN or infinite, as Python writes them.

    Raises:
        ModelFileError: when the content is not JSON, repeats a name in one object, or has an unpaired surrogate; when
            it exceeds `MAX_DEPTH` levels or `MAX_DIGITS` digits; for non-finite numbers without `allow_nan`.
    """
    parse_number = float if allow_nan else _parse_number
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_check_unique,
            parse_constant=parse_number,
            parse_float=parse_number,
            parse_int=_parse_integer,
        )
        _check_values(value)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file_name}: not readable as JSON", got=shortened(error), hint=_COPY_AGAIN) from error
    return value


def parse_json(content: bytes, file_name: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """Parse a JSON object with the strictness of `parse_json_value`.

    Raises:
        ModelFileError: when the content is not a JSON object, or `parse_json_value` refuses it.
    """
    value = parse_json_value(content, file_name, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise ModelFileError(f"{file_name}: not a JSON object", got=type(value).__name__, hint=_COPY_AGAIN)
    return value  # pyright: ignore[reportUnknownVariableType]


def validate(schema: type[Schema], raw: Any, file_name: str, *, hint: str) -> Schema:
    """Return a parsed file as an instance of its schema, a pydantic model.

    Raises:
        ModelFileError: with the names of the first entries that are missing or unusable.
    """
    from pydantic import ValidationError  # takes a quarter of a second; `import lowtide` does not need it

    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        line_errors = error.errors(include_url=False, include_context=False)
        # An entry of a union type has one error per type: report the one whose location is deepest.
        candidates = [item for item in line_errors[:9] if item["loc"][:1] == line_errors[0]["loc"][:1]]
        first = max(candidates, key=lambda item: _entry_name(raw, item["loc"]).count("."))
        name = _entry_name(raw, first["loc"])
        other_names = sorted({_entry_name(raw, item["loc"]) for item in line_errors[:9] if item not in candidates})
        remedy = f"also look at {shortened(', '.join(other_names))}; {hint}" if other_names else hint
        if first["type"] == "missing":
            *parents, last = first["loc"]  # the missing name itself is not in `raw`
            name = f"{_entry_name(raw, tuple(parents))}.{last}" if parents else str(last)
            raise ModelFileError(f"{file_name}: {name} is missing", hint=remedy) from error
        expected = re.sub(r"a valid dictionary or instance of \w+|a valid dictionary", "a JSON object", first["msg"])
        expected = expected.removeprefix("Input should be ").removeprefix("Value error, ")
        problem = f"{file_name}: {name} has an unusable value"
        raise ModelFileError(problem, expected=expected, got=shown(first["input"]), hint=remedy) from error


def shown(value: Any) -> str:
    """Format a value for a message, shortened if it is long."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python writes
        text = type(value).__name__
    return shortened(text)


def shortened(value: Any, most: int = 200) -> str:
    """Return a value as text for a message, cut after `most` characters, with unpaired surrogates escaped."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that a model's path refers to, or None for a Hugging Face directory; opens no file.

    The path leads to a GGUF file, or to a folder with a GGUF file but neither `config.json` nor safetensors files.

    Raises:
        ModelFileError: when the file is missing or not a regular file, and for a folder with several GGUF files.
    """
    path = Path(path)
    if not path.is_dir():
        is_named = path.suffix.lower() == ".gguf"
        return input_file(path.parent, path.name, hint="check the path; nothing is downloaded") if is_named else None
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return None  # the reader of the folder raises the error
    matches = [name for name in names if name.lower().endswith(".gguf")]
    if not matches or "config.json" in names or any(name.endswith((".safetensors", ".index.json")) for name in names):
        return None
    if len(matches) > 1:
        hint = f"name the file, for instance {path / matches[0]}"
        raise ModelFileError(f"{path} holds several GGUF files", got=shortened(", ".join(matches)), hint=hint)
    return input_file(path, matches[0], hint="check the folder; nothing is downloaded")


def write_files(directory: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Write files that belong together into a folder, replacing older files of the same names.

    All files are written under temporary names first, and renamed when every one is on disk. So a reader never sees
    half a file, and a full disk leaves the older files unchanged.

    Args:
        directory: the folder; it and its parents are created if they are missing.
        contents: file name to content, in the order of renaming.

    Raises:
        OutputError: when the folder or a file in it cannot be written; no temporary file remains.
    """
    folder = Path(directory)
    staged: dict[Path, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
            staged[temporary] = folder / name
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                # Without this a crash after the rename could leave an empty file under the final name.
                os.fsync(file.fileno())
        for temporary, final in list(staged.items()):
            os.replace(temporary, final)
            del staged[temporary]
        _sync(folder)
    except OSError as error:
        problem, got = f"{folder}: cannot write {', '.join(contents)}", f"{type(error).__name__}: {error}"
        raise OutputError(problem, got=got, hint="choose another folder, or change its permissions") from error
    finally:
        for temporary in staged:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def check_writable(directory: Path, problem: str, hint: str) -> None:
    """Create a folder and its parents, and raise if no file can be created in the folder.

    Raises:
        OutputError: with the message `problem`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OutputError(f"{directory}: {problem}", got=error.strerror or error, hint=hint) from error


def _entry_name(raw: Any, location: tuple[int | str, ...]) -> str:
    """Return the dotted name of an entry; skip parts of pydantic's location that are not in `raw`, such as types."""
    parts: list[str] = []
    for part in location:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            if part != location[-1] or parts:
                continue
        parts.append(shortened(part, 80))
    return ".".join(parts) or "the file"


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{shown(counts.most_common(1)[0][0])} occurs twice in one object")
    return values


def _parse_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text, 40)} is not a finite number")
    return number


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _check_values(value: Any) -> None:
    """Walk a value without recursion; raise for deep nesting or invalid Unicode, on which later code would fail."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")  # raises for half a surrogate pair
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
