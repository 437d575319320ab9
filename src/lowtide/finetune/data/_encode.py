"""Tokenise text and records with any `tokenizers` tokenizer, in memory or into files.

A tokenizer.json comes from a third party, so its failures and ids are checked here. A long text is encoded in
overlapping windows, and an `Encoder` marks the tokens of a record that are learned. A `Store` has tokenised records in
files, so that data larger than memory is read once and then memory-mapped.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
from tokenizers import Tokenizer

from ...core import DataError, ModelFileError, OutputError, shortened, shown
from ._chat import ChatTemplate, Renderer, Spans
from ._normalize import Example
from ._read import data_files, read_records

_CONTEXT = 16
"""Number of prompt tokens decoded together with a continuation."""
_WINDOW = 2**19
"""Characters of a window."""
_OVERLAP = 2**11
"""Characters that two windows share."""
_RUN = 24
"""Number of consecutive tokens on which two windows have to agree."""
_ALPACA_FORMAT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
_TURN_FIELDS = {"role", "content", "weight", "tool_calls"}
"""Fields of a turn that are read or refused, whether or not the template mentions them."""
_BATCH_RECORDS = 256
_MOST_UNREAD = 100
_ABANDONED_SECONDS = 86_400
MOST_CLASSES = 254
"""Number of classes that fit next to 0, unlearned tokens, in the bytes of `Store.learned`."""
Targets = Literal["verdict", "class"]
"""Meanings of the field ``label`` of records."""
Source = Path | Sequence[str] | Mapping[str, str]
_TOKENS, _LEARNED, _ENDS, _METADATA = "tokens.bin", "learned.bin", "ends.bin", "about.json"


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True, offsets: bool = False) -> list[Any]:
    """Tokenise texts, and return an encoding for each, with `ids` and, if `offsets` is set, character ranges.

    If `special` is set, the tokenizer adds its special tokens, but no second BOS to a text that begins with BOS. A text
    of more than a million characters is encoded in windows. A tokenizer that fails raises ModelFileError.
    """
    try:
        encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        short = iter(encode_batch([text for text in texts if len(text) <= 2 * _WINDOW], add_special_tokens=special))
        encodings = [
            next(short) if len(text) <= 2 * _WINDOW else _encode_long(tokenizer, text, special=special)
            for text in texts
        ]
        # The special tokens of an empty text begin with BOS, if the tokenizer adds BOS. A text that starts with the
        # characters of BOS then has two of them, and the first is removed.
        added = tokenizer.encode("").ids if special else []
        for encoding in encodings if added else ():
            if not isinstance(encoding, LongEncoding) and encoding.ids[:2] == [added[0]] * 2:
                encoding.truncate(len(encoding) - 1, direction="left")
        return encodings
    # The library raises bare Exception, and a Rust panic arrives as PanicException, a subclass of BaseException only.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        hint = "copy tokenizer.json again; it lacks characters of the data, or is damaged"
        raise ModelFileError("the tokenizer cannot encode the data", got=shortened(error), hint=hint) from error


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that tokens add to a prompt; decoded alone they may lose a leading space."""
    # Decode both texts and compare, since a decoder may write a token in another way at the start of a text.
    prompt = list(prompt[-_CONTEXT:])
    before, whole = (tokenizer.decode(tokens) for tokens in (prompt, [*prompt, *ids]))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(ids))


def largest_id(tokenizer: Tokenizer, end_token: int | None) -> int:
    """Return the largest id among a tokenizer's vocabulary and the end token."""
    return max(*tokenizer.get_vocab().values(), -1, -1 if end_token is None else end_token)


def refuse_unknown_id(token_id: int, largest: int) -> None:
    """Raise ModelFileError when the largest id in the data, `token_id`, is beyond the vocabulary."""
    if token_id > largest:
        hint = "copy tokenizer.json again; its post_processor names ids that its vocabulary lacks"
        raise ModelFileError(f"the tokenizer returns id {token_id}, but its vocabulary ends at {largest}", hint=hint)


def name_documents(documents: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return texts by name; a sequence of texts gets numbered names."""
    if isinstance(documents, str):  # its characters would count as texts
        hint = "pass [text], or Path(name) for a file of records"
        raise DataError("a text is not a list of documents", got=shown(documents), hint=hint)
    if isinstance(documents, Mapping):
        return dict(documents)
    return {f"document {number}": text for number, text in enumerate(documents, 1)}


def check_ids(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer, vocab_size: int | None, where: str) -> None:
    """Raise DataError for tokens that a model has no embedding for, such as some added tokens of published models.

    `where` is the name of the text. With a `vocab_size` of None, nothing is refused.
    """
    if vocab_size is None or np.max(ids, initial=0) < vocab_size:
        return
    token_id = next(int(token) for token in ids if token >= vocab_size)
    got = f"{shown(tokenizer.id_to_token(token_id))}, id {token_id}; the model has ids below {vocab_size}"
    hint = "remove it from the text; the tokenizer has this token, but the weights do not"
    raise DataError(f"{where}: the model has no embedding for a token", got=got, hint=hint)


# --- long texts ------------------------------------------------------------------------------------------------------

# The `tokenizers` library takes about 150 bytes for each byte of a text that it encodes at once. So a long text is
# encoded in overlapping windows, and two windows are joined where they agree on a run of tokens. Subword tokenizers
# (BPE, Unigram, WordPiece) depend only on nearby characters. So after a common run, all tokens equal those of the whole
# text. Windows without a common run are encoded together.


class LongEncoding(NamedTuple):
    """Token ids of a text, and the character position in it at which each token starts and ends."""

    ids: np.ndarray[Any, Any]
    """int32 [N]."""
    offsets: np.ndarray[Any, Any]
    """int64 [N, 2]."""

    def __len__(self) -> int:
        return len(self.ids)


def _encode_long(tokenizer: Tokenizer, text: str, *, special: bool) -> LongEncoding:
    """Tokenise a text in windows; the tokens equal those of one call for the whole text, and take 40 bytes each."""
    parts = list(encode_pieces(tokenizer, io.StringIO(text), special=special))
    return LongEncoding(*(np.concatenate([part[field] for part in parts]) for field in range(2)))


def encode_pieces(tokenizer: Tokenizer, file: TextIO, *, special: bool) -> Iterator[LongEncoding]:
    """Tokenise a file in windows, from start to end, and yield the tokens piece by piece."""
    text = _Buffer(file)
    before, after = _special_ids(tokenizer) if special else ([], [])
    begin, end = 0, _WINDOW
    window = _encode_window(tokenizer, text, begin, end)
    if before and window.ids[:1].tolist() == before[:1]:  # a text that begins with BOS gets no second one
        before = before[1:]
    yield _special_encoding(before)
    while text[end : end + 1]:
        start, stop = max(end - _OVERLAP, begin + 1), end + _WINDOW
        following = _encode_window(tokenizer, text, start, stop)
        cut = _common_cut(window, following)
        if cut is None:  # encode both windows together, and search the next overlap for a common run
            window, end = _encode_window(tokenizer, text, begin, stop), stop
            continue
        # Tokens before the cut come from the first window, the others from the second. This drops the last tokens of
        # the first window and the first tokens of the second, which lack context on one side.
        yield LongEncoding(window.ids[: cut[0]], window.offsets[: cut[0]])
        window = LongEncoding(following.ids[cut[1] :], following.offsets[cut[1] :])
        begin, end = int(window.offsets[0, 0]), stop
        text.drop(begin)
    yield window
    yield _special_encoding(after)


class _Buffer:
    """Loaded part of a text file. Mutable: it reads more text, and drops text that is done."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._begin = file, "", 0

    def __getitem__(self, characters: slice) -> str:
        num_missing = characters.stop - self._begin - len(self._text)
        if num_missing > 0:
            self._text += self._file.read(num_missing)
        return self._text[characters.start - self._begin : characters.stop - self._begin]

    def drop(self, begin: int) -> None:
        """Drop the text before this position."""
        self._text, self._begin = self._text[begin - self._begin :], begin


def _special_encoding(ids: list[int]) -> LongEncoding:
    return LongEncoding(np.asarray(ids, np.int32), np.zeros((len(ids), 2), np.int64))


def _encode_window(tokenizer: Tokenizer, text: _Buffer, start: int, stop: int) -> LongEncoding:
    encoding = tokenizer.encode(text[start:stop], add_special_tokens=False)
    offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2) + start
    return LongEncoding(np.asarray(encoding.ids, np.int32), offsets)


def _common_cut(first: LongEncoding, second: LongEncoding) -> tuple[int, int] | None:
    """Return the indices of one token in both windows, in the middle of a common run; None without such a run.

    A token is common if both windows have it with the same id and offsets.
    """
    if not len(second):
        return None
    tail = int(np.searchsorted(first.offsets[:, 0], second.offsets[0, 0]))
    positions = {(*offset, id): index for index, (id, offset) in enumerate(_token_list(second, len(first) - tail))}
    run, previous = 0, -1
    for index, (id, offset) in enumerate(_token_list(LongEncoding(first.ids[tail:], first.offsets[tail:])), tail):
        match = positions.get((*offset, id))
        is_next = match is not None and (run == 0 or match == previous + 1)
        run, previous = (run + 1 if is_next else int(match is not None)), -1 if match is None else match
        # The previous token has to end where this one begins. Byte-level tokens can be parts of one character. Then
        # they have equal offsets, and a window that began between them would split the character.
        if run >= _RUN and first.offsets[index - _RUN // 2, 0] >= first.offsets[index - _RUN // 2 - 1, 1]:
            return index - _RUN // 2, previous - _RUN // 2
    return None


def _token_list(encoding: LongEncoding, num_tokens: int | None = None) -> list[tuple[int, tuple[int, int]]]:
    """Return ids and offsets as Python integers, which are faster to compare one by one than NumPy scalars."""
    offsets = encoding.offsets[:num_tokens].tolist()
    return [(id, (start, end)) for id, (start, end) in zip(encoding.ids[:num_tokens].tolist(), offsets, strict=True)]


def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    text = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not text:
        return list(encoding.ids), []
    return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]


class Encoder:
    """Tokeniser of records of one kind. Mutable: the first chat starts a process for its template.

    Text, and a prompt with its completion, get the tokenizer's special tokens and an end token. A chat has only the
    special tokens of its template. An Alpaca record becomes a chat if the model has a template, otherwise the text that
    Alpaca was trained with. Plain text is learned as a whole, and so is every record if `loss_on` is ``all``. With
    ``completion``, only the assistant's turns, completions and outputs are learned, with the tokens that end them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        end_token: int | None,
        loss_on: str,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer, self._template, self._loss_on = tokenizer, template, loss_on
        self._end_token, self._vocab_size = end_token, vocab_size
        self._largest = largest_id(tokenizer, end_token)
        self._renderer: Renderer | None = None

    def close(self) -> None:
        """Stop the process that renders templates, if it was started."""
        if self._renderer is not None:
            self._renderer.close()

    def encode(self, examples: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenise records of one kind; return for each the ids, int32 [L], and a mask of learned tokens, uint8 [L].

        A chat without a template, a chat that the template refuses, and tokens without an embedding raise DataError.
        """
        examples = [self._to_chat(example) for example in examples]
        is_chat = bool(examples) and examples[0].kind == "chat"
        rendered = [self._text_and_spans(example) for example in examples]
        encodings = encode(self._tokenizer, [text for text, _ in rendered], special=not is_chat, offsets=True)
        for example, encoding in zip(examples, encodings, strict=True):
            check_ids(encoding.ids, self._tokenizer, self._vocab_size, example.where)
        pairs = zip(encodings, rendered, strict=True)
        return [self._ids_and_mask(encoding, spans, is_chat=is_chat) for encoding, (_, spans) in pairs]

    def unread_in(self, example: Example) -> set[str]:
        """Return the fields of a chat's turns that the template does not mention, such as ``messages.name``."""
        if self._template is None:
            return set()
        fields = {name for message in example.messages for name in message} - _TURN_FIELDS
        return {f"messages.{name}" for name in fields if name not in self._template.source}

    def _to_chat(self, example: Example) -> Example:
        if example.kind != "alpaca" or self._template is None:
            return example
        question = f"{example.prompt}\n\n{example.more}" if example.more.strip() else example.prompt
        messages = ({"role": "user", "content": question}, {"role": "assistant", "content": example.text})
        return Example(kind="chat", where=example.where, messages=messages)

    def _text_and_spans(self, example: Example) -> tuple[str, Spans | None]:
        """Return a record as text, and the character spans that are learned; None means that all text is learned."""
        is_all_learned = self._loss_on == "all"
        if example.kind in ("text", "pair"):
            return example.text, None
        if example.kind != "chat":
            prompt = example.prompt if example.kind == "prompt" else _alpaca_prompt(example)
            text = prompt + example.text  # tokenised together: a token with characters of both is learned
            return text, None if is_all_learned else [(len(prompt), len(text))]
        if self._template is None:
            hint = "copy chat_template.jinja from the model's source, or name a template: --chat-template FILE"
            raise DataError(f"{example.where}: the record has messages, but the model has no chat template", hint=hint)
        if is_all_learned and any(message.get("weight") == 0 for message in example.messages):
            hint = "leave --loss-on out, or remove the weight from the record"
            raise DataError(f"{example.where}: a turn has the weight 0, but --loss-on all learns all tokens", hint=hint)
        if self._renderer is None:
            self._renderer = Renderer(self._template)
        text, spans = self._renderer.render(example, turns=not is_all_learned)
        return text, None if is_all_learned else spans

    def _ids_and_mask(self, encoding: Any, spans: Spans | None, *, is_chat: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a record, and the mask of the tokens that have a character in one of the spans."""
        ids = np.asarray(encoding.ids, np.int32)
        mask = np.full(len(ids), spans is None, np.uint8)
        if spans:
            offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
            for start, end in spans:
                # Half-open intervals overlap if each begins before the other ends.
                mask |= ((offsets[:, 0] < end) & (offsets[:, 1] > start)).astype(np.uint8)
        if not is_chat and self._end_token is not None:
            # The end token is always learned, even if the tokenizer's special tokens already contain it.
            if ids[-1:].tolist() != [self._end_token]:
                ids = np.append(ids, np.int32(self._end_token))
                mask = np.append(mask, np.uint8(1))
            mask[-1] = 1
        refuse_unknown_id(int(np.max(ids, initial=0)), self._largest)
        return ids, mask


def _alpaca_prompt(example: Example) -> str:
    has_input = bool(example.more.strip())
    input_text = f"### Input:\n{example.more}\n\n" if has_input else ""
    context = ", paired with an input that provides further context" if has_input else ""
    return _ALPACA_FORMAT.format(context, example.prompt, input_text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Store:
    """Tokens of all documents, one after the other.

    A store is a folder in ``$LOWTIDE_CACHE/data``, by default in ``~/.cache/lowtide/data``. You can delete it at any
    time except during a run.
    """

    tokens: np.ndarray
    """Token ids, int32 [N], memory-mapped."""
    learned: np.ndarray
    """1 for learned tokens, or 1 plus the target of the record; uint8 [N], memory-mapped."""
    offsets: np.ndarray
    """Index of the first token of each document, then N, int64 [D + 1]."""
    kind: str
    """Kind of the records, as in `Example`."""
    group: int = 1
    """Number of documents of a record: 2 for preferences, the preferred answer first, else 1."""
    has_targets: bool = False
    """Whether records have targets: classes, or with a group of 2, verdicts."""
    num_blank: int
    """Number of blank records, which were skipped."""
    digest: str
    """SHA-256 of `tokens` and `learned`."""
    unread: tuple[str, ...] = ()
    """Columns of the records that are not read, in sorted order."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets)


def open_store(
    source: Source,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    columns: Mapping[str, str],
    end_token: int | None,
    loss_on: str,
    vocab_size: int | None = None,
    targets: Targets | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Tokenise records into files, or open the files of an earlier call.

    With the targets ``verdict``, records are single answers with a label, as in KTO: each becomes a pair of documents,
    of which the second has an answer to the next prompt. With ``class``, records are texts with the number of a class.

    A template that writes the date and has no day gets today as its day, since a store must not depend on the time of
    day. The total is unknown, so both arguments of `on_progress` are the number of finished records.
    """
    settings: dict[str, Any] = {"columns": dict(columns), "end": end_token, "loss_on": loss_on, "code": _code_hash()}
    if targets:
        settings["targets"] = targets
    if vocab_size is not None and largest_id(tokenizer, end_token) >= vocab_size:
        settings["vocab_size"] = vocab_size  # a store written without this check may contain refused tokens
    template_key: list[Any] | None = None
    if template is not None:
        if template.writes_date and template.day is None:
            template = dataclasses.replace(template, day=datetime.date.today().isoformat())
        variables = {**template.special, **template.arguments}
        template_key = [template.source, variables, *([template.day] if template.writes_date else [])]
        settings |= {} if template.system is None else {"system": template.system}
    # The name covers every input of the tokenisation, so that a changed input leads to another store.
    hasher = hashlib.sha256(tokenizer.to_str().encode())
    hasher.update(json.dumps([settings, template_key], sort_keys=True).encode())
    for piece in _digests(source):
        hasher.update(piece)
    cache_path = os.environ.get("LOWTIDE_CACHE")
    cache = (Path(cache_path).expanduser() if cache_path else Path.home() / ".cache" / "lowtide") / "data"
    folder = cache / hasher.hexdigest()
    if not folder.is_dir():
        encoder = Encoder(tokenizer, template, end_token=end_token, loss_on=loss_on, vocab_size=vocab_size)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(cache)
            # The store is renamed when it is complete, so a killed run leaves no broken store.
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache, ignore_cleanup_errors=True) as name:
                _write_store(Path(name), source, columns, encoder, targets, on_progress)
                _publish(Path(name), folder)
        except OSError as error:
            problem = f"{cache}: tokenised data cannot be written here"
            hint = "name another folder in the variable LOWTIDE_CACHE"
            raise OutputError(problem, got=error.strerror or str(error), hint=hint) from error
        finally:
            encoder.close()
    return _map_store(folder)


@functools.cache
def _code_hash() -> str:
    """Return a hash of this package's files, since changed code may give other tokens or masks for the same records."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _digests(source: Source) -> Iterator[bytes]:
    if isinstance(source, Path):
        for path in data_files(source):
            with open(path, "rb") as file:
                yield path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest()
    else:
        yield from (hashlib.sha256(text.encode()).digest() for text in name_documents(source).values())


def _remove_abandoned(cache_folder: Path) -> None:
    """Remove unfinished folders that no process has written for a day, since their runs were killed."""
    for folder in cache_folder.glob("unfinished-*"):
        try:
            times = [file.stat().st_mtime for file in (folder, *folder.iterdir())]
        except OSError:  # another process has renamed or removed it, or it belongs to another user
            continue
        if time.time() - max(times) > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _write_store(
    folder: Path,
    source: Source,
    columns: Mapping[str, str],
    encoder: Encoder,
    targets: Targets | None,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    is_path = isinstance(source, Path)
    records = read_records(source, columns) if is_path else text_examples(name_documents(source))
    records = _with_mismatches(records) if targets == "verdict" else map(partial(_check_target, targets), records)
    digest = hashlib.sha256()
    kind, group, num_blank, count, end = "", 1, 0, 0, 0
    batch: list[Example] = []
    unread: set[str] = set()
    with (
        open(folder / _TOKENS, "wb") as tokens,
        open(folder / _LEARNED, "wb") as learned,
        open(folder / _ENDS, "wb") as ends,
    ):

        def flush() -> None:
            nonlocal end
            for example, (ids, mask) in zip(batch, encoder.encode(batch), strict=True):
                end += len(ids)
                mask = mask * np.uint8(1 + (example.target or 0)) if targets else mask
                for file, content in ((tokens, ids.tobytes()), (learned, mask.tobytes())):
                    file.write(content)
                    digest.update(content)
                ends.write(np.int64(end).tobytes())
            batch.clear()
            if on_progress is not None:
                on_progress(count, count)

        for example in records:
            count += 1
            if example is None:
                num_blank += 1
                continue
            kind = example.kind
            unread.update(name for name in example.unread if not targets or name != "label")
            unread.update(encoder.unread_in(example))
            batch.append(example)
            if example.rejected is not None:
                group = 2
                batch.append(example.rejected)
            if len(batch) >= _BATCH_RECORDS:
                flush()
        flush()
        for file in (tokens, learned, ends):
            file.flush()
            os.fsync(file.fileno())
    if not end:
        problem = f"all {count} records are blank" if count else "there are no records"
        raise DataError(f"{source if is_path else 'text'}: {problem}", hint="check --data and --columns")
    metadata: dict[str, Any] = {
        "kind": kind,
        "group": group,
        "has_targets": targets is not None,
        "num_blank": num_blank,
        "digest": digest.hexdigest(),
        "num_tokens": end,
    }
    metadata["unread"] = sorted(unread)[:_MOST_UNREAD]
    (folder / _METADATA).write_text(json.dumps(metadata))


def _check_target(targets: Targets | None, example: Example | None) -> Example | None:
    if example is None:
        return None
    if targets == "class" and (
        example.kind != "text" or not 0 <= int(-1 if example.target is None else example.target) < MOST_CLASSES
    ):
        expected = f"text and label, a whole number from 0 to {MOST_CLASSES - 1}"
        hint = "number the classes; other names of columns: --columns text=sentence,label=class"
        raise DataError(f"{example.where}: the record has no text with a class", expected=expected, hint=hint)
    if targets is None and example.target is False and example.kind != "text" and example.rejected is None:
        hint = "remove such records: training on them would teach what was rejected; --objective kto reads them"
        raise DataError(f"{example.where}: label is false, so the answer was rejected", hint=hint)
    return example


def _with_mismatches(records: Iterable[Example | None]) -> Iterator[Example | None]:
    """Yield each answer with a label; its `rejected` is the same prompt with an answer to the next prompt."""
    num_blank = 0

    def answers() -> Iterator[Example]:
        nonlocal num_blank
        for record in records:
            if record is None:
                num_blank += 1
            elif record.rejected is None:
                yield _labelled(record)
            else:
                pair = ((True, record), (False, record.rejected))
                yield from (_labelled(dataclasses.replace(e, target=label, rejected=None)) for label, e in pair)

    first: list[Example] = []
    previous: list[Example] = []
    for _, group in itertools.groupby(answers(), lambda e: (e.prompt, e.more, e.messages[: e.first])):
        current = list(group)
        yield from map(_with_answer_of, previous, itertools.cycle(current))
        first, previous = first or current, current
    yield from map(_with_answer_of, previous, itertools.cycle(first))
    yield from itertools.repeat(None, num_blank)


def _labelled(example: Example) -> Example:
    """Return an example with a prompt, an answer and a label; in a chat, the answer is the last turn by default."""
    if example.target not in (0, 1) or example.kind == "text" or (example.kind == "chat" and len(example.messages) < 2):
        expected = "prompt and completion, or messages, with a label that is true or false; or chosen and rejected"
        raise DataError(f"{example.where}: the record has no answer with a label", expected=expected)
    if example.kind == "chat" and not example.first:
        return dataclasses.replace(example, first=len(example.messages) - 1)
    return example


def _with_answer_of(example: Example, other: Example) -> Example:
    messages = example.messages[: example.first] + other.messages[other.first :]
    mismatch = dataclasses.replace(example, text=other.text, messages=messages)
    return dataclasses.replace(example, rejected=mismatch)


def text_examples(texts: Mapping[str, str]) -> Iterator[Example]:
    """Yield each text as a record of the kind ``text``; its name becomes the location for errors."""
    return (Example(kind="text", where=name, text=text) for name, text in texts.items())


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process has written the same store in the meantime
            raise


def _map_store(folder: Path) -> Store:
    try:
        metadata: dict[str, Any] = json.loads((folder / _METADATA).read_text())
        tokens = np.memmap(folder / _TOKENS, np.int32, "r")
        learned = np.memmap(folder / _LEARNED, np.uint8, "r")
        ends = np.fromfile(folder / _ENDS, np.int64)
        if not len(tokens) == len(learned) == ends[-1] == metadata["num_tokens"]:
            raise ValueError("the lengths of its files differ")
        return Store(
            tokens=tokens,
            learned=learned,
            offsets=np.concatenate([np.zeros(1, np.int64), ends]),
            unread=tuple(map(str, metadata["unread"])),
            **{name: metadata[name] for name in ("kind", "group", "has_targets", "num_blank", "digest")},
        )
    except (OSError, ValueError, LookupError) as error:
        hint = "delete this folder; the next run writes it again"
        raise DataError(f"{folder}: the store is truncated", got=shortened(error), hint=hint) from error
